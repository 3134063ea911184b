"""Which replicas of a stage have drifted from the others, and who takes whose state. Pure.

Where equal bits are promised (in `exact` and `overlap`, among replicas of the keeper's numerics class), the bits that
most have stand, and the odd ones take them; where as many have these as those, those of whoever is first in the order
of keepers stand. Nobody is off while those who have not measured in time could say otherwise. Replicas of other classes
take its state every `resync_every` steps, each in its turn, so that even two of one such class differ by rounding.
Where nobody promises equal bits (`local`), only who is far outside takes another's. Everybody judges by measures of one
version and one chain, and decides for itself alone; as many as may be away at a time are the last in that same order,
so all come to the same without a word (docs/drift.md). Knows no tensors: a measure is a digest and a sketch, whose
distances estimate theirs.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmnet.ids import NO_CHAIN, Chain, PeerId
from swarmnet.messages import Measure
from swarmnet.step.actions import Note
from swarmnet.step.view import View

FAR, LEAST = 5.0, 0.01
"""Without equal bits: who is farther from the middle than this many times the usual, and than this share of the
weights' norm, is far outside."""

RESOLUTION = 2.0**-24
"""Of a relative distance: bits that differ by less than a sketch can tell are said to be so far apart."""

FARTHEST = 1e9
"""Distances are not said beyond this: next to a sketch that is nearly zero, as no weights' is, anything is far, and a
record with such a number would be refused by everybody."""

MOST_RESTS = 64
"""Measures that are let pass, at most, before another repair that has not helped before."""


