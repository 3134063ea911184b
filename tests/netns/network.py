"""Real processes of a tiny run, each peer in a network namespace of its own, and what holds of the steps they make."""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import load

sys.path.append(str(Path(__file__).parents[1] / "swarm"))

from running import Running

links = load("links")

LONGEST_PAUSE_S = 10.0
"""Between two steps of a stage of three or more, whatever happens to one of them."""

ALONE = ("--no-restart",)
"""Words of a peer that no other process watches and starts again."""

USUAL_STEPS = 20
"""On a machine with time for them, that many steps take less than LONGEST_PAUSE_S."""


class Network:
    """Places behind lines of a gigabit and 50 ms. As a context: what was started does not outlive the block.

    words: further ones of every peer and trainer.
    """

    def __init__(
        self, directory: Path, places: int, *, firewalled: frozenset[int] = frozenset(), words: tuple[str, ...] = ()
    ) -> None:
        if not os.access("/dev/net/tun", os.W_OK) or shutil.which("ip") is None:
            pytest.skip("needs TUN devices and iproute2")
        self._directory, self._open, self._words = directory, ExitStack(), words
        self.lines = links.Links(places, mbit=1000.0, rtt_ms=50.0, firewalled=firewalled)

    def __enter__(self) -> Network:
        try:
            self._places = self._open.enter_context(self.lines)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no emulated links here: {error}")
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def address(self, place: int) -> str:
        return self._places[place][1]

    def start(self, name: str, place: int, *words: str) -> Running:
        """`swarmnet WORDS` at that place. name: of its directory."""
        namespace, address = self._places[place]
        return self._open.enter_context(
            Running(self._directory / name, *words, *self._words, module=("in_namespace", namespace), host=address)
        )

    def peer(self, place: int, stage: int, manifest: Path, *known: str) -> Running:
        """A peer of one stage, known to be at that place."""
        return self.start(
            f"p{place}", place, "peer", "--manifest", str(manifest), "--stage", str(stage), "--device", "cpu", *known
        )

    def run(self, manifest: Path, *stages: int, last: tuple[str, ...] = ALONE) -> tuple[list[Running], tuple[str, str]]:
        """Peers of these stages at the first places, and a trainer beside the first.

        The last peer comes when the others are in place: if it alone has its stage, they begin together. Returns the
        peers, after their first step, and the words by which others find them. last: further words of the last peer.
        """
        first = self.peer(0, stages[0], manifest, *ALONE)
        known = ("--bootstrap", first.says("listening")["dht"][0])
        end = len(stages) - 1
        peers = [first, *(self.peer(place, stages[place], manifest, *known, *ALONE) for place in range(1, end))]
        for peer in peers:
            peer.says("synced")
        peers.append(self.peer(end, stages[end], manifest, *known, *last))
        peers[end].says("synced")
        self.trainer = self.start("trainer", 0, "trainer", "--manifest", str(manifest), *known)
        for peer in peers:
            peer.says("applied")
        return peers, known


def go_on(*peers: Running, steps: int, until: float = 0.0) -> dict[str, Any]:
    """Wait until each has made so many more steps, and one after the time `until`; the last of them."""
    made = [peer.so_far("applied")[-1]["version"] for peer in peers]
    for peer, before in zip(peers, made, strict=True):
        last = peer.until(
            lambda event: (
                event["event"] == "applied"
                and event["version"] >= before + steps  # noqa: B023
                and event["t"] > until
            )
        )
    return last


def contributes(peer: Running, seen_by: Running, since: float) -> None:
    """Wait until a step to which `peer` contributed is committed after that time."""
    me = peer.says("listening")["peer"]
    seen_by.until(
        lambda event: (
            event["event"] == "committed"
            and event["t"] > since
            and me in (other for other, _ in event["contributions"])
        )
    )


def no_long_pause(*peers: Running, since: float, limit_s: float = LONGEST_PAUSE_S) -> float:
    """Since that time no step of the stage of these peers came later than limit_s after the one before.

    A step is there when the first of them has applied it; the first of all is due limit_s after `since`. A busy machine
    makes all steps slow, and pauses without any fault: as long as USUAL_STEPS of them take, and twice the longest pause
    before `since`, are borne, too. Returns the longest pause since then.
    """
    came: dict[int, float] = {}
    for peer in peers:
        for event in peer.so_far("applied"):
            came[event["version"]] = min(event["t"], came.get(event["version"], event["t"]))
    times = sorted([*came.values(), *([since] if min(came.values()) > since else [])])
    pauses = [(later, later - earlier) for earlier, later in itertools.pairwise(times)]
    usual = max((pause for ended, pause in pauses if ended < since), default=0.0)
    longest = max([time.time() - times[-1], *(pause for ended, pause in pauses if ended >= since)])
    step_s = statistics.median(pause for _, pause in pauses)
    found = f"{longest:.1f} s without a step; before the fault {usual:.1f} s; a step takes {step_s:.2f} s"
    print(found)
    assert longest < max(limit_s, 2 * usual, USUAL_STEPS * step_s), found
    return longest


def nobody_goes_back(*peers: Running) -> None:
    """Whatever state a peer takes over or makes, it never is of a lower version than what it had."""
    for peer in peers:
        versions = [event["version"] for event in peer.so_far("synced", "applied")]
        back = [pair for pair in itertools.pairwise(versions) if pair[0] > pair[1]]
        assert not back, f"{peer.directory.name} went back: {back}"
        assert not peer.so_far("restart")


def all_made_the_same(*peers: Running) -> None:
    """Peers of one stage committed the same sums, and applied them to the same weights."""
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    for peer in peers:
        for event in peer.so_far("committed"):
            found["sum", event["step"]].add(event["digest"])
        for event in peer.so_far("applied"):
            found["chain", event["version"]].add(event["chain"])
    assert found and {what: values for what, values in found.items() if len(values) > 1} == {}
