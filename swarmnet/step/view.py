"""Which replicas one replica is in touch with, by heartbeats, answers and refused connections.

| a replica is | if |
|---|---|
| in touch | a message came from it within the silence limit, and no connection to its address was refused since |
| in touch, of my stage | it has also answered on a connection that this replica opened, within the same limit |
| refused | no process listens at its address: its process is gone |

Replicas of one stage open streams to each other, so one that receives nothing is out of touch for all others, although
its messages reach them. The answer is the echo; a ping follows heartbeats, and the transport reports the answer.

The limit is `suspect_s`, or `long_silence_s` where too few voters are in touch to outvote a replica (`given_up`).
Suspicion decides progress, never correctness (docs/protocol.md, I2). Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field

from swarmnet.bounds import Recent
from swarmnet.ids import NO_CHAIN, Ballot, Chain, PeerId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import Heartbeat, Measure
from swarmnet.quorum import has_quorum, quorum
from swarmnet.step.commits import stages_in
from swarmnet.step.graph import leader_rank

_MOST_REPLICAS = 4096
"""Replicas of one stage that are remembered; identities are free, memory is not."""

_LEAST_STRANGERS, _STRANGERS_EACH = 512, 4
"""Replicas that have contributed nothing lately are remembered up to so many, and to so many for each that has."""


@dataclass(slots=True)
class Seen:
    """One replica of one stage, by its last message. since: when the first message of this process came."""

    heard_at: float
    echoed_at: float
    """When it last answered on a connection that I opened; at first `since`, because its answer takes a moment."""
    incarnation: int
    since: float
    told_at: float = -math.inf
    """When more than a heartbeat came from it."""
    version: int = -1
    chain: Chain = NO_CHAIN
    before: Chain = NO_CHAIN
    synced: bool = False
    committed: bool = False
    known: frozenset[int] = frozenset()
    leader: Ballot | None = None
    late: tuple[PeerId, ...] = ()
    unreached: Mapping[PeerId, float] = field(default_factory=dict)
    new: bool = False
    queue: int = 0
    waits: str = ""
    draining: bool = False
    numerics: str = ""
    measure: Measure | None = None

    @property
    def touched_at(self) -> float:
        """When this replica of my stage had both sent a message and answered."""
        return min(self.heard_at, self.echoed_at)


class View:
    """Liveness of all known replicas, seen from `me` in `stage`."""

    def __init__(self, me: PeerId, stage: int, timers: Timers) -> None:
        self.me, self.stage, self.timers = me, stage, timers
        self.draining = False  # am I about to leave?
        self.out_of_touch: Mapping[PeerId, float] = {}
        """The replicas of my stage that I call and am out of touch with, or to which my line is broken, and since when;
        as of the last tick."""
        self.late: tuple[PeerId, ...] = ()  # those that I have observed to be late, as my heartbeats say it
        self._neighbours: frozenset[PeerId] = frozenset()  # whom I send heartbeats
        self.voters_of: Callable[[int], Set[PeerId]] = lambda stage: frozenset()
        """The voters of a stage, by its commits (`step.membership`)."""
        self.voters: Set[PeerId] = frozenset()
        """The voters of my stage; empty: none is known. Identities cost nothing, so nothing is concluded from other
        replicas that are silent or unreachable."""
        self.sparse: frozenset[int] = frozenset()
        """Stages of which I hear a few replicas only: there silence of the others means nothing (`step.graph`)."""
        self.beat_s = timers.beat_s
        """Between two heartbeats to a peer."""
        self.arrivals = 0
        """How often a replica appeared for the first time, came back or was lost."""
        self._refused_at = Recent[PeerId, float](_MOST_REPLICAS)
        self._reviewed_at = -math.inf
        self._seen: dict[int, dict[PeerId, Seen]] = {}

    def hear(self, peer: PeerId, beat: Heartbeat, *, now: float) -> bool:
        """Take in a heartbeat. Returns True if the peer is new, newly alive, or a new incarnation of itself."""
        stage = self._seen.setdefault(beat.stamp.stage, {})
        seen, refused_at = stage.get(peer), self._refused_at.get(peer)
        # A beat of the life that has ended was under way. If more come later, the refusal was an error.
        same_life = seen is not None and seen.incarnation == beat.incarnation
        if same_life and refused_at is not None and now - refused_at < self.timers.suspect_s:
            return False
        self._refused_at.pop(peer, None)
        fresh = seen is None or refused_at is not None or seen.incarnation != beat.incarnation
        self.arrivals += fresh
        if seen is None:
            self._make_room(beat.stamp.stage)
        if seen is None or seen.incarnation != beat.incarnation:
            seen = stage[peer] = Seen(heard_at=now, echoed_at=now, incarnation=beat.incarnation, since=now)
        elif refused_at is not None:
            seen.echoed_at = now
        seen.heard_at = now
        seen.version, seen.chain, seen.synced = beat.stamp.step, beat.stamp.chain, beat.synced
        seen.before = beat.before
        seen.known = stages_in(beat.known)
        seen.committed = beat.stamp.stage in seen.known or any(c.stage == beat.stamp.stage for c in beat.commits)
        seen.queue, seen.draining, seen.leader = beat.queue, beat.draining, beat.leader
        seen.waits = beat.waits
        seen.unreached = {mate: seen.unreached.get(mate, now) for mate in beat.unreached}
        seen.late, seen.new, seen.numerics, seen.measure = beat.late, beat.new, beat.numerics, beat.measure
        return fresh

    def _make_room(self, stage: int) -> None:
        """Identities cost nothing: of too many strangers the one that was silent longest is forgotten."""
        known = self._seen[stage]
        voters = self.voters if stage == self.stage else self.voters_of(stage)
        most = max(_LEAST_STRANGERS, _STRANGERS_EACH * len(voters)) if voters else _MOST_REPLICAS
        strangers = known.keys() - voters
        if len(strangers) >= min(most, _MOST_REPLICAS):
            del known[min(strangers, key=lambda peer: (known[peer].heard_at, peer))]

    def touch(self, peer: PeerId, *, now: float) -> None:
        """Any message is a sign of life."""
        if peer not in self._refused_at:
            for stage in self._seen.values():
                if peer in stage:
                    stage[peer].heard_at = stage[peer].told_at = now

    def echo(self, peer: PeerId, *, now: float) -> None:
        """The peer answered on a connection that I opened."""
        if (seen := self.get(peer)) is not None:
            seen.echoed_at = now

    def refuse(self, peer: PeerId, *, now: float) -> bool:
        """No process listens at this peer's address: it is out of touch. True if that is news of a known one."""
        self.arrivals += 1
        known = any(peer in stage for stage in self._seen.values())
        news = known and peer not in self._refused_at
        if news or not known:
            self._refused_at[peer] = now
        return news

    def refused(self, peer: PeerId) -> bool:
        """Is its process gone, for all I know?"""
        return peer in self._refused_at

    def forget(self, peer: PeerId) -> None:
        """Know nothing of this peer any more."""
        for stage in self._seen.values():
            stage.pop(peer, None)

    def forget_all(self) -> None:
        """Forget all that others said; what I know of connections stays."""
        self._seen.clear()

    def review(self, *, broken: Set[PeerId] = frozenset(), now: float) -> None:
        """A heartbeat's time has passed. Replicas that were silent for ten long silences are forgotten.

        broken: the replicas to which my line was broken in a recent step.
        """
        # My process was stopped, and has asked for no answer in that time.
        if now - self._reviewed_at > self.timers.suspect_s:
            for _, seen in self.mates():
                seen.echoed_at = now
        self._reviewed_at = now
        for stage in self._seen.values():
            for peer in [p for p, s in stage.items() if now - s.heard_at > self.timers.forget_s]:
                del stage[peer]
        self._refused_at.drop(lambda peer, at: now - at > self.timers.forget_s)
        # A replica that is not called does not answer.
        called = self._neighbours if self.stage in self.sparse else None
        out = (
            peer
            for peer, seen in self.mates()
            if seen.synced and not self.refused(peer) and (peer in broken or not self.in_touch(peer, now=now))
            if called is None or peer in called
        )
        self.out_of_touch = {peer: self.out_of_touch.get(peer, now) for peer in out}

    def hear_only(self, neighbours: Collection[PeerId], *, now: float) -> None:
        """Of large stages I hear and call these alone: who falls silent and is none of them need not be gone."""
        self._neighbours = frozenset(neighbours)
        for stage in self.sparse & self._seen.keys():
            known = self._seen[stage]
            for peer in [p for p in known if p not in self._neighbours]:
                if not self.in_touch(peer, now=now, stage=stage):
                    del known[peer]

    def ended(self, stage: int) -> list[tuple[PeerId, int]]:
        """(peer, incarnation) of the replicas of a stage with a process that is gone."""
        return [(peer, seen.incarnation) for peer, seen in self._seen.get(stage, {}).items() if self.refused(peer)]

    def get(self, peer: PeerId, stage: int | None = None) -> Seen | None:
        """The replica of `stage` (default: mine) with that id, if known."""
        return self._seen.get(self.stage if stage is None else stage, {}).get(peer)

    def in_touch(self, peer: PeerId, *, now: float, stage: int | None = None, within: float | None = None) -> bool:
        """Is this replica in touch with me, as the table above has it? within: the silence limit; None: `suspect_s`,
        and what rare heartbeats add to it. I am always in touch."""
        if peer == self.me:
            return True
        stage = self.stage if stage is None else stage
        seen = self._seen.get(stage, {}).get(peer)
        if seen is None or peer in self._refused_at:
            return False
        silent_s = now - seen.heard_at
        if stage == self.stage:
            silent_s = max(silent_s, self._reviewed_at - seen.echoed_at)  # since then I have asked for no answer
        return silent_s <= (self.suspect_s(seen) if within is None else within)

    def suspect_s(self, seen: Seen) -> float:
        """The silence limit while most voters are in touch; longer if rare heartbeats are all that came."""
        rare_s = self.beat_s - self.timers.beat_s if seen.heard_at - seen.told_at > self.timers.settle_s else 0.0
        return self.timers.suspect_s + rare_s

    def given_up(self, version: int, *, now: float) -> frozenset[PeerId]:
        """Rule 12: the replicas of my stage that a leader at `version` goes on without. Where the voters in touch are
        no majority they may be on the smaller side of a cut, so the limit is `long_silence_s`."""
        out = frozenset(peer for peer, _ in self.mates() if not self.in_touch(peer, now=now))
        if not out:
            return out
        at = version - 1, version
        voters = {p for p, seen in self.mates() if seen.synced and seen.version in at and not self.refused(p)}
        voters = voters & self.voters or voters  # silent strangers must not outnumber the voters in touch
        if has_quorum((voters - out) | {self.me}, voters | {self.me}):
            return out
        long_s = self.timers.long_silence_s
        return frozenset(peer for peer in out if not self.in_touch(peer, now=now, within=long_s))

    def may_live(self, peer: PeerId, *, now: float, stage: int | None = None, within: float | None = None) -> bool:
        """In touch; or one of a large stage that sends its heartbeats to others, and is not refused."""
        of = self.stage if stage is None else stage
        if of in self.sparse and self.get(peer, of) is None:
            return not self.refused(peer)
        return self.in_touch(peer, now=now, stage=of, within=within)

    def cut_off(self, stage: int, *, now: float) -> frozenset[PeerId]:
        """Replicas of a stage that most others of it, two at least, are out of touch with; of my stage I am one."""
        known = self._seen.get(stage, {})
        mine = stage == self.stage
        # One voice is never enough, and mostly there is none.
        if not any(seen.unreached for seen in known.values()):
            return frozenset()
        live = {peer: known[peer] for peer in self._with_a_say(stage, now=now)}
        said = Counter(of for peer, seen in live.items() for of in seen.unreached if of != peer)
        said.update(self.out_of_touch.keys() if mine else ())
        voters = {*live, self.me} if mine else set(live)
        return frozenset(of for of, voices in said.items() if voices > 1 and voices >= quorum(voters - {of}))

    def observed_late(self, *, now: float) -> frozenset[PeerId]:
        """Replicas that most others, two at least, have observed to be late."""
        live = {peer: seen for peer in self._with_a_say(self.stage, now=now) if (seen := self.get(peer)) is not None}
        said = Counter(of for peer, seen in live.items() for of in seen.late if of != peer)
        said.update(self.late)
        return frozenset(of for of, voices in said.items() if voices > 1 and voices >= quorum({*live, self.me} - {of}))

    def _with_a_say(self, stage: int, *, now: float) -> list[PeerId]:
        """The live replicas of a stage; once there are voters, only those: identities cost nothing."""
        live, voters = self.live(stage, now=now), self.voters if stage == self.stage else self.voters_of(stage)
        return [peer for peer in live if peer in voters] if voters else live

    def leaves(self, peer: PeerId) -> bool:
        """Is this replica of my stage (or am I) about to leave?"""
        seen = self.get(peer)
        return self.draining if peer == self.me else seen is not None and seen.draining

    def live(self, stage: int, *, now: float) -> list[PeerId]:
        """Synced replicas of a stage that I am in touch with, sorted; in my own stage without me."""
        return sorted(
            peer
            for peer, seen in self._seen.get(stage, {}).items()
            if seen.synced
            if self.in_touch(peer, now=now, stage=stage) and (stage, peer) != (self.stage, self.me)
        )

    def mates(self) -> Iterator[tuple[PeerId, Seen]]:
        """All known replicas of my stage but me, ended ones included."""
        return ((peer, seen) for peer, seen in self._seen.get(self.stage, {}).items() if peer != self.me)

    def known(self) -> Iterator[tuple[int, PeerId, Seen]]:
        """(stage, peer, seen) of every replica seen and not yet forgotten, ended ones included."""
        return ((stage, peer, seen) for stage, found in self._seen.items() for peer, seen in found.items())

    def everyone(self) -> set[PeerId]:
        """All replicas of all stages but me that are not refused."""
        return {peer for _, peer, _ in self.known() if peer != self.me and not self.refused(peer)}

    def lives(self, peer: PeerId) -> list[Seen]:
        """That peer in each stage that it serves, by its last messages; none if it is unknown or refused."""
        found = [stage[peer] for stage in self._seen.values() if peer in stage and not self.refused(peer)]
        # It may have served other stages in an earlier life.
        life = max(found, key=lambda seen: seen.since).incarnation if found else 0
        return [seen for seen in found if seen.incarnation == life]

    def leader_order(self, term_chain: Chain, *, now: float) -> list[PeerId]:
        """Replicas of my stage in touch, and this one, in the order of rule 13; an id cannot be ground for a turn."""
        return sorted([*self.live(self.stage, now=now), self.me], key=lambda p: leader_rank(term_chain, self.stage, p))
