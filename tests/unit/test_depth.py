"""How many microbatches a replica holds at once."""

from __future__ import annotations

import math
import random

import pytest

from swarmnet.pipeline.depth import Depth, held_s, slots_enough
from swarmnet.plan.cost import Load, Site, Way, cost


def test_an_empty_pipeline_holds_a_microbatch_for_two_thirds_of_each_stage_and_its_latency() -> None:
    assert held_s(1, 3.0) == pytest.approx(3.0)
    assert held_s(8, 3.0) == pytest.approx(8 * 2 + 1)
    assert held_s(8, 3.0, 0.2, 0.1) == pytest.approx(8 * 2.3 + 1 + 0.7)


def test_slots_follow_depth_and_latency() -> None:
    """Never fewer than two thirds of the stages, which a long step needs; never more than ever come."""
    draw = random.Random(5)
    for _ in range(2000):
        stages, share = draw.randint(1, 64), draw.randint(1, 500)
        before = draw.randrange(stages)
        onward, microbatch_s = stages - before, draw.uniform(0.01, 10)
        round_trip_s = draw.choice([0.0, draw.uniform(0, 0.5)])

        def slots(held: float, pace: float = microbatch_s, onward: int = onward, before: int = before) -> int:
            return slots_enough(held, pace, share, before=before, onward=onward)  # noqa: B023

        held = held_s(onward, microbatch_s, round_trip_s)
        found = slots(held)
        assert min(2 * onward / 3, share) <= found <= share + 1
        assert found >= min(held / microbatch_s, share), "as many as are computed while one is held"
        assert found <= slots(1.5 * held), "longer ways need more"
        assert found >= slots(held, 1.5 * microbatch_s), "slower devices need fewer"


def test_what_was_measured_decides_and_the_operator_caps_it() -> None:
    draw = random.Random(6)
    for _ in range(300):
        most, share = draw.randint(1, 40), draw.randint(1, 200)
        depth = Depth(0, 4, most=most)
        assert depth.slots(share) == max(min(slots_enough(held_s(4, 1.0), 1.0, share), most), 1)
        helds = [draw.uniform(1, 9) for _ in range(draw.randint(1, 9))]
        fastest = [depth.counted(held, 0.5) for held in helds]
        assert fastest == [held == min(helds[: place + 1]) for place, held in enumerate(helds)]
        expected = min(slots_enough(min(helds), 0.5, share), most)
        assert depth.slots(share) == expected, "the way as it is when it is empty: queues ask for nothing"
        depth.next_step()
        assert depth.slots(share) == expected, "until this step has its own"
        depth.next_step()
        assert depth.slots(share) == expected, "a step without any says nothing"
        depth.counted(20.0, 0.5)
        depth.next_step()
        assert depth.slots(share) == min(slots_enough(20.0, 0.5, share), most), "ways become longer"


def test_the_plan_says_no_fewer_than_flow() -> None:
    load = Load(8, 1, 64, 0.3, 1, 1)
    said = cost(load, Site(1e12, 1e12, 0.1), Way("fp32", "fp32", "fp32", "local", 4, 10**9)).slots
    held = held_s(8, 0.3, 0.1)
    assert math.ceil(held / 0.3) <= said <= slots_enough(held, 0.3, 64)
