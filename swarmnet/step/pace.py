"""How long others are waited for, by the pace of claims and of steps. Pure."""

from __future__ import annotations

import statistics
from collections import deque

from swarmnet.ids import PeerId
from swarmnet.step.view import Timers

_KEPT_STEPS, _KEEPERS = 9, 16
"""Steps of one keeper, and keepers, in the median of a usual step: no single keeper makes slow steps usual."""

_SLOW = 4
"""Usual steps that a step may take."""


class Pace:
    """The longest recent pause between two claims of one replica, and how long its steps take; it outlives them."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._at: float | None = None
        self._gap_s: float | None = None
        self._applied_at: float | None = None
        self._steps_s: dict[PeerId | None, deque[float]] = {}  # by keeper, the latest last
        self._slow_s: list[float] = []  # the slow steps in a row under the last keeper

    def applied(self, keeper: PeerId | None = None, *, late_s: float = 0.0, now: float) -> float:
        """A step is over. Returns how long the last slow steps in a row under this keeper took together.

        0 unless they were two at least and cost more than four silence limits. late_s: the seconds of the step for
        which another member is to blame.
        """
        if self._applied_at is None:
            self._applied_at = now
            return 0.0
        took_s, self._applied_at = now - self._applied_at, now
        if keeper != next(reversed(self._steps_s), None):
            self._slow_s = []
        usual_s = self._usual_s(without=keeper)
        slow = usual_s is not None and took_s - late_s > max(self._timers.suspect_s, _SLOW * usual_s)
        self._slow_s = [*self._slow_s, took_s] if slow else []
        steps_s = self._steps_s.pop(keeper, deque(maxlen=_KEPT_STEPS))
        steps_s.append(took_s)
        self._steps_s[keeper] = steps_s
        if len(self._steps_s) > _KEEPERS:
            del self._steps_s[next(iter(self._steps_s))]
        cost_s = sum(self._slow_s)
        return cost_s if len(self._slow_s) > 1 and cost_s > _SLOW * self._timers.suspect_s else 0.0

    def _usual_s(self, without: PeerId | None = None) -> float | None:
        found = [took for keeper, took in self._steps_s.items() if without is None or keeper != without]
        medians = [statistics.median_low(took) for took in found]
        return statistics.median_low(medians) if medians else None

    def interrupted(self) -> None:
        """State was taken over: how long that took is nobody's pace."""
        self._applied_at = None

    def patience_s(self, least_s: float, unknown_s: float) -> float:
        """Four times a usual step, at least `least_s`; `unknown_s` as long as none is known."""
        usual_s = self._usual_s()
        return max(least_s, _SLOW * usual_s) if usual_s is not None else unknown_s

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
        """Seconds without a claim before idle indexes are ordered: a multiple of the pauses between claims."""
        if self._gap_s is None:
            return self._timers.idle_index_s
        # One step that was stuck must not make the next ones wait four times as long, and so on.
        least_s, most_s = 2 * self._timers.heartbeat_s, self._timers.long_silence_s
        if (usual_s := self._usual_s()) is not None:
            most_s = min(max(2 * usual_s, self._timers.idle_index_s), most_s)
        return min(max(least_s, 4 * self._gap_s), most_s)
