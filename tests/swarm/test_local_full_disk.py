"""A disk that fills up under a local swarm: it is said, it costs what was to be written, and no more."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_local_supervisor import FAST, STEPS, kit, options, said, summary

from swarmnet.local import LocalOptions, run_local
from swarmnet.local import report as local_report
from swarmnet.testing.process_swarm import ChildSpec


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def test_last_weights_that_are_on_no_disk_fail_the_run_which_is_not_called_finished(tmp_path: Path) -> None:
    first = kit(tmp_path / "board", mode="full-disk:1")
    assert run_local(options(tmp_path), first) == 1
    found = summary(tmp_path)
    assert not found["ok"] and found["problem"].startswith("the final weights of stage 1 are on no disk: s1-r")
    assert "stage-1-step-6.json: No space left on device: free space there, and go on with --resume" in found["problem"]
    assert f"FAILED: {found['problem']}" in said(first) and "next:" not in said(first)
    assert f"when the disk has space, go on with:\n    swarmnet local --resume --out {tmp_path / 'out'}" in said(first)

    def child(spec: ChildSpec) -> list[str]:
        raise full()

    again = replace(kit(tmp_path / "again"), child=child)
    with pytest.raises(OSError) as still:
        run_local(LocalOptions(out=tmp_path / "out", resume=True), again)
    assert "is finished" not in said(again) and still.value.filename == str(tmp_path / "out")
    assert still.value.__notes__ == [f"go on with `swarmnet local --resume --out {tmp_path / 'out'}`"]


def test_a_full_disk_costs_events_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failed = os.write, []

    def write(file: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{file}") == str(tmp_path / "out" / "events.jsonl"):
            failed.append(data)
            raise full()
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    assert run_local(options(tmp_path), kit(tmp_path / "board")) == 0
    assert failed and summary(tmp_path)["ok"] and (tmp_path / "out" / "events.jsonl").read_text() == ""


def test_who_cannot_be_started_again_is_said_once_and_started_when_there_is_room(tmp_path: Path) -> None:
    inner, tries = kit(tmp_path / "board", hold=3), []

    def child(spec: ChildSpec) -> list[str]:
        tries.append(spec.name)
        if tries.count(spec.name) in (2, 3):
            raise full()
        return list(inner.child(spec))

    outer = replace(inner, child=child)
    assert run_local(options(tmp_path, kill=("1@3",)), outer) == 0
    assert said(outer).count("cannot be started: No space left on device") == 1
    assert max(tries.count(name) for name in tries) == 4


def test_files_that_could_not_be_written_are_when_the_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.write_text

    def write_text(path: Path, *args: Any, **more: Any) -> int:
        if "summary.json" in path.name:
            raise full()
        return real(path, *args, **more)

    first = kit(tmp_path / "board")
    with monkeypatch.context() as patched:
        patched.setattr(local_report.Path, "write_text", write_text)
        assert run_local(options(tmp_path), first) == 1
    lost = f"{tmp_path / 'out' / 'summary.json'}: not written: No space left on device: free space there"
    assert f"FAILED: {lost}" in said(first) and not list((tmp_path / "out").glob("*summary*"))
    before = (tmp_path / "out" / "loss.csv").read_bytes()
    shutil.rmtree(tmp_path / "board")

    assert run_local(LocalOptions(out=tmp_path / "out", resume=True), kit(tmp_path / "again")) == 0
    assert summary(tmp_path)["ok"] and summary(tmp_path)["steps"] == STEPS
    assert (tmp_path / "out" / "loss.csv").read_bytes() == before


def test_a_run_of_which_nothing_is_seen_names_the_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    stuck = kit(tmp_path / "board", timing=replace(FAST, stalled_s=0.05, give_up_s=0.3))
    silent = replace(stuck, child=lambda spec: ["-c", "import signal; signal.pause()"])
    assert run_local(options(tmp_path), silent) == 1
    assert f"the disk of {tmp_path / 'out'} is full, which loses the events" in summary(tmp_path)["problem"]
