"""How long a step may stand still before its keeper has idle indexes executed: it follows the usual pace. Pure."""

from __future__ import annotations

from swarmnet.step.view import Timers


class Pace:
    """The longest recent pause between two claims of one replica; it outlives the step."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._at: float | None = None
        self._gap_s: float | None = None

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
        return min(max(2 * self._timers.heartbeat_s, 4 * self._gap_s), self._timers.long_silence_s)
