"""How long others are waited for, by the pace of claims and of steps. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from swarmnet.ids import PeerId
from swarmnet.manifest.timers import Timers

_RECENT_STEPS = 16

_COMPARED_STEPS = 64
"""A leader's step is compared with those of other leaders among so many."""

_USUAL_STEPS = 2
"""Usual steps under other leaders that a step may take."""


def _usual(seconds: Collection[float]) -> float:
    """The lower quartile: steps that a fault has made slow do not lengthen the wait for the next fault."""
    return sorted(seconds)[len(seconds) // 4]


class Pace:
    """How long the steps of one replica take, and the longest pause of a step between two of its claims."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._claimed_at: float | None = None
        self._gap_s: float | None = None  # the longest pause of this step
        self._gaps_s = deque[float](maxlen=_RECENT_STEPS)  # of the last steps
        self._applied_at: float | None = None
        self._steps = deque[tuple[PeerId | None, float]](maxlen=_COMPARED_STEPS)  # who led, seconds

    def applied(self, leader: PeerId | None = None, *, now: float) -> float:
        """A step is over. Returns by how many seconds it was longer than two usual steps under other leaders; 0 while
        none is known."""
        if self._applied_at is None:
            self._applied_at = now
            return 0.0
        took_s, self._applied_at = now - self._applied_at, now
        # A leader that is always slow must not become the measure.
        others = [seconds for led_by, seconds in self._steps if led_by != leader]
        self._steps.append((leader, took_s))
        return max(took_s - _USUAL_STEPS * _usual(others), 0.0) if others else 0.0

    @property
    def usual_s(self) -> float | None:
        """The lower quartile of the last steps, in seconds; None: none is known."""
        recent = [seconds for _, seconds in self._steps][-_RECENT_STEPS:]
        return _usual(recent) if recent else None

    def interrupted(self) -> None:
        """State was taken over: the time that took is no step's."""
        self._applied_at = None

    @property
    def patience_s(self) -> float:
        """How long a step waits for a replica that is in touch and does not do its part."""
        usual_s = self.usual_s
        return self._timers.lease_s if usual_s is None else max(2 * usual_s, 2 * self._timers.suspect_s)

    def begin(self) -> None:
        """Another step: the pause before its first claim does not count."""
        if self._gap_s is not None:
            self._gaps_s.append(self._gap_s)
        self._claimed_at = self._gap_s = None

    def claimed(self, *, now: float) -> None:
        """Work on an index has begun."""
        if self._claimed_at is not None:
            self._gap_s = max(self._gap_s or 0.0, now - self._claimed_at)
        self._claimed_at = now

    @property
    def idle_s(self) -> float:
        """Seconds without a claim before free indexes are ordered."""
        if not self._gaps_s:
            return self._timers.idle_s
        # One step that was stuck must not make the next ones wait four times as long, and so on.
        most_s = self._timers.long_silence_s
        if (usual_s := self.usual_s) is not None:
            most_s = min(max(2 * usual_s, self._timers.idle_s), most_s)
        return min(max(self._timers.beat_s, 4 * _usual(self._gaps_s)), most_s)
