"""The compute rate of each replica of a stage: its own claim, bounded by what the other replicas measure.

A replica knows the rate k at which it computes itself, and from the commits how much each replica has contributed. One
that contributed n microbatches while this one contributed m computes at about k n / m, because callers share work out
by speed. Each replica announces its estimates of itself and the others (`Estimate`). Counts of a few steps are coarse,
so a replica's own claim is accepted within a factor of 1.5 of the median of all claims about it (`measured`), and no
further: of three or more a Byzantine replica is outvoted, whatever it claims of itself or of one other. Of two it
cannot be told which one is wrong: the lower claim counts, so that a false one makes the stage look slower than it is.
That brings another replica, and then the false claim is outvoted.

Pure: counts in, rates out. Rates are microbatches per 1000 seconds.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Mapping, Sequence

from swarmnet.directory import MAX_ESTIMATES, MAX_RATE, Estimate
from swarmnet.ids import PeerId

_FADES = 0.9
"""What is left of a count after each step: about ten steps are remembered."""

_LEAST_S = 1e-6

_COARSE = 1.5
"""By what factor counts may mislead: of eight microbatches three replicas of one speed count 3, 3 and 2."""


def mark(peer: PeerId) -> int:
    """How a peer is named in estimates: its id is 52 characters long, and a record is small."""
    return int.from_bytes(hashlib.sha256(f"rate/{peer}".encode()).digest()[:4])


class Rates:
    """One replica's measurements of itself and the other replicas."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._mine: dict[PeerId, float] = {}  # what I counted in the steps in which that peer was there, me included
        self._theirs: dict[PeerId, float] = {}
        self._executed = self._busy_s = 0.0
        self._computed = 0, 0.0
        self._before: frozenset[PeerId] | None = None  # who was there when this step began

    def step(self, counted: Mapping[PeerId, int], present: Iterable[PeerId], *, computed: tuple[int, float]) -> None:
        """A step is over. counted: microbatches, by peer. present: who could have counted; others are forgotten.

        computed: microbatches computed here, and the seconds of computing that they took, ever.
        """
        (before, before_s), (executed, busy_s) = self._computed, computed
        self._computed = computed
        self._executed = _FADES * self._executed + executed - before
        self._busy_s = _FADES * self._busy_s + busy_s - before_s
        there = frozenset((*present, *counted, self._me))
        # Who came in the middle of the step could count but a part of it; if that was I, nothing can be compared.
        whole, self._before = there & (self._before or frozenset()), there
        mine = counted.get(self._me, 0)
        self._mine = {peer: _FADES * self._mine.get(peer, 0.0) + mine for peer in whole}
        self._theirs = {peer: _FADES * self._theirs.get(peer, 0.0) + counted.get(peer, 0) for peer in whole}

    def estimates(self, most: float) -> tuple[Estimate, ...]:
        """What to announce: of all replicas, or of as many as a record holds. most: microbatches per second that the
        network link carries."""
        # Who has computed nothing knows no rate to compare others with.
        if self._executed <= 0 or self._busy_s < _LEAST_S:
            return ()
        own = min(self._executed / self._busy_s, most) * 1000
        # One more for each: of a few counts little is known, and who counts nothing is not infinitely slow.
        found = {peer: own * (self._theirs[peer] + 1) / (self._mine[peer] + 1) for peer in self._theirs}
        found[self._me] = own
        # Each speaks of others than the next one does.
        named = sorted(found, key=lambda peer: (peer != self._me, mark(peer) ^ mark(self._me)))[:MAX_ESTIMATES]
        return tuple(Estimate(mark(peer), min(round(found[peer]), MAX_RATE)) for peer in named)


def measured(said: Mapping[PeerId, Sequence[Estimate]]) -> dict[PeerId, float]:
    """Rates of the replicas of one stage, microbatches per second, by what each of them announces.

    There is no rate of a replica that only itself reports on, unless it is alone.
    """
    by = {peer: {each.mark: each.rate for each in estimates} for peer, estimates in said.items()}
    found: dict[PeerId, float] = {}
    for peer in said:
        of = mark(peer)
        own = by[peer].get(of)
        words = [rates[of] for rates in by.values() if of in rates]
        if words and (len(words) > 1 or own is None or len(said) == 1):
            middle = statistics.median_low(words)
            rate = middle if own is None else min(max(own, middle / _COARSE), middle * _COARSE)
            found[peer] = rate / 1000
    return found
