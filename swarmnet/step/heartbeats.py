"""The content of one replica's heartbeats, their receivers, and how commits travel with them. Pure.

| where | a commit comes |
|---|---|
| at once | from its leader: to all; of a large stage to its neighbours, and two voters of each far stage |
| when asked for | from one neighbour that knows it |

A heartbeat names the stages that its sender knows commits of. A replica that lacks some asks one sender for each
(`wants`), and another one if nothing comes for a while (`step.questions`). So a replica gets a commit about once. A
digest of the commits goes with the stages: a replica that knows the same commits takes it as if it had been sent them
(`Membership.lists`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from swarmnet.ids import PeerId
from swarmnet.messages import MAX_UNREACHED, Commit, Heartbeat, Stamp
from swarmnet.step.commits import bits_of, stages_in
from swarmnet.step.graph import Graph, lots
from swarmnet.step.questions import Questions
from swarmnet.step.view import Seen

if TYPE_CHECKING:
    from swarmnet.step.member import Member

STRETCH = 5 / 6
"""Of the silence limit: between two heartbeats of a replica that has a large stage near it."""


_Kind = tuple[bool, bool]
"""What a heartbeat says depends on its receiver: is that a replica of my stage, and have I chosen it?"""


class Heartbeats:
    """Those of one member."""

    def __init__(self, of: Member) -> None:
        self._of, self.graph = of, Graph(of.me, of.stage)
        self.questions = Questions(of.me, of.timers.ask_s)

    def to(self, peer: PeerId | None) -> Heartbeat:
        """My heartbeat; None: to any replica of my stage."""
        return self._make((True, True) if peer is None else self._kind(peer))

    def neighbours(self, names: Mapping[int, Set[PeerId]], *, now: float) -> Collection[PeerId]:
        """Whom my heartbeats go to. names: the replicas known of my stage and of its neighbour stages."""
        view, membership = self._of.view, self._of.membership
        leader = self._of.oldest.promised or self._of.last_ballot
        counting = {stage: membership.leaders(stage) for stage in names}
        gone = {peer for peer, _ in view.mates() if view.refused(peer)}
        contributors = {stage: membership.voters(stage) - gone for stage in {*names, self._of.stage}}
        self.graph.choose(names, counting, contributors, leader=leader.peer if leader is not None else None)
        view.sparse = self.graph.sparse
        me = {self._of.stage: {self._of.me}}
        membership.presume({stage: names[stage] | me.get(stage, set()) for stage in view.sparse})
        # In a large stage heartbeats are rare: the leader gets reports, and all get its plans.
        view.beat_s = max(self._of.timers.beat_s, STRETCH * self._of.timers.suspect_s if view.sparse else 0.0)
        found = self.graph.neighbours(for_s=3 * view.beat_s, now=now)
        view.hear_only(found, now=now)
        return found

    def messengers(self) -> frozenset[PeerId]:
        """Of each stage that my neighbours do not serve, the replicas that count whom I tell of a commit.

        In large runs two: leaders of different stages draw different ones.
        """
        far = set(range(self._of.shape.num_stages)) - {self._of.stage - 1, self._of.stage, self._of.stage + 1}
        rosters = [self._of.membership.roster(stage) for stage in far]
        return frozenset().union(*((lots(self._of.me, each) for each in rosters) if self._of.view.sparse else rosters))

    def to_each(self, to: Iterable[PeerId]) -> Iterator[tuple[PeerId, Heartbeat]]:
        """My heartbeat for each of these. Those that are told the same get the same object: it is written once."""
        made: dict[_Kind, Heartbeat] = {}
        for peer in to:
            kind = self._kind(peer)
            if kind not in made:
                made[kind] = self._make(kind)
            yield peer, made[kind]

    def _kind(self, peer: PeerId) -> _Kind:
        return self._of.view.get(peer) is not None, not self._of.view.sparse or peer in self.graph.chosen

    # ------------------------------------------------------------ commits

    def awaited(self, peer: PeerId) -> bool:
        """May a neighbour wait to hear which commits I know? By its own word; or for mine, while no voters are
        known, as in the first step."""
        known = self._of.oldest.barrier.known
        if any(not self._of.membership.roster(commit.stage) for commit in known):
            return True
        mine, found = {commit.stage for commit in known}, self._of.view.lives(peer)
        return not found or any((seen.version, mine <= seen.known) < (self._of.version, True) for seen in found)

    def _known_to(self, stage: int, peer: PeerId, seen: Seen) -> Set[int]:
        """The stages of which a replica has my step's commits, by its own heartbeat."""
        of = self._of
        if not seen.synced or of.view.refused(peer):
            return frozenset()
        if seen.version == of.version:
            return seen.known if stage != of.stage or seen.chain == of.chain else frozenset()
        # It has applied the step that I am at, and so knows all its commits (rule 17).
        return frozenset(range(of.shape.num_stages)) if seen.version == of.version + 1 else frozenset()

    def ask(self, beat: tuple[PeerId, Heartbeat] | None, *, now: float) -> None:
        """Ask for commits of my step that I lack: the sender of this heartbeat, or else any replica that has them."""
        of, known = self._of, dict[PeerId, Set[int]]()
        lacking = of.oldest.barrier.missing
        if not lacking or of.done or of.oldest.applying:
            return
        # A replica that owes an answer in a large stage is asked again only as one of all: it may never give any.
        if beat is not None and of.view.sparse and self.questions.owes(beat[0]):
            beat = None
        for stage, peer, seen in of.view.known() if beat is None else self._sender(*beat):
            if found := lacking & self._known_to(stage, peer, seen):
                known[peer] = known.get(peer, frozenset()) | found
        # Mostly a heartbeat tells of nothing that I lack.
        if not known:
            return
        # In a large stage the leader is asked only if no other replica answers.
        leader = of.oldest.promised.peer if of.oldest.promised is not None and of.view.sparse else None
        asked = known if beat is None else {peer: stages for peer, stages in known.items() if peer != leader}
        wanted = self.questions.whom(lacking, asked, last=leader, now=now)
        # I know of these and do not believe them: the word of all that know them may be what is missing.
        doubted = lacking & of.membership.open_stages(of.version)
        for peer, stages in known.items() if doubted else ():
            if untold := {stage for stage in stages & doubted if not of.membership.has_told(peer, stage, of.version)}:
                wanted[peer] = wanted.get(peer, frozenset()) | untold
        for peer, stages in sorted(wanted.items()):
            of.host.send(peer, replace(self.to(peer), wants=bits_of(stages)))

    def _sender(self, peer: PeerId, beat: Heartbeat) -> Iterable[tuple[int, PeerId, Seen]]:
        """Who sent this, unless it is an answer."""
        seen = self._of.view.get(peer, beat.stamp.stage)
        return [(beat.stamp.stage, peer, seen)] if seen is not None and not (beat.commits or beat.last_commits) else ()

    def answer(self, peer: PeerId, beat: Heartbeat, *, now: float) -> None:
        """Send the commits that the sender of a heartbeat asks for, of my step or the last one."""
        of, step = self._of, beat.stamp.step
        mine = {of.version: of.oldest.barrier.known, of.version - 1: of.last_commits}.get(step, ())
        wanted = stages_in(beat.wants)
        found = [commit for commit in mine if commit.stage in wanted and commit.step == step]
        given = self.questions.give(peer, step, {commit.stage for commit in found}, few=bool(of.view.sparse), now=now)
        told = [commit for commit in found if commit.stage in given]
        if told and step == of.version:
            of.host.send(peer, replace(self.to(peer), commits=tuple(map(of.membership.brief, told))))
        elif told:
            # It may lack the names of those who signed: mine are of the step that it is at.
            of.host.send(peer, replace(self.to(peer), last_commits=tuple(map(of.membership.with_votes, told))))

    def listed(self, beat: Heartbeat) -> frozenset[Commit]:
        """The commits that the sender of a heartbeat believes, if I know all of them."""
        if beat.stamp.step != self._of.version:
            return frozenset()
        known = stages_in(beat.known)
        # Those that I do not believe yet included: that many list them may be what is missing.
        found = [commit for stage in sorted(known) if (commit := self._heard_of(stage)) is not None]
        same = len(found) == len(known) and self._of.membership.digest_of(found) == beat.digest
        return frozenset(found) if same else frozenset()

    def _heard_of(self, stage: int) -> Commit | None:
        """The accepted commit of a stage in this step, or the only one that was received."""
        mine = self._of.oldest.barrier.of(stage)
        found = self._of.membership.candidates(stage, self._of.version) if mine is None else []
        return mine or (found[0] if len(found) == 1 else None)

    def _make(self, kind: _Kind) -> Heartbeat:
        of, (of_my_stage, asks) = self._of, kind
        return Heartbeat(
            stamp=Stamp(of.version, of.stage, of.chain, of.restart),
            incarnation=of.oldest.claims.generation.incarnation,
            synced=self._of.synced,
            leader=self._of.oldest.promised or self._of.last_ballot,
            queue=self._of.queue,
            waits=self._of.waits,
            draining=self._of.view.draining,
            numerics=self._of.drift.numerics,
            measure=self._of.drift.mine if of_my_stage else None,
            before=self._of.before,
            late=self._of.view.late,
            unreached=self._unreached,
            new=self._of.membership.is_new(self._of.me) or self._of.membership.has_begun,
            asks=asks,
            known=bits_of(commit.stage for commit in self._of.oldest.barrier.known),
            digest=self._of.membership.digest_of(self._of.oldest.barrier.known),
            notices=self._of.shape.notices.mark,
        )

    @property
    def _unreached(self) -> tuple[PeerId, ...]:
        """The replicas that I am out of touch with, voters first."""
        out_of_touch = self._of.view.out_of_touch
        return tuple(sorted(out_of_touch, key=lambda peer: peer not in self._of.view.voters))[:MAX_UNREACHED]
