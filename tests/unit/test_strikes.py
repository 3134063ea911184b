"""Who is not waited for, and for how long: in proportion to what it has cost, longer each time, and not for ever."""

from __future__ import annotations

from stage_table import TIMERS

from swarmnet.ids import PeerId
from swarmnet.step.strikes import Delays, Strikes, sitting

A, B, C, D, E = (PeerId(name) for name in "ABCDE")
LONGEST_S = 16 * TIMERS.long_silence_s


def until(strikes: Strikes, peer: PeerId, now: float) -> float:
    """How much longer it sits out, to a tenth of a second."""
    return next(tenths / 10 for tenths in range(100_000) if not strikes.sits(peer, now=now + tenths / 10))


def test_who_was_never_struck_is_waited_for():
    strikes = Strikes(TIMERS)
    strikes.strike(A, "does not report", cost_s=1.0, now=0.0)
    assert not strikes.sits(B, now=0.0) and strikes.level(B, now=0.0) == 0


def test_it_sits_out_sixteen_times_what_it_cost_and_twice_that_the_next_time():
    strikes = Strikes(TIMERS)
    (note,) = strikes.strike(A, "does not report", cost_s=2.0, now=0.0)
    assert note.fields == {"peer": A, "reason": "does not report", "cost_s": 2.0, "sits_out_s": 32.0, "strikes": 1}
    assert until(strikes, A, 0.0) == 32.0
    strikes.strike(A, "does not report", cost_s=2.0, now=32.0)
    assert until(strikes, A, 32.0) == 64.0 and strikes.level(A, now=32.0) == 2


def test_whoever_sits_out_is_not_waited_for_and_gets_no_second_strike_for_it():
    strikes = Strikes(TIMERS)
    strikes.strike(A, "does not report", cost_s=2.0, now=0.0)
    assert strikes.strike(A, "does not keep in its turn", cost_s=2.0, now=1.0) == []
    assert strikes.level(A, now=1.0) == 1


def test_nobody_sits_out_longer_than_the_longest():
    strikes, now = Strikes(TIMERS), 0.0
    for _ in range(10):
        strikes.strike(A, "does not report", cost_s=TIMERS.long_silence_s, now=now)
        assert until(strikes, A, now) == LONGEST_S
        now += LONGEST_S
    assert strikes.level(A, now=now) == 5


def test_strikes_fade():
    strikes = Strikes(TIMERS)
    strikes.strike(A, "does not report", cost_s=1.0, now=0.0)
    strikes.strike(A, "does not report", cost_s=1.0, now=16.0)
    assert strikes.level(A, now=48.0) == 2
    assert [strikes.level(A, now=48.0 + 4 * 32.0 * times) for times in (1, 2, 3)] == [1, 0, 0]


def test_of_many_peers_the_strikes_of_the_latest_are_kept():
    strikes = Strikes(TIMERS)
    for number in range(5000):
        strikes.strike(PeerId(f"p{number}"), "does not report", cost_s=10.0, now=0.0)
    assert not strikes.sits(PeerId("p0"), now=0.0) and strikes.sits(PeerId("p4999"), now=0.0)


def test_debts_add_up_to_a_strike_and_are_paid_off_in_time():
    strikes = Strikes(TIMERS)
    assert strikes.charge(A, "slow", cost_s=3.0, now=0.0) == []
    (note,) = strikes.charge(A, "slow", cost_s=3.0, now=16.0)  # one second was paid off: 5 of 4.5
    assert note.fields["cost_s"] == 5.0 and strikes.sits(A, now=16.0)
    assert strikes.charge(B, "slow", cost_s=4.0, now=0.0) == [] == strikes.charge(B, "slow", cost_s=4.0, now=64.0)


def test_a_pardon_is_for_the_first_time():
    strikes = Strikes(TIMERS)
    assert strikes.strike(A, "alone", cost_s=9.0, pardon=True, now=0.0) == []
    assert not strikes.sits(A, now=0.0) and strikes.strike(A, "alone", cost_s=9.0, pardon=True, now=1.0)


def test_less_than_half_of_those_who_live_sit_out_the_worst_of_them():
    strikes, live = Strikes(TIMERS), {A, B, C, D}
    for peer, cost_s in ((A, 1.0), (B, 3.0), (C, 2.0)):
        strikes.strike(peer, "slow", cost_s=cost_s, now=0.0)
    assert sitting(live, strikes, frozenset(), live, now=1.0) == {B}
    assert sitting(live, strikes, {C}, live, now=1.0) == {C}, "most others shun it"
    assert sitting(live | {E}, strikes, {E}, live, now=1.0) == {B, E}, "who does not count takes nobody's place"
    assert sitting({A, B}, strikes, frozenset(), {A, B}, now=1.0) == frozenset(), "of two nobody"
    vain = Strikes(TIMERS)
    vain.strike(A, "keeps", cost_s=0.1, now=0.0)
    assert sitting(live, strikes, {C}, live, vain=vain, now=1.0) == {A}, "who kept in vain before all others"


def test_who_alone_is_waited_for_owes_what_goes_beyond_half_of_the_rest():
    strikes, delays = Strikes(TIMERS), Delays(TIMERS, 0.0)
    delays.note({A}, 3, now=2.0)  # until 12: 10 s, where the rest takes 2 + 2
    (note,) = delays.charge(strikes, B, now=12.0) or [None]
    assert note is not None and note.fields["peer"] == A and note.fields["cost_s"] == 8.0
    again = Delays(TIMERS, 20.0)
    again.note({B, C}, 3, now=21.0)
    assert again.charge(strikes, A, now=60.0) == [], "most are waited for: that is nobody's fault"
    mine = Delays(TIMERS, 60.0)
    mine.note({B}, 3, now=60.0)
    assert mine.charge(strikes, B, now=90.0) == [], "nobody holds it against itself"
