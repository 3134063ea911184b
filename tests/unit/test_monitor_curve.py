"""A curve and a step pieced together from answers: most are believed, nothing is doubled, gaps are filled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarmnet.ids import PeerId, Restart
from swarmnet.messages import History
from swarmnet.monitor.curve import _PATIENCE, Curve, told
from swarmnet.monitor.waterfall import bars_of, one_step
from swarmnet.telemetry.figures import StepFigures
from swarmnet.telemetry.run_state import StepPoint
from swarmnet.telemetry.spans import PhaseTime, StepTimes


def figures(step: int, loss: float = 8.0) -> StepFigures:
    return StepFigures(step, loss, 8, 0.5, 1e-3, 1.0)


def said(*steps: int, loss: float = 8.0) -> History:
    return History(tuple(figures(step, loss) for step in steps))


def look(curve: Curve, *answers: History, steps: int = 100) -> list[int]:
    heard = {PeerId(str(number)): told(each, curve.wanted, steps) for number, each in enumerate(answers)}
    return curve.settle(heard, now=1000.0, replicas="1/1", live_s=5.0)


def point(step: int, loss: float = 1.0, tokens: int = 8, **changes: object) -> StepPoint:
    return StepPoint(step, loss, tokens, 10.0 * step, 0.5, 1e-3, **changes)  # type: ignore[arg-type]


def losses(curve: Curve) -> Sequence[tuple[int, float]]:
    return [(each.step, each.loss) for each in curve.points]


def test_what_all_say_is_taken_once_and_the_next_question_is_for_what_follows() -> None:
    curve = Curve()
    assert look(curve, said(0, 1), said(0, 1)) == [0, 1]
    assert look(curve, History(), History()) == []
    assert losses(curve) == [(0, 1.0), (1, 1.0)] and curve.wanted == 2
    assert curve.points[0].time == 999.0 and curve.points[0].replicas == "1/1"


def test_a_liar_among_three_is_outvoted_whatever_it_says() -> None:
    for lie in (said(0, 1, loss=80.0), said(1, 2, 3), said(5, 6), said(0, 1, loss=1e9), said(1, 0)):
        curve = Curve()
        look(curve, said(0, 1), said(0, 1), lie)
        assert losses(curve) == [(0, 1.0), (1, 1.0)], lie


def test_a_step_waits_until_most_have_it() -> None:
    curve = Curve()
    assert look(curve, said(0, 1), said(0), said(0)) == [0]
    assert curve.disputed is None and curve.wanted == 1
    assert look(curve, said(1), said(1), History()) == [1]


def test_who_skipped_a_step_has_no_say_in_it() -> None:
    curve = Curve()
    assert look(curve, said(0, 1, 2), said(0, 2), said(0, 1, 2), said(2)) == [0, 1, 2]


@pytest.mark.parametrize(("others", "first"), [(2, 2), (1, 0)])
def test_one_alone_fills_a_gap_only_if_nobody_could_outvote_it(others: int, first: int) -> None:
    curve = Curve()
    look(curve, said(0, 1, 2, 3), *[said(2, 3)] * others)
    assert losses(curve) == [(step, 1.0) for step in range(first, 4)]


def test_steps_beyond_the_run_and_figures_that_cannot_be_are_not_heard() -> None:
    assert look(Curve(), said(0, 7), steps=5) == []
    for lie in ({"loss_sum": -1.0}, {"ago_s": 1e308}, {"learning_rate": 1e300}, {"grad_norm": 1e300}):
        assert look(Curve(), History((replace(figures(0), **lie),))) == []


def test_a_curve_from_a_file_asks_for_its_first_gap_and_fills_it() -> None:
    curve = Curve([point(0), point(1), point(4)])
    assert curve.wanted == 2
    assert look(curve, said(2, 3, 4, 5, loss=16.0)) == [2, 3, 5]
    assert losses(curve) == [*enumerate([1.0, 1.0, 2.0, 2.0, 1.0, 2.0])]


@pytest.mark.parametrize("mute", [False, True])
def test_a_gap_that_no_member_fills_is_asked_for_some_looks_and_no_longer(mute: bool) -> None:
    curve = Curve([point(0)])
    others = [said(1)] if mute else []
    assert look(curve, said(*range(3, 10)), said(*range(3, 10)), *others, steps=0) == [*range(3, 10)]
    for _ in range(_PATIENCE - 1):
        assert curve.wanted == 1
        look(curve, said(*range(3, 400)), said(*range(3, 400)), *(History() for _ in others), steps=0)
    assert curve.wanted == 400


def test_a_file_that_is_ahead_of_a_run_that_went_back_does_not_say_where_the_run_is() -> None:
    curve = Curve(point(step, held_out=4.0) for step in range(9))
    curve.went_back(Restart(1, 4))
    assert look(curve, History()) == [] and curve.wanted == 4
    assert curve.newest == point(3, held_out=4.0) and curve.newest_held_out == 4
    assert look(curve, said(4, loss=16.0)) == [4]
    assert curve.newest is not None and curve.newest.step == 4 and curve.newest_held_out == 5


def test_a_run_that_goes_back_does_its_steps_again() -> None:
    curve = Curve()
    look(curve, said(0, 1, 2, 3), said(0, 1, 2, 3))
    assert look(curve, said(4, loss=16.0), said(4, loss=16.0)) == [4]
    assert curve.went_back(Restart(1, 2)) and curve.wanted == 2
    assert look(curve, said(2, 3, loss=24.0), said(2, 3, loss=24.0)) == [2, 3]
    assert losses(curve) == [(0, 1.0), (1, 1.0), (2, 3.0), (3, 3.0), (4, 2.0)]
    assert not curve.went_back(Restart(1, 2)) and curve.wanted == 4, "the same one: nothing is asked again"
    look(curve, said(4, loss=32.0), said(4, loss=32.0), said(4, loss=8.0))
    assert losses(curve)[2:] == [(2, 3.0), (3, 3.0), (4, 4.0)]


def test_pace_is_that_of_the_last_steps() -> None:
    curve = Curve([point(step) for step in range(20)])
    assert curve.step_s(19) == 10.0 and curve.tokens_per_second(19) == 0.8
    assert curve.tokens_per_second(0) is None


def test_a_held_out_loss_stands_at_the_step_that_made_those_weights() -> None:
    curve = Curve([point(0), point(1)])
    assert curve.evaluated({0: 6.0, 2: 5.0, 101: 1.0, 3: -1.0}, steps=100) == [0, 2]
    assert [each.held_out for each in curve.points] == [None, 5.0]
    assert curve.evaluated({2: 5.0}, steps=100) == []
    curve.evaluated({3: 4.0}, steps=100)
    look(curve, said(2))
    assert curve.points[2].held_out == 4.0


def test_steps_that_different_members_have_timed_are_in_order() -> None:
    curve = Curve()
    for peer, step, ago_s in (("a", 0, 50.0), ("a", 1, 60.0), ("a", 4, 20.0), ("b", 2, 10.0)):
        heard = {PeerId(peer): {step: StepFigures(step, 8.0, 8, 0.5, 1e-3, ago_s)}}
        curve.settle(heard, now=1000.0, replicas="", live_s=0.0)
    assert [(each.step, each.time) for each in curve.points] == [(0, 950.0), (1, 950.0), (2, 980.0), (4, 980.0)]


# ---------------------------------------------------------------- what members say of their last step


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
