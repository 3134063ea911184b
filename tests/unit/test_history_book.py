"""What members remember of steps for whoever looks on: the last ones, in small answers, and not too often."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.messages import Busy, History, HistoryRequest
from swarmnet.net.history import KEPT_STEPS, HistoryBook
from swarmnet.net.limits import HISTORIES
from swarmnet.telemetry.figures import MAX_FIGURES, Evaluation, StepFigures

pytestmark = pytest.mark.virtual_time


def figures(step: int, loss: float = 1.0, at: float = 0.0) -> StepFigures:
    return StepFigures(step, loss, 8, 0.5, 1e-3, at)


def book(*steps: int) -> HistoryBook:
    made = HistoryBook()
    for step in steps:
        made.applied(figures(step, at=float(step)))
    return made


def test_an_answer_begins_at_the_step_that_is_wanted_and_says_how_long_ago_it_was() -> None:
    found = book(3, 4, 5).since(4, now=10.0)
    assert [(each.step, each.ago_s) for each in found.figures] == [(4, 6.0), (5, 5.0)]


def test_only_the_last_steps_are_remembered_and_an_answer_has_a_few_of_them() -> None:
    made = book(*range(KEPT_STEPS + 10))
    found = made.since(0, now=0.0)
    assert [each.step for each in found.figures] == list(range(10, 10 + MAX_FIGURES))
    assert made.since(10 + MAX_FIGURES, now=0.0).figures[0].step == 10 + MAX_FIGURES


def test_a_second_stage_of_a_peer_says_the_same_and_a_run_that_went_back_says_something_else() -> None:
    made = book(0, 1, 2, 3)
    made.applied(figures(1, at=9.0))
    assert [each.ago_s for each in made.since(0, now=10.0).figures] == [10.0, 9.0, 8.0, 7.0]
    made.applied(figures(1, loss=2.0, at=9.0))
    assert [(each.step, each.loss_sum) for each in made.since(0, now=10.0).figures] == [(0, 1.0), (1, 2.0)]


def test_evaluations_are_by_version_and_the_later_word_counts() -> None:
    made = HistoryBook()
    for version, loss in ((0, 5.0), (10, 4.0), (20, 3.0), (10, 4.5)):
        made.evaluated(Evaluation(version, loss))
    assert made.since(5, now=0.0) == History((), (Evaluation(10, 4.5),))


async def test_all_who_ask_share_so_many_answers_a_second() -> None:
    made = book(0)

    async def ask(times: int) -> list[object]:
        return [answer for _ in range(times) async for answer in made.serve(HistoryRequest(0))]

    answers = await ask(100)
    busy = [answer for answer in answers if isinstance(answer, Busy)]
    assert len(busy) == 60 and busy[0].retry_after_s == pytest.approx(1 / HISTORIES.per_s)
    await asyncio.sleep(1.0)
    assert sum(isinstance(answer, History) for answer in await ask(100)) == HISTORIES.per_s
