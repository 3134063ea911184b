"""A line is measured by what crosses it while it is busy; idle time, noise and single rounds do not show."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.averaging.watch import LEAST_BYTES, Meter, busiest, so_far
from swarmnet.ids import PeerId
from swarmnet.messages import MAX_MATES, LineQuality

MB = 1 << 20
A, B = PeerId("a"), PeerId("b")


def round_at(meter: Meter, up: float, down: float, *, pieces: int = 20, idle_s: float = 0.0, at: float = 100.0) -> None:
    """A round in which that many MB pass each way, at these MB/s, after a while in which nothing does."""
    meter.begin()
    meter.received(1, since=at, now=at)
    for rate, count in ((up, meter.sent), (down, meter.received)):
        for piece in range(pieces):
            count(MB, since=at + idle_s + piece / rate, now=at + idle_s + (piece + 1) / rate)
    meter.end()


def test_the_narrower_direction_is_the_lines() -> None:
    meter = Meter()
    assert meter.line == LineQuality()
    round_at(meter, up=10.0, down=40.0)
    assert meter.line.bytes_per_s == pytest.approx(10 * MB, rel=0.06)


def test_no_more_is_said_than_is_lent() -> None:
    meter = Meter()
    round_at(meter, up=10.0, down=40.0)
    measured = meter.line.bytes_per_s
    meter.lent = measured // 2
    assert meter.line.bytes_per_s == measured // 2
    meter.lent = 2 * measured
    assert meter.line.bytes_per_s == measured
    meter.lent = 0
    assert meter.line.bytes_per_s == measured
    fresh = Meter()
    fresh.lent = measured
    assert fresh.line.bytes_per_s == 0, "what is lent may be more than the line carries"


def test_a_line_is_busy_if_two_rounds_have_waited_for_it():
    meter = Meter()
    for up, down, idle_s, busy in (
        (10.0, 10.0, 0.0, False),  # one may be luck
        (10.0, 40.0, 0.0, True),
        (10.0, 10.0, 1.5, False),  # nothing passes for nearly half of the round
        (10.0, 10.0, 0.0, False),
        (10.0, 10.0, 0.0, True),
        (7.0, 7.0, 0.0, False),  # the line is known to carry more
    ):
        round_at(meter, up=up, down=down, idle_s=idle_s)
        assert meter.line.busy is busy


def test_a_line_that_is_lent_in_part_is_one_that_rounds_may_wait_for():
    meter = Meter()
    round_at(meter, up=10.0, down=10.0, idle_s=1.5)
    meter.lent = meter.line.bytes_per_s // 2
    assert meter.line.busy


def test_time_in_which_nobody_sent_does_not_count() -> None:
    meter = Meter()
    round_at(meter, up=10.0, down=10.0, idle_s=3.0)
    assert meter.line.bytes_per_s == pytest.approx(10 * MB, rel=0.06)


def test_small_changes_are_not_said_and_a_line_is_not_narrow_because_of_a_few_bad_rounds() -> None:
    meter = Meter()
    said = []
    for rate in (10.0, 11.0, 9.5, 10.5, 10.0, *[3.0] * 10):
        round_at(meter, up=rate, down=rate)
        said.append(round(meter.line.bytes_per_s / MB))
    assert said == [10] * 13 + [3] * 2, "believed once nine rounds in a row say so"


def test_a_few_bytes_and_rounds_that_nobody_has_begun_say_nothing() -> None:
    meter = Meter()
    meter.begin()
    meter.received(LEAST_BYTES - 1, since=4.0, now=5.0)
    meter.end()
    meter.received(100 * MB, since=5.0, now=6.0)
    meter.sent(100 * MB, since=5.0, now=7.0)
    meter.end()
    assert meter.line == LineQuality()


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


def test_transfers_side_by_side_share_the_line() -> None:
    """Three that end at once have passed since they began, not at the moment they ended."""
    meter = Meter()
    meter.begin()
    for turn in range(4):
        for mate in range(3):
            meter.received(MB, since=3.0 * turn + 0.1 * mate, now=3.0 * turn + 2.9 + 0.01 * mate)
    meter.end()
    assert meter.line.bytes_per_s == pytest.approx(MB, rel=0.1)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9), st.integers(0, MB)), min_size=1, max_size=20))
def test_every_byte_is_counted_once(transfers: list[tuple[float, float, int]]) -> None:
    moments = so_far([(began, began + took, num_bytes) for began, took, num_bytes in transfers])
    assert moments[-1][1] == pytest.approx(sum(num_bytes for _, _, num_bytes in transfers), abs=1.0)
    assert all(a[0] < b[0] and a[1] <= b[1] + 1e-3 for a, b in itertools.pairwise(moments))


@given(st.lists(st.tuples(st.floats(0.001, 3.0), st.integers(0, 64 * MB)), min_size=1, max_size=30))
def test_the_busiest_stretch_is_no_slower_than_all_and_no_faster_than_any(steps: list[tuple[float, int]]) -> None:
    moments = [(0.0, 0.0)]
    for seconds, num_bytes in steps:
        moments.append((moments[-1][0] + seconds, moments[-1][1] + num_bytes))
    stretches = [
        (end - begin, after - before) for at, (begin, before) in enumerate(moments) for end, after in moments[at:]
    ]
    enough = max(min(moments[-1][1], max(moments[-1][1] / 4, 4 * MB)), LEAST_BYTES)
    rates = [passed / seconds for seconds, passed in stretches if seconds >= 0.05 and passed >= enough]
    found = busiest(moments)
    assert (found is None) == (not rates)
    if found is not None:
        assert moments[-1][1] / moments[-1][0] <= found <= max(rates)
