"""Real `swarmnet peer` processes, started by hand as users do: crash and return, drain, and the end of all.

One long-lived swarm, two stages, without any memo. Each peer is its supervising process; the test speaks to that alone,
except where it kills the peer itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fed_slowly import SLOWLY
from running import Running
from tiny_run import write_tiny_run

from swarmnet.cli.frame import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc, and only Linux ties a child to its parent")

PATIENCE_S = 120.0


class Process(Running):
    """One command and the events it writes."""

    def __init__(self, place: Path, name: str, role: list[str], bootstrap: list[str]) -> None:
        known = [word for address in bootstrap for word in ("--bootstrap", address)]
        module = SLOWLY if role == ["trainer"] else ("swarmnet",)
        super().__init__(place / name, *role, "--manifest", str(place / "run.toml"), *known, module=module)

    def await_event(self, name: str, *, more_than: int = 0) -> dict[str, Any]:
        """The newest event of that name, once there are more than so many."""
        deadline = time.monotonic() + PATIENCE_S
        while len(found := self.so_far(name)) <= more_than:
            assert time.monotonic() < deadline and self.process.poll() is None, f"no {name}\n{self.log.read_text()}"
            select.select([], [], [], 0.05)
        return found[-1]

    def await_step(self, step: int) -> None:
        while not any(event["step"] >= step for event in self.so_far("applied")):
            self.await_event("applied", more_than=len(self.so_far("applied")))

    def end(self, number: signal.Signals | None = None, *, within_s: float = 60.0) -> float:
        """Send the signal, wait for the end with exit code 0, and return how many seconds that took."""
        began = time.monotonic()
        if number is not None:
            self.process.send_signal(number)
        assert self.process.wait(within_s) == 0, self.log.read_text()
        return time.monotonic() - began

    def reason(self) -> str:
        return self.so_far("stopped")[-1]["reason"]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [further for child in found for further in descendants(child)]


@contextlib.contextmanager
def watched(pids: list[int]) -> Iterator[list[int]]:
    """Handles that become readable when these processes have ended."""
    with contextlib.ExitStack() as stack:
        handles = [os.pidfd_open(pid) for pid in pids]
        for handle in handles:
            stack.callback(os.close, handle)
        yield handles


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return write_tiny_run(tmp_path, stages=2, steps=100_000, microbatches=4).parent


def test_a_peer_crashes_and_returns_drains_and_all_end_together(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Process] = []

    def start(name: str, role: list[str], *bootstrap: str) -> Process:
        started.append(Process(place, name, role, list(bootstrap)))
        return started[-1]

    def peer(name: str, stage: int, *bootstrap: str) -> Process:
        alone = () if bootstrap else ("--no-restart",)  # the first is neither killed nor asked to leave by itself
        return start(
            name,
            ["peer", "--stage", str(stage), "--set", "caps.output_cache_bytes=0", "--device", "cpu", *alone],
            *bootstrap,
        )

    try:
        first = peer("first", 0)
        [address] = first.await_event("listening")["dht"]
        second, other = peer("second", 0, address), peer("other", 1, address)
        trainer = start("trainer", ["trainer"], address)
        for each in (first, second, other):
            each.await_step(1)

        # kill -9 the peer itself: it returns under its identity, as another incarnation, with its mate's state.
        before, [victim] = second.so_far("listening")[-1], children(second.process.pid)
        os.kill(victim, signal.SIGKILL)
        after = second.await_event("listening", more_than=1)
        assert after["peer"] == before["peer"] and after["incarnation"] != before["incarnation"]
        assert second.await_event("synced", more_than=1)["how"] == "snapshot"
        second.await_step(second.so_far("synced")[-1]["version"] + 1)
        assert "the peer was ended by SIGKILL" in second.log.read_text()

        # One of two drains: it goes when nothing of it is needed any more, and the run goes on.
        assert second.end(signal.SIGHUP) < 20.0  # its terminal is gone
        assert second.reason() == "asked to stop: nothing here is needed any more"
        first.await_step(first.so_far("applied")[-1]["step"] + 3)
        assert second.so_far("stopped") and not children_left(second)

        # Its operator speaks to a peer that runs: it is the only one of its stage, so it serves on while it is paused.
        desk = ["--dir", str(place / "other")]
        assert run(["control", "limits", "--upload", "80", *desk]) == run(["control", "pause", *desk]) == 0
        assert other.await_event("paused")["serves_on"] == [1]
        assert run(["control", "resume", *desk]) == run(["control", "stats", "--json", *desk]) == 0
        other.await_event("resumed")
        said = capsys.readouterr().out
        assert said.startswith("upload 80 Mbit/s,") and json.loads(said[said.index("{") :])["microbatches"] > 0

        # kill -9 the supervising process: the peer and its DHT daemon go with it.
        orphans = descendants(other.process.pid)
        assert len(orphans) >= 2
        with watched(orphans) as handles:
            other.process.kill()
            deadline = time.monotonic() + 20.0
            while left := [handle for handle in handles if not select.select([handle], [], [], 0)[0]]:
                assert select.select(left, [], [], max(deadline - time.monotonic(), 0))[0], "an orphan"

        # Whoever is left ends together: nobody waits for anybody.
        for each in (first, trainer):
            each.process.send_signal(signal.SIGINT)
        assert first.end() < 20.0 and trainer.end() < 20.0
        assert first.reason() == "asked to stop: all peers leave"
    finally:
        for each in started:
            if each.process.poll() is None:
                each.process.kill()
                each.process.wait()


def children_left(process: Process) -> bool:
    return Path(f"/proc/{process.process.pid}").exists() and bool(children(process.process.pid))


def test_what_the_operator_got_wrong_ends_it_at_once(place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swarmnet", "peer", "--manifest", str(place / "run.toml"), "--stage", "7"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stderr.startswith("swarmnet: error: there is no stage 7")
    assert done.stderr.count("\n") == 1
