"""One of three replicas eight times slower costs a swarm next to nothing: whom a step's last microbatches go to."""

from __future__ import annotations

import statistics

import pytest

from swarmnet.ids import RunId
from tests.benchmark_modules import load

uneven = load("uneven")

SPEEDS = uneven.speeds_of(8.0)
TOTAL = sum(SPEEDS)
EQUAL = (TOTAL / 3,) * 3


@pytest.mark.parametrize(("stages", "stage", "least"), [(1, 0, 0.95), (2, 1, 0.98)])
def test_a_step_takes_no_longer_than_with_equal_machines_of_the_same_total_speed(
    stages: int, stage: int, least: float
) -> None:
    """In one stage whole microbatches allow 0.97."""
    unequal_s, equal_s = (uneven.mean_seconds(stages, stage, speeds, steps=7, warmup=3) for speeds in (SPEEDS, EQUAL))
    assert equal_s / unequal_s >= least


def test_where_steps_overlap_nearly_all_speeds_add_up() -> None:
    """In some runs the slow one leads, or has a microbatch when all others are done."""
    runs = [RunId(digit * 64) for digit in "01234"]
    step_s = statistics.median(
        uneven.step_seconds(1, 0, SPEEDS, overlap=True, steps=24, warmup=8, run=run) for run in runs
    )
    assert uneven.MICROBATCHES * 3 * uneven.FORWARD_S / TOTAL / step_s >= 0.93


def test_the_bound_is_that_of_whole_microbatches() -> None:
    assert uneven.least_seconds(SPEEDS) == 16.0 and uneven.least_seconds((1.0, 1.0)) == 16.0
    assert uneven.least_seconds(EQUAL) == pytest.approx(11 / EQUAL[0])
