"""How many one-way messages a caller may send: a token bucket per caller, in messages and in bytes (or in keys).

Pure: it says how long to leave a caller's link unread. Its messages then wait in its own connection, and nobody else's
behind them. A caller is the same on whichever connection it speaks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from swarmnet.ids import PeerId

_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one caller may send in the long run; `burst_s` seconds of it may come at once."""

    messages_per_s: float
    bytes_per_s: float
    burst_s: float = 4.0


class _Bucket:
    """Seconds of each allowance that are used up: it drains by a second a second."""

    __slots__ = ("at", "bytes_s", "messages_s", "told")

    def __init__(self, now: float) -> None:
        self.messages_s = self.bytes_s = 0.0
        self.at, self.told = now, False

    def add(self, messages_s: float, bytes_s: float, now: float) -> float:
        drained, self.at = now - self.at, now
        self.messages_s = max(self.messages_s - drained, 0.0) + messages_s
        self.bytes_s = max(self.bytes_s - drained, 0.0) + bytes_s
        return max(self.messages_s, self.bytes_s)


class Allowances:
    """The buckets of all callers. Of too many the one unheard for longest is forgotten."""

    def __init__(self, each: Allowance) -> None:
        self._each = each
        self._buckets: OrderedDict[PeerId, _Bucket] = OrderedDict()

    def take(self, caller: PeerId, num_bytes: float, now: float) -> float:
        """Count a message. Returns for how many seconds to read nothing more of this caller's."""
        bucket = self._buckets.setdefault(caller, _Bucket(now))
        self._buckets.move_to_end(caller)
        if len(self._buckets) > _REMEMBERED:
            self._buckets.popitem(last=False)
        used_s = bucket.add(1 / self._each.messages_per_s, num_bytes / self._each.bytes_per_s, now)
        return max(used_s - self._each.burst_s, 0.0)

    def first_excess(self, caller: PeerId) -> bool:
        """Is it to be said that this caller sends too much? Once each."""
        bucket = self._buckets[caller]
        first, bucket.told = not bucket.told, True
        return first
