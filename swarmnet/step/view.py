"""What one replica believes about the others, by heartbeats and broken connections: who lives, who is lost, who is
first in the order of keepers.

Suspicion decides progress, never correctness (docs/protocol.md, I2). Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field

from swarmnet.ids import NO_CHAIN, Ballot, Chain, PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Heartbeat, Measure
from swarmnet.quorum import has_quorum, quorum
from swarmnet.step.commits import stages_in
from swarmnet.step.graph import keeper_rank

_MOST_REPLICAS = 4096
"""Replicas of one stage that are remembered; identities are free, memory is not."""

_ASKED_S = 0.5
"""A heartbeat asks for an answer if it comes so long after the last that did, in about."""


@dataclass(slots=True)
class Seen:
    """One replica of one stage, as last heard. since: when this life of it was first heard. gap_s: the longest recent
    pause between two signs of life."""

    heard_at: float
    incarnation: int
    since: float
    version: int = -1
    chain: Chain = NO_CHAIN
    before: Chain = NO_CHAIN
    synced: bool = False
    committed: bool = False
    known: frozenset[int] = frozenset()
    digest: bytes = b""
    keeper: Ballot | None = None
    sitting: tuple[PeerId, ...] = ()
    unreached: Mapping[PeerId, float] = field(default_factory=dict)
    new: bool = False
    queue: int = 0
    draining: bool = False
    numerics: str = ""
    measure: Measure | None = None
    dead: bool = False
    dead_at: float = 0.0
    gap_s: float = 0.0
    touched: bool = False
    steady: bool = False
    """Does more than heartbeats come from it, since the last one but one? Then silence is noticed sooner."""


class View:
    """Liveness of all known replicas, seen from `me` in `stage`."""

    def __init__(self, me: PeerId, stage: int, timers: Timers) -> None:
        self.me, self.stage, self.timers = me, stage, timers
        self.draining = False  # am I about to leave?
        self.broken: Mapping[PeerId, float] = {}  # `unreached` as my heartbeats say it, and since when
        self._neighbours: frozenset[PeerId] = frozenset()  # whom I send heartbeats
        self._given: Collection[PeerId] = ()  # the same as they were given
        self.voters: Set[PeerId] = frozenset()
        """The replicas of my stage that have contributed to a recent commit; empty: none is known. Identities cost
        nothing, so nothing is concluded from other replicas that are not heard or not reached."""
        self.sparse: frozenset[int] = frozenset()
        """Stages of which I hear a few replicas only: there silence of the others means nothing (`step.graph`)."""
        self.beat_s = timers.beat_s
        """Between two heartbeats to a peer."""
        self.changes = 0
        """How often what decides who lives has changed: until then it need not be looked at again."""
        self.arrivals = 0
        """How often somebody was heard for the first time, came back or was lost."""
        self._refused_at: dict[PeerId, float] = {}  # unknown peers where nobody listens
        self._seen: dict[int, dict[PeerId, Seen]] = {}
        self._reached_at: dict[PeerId, float] = {}  # who answered on a connection that I opened; the latest last

    def hear(self, peer: PeerId, beat: Heartbeat, *, now: float) -> bool:
        """Take in a heartbeat. Returns True if the peer is new, newly alive, or a new incarnation of itself."""
        self.changes += 1
        stage = self._seen.setdefault(beat.stamp.stage, {})
        seen = stage.get(peer)
        # It was sent before the connection broke for good.
        if seen is not None and seen.incarnation == beat.incarnation and self._last_words(seen, now):
            return False
        self._refused_at.pop(peer, None)
        fresh = seen is None or seen.dead or seen.incarnation != beat.incarnation
        self.arrivals += fresh
        # Identities cost nothing, so a newcomer never displaces a known replica.
        if seen is None and len(stage) >= _MOST_REPLICAS:
            return False
        if seen is None or seen.incarnation != beat.incarnation:
            seen = stage[peer] = Seen(heard_at=now, incarnation=beat.incarnation, since=now)
        self._alive(seen, now)
        seen.steady, seen.touched = seen.touched, False
        seen.version, seen.chain, seen.synced = beat.stamp.step, beat.stamp.chain, beat.synced
        seen.before = beat.before
        seen.known, seen.digest = stages_in(beat.known), beat.digest
        seen.committed = beat.stamp.stage in seen.known or any(c.stage == beat.stamp.stage for c in beat.commits)
        seen.queue, seen.draining, seen.keeper = beat.queue, beat.draining, beat.keeper
        seen.unreached = {mate: seen.unreached.get(mate, now) for mate in beat.unreached}
        seen.sitting, seen.new, seen.numerics, seen.measure = beat.sitting, beat.new, beat.numerics, beat.measure
        return fresh

    def hear_again(self, peer: PeerId, beat: Heartbeat, *, now: float) -> bool:
        """Take in a heartbeat that says what the last one said, of a peer that is alive."""
        seen = self._seen[beat.stamp.stage][peer]
        self._alive(seen, now)
        seen.steady, seen.touched = seen.touched, False
        return seen.incarnation == beat.incarnation

    def touch(self, peer: PeerId, *, now: float) -> None:
        """Any message is a sign of life."""
        self.changes += 1
        for stage in self._seen.values():
            if peer in stage and not stage[peer].dead:
                self._alive(stage[peer], now)
                stage[peer].touched = stage[peer].steady = True

    def reached(self, peer: PeerId, *, now: float) -> None:
        """The peer answered on a connection that I opened: it can be called."""
        self._reached_at.pop(peer, None)
        self._reached_at[peer] = now
        if len(self._reached_at) > _MOST_REPLICAS:
            del self._reached_at[next(iter(self._reached_at))]

    def reach_age(self, peer: PeerId, *, now: float) -> float:
        """Seconds since the peer last answered on a connection that I opened; infinite if it never did, 0 for me."""
        return 0.0 if peer == self.me else now - self._reached_at.get(peer, -math.inf)

    def unreached(self, *, now: float) -> tuple[PeerId, ...]:
        """Mates to whom my line is broken: I do not hear them; or I do, and for a while they have answered nothing."""
        limit_s, reached_at = max(self.timers.suspect_s / 2, self.beat_s + _ASKED_S), self._reached_at
        found = sorted(
            peer
            for peer, seen in self._seen.get(self.stage, {}).items()
            if (
                now - seen.since > limit_s < now - reached_at.get(peer, -math.inf)
                if self.alive(peer, now=now)
                else seen.synced and not seen.dead
            )
        )
        called = self._neighbours if self.stage in self.sparse else found  # who is not called answers nothing
        return tuple(peer for peer in found if peer in called and peer != self.me)

    def answers(self, peer: PeerId, *, now: float) -> bool:
        """Can I call this peer, for all I know? False if I no longer can, though I may hear it: a firewall."""
        reached_at = self._reached_at.get(peer)
        return reached_at is None or now - reached_at <= self.timers.long_silence_s

    def gone(self, peer: PeerId, *, now: float) -> bool:
        """The peer is definitely dead (nobody listens there). Returns True if that is news."""
        news = False
        self.changes += 1
        self.arrivals += 1
        self._reached_at.pop(peer, None)
        if not any(peer in stage for stage in self._seen.values()):
            self._refused_at[peer] = now
            if len(self._refused_at) > _MOST_REPLICAS:
                del self._refused_at[next(iter(self._refused_at))]
        for stage in self._seen.values():
            if peer in stage and not stage[peer].dead:
                stage[peer].dead = news = True
                stage[peer].dead_at = now
        return news

    def _last_words(self, seen: Seen, now: float) -> bool:
        """Was this still under way when the peer died? Later it means that the death was an error."""
        return seen.dead and now - seen.dead_at < self.timers.suspect_s

    def forget(self, peer: PeerId) -> None:
        """Know nothing of this peer any more."""
        self.changes += 1
        for stage in self._seen.values():
            stage.pop(peer, None)

    def forget_all(self) -> None:
        """Forget all that others said; what I know of connections stays."""
        self.changes += 1
        self._seen.clear()

    def forget_silent(self, *, now: float) -> None:
        """Drop replicas that were dead or silent for ten long silences; one that comes back is then new."""
        self.changes += 1
        for stage in self._seen.values():
            for peer in [p for p, s in stage.items() if now - s.heard_at > self.timers.forget_s]:
                del stage[peer]
        for peer in [p for p, at in self._reached_at.items() if now - at > self.timers.forget_s]:
            del self._reached_at[peer]
        for peer in [p for p, at in self._refused_at.items() if now - at > self.timers.long_silence_s]:
            del self._refused_at[peer]

    def hear_only(self, neighbours: Collection[PeerId], *, now: float) -> None:
        """Of large stages I hear and call these alone: who falls silent and is none of them need not be gone."""
        self.changes += 1
        if neighbours is not self._given:
            self._given, self._neighbours = neighbours, frozenset(neighbours)
        for stage in self.sparse & self._seen.keys():
            known = self._seen[stage]
            for peer in [p for p in known if p not in self._neighbours and not known[p].dead]:
                if not self.alive(peer, now=now, stage=stage):
                    del known[peer]

    def dead(self, stage: int) -> list[tuple[PeerId, int]]:
        """(peer, incarnation) of the replicas of a stage that are known dead."""
        return [(peer, seen.incarnation) for peer, seen in self._seen.get(stage, {}).items() if seen.dead]

    def get(self, peer: PeerId, stage: int | None = None) -> Seen | None:
        """The replica of `stage` (default: mine) with that id, if known."""
        return self._seen.get(self.stage if stage is None else stage, {}).get(peer)

    def silence_limit(self, seen: Seen) -> float:
        """T: four times the longest pause seen of this peer, within [suspect_s, long_silence_s]. Pauses that rare
        heartbeats explain come on top."""
        limit_s = max(self.timers.suspect_s, 4 * seen.gap_s) + self._explained_s(seen)
        return min(limit_s, self.timers.long_silence_s)

    def _explained_s(self, seen: Seen) -> float:
        return 0.0 if seen.steady else self.beat_s - self.timers.beat_s

    def alive(self, peer: PeerId, *, now: float, stage: int | None = None) -> bool:
        """Heard within the silence limit and not known dead. I am always alive."""
        if peer == self.me:
            return True
        seen = self._seen.get(self.stage if stage is None else stage, {}).get(peer)
        if seen is None or seen.dead:
            return False
        silent_s = now - seen.heard_at
        return silent_s <= self.timers.suspect_s or silent_s <= self.silence_limit(seen)

    def may_live(self, peer: PeerId, *, now: float, stage: int | None = None) -> bool:
        """Alive, or one of a large stage whom I do not listen to."""
        return self.alive(peer, now=now, stage=stage) or self._is_out_of_sight(
            peer, self.stage if stage is None else stage
        )

    def _is_out_of_sight(self, peer: PeerId, stage: int) -> bool:
        return stage in self.sparse and self.get(peer, stage) is None and peer not in self._refused_at

    def left_out(self, stage: int, *, now: float) -> frozenset[PeerId]:
        """Replicas that this stage goes on without: the keeper that most of it names says so, or most of it."""
        live = [seen for peer in self.live(stage, now=now) if (seen := self.get(peer, stage)) is not None]
        keepers = Counter(seen.keeper.peer for seen in live if seen.keeper is not None)
        said = Counter(peer for seen in live for peer in set(seen.sitting))
        found = {peer for peer, voices in said.items() if voices >= quorum(live)}
        for keeper, voices in keepers.items():
            if voices >= quorum(live) and (seen := self.get(keeper, stage)) is not None:
                found.update(seen.sitting)
        return frozenset(found)

    def shunned(self, *, now: float) -> frozenset[PeerId]:
        """Mates that most others of my stage and I, two at least, go on without or have a broken line to."""
        known = self._seen.get(self.stage, {})
        # Mine is one voice: where nobody else says anything of anybody, as most of the time, there are never two.
        if not any(seen.sitting or seen.unreached for seen in known.values()):
            return frozenset()
        mine = self.unreached(now=now)
        live = {peer: known[peer] for peer in self.live(self.stage, now=now)}
        said = Counter(of for peer, seen in live.items() for of in {*seen.sitting, *seen.unreached} - {peer})
        said.update(mine)
        return frozenset(of for of, voices in said.items() if voices > 1 and voices >= quorum({self.me, *live} - {of}))

    def leaves(self, peer: PeerId) -> bool:
        """Is this replica of my stage (or am I) about to leave?"""
        seen = self.get(peer)
        return self.draining if peer == self.me else seen is not None and seen.draining

    def live(self, stage: int, *, now: float) -> list[PeerId]:
        """Synced live replicas of a stage that I can call, sorted; in my own stage without me."""
        suspect_s, long_s, reached_at = self.timers.suspect_s, self.timers.long_silence_s, self._reached_at
        found = [
            peer
            for peer, seen in self._seen.get(stage, {}).items()
            if seen.synced
            # As `alive` and `answers` have it, without a call for each.
            and (
                (not seen.dead and (now - seen.heard_at <= suspect_s or self.alive(peer, now=now, stage=stage)))
                or peer == self.me
            )
            and (peer not in reached_at or now - reached_at[peer] <= long_s)
        ]
        if stage == self.stage and self.me in found:
            found.remove(self.me)
        found.sort()
        return found

    def mates(self) -> Iterator[tuple[PeerId, Seen]]:
        """All known replicas of my stage but me, dead ones included."""
        return ((peer, seen) for peer, seen in self._seen.get(self.stage, {}).items() if peer != self.me)

    def known(self) -> Iterator[tuple[int, PeerId, Seen]]:
        """(stage, peer, seen) of everybody heard of and not yet forgotten, dead ones included."""
        return ((stage, peer, seen) for stage, found in self._seen.items() for peer, seen in found.items())

    def everyone(self) -> dict[PeerId, int]:
        """Peer -> newest version heard, for all replicas not known dead."""
        found: dict[PeerId, int] = {}
        for stage in self._seen.values():
            for peer, seen in stage.items():
                if not seen.dead and peer != self.me:
                    found[peer] = max(found.get(peer, -1), seen.version)
        return found

    def lives(self, peer: PeerId) -> list[Seen]:
        """That peer in each stage that it serves, as last heard; none if it is unknown or known dead."""
        found = [stage[peer] for stage in self._seen.values() if peer in stage]
        # It may have served other stages in an earlier life.
        life = max(found, key=lambda seen: seen.since).incarnation if found else 0
        return [seen for seen in found if seen.incarnation == life and not seen.dead]

    def lost(self, peer: PeerId, version: int, *, now: float) -> bool:
        """Rule 12: may a keeper at `version` evict this mate?

        Definitely dead; or silent beyond T while a majority of the stage is heard; or silent beyond T_long.
        """
        if self.alive(peer, now=now):
            return False
        seen = self.get(peer)
        if seen is None or seen.dead or now - seen.heard_at > self.timers.long_silence_s:
            return True
        members = {p for p, s in self.mates() if not s.dead and s.synced and s.version in (version - 1, version)}
        members = members & self.voters or members  # silent strangers must not outnumber the voters that are heard
        heard = {p for p in members if self.alive(p, now=now)}
        return has_quorum(heard | {self.me}, members | {self.me})

    def unreachable(self, peer: PeerId, stage: int, *, now: float) -> bool:
        """Is that replica of a stage lost to me? Dead, silent for a long silence, or heard to have no state."""
        seen = self.get(peer, stage)
        if seen is None or seen.dead:
            return not self._is_out_of_sight(peer, stage)
        silent_s = now - seen.heard_at
        return silent_s > self.timers.long_silence_s or (not seen.synced and silent_s <= self.silence_limit(seen))

    def keeper_order(self, term_chain: Chain, *, now: float) -> list[PeerId]:
        """Live replicas of my stage in the order in which they should keep (rule 13; nobody can grind an id)."""
        return sorted([*self.live(self.stage, now=now), self.me], key=lambda p: keeper_rank(term_chain, self.stage, p))

    def _alive(self, seen: Seen, now: float) -> None:
        # The longest gap fades, so one hiccup does not slow suspicion for ever.
        pause_s = now - seen.heard_at - self._explained_s(seen)
        seen.gap_s = max(0.95 * seen.gap_s, pause_s) if not seen.dead else 0.0
        seen.heard_at, seen.dead = now, False
