"""How fast each replica of a stage is, as its mates measure it: nobody's word about itself counts.

A replica knows the rate k at which it computes itself, and from the commits how much everybody has counted. Who counted
n microbatches while it counted m itself computes at about k n / m: the callers share work out by speed. Each replica
announces what it has found of its mates (`Estimate`); what a replica is believed to compute is the median of what the
others say of it (`measured`). So a liar is outvoted, whatever it says of itself or of one other.

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


def mark(peer: PeerId) -> int:
    """How a peer is named in estimates: its id is 52 characters long, and a record is small."""
    return int.from_bytes(hashlib.sha256(f"rate/{peer}".encode()).digest()[:4])


class Rates:
    """What one replica has found of itself and its mates."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._mine: dict[PeerId, float] = {}  # what I counted in the steps in which that peer was there, me included
        self._theirs: dict[PeerId, float] = {}
        self._executed = self._busy_s = 0.0
        self._computed = 0, 0.0

    def step(self, counted: Mapping[PeerId, int], present: Iterable[PeerId], *, computed: tuple[int, float]) -> None:
        """A step is over. counted: microbatches, by peer. present: who could have counted; others are forgotten.

        computed: microbatches computed here, and the seconds of computing that they took, ever.
        """
        (before, before_s), (executed, busy_s) = self._computed, computed
        self._computed = computed
        self._executed = _FADES * self._executed + executed - before
        self._busy_s = _FADES * self._busy_s + busy_s - before_s
        there = {*present, *counted, self._me}
        mine = counted.get(self._me, 0)
        self._mine = {peer: _FADES * self._mine.get(peer, 0.0) + mine for peer in there}
        self._theirs = {peer: _FADES * self._theirs.get(peer, 0.0) + counted.get(peer, 0) for peer in there}

    def estimates(self, most: float) -> tuple[Estimate, ...]:
        """What to announce: of everybody, or of as many as a record holds. most: microbatches per second that a line
        carries."""
        # Who has computed nothing knows no rate to compare others with.
        if self._executed <= 0 or self._busy_s < _LEAST_S:
            return ()
        own = min(self._executed / self._busy_s, most) * 1000
        # One more for each: of a few counts little is known, and who counts nothing is not infinitely slow.
        found = {peer: own * (self._theirs[peer] + 1) / (self._mine[peer] + 1) for peer in self._theirs}
        # Each speaks of others than the next one does.
        named = sorted(found, key=lambda peer: (peer != self._me, mark(peer) ^ mark(self._me)))[:MAX_ESTIMATES]
        return tuple(Estimate(mark(peer), min(round(found[peer]), MAX_RATE)) for peer in named)


def measured(said: Mapping[PeerId, Sequence[Estimate]]) -> dict[PeerId, float]:
    """Rates of the replicas of one stage, microbatches per second, by what each of them announces.

    Who has mates is not asked about itself. Of whom nobody says anything there is no rate.
    """
    by = {peer: {each.mark: each.rate for each in estimates} for peer, estimates in said.items()}
    found: dict[PeerId, float] = {}
    for peer in said:
        of = mark(peer)
        words = [rates[of] for other, rates in by.items() if other != peer and of in rates]
        if not words and len(said) == 1:
            words = [rate for rate in (by[peer].get(of),) if rate is not None]
        if words:
            found[peer] = statistics.median(words) / 1000
    return found
