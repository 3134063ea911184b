"""What time it is: the only module that says what time peers agree on, and by which clock a peer is alive.

| for | clock |
|---|---|
| heartbeats, deadlines, renewals: whatever passes between machines | `boot_time`, the clock of `run_loop` |
| what machines must agree on: expiry of records and invitations, certificates, greetings | `wall_time` |
| a wait for a process of this machine, which sleeps when the machine does | `time.monotonic` |

Boot time goes on while a machine sleeps and monotonic time does not, so a laptop that wakes up knows that its leases
have run out. Nothing sets either of them. The system's clock can be set at any moment, so it is read once at the
start. Later it is read to report a change, and a peer that has met no other peer accepts the new time.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

LOOK_S = 1.0
"""How often the system's clock is looked at."""

MOST_APART_S = 5.0
"""A clock that is further from its neighbours' is corrected. Less is left alone: neighbours who each add a little
cannot lead a clock away, and a slow answer looks like an offset."""

_CHANGED_S = 1.0
"""A smaller change of the system's clock is not worth a line."""

_READINGS = 3

_MOST_S = 366 * 24 * 3600.0
"""A neighbour that claims more says nothing about a peer that runs."""


def boot_time() -> float:
    """Seconds since this machine was booted, its sleep included."""
    # Elsewhere than on Linux the monotonic clock of the system counts sleep.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def loop_time() -> float:
    """The running event loop's clock, seconds: boot time in a peer, and in the simulator it jumps."""
    return asyncio.get_running_loop().time()


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until the event is set, or for so many seconds (None: for ever). Returns whether it is set."""
    # A timer costs more than a look, and in the pipeline the event is mostly set.
    if not event.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
    return event.is_set()


class BootLoop(asyncio.SelectorEventLoop):
    """asyncio by boot time: after a sleep every timer that has become due fires, as after SIGSTOP and SIGCONT."""

    def time(self) -> float:
        """Seconds of `boot_time`."""
        return boot_time()


def loop_runner() -> asyncio.Runner:
    """`asyncio.Runner`, by boot time."""
    return asyncio.Runner(loop_factory=BootLoop)


@contextlib.contextmanager
def entered(runner: asyncio.Runner, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter `manager` in the runner's loop, and leave it there in the end. In between the loop may rest."""
    found = runner.run(_awaited(manager.__aenter__()))
    try:
        yield found
    finally:
        runner.run(_awaited(manager.__aexit__(None, None, None)))


async def _awaited(entering: Awaitable[T]) -> T:
    return await entering


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, by boot time."""
    with loop_runner() as runner:
        return runner.run(main)


@dataclass(frozen=True, slots=True)
class Changes:
    """Seconds. set_by: by how much the system's clock was set forward. asleep: how long the machine slept."""

    set_by: float
    asleep: float


class WallClock:
    """Unix seconds: the system's at the start, and boot time since. Only `correct` sets it.

    Invariant: between two corrections it runs exactly as boot time does, whatever becomes of the system's clock.
    """

    def __init__(
        self,
        boot: Callable[[], float] = boot_time,
        system: Callable[[], float] = lambda: time.time(),
        awake: Callable[[], float] = lambda: time.monotonic(),
    ) -> None:
        self._boot, self._system, self._awake = boot, system, awake
        self.began = self._ahead_of_boot(system)
        """When the machine was booted, as this clock has it. Unix seconds."""
        self._system_began, self._slept = self.began, -self._ahead_of_boot(awake)

    def time(self) -> float:
        """Unix seconds, now."""
        return self.began + self._boot()

    def correct(self, by_s: float) -> None:
        """Set this clock forward."""
        self.began += by_s

    def ahead_s(self) -> float:
        """How far this clock is ahead of the system's."""
        return self.began - self._ahead_of_boot(self._system)

    def look(self) -> Changes:
        """What became of this machine's clocks since the last look."""
        system, slept = self._ahead_of_boot(self._system), -self._ahead_of_boot(self._awake)
        set_by, asleep = system - self._system_began, slept - self._slept
        self._system_began, self._slept = system, slept
        return Changes(set_by if abs(set_by) >= _CHANGED_S else 0.0, asleep if asleep >= _CHANGED_S else 0.0)

    def _ahead_of_boot(self, other: Callable[[], float]) -> float:
        # This process may be stopped between two readings. The readings that took the least time are right.
        return min(self._reading(other) for _ in range(_READINGS))[1]

    def _reading(self, other: Callable[[], float]) -> tuple[float, float]:
        before, there, after = self._boot(), other(), self._boot()
        return after - before, there - (before + after) / 2


CLOCK = WallClock()
"""This process's."""


def wall_time() -> float:
    """Unix seconds by `CLOCK`."""
    return CLOCK.time()


def correction_s(ahead_s: Sequence[float], *, joining: bool) -> float:
    """By how much to set a clock forward if the neighbours' clocks are so far ahead of it; 0.0: not at all.

    While it joins, a peer accepts the median of the others. Later its own clock has a vote, and of two halves of the
    votes those of the later time win: a paused virtual machine is late, and nothing makes a clock early.
    """
    votes = ahead_s if joining else (0.0, *(each for each in ahead_s if abs(each) < _MOST_S))
    if not votes:
        return 0.0
    by_s = statistics.median_high(votes)
    # Of an even number either of the two in the middle is the median.
    if joining:
        by_s = min(by_s, statistics.median_low(votes), key=abs)
    return by_s if abs(by_s) > MOST_APART_S else 0.0
