"""What a process holds alone: nobody else gets it, and the kernel gives it back."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import swarmnet
from swarmnet.config.peer import PeerConfig
from swarmnet.errors import UsageError
from swarmnet.manifest.file import to_toml
from swarmnet.manifest.schema import Manifest
from swarmnet.net.dht_daemon import PREFIX
from swarmnet.net.identity import FileLock, own_directory, own_identity, sweep


def test_a_file_is_held_by_one_until_it_is_released(tmp_path: Path) -> None:
    mine = FileLock.file(tmp_path / "lock")
    assert mine is not None and FileLock.file(tmp_path / "lock") is None
    mine.release()
    mine.release()
    assert FileLock.file(tmp_path / "lock") is not None


def test_who_waited_for_a_removed_directory_hears_of_it(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    first = FileLock.directory(directory, wait=False)
    assert first is not None and FileLock.directory(directory, wait=False) is None
    said: list[BaseException] = []

    def wait() -> None:
        try:
            FileLock.directory(directory, wait=True)
        except FileNotFoundError as error:
            said.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    shutil.rmtree(directory)
    first.release()
    waiting.join()
    assert len(said) == 1


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short one: the address of a socket holds about a hundred characters."""
    with tempfile.TemporaryDirectory(prefix="hold-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def test_a_sweep_spares_a_daemon_that_is_only_starting(temporary: Path) -> None:
    directory, hold = own_directory(PREFIX)
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(directory / "control.sock"))  # and does not listen yet: a connect is refused
        sweep(PREFIX)
        assert (directory / "control.sock").exists()
    hold.release()


def test_a_sweep_removes_what_a_killed_process_left(temporary: Path) -> None:
    directory, hold = own_directory(PREFIX)
    (directory / "key").touch()
    (temporary / "not ours").mkdir()
    hold.release()
    sweep(PREFIX)
    assert [path.name for path in temporary.iterdir()] == ["not ours"]


def test_one_directory_is_one_process_s_identity(tmp_path: Path) -> None:
    with own_identity(tmp_path / "peer") as first:
        with (
            pytest.raises(UsageError, match=r"in use by another process: give each peer its own --dir"),
            own_identity(tmp_path / "peer"),
        ):
            pass
        with own_identity(tmp_path / "other") as other:
            assert other.peer != first.peer
    with own_identity(tmp_path / "peer") as again:
        assert again.peer == first.peer


def test_a_directory_that_cannot_be_locked_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(UsageError, match="choose a --dir"), own_identity(tmp_path):
        pass


def test_what_another_process_has_is_said_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnet.peer.run.run_peer", None)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(Manifest()))
    with own_identity(tmp_path), pytest.raises(UsageError, match="in use by another process"):
        swarmnet.run_peer(PeerConfig(stages=(0,), dir=tmp_path, manifest=path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for name, flag in (("port", "--port"), ("dht_port", "--dht-port")):
            config = PeerConfig(stages=(0,), dir=tmp_path, host="127.0.0.1", manifest=path).model_copy(
                update={name: taken.getsockname()[1]}
            )
            with pytest.raises(UsageError, match=f"choose another with {flag}$"):
                swarmnet.run_peer(config)
