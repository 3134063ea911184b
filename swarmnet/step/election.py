"""Election of a stage's leader: the ballot that one replica has voted for, and its own turn (rule 13). Pure.

Two replicas may lead at a time; the higher ballot wins where both are received, and a wrong leader only wastes time
(docs/protocol.md, I2): for several usual steps at most, then it is suspended.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from swarmnet.ids import Ballot, PeerId
from swarmnet.messages import NONE, Indexes, Round
from swarmnet.quorum import has_quorum
from swarmnet.step.exclusion import passed_over
from swarmnet.step.graph import leader_rank
from swarmnet.step.lines import broken_lines

if TYPE_CHECKING:
    from swarmnet.step.member import Member

_TERM = 2.0
"""Patiences that a leader may take over what it should do next: a replica may be given up, and its work done again."""


class Election:
    """Promises of one replica in one step. given: the indexes that, as the leader says, have or had an assignee."""

    def __init__(self, member: Member, *, step: int, now: float) -> None:
        self._member, self._step = member, step
        self._view, self._membership, self._pace = member.view, member.membership, member.pace
        self._lateness = member.lateness
        self.promised: Ballot | None = None
        self._began_at = self._promised_at = self._led_at = now
        self._led_s: dict[PeerId, float] = {}  # before that, of those who have led in turns
        self._failed: set[PeerId] = set()  # peers with a failed term in this step, or one out of turn
        self._rejected: set[PeerId] = set()  # those of them that asked for what no correct leader asks for
        self._bids = 0  # for the lead, against one whom I pass over
        self._smallest = math.inf  # round that it has opened
        self.given: Indexes = NONE
        self._term_chain = member.term_chain

    def _level(self, peer: PeerId) -> bool:
        seen = self._view.get(peer)
        return seen is not None and seen.version >= self._step

    def _passed_over(self, now: float) -> frozenset[PeerId]:
        """Replicas not accepted as leaders: fewer than half of the voters, or of all replicas while there are none.

        First those that a commit is to ban, then those that failed in this step, then those that most observed to be
        late: these are not in the table yet. What this replica alone observed does not count: orders would differ.
        """
        view, bans = self._view, sorted(ban.peer for ban in self._member.bans)
        out = view.observed_late(now=now), view.cut_off(view.stage, now=now)
        were_late = self._membership.may_not_lead(self._step)
        worst = [*bans, *sorted(self._failed), *(peer for peers in out for peer in sorted(peers)), *were_late]
        if not worst:
            return frozenset()
        live = self._membership.live(view.stage, now=now) | {*view.live(view.stage, now=now), view.me}
        live = live & {*view.voters, view.me} if view.voters else live
        return passed_over((peer for peer in worst if peer != view.me), live)

    def promise(self, ballot: Ballot, *, told_by: PeerId | None = None, now: float) -> bool:
        """Follow a ballot from now on. False: I do not (`_follows`).

        told_by: the peer that reported that it follows this ballot. If that is my leader, it leads no longer.
        """
        if not self._follows(ballot, told_by, now):
            return False
        peer = ballot.peer
        if self.promised is None or self.promised.peer != peer:
            if self.promised is None:
                self._observe_before(peer, now)
            else:
                self._led_s[self.promised.peer] = self._led_for_s(now)
            self._led_at, self._smallest = now, math.inf
        self.promised, self._promised_at = ballot, now
        return True

    def _follows(self, ballot: Ballot, told_by: PeerId | None, now: float) -> bool:
        """Do I follow this ballot?

        | ballot | answer |
        |---|---|
        | the one that I follow; of a peer that I rejected in this step | no |
        | mine | if it is the highest, unless I gave it up for a leader that most follow |
        | of a peer out of touch for a long silence, if my leader does not name it | no |
        | higher than mine, of a peer that is not passed over and challenges no leader | yes |
        | any other | if most live replicas follow it, and I do not run for leader myself |
        """
        peer, view, mine = ballot.peer, self._view, self.promised
        if ballot == mine or peer in self._rejected:
            return False
        if peer == view.me:
            if mine is None or mine.peer == peer or told_by in (None, peer, mine.peer):
                return mine is None or ballot > mine
            return ballot > mine and not self._followed(mine, now)
        left = mine is not None and told_by == mine.peer != view.me
        if view.get(peer) is None or not (left or view.in_touch(peer, now=now, within=view.timers.long_silence_s)):
            return False
        higher = mine is None or ballot > mine
        if higher and peer not in self._passed_over(now) and (left or not self._challenges(ballot, now)):
            return True
        return not self._runs(now) and self._followed(ballot, now)

    def order(self, now: float) -> list[PeerId]:
        """Who should lead, best first: at the step, who superseded me, voters, the fewest broken lines, as drawn."""
        out, view, leads = self._passed_over(now), self._view, self._member.overruled_by
        last = {*self._membership.may_not_lead(self._step)}
        weights = self._step - self._member.shape.delay.behind(self._step)  # a replica further behind cannot lead yet
        last |= {peer for peer, seen in view.mates() if seen.version < weights - 1}
        if view.stage not in view.sparse:
            order = [peer for peer in view.leader_order(self._term_chain, now=now) if peer not in out]
            said = {
                view.me: view.out_of_touch,
                **{peer: seen.unreached for peer, seen in view.mates() if peer in order},
            }
            # A broken line to a replica that has contributed nothing may be its own doing.
            new = {peer for peer in order if self._membership.leads_last(peer)}
            if view.voters:  # and many silent strangers would put me at fault that names them
                said = {one: {mate: said[one][mate] for mate in said[one].keys() & view.voters} for one in said}
            broken = broken_lines(said, out | new, now - view.timers.suspect_s / 2)
            return sorted(order, key=lambda peer: (peer in last, peer != leads, peer in new, broken[peer]))
        # In a large stage voters lead, as they are in touch with each other; I run last if I am none of them.
        may = {peer for peer in self._membership.leaders(view.stage) if view.may_live(peer, now=now)} - out
        ranks = {peer: leader_rank(self._term_chain, view.stage, peer) for peer in {*may, view.me}}
        return sorted(ranks, key=lambda peer: (peer not in may, peer in last, ranks[peer]))

    def _challenges(self, ballot: Ballot, now: float) -> bool:
        """Does it run against a leader in touch that most follow, or that is first in order and has just begun?"""
        view = self._view
        order = self.order(now)
        begins = now - self._began_at <= view.timers.suspect_s and len(order) > 2
        if self.promised is None:
            return begins and ballot.peer != order[0]
        leader = self.promised.peer
        if leader == ballot.peer or leader in self._passed_over(now):
            return False
        return view.in_touch(leader, now=now) and (
            self._followed(self.promised, now) or (begins and leader == order[0])
        )

    def _runs(self, now: float) -> bool:
        """Have I run for leader a moment ago? What the others follow is not known yet: their heartbeats are older."""
        mine = self.promised is not None and self.promised.peer == self._view.me
        return mine and now - self._promised_at <= self._view.timers.settle_s

    def _followed(self, ballot: Ballot, now: float) -> bool:
        """Do most live replicas, the leader among them, follow this ballot? A failed leader has no vote."""
        live = set(self._membership.in_sight(self._view.stage, now=now))
        found = {ballot.peer} if ballot.peer != self._view.me or ballot == self.promised else set[PeerId]()
        for peer in live - {self._view.me}:
            seen = self._view.get(peer)
            if seen is not None and seen.leader == ballot:
                found.add(peer)
        if ballot == self.promised:
            found.add(self._view.me)
        if self._lateness.is_late(ballot.peer, now=now):
            live -= {ballot.peer}
        return has_quorum(found, live)

    def reject(self, leader: PeerId, *, now: float) -> None:
        """It opened a round that no correct leader opens: I do not follow it in this step, even if most do."""
        self._rejected.add(leader)
        self._fail(leader, "opens a round that is refused", now)

    def _fail(self, leader: PeerId, reason: str, now: float) -> None:
        self._failed.add(leader)
        self._lateness.observe(leader, reason, now=now)

    def moves(self, *, now: float) -> None:
        """The leader does what it should, or cannot end the step yet: the time to wait for it starts again."""
        self._led_at = now
        self._led_s.clear()

    def opened(self, opened: Round, *, now: float) -> None:
        """The leader has opened this round. Fewer members than ever means progress: it left a member out."""
        # Every index has an assignee then. If the leader dies, its successor need not wait whether callers bring them.
        self.given = self.given.union(*(indexes for _, _, indexes in opened.contributions))
        members = len(opened.receivers)
        if members < self._smallest:
            if self._smallest < math.inf:
                self.moves(now=now)
            self._smallest = members

    def _led_for_s(self, now: float) -> float:
        """How long my leader has led in this step, since it last did what it should."""
        assert self.promised is not None
        return self._led_s.get(self.promised.peer, 0.0) + now - self._led_at

    def due(self, *, leading: bool, now: float) -> Ballot | None:
        """The ballot to run with now, or None.

        The first in order leads; the next ones wait their turn when it is silent, and only a moment when it is dead.
        """
        view, limit = self._view, self._view.timers.suspect_s
        self._term_chain = self._member.term_chain
        self._observe_idle(now)
        order = self.order(now)
        place = order.index(view.me)
        if self.promised is None:
            waited_s = now - self._began_at
            if place and waited_s <= (2 + place) * limit:
                return None
            self._observe_before(view.me, now)
            return Ballot(0, view.me)
        higher = Ballot(self.promised.number + 1, view.me)
        leader = self.promised.peer
        # I lead already, or did before I began the step again.
        if leader == view.me:
            # Promised by myself in a leader object that was dropped: only a new ballot may lead again.
            return None if leading else higher
        # A dead leader cannot come back under its ballot: the next in order stands at once, the others if it does not.
        if (seen := view.get(leader)) is not None and view.refused(leader):
            waited_s = now - max(seen.heard_at, self._led_at)
            return higher if place == 0 or waited_s > place * limit else None
        if leader in self._passed_over(now):
            # I wait longer if others still follow it: if they stay with it, I would only come back.
            # Each failed attempt of mine doubles the wait, because no aggregate comes while leaders change.
            alone = leader not in self._rejected and leader not in view.observed_late(now=now)
            follows = alone and self._followed(self.promised, now)
            turns = place + follows + 2**self._bids - 1
            if turns and now - self._led_at <= turns * limit:
                return None
            self._bids += 1
            return higher
        # The two replicas have yielded to each other at the same time, and none leads.
        yielded = seen is not None and seen.leader is not None and seen.leader.peer == view.me and self._level(leader)
        if yielded and now - self._promised_at > view.timers.settle_s + place * limit:
            return higher
        # One out of touch may be on the other side of a cut: each of us waits longer than the one before.
        if not view.in_touch(leader, now=now):
            silent_since = seen.touched_at if seen is not None else self._promised_at
            if now - silent_since > (1 + place) * limit:
                return higher
        return None

    def _observe_before(self, leader: PeerId, now: float) -> None:
        """Rule 13: note those before the step's first leader in order, in touch and at the step, that did not lead.

        One that follows another of them had no turn.
        """
        waited_s, order = now - self._began_at, self.order(now)
        if waited_s <= 2 * self._view.timers.suspect_s or leader not in order:
            return
        before = order[: order.index(leader)]
        for peer in before:
            seen = self._view.get(peer)
            follows = seen is not None and seen.leader is not None and seen.leader.peer in {*before} - {peer}
            if peer != self._view.me and self._level(peer) and not follows:
                self._fail(peer, "does not lead in its turn", now)

    def _observe_idle(self, now: float) -> None:
        """Rule 13: a leader is late that has led for several usual steps without doing what it should do next."""
        if self.promised is None or self.promised.peer == self._view.me:
            return
        kept_s = self._led_for_s(now)
        if kept_s > _TERM * self._pace.patience_s:
            self._fail(self.promised.peer, "leads, and no aggregate comes", now)
            self.moves(now=now)
