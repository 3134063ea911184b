"""Who is not waited for, and for how long: in proportion to what it has cost, longer each time, and not for ever."""

from __future__ import annotations

from stage_table import TIMERS

from swarmnet.ids import PeerId
from swarmnet.step.strikes import Strikes

A, B = PeerId("A"), PeerId("B")
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
    for number in range(2000):
        strikes.strike(PeerId(f"p{number}"), "does not report", cost_s=10.0, now=0.0)
    assert not strikes.sits(PeerId("p0"), now=0.0) and strikes.sits(PeerId("p1999"), now=0.0)
