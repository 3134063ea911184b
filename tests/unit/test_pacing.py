"""Token buckets and pauses: who waits as told never exceeds its rate, and what is refused costs nothing."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.pacing import Backoff, Budgets, Rate, TokenBucket

EACH = Rate(per_s=8.0, burst_s=2.0)


def test_a_burst_is_free_and_the_next_token_waits() -> None:
    budgets = Budgets[str](EACH)
    assert [budgets.of("a").take(5.0) for _ in range(16)] == [0.0] * 16
    assert budgets.of("a").take(5.0) == pytest.approx(0.125)
    assert budgets.of("b").take(5.0) == 0.0, "another caller has its own"


def test_many_tokens_at_once_count_as_one_by_one() -> None:
    bucket = EACH.bucket()
    assert bucket.take(0.0, 16) == 0.0
    assert bucket.take(0.0, 4) == pytest.approx(0.5)


def test_what_was_used_comes_back_with_time_and_no_more() -> None:
    bucket = EACH.bucket()
    bucket.take(0.0, 16)
    assert bucket.take(1e6, 16) == 0.0
    assert bucket.take(1e6, 16) == pytest.approx(2.0), "an hour of silence is no hour of credit"


@pytest.mark.parametrize("now", [0.0, 5.0, 1e6])
def test_what_is_refused_costs_nothing(now: float) -> None:
    bucket = EACH.bucket()
    assert [bucket.ask(now) for _ in range(16)] == [0.0] * 16
    assert [bucket.ask(now) for _ in range(100)] == pytest.approx([0.125] * 100)
    assert bucket.wait_s(now) == pytest.approx(0.125)
    assert bucket.ask(now + 0.125) == 0.0 < bucket.ask(now + 0.125)


def test_one_every_so_often_and_a_few_at_once() -> None:
    assert [Rate.every(5.0, 3).bucket().ask(0.0)] == [0.0]
    bucket = Rate.every(5.0, 3).bucket()
    assert [bucket.ask(0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 5.0]
    assert bucket.ask(4.9) == pytest.approx(0.1) and bucket.ask(5.0) == 0.0 and bucket.ask(5.0) == 5.0


def test_tokens_that_are_given_back_are_there() -> None:
    bucket = EACH.bucket()
    bucket.take(0.0, 16)
    bucket.give_back(2)
    assert [bucket.ask(0.0) == 0.0 for _ in range(3)] == [True, True, False]


def test_a_new_rate_keeps_what_is_owed() -> None:
    bucket = TokenBucket(10.0)
    bucket.take(0.0, 50)
    bucket.set_rate(100.0, 1.0)
    assert bucket.wait_s(1.0, 0.0) == pytest.approx(0.4), "40 of 50 tokens at 100 a second"
    bucket.set_rate(math.inf, 1.1)
    assert bucket.wait_s(1.1, 1e9) == 0.0
    bucket.take(1.1, 1e9)
    bucket.set_rate(10.0, 1.2)
    assert bucket.wait_s(1.2, 0.0) == 0.0, "no bytes are owed of a time without a limit"


def test_strangers_do_not_fill_memory() -> None:
    budgets = Budgets[int](EACH, 100)
    for number in range(300):
        budgets.of(number).take(0.0)
        budgets.of(0).take(0.0)
    assert len(budgets) == 100 and budgets.of(0).ask(0.0) > 0.0, "who goes on is remembered"


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 5000)), min_size=1, max_size=60))
def test_whoever_waits_as_told_never_exceeds_its_rate(sent: list[tuple[float, int]]) -> None:
    bucket, now, total = TokenBucket(1000.0, 2.0), 0.0, 0
    for pause_s, tokens in sent:
        now += pause_s
        now += bucket.take(now, tokens)
        total += tokens
        assert total <= 1000.0 * (now + 2.0) + 2e-3


@given(st.lists(st.floats(0, 1), min_size=1, max_size=300))
def test_whatever_is_asked_no_more_is_given_than_the_rate(pauses_s: list[float]) -> None:
    bucket, now, given_at = EACH.bucket(), 0.0, list[float]()
    for pause_s in pauses_s:
        now += pause_s
        if not bucket.ask(now):
            given_at.append(now)
    for first in range(len(given_at)):
        for last in range(first, len(given_at)):
            assert last - first + 1 <= 8.0 * (given_at[last] - given_at[first]) + 16 + 1e-3


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_success() -> None:
    backoff, now = Backoff(1.0, 30.0), 0.0
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert backoff.failed(now) == pause_s == backoff.wait_s(now) and backoff.wait_s(now + pause_s) == 0.0
        now += pause_s
    assert backoff.failures == 7
    backoff.failed(now)
    backoff.reset()
    assert backoff.wait_s(now) == 30.0, "a pause that has begun goes on"
    assert backoff.failed(now) == 1.0 == backoff.wait_s(now)


def test_the_longest_pause_may_be_another_each_time() -> None:
    backoff = Backoff(1.0, 2.0)
    assert [backoff.failed(0.0, longest_s=60.0) for _ in range(4)] == [1.0, 2.0, 4.0, 8.0]
    assert backoff.failed(0.0) == 2.0 and backoff.failed(0.0, longest_s=1e9) == 32.0


def test_a_thousand_failures_are_no_overflow() -> None:
    backoff = Backoff(0.05, 3.0)
    assert [backoff.failed(0.0) for _ in range(5000)][-1] == 3.0


@given(st.integers(), st.floats(0, 1))
def test_a_random_pause_is_shorter_by_its_share_at_most(seed: int, jitter: float) -> None:
    backoff = Backoff(1.0, 8.0, jitter=jitter, rng=random.Random(seed))
    for longest in (1.0, 2.0, 4.0, 8.0, 8.0):
        assert longest * (1.0 - jitter) <= backoff.failed(0.0) <= longest


def test_those_that_failed_together_come_back_apart() -> None:
    assert len({Backoff(1.0, 8.0, jitter=0.1).failed(0.0) for _ in range(20)}) == 20
