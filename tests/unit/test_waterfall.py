"""What members say of their last step is looked at before it is drawn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import cast

import pytest

from swarmnet.errors import PeerGone
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Busy, History, HistoryRequest, Packed, Request
from swarmnet.monitor.waterfall import bars_of, one_step, waterfall
from swarmnet.telemetry.spans import PhaseTime, StepTimes
from swarmnet.transport import Transport

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


class Members:
    """Who answers what; others are gone."""

    def __init__(self, answers: dict[PeerId, Answer]) -> None:
        self._answers = answers

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        assert isinstance(request, HistoryRequest)
        if peer not in self._answers:
            raise PeerGone("no", peer=peer)
        yield self._answers[peer]


def test_who_does_not_answer_is_left_out() -> None:
    lost = replace(TIMES, ago_s=1e12)
    answers: dict[PeerId, Answer] = {
        ANN: History(times=(TIMES,)),
        PeerId("busy"): Busy(1.0, -1),
        PeerId("of an earlier version"): History(),
        PeerId("lost"): History(times=(lost,)),
    }
    found = asyncio.run(waterfall(cast(Transport, Members(answers)), [*answers, PeerId("gone")], wall=lambda: 100.0))
    assert found == {ANN: bars_of(ANN, History(times=(TIMES,)), now=100.0)}


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
