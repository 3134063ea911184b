"""Which replicas of a stage have drifted from the others, and which of them take another's state (docs/trust.md). Pure.

Equal bits are promised in `exact` and `overlap`, among replicas of one *class of weights*: those that make the same
weights of the same aggregate. With fixed-point sums that is nearly all, on any device; with floats, one numerics class.

| replicas | correct bits | replicas that take another's state |
|---|---|---|
| of the leader's class | those that most have; in a tie those of the first in the order of leaders | the others |
| of another class | none: they differ by rounding | each, every `resync_every` versions, in turns, the leader's |

Each replica compares the digests of one version and one chain, and decides for itself alone. At most as many as may be
away at a time go, the last in that same order, so all come to the same result without a message. A digest shows whether
weights are equal, but not how far apart they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmnet.ids import NO_CHAIN, Chain, PeerId
from swarmnet.messages import Measure
from swarmnet.quorum import minority
from swarmnet.step.host import StepHost
from swarmnet.step.view import View

MOST_RESTS = 64
"""After repairs that did not help, at most so many measures pass before the next repair."""


@dataclass(frozen=True, slots=True)
class DriftRules:
    """The manifest's rules; where it promises no equal bits, nothing is measured and no replica resyncs."""

    every: int = 0
    """Versions between two measures, 0 for never."""
    resync_every: int = 0
    """Versions after which other classes take the leader's state, 0 for never."""

    def due(self, version: int, *, last: int = -1) -> bool:
        """Is this version, which has just begun, to be measured? last: the run's last version, always measured."""
        return self.every > 0 and version > 0 and (version % self.every == 0 or version == last)


NO_DRIFT = DriftRules()
"""No replica measures anything."""


@dataclass(frozen=True, slots=True)
class DriftVerdict:
    """What the measures of a version say."""

    version: int
    first: PeerId
    """The first in the order of leaders that is not off."""
    judged: frozenset[PeerId]
    """The replicas with compared digests."""
    strays: frozenset[PeerId]
    """Who is off."""


def judge(digests: Mapping[PeerId, bytes], classes: Mapping[PeerId, str], *, unheard: int = 0) -> frozenset[PeerId]:
    """The diverged replicas, by digests of one version.

    Args:
        digests: of all replicas that have measured, in the order of leaders; at least one.
        classes: of their weights.
        unheard: how many of the leader's class have not measured it yet.
    """
    kept = classes[next(iter(digests))]
    members = {peer: digest for peer, digest in digests.items() if classes[peer] == kept}
    (standing, most), *others = Counter(members.values()).most_common(2)  # of equally many, the first counted
    # The missing digests could change the majority: then no replica has diverged.
    if unheard and others and most <= others[0][1] + unheard:
        return frozenset()
    return frozenset(peer for peer, digest in members.items() if digest != standing)


def may_go(strays: frozenset[PeerId], order: Sequence[PeerId], *, away: int) -> tuple[PeerId, ...]:
    """The diverged replicas that repair now: the last in order, and never so many that with those `away` already most,
    or all, of the stage would be without state. order: all replicas that have some."""
    room = _room(len(order) + away) - away
    going = [peer for peer in order if peer in strays]
    return tuple(going[max(len(going) - room, 0) :]) if room > 0 and len(going) < len(order) else ()


def resyncs(me: PeerId, classes: Mapping[PeerId, str], version: int, every: int) -> bool:
    """Is it my turn to take the leader's state? classes: numerics of all with state, in the order of leaders.

    Where many are of other classes they take turns, version after version, so that most have state at any time.
    """
    own, kept = classes[me], next(iter(classes.values()))
    if every <= 0 or version < every or not own or not kept or own == kept:
        return False
    others = [peer for peer, numerics in classes.items() if numerics not in ("", kept)]
    return version % every == others.index(me) // _room(len(classes)) % every


