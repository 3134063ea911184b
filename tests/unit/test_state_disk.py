"""Snapshots on disk: whole or absent, and never another run's."""

from pathlib import Path

import pytest

from swarmnet.ids import RunId
from swarmnet.state.disk import snapshot_path, write_snapshot

ONE, OTHER = RunId("a1" * 32), RunId("b2" * 32)


def test_two_runs_in_one_directory_do_not_overwrite_each_other(tmp_path: Path) -> None:
    paths = [snapshot_path(tmp_path, run, 0, 200) for run in (ONE, OTHER)]
    for path, data in zip(paths, (b"one", b"other"), strict=True):
        write_snapshot(path, data)
    assert [path.read_bytes() for path in paths] == [b"one", b"other"]
    assert paths[0].relative_to(tmp_path) == Path("snapshots/a1a1a1a1a1a1/stage-0-step-200.safetensors")


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = snapshot_path(tmp_path, ONE, 0, 1)
    write_snapshot(path, b"old")

    def full(_handle: int) -> None:
        raise OSError(28, "disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_snapshot(path, b"new")
    assert path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path]
