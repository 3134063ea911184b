"""One of three replicas eight times slower costs a swarm next to nothing: whom a step's last microbatches go to."""

from __future__ import annotations

import statistics

import pytest

from swarmnet.ids import PeerId, RunId
from swarmnet.testing.plan import RUN, Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

MICROBATCHES, REPLICAS = 32, 3
FORWARD_S = 0.05
"""Of a fast replica; a microbatch takes three times as long."""
RUNS = tuple(RunId(digit * 64) for digit in "0123")
"""Who leads in which step follows from the run: a slow leader costs a little."""


def speeds_of(ratio: float) -> tuple[float, ...]:
    """The unequal machines' speeds."""
    return (1.0,) * (REPLICAS - 1) + (1.0 / ratio,)


def step_seconds(
    stages: int,
    uneven: int,
    speeds: tuple[float, ...],
    *,
    overlap: bool = False,
    steps: int = 14,
    warmup: int = 4,
    forward_s: float = FORWARD_S,
    seed: int = 1,
    run: RunId = RUN,
) -> float:
    """Virtual seconds of a step, over those after the warm-up. run: it decides who leads when."""
    plan = Plan(
        stages=stages,
        replicas=REPLICAS,
        microbatches=MICROBATCHES,
        steps=steps,
        sync="overlap" if overlap else "exact",
        slots=2 * stages + 2,
        forward_s=forward_s,
        run=run,
    )
    swarm = VirtualSwarm(plan, seed)
    for number, speed in enumerate(speeds):
        swarm.slowdown[PeerId(f"s{uneven}.{REPLICAS * uneven + number}")] = 1.0 / speed
    swarm.run(until_s=3600.0)
    ends: dict[int, float] = {}
    for at, _, event, fields in swarm.events:
        if event == "committed":
            ends[fields["step"]] = max(at, ends.get(fields["step"], 0.0))
    return (ends[steps - 1] - ends[warmup - 1]) / (steps - warmup)


def mean_seconds(
    stages: int, uneven: int, speeds: tuple[float, ...], *, overlap: bool = False, **lengths: int
) -> float:
    """Of a step, over several runs. lengths: `steps` and `warmup`."""
    return statistics.fmean(
        step_seconds(stages, uneven, speeds, overlap=overlap, run=run, seed=seed, **lengths)
        for seed, run in enumerate(RUNS, 1)
    )


def least_seconds(speeds: tuple[float, ...]) -> float:
    """Of a step of one stage with nothing but compute, in microbatches of a machine of speed 1: they are whole."""
    ends = sorted(count / speed for speed in speeds for count in range(1, MICROBATCHES + 1))
    return ends[MICROBATCHES - 1]


SPEEDS = speeds_of(8.0)
TOTAL = sum(SPEEDS)
EQUAL = (TOTAL / 3,) * 3


@pytest.mark.parametrize(("stages", "stage", "least"), [(1, 0, 0.95), (2, 1, 0.98)])
def test_a_step_takes_no_longer_than_with_equal_machines_of_the_same_total_speed(
    stages: int, stage: int, least: float
) -> None:
    """In one stage whole microbatches allow 0.97."""
    unequal_s, equal_s = (mean_seconds(stages, stage, speeds, steps=7, warmup=3) for speeds in (SPEEDS, EQUAL))
    assert equal_s / unequal_s >= least


def test_where_steps_overlap_nearly_all_speeds_add_up() -> None:
    """In some runs the slow one leads, or has a microbatch when all others are done."""
    runs = [RunId(digit * 64) for digit in "01234"]
    step_s = statistics.median(step_seconds(1, 0, SPEEDS, overlap=True, steps=24, warmup=8, run=run) for run in runs)
    assert MICROBATCHES * 3 * FORWARD_S / TOTAL / step_s >= 0.93


def test_the_bound_is_that_of_whole_microbatches() -> None:
    assert least_seconds(SPEEDS) == 16.0 and least_seconds((1.0, 1.0)) == 16.0
    assert least_seconds(EQUAL) == pytest.approx(11 / EQUAL[0])