@dataclass(frozen=True, slots=True)
class DriftRules:
    """What the manifest says. every: versions between two measures, 0 for never. resync_every: versions after which
    other numerics classes take the keeper's state, 0 for never. last: the run's last version, always measured.
    equal_bits: are replicas of one numerics class promised to have the same? outer_every: where they are not, versions
    from one outer step to the next: what is measured is what an outer step has left."""

    every: int = 0
    resync_every: int = 0
    last: int = -1
    equal_bits: bool = True
    outer_every: int = 1

    def measured(self, version: int) -> bool:
        """Is this version to be measured?"""
        if self.every <= 0 or version <= 0:
            return False
        if self.equal_bits:
            return version % self.every == 0 or version == self.last
        outer, since = divmod(version - 1, self.outer_every)  # that of step s is in the weights of version s + 1
        return outer > 0 and since == 0 and outer % max(1, self.every // self.outer_every) == 0


@dataclass(frozen=True, slots=True)
class Reading:
    """What one replica has measured, and on what."""

    measure: Measure
    numerics: str


NO_DRIFT = DriftRules()
"""Nobody measures anything."""


Readings = Mapping[PeerId, Reading]
"""Of one version and chain, in the order of keepers."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the measures of a version say. judged: whose they were. strays: who is off. distances: to `first`, the first
    in the order of keepers that is not, relative to the norm of its weights; without those whose sketch says nothing.
    """

    version: int
    first: PeerId
    judged: frozenset[PeerId]
    strays: frozenset[PeerId]
    distances: Mapping[PeerId, float]


def relative_distance(one: Measure, other: Measure) -> float | None:
    """Of the weights of `one` to those of `other`, relative to the norm of the latter, `FARTHEST` at the most; None if
    sketches do not say."""
    if len(one.sketch) != len(other.sketch) or not any(other.sketch):
        return None
    return min(math.dist(one.sketch, other.sketch) / math.hypot(*other.sketch), FARTHEST)


def judge(readings: Readings, *, equal_bits: bool, unheard: int = 0) -> Verdict:
    """Compare measures of one version; there must be one at least. unheard: how many of the keeper's class
    have not measured it yet."""
    strays = _minorities(readings, unheard) if equal_bits else _outliers(readings)
    first = next(peer for peer in readings if peer not in strays)
    reference = readings[first].measure
    found = {peer: relative_distance(reading.measure, reference) for peer, reading in readings.items()}
    distances = {peer: distance for peer, distance in found.items() if distance is not None}
    return Verdict(reference.version, first, frozenset(readings), strays, distances)


def may_go(strays: frozenset[PeerId], order: Sequence[PeerId], *, away: int) -> tuple[PeerId, ...]:
    """Who of the strays repairs now: the last in order, and never so many that with those `away` already most, or all,
    of the stage would be without state. order: everybody who has some."""
    room = _room(len(order) + away) - away
    going = [peer for peer in order if peer in strays]
    return tuple(going[max(len(going) - room, 0) :]) if room > 0 and len(going) < len(order) else ()


def resyncs(me: PeerId, classes: Mapping[PeerId, str], version: int, every: int) -> bool:
    """Is it my turn to take the keeper's state? classes: numerics of everybody with state, in the order of keepers.

    Where many are of other classes they take turns, version after version, so that most have state at any time.
    """
    own, kept = classes[me], next(iter(classes.values()))
    if every <= 0 or version < every or not own or not kept or own == kept:
        return False
    others = [peer for peer, numerics in classes.items() if numerics not in ("", kept)]
    return version % every == others.index(me) // _room(len(classes)) % every


class Drift:
    """One replica's measures, and what it makes of those of its mates. numerics: the class of its own weights."""

    def __init__(self, view: View, rules: DriftRules, numerics: str = "") -> None:
        self._view, self.rules, self.numerics = view, rules, numerics
        self.mine: Measure | None = None
        self.verdict: Verdict | None = None
        self._measured_at, self._term_chain = 0.0, NO_CHAIN
        self._repairs = self._rests = self._missed = 0
        self._resting = False

    def forget(self) -> None:
        """Other weights are in place: nothing is known of them yet."""
        self.mine = self.verdict = None

    def due(self, version: int, *, missed: bool) -> bool:
        """Are the weights of this version, which has just begun, to be measured? missed: this replica could not take
        part in the outer step before it, so it is far from the others with good reason. But not twice in a row."""
        if not self.rules.measured(version):
            return False
        self._missed = self._missed + 1 if missed else 0
        return self._missed != 1

    def measured(self, measure: Measure, term_chain: Chain, *, now: float) -> None:
        """The newest measure of my weights. term_chain: at that version, so that all have one order of keepers."""
        self.mine, self._measured_at, self._term_chain = measure, now, term_chain
        self._resting = self._rests > 0
        self._rests = max(self._rests - 1, 0)

    def review(self, *, now: float) -> list[Note]:
        """Compare, once everybody has measured (or had time to); what is off is said once for every version."""
        mine, me = self.mine, self._view.me
        if mine is None or (self.verdict is not None and self.verdict.version == mine.version):
            return []
        readings, waiting = self._readings(mine, now=now)
        if waiting and now - self._measured_at < self._view.timers.suspect_s:
            return []
        kept = next(iter(readings.values())).numerics
        unheard = sum(self._numerics(peer) == kept for peer in waiting)
        self.verdict = verdict = judge(readings, equal_bits=self.rules.equal_bits, unheard=unheard)
        if me not in verdict.strays:
            self._repairs = 0
        named = set(verdict.strays) if me == verdict.first else {me} & verdict.strays
        if verdict.distances.get(me, 0.0) > 0.0:
            named.add(me)
        return [
            Note(
                "drift" if peer in verdict.strays else "apart",
                {
                    "version": verdict.version,
                    "peer": peer,
                    "distance": verdict.distances.get(peer),
                    "to": verdict.first,
                    "strays": len(verdict.strays),
                    "measured": len(readings),
                },
            )
            for peer in sorted(named)
        ]

    def donors(self, *, now: float) -> tuple[PeerId, ...]:
        """Whose state I should take now, if I am off and it is my turn; () otherwise."""
        verdict, me = self.verdict, self._view.me
        if verdict is None or self._resting or not self.strays(me):
            return ()
        order = self._view.keeper_order(self._term_chain, now=now)
        away = sum(not seen.synced and self._view.alive(peer, now=now) for peer, seen in self._view.mates())
        strays = frozenset(filter(self.strays, order))
        if me not in may_go(strays, order, away=away):
            return ()
        return tuple(
            peer
            for peer in order
            if peer in verdict.judged and peer not in strays and self._numerics(peer) == self.numerics
        )

    def repairing(self) -> None:
        """I take another's state. If that keeps happening, it does not help: more and more measures are let pass."""
        self._rests = min(2**self._repairs - 1, MOST_RESTS)
        self._repairs += 1

    def class_donors(self, version: int, term_chain: Chain, *, now: float) -> tuple[PeerId, ...]:
        """Whose state I should take at the beginning of this version because I am of another numerics class."""
        if not (self.rules.resync_every and self.rules.equal_bits):
            return ()
        order = self._view.keeper_order(term_chain, now=now)
        classes = {peer: self._numerics(peer) for peer in order}
        if not resyncs(self._view.me, classes, version, self.rules.resync_every):
            return ()
        return tuple(peer for peer in order if classes[peer] == classes[order[0]] and not self.strays(peer))

    def strays(self, peer: PeerId) -> bool:
        """Is that replica known to be off? Nobody should take its state."""
        seen, verdict = self._view.get(peer), self.verdict
        measure = self.mine if peer == self._view.me else seen.measure if seen is not None else None
        return (
            verdict is not None
            and peer in verdict.strays
            and measure is not None
            and measure.version == verdict.version
        )

    @property
    def distance(self) -> tuple[int, float] | None:
        """(version, how far my weights were from those of the first in order, relative to their norm), if known."""
        verdict, me = self.verdict, self._view.me
        distance = verdict.distances.get(me) if verdict is not None else None
        if verdict is None or distance is None:
            return None
        return verdict.version, max(distance, RESOLUTION if me in verdict.strays else 0.0)

    # ------------------------------------------------------------ inside

    def _readings(self, mine: Measure, *, now: float) -> tuple[dict[PeerId, Reading], list[PeerId]]:
        """Everybody's measures of that version, and whose are still to come."""
        found: dict[PeerId, Reading] = {}
        waiting: list[PeerId] = []
        for peer in self._view.keeper_order(self._term_chain, now=now):
            seen = self._view.get(peer)
            measure = mine if peer == self._view.me else seen.measure if seen is not None else None
            if measure is not None and (measure.version, measure.chain) == (mine.version, mine.chain):
                found[peer] = Reading(measure, self._numerics(peer))
            elif measure is None or measure.version < mine.version:
                waiting.append(peer)
        return found, waiting

    def _numerics(self, peer: PeerId) -> str:
        seen = self._view.get(peer)
        return self.numerics if peer == self._view.me else seen.numerics if seen is not None else ""


def _room(size: int) -> int:
    """How many of a stage's replicas may be without state at a time: fewer than half, but one of two."""
    return max(1, (size - 1) // 2)


def _minorities(readings: Readings, unheard: int) -> frozenset[PeerId]:
    """Who has other bits than most of the keeper's numerics class; of equally many, those of the first stand. Nobody,
    if those unheard could say otherwise."""
    kept = next(iter(readings.values())).numerics
    members = {peer: reading.measure.digest for peer, reading in readings.items() if reading.numerics == kept}
    (standing, most), *others = Counter(members.values()).most_common(2)  # of equally many, the first counted
    if unheard and others and most <= others[0][1] + unheard:
        return frozenset()
    return frozenset(peer for peer, digest in members.items() if digest != standing)


def _outliers(readings: Readings) -> frozenset[PeerId]:
    """Who is far from the middle of at least three; and whose sketch is not as long as most are, which says nothing of
    anybody's distance."""
    found = {peer: reading.measure.sketch for peer, reading in readings.items() if reading.measure.sketch}
    lengths = Counter(len(sketch) for sketch in found.values())
    length = next((length for length, count in lengths.items() if 2 * count > len(found)), 0)
    sketches = {peer: sketch for peer, sketch in found.items() if len(sketch) == length}
    odd = frozenset(found.keys() - sketches.keys()) if length else frozenset[PeerId]()
    if len(sketches) < 3:
        return odd
    middle = [statistics.median(numbers) for numbers in zip(*sketches.values(), strict=True)]
    distances = {peer: math.dist(sketch, middle) for peer, sketch in sketches.items()}
    limit = max(FAR * statistics.median(distances.values()), LEAST * math.hypot(*middle))
    return odd | frozenset(peer for peer, distance in distances.items() if distance > limit)
