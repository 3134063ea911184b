"""The timeout follows the observed tail, within bounds, and doubles when it was wrong about everybody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.manifest.timers import Timers
from swarmnet.pipeline.router import Router, TailLimit


def after(silences: list[float]) -> TailLimit:
    limit = TailLimit(4.0, floor_s=1.0, ceiling_s=60.0)
    for silence_s in silences:
        limit.add(silence_s)
    return limit


def test_before_any_observation_it_is_generous() -> None:
    assert TailLimit(4.0, floor_s=1.0, ceiling_s=60.0).seconds == 5.0
    assert TailLimit(4.0, floor_s=1.0, ceiling_s=3.0).seconds == 3.0


@given(st.lists(st.floats(0.0, 1000.0), max_size=300), st.integers(0, 2000))
def test_it_stays_within_its_bounds(silences: list[float], expirations: int) -> None:
    timeout = after(silences)
    for _ in range(expirations):
        timeout.expired()
    assert 1.0 <= timeout.seconds <= 60.0


@pytest.mark.parametrize(
    ("silences", "seconds"),
    [
        ([i / 100 for i in range(1, 101)], 4 * 0.95),
        ([0.5] * 95 + [50.0] * 5, 2.0),  # a rare stall does not stretch it
        ([10.0] * 500 + [0.5] * 128, 2.0),  # the window slides
    ],
)
def test_it_is_four_times_the_tail(silences: list[float], seconds: float) -> None:
    assert after(silences).seconds == pytest.approx(seconds)


def test_it_doubles_until_somebody_answers() -> None:
    timeout = after([0.5] * 10)
    seen = []
    for _ in range(6):
        timeout.expired()
        seen.append(timeout.seconds)
    assert seen == [4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    timeout.add(0.5)
    assert timeout.seconds == 2.0


def test_a_call_may_take_eight_times_the_tail_and_never_less_than_its_floor() -> None:
    limit = TailLimit(8.0, floor_s=15.0, ceiling_s=3600.0)
    assert limit.seconds == 75.0
    for call_s in [4.0] * 122 + [500.0] * 6:
        limit.add(call_s)
    assert limit.seconds == 32.0
    for _ in range(128):
        limit.add(0.5)
    assert limit.seconds == 15.0


def test_silences_and_calls_double_apart() -> None:
    router = Router(Timers(suspect_s=1.0), stages=8)
    router.silence.add(0.5)
    router.call.add(1.0)
    router.call.expired()
    assert (router.patience_s(), router.call_s()) == (2.0, 32.0)
    router.silence.expired()
    assert (router.patience_s(), router.call_s()) == (4.0, 32.0)


def test_who_calls_the_last_stage_leaves_it_first() -> None:
    limits = [Router(Timers(), stages=stages).call_s() for stages in (1, 2, 3)]
    assert limits == sorted(set(limits)) and limits[0] >= Timers().long_silence_s, "before anything was observed"
