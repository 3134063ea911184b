"""What my line carries, measured on the averaging streams that cross it anyway; and how far away my mates are.

A line is busy only while somebody feeds it, so a round's average says little. Measured is the busiest stretch of a
round that is long enough for buffers not to matter; the lower of the two directions counts, since a round moves as much
up as down. Of the last rounds the middle one is believed, and what has been said is not said anew for small changes:
the parts of a round follow bandwidths (`averaging.parts`) and should not follow noise. Events and `now` in, numbers
out. Pure.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from swarmnet.ids import PeerId
from swarmnet.messages import MAX_MATES, Line

LEAST_BYTES, LEAST_S = 1 << 18, 0.05
"""Less than that in a stretch says nothing about a line."""

_STRETCH = 1 / 3
"""Of a round. What lies in buffers at a stretch's beginning and arrives at once is then small beside it."""

_ROUNDS = 5
_PINGS = 8
_NOISE = 1.2

Moment = tuple[float, int]
"""(when, bytes so far)"""


class Meter:
    """One replica's line. Rounds follow each other: `begin`, `received` and `sent`, `end`; pings at any time."""

    def __init__(self) -> None:
        self._down: list[Moment] = []
        self._up: list[Moment] = []
        self._rates: deque[float] = deque(maxlen=_ROUNDS)
        self._said = 0
        self._round_trips: dict[PeerId, deque[float]] = {}

    @property
    def line(self) -> Line:
        """What has been found so far."""
        return Line(self._said, tuple(sorted(
            (peer, max(round(min(seconds) * 1e6), 1)) for peer, seconds in self._round_trips.items()
        )))

    def begin(self, *, now: float) -> None:
        """A round begins."""
        self._down, self._up = [(now, 0)], [(now, 0)]

    def received(self, num_bytes: int, *, now: float) -> None:
        """Bytes of a round have come."""
        self._add(self._down, num_bytes, now)

    def sent(self, num_bytes: int, *, now: float) -> None:
        """Bytes of a round have been taken by the transport."""
        self._add(self._up, num_bytes, now)

    @staticmethod
    def _add(moments: list[Moment], num_bytes: int, now: float) -> None:
        if moments:                                  # else somebody asks late for what is over
            moments.append((now, moments[-1][1] + num_bytes))

    def end(self) -> None:
        """The round is over, whether it came to its end or not. Again: nothing more."""
        found = [rate for moments in (self._down, self._up) if (rate := busiest(moments)) is not None]
        self._down, self._up = [], []
        if not found:
            return
        self._rates.append(min(found))
        rate = statistics.median_high(self._rates)
        if not self._said or not self._said / _NOISE <= rate <= self._said * _NOISE:
            self._said = max(round(rate), 1)

    def ping(self, peer: PeerId, seconds: float) -> None:
        """A mate has answered an empty call after so long. The least of the last few counts: the rest is waiting."""
        heard = self._round_trips.pop(peer, None) or deque(maxlen=_PINGS)
        heard.append(seconds)
        self._round_trips[peer] = heard              # the latest heard of is the last to be forgotten
        while len(self._round_trips) > MAX_MATES:
            self._round_trips.pop(next(iter(self._round_trips)))


def busiest(moments: Sequence[Moment]) -> float | None:
    """Bytes per second of the fastest stretch of a third of the time or more; None: too few bytes to tell.

    moments: rising in both. A stretch has the bytes that came after its first moment, up to its last.
    """
    if len(moments) < 2:
        return None
    least_s = max((moments[-1][0] - moments[0][0]) * _STRETCH, LEAST_S)
    best, first = None, 0
    for when, so_far in moments:
        while first + 1 < len(moments) and when - moments[first + 1][0] >= least_s:
            first += 1
        # Stretches of twice the length or more are no faster than the faster of their halves.
        for begun, before in reversed(moments[: first + 1]):
            seconds = when - begun
            if seconds >= 2 * least_s and best is not None:
                break
            if seconds >= least_s and so_far - before >= LEAST_BYTES:
                best = max(best or 0.0, (so_far - before) / seconds)
    return best
