"""Random faults, many seeds: every commit is the single process's sum, and the run ends with one chain per stage.

Crashes with restarts under the same or a new name, trainers that come and go, stopped replicas, cuts between groups and
one way, and one-way messages that are lost, doubled or overtaken; a third of the crashes and stops strike a leader. In
some kinds all replicas of a stage die at once, or everybody, so that the run goes back to what is on disks: at most
twice per blow, and nobody serves what was given up.
Each stage has two numerics classes, or as many as peers, so forks are seen, counted and must be healed. Invariants are
checked at every event. A seed is the whole run; one that fails is shrunk to the fewest faults that still break it,
and named below.
"""

from __future__ import annotations

import pytest
from chaos import Chaos, run_seed, shrink
from further import further

from swarmnet import messages
from swarmnet.step import graph, membership
from swarmnet.testing.links import Links
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

NOISY = Links(loss=0.15, double=0.1, late=0.1, broken=0.05)
TANGLED = Links(loss=0.1, double=0.1, late=0.3, broken=0.05)

KINDS: dict[str, tuple[Plan, Chaos]] = {
    "crashes_3x2": (Plan(stages=3, replicas=2, microbatches=16, steps=10, classes=2), Chaos(until_s=25.0, crash_s=0.8)),
    "crashes_2x3": (
        Plan(stages=2, replicas=3, microbatches=16, steps=10, trainers=2, classes=2),
        Chaos(until_s=25.0, crash_s=0.6, trainer_s=6.0),
    ),
    "noise_3x2": (
        Plan(stages=3, replicas=2, microbatches=16, steps=6, links=NOISY, classes=2),
        Chaos(until_s=20.0, crash_s=4.0),
    ),
    "tangle_2x3": (
        Plan(stages=2, replicas=3, microbatches=8, steps=8, links=TANGLED, classes=0),
        Chaos(until_s=30.0, crash_s=2.0, stop_s=4.0, longest_stop_s=8.0),
    ),
    "grid_1x7": (
        Plan(stages=1, replicas=7, microbatches=12, steps=8, group_size=3, links=TANGLED, classes=2),
        Chaos(until_s=30.0, crash_s=2.0, stop_s=4.0, longest_stop_s=8.0),
    ),
    "one_slot_no_memo_3x2": (
        Plan(stages=3, replicas=2, microbatches=8, steps=8, slots=1, output_cache_bytes=0, classes=2),
        Chaos(until_s=25.0, crash_s=2.0),
    ),
    "stops_2x3": (
        Plan(stages=2, replicas=3, microbatches=8, steps=8, forward_s=0.1, classes=2),
        Chaos(until_s=40.0, stop_s=3.0),
    ),
    "cuts_2x2": (
        Plan(stages=2, replicas=2, microbatches=8, steps=8, forward_s=0.1, classes=0),
        Chaos(until_s=60.0, cut_s=8.0, longest_cut_s=40.0),
    ),
    "cuts_3x3": (
        Plan(stages=3, replicas=3, microbatches=8, steps=8, forward_s=0.1, classes=2),
        Chaos(until_s=60.0, cut_s=5.0, deafen_s=8.0, longest_cut_s=30.0),
    ),
    "everything_2x2": (
        Plan(stages=2, replicas=2, microbatches=8, steps=8, forward_s=0.1, links=NOISY, classes=2),
        Chaos(until_s=40.0, crash_s=4.0, stop_s=6.0, cut_s=6.0, deafen_s=10.0, longest_stop_s=10.0),
    ),
    "everything_3x3": (
        Plan(stages=3, replicas=3, microbatches=16, steps=6, forward_s=0.1, trainers=2, links=NOISY, classes=2),
        Chaos(until_s=40.0, crash_s=4.0, stop_s=6.0, cut_s=8.0, deafen_s=10.0, trainer_s=15.0, longest_stop_s=10.0),
    ),
    "ranks_2x2": (
        Plan(stages=2, replicas=2, microbatches=8, steps=8, forward_s=0.05, averaging_s=0.2, links=NOISY, classes=0),
        Chaos(until_s=30.0, ranks_s=0.7),
    ),
    "ranks_everything_2x3": (
        Plan(stages=2, replicas=3, microbatches=12, steps=8, forward_s=0.05, averaging_s=0.1, classes=2),
        Chaos(until_s=40.0, ranks_s=1.0, crash_s=6.0, stop_s=8.0, cut_s=12.0, longest_stop_s=10.0),
    ),
    "restarts_2x2": (
        Plan(stages=2, replicas=2, microbatches=4, steps=16, checkpoint_every=2, classes=2),
        Chaos(until_s=60.0, kill_stage_s=5.0, kill_all_s=15.0, crash_s=8.0, join_s=12.0),
    ),
    "restarts_3x2": (
        Plan(stages=3, replicas=2, microbatches=4, steps=16, checkpoint_every=2, trainers=2, classes=2),
        Chaos(until_s=80.0, kill_stage_s=8.0, kill_all_s=20.0, join_s=15.0, cut_s=10.0, longest_cut_s=30.0),
    ),
    "restarts_everything_2x3": (
        Plan(stages=2, replicas=3, microbatches=4, steps=16, checkpoint_every=2, forward_s=0.1, links=NOISY, classes=0),
        Chaos(
            until_s=80.0,
            kill_stage_s=12.0,
            kill_all_s=30.0,
            crash_s=8.0,
            stop_s=10.0,
            cut_s=12.0,
            deafen_s=15.0,
            join_s=20.0,
            trainer_s=25.0,
            longest_stop_s=15.0,
        ),
    ),
}
SPARSE = {
    "sparse_crashes_2x8": (
        Plan(stages=2, replicas=8, microbatches=32, steps=6, forward_s=0.1, classes=2),
        Chaos(until_s=25.0, crash_s=2.0),
    ),
    "sparse_noise_2x8": (
        Plan(stages=2, replicas=8, microbatches=32, steps=3, forward_s=0.1, links=NOISY, classes=2),
        Chaos(until_s=25.0, crash_s=4.0, stop_s=6.0, longest_stop_s=8.0),
    ),
    "sparse_cuts_2x7": (
        Plan(stages=2, replicas=7, microbatches=28, steps=5, forward_s=0.1, classes=2),
        Chaos(until_s=40.0, cut_s=6.0, deafen_s=8.0, crash_s=8.0, longest_cut_s=20.0),
    ),
    "sparse_overlap_2x8": (
        Plan(stages=2, replicas=8, microbatches=32, steps=6, forward_s=0.1, sync="overlap", classes=0),
        Chaos(until_s=25.0, crash_s=2.5),
    ),
}
"""With bounds as small: 5 of a stage count, and more than 4 do not hear each other."""
KINDS |= SPARSE

