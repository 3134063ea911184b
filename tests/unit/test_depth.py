"""How many microbatches a replica holds at once."""

from __future__ import annotations

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
        assert min(2 * stages + 1, share) <= found <= share + 1
        assert found >= min(held / microbatch_s, share), "as many as are computed while one is held"
        assert found <= slots(1.5 * held), "longer ways need more"
        assert found >= slots(held, 1.5 * microbatch_s), "slower devices need fewer"


def test_later_stages_have_room_for_what_the_first_one_sends_on() -> None:
    """Each measures for itself, some hundredths off."""
    draw = random.Random(7)
    for _ in range(500):
        stages, microbatch_s, round_trip_s = draw.randint(2, 40), draw.uniform(0.05, 5), draw.uniform(0, 0.3)
        slots = [
            slots_enough(
                held_s(stages - stage, microbatch_s, round_trip_s) * draw.uniform(0.92, 1.08),
                microbatch_s,
                1000,
                before=stage,
                onward=stages - stage,
            )
            for stage in range(stages)
        ]
        assert min(slots) == slots[0]


def test_one_odd_measurement_decides_nothing() -> None:
    """A stage behind was told to begin with a microbatch before it came: nobody was waited for."""
    depth = Depth(0, 16, most=1000)
    for held in (11.0, 11.5, 4.0, 12.0):
        depth.counted(held, 1.0)
    assert depth.slots(1000) == slots_enough(11.0, 1.0, 1000, onward=16)


def test_what_was_measured_decides_and_the_operator_caps_it() -> None:
    draw = random.Random(6)
    for _ in range(300):
        most, share = draw.randint(1, 40), draw.randint(1, 200)
        depth = Depth(0, 4, most=most)
        assert depth.slots(share) == max(min(slots_enough(held_s(4, 1.0), 1.0, share), most), 1)
        helds = [draw.uniform(1, 9) for _ in range(draw.randint(2, 9))]
        for place, held in enumerate(helds):
            believed = sorted(helds[:place])[:2][-1:]
            assert depth.counted(held, 0.5) == (sorted(helds[: place + 1])[:2][-1:] != believed)
        expected = min(slots_enough(sorted(helds)[1], 0.5, share), most)
        assert depth.slots(share) == expected, "about the way as it is when it is empty: queues ask for nothing"
        depth.next_step()
        assert depth.slots(share) == expected, "until this step has its own"
        depth.next_step()
        assert depth.slots(share) == expected, "a step without any says nothing"
        depth.counted(20.0, 0.5)
        depth.next_step()
        assert depth.slots(share) == min(slots_enough(20.0, 0.5, share), most), "ways become longer"


def test_the_plan_has_the_same_rule() -> None:
    load = Load(8, 1, 64, 0.3, 1, 1)
    said = cost(load, Site(1e12, 1e12, 0.11), Way("fp32", "fp32", "fp32", "local", 4, 10**9)).slots
    assert said == slots_enough(held_s(8, 0.3, 0.11), 0.3, 64, onward=8)
