"""Who stands still is named after the time its line explains, a reducer only when nobody owes its own contribution."""

from __future__ import annotations

from swarmnet.averaging.watch import LEAST_S, Watch, allowance_s
from swarmnet.ids import Ballot, PeerId, RoundId
from swarmnet.messages import Late, Trouble

A, B, C = (PeerId(name) for name in "ABC")
ROUND, NEXT = RoundId(Ballot(1, A), 0), RoundId(Ballot(1, A), 1)
ALLOWED = {B: 20.0, C: 30.0}


def test_a_line_is_given_several_times_what_it_needs_for_its_round() -> None:
    assert allowance_s(1e9, 10_000_000) == 300.0
    assert allowance_s(1e6, 10_000_000) == LEAST_S
    assert allowance_s(1e9, 0) > 1000.0, "an unknown line is taken to be slow"


def test_a_stream_that_stands_still_is_named_once_its_time_is_over() -> None:
    watch = Watch()
    assert watch.trouble(now=0.0) is None
    watch.begin(ROUND, ALLOWED)
    with watch.stream(B, owes=True, now=100.0) as wait:
        assert watch.trouble(now=119.0) is None
        assert watch.trouble(now=121.0) == Trouble(ROUND, (Late(B, True, 20.0),))
        wait.came()
        assert watch.trouble(now=500.0) is None, "it waits for me"
        wait.wanted(now=500.0)
        assert watch.trouble(now=519.0) is None and watch.trouble(now=521.0) is not None
    assert watch.trouble(now=999.0) is None


def test_a_reducer_is_named_only_when_all_contributions_come() -> None:
    watch = Watch()
    watch.begin(ROUND, ALLOWED)
    with watch.stream(B, owes=False, now=0.0), watch.stream(C, owes=True, now=0.0) as owed:
        assert watch.trouble(now=25.0) == Trouble(ROUND, (Late(B, False, 20.0),))
        assert watch.trouble(now=31.0) == Trouble(ROUND, (Late(C, True, 30.0),))
        owed.came()
        assert watch.trouble(now=31.0) == Trouble(ROUND, (Late(B, False, 20.0),))


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
