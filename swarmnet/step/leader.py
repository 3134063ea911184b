"""The leader of a stage for one step, under one ballot: it holds the assignments. Pure.

Assigns indexes, evicts the dead, opens rounds, publishes the commit that the members' votes make. A wrong leader can
waste time; it cannot make a wrong aggregate (docs/protocol.md, I2). It knows nothing of compute, and of its own replica
only what any member reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from swarmnet.averaging.parts import shares
from swarmnet.ids import Ballot, Generation, PeerId, RoundId
from swarmnet.messages import (
    MAX_BANS,
    MAX_LATE,
    MAX_MOVED,
    NONE,
    UNMEASURED,
    BannedPeers,
    Commit,
    Committed,
    Indexes,
    LatePeers,
    MemberState,
    Round,
    Stamp,
)
from swarmnet.quorum import blocks, has_quorum, minority
from swarmnet.step.commits import counting
from swarmnet.step.exclusion import passed_over
from swarmnet.step.followers import AtStep, Follower, Plans
from swarmnet.step.idle import IdleWork, NonFinite
from swarmnet.step.lateness import Waits
from swarmnet.step.ledger import Ledger, Owner
from swarmnet.step.rounds import RoundBuilder, Rounds, left_alone
from swarmnet.step.suspects import CutAgain, Leave, SuspectGraph
from swarmnet.step.view import View

if TYPE_CHECKING:
    from swarmnet.step.member import Member

_LATE = 4.0
"""The leader waits for a member without the sum for so many times as long as the sum took, and for `suspect_s`."""

_OFFENCES = 3
"""So many times a member makes the leader begin the step again, and is left out: by a report that cannot be, of which
the first may have crossed with a new ballot, or by another accumulator, as after a restart of its process."""

_SUCCESSORS = 3
"""Members that are told which indexes were assigned: those that would lead next."""

_MANY, _LOOK_S = 64, 1e-4
"""Members in a large stage; and how many seconds, for each of them, pass at least between two looks at all of them that
messages ask for. The tick comes anyway."""


Phase = Literal["hearing", "assigning", "aggregating", "certified", "committed"]


class Leader:
    """One term. Discard it when a higher ballot is voted for or the step is over.

    oldest: the step is the one applied next. Only then the leader opens rounds and orders idle work.
    members: accumulators of replicas that reported. acks: what members signed, in any round. looks: check all members.

    | who | in the step | decided by |
    |---|---|---|
    | `passed_over` | counts nothing, is not waited for, may fetch the sum | the table of exclusions; I saw it late |
    | `_left_out` | the same, for this step only | what it did in this step: late, refused, silent, offending |
    """

    def __init__(
        self,
        stamp: Stamp,
        ballot: Ballot,
        member: Member,
        order: Callable[[float], Sequence[PeerId]],
        *,
        oldest: bool = True,
        given: Indexes = NONE,
        now: float,
    ) -> None:
        """order: who should lead, best first. given: indexes that had an owner under the last leader."""
        shape, view = member.shape, member.view
        self.stamp, self.ballot, self.oldest, self._member, self._order = stamp, ballot, oldest, member, order
        self.ledger = Ledger(shape.num_microbatches, given)
        self.members: dict[PeerId, Generation] = {}
        self.acks: dict[PeerId, Commit] = {}
        self.commit: Commit | None = None
        self._followers: dict[PeerId, Follower] = {}
        self._plans = Plans(stamp, ballot, member.host)
        self._at_step = AtStep(view, stamp, shape.delay.behind(stamp.step))
        self._work = IdleWork(view, idle_s=member.pace.idle_s, now=now)
        self._non_finite = NonFinite(stamp.step, member.host, max_discarded=shape.max_discarded)
        builder = RoundBuilder(stamp, ballot, shape.group_size, member.round_numbers, member.notice)
        suspects = SuspectGraph(view.me, patience_s=self._silence_s, links=member.lines)
        self._rounds = Rounds(builder, suspects, now)
        self._waits = Waits(now)
        self._left_out: set[PeerId] = set()  # Invariant: none of them is in `members`
        self.passed_over = self._pass_over(now)
        self.looks, self._looked_at = True, -math.inf

    @property
    def view(self) -> View:
        """What my replica knows of the others."""
        return self._member.view

    @property
    def round(self) -> Round | None:
        """The open round."""
        return self._rounds.attempt.round if self._rounds.attempt is not None else None

    def _follower(self, peer: PeerId) -> Follower:
        return self._followers.setdefault(peer, Follower())

    # ------------------------------------------------------------ messages

    def on_state(self, peer: PeerId, state: MemberState, *, now: float) -> None:
        """Enter what a member holds, then what it gives back, then assign what it wants (rules 3, 9, 10)."""
        if state.ballot != self.ballot:
            return
        self._follower(peer).echoed_at = now
        if state.whole or state.revision:
            self._hear(peer, state, now)
        if state.returns:
            self._release(peer, state, now)
        # A member asks again for what is not answered, and an answer names no more.
        for index in sorted(state.wants)[:MAX_MOVED]:
            self._assign(peer, state.generation, index, now)
        self._plans.send()

    def _assign(self, peer: PeerId, generation: Generation, index: int, now: float) -> None:
        """Assign a free index, or name its assignee; silent when generation or phase is wrong (rule 3)."""
        # Rule 14: nothing is assigned yet. The member is answered once the last state is here.
        if self.round is None and not self._waits.complete:
            self._waits.early[peer, index] = generation
            return
        if index in self.ledger.discarded:
            return
        # A replica passed over or out of touch may compute, but the index is ordered from a member, which counts it.
        out_of_touch = peer not in self.members and not self.view.in_touch(peer, now=now)
        if self.members and (peer in self.passed_over or out_of_touch):
            if (owned := self.ledger.owners[index]) is not None:
                owner = owned[0]
            else:
                owner, is_due = self._work.instead(index, sorted(self.members), now=now)
                if is_due:
                    self._plans.of(owner).execute |= {index}
            self._plans.move(peer, generation, index, owner)
            return
        # An older generation is closed, and a newer one has to be reported first.
        if self.members.get(peer) != generation:
            return
        held = self.ledger.owners[index]
        # Identities cost nothing: who contributes counts what it works on, whatever another member has asked for.
        if held is not None and self._contributes(peer) and self._yields(held, index):
            self._plans.discard(*held)
            self._evict(*held)
            held = None
        if held is None:
            # In an open round no set may change; if the index stays free the round is opened again.
            if self.round is not None:
                return
            held = self.ledger.claim((peer, generation), index)
            self._work.claimed(index, now=now)
            self._note_news()
        if held == (peer, generation):
            self._plans.of(peer, generation).assigned |= {index}
        elif held[0] != peer:
            self._plans.move(peer, generation, index, held[0])

    def _hear(self, peer: PeerId, report: MemberState, now: float) -> None:
        """Enter what a member holds; evict what cannot be; hear who holds a sum (rules 10, 11, 14)."""
        # Of a decided step a report changes nothing any more.
        if self.commit is not None:
            return
        # It cannot receive what it is assigned, or it is about to end. What it reports in touch again is used.
        if peer not in self.members and not self.view.in_touch(peer, now=now):
            return
        follower = self._follower(peer)
        last, follower.knows, follower.awaits = follower.state, report.round, frozenset(report.awaits)
        self.looks |= report.trouble is not None  # members that are held up wait for a decision
        if not report.whole:
            # It refers to a report that I never had: I have just begun to lead, or that one was lost.
            if last is None or (last.generation, last.revision) != (report.generation, report.revision):
                self._ask(peer, now)
            elif self.members.get(peer) == report.generation and peer not in self.passed_over:
                self._hear_work(peer, report, follower.remaining, now)
            else:
                self._enter(peer, replace(last, progress=report.progress, trouble=report.trouble), now)
            return
        if last is not None and last.generation == report.generation and report.revision < last.revision:
            return  # overtaken by a newer one
        if report.line is None:
            if last is None:
                self._ask(peer, now)
                return
            report = replace(report, line=last.line)
        follower.state = report
        self._enter(peer, report, now)

    def _hear_work(self, peer: PeerId, report: MemberState, left: int, now: float) -> None:
        """left: how many indexes the member owns and has not accumulated."""
        self._follower(peer).remaining = left
        self._work.hear(peer, report.progress, left, now=now)
        self._rounds.suspects.hear(peer, report.trouble, left, now=now)

    def _ask(self, peer: PeerId, now: float) -> None:
        """Have a member say again what it holds; once for all of its reports under way."""
        if now - self._follower(peer).asked_at >= self.view.timers.ask_s:
            self._follower(peer).asked_at = now
            self._plans.of(peer).whole = True

    def _enter(self, peer: PeerId, report: MemberState, now: float) -> None:
        """Enter a whole report."""
        owner = (peer, report.generation)
        if peer in self._left_out:
            if owner in self.ledger.closed:
                self._plans.discard(peer, report.generation)
            return
        known = self.members.get(peer)
        # The member has a new accumulator: what its last one counted is gone.
        if known is not None and known != report.generation:
            if known.incarnation == report.generation.incarnation and known > report.generation:
                return  # overtaken by a newer report
            # It is of a life that has ended: the present one goes on.
            if owner in self.ledger.closed:
                self._plans.of(peer, report.generation).evicted = "closed"
                return
            self._evict(peer, known)
            crosses = self.ledger.overlaps(peer, report.owned)  # counted below
            # Identities cost nothing: a member that has contributed nothing could do so with each of them.
            most = _OFFENCES if self._contributes(peer) else 1
            # What is passed over is told to discard what it holds.
            ordered = crosses or peer in self.passed_over
            if not ordered and self._offends(peer, "begins its accumulator again and again", now, most=most):
                return
        if owner in self.ledger.closed and report.ack is None:
            self._plans.of(peer, report.generation).evicted = "closed"
            return
        if peer in self.passed_over:
            self._hear_sum(peer, report, now)
            if report.owned:
                self._plans.discard(peer, report.generation)
            return
        self._hear_work(peer, report, len(report.owned - report.summed), now)
        self._rounds.builder.measured(peer, report.line or UNMEASURED)
        self.looks |= self._non_finite.hear(peer, report)
        self._hear_sum(peer, report, now)
        overlaps = self.ledger.overlaps(peer, report.owned)
        # Above a certificate the assignments do not matter any more, only which replicas hold the aggregate.
        if overlaps and not self._sure(now):
            # Two accumulators have counted one index, and no sum can be split: the reporter's is discarded (rule 10).
            is_news = owner not in self.ledger.closed  # once for all reports under way
            self._evict(peer, report.generation)
            self._plans.discard(peer, report.generation)
            if is_news:
                self._offends(peer, "reports what others own", now)
            return
        if owner not in self.ledger.closed and not overlaps:
            self.ledger.enter(owner, report.owned)
        if self.members.get(peer) != report.generation:
            self.members[peer] = report.generation
            self._waits.missing.discard(peer)
            self.looks |= not self._waits.missing
        self._note_news()

    def _offends(self, peer: PeerId, reason: str, now: float, *, most: int = _OFFENCES) -> bool:
        """A member makes the leader restart the step. Is that once too often?"""
        follower = self._follower(peer)
        follower.offences += 1
        if follower.offences >= most:
            self._leave_out(peer, reason, now)
        return peer in self._left_out

    def _note_news(self) -> None:
        """Check all members soon if this may be what the step waits for; mostly the next tick is early enough."""
        acked = bool(self.acks) and self.members.keys() - self._newcomers() <= self.acks.keys()
        assigns = self.ledger.complete or bool(self.ledger.freed)
        self.looks |= acked or (assigns and self.round is None and not self._waits.missing)

    def due(self, now: float) -> bool:
        """All messages of this turn are in: should the leader check all members? In a large stage not always."""
        many = len(self.members) if len(self.members) > _MANY else 0
        return self.looks and now - self._looked_at >= many * _LOOK_S

    def _release(self, peer: PeerId, state: MemberState, now: float) -> None:
        """A member does not hold what the round says it does: free that, open the round again (rule 10)."""
        # A holder of the aggregate has what this member denies having given: if I hold it, or two others do, it lied.
        whole = {holder for holder, held in self.acks.items() if held.id == self.current_id} - {peer}
        if self._sure(now) or self.view.me in whole or len(whole) > 1:
            return
        # The round names a contribution that no member holds: it cannot be summed.
        if self.ledger.release((peer, state.generation), state.returns):
            if (attempt := self._rounds.attempt) is not None:
                self._rounds.gave_back.setdefault(peer, attempt.opened_at)
            self._rounds.attempt, self.looks = None, True
            self._work.flow(now=now)
            self._member.host.log("released", peer=peer, indexes=sorted(state.returns))

    # ------------------------------------------------------------ time

    def become_oldest(self, *, now: float) -> None:
        """The step before was applied: from now on rounds are opened, and idle indexes ordered."""
        self.oldest, self._waits.behind_at = True, now
        self._work.flow(now=now)

    def advance(self, *, now: float, resend: bool) -> None:
        """Do what the state asks for; `resend` repeats earlier messages (every tick, level-triggered)."""
        self._look(now, resend)
        self._plans.send()

    def _look(self, now: float, resend: bool) -> None:
        self._waits.complete, self.looks, self._looked_at = False, False, now
        self._at_step.look(now)
        self.passed_over = self._pass_over(now)
        self._evict_lost(now)
        self._prepare(resend, now)
        if self.commit is not None:
            if resend:
                self.publish(self.commit)
            return
        if resend and (waits := self.waits()):
            for peer in self.members.keys() - {self.view.me}:
                self._plans.of(peer).awaits = tuple(waits)[:MAX_LATE]
        self._settle_dispute(now)
        phase = self.phase(now)
        for of, duty in DUTIES:
            if of == phase:
                duty(self, now)
                phase = self.phase(now)
        if phase not in ("hearing", "committed"):
            self._say_round(resend, now)

    def phase(self, now: float) -> Phase:
        """Where the term stands."""
        if self.commit is not None:
            return "committed"
        if not self._everybody_reported(now):
            return "hearing"
        if self.oldest and self._sure(now):
            return "certified"
        return "aggregating" if self.round is not None else "assigning"

    def _assign_free(self, now: float) -> None:
        """Answer the members that wanted an index before all had reported; have free indexes executed."""
        early, self._waits.early = self._waits.early, {}
        for (peer, index), generation in early.items():
            self._assign(peer, generation, index, now)
        if not self.oldest:
            return
        self._non_finite.discard(self.ledger, self._voting_members())
        if self._non_finite.halted:
            return
        self._evict_laggards(now)
        if not self.ledger.complete:
            self._observe_idle(now)
            self._order_idle(now)
        elif not self._at_step.behind(self.members) and not self._may_be_certified(now):
            self._open_round(now)

    def _order_idle(self, now: float) -> None:
        """Have members execute what has no assignee."""
        for peer, index in self._work.give(self.ledger, sorted(self.members), self._non_finite.found_by, now=now):
            self._plans.of(peer).execute |= {index}
            self._member.host.log("ordered", index=index, peer=peer, step=self.stamp.step)

    @property
    def current_id(self) -> RoundId | None:
        """The open round."""
        return self.round.id if self.round else None

    def waits(self) -> dict[PeerId, str]:
        """The replicas that the step waits for, and why; whom an open round waits for its members say."""
        if self.commit is not None:
            return {}
        if self.acks:
            left = self.members.keys() - self.acks.keys() - self._newcomers()
            return dict.fromkeys(sorted(left), "has not got the sum")
        silent = sorted({*self._waited_for()} - self.members.keys() - self._left_out)
        behind = self._at_step.behind(self.members)
        return {**dict.fromkeys(silent, "does not report"), **dict.fromkeys(behind, "is behind")}

    def late(self) -> Set[PeerId]:
        """The replicas that the step waits for by their own doing: no laggards, and none that others keep waiting."""
        waits = self.waits().keys() - self._at_step.behind(self.members)
        return {peer for peer in waits if not (self.acks and self._kept_by(peer))}

    # ------------------------------------------------------------ inside

    def _everybody_reported(self, now: float) -> bool:
        """Rule 14: the leader assigns and opens nothing before all replicas that are waited for have reported.

        A new replica is first seen by a heartbeat, after which the leader advances: until then the last answer holds.
        """
        if not self._waits.complete:
            self._waits.missing = {self.view.me, *self._waited_for()} - self._left_out - self.members.keys()
            self._waits.complete = not self._waits.missing
            if self._waits.complete:
                self._waits.all_reported(self.members, now=now)
        return self._waits.complete

    def _waited_for(self) -> list[PeerId]:
        """Live replicas with a report that is here, or that is waited for: of all that are not new or passed over."""
        return [
            peer
            for peer in self._at_step.live
            if peer in self.members or not (peer in self.passed_over or self._member.membership.is_new(peer))
        ]

    def _pass_over(self, now: float) -> frozenset[PeerId]:
        """The replicas that the step continues without. Only the worst, if too few would be left."""
        stage, membership = self.stamp.stage, self._member.membership
        found = [*sorted(self.view.cut_off(stage, now=now)), *membership.excluded(stage, self.stamp.step)]
        worst = [peer for peer in (*found, *self._observed(now)) if peer != self.view.me]
        live = membership.live(stage, now=now)
        out = passed_over(worst, live)
        # The last of them are needed again where this step has left others out, or they are gone: the members that are
        # left could commit nothing.
        voters, here = membership.roster(stage) or live, set(live)
        # Who has not come to the step by now may not come: a member that receives no aggregate stays behind.
        if now - self._waits.began_at > self.view.timers.suspect_s:
            here &= {self.view.me, *self._at_step.live}
        for peer in reversed(worst):
            if has_quorum(here - out - self._left_out, voters):
                break
            out -= {peer} & voters & here
        return out

    def _observed(self, now: float) -> list[PeerId]:
        """The peers that were late: first those of whom most have observed it, then those of whom I alone have."""
        return list(dict.fromkeys([*sorted(self.view.observed_late(now=now)), *self._member.lateness.late(now=now)]))

    def _observe_idle(self, now: float) -> None:
        """Work stands still: peers are late that were excluded, have come back and have contributed nothing since, or
        that have contributed before and say no state.

        Callers bring them work again, and a peer that reports none of it holds up the step by the idle timeout.
        """
        if not self._work.stagnant(now):
            return
        membership, lateness = self._member.membership, self._member.lateness
        for peer in membership.idle_since_exclusion(self.stamp.step):
            if self.view.in_touch(peer, now=now) and not self.ledger.of(peer):
                lateness.observe(peer, "takes no work that it is brought", now=now)
        # No step waits for the state of a new replica. But work that callers bring to one without a report is lost; the
        # first time its state may be on the way.
        if now - self._waits.began_at <= self.view.timers.ask_s:
            return
        away = membership.mates.peers - self.members.keys() - self._left_out - self.passed_over
        for peer in sorted(away.intersection(self._at_step.live)):
            if not self._follower(peer).charged:
                self._follower(peer).charged = True
                reason, cost_s = "reports nothing while work stands still", lateness.unproven_s(peer)
                lateness.charge(peer, reason, cost_s=cost_s, now=now)

    def _named(self, now: float) -> tuple[LatePeers, BannedPeers]:
        """The late peers that the commit is to name: of the voters fewer than half, with those excluded already, or
        without those, if most have observed it. And the banned ones, unless voters that are away or refuse to sign keep
        the stage from committing bans.

        An aggregate that members hold may have been committed by votes that I do not see: the same aggregate, made
        again, then names the same peers, or the stage would have two chains.
        """
        stage, membership = self.stamp.stage, self._member.membership
        voters, excluded = membership.roster(stage), membership.excluded(stage, self.stamp.step)
        for held in sorted(set(self.acks.values()), key=lambda each: each.id, reverse=True):
            signed = {peer for peer, ack in self.acks.items() if ack == held}
            if has_quorum(signed | (voters - self.members.keys()), voters):
                return held.late, held.bans
        if (named := membership.named_signed(self.stamp.step, self.view.me)) is not None:
            return named  # else its members refuse what they have signed under me with other names
        # A peer that was excluded and has contributed nothing since is no voter any more; neighbours bring it work.
        table = {each.peer for each in membership.exclusions}
        # A newcomer that held up this step is named, too: the next leader should not have to find that out.
        known = voters | table | self._rounds.held_up_by | membership.mates.peers
        late = [p for p in self._observed(now) if p in known and p not in (*excluded, self.view.me)]
        late.sort(key=lambda peer: peer not in voters | table)
        most, room = self.view.observed_late(now=now), minority(voters) - len(voters.intersection(excluded))
        late = [p for p in late if p in most or p not in table or self._member.lateness.may_name(p, self.view.me)]
        found = [peer for place, peer in enumerate(late) if place < room or peer in most]
        able = self.members.keys() - {ban.peer for ban in self._member.bans}
        bans = self._member.bans[:MAX_BANS] if has_quorum(able, voters) and not self.ballot.number else ()
        return tuple(sorted(found[: min(minority(voters), MAX_LATE)])), bans

    def _contributes(self, peer: PeerId) -> bool:
        """Has this member, or I, contributed lately? Of a large stage more do than have a vote. True of all while none
        is known to."""
        known = self._member.membership.voters(self.stamp.stage)
        return not known or peer in known or peer == self.view.me

    def _yields(self, owner: Owner, index: int) -> bool:
        """Has its assignee contributed nothing lately, and not accumulated it yet, by its last state?"""
        state = self._follower(owner[0]).state
        done = bool(self.acks) or (state is not None and index in state.summed)
        return not done and not self._contributes(owner[0])

    def _voting_members(self) -> Set[PeerId]:
        """The members that decide what is left out: voters, or all while there are none; identities cost nothing."""
        return self.members.keys() & self._member.membership.roster(self.stamp.stage) or self.members.keys()

    def _patience_s(self, peer: PeerId) -> float:
        """How long the step waits for a member in touch that does not do its part."""
        mates, pace = self._member.membership.mates, self._member.pace
        if peer not in mates.peers or peer == self.view.me or mates.keeps_vote(peer):
            return pace.patience_s
        grace_s = mates.patience_s(peer, usual_s=pace.usual_s or 0.0, least_s=self.view.timers.settle_s)
        return min(pace.patience_s, grace_s)

    def _silence_s(self, peer: PeerId) -> float:
        """How long a member may be silent, or hold up a round."""
        return min(self.view.timers.suspect_s, self._patience_s(peer))

    def _leave_silent(self, now: float) -> None:
        """Rule 14: leave out replicas that are in touch and do not report.

        The leader waits for a long silence; if most others have reported, for several usual steps. Only time in which
        it is in touch counts: a replica that was partitioned is not late for that.
        """
        awaited, timers = self._waited_for(), self.view.timers
        missing = [peer for peer in awaited if peer not in self.members and peer not in self._left_out]
        states = self._waits.states
        states.note([peer for peer in missing if self.view.in_touch(peer, now=now)], now=now)
        roster = self._member.membership.roster(self.stamp.stage)
        most = has_quorum(self.members.keys(), roster & {self.view.me, *awaited} or {self.view.me, *awaited})
        for peer in missing:
            patience_s = min(timers.long_silence_s, self._patience_s(peer)) if most else timers.long_silence_s
            if states.seconds.get(peer, 0.0) > patience_s:
                self._waits.complete = False
                self._leave_out(peer, "does not report", now)

    def _leave_out(self, peer: PeerId, reason: str, now: float) -> None:
        """Go on without this replica in this step: it is late."""
        self._go_without(peer, reason)
        self._member.lateness.observe(peer, reason, now=now)

    def _go_without(self, peer: PeerId, reason: str) -> None:
        self._left_out.add(peer)
        if (generation := self.members.get(peer)) is not None:
            self._plans.discard(peer, generation)
            self._evict(peer, generation)
        self._log_evicted(peer, reason)

    def _may_be_certified(self, now: float) -> bool:
        """Have I just begun to lead, holding an aggregate? Others may hold it too, and their reports are on the way."""
        return self.view.me in self.acks and now - self._waits.began_at <= self.view.timers.suspect_s

    def _evict(self, peer: PeerId, generation: Generation) -> None:
        took_part = peer in self.members
        self.ledger.evict((peer, generation))
        self.members.pop(peer, None)
        self._waits.complete, self.looks = False, True
        self.acks.pop(peer, None)
        self._follower(peer).given = None
        self._work.forget(peer)
        self._rounds.suspects.forget(peer)
        if not took_part:
            return
        if not self.acks:
            self._rounds.attempt = None  # below a certificate nothing is lost by that (rule 16)
        elif (attempt := self._rounds.attempt) is not None:
            attempt.is_spoilt = True  # others may hold the whole sum by now, and who has signed it joins no other yet
            attempt.told_at.pop(peer, None)

    def _evict_lost(self, now: float) -> None:
        blocked = self._work.blocked(self._member.shape.num_stages, now=now)
        left = {peer for peer in self.members if self._work.at_work.get(peer) and not blocked}
        last = self.ledger.complete and not blocks(left, self._voting_members())
        self._waits.for_last(left if last else set(), now=now)
        out = self.members.keys() - {self.view.me, *self._at_step.live}
        for peer, generation in list(self.members.items()):
            if peer == self.view.me:
                continue
            seen, said_at = self.view.get(peer), self._follower(peer).echoed_at
            # Rule 12: a process that was started again has lost its accumulator, and may be long without a state.
            restarted = seen is not None and seen.incarnation != generation.incarnation and seen.since > said_at
            # Whether the voters in touch are a quorum is no question of one that may lose its vote.
            silence_s = math.inf if self._member.membership.mates.keeps_vote(peer) else self._silence_s(peer)
            silent = seen is not None and now - seen.heard_at > silence_s
            if peer in self._at_step.given_up or restarted or silent or (peer in out and seen is None):
                reason = "dead" if seen is None or restarted or self.view.refused(peer) else "silent"
            elif self._stalled(peer, now):
                reason = "stalled"
                last = self._waits.last_since.pop(peer, None) is not None
                self._member.lateness.observe(peer, "does not finish what it owns", pardon=last, now=now)
                # It would be assigned something again, and the step would wait once more.
                if len(self._left_out) < minority(self._voting_members()):
                    self._left_out.add(peer)
            else:
                continue
            self._evict(peer, generation)
            self._log_evicted(peer, reason)

    def _newcomers(self) -> frozenset[PeerId]:
        """New members: whatever they report, the step does not wait for them."""
        return frozenset(peer for peer in self.members if peer != self.view.me and self._member.membership.is_new(peer))

    def _evict_laggards(self, now: float) -> None:
        """Go on without a laggard that has given up its sums for newer state, or stays where it is for very long."""
        laggards = self._at_step.behind(self.members)
        if not laggards:
            self._waits.behind_at = now
            return
        late = now - self._waits.behind_at > self.view.timers.long_silence_s
        for peer in laggards:
            seen, generation = self.view.get(peer), self.members[peer]
            if late or seen is None or not seen.synced:
                self._evict(peer, generation)
                self._log_evicted(peer, "behind")
            if late:
                self._left_out.add(peer)  # it reports again and would own its indexes again: it may fetch the sum
                self._plans.discard(peer, generation)

    def _settle_dispute(self, now: float) -> None:
        """Rule 12: leave out the member that holds up the round by the word of the others, or cut the round again."""
        alive = {self.view.me, *(peer for peer, _ in self.view.mates() if not self.view.refused(peer))}
        self._left_out = self._left_out & alive if self.members else set()  # never leave out all that are left
        if (attempt := self._rounds.attempt) is None:
            return
        if not self._broken_ends() <= attempt.apart and not self.acks and not self._rounds.cut_for_links:
            self._rounds.cut_for_links = True  # once a step: what a member says of its lines costs it nothing
            self._cut_again()
            return
        circles = self._rounds.builder.circles(attempt.round, self.members)
        match self._rounds.suspects.decide(circles, step=self.stamp.step, now=now):
            case Leave(peer, reason, others) if len(self.members) > 1:
                self._bring_back(peer, now)
                self._go_without(peer, reason)
                self._observe_end(peer, others, f"holds up the round ({reason})", now)
                self._rounds.held_up_by = {peer}
            case CutAgain(refused):
                # Else who refuses what another one sends in each step costs each step a cut, and nothing itself.
                for peer, other in refused:
                    if self._member.lines.refused(peer, other, step=self.stamp.step):
                        self._member.lateness.observe(peer, "refuses what one after the other sends", now=now)
                self._rounds.builder.turn()
                self._cut_again()

    def _bring_back(self, culprit: PeerId, now: float) -> None:
        """Where the members left are no quorum without them, hear again who was left out for its line to this one."""
        roster = self._member.membership.roster(self.stamp.stage)
        if has_quorum(self.members.keys() - {culprit}, roster):
            return
        ends = self._member.lines.broken_with(culprit, step=self.stamp.step)
        self._left_out -= {peer for peer in ends if not self._member.lateness.is_late(peer, now=now)}

    def _cut_again(self) -> None:
        self._rounds.attempt = None
        self._member.host.log("cut_again", step=self.stamp.step)

    def _broken_ends(self) -> frozenset[PeerId]:
        """Members that are out of touch with each other: they should reduce nothing."""
        voters = self.view.voters or self.members.keys()
        said = {peer: seen.unreached.keys() for peer, seen in self.view.mates() if seen.unreached and peer in voters}
        said[self.view.me] = self.view.out_of_touch.keys()
        # A member that names many is not believed, and strangers can be many.
        members = self.members.keys()
        within = {peer: sorted(unreached & members) for peer, unreached in said.items()}
        return self._member.lines.apart(self.members, within, step=self.stamp.step)

    def _leave_late(self, now: float) -> None:
        """There is a certificate: leave out members without the sum once they are late; they may fetch it later."""
        attempt, late = self._rounds.attempt, sorted(self.members.keys() - self.acks.keys())
        if attempt is not None:
            whole_at = attempt.certified_at = attempt.certified_at or now
            took_s = _LATE * (whole_at - attempt.opened_at)
            if not attempt.is_spoilt:
                late = [peer for peer in late if now - whole_at > max(self._silence_s(peer), took_s)]
        self._left_out.update(late)
        self.members = {peer: generation for peer, generation in self.members.items() if peer not in late}
        if attempt is None:
            return
        for peer in late:
            if not attempt.is_spoilt and peer != self.view.me:
                self._observe_end(peer, self._kept_by(peer), "does not end up with the aggregate", now)
            self._log_evicted(peer, "late")

    def _observe_end(self, peer: PeerId, others: frozenset[PeerId], reason: str, now: float) -> None:
        """This member is late, or one of those that it alone waits for. others: () if it is not alone in that.

        The link between the two may be broken, which is neither's fault the first time.
        """
        culprit = self._member.lines.broken(peer, others, step=self.stamp.step) if others else peer
        if culprit is not None:
            self._member.lateness.observe(culprit, reason, now=now)

    def _kept_by(self, peer: PeerId) -> frozenset[PeerId]:
        """The holders of the aggregate with streams that this member waits for: the link may be at fault."""
        found, attempt = self._follower(peer).awaits & self.acks.keys(), self.round
        if attempt is None or attempt.rows or not attempt.bandwidths:
            return found
        # Two that reduce nothing are kept apart already: nothing flows between them.
        cut = dict(zip(attempt.receivers, shares(attempt.bandwidths), strict=True))
        return frozenset(other for other in found if cut.get(peer) or cut.get(other))

    def _log_evicted(self, peer: PeerId, reason: str) -> None:
        self._member.host.log("evicted", peer=peer, reason=reason, step=self.stamp.step)

    def _stalled(self, peer: PeerId, now: float) -> bool:
        """Heartbeats but no compute for very long, or much longer at it than all others.

        In an open round too, which waits until all have accumulated theirs.
        """
        patience_s = self._patience_s(peer)
        if now - self._waits.last_since.get(peer, now) > patience_s and not self._sure(now):
            return True
        waited = peer not in self.acks and bool(self.ledger.of(peer))
        return waited and self._work.still_s(peer, now=now) > max(patience_s, self.view.timers.long_silence_s)

    def _hear_sum(self, peer: PeerId, report: MemberState, now: float) -> None:
        """A member holds a sum, of this round or of one before, and has signed so."""
        ack, step = report.ack, (self.stamp.stage, self.stamp.step, self.stamp.chain)
        of_step = ack is not None and (ack.stage, ack.step, ack.chain) == step
        if ack is None or not (of_step and self._member.membership.hear_vote(ack, peer, report.vote, now=now)):
            self.acks.pop(peer, None)
            # The attempt has lost a member, and then the last replica that held its sum: nothing comes of it.
            if not self.acks and (attempt := self._rounds.attempt) is not None and attempt.is_spoilt:
                self._rounds.attempt, self.looks = None, True
        elif self.acks.get(peer) != ack:
            self._rounds.held_at, self.acks[peer] = now, ack
            # Its vote may be the one that makes the certificate.
            roster = self._member.membership.roster(self.stamp.stage)
            self.looks |= not roster or peer in roster

    def _give_up_sums(self, now: float) -> None:
        """Drop the round if its signed sums can make no certificate: a signer is gone, or the bits differ.

        For very long none has come of them: who was left out may have signed another sum, and is needed again.
        """
        # A member that has signed an aggregate joins no other round for `suspect_s`. Another attempt waits until it has
        # joined this one: given up in the same moment, two replicas would follow each other from round to round.
        if not self.acks or now - self._rounds.held_at <= self.view.timers.suspect_s + self.view.timers.beat_s:
            return
        whole = self.round is not None and self.members.keys() <= self.acks.keys()
        if self._left_out and now - self._rounds.held_at > self.view.timers.lease_s:
            self._left_out, self._rounds.held_at = set(), now
            self._cut_again()
            return
        # All hold a sum of one round and not the same bits: a reducer told two of them different things.
        differing = whole and len(set(self.acks.values())) > 1
        if differing:
            self._member.host.log("digest_differs", peers=sorted(self.acks), round=str(self.current_id))
        if differing or (self._rounds.attempt is not None and self._rounds.attempt.is_spoilt):
            self._rounds.attempt = None

    def _certificate(self, now: float) -> Commit | None:
        """The commit that the votes certify, or None. Members that no longer hold the sum have no vote."""
        holders: dict[Commit, set[PeerId]] = {}
        for peer, held in self.acks.items():
            holders.setdefault(held, set()).add(peer)
        found = [
            commit
            for commit, by in holders.items()
            if self._member.membership.certified(commit, without=self.members.keys() - by, now=now)
        ]
        return max(found, key=lambda commit: (commit.id == self.current_id, commit.id, commit.digest), default=None)

    def _sure(self, now: float) -> bool:
        """Is there a certificate? Above it no round is given up."""
        return self.commit is not None or (bool(self.acks) and self._certificate(now) is not None)

    def _prepare(self, resend: bool, now: float) -> None:
        """Announce the term to members, and to replicas left out or out of touch as well: one that never receives the
        leader's messages would run for leader itself."""
        open_here = {self.view.me, *self._at_step.running}
        due = open_here if resend else {peer for peer in open_here if self._follower(peer).given is None}
        successors = self._successors(now) if due else []
        # What lives says itself what it owns, and an open round names all: neither is a reason for a plan.
        mine = self.ledger.freed | self.ledger.of(self.view.me) if successors and self.round is None else NONE
        for peer in sorted(due):
            follower = self._follower(peer)
            told = follower.given
            lacks = peer in successors and not mine <= (told or NONE) | self.ledger.of(peer)
            # A state of this term proves the announcement arrived. In a large stage not all get my heartbeats.
            echoed = now - follower.echoed_at <= self.view.timers.settle_s
            if told is None or lacks or not echoed or self.view.stage in self.view.sparse:
                given = self.ledger.given() - self.ledger.of(peer) if peer in successors else NONE
                follower.given = self._plans.of(peer).given = given

    def _successors(self, now: float) -> list[PeerId]:
        """I, and those that would lead next: one of them has a use for what I have assigned."""
        others = [peer for peer in self._order(now) if peer != self.view.me]
        return [self.view.me, *others[:_SUCCESSORS]]

    def _open_round(self, now: float) -> None:
        gave_back, self._rounds.gave_back = self._rounds.gave_back, {}
        for peer, since in gave_back.items():
            if peer != self.view.me:
                cost_s = max(now - since, self.view.timers.settle_s)
                self._member.lateness.charge(peer, "gives back what it was granted", cost_s=cost_s, now=now)
        apart = self._rounds.builder.spared(self.members, self._broken_ends(), self._newcomers())
        opened = self._rounds.open(self.members, self.ledger, apart, self._named(now), now=now)
        self._member.membership.rolls.learn(self.stamp.stage, counting(opened))
        reason = left_alone(self.view, self.stamp, self.members, now=now)
        if reason is not None:
            self._member.host.log("averaged_alone", step=self.stamp.step, reason=reason)

    def _say_round(self, resend: bool, now: float) -> None:
        if (attempt := self._rounds.attempt) is None or attempt.is_spoilt:
            return
        # A round is long: it is repeated to members with reports that do not name it once they had time to.
        before = now - self.view.timers.settle_s if resend else -math.inf
        for peer in sorted(self.members):
            held = self.acks.get(peer)
            if held is not None and held.id == attempt.round.id:
                continue
            told_at = attempt.told_at.get(peer)
            if told_at is None or (told_at <= before and self._follower(peer).knows != attempt.round.id.number):
                attempt.told_at[peer] = now
                self._plans.of(peer).attempt = attempt.round

    def _try_commit(self, now: float) -> None:
        """Publish the commit once all members hold its sum: a member that holds it need not fetch it."""
        commit = self._certificate(now)
        awaited = {*self.members, *({self.view.me} - self._left_out)} - self._newcomers()
        if commit is None or not awaited <= self.acks.keys():
            return
        self._non_finite.alone(self.ledger)
        differing = sorted(
            peer for peer, held in self.acks.items() if held.id == commit.id and held.digest != commit.digest
        )
        if differing:
            self._member.host.log("digest_differs", peers=differing, round=str(commit.id))
        self.publish(self._member.membership.with_votes(commit))

    def publish(self, commit: Commit) -> None:
        """The stage has committed: under me, under a leader before me, or without me."""
        self.commit = commit
        self._member.host.publish(Committed(self._member.membership.brief(commit), self.stamp.restart))


DUTIES: Sequence[tuple[Phase, Callable[[Leader, float], None]]] = (
    ("hearing", Leader._leave_silent),
    ("certified", Leader._leave_late),
    ("certified", Leader._try_commit),
    ("aggregating", Leader._give_up_sums),
    ("assigning", Leader._give_up_sums),
    ("assigning", Leader._assign_free),
)
"""What the leader does in each phase, in this order: what is done in one phase may begin the next."""
