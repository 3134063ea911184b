"""`swarmnet peer --ranks 2` as a real process: however it ends, no rank stays behind; asked to, it ends well."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import PATIENCE_S, Running
from tiny_run import write_tiny_run

from swarmnet.manifest.schema import Protocol

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc, and only Linux ties a child to its parent")

ENDING_S = 30.0


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    # No trainer comes, so each step waits for a third of the silence before it executes its microbatches itself.
    return write_tiny_run(tmp_path, protocol=Protocol(long_silence_s=3.0))


def running(directory: Path, manifest: Path, *words: str) -> Running:
    return Running(directory, "peer", "--manifest", str(manifest), "--stage", "0", "--device", "cpu", *words)


def descendants(pid: int) -> list[int]:
    """Of all of its threads; none of a process that has ended."""
    children = list[int]()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(word) for word in task.joinpath("children").read_text().split()]
    return children + [further for child in children for further in descendants(child)]


@contextlib.contextmanager
def all_end(pids: list[int]) -> Iterator[None]:
    """These processes have ended soon after this context."""
    with contextlib.ExitStack() as stack:
        handles = list[int]()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # a helper's that ended by itself
                handles.append(os.pidfd_open(pid))
                stack.callback(os.close, handles[-1])
        yield
        deadline = time.monotonic() + ENDING_S
        while left := [handle for handle in handles if not select.select([handle], [], [], 0)[0]]:
            assert select.select(left, [], [], max(deadline - time.monotonic(), 0))[0], "an orphan"


def test_no_rank_outlives_its_peer_and_ctrl_c_ends_all(tmp_path: Path, manifest: Path) -> None:
    with running(tmp_path / "peer", manifest, "--ranks", "2") as peer:
        first = peer.says("mesh_started")
        assert (first["stage"], first["mesh"], first["epoch"], len(first["pids"])) == (0, "tp2", 1, 2)
        peer.says("applied")
        everybody = descendants(peer.process.pid)
        assert set(first["pids"]) < set(everybody)

        # kill -9 the peer itself, which its supervising process starts again.
        with all_end(everybody):
            os.kill(everybody[0], signal.SIGKILL)
        second = peer.until(lambda event: event["event"] == "mesh_started" and event["pids"] != first["pids"])
        peer.until(lambda event: event["event"] == "applied" and event["t"] > second["t"])
        assert not set(first["pids"]) & set(second["pids"])

        # Ctrl+C once, to the supervising process alone, as it does from a terminal of its own session.
        with all_end(descendants(peer.process.pid)):
            peer.process.send_signal(signal.SIGINT)
            assert peer.process.wait(ENDING_S) == 0, peer.log.read_text()
        assert peer.says("stopped")


def test_a_peer_that_is_killed_while_its_ranks_start_leaves_none(tmp_path: Path, manifest: Path) -> None:
    with running(tmp_path / "peer", manifest, "--ranks", "2", "--no-restart") as peer:
        deadline = time.monotonic() + PATIENCE_S
        while len(started := descendants(peer.process.pid)) < 2:
            assert peer.process.poll() is None and time.monotonic() < deadline, peer.log.read_text()
            time.sleep(0.005)
        with all_end(started):
            peer.process.kill()
            assert peer.process.wait(ENDING_S) == -signal.SIGKILL
