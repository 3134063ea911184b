"""Who stands still is named after the time its line explains, a reducer only when nobody owes its own contribution."""

from __future__ import annotations

import pytest

from swarmnet.averaging.watch import LEAST_S, Watch, allowance_s, needs_s
from swarmnet.ids import Ballot, PeerId, RoundId
from swarmnet.messages import Late, Trouble

A, B, C = (PeerId(name) for name in "ABC")
ROUND, NEXT = RoundId(Ballot(1, A), 0), RoundId(Ballot(1, A), 1)
ALLOWED = {B: 20.0, C: 30.0}


def test_a_line_is_given_several_times_what_it_needs_for_its_round_or_for_what_it_sends_at_once() -> None:
    assert allowance_s(1e8, 10_000_000, 1e9) == 30.0
    assert allowance_s(1e6, 10_000_000, 1e6) == LEAST_S
    assert allowance_s(1e12, 100_000, 4e6) == 135.0, "its chunks take 40 s each"
    assert allowance_s(1e12, 10_000_000, 48 << 20) == 15.0 + 48, "a large vector does not make chunks slower"
    assert allowance_s(1e12, 1, 48 << 20) == 600.0, "nobody can say that it may stand still for ever"


@pytest.mark.parametrize("num_bytes", [1e6, 1e8, 1e10, 1e13])
def test_an_unmeasured_line_is_taken_to_be_slow_and_its_stream_is_given_two_minutes_at_most(num_bytes: float) -> None:
    for streams in (2, 6, 30):
        at_once = streams * min(num_bytes, 8.0 * (1 << 20))
        allowed = allowance_s(num_bytes, 0, at_once)
        assert min(at_once / (1 << 20), 2 * num_bytes / (1 << 20), 120.0) <= allowed <= 120.0


def test_the_slowest_chunk_so_far_says_how_long_the_next_one_may_take_within_bounds() -> None:
    watch = Watch()
    watch.begin(ROUND, ALLOWED)
    with watch.stream(B, owes=True, now=0.0), watch.stream(C, owes=True, now=0.0) as slow:
        slow.came(now=15.0)
        assert watch.trouble(now=44.0) is None
        assert watch.trouble(now=46.0) == Trouble(ROUND, (Late(B, True, 45.0),)), "three times what C's chunk took"
        slow.wanted(now=50.0)
        slow.came(now=150.0)
        assert watch.trouble(now=61.0) == Trouble(ROUND, (Late(B, True, 60.0),)), "three times its own at the most"
    watch.begin(NEXT, ALLOWED)
    with watch.stream(B, owes=True, now=200.0):
        assert watch.trouble(now=221.0) == Trouble(NEXT, (Late(B, True, 20.0),)), "another round"


def test_a_stream_that_stands_still_is_named_once_its_time_is_over() -> None:
    watch = Watch()
    assert watch.trouble(now=0.0) is None
    watch.begin(ROUND, ALLOWED)
    with watch.stream(B, owes=True, now=100.0) as wait:
        assert watch.trouble(now=119.0) is None
        assert watch.trouble(now=121.0) == Trouble(ROUND, (Late(B, True, 20.0),))
        wait.came(now=122.0)
        assert watch.trouble(now=500.0) is None, "it waits for me"
        wait.wanted(now=500.0)
        assert watch.trouble(now=559.0) is None and watch.trouble(now=561.0) is not None, "it has been slow before"
    assert watch.trouble(now=999.0) is None


def test_a_reducer_is_named_only_when_all_contributions_come() -> None:
    watch = Watch()
    watch.begin(ROUND, ALLOWED)
    with watch.stream(B, owes=False, now=0.0), watch.stream(C, owes=True, now=1.0) as owed:
        assert watch.trouble(now=25.0) is None, "it may wait for the slowest, whose time is not over"
        assert watch.trouble(now=30.5) == Trouble(ROUND, (Late(B, False, 30.0),))
        assert watch.trouble(now=31.5) == Trouble(ROUND, (Late(C, True, 30.0),))
        owed.came(now=10.0)
        assert watch.trouble(now=31.0) == Trouble(ROUND, (Late(B, False, 30.0),))


def test_a_refusal_is_remembered_for_its_round_and_no_longer() -> None:
    watch = Watch()
    watch.begin(ROUND, ALLOWED)
    watch.refused(B)
    watch.end()
    watch.begin(ROUND, ALLOWED)
    assert watch.trouble(now=0.0) == Trouble(ROUND, (), (B,))
    watch.begin(NEXT, ALLOWED)
    assert watch.trouble(now=0.0) is None
    watch.refused(C)
    watch.forget()
    assert watch.trouble(now=0.0) is None


def test_a_stream_that_breaks_again_when_it_is_asked_for_again_is_broken_until_it_is_answered() -> None:
    watch = Watch()
    watch.begin(ROUND, ALLOWED)
    with watch.stream(B, owes=False, now=0.0) as wait, watch.stream(B, owes=True, now=0.0) as other:
        assert watch.waits(now=0.0) == {B: False}
        wait.broke(now=1.0)
        assert watch.waits(now=1.0) == {B: False}, "one connection was lost"
        wait.broke(now=1.1)
        assert watch.waits(now=1.2) == {B: True}
        assert watch.waits(now=9.0) == {B: False}, "it does not break any more: it is being answered"
        wait.broke(now=9.0)
        wait.came(now=9.1)
        assert watch.waits(now=9.1) == {B: False}, "that is the other stream"
        other.came(now=9.1)
        assert watch.waits(now=9.1) == {}, "nothing is wanted"
        wait.wanted(now=9.2)
        wait.broke(now=9.3)
        assert watch.waits(now=9.3) == {B: False}, "the first time since its last chunk"
    assert watch.waits(now=9.4) == {}


def test_who_owes_its_contribution_is_awaited_beyond_what_a_chunk_needs_and_reducers_only_when_nobody_does() -> None:
    watch = Watch()
    watch.begin(ROUND, ALLOWED, {B: 2.0, C: 0.0})
    with watch.stream(A, owes=False, now=0.0), watch.stream(B, owes=True, now=0.0) as owing:
        assert watch.awaited(now=1.0) == frozenset() and watch.awaited(now=3.0) == {B}
        owing.came(now=3.0)
        assert watch.awaited(now=3.0) == {A}
        with watch.stream(C, owes=False, now=3.0) as busy:
            assert watch.awaited(now=4.0) == {A, C}
            busy.excused()
            assert watch.awaited(now=4.0) == {A}, "it waits for others itself, and says so"
    assert watch.awaited(now=9.0) == frozenset()


def test_a_chunk_needs_as_long_as_what_its_sender_may_be_sending_at_once() -> None:
    assert needs_s(1 << 20, 4 << 20) == 4.0 and needs_s(0, 1 << 20) == 1.0
