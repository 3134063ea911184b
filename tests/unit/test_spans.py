"""The spans of a peer's last steps, and what became of the last whole one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.telemetry.spans import KEPT_S, KEPT_STEPS, MAX_STEP_TIMES, PhaseTime, SpanBook, SpanKind


def test_a_step_is_added_up_from_one_update_to_the_next() -> None:
    book = SpanBook()
    book.applied(0, 4, now=10.0)
    book.add("forward", 0, 5, 0, 11.0, 13.0)
    book.add("call", 0, 5, 0, 13.0, 15.0)
    book.add("backward", 0, 5, 0, 15.0, 16.0)
    book.add("weights", 0, 5, 0, 17.0, 18.0)
    book.add("averaging", 0, 5, -1, 18.0, 20.0)
    book.add("barrier", 0, 5, -1, 20.0, 20.5)
    book.add("update", 0, 5, -1, 20.5, 21.0)
    book.applied(0, 5, now=21.0)
    (times,) = book.times(now=23.0)
    assert (times.stage, times.step, times.ago_s, times.seconds) == (0, 5, 2.0, 11.0)
    assert times.phases == {
        "forward": PhaseTime(1.0, 3.0, 2.0),
        "backward": PhaseTime(5.0, 8.0, 2.0),
        "averaging": PhaseTime(8.0, 10.0, 2.0),
        "barrier": PhaseTime(10.0, 10.5, 0.5),
        "update": PhaseTime(10.5, 11.0, 0.5),
    }
    assert times.idle_s == 4.0, "waiting for the next stage is in no phase"


def test_where_steps_overlap_a_moment_counts_as_computing() -> None:
    book = SpanBook()
    book.applied(0, 4, now=0.0)
    book.add("forward", 0, 6, 0, 1.0, 2.0)
    book.add("averaging", 0, 5, -1, 0.0, 3.0)
    book.applied(0, 5, now=4.0)
    (times,) = book.times(now=4.0)
    assert (times.forward.busy_s, times.averaging, times.idle_s) == (1.0, PhaseTime(0.0, 3.0, 2.0), 1.0)


def test_without_the_step_before_a_step_begins_with_its_first_work() -> None:
    book = SpanBook()
    book.applied(2, 1, now=1.0)
    book.add("forward", 2, 9, 0, 50.0, 51.0)
    book.applied(2, 9, now=52.0)
    (times,) = book.times(now=52.0)
    assert (times.seconds, times.forward.busy_s) == (2.0, 1.0)
    book.applied(2, 3, now=60.0)  # the run went back
    assert book.times(now=61.0)[0].step == 3


def test_each_stage_has_times_of_its_own_and_no_more_are_told_than_an_answer_has() -> None:
    book = SpanBook()
    for stage in range(MAX_STEP_TIMES + 3):
        book.add("forward", stage, 0, 0, float(stage), stage + 0.5)
        book.applied(stage, 0, now=20.0)
    found = book.times(now=20.0)
    assert [each.stage for each in found] == list(range(MAX_STEP_TIMES))
    assert all(each.forward.busy_s == 0.5 for each in found)


def test_only_the_last_steps_are_kept_but_none_that_was_just_over() -> None:
    book = SpanBook()
    for step in range(20):
        book.add("forward", 0, step, 0, float(step), step + 0.5)
        book.applied(0, step, now=step + 1.0)
    assert {span.step for span in book.since(0)} == set(range(20 - int(KEPT_S), 20))
    for step in range(20, 30):
        book.add("forward", 0, step, 0, 100.0 * step, 100.0 * step + 0.5)
        book.applied(0, step, now=100.0 * step + 1.0)
    assert [span.step for span in book.since(0)] == list(range(30 - KEPT_STEPS, 30))


def test_however_long_a_step_is_so_many_spans_are_kept() -> None:
    book = SpanBook(most=8)
    for index in range(20):
        book.add("forward", 0, 0, index, float(index), index + 1.0)
    assert [span.number for span in book.since(0)] == list(range(12, 20))
    assert [span.number for span in book.since(18)] == [18, 19] and not book.since(20)
    book.applied(0, 0, now=20.0)
    assert book.times(now=20.0)[0].seconds == 8.0


KINDS: tuple[SpanKind, ...] = ("forward", "backward", "weights", "averaging", "collect", "barrier", "update", "slot")


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.floats(-5, 15), st.floats(0, 10)), max_size=30))
def test_phases_and_idle_time_together_are_the_step(spans: list[tuple[SpanKind, float, float]]) -> None:
    book = SpanBook()
    book.applied(0, 0, now=0.0)
    for kind, began, seconds in spans:
        book.add(kind, 0, 1, 0, began, began + seconds)
    book.applied(0, 1, now=10.0)
    (times,) = book.times(now=10.0)
    phases = times.phases.values()
    assert abs(sum(phase.busy_s for phase in phases) + times.idle_s - 10.0) < 1e-9
    assert all(
        0 <= phase.began_s <= phase.ended_s <= 10.0 and phase.busy_s <= phase.ended_s - phase.began_s + 1e-9
        for phase in phases
    )
