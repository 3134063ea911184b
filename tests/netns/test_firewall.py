"""Volunteers behind a firewall, as real processes in network namespaces: what they open works, what would open a
connection to them is dropped without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
from network import Network, go_on, no_long_pause
from running import PATIENCE_S
from tiny_run import write_tiny_run

pytestmark = pytest.mark.netns

JOINER = 4


def test_a_firewalled_volunteer_stops_with_advice_and_the_run_goes_on(tmp_path: Path) -> None:
    manifest = write_tiny_run(tmp_path, stages=2, steps=100_000)
    with Network(tmp_path, JOINER + 1, firewalled=frozenset([JOINER])) as network:
        (first, *_), _ = network.run(manifest, 0, 0, 1, 1)
        (link,) = first.says("listening")["links"]
        joiner = network.start("joiner", JOINER, "join", link, "--device", "cpu")
        assert joiner.process.wait(timeout=PATIENCE_S) == 2
        said = joiner.log.read_text()
        assert "open TCP ports" in said and "--announce" in said and "Traceback" not in said, said
        assert f"nobody can connect to this peer at /ip4/{network.address(JOINER)}/tcp/" in said
        assert joiner.so_far("unreachable") and not joiner.so_far("synced")
        (came,) = joiner.so_far("listening")  # it was not started again

        go_on(first, steps=6)
        no_long_pause(first, since=came["t"])
        contributors = {peer for event in first.so_far("committed") for peer, _ in event["contributions"]}
        assert came["peer"] not in contributors
