"""What one replica says of itself in heartbeats, whom it says it to, and how commits travel with them. Pure.

| where | a commit comes |
|---|---|
| at once | from its keeper to everybody; in large stages to its neighbours, and two who count in each far stage |
| with heartbeats | from whoever knows it to those neighbours that do not, by their own word |

So a link carries a commit about once. A heartbeat names the stages whose commits its sender knows, and a digest of
them: whoever knows the same counts that as if they had been told (`Membership.lists`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnet.ids import PeerId
from swarmnet.messages import MAX_SITTING, Commit, Heartbeat, Stamp
from swarmnet.step.graph import Graph, lots
from swarmnet.step.view import bits_of, stages_in

if TYPE_CHECKING:
    from swarmnet.step.member import Member

STRETCH = 5 / 6
"""Of the silence limit: between two heartbeats of a replica that has a large stage near it."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What a heartbeat says depends on its receiver. behind: it may lack the last step's commits. mate: it is one of my
    stage. asks: I have chosen it. known: the stages whose commits it need not be told."""

    behind: bool = True
    mate: bool = True
    asks: bool = True
    known: frozenset[int] = frozenset()


class Heartbeats:
    """Those of one member."""

    def __init__(self, of: Member) -> None:
        self._of, self.graph = of, Graph(of.me, of.stage)
        # What follows of what others know, until I know more.
        self._memo_of: tuple[object, ...] = ()
        self._same: dict[tuple[frozenset[int], bytes], frozenset[int]] = {}
        self._lists: dict[tuple[bytes, bytes], frozenset[Commit]] = {}

    def to(self, peer: PeerId | None) -> Heartbeat:
        """My heartbeat, with the last step's commits if the peer may not have applied them; None: to anybody."""
        return self._make(_Told() if peer is None else self._told(peer))

    def neighbours(self, names: Mapping[int, Set[PeerId]], *, now: float) -> Collection[PeerId]:
        """Whom my heartbeats go to. names: the replicas known of my stage and of those beside it."""
        view, membership = self._of.view, self._of.membership
        keeper = self._of.promised or self._of.kept_last
        counting = {stage: membership.keepers(stage) for stage in names}
        contributors = membership.contributors(self._of.stage)
        gone = {peer for peer, seen in view.mates() if seen.dead}
        self.graph.choose(names, counting, contributors - gone, keeper=keeper.peer if keeper is not None else None)
        view.sparse = self.graph.sparse
        me = {self._of.stage: {self._of.me}}
        membership.presume({stage: names[stage] | me.get(stage, set()) for stage in view.sparse})
        # In a large stage heartbeats are rare: the keeper hears reports, and all hear the keeper.
        view.beat_s = max(self._of.timers.heartbeat_s, STRETCH * self._of.timers.suspect_s if view.sparse else 0.0)
        found = self.graph.neighbours(for_s=3 * view.beat_s, now=now)
        view.hear_only(found, now=now)
        return found

    def messengers(self, *, news: bool) -> frozenset[PeerId]:
        """Of each stage that my neighbours do not serve, the replicas that count whom I tell of a commit, once.

        Keepers of different stages draw different ones.
        """
        if not news:
            return frozenset()
        far = set(range(self._of.shape.num_stages)) - {self._of.stage - 1, self._of.stage, self._of.stage + 1}
        return frozenset(peer for stage in far for peer in lots(self._of.me, self._of.membership.roster(stage)))

    def to_each(self, to: Iterable[PeerId]) -> Iterator[tuple[PeerId, Heartbeat]]:
        """My heartbeat for each of these. All that are told the same are told the same object: it is written once."""
        made: dict[_Told, Heartbeat] = {}
        for peer in to:
            told = self._told(peer)
            if told not in made:
                made[told] = self._make(told)
            yield peer, made[told]

    def _told(self, peer: PeerId) -> _Told:
        sparse = bool(self._of.view.sparse)
        return _Told(
            behind=self._of.view.behind(peer, self._of.version),
            mate=self._of.view.get(peer) is not None,
            asks=not sparse or peer in self.graph.chosen,
            known=self._known_to(peer),
        )

    def _known_to(self, peer: PeerId) -> frozenset[int]:
        """The stages whose commits of this step a peer knows as I do, by its own word."""
        found = frozenset[int]()
        for stage in (self._of.stage - 1, self._of.stage, self._of.stage + 1):
            seen = self._of.view.get(peer, stage)
            if seen is not None and seen.version == self._of.version and seen.known:
                found |= self._as_mine(seen.known, seen.digest)
        return found

    def _as_mine(self, known: frozenset[int], digest: bytes) -> frozenset[int]:
        """Of the stages whose commits a peer knows those that I know, if they may be the same commits."""
        self._forget()
        of = known, digest
        if of not in self._same:
            both = [commit for commit in self._of.barrier.known if commit.stage in known]
            # It knows others than I, or more of them, and will hear what it lacks.
            same = len(both) < len(known) or self._of.membership.digest_of(both) == digest
            self._same[of] = frozenset(commit.stage for commit in both) if same else frozenset()
        return self._same[of]

    def listed(self, beat: Heartbeat) -> frozenset[Commit]:
        """The commits that the sender of a heartbeat believes, if I know all of them."""
        if beat.stamp.step != self._of.version:
            return frozenset()
        self._forget()
        of = beat.known, beat.digest
        if of not in self._lists:
            known = stages_in(beat.known)
            # Those that I do not believe yet included: that many list them may be what is missing.
            found = [commit for stage in sorted(known) if (commit := self._heard_of(stage)) is not None]
            same = len(found) == len(known) and self._of.membership.digest_of(found) == beat.digest
            self._lists[of] = frozenset(found) if same else frozenset()
        return self._lists[of]

    def _forget(self) -> None:
        """Forget what followed from less than I know now."""
        of = self._of.version, self._of.restart, self._of.barrier.known, self._of.membership.changes
        before = self._memo_of
        if len(before) < 4 or of[2] is not before[2] or (of[0], of[1], of[3]) != (before[0], before[1], before[3]):
            self._memo_of = of
            self._same.clear()
            self._lists.clear()

    def _heard_of(self, stage: int) -> Commit | None:
        """The commit of a stage in this step that I believe, or the only one that I have heard of."""
        mine = self._of.barrier.of(stage)
        found = self._of.membership.candidates(stage, self._of.version) if mine is None else []
        return mine or (found[0] if len(found) == 1 else None)

    def _make(self, told: _Told) -> Heartbeat:
        of = self._of
        written = of.membership.with_votes if told.behind else of.membership.brief
        return Heartbeat(
            stamp=Stamp(of.version, of.stage, of.chain, of.restart),
            incarnation=of.incarnation,
            synced=self._of.synced,
            keeper=self._of.promised or self._of.kept_last,
            commits=tuple(written(commit) for commit in self._of.barrier.known if commit.stage not in told.known),
            last_commits=tuple(map(self._of.membership.with_votes, self._of.last_commits)) if told.behind else (),
            queue=self._of.queue,
            draining=self._of.view.draining,
            numerics=self._of.drift.numerics,
            measure=self._of.drift.mine if told.mate else None,
            before=self._of.before,
            sitting=self._sitting,
            unreached=self._of.unreached[:MAX_SITTING] if told.mate else (),
            new=self._of.membership.is_new(self._of.me),
            asks=told.asks,
            known=bits_of(commit.stage for commit in self._of.barrier.known),
            digest=self._of.membership.digest_of(self._of.barrier.known),
            notices=self._of.shape.notices.mark,
        )

    @property
    def _sitting(self) -> tuple[PeerId, ...]:
        """The mates that the step goes on without if I keep it; else those that my own strikes let sit out."""
        keeper = self._of.keeper
        found = keeper.without if keeper is not None else self._of.sitting
        return tuple(sorted(found))[:MAX_SITTING]
