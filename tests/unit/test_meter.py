"""A line is measured by what crosses it while it is busy; idle time, noise and single rounds do not show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.averaging.meter import LEAST_BYTES, Meter, busiest
from swarmnet.ids import PeerId
from swarmnet.messages import MAX_MATES, Line

MB = 1 << 20
A, B = PeerId("a"), PeerId("b")


def round_at(meter: Meter, up: float, down: float, *, pieces: int = 20, idle_s: float = 0.0, at: float = 100.0) -> None:
    """A round in which that many MB pass each way, at these MB/s, after a while in which nothing does."""
    meter.begin(now=at)
    moments = [
        (at + idle_s + piece / rate, count) for rate, count in ((up, meter.sent), (down, meter.received))
        for piece in range(1, pieces + 1)
    ]
    for when, count in sorted(moments, key=lambda moment: moment[0]):
        count(MB, now=when)
    meter.end()


def test_the_narrower_direction_is_the_lines() -> None:
    meter = Meter()
    assert meter.line == Line()
    round_at(meter, up=10.0, down=40.0)
    assert meter.line.bytes_per_s == pytest.approx(10 * MB, rel=0.06)


def test_time_in_which_nobody_sent_does_not_count() -> None:
    meter = Meter()
    round_at(meter, up=10.0, down=10.0, idle_s=3.0)
    assert meter.line.bytes_per_s == pytest.approx(10 * MB, rel=0.06)


def test_small_changes_are_not_said_and_large_ones_are_believed_the_third_time() -> None:
    meter = Meter()
    said = []
    for rate in (10.0, 11.0, 9.5, 10.5, 10.0, 3.0, 3.1, 2.9):
        round_at(meter, up=rate, down=rate)
        said.append(round(meter.line.bytes_per_s / MB))
    assert said == [10] * 7 + [3]


def test_a_few_bytes_and_rounds_that_nobody_has_begun_say_nothing() -> None:
    meter = Meter()
    meter.begin(now=0.0)
    meter.received(LEAST_BYTES - 1, now=5.0)
    meter.end()
    meter.received(100 * MB, now=6.0)
    meter.sent(100 * MB, now=7.0)
    meter.end()
    assert meter.line == Line()


def test_the_shortest_of_a_mates_last_pings_counts_and_mates_are_bounded() -> None:
    meter = Meter()
    for seconds in (0.05, 0.02, 0.5):
        meter.ping(A, seconds)
    meter.ping(B, 0.0)
    assert meter.line.round_trips == ((A, 20_000), (B, 1))
    for _ in range(8):
        meter.ping(A, 0.3)
    assert meter.line.round_trips == ((A, 300_000), (B, 1)), "a mate may have moved"
    for number in range(MAX_MATES - 1):
        meter.ping(PeerId(f"c{number}"), 1.0)
    kept = dict(meter.line.round_trips)
    assert len(kept) == MAX_MATES and A in kept and B not in kept, "who was not heard of for longest is forgotten"


@given(st.lists(st.tuples(st.floats(0.001, 3.0), st.integers(0, 64 * MB)), min_size=1, max_size=40))
def test_the_busiest_stretch_is_the_best_of_all(steps: list[tuple[float, int]]) -> None:
    moments = [(0.0, 0)]
    for seconds, num_bytes in steps:
        moments.append((moments[-1][0] + seconds, moments[-1][1] + num_bytes))
    least_s = max(moments[-1][0] / 3, 0.05)
    stretches = [
        ((end - begin), after - before) for at, (begin, before) in enumerate(moments) for end, after in moments[at:]
    ]
    rates = [passed / seconds for seconds, passed in stretches if seconds >= least_s and passed >= LEAST_BYTES]
    found = busiest(moments)
    if not rates:
        assert found is None
    else:
        assert found is not None and max(rates) / 2 <= found <= max(rates)