SEEDS = {
    "crashes_3x2": 6,
    "crashes_2x3": 2,
    "noise_3x2": 8,
    "tangle_2x3": 3,
    "grid_1x7": 2,
    "one_slot_no_memo_3x2": 6,
    "stops_2x3": 4,
    "cuts_2x2": 12,
    "cuts_3x3": 2,
    "everything_2x2": 6,
    "everything_3x3": 1,
    "ranks_2x2": 5,
    "ranks_everything_2x3": 2,
    "restarts_2x2": 3,
    "restarts_3x2": 1,
    "restarts_everything_2x3": 1,
    "sparse_crashes_2x8": 1,
    "sparse_noise_2x8": 1,
    "sparse_cuts_2x7": 1,
    "sparse_overlap_2x8": 1,
}
"""Kind -> seeds, from 1000 on: a third of them in every run of the suite."""

LONG = 20
"""Times as many again under --long, from 2000 on."""


def run(kind: str, seed: int) -> VirtualSwarm:
    plan, chaos = KINDS[kind]
    with pytest.MonkeyPatch.context() as patch:
        if kind in SPARSE:
            patch.setattr(graph, "DENSE", 4)
            patch.setattr(graph, "_EACH_WAY", 1)
            patch.setattr(messages, "MAX_COUNTING", 5)
            patch.setattr(membership, "_PRESUMED", 3)
        return run_seed(plan, chaos, seed)


THIRDS = [(kind, third) for kind in KINDS for third in range(min(3, SEEDS[kind]))]


@pytest.mark.parametrize(
    ("kind", "third"), [*((kind, 0) for kind in KINDS), *further(*(each for each in THIRDS if each[1]))]
)
def test_random_faults(kind: str, third: int) -> None:
    for seed in range(1000 + third, 1000 + SEEDS[kind], 3):
        run(kind, seed)


def counted(seeds: dict[str, int]) -> int:
    """Microbatches: distinct (step, index) of every run, however many stages and repetitions each goes through."""
    return sum(number * KINDS[kind][0].steps * KINDS[kind][0].microbatches for kind, number in seeds.items())


def test_the_sets_are_large_enough() -> None:
    assert sum(SEEDS.values()) >= 60
    assert counted(SEEDS) >= 5_000 and LONG * counted(SEEDS) >= 100_000
    kinds = {"cut", "stop", "crash", "deafen", "trainer", "join", "ranks", "kill_stage", "kill_all"}
    assert kinds == {
        drawn.kind
        for kind, number in SEEDS.items()
        for seed in range(number)
        for drawn in KINDS[kind][1].schedule(1000 + seed)
    }


def test_a_failing_schedule_shrinks_to_what_breaks_it() -> None:
    faults = KINDS["everything_3x3"][1].schedule(7)
    guilty = {faults[1], faults[-2]}
    assert set(shrink(faults, lambda fewer: guilty <= set(fewer))) == guilty


@pytest.mark.parametrize(("kind", "seed"), [("crashes_2x3", 34), ("tangle_2x3", 50), ("restarts_3x2", 1003)])
def test_one_seed(kind: str, seed: int) -> None:
    run(kind, seed)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_seeds(kind: str) -> None:
    for seed in range(2000, 2000 + LONG * SEEDS[kind]):
        run(kind, seed)
