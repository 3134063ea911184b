"""What members say of their last step is looked at before it is drawn."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swarmnet.ids import PeerId
from swarmnet.messages import History
from swarmnet.monitor.waterfall import bars_of, one_step
from swarmnet.telemetry.spans import PhaseTime, StepTimes

ANN = PeerId("ann")
TIMES = StepTimes(1, 7, 2.0, 10.0, forward=PhaseTime(0.0, 4.0, 3.0), averaging=PhaseTime(5.0, 9.0, 4.0))


def test_a_bar_is_placed_by_the_clock_here() -> None:
    (bar,) = bars_of(ANN, History(times=(TIMES,)), now=100.0)
    assert (bar.peer, bar.stage, bar.step, bar.began, bar.ended) == (ANN, 1, 7, 88.0, 98.0)
    assert bar.times.idle_s == 3.0


def test_bars_are_by_stage_and_none_twice() -> None:
    other = replace(TIMES, stage=0)
    assert [bar.stage for bar in bars_of(ANN, History(times=(TIMES, other, TIMES)), now=0.0)] == [0, 1]


@pytest.mark.parametrize(
    "lie",
    [
        replace(TIMES, stage=3),
        replace(TIMES, ago_s=1e12),
        replace(TIMES, seconds=1e12),
        replace(TIMES, seconds=5.0),
        replace(TIMES, forward=PhaseTime(4.0, 1.0, 0.0)),
        replace(TIMES, forward=PhaseTime(0.0, 4.0, 5.0)),
        replace(TIMES, backward=PhaseTime(0.0, 10.0, 4.0)),
        replace(TIMES, barrier=PhaseTime(0.0, math.nextafter(11.0, 12.0), 0.0)),
    ],
)
def test_what_cannot_be_is_left_out(lie: StepTimes) -> None:
    assert not bars_of(ANN, History(times=(lie,)), now=0.0, num_stages=3)


def test_the_step_that_most_tell_is_drawn_by_stage_from_its_first_moment() -> None:
    bob = PeerId("bob")
    bars = [
        *bars_of(ANN, History(times=(TIMES,)), now=100.0),
        *bars_of(bob, History(times=(replace(TIMES, stage=0, ago_s=1.0),)), now=100.0),
        *bars_of(PeerId("ahead"), History(times=(replace(TIMES, step=8),)), now=100.0),
    ]
    found = one_step(bars)
    assert found is not None and (found["step"], found["seconds"]) == (7, 11.0)
    assert [(each["peer"], each["began_s"]) for each in found["bars"]] == [(bob, 1.0), (ANN, 0.0)]
    assert found["bars"][0]["phases"]["forward"] == {"began_s": 0.0, "ended_s": 4.0, "busy_s": 3.0}
    assert one_step([]) is None


def test_one_liar_neither_outvotes_the_others_nor_takes_their_room() -> None:
    honest = [bar for name in ("a", "b", "c") for bar in bars_of(PeerId(name), History(times=(TIMES,)), now=100.0)]
    elsewhere = tuple(replace(TIMES, stage=stage, step=1 << 40) for stage in range(8))
    liar = bars_of(PeerId("liar"), History(times=elsewhere), now=100.0)
    long = bars_of(PeerId("long"), History(times=(replace(TIMES, seconds=9e8),)), now=100.0)
    early = bars_of(PeerId("early"), History(times=(replace(TIMES, ago_s=9e8),)), now=100.0)
    found = one_step([*liar, *honest, *long, *early])
    assert found is not None and found["step"] == TIMES.step and found["seconds"] == TIMES.seconds
    assert [bar["peer"] for bar in found["bars"]] == ["a", "b", "c"]
