"""Random faults, many seeds: whatever happens, every commit is the single process's sum and the run ends.

Crashes with restarts under the same or a new name, trainers that come and go, stopped replicas, and one-way messages
that are lost, doubled or overtaken. Invariants are checked at every event. A seed is the whole run: replay one with
`test_one_seed`. Seeds that once failed are named below.
"""

from __future__ import annotations

import pytest
from chaos import Chaos
from strike import watched

from swarmnet.simulate.links import Links
from swarmnet.simulate.plan import Plan

NOISY = Links(loss=0.15, double=0.1, late=0.1, broken=0.05)
TANGLED = Links(loss=0.1, double=0.1, late=0.3, broken=0.05)

KINDS: dict[str, tuple[Plan, Chaos]] = {
    "crashes_3x2": (
        Plan(stages=3, replicas=2, microbatches=16, steps=10), Chaos(until_s=25.0, crash_s=0.8)
    ),
    "crashes_2x3": (
        Plan(stages=2, replicas=3, microbatches=16, steps=10, trainers=2),
        Chaos(until_s=25.0, crash_s=0.6, trainer_s=6.0),
    ),
    "noise_3x2": (
        Plan(stages=3, replicas=2, microbatches=16, steps=6, links=NOISY), Chaos(until_s=20.0, crash_s=4.0)
    ),
    "tangle_2x3": (
        Plan(stages=2, replicas=3, microbatches=8, steps=8, links=TANGLED),
        Chaos(until_s=30.0, crash_s=2.0, stop_s=4.0, longest_stop_s=8.0),
    ),
    "one_slot_no_memo_3x2": (
        Plan(stages=3, replicas=2, microbatches=8, steps=8, slots=1, memo_bytes=0), Chaos(until_s=25.0, crash_s=2.0)
    ),
}

GROUPS = {
    "crashes_3x2": (4, 7), "crashes_2x3": (4, 7), "noise_3x2": (2, 6), "tangle_2x3": (4, 5),
    "one_slot_no_memo_3x2": (2, 6),
}
"""Kind -> (number of groups, seeds in each)."""


def run(kind: str, seed: int) -> None:
    """Run one seed."""
    plan, chaos = KINDS[kind]
    swarm = watched(plan, seed)
    try:
        swarm.run(until_s=400.0, script=chaos.script(seed))
    except BaseException as error:
        error.add_note(f"test_one_seed[{kind}-{seed}]")
        raise


@pytest.mark.parametrize(
    ("kind", "group"), [(kind, group) for kind, (groups, _) in GROUPS.items() for group in range(groups)]
)
def test_random_faults(kind: str, group: int) -> None:
    size = GROUPS[kind][1]
    for seed in range(1000 + group * size, 1000 + (group + 1) * size):
        run(kind, seed)


def test_the_set_is_large_enough() -> None:
    seeds = {kind: groups * size for kind, (groups, size) in GROUPS.items()}
    assert sum(seeds.values()) >= 100
    for shape in ("3x2", "2x3"):
        commits = sum(
            seeds[kind] * plan.steps * plan.microbatches * plan.stages
            for kind, (plan, _) in KINDS.items() if kind.endswith(shape)
        )
        assert commits >= 10_000


@pytest.mark.parametrize(
    ("kind", "seed"),
    [("crashes_3x2", 148), ("tangle_2x3", 50), ("crashes_2x3", 34), ("crashes_2x3", 1027), ("tangle_2x3", 2097)],
)
def test_one_seed(kind: str, seed: int) -> None:
    run(kind, seed)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_seeds(kind: str) -> None:
    for seed in range(2000, 2100):
        run(kind, seed)
