"""A peer's cable is taken out for 20 seconds, and it may crash meanwhile: the others go on without it, it comes back to
where they are, and nobody goes back. Real processes in network namespaces."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from network import Network, all_made_the_same, contributes, go_on, no_long_pause, nobody_goes_back
from running import Running
from tiny_run import write_tiny_run

from swarmnet.manifest.schema import Protocol

pytestmark = pytest.mark.netns

CUT_S = 20.0
STEPS = 10
"""Before a cut and after it."""

MICROBATCHES = 32
"""So many that who goes on alone makes steps more slowly than who is back can follow them."""


def test_of_three_two_go_on_and_the_third_comes_back(tmp_path: Path) -> None:
    manifest = write_tiny_run(tmp_path, steps=100_000, microbatches=MICROBATCHES)
    with Network(tmp_path, 3) as network:
        (first, second, cut), _ = network.run(manifest, 0, 0, 0)
        go_on(first, steps=STEPS)
        network.lines.down(2)
        began = time.time()
        reached = go_on(first, second, steps=STEPS, until=began + CUT_S)
        network.lines.up(2)
        contributes(cut, seen_by=first, since=reached["t"])
        go_on(first, second, cut, steps=STEPS)

        no_long_pause(first, second, since=began)
        nobody_goes_back(first, second, cut)
        all_made_the_same(first, second, cut)


def test_of_two_one_goes_on_and_the_other_comes_back(tmp_path: Path) -> None:
    """Whether the other is dead or cut off nobody can tell, so the one that goes on has waited for a long silence."""
    manifest = write_tiny_run(tmp_path, steps=100_000, microbatches=MICROBATCHES)
    with Network(tmp_path, 2) as network:
        (first, cut), _ = network.run(manifest, 0, 0)
        go_on(first, steps=STEPS)
        network.lines.down(1)
        began = time.time()
        reached = go_on(first, steps=STEPS, until=began + CUT_S)
        network.lines.up(1)
        contributes(cut, seen_by=first, since=reached["t"])
        go_on(first, cut, steps=STEPS)

        no_long_pause(first, since=began, limit_s=Protocol().long_silence_s + 5.0)
        nobody_goes_back(first, cut)
        all_made_the_same(first, cut)


def test_a_peer_that_crashes_while_it_is_cut_off_is_back_after_the_cut(tmp_path: Path) -> None:
    manifest = write_tiny_run(tmp_path, steps=100_000, microbatches=MICROBATCHES)
    with Network(tmp_path, 3) as network:
        (first, second, cut), _ = network.run(manifest, 0, 0, 0)
        go_on(first, steps=STEPS)
        network.lines.down(2)
        began = time.time()
        go_on(first, second, steps=STEPS)
        os.kill(_supervised(cut), signal.SIGKILL)
        cut.says("away")
        reached = go_on(first, second, steps=STEPS, until=began + CUT_S)
        network.lines.up(2)
        contributes(cut, seen_by=first, since=reached["t"])
        go_on(first, second, cut, steps=STEPS)

        assert len({event["incarnation"] for event in cut.so_far("listening")}) == 2
        no_long_pause(first, second, since=began)
        nobody_goes_back(first, second, cut)
        all_made_the_same(first, second, cut)


def _supervised(peer: Running) -> int:
    """The process id of what `swarmnet peer` starts again when it crashes."""
    (child,) = Path(f"/proc/{peer.process.pid}/task/{peer.process.pid}/children").read_text().split()
    return int(child)
