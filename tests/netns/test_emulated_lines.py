"""Real processes in network namespaces, some cut off, closed one way or firewalled: the others go on without them, who
is back comes level, and nobody goes back.

Each scene waits for most of its time, so two run at a time, from the first test on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from further import further
from network import ALONE, Network, all_made_the_same, contributes, go_on, no_long_pause, nobody_goes_back
from running import PATIENCE_S, Running
from tiny_run import write_tiny_run

from swarmnet.manifest.schema import Protocol

pytestmark = pytest.mark.netns

CUT_S = 20.0
STEPS = 10
"""Before a cut and after it."""

MICROBATCHES = 4
"""So many that who goes on alone makes steps, fed as slowly as they are, that who is back can follow."""

TERMS = 34
"""Steps: more than two terms of a leader."""


def of_three_two_go_on_and_the_third_comes_back_although_it_crashed(folder: Path) -> None:
    manifest = write_tiny_run(folder, steps=100_000, microbatches=MICROBATCHES)
    with Network(folder, 3) as network:
        (first, second, cut), _ = network.run(manifest, 0, 0, 0, last=())
        go_on(first, steps=STEPS)
        began = time.time()
        network.lines.down(2)
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


def of_two_one_goes_on_and_the_other_comes_back(folder: Path) -> None:
    """Whether the other is dead or cut off nobody can tell, so the one that goes on has waited for a long silence."""
    manifest = write_tiny_run(folder, steps=100_000, microbatches=MICROBATCHES)
    with Network(folder, 2) as network:
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


def _supervised(peer: Running) -> int:
    """The process id of what `swarmnet peer` starts again when it crashes."""
    (child,) = Path(f"/proc/{peer.process.pid}/task/{peer.process.pid}/children").read_text().split()
    return int(child)


def a_firewalled_volunteer_stops_with_advice_where_nobody_relays_and_the_run_goes_on(folder: Path) -> None:
    manifest = write_tiny_run(folder, stages=2, steps=100_000)
    joined = 4
    with Network(folder, joined + 1, firewalled=frozenset([joined]), words=("--relay-peers", "0")) as network:
        (first, *_), _ = network.run(manifest, 0, 0, 1, 1)
        (link,) = first.says("listening")["links"]
        joiner = network.start("joiner", joined, "join", link, "--device", "cpu")
        assert joiner.process.wait(timeout=PATIENCE_S) == 2
        said = joiner.log.read_text()
        assert "open TCP ports" in said and "--announce" in said and "Traceback" not in said, said
        assert f"no peer can connect to this peer at /ip4/{network.address(joined)}/tcp/" in said
        assert joiner.so_far("unreachable") and not joiner.so_far("synced")
        (came,) = joiner.so_far("listening")  # it was not started again

        go_on(first, steps=6)
        no_long_pause(first, since=came["t"])
        contributors = {peer for event in first.so_far("committed") for peer, _ in event["contributions"]}
        assert came["peer"] not in contributors


def a_half_reachable_pair_costs_no_long_pause_and_a_newcomer_comes_level(folder: Path) -> None:
    manifest = write_tiny_run(folder, stages=2, steps=100_000, microbatches=MICROBATCHES)
    with Network(folder, 5) as network:
        network.lines.block(1, 2)
        network.lines.block(4, 1)
        peers, known = network.run(manifest, 0, 0, 0, 1)
        first, stage = peers[0], peers[:3]
        began = network.trainer.says("listening")["t"]
        go_on(first, steps=TERMS)
        newcomer = network.peer(4, 0, manifest, *known, *ALONE)
        newcomer.says("applied")
        contributes(newcomer, seen_by=first, since=began)
        go_on(first, newcomer, steps=TERMS)

        no_long_pause(*stage, since=began)
        nobody_goes_back(*stage, newcomer)
        all_made_the_same(*stage, newcomer)


SCENES = (
    of_three_two_go_on_and_the_third_comes_back_although_it_crashed,
    a_firewalled_volunteer_stops_with_advice_where_nobody_relays_and_the_run_goes_on,
    *further(
        of_two_one_goes_on_and_the_other_comes_back,
        a_half_reachable_pair_costs_no_long_pause_and_a_newcomer_comes_level,
    ),
)


@pytest.fixture(scope="module")
def begun(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[object, Future[None]]]:
    """All scenes that were not deselected."""
    wanted = [item.callspec.params["scene"] for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(2) as pool:  # more would keep each other from what they must do in time
        yield {scene: pool.submit(scene, tmp_path_factory.mktemp(scene.__name__[:20])) for scene in wanted}


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_on_emulated_lines(scene: Callable[[Path], None], begun: dict[object, Future[None]]) -> None:
    begun[scene].result()