class Drift:
    """One replica's digests, compared with those of the others. numerics: the class of its own weights."""

    def __init__(self, view: View, rules: DriftRules, numerics: str, host: StepHost) -> None:
        self._view, self.rules, self.numerics, self._host = view, rules, numerics, host
        self.mine: Measure | None = None
        self.verdict: DriftVerdict | None = None
        self._measured_at, self._term_chain = 0.0, NO_CHAIN
        self._repairs = self._rests = 0
        self._resting = False

    def forget(self) -> None:
        """Other weights were installed: nothing is known of them yet."""
        self.mine = self.verdict = None

    def measured(self, measure: Measure, term_chain: Chain, *, now: float) -> None:
        """The newest measure of my weights. term_chain: at that version, so that all have one order of leaders."""
        self.mine, self._measured_at, self._term_chain = measure, now, term_chain
        self._resting = self._rests > 0
        self._rests = max(self._rests - 1, 0)

    def review(self, *, now: float) -> None:
        """Compare, once all have measured (or had time to); a divergence is reported once for every version."""
        mine, me = self.mine, self._view.me
        if mine is None or (self.verdict is not None and self.verdict.version == mine.version):
            return
        digests, waiting = self._digests(mine, now=now)
        if waiting and now - self._measured_at < self._view.timers.suspect_s:
            return
        classes = {peer: self._numerics(peer) for peer in (*digests, *waiting)}
        kept = classes[next(iter(digests))]
        strays = judge(digests, classes, unheard=sum(classes[peer] == kept for peer in waiting))
        first = next(peer for peer in digests if peer not in strays)
        self.verdict = DriftVerdict(mine.version, first, frozenset(digests), strays)
        if me not in strays:
            self._repairs = 0
        for peer in sorted(strays if me == first else {me} & strays):
            self._host.log(
                "drift", version=mine.version, peer=peer, donor=first, strays=len(strays), measured=len(digests)
            )

    def donors(self, *, now: float) -> tuple[PeerId, ...]:
        """Replicas that are sources for my state now, if my weights have diverged and it is my turn; () otherwise."""
        verdict, me = self.verdict, self._view.me
        if verdict is None or self._resting or not self.strays(me):
            return ()
        order = self._order(self._term_chain, now)
        away = sum(not seen.synced and self._view.in_touch(peer, now=now) for peer, seen in self._view.mates())
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
        """Replicas that are sources for my state as this version begins, because my class is not the leader's."""
        if not self.rules.resync_every:
            return ()
        order = self._order(term_chain, now)
        classes = {peer: self._numerics(peer) for peer in order}
        if not resyncs(self._view.me, classes, version, self.rules.resync_every):
            return ()
        return tuple(peer for peer in order if classes[peer] == classes[order[0]] and not self.strays(peer))

    def strays(self, peer: PeerId) -> bool:
        """Is that replica known to have diverged? Then none should take its state."""
        verdict, measure = self.verdict, self._measure(peer)
        # A newer measure of the replica may already be of weights that it has taken from another one.
        return (
            verdict is not None
            and peer in verdict.strays
            and measure is not None
            and measure.version == verdict.version
        )

    @property
    def compared_at(self) -> int | None:
        """The version at which my weights were last compared with others'."""
        return self.verdict.version if self.verdict is not None else None

    def _order(self, term_chain: Chain, now: float) -> list[PeerId]:
        """The replicas of my stage in the order of leaders, of which the first is right; once there are voters, only
        they and I: strangers could outvote the weights of all."""
        order, voters = self._view.leader_order(term_chain, now=now), self._view.voters
        return [peer for peer in order if peer in voters or peer == self._view.me] if voters else order

    def _digests(self, mine: Measure, *, now: float) -> tuple[dict[PeerId, bytes], list[PeerId]]:
        """All digests of that version, and the replicas with one still to come."""
        found: dict[PeerId, bytes] = {}
        waiting: list[PeerId] = []
        for peer in self._order(self._term_chain, now):
            measure = self._measure(peer)
            if measure is not None and (measure.version, measure.chain) == (mine.version, mine.chain):
                found[peer] = measure.digest
            elif measure is None or measure.version < mine.version:
                waiting.append(peer)
        return found, waiting

    def _measure(self, peer: PeerId) -> Measure | None:
        seen = self._view.get(peer)
        return self.mine if peer == self._view.me else seen.measure if seen is not None else None

    def _numerics(self, peer: PeerId) -> str:
        seen = self._view.get(peer)
        return self.numerics if peer == self._view.me else seen.numerics if seen is not None else ""


def _room(size: int) -> int:
    """How many of a stage's replicas may be without state at a time: fewer than half, but one of two."""
    return max(1, minority(size))
