"""How long ranks may take for an order, and how often they may be lost. Pure.

A deadline is there for what never ends, not for what is slow: it is a multiple of what the same order has taken before,
and generous as long as little is known: first orders build kernels, fill caches, meet a busy machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_SEEN = 3
"""Orders of a kind after which its pace is known."""

_FADES = 0.95
"""By how much the slowest order so far counts less with every further one."""


@dataclass(frozen=True, slots=True)
class Patience:
    """first_s: for an order of which little is known. floor_s: for any. factor: times the slowest seen.

    restarts: how often ranks are started again without anything finished in between; pauses before a restart grow from
    nothing over pause_s, doubled each time.
    """

    first_s: float = 300.0
    floor_s: float = 60.0
    factor: float = 20.0
    restarts: int = 5
    pause_s: float = 0.25

    def pause(self, losses: int) -> float:
        """Seconds to wait before ranks are started that were lost so often since something was finished."""
        return 0.0 if losses < 2 else self.pause_s * 2.0 ** (losses - 2)


@dataclass(slots=True)
class Pace:
    """What orders have taken, by kind."""

    patience: Patience
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def deadline_s(self, order: str) -> float:
        """How long an order of that kind may take."""
        patience, (count, slowest) = self.patience, self._seen.get(order, (0, 0.0))
        known = max(patience.floor_s, patience.factor * slowest)
        return known if count >= _SEEN else max(known, patience.first_s)

    def took(self, order: str, seconds: float) -> None:
        """One was done."""
        count, slowest = self._seen.get(order, (0, 0.0))
        self._seen[order] = count + 1, max(seconds, _FADES * slowest)

    def started(self) -> None:
        """Ranks are new: their first orders are first ones again. What is known of slow ones stays."""
        self._seen = {order: (0, slowest) for order, (_, slowest) in self._seen.items()}
