"""A pair of peers of which one cannot connect to the other, while the other way works, and a newcomer that cannot call
one of its donors: the run does not stand still for them, and they come level. Real processes in network namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest
from network import Network, all_made_the_same, contributes, go_on, no_long_pause, nobody_goes_back
from tiny_run import write_tiny_run

pytestmark = pytest.mark.netns

STEPS = 40
"""More than two terms of a keeper."""


def test_a_half_reachable_pair_costs_no_long_pause_and_a_newcomer_comes_level(tmp_path: Path) -> None:
    manifest = write_tiny_run(tmp_path, stages=2, steps=100_000, microbatches=4)
    with Network(tmp_path, 5) as network:
        network.lines.block(1, 2)
        network.lines.block(4, 1)
        peers, known = network.run(manifest, 0, 0, 0, 1)
        first, stage = peers[0], peers[:3]
        began = network.trainer.says("listening")["t"]
        go_on(first, steps=STEPS)
        newcomer = network.peer(4, 0, manifest, *known)
        newcomer.says("applied")
        contributes(newcomer, seen_by=first, since=began)
        go_on(first, newcomer, steps=STEPS)

        no_long_pause(*stage, since=began)
        nobody_goes_back(*stage, newcomer)
        all_made_the_same(*stage, newcomer)
