"""How long others are waited for: it follows the usual pace of steps and claims. Pure."""

from __future__ import annotations

import statistics
from collections import deque

from swarmnet.step.view import Timers

_STEPS = 9
"""Steps whose median is the usual one."""


class Pace:
    """The longest recent pause between two claims of one replica, and how long its steps take; it outlives them."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._at: float | None = None
        self._gap_s: float | None = None
        self._applied_at: float | None = None
        self._steps_s: deque[float] = deque(maxlen=_STEPS)

    def applied(self, *, now: float) -> None:
        """A step is over."""
        if self._applied_at is not None:
            self._steps_s.append(now - self._applied_at)
        self._applied_at = now

    def interrupted(self) -> None:
        """State was taken over: how long that took is nobody's pace."""
        self._applied_at = None

    def patience_s(self, least_s: float, unknown_s: float) -> float:
        """Four times a usual step, at least `least_s`; `unknown_s` as long as none is known."""
        return max(least_s, 4 * statistics.median_low(self._steps_s)) if self._steps_s else unknown_s

    def begin(self) -> None:
        """Another step: the pause before its first claim is nobody's pace."""
        self._at = None

    def claimed(self, *, now: float) -> None:
        """Work on an index has begun."""
        if self._at is not None:
            self._gap_s = max(0.9 * (self._gap_s or 0.0), now - self._at)
        self._at = now

    @property
    def idle_s(self) -> float:
        """How long nothing may be claimed before idle indexes are ordered: a multiple of the pauses between claims."""
        if self._gap_s is None:
            return self._timers.idle_index_s
        # One step that was stuck must not make the next ones wait four times as long, and so on.
        least_s, most_s = 2 * self._timers.heartbeat_s, self._timers.long_silence_s
        if self._steps_s:
            most_s = min(max(2 * statistics.median_low(self._steps_s), self._timers.idle_index_s), most_s)
        return min(max(least_s, 4 * self._gap_s), most_s)
