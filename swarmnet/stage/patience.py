"""How long ranks may take for an order, and how often they may be lost. (With other peers: `pipeline.router`.) Pure.

A deadline is there for what never ends, not for what is slow: it is a multiple of what the same order has taken before,
and generous as long as little is known: first orders build kernels, fill caches, meet a busy machine.

Ranks are given up that do nothing but get lost. Work that is finished shows that they are good for something, and so
do minutes without a loss; neither shows that for an order that kills them whenever it comes (memory that is short in
nothing else, say): only that order, done, does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_SEEN = 3
"""Orders of a kind after which its pace is known."""

_FADES = 0.95
"""By how much the slowest order so far counts less with every further one."""


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """How long ranks may take for an order, how often they are started again, and after which pauses.

    first_s: for an order of which little is known. floor_s: for any. factor: times the slowest seen.
    restarts: how often ranks are started again without anything finished in between, or for one kind of order without
    one done in between; pauses before a restart grow from nothing over pause_s, doubled each time. forget_s: of being
    up, after which losses are forgotten that no order is to blame for.
    """

    first_s: float = 300.0
    floor_s: float = 60.0
    factor: float = 20.0
    restarts: int = 5
    pause_s: float = 0.25
    forget_s: float = 300.0

    def pause(self, losses: int) -> float:
        """Seconds to wait before ranks are started that were lost so often since something was finished."""
        return 0.0 if losses < 2 else self.pause_s * 2.0 ** (losses - 2)


@dataclass(slots=True)
class OrderTimes:
    """What orders have taken, by kind."""

    backoff: RestartBackoff
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def deadline_s(self, order: str) -> float:
        """How long an order of that kind may take."""
        backoff, (count, slowest) = self.backoff, self._seen.get(order, (0, 0.0))
        known = max(backoff.floor_s, backoff.factor * slowest)
        return known if count >= _SEEN else max(known, backoff.first_s)

    def took(self, order: str, seconds: float) -> None:
        """One was done."""
        count, slowest = self._seen.get(order, (0, 0.0))
        self._seen[order] = count + 1, max(seconds, _FADES * slowest)

    def started(self) -> None:
        """Ranks are new: their first orders are first ones again. What is known of slow ones stays."""
        self._seen = {order: (0, slowest) for order, (_, slowest) in self._seen.items()}


@dataclass(slots=True)
class Losses:
    """How often ranks were lost, in all and by the kind of order that they were at."""

    backoff: RestartBackoff
    _since_work: int = 0
    _in_order: dict[str, int] = field(default_factory=dict)

    @property
    def times(self) -> int:
        """How often in a row, as whatever counts most losses sees it."""
        return max(self._since_work, *self._in_order.values(), 0)

    @property
    def verdict(self) -> str | None:
        """Why ranks are given up, in words; None: they are not."""
        most = self.backoff.restarts
        if self._since_work > most:
            return f"were started {self._since_work} times and finished nothing"
        for order, times in self._in_order.items():
            if times > most:
                return f"were lost {times} times in the order {order!r}, which they never finished in between"
        return None

    def lost(self, order: str | None, *, up_s: float) -> None:
        """They were, at that order, after so long up; None: at no order, or as they started."""
        self._since_work = 1 if up_s >= self.backoff.forget_s else self._since_work + 1
        if order is not None:
            self._in_order[order] = self._in_order.get(order, 0) + 1

    def did(self, order: str) -> None:
        """They have done one of these, all of them."""
        self._in_order.pop(order, None)

    def finished(self) -> None:
        """They have finished work: a microbatch, an evaluation, a step."""
        self._since_work = 0
