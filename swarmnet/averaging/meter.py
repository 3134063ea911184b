"""What my line carries, measured on the averaging streams that cross it anyway; and how far away my mates are.

A line is busy only while somebody feeds it, so a round's average says little. Measured is the busiest stretch of a
round that is long enough for buffers not to matter; the lower of the two directions counts, since a round moves as much
up as down. Of the last rounds the best is believed, since whatever else a machine or its mates are busy with, and a
small part in a round, make a line look narrower than it is; one of them is always cut evenly (`step.opening`). And what
has been said is not said anew for small changes: the parts of a round follow bandwidths (`averaging.parts`) and should
not follow noise. Events and `now` in, numbers out. Pure.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from swarmnet.ids import PeerId
from swarmnet.messages import MAX_MATES, LinkQuality

LEAST_BYTES, LEAST_S = 1 << 18, 0.05
"""Less than that in a stretch says nothing about a line."""

_STRETCH, _BUFFERED = 1 / 4, 4 << 20
"""Of a round's bytes, and bytes at least: what lies in buffers as a stretch begins, and arrives at once, is less."""

_ROUNDS = 9
_PINGS = 8
_NOISE = 1.2

_LEAST_TRANSFER_S = 1e-3

Transfer = tuple[float, float, int]
"""(began, ended, bytes)"""


class Meter:
    """One replica's line. Rounds follow each other: `begin`, `received` and `sent`, `end`; pings at any time."""

    def __init__(self) -> None:
        self._down: list[Transfer] = []
        self._up: list[Transfer] = []
        self._open = False
        self._rates: deque[float] = deque(maxlen=_ROUNDS)
        self._said = 0
        self._round_trips: dict[PeerId, deque[float]] = {}

    @property
    def line(self) -> LinkQuality:
        """What has been found so far."""
        return LinkQuality(
            self._said,
            tuple(sorted((peer, max(round(min(seconds) * 1e6), 1)) for peer, seconds in self._round_trips.items())),
        )

    def begin(self) -> None:
        """A round begins."""
        self.end()
        self._open = True

    def received(self, num_bytes: int, *, since: float, now: float) -> None:
        """Bytes of a round have come; the sign of life before them, on the same stream, came at `since`."""
        if self._open:  # else somebody is late with what is over
            self._down.append((since, now, num_bytes))

    def sent(self, num_bytes: int, *, since: float, now: float) -> None:
        """Bytes of a round that the transport was given at `since` have been taken."""
        if self._open:
            self._up.append((since, now, num_bytes))

    def end(self) -> None:
        """The round is over, whether it came to its end or not. Again: nothing more."""
        self._open = False
        found = [rate for transfers in (self._down, self._up) if (rate := busiest(so_far(transfers))) is not None]
        self._down, self._up = [], []
        if not found:
            return
        self._rates.append(min(found))
        rate = max(self._rates)
        if not self._said or not self._said / _NOISE <= rate <= self._said * _NOISE:
            self._said = max(round(rate), 1)

    def ping(self, peer: PeerId, seconds: float) -> None:
        """A mate has answered an empty call after so long. The least of the last few counts: the rest is waiting."""
        heard = self._round_trips.pop(peer, None) or deque(maxlen=_PINGS)
        heard.append(seconds)
        self._round_trips[peer] = heard  # the latest heard of is the last to be forgotten
        while len(self._round_trips) > MAX_MATES:
            self._round_trips.pop(next(iter(self._round_trips)))


def so_far(transfers: Sequence[Transfer]) -> list[tuple[float, float]]:
    """(when, bytes so far), rising, wherever a transfer began or ended: each passes evenly between its two ends."""
    changes: defaultdict[float, float] = defaultdict(float)
    for began, ended, num_bytes in transfers:
        began = min(began, ended - _LEAST_TRANSFER_S)
        changes[began] += num_bytes / (ended - began)
        changes[ended] -= num_bytes / (ended - began)
    moments: list[tuple[float, float]] = []
    rate = passed = 0.0
    for when in sorted(changes):
        passed += rate * (when - moments[-1][0]) if moments else 0.0
        moments.append((when, passed))
        rate += changes[when]
    return moments


def busiest(moments: Sequence[tuple[float, float]]) -> float | None:
    """Bytes per second of the fastest stretch that has a quarter of the bytes; None: too few, or too soon, to tell.

    moments: (when, bytes so far), rising in both. Looked at are the shortest such stretch up to each moment, and all.
    """
    if not moments:
        return None
    whole = moments[-1][1] - moments[0][1]
    enough = max(min(whole, max(whole * _STRETCH, _BUFFERED)), LEAST_BYTES)

    def reaches(start: int, when: float, passed: float) -> bool:
        return passed - moments[start][1] >= enough and when - moments[start][0] >= LEAST_S

    stretches = [(moments[0], moments[-1])] if reaches(0, *moments[-1]) else []
    start = 0
    for when, passed in moments:
        while reaches(start + 1, when, passed):
            start += 1
        if reaches(start, when, passed):
            stretches.append((moments[start], (when, passed)))
    return max(((after - before) / (end - begin) for (begin, before), (end, after) in stretches), default=None)
