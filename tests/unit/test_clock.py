"""The clock of a process: what moves it, what it tells, and whose time it accepts."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet import clock
from swarmnet.clock import MOST_APART_S, Changes, WallClock, correction_s, run_loop

HOUR_S = 3600.0
STARTED = 1.8e9


class Machine:
    """The three clocks of a machine, and what can become of them."""

    def __init__(self) -> None:
        self.boot, self.awake, self.system = 1000.0, 900.0, STARTED

    def runs(self, seconds: float) -> None:
        self.boot, self.awake, self.system = self.boot + seconds, self.awake + seconds, self.system + seconds

    def sleeps(self, seconds: float) -> None:
        self.boot, self.system = self.boot + seconds, self.system + seconds

    def is_set(self, by_s: float) -> None:
        self.system += by_s

    def clock(self) -> WallClock:
        return WallClock(lambda: self.boot, lambda: self.system, lambda: self.awake)


@given(st.lists(st.tuples(st.sampled_from(["runs", "sleeps", "is_set"]), st.floats(0.0, 1e6), st.booleans())))
def test_only_time_that_passes_moves_the_clock(story: list[tuple[str, float, bool]]) -> None:
    machine = Machine()
    wall = machine.clock()
    passed = 0.0
    for event, seconds, back in story:
        if event == "is_set":
            machine.is_set(-seconds if back else seconds)
        else:
            getattr(machine, event)(seconds)
            passed += seconds
        wall.look()
        assert wall.time() == pytest.approx(STARTED + passed, abs=1e-3)
    assert wall.ahead_s() == pytest.approx(wall.time() - machine.system, abs=1e-3)


@pytest.mark.parametrize("by_s", [-HOUR_S, HOUR_S])
def test_a_change_of_the_systems_clock_is_told_once(by_s: float) -> None:
    machine = Machine()
    wall = machine.clock()
    assert wall.look() == Changes(0.0, 0.0)
    machine.is_set(by_s)
    assert wall.look() == Changes(by_s, 0.0)
    machine.runs(60.0)
    assert wall.look() == Changes(0.0, 0.0)


def test_two_hours_of_sleep_have_passed_and_are_no_change_of_the_clock() -> None:
    machine = Machine()
    wall = machine.clock()
    machine.sleeps(2 * HOUR_S)
    assert wall.time() == STARTED + 2 * HOUR_S
    assert wall.look() == Changes(0.0, 2 * HOUR_S)


def test_a_process_that_is_stopped_between_two_readings_sees_no_change() -> None:
    machine = Machine()
    wall = machine.clock()
    stops = [2 * HOUR_S]

    def system() -> float:
        found = machine.system
        machine.runs(stops.pop() if stops else 0.0)
        return found

    wall._system = system
    assert wall.look() == Changes(0.0, 0.0)
    assert not stops


def test_the_loop_goes_by_boot_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two hours of sleep a deadline of an hour is over, though nothing else has happened meanwhile."""
    asleep = [0.0]
    real = clock.boot_time
    monkeypatch.setattr(clock, "boot_time", lambda: real() + asleep[0])

    async def story() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(HOUR_S):
                asyncio.get_running_loop().call_soon(asleep.__setitem__, 0, 2 * HOUR_S)
                await asyncio.sleep(0)
                await asyncio.sleep(10 * HOUR_S)

    run_loop(story())


AGREE = [0.1, -0.1, 0.0]


@pytest.mark.parametrize(
    ("ahead_s", "joining", "running"),
    [
        ([], 0.0, 0.0),
        (AGREE, 0.0, 0.0),
        ([MOST_APART_S - 0.1] * 3, 0.0, 0.0),
        # All others say the same: this clock is wrong, or this virtual machine was paused.
        ([HOUR_S], HOUR_S, HOUR_S),
        ([HOUR_S] * 3, HOUR_S, HOUR_S),
        ([-HOUR_S] * 3, -HOUR_S, -HOUR_S),
        # A peer that was here before does not follow one that is late: that one follows it.
        ([-HOUR_S], -HOUR_S, 0.0),
        # A wrong clock among others misleads nobody.
        ([HOUR_S, *AGREE], 0.0, 0.0),
        ([-HOUR_S, *AGREE], 0.0, 0.0),
        ([HOUR_S, 0.0], 0.0, 0.0),
        ([-1e300, 1e300, 0.0], 0.0, 0.0),
        ([1e300], 1e300, 0.0),
    ],
)
def test_whose_time_is_accepted(ahead_s: list[float], joining: float, running: float) -> None:
    assert correction_s(ahead_s, joining=True) == pytest.approx(joining, abs=0.2)
    assert correction_s(ahead_s, joining=False) == pytest.approx(running, abs=0.2)


@given(st.lists(st.sampled_from([0.0, HOUR_S, -HOUR_S]), min_size=2, max_size=7))
def test_clocks_that_correct_themselves_in_turn_agree(clocks: list[float]) -> None:
    """Each sees all others. Two turns of all are enough, and what most said at first is what they say then."""
    told = list(clocks)
    for me in [*range(len(told)), *range(len(told))]:
        told[me] += correction_s([other - told[me] for n, other in enumerate(told) if n != me], joining=False)
    assert len(set(told)) == 1
    most = max(clocks, key=clocks.count)
    assert told[0] == most or 2 * clocks.count(most) <= len(clocks)
