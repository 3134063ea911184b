"""One of three replicas eight times slower costs a swarm next to nothing: whom a step's last microbatches go to."""

from __future__ import annotations

import statistics

import pytest

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
    # Once in many steps the slow one has a microbatch when all others are done.
    step_s = statistics.median(
        uneven.step_seconds(1, 0, SPEEDS, overlap=True, steps=first + 16, warmup=first) for first in (8, 24, 40)
    )
    assert uneven.MICROBATCHES * 3 * uneven.FORWARD_S / TOTAL / step_s >= 0.9


def test_the_bound_is_that_of_whole_microbatches() -> None:
    assert uneven.least_seconds(SPEEDS) == 16.0 and uneven.least_seconds((1.0, 1.0)) == 16.0
    assert uneven.least_seconds(EQUAL) == pytest.approx(11 / EQUAL[0])
