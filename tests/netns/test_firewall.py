"""Volunteers behind a firewall, as real processes in network namespaces: what they open works, what would open a
connection to them is dropped without a word."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmark_modules import load

sys.path.append(str(Path(__file__).parents[1] / "swarm"))

from running import PATIENCE_S, Running
from tiny_run import write_tiny_run

pytestmark = pytest.mark.netns

links = load("links")
REPLICAS, JOINER = 4, 4
MORE_STEPS, LONGEST_STEP_S = 6, 10.0


@pytest.fixture
def places() -> Iterator[list[tuple[str, str]]]:
    """(namespace, address) of four peers and of one behind a firewall."""
    if not os.access("/dev/net/tun", os.W_OK) or shutil.which("ip") is None:
        pytest.skip("needs TUN devices and iproute2")
    try:
        emulated = links.Links(REPLICAS + 1, mbit=1000.0, rtt_ms=10.0, firewalled=frozenset([JOINER]))
        found = emulated.__enter__()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no emulated links here: {error}")
    try:
        yield found
    finally:
        emulated.__exit__(None, None, None)


def test_a_firewalled_volunteer_stops_with_advice_and_the_run_goes_on(
    places: list[tuple[str, str]], tmp_path: Path
) -> None:
    path = write_tiny_run(tmp_path, stages=2, steps=100_000)
    started: list[Running] = []

    def start(name: str, at: int, *words: str) -> Running:
        namespace, address = places[at]
        started.append(Running(tmp_path / name, *words, namespace=namespace, host=address))
        return started[-1]

    try:
        first = start("p0", 0, "peer", "--manifest", str(path), "--stage", "0", "--device", "cpu")
        listening = first.says("listening")
        known = ("--manifest", str(path), "--bootstrap", listening["dht"][0])
        others = [start(f"p{at}", at, "peer", *known, "--stage", str(at // 2), "--device", "cpu") for at in (1, 2, 3)]
        start("trainer", 0, "trainer", *known)
        for peer in (first, *others):
            peer.says("applied")
        (link,) = listening["links"]
        joiner = start("joiner", JOINER, "join", link, "--device", "cpu")
        assert joiner.process.wait(timeout=PATIENCE_S) == 2
        said = joiner.log.read_text()
        assert "open TCP ports" in said and "--announce" in said and "Traceback" not in said, said
        assert f"nobody can connect to this peer at /ip4/{places[JOINER][1]}/tcp/" in said
        joiner.events += joiner._reader.read()
        kinds = [event["event"] for event in joiner.events]
        assert "unreachable" in kinds and "synced" not in kinds
        assert kinds.count("listening") == 1, "it was not started again"
        came = next(event for event in joiner.events if event["event"] == "listening")

        steps = _applied(first)
        first.says("applied", version=steps[-1]["version"] + MORE_STEPS)
        steps = _applied(first)
        pauses = [(later["t"], later["t"] - earlier["t"]) for earlier, later in itertools.pairwise(steps)]
        before = max((pause for ended, pause in pauses if ended < came["t"]), default=0.0)
        with_it = max(pause for ended, pause in pauses if ended >= came["t"])
        assert with_it < max(LONGEST_STEP_S, 2 * before), "a busy machine is slow without it, too"
        contributors = {peer for event in first.events if event["event"] == "committed"
                        for peer, _ in event["contributions"]}
        assert came["peer"] not in contributors
    finally:
        for running in started:
            running.process.kill()
        for running in started:
            running.process.wait()


def _applied(peer: Running) -> list[dict]:
    """Its steps so far."""
    peer.events += peer._reader.read()
    return [event for event in peer.events if event["event"] == "applied"]
