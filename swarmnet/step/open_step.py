"""One open step of one replica: claims, grants, its part in rounds, the commits, and the leader if it is one. Pure.

Everything that is of one step and forgotten with it (docs/protocol.md, State). Where steps overlap a replica has
several of these (`member`): all take claims and grants, only the *oldest*, which is applied next, takes part in rounds,
collects sums and has idle indexes executed. What outlives a step is the member's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from swarmnet.ids import Ballot, PeerId, RoundId
from swarmnet.messages import NONE, Commit, Finished, Indexes, MemberState, Round, StagePlan, Stamp
from swarmnet.quorum import minority
from swarmnet.step.commits import Barrier, commit_of
from swarmnet.step.election import Election
from swarmnet.step.host import StepHost
from swarmnet.step.lateness import Delays, LeaderWaits
from swarmnet.step.leader import Leader
from swarmnet.step.ledger import ClaimBook
from swarmnet.step.lines import MOST_NAMED

if TYPE_CHECKING:
    from swarmnet.step.member import Member

# ---------------------------------------------------------------- the phases of a step in one replica

Phase = Literal["counting", "exchanging", "holding", "collecting", "committed", "applying"]
PhaseEvent = Literal["join", "leave", "complete", "commit", "lose", "apply"]

PHASES: Mapping[tuple[Phase, PhaseEvent], Phase] = {
    ("counting", "join"): "exchanging",
    ("holding", "join"): "exchanging",
    ("exchanging", "leave"): "counting",
    ("exchanging", "complete"): "holding",
    ("counting", "commit"): "collecting",
    ("exchanging", "commit"): "collecting",
    ("holding", "commit"): "collecting",
    ("collecting", "commit"): "collecting",
    ("collecting", "complete"): "committed",
    ("collecting", "lose"): "counting",
    ("committed", "apply"): "applying",
}
"""What becomes of a step in one replica. An event without a row changes nothing, and the caller learns that."""

DECIDED: frozenset[Phase] = frozenset({"collecting", "committed", "applying"})
"""The stage has committed: no index is assigned any more, and no other aggregate of the step is of use."""


# ---------------------------------------------------------------- one replica's part in rounds
#
# One replica's part in the rounds of a step: contribute, receive, collect a finished sum, or say why not.
#
# It knows what its leader asks for and what is being exchanged; it is told what the replica counts (rules 10, 14 to 16
# of docs/protocol.md). A replica that joins another round no longer reports its finished sum but keeps it aside; one
# that fetches another sum keeps its own until that one is whole. That others have finished first is no reason to give
# up an exchange: what it still lacks is on its way, and a whole sum fetched instead would be sent twice.


class RoundPart:
    """My part in rounds. phase: follows `PHASES`. finished: the complete aggregate that is here. Invariant: in
    counting and exchanging there is none; in committed and applying it is the stage's.

    exchange: the aggregate being exchanged or fetched. collecting: the holders that it is fetched from. lacking: those
    of them that have said, when they were last asked, that it is not there.
    stuck: the exchange cannot end by itself, as far as is known here. locked: I have signed a sum and join no other
    round of the step for a while, because the first may have become a certificate elsewhere. The step sets both on
    every tick. aside: (round, digest) of finished sums that I stopped offering when I joined another round; their data
    is still here.
    """

    def __init__(self, me: PeerId, host: StepHost, finished: Finished | None = None) -> None:
        self.me, self._host, self.finished = me, host, finished
        self.phase: Phase = "counting" if finished is None else "holding"
        self.round: Round | None = None
        self.exchange: RoundId | None = None
        self.collecting: frozenset[PeerId] = frozenset()
        self.lacking: frozenset[PeerId] = frozenset()
        self.aside: set[tuple[RoundId, bytes]] = set()
        self.stuck = False
        self.locked = False

    def move(self, event: PhaseEvent) -> bool:
        """Follow the table. False: it has no such row."""
        after = PHASES.get((self.phase, event))
        self.phase = after or self.phase
        return after is not None

    def decide(self, commit: Commit) -> None:
        """My stage has committed this."""
        self.move("commit")
        if self.finished is not None and commit.says(self.finished):
            self.move("complete")

    def drop(self) -> None:
        """Forget the round; what is exchanged ends."""
        self.round = None
        self.move("leave")
        if self.exchange is not None:
            self.exchange = None
            self._host.stop()

    def put_aside(self) -> None:
        """Offer what is complete no more."""
        if self.finished is not None:
            self.aside.add((self.finished.id, self.finished.digest))
            self.finished = None

    def remember(self, before: RoundPart) -> None:
        """I begin the step again: what I signed before may be its commit, and its data is still here."""
        before.put_aside()
        self.aside |= before.aside

    def hear(self, message: Round) -> None:
        """The leader opened this round. An exchange of another round ends: its index sets may no longer be true."""
        if self.exchange != message.id:
            self.drop()
        self.round = message

    def join(self, claims: ClaimBook) -> Indexes | None:
        """Take part in the current round. Returns the indexes that it names and that are not here: I give them back.

        Empty: it gives to others what I hold, so the leader must hear of that first. None: there is nothing to say.
        """
        current = self.round
        if current is None or (self.phase, "join") not in PHASES:
            return None
        if self.finished is not None and (self.locked or self.finished.id == current.id):
            return None
        named = {peer: (generation, indexes) for peer, generation, indexes in current.contributions}
        generation, mine = named.get(self.me, (claims.generation, NONE))
        if generation != claims.generation:
            return None  # I have left it: the leader learns that from my report
        if missing := mine - claims.assigned:
            return missing
        # I contribute exactly what it names.
        if not (claims.accumulated == claims.assigned == mine):
            return None if mine else NONE
        self._start(current.id)
        self.move("join")
        self.put_aside()  # the next aggregate takes the buffer
        self._host.aggregate(current)
        return None

    def collect(self, wanted: Round, digest: bytes, holders: Iterable[PeerId]) -> None:
        """Fetch the sum of `wanted` with that digest from one of these, unless one of them is being asked already.

        A running exchange of that round goes on as long as it can end. It starts again, with the present holders, if it
        is stuck (a contribution may be discarded, or a reducer gone) or if all whom it was collected from are gone.
        """
        found = sorted(holders)
        # No other replica is known to hold it: perhaps I have it aside myself.
        if not found and ((wanted.id, digest) not in self.aside or self.exchange == wanted.id):
            return
        # The exchange of that round goes on, or one of the holders is being asked.
        if self.exchange == wanted.id and (self.collecting & set(found) or not (self.collecting or self.stuck)):
            return
        # Each begins with another one, or all who lack it would share one line.
        first = sorted({*wanted.receivers, *found, self.me}).index(self.me) % max(len(found), 1)
        self._start(wanted.id, frozenset(found))
        self._host.fetch(Round(wanted.stamp, wanted.id, (), (), (*found[first:], *found[:first])), digest)

    def _start(self, round_id: RoundId, holders: frozenset[PeerId] = frozenset()) -> None:
        if self.exchange is not None:
            self._host.stop()
        self.exchange, self.stuck, self.collecting = round_id, False, holders


# ---------------------------------------------------------------- the machine of one step

StepMessage = StagePlan | MemberState
"""What is about one step, and goes to the machine of that step."""


class OpenStep:
    """The machine of one step, known by its stamp. finished: the step's sum, if it came with the state."""

    def __init__(
        self, stamp: Stamp, member: Member, *, oldest: bool, now: float, finished: Finished | None = None
    ) -> None:
        self.stamp, self.oldest = stamp, oldest
        self._member, self._host = member, member.host
        self.claims = ClaimBook(member.generations)
        self.election = Election(member, step=stamp.step, now=now)
        self.leader: Leader | None = None
        self.part = RoundPart(member.me, member.host, finished)
        self.barrier = Barrier(stamp.step, member.shape.num_stages)
        self.progress = 0
        self._vote = b""
        self._signed_at = -math.inf
        self._unheld_since = math.inf  # since when no live replica is known to hold the committed aggregate
        self._refused: set[PeerId] = set()  # peers that this replica did not vote for
        self._told_mine: set[PeerId] = set()  # peers that named an earlier ballot of this one
        self._led = LeaderWaits(None, now)
        # When my leader last said whom it waits for, and whom.
        self._said: tuple[float, tuple[PeerId, ...]] = (-math.inf, ())
        self._out = False  # the others have begun again without me
        self._fed = False  # has work of this step come here?
        self._revision = 0
        self._reported: MemberState | None = None  # the last whole report to the promised leader
        self._asked = False  # does the leader lack it?
        self._looked_at, self._looked_of = -math.inf, (-1, -1)  # when I last looked around, and what was known then
        self._delays = Delays(member.view.timers, now)
        if finished is not None:
            self._sign(finished, now)

    @property
    def promised(self) -> Ballot | None:
        """The ballot that this replica follows: it reports to its leader."""
        return self.election.promised

    @property
    def finished(self) -> Finished | None:
        """The finished sum of this step, if it is here (R)."""
        return self.part.finished

    @property
    def phase(self) -> Phase:
        """Where this replica stands in the step."""
        return self.part.phase

    @property
    def applying(self) -> bool:
        """Is the optimizer step under way?"""
        return self.phase == "applying"

    # ------------------------------------------------------------ events from my own replica

    def become_oldest(self, *, now: float) -> None:
        """The step before was applied: this one is next."""
        self.oldest = True
        if self.leader is not None:
            self.leader.become_oldest(now=now)
        self._join_round()

    def claim(self, index: int, *, now: float) -> None:
        """Work on `index` has begun: ask to count it (rule 3)."""
        if not self.claims.move("begin", index):
            self._host.contribute(self.stamp.step, index)  # it was assigned to work that was dropped since
            return
        self._member.pace.claimed(now=now)
        self._fed = True
        self._say(wants=frozenset({index}))

    def withdraw(self, index: int) -> None:
        """The work was dropped. An assignment that still comes is ignored; the leader is told, now or later."""
        assigned = self.claims.assigned
        if self.claims.move("drop", index) and index in assigned:
            self._say(returns=frozenset({index}))

    def add(self, index: int) -> None:
        """The weight gradient of `index` is in the accumulator, which has not been discarded since."""
        if self.claims.move("accumulate", index):
            self._join_round()
        else:
            self._end_accumulator("discarded_myself")  # it was not assigned, and nothing can be taken out of a sum (I3)

    def found_non_finite(self, index: int) -> None:
        """`index` gave a non-finite value here."""
        self.withdraw(index)
        self.claims.non_finite.add(index)
        self.report()

    def sum_lost(self) -> None:
        """The accumulator's content is lost, and all work in flight. A finished sum is elsewhere, and stays."""
        if not self.applying:
            self._end_accumulator("sum_lost")

    def sum_whole(self, finished: Finished, *, now: float) -> None:
        """The exchange of a round, or the collection of a finished sum, is complete and digest-checked."""
        part, commit, decided = self.part, self.barrier.of(self.stamp.stage), self._own_commit
        wanted, part.exchange = decided.id if decided is not None else part.exchange, None
        # It is of a round that was given up meanwhile, or has other bits than my stage has committed.
        refused = finished.id != wanted or (commit is not None and not commit.says(finished))
        if refused or not part.move("complete"):
            part.move("leave")
            self._join_round()
            return
        self._sign(finished, now)
        if commit is not None:
            part.decide(commit)
        self.report()
        self.advance(now)

    def _sign(self, finished: Finished, now: float) -> None:
        """I hold this sum, and say so under my name."""
        commit = commit_of(self.stamp, finished, self._member.table)
        self.part.finished, self.part.locked, self._signed_at = finished, True, now
        self._vote = self._member.membership.sign(commit)
        self._member.membership.hear_vote(commit, self._member.me, self._vote, now=now)

    def _lock_again(self, now: float) -> None:
        """A new leader must hear which sum I signed before I join another round, however long ago I signed."""
        if self.finished is not None:
            self.part.locked, self._signed_at = True, now

    def sum_failed(self, round_id: RoundId, lacking: Iterable[PeerId] = ()) -> None:
        """The exchange gave up; the next Round message (or tick) starts it again. lacking: who said so of itself."""
        if self.part.exchange == round_id:
            self.part.exchange, self.part.lacking = None, frozenset(lacking)
            self.part.move("leave")

    # ------------------------------------------------------------ events from others

    def receive(self, peer: PeerId, message: StepMessage, *, now: float) -> None:
        """A message under this step's stamp from a replica of my stage."""
        if isinstance(message, MemberState):
            self._to_leader(peer, message, now)
        else:
            self._on_plan(peer, message, now)

    def inherit(self, commits: tuple[Commit, ...]) -> None:
        """Take over the commits that came with the state: its source accepted them."""
        for commit in commits:
            if commit.stage != self.stamp.stage or commit.chain == self.stamp.chain:
                self.barrier.add(commit)
        if (mine := self.barrier.of(self.stamp.stage)) is not None:
            self.part.decide(mine)

    def add_commit(self, commit: Commit, *, now: float) -> None:
        """Record this commit if its votes, or the word of most others, make it credible (`step.membership`)."""
        if self.applying or not self._learn(commit, now):
            return
        # Of most other stages' commits nothing follows but that one fewer is missing: a tick is early enough.
        if commit.stage == self.stamp.stage or self.barrier.complete or len(self.barrier.known) == 1:
            self.advance(now)

    def _learn(self, commit: Commit, now: float) -> bool:
        """Record this commit if it is credible. Returns True if it is news."""
        mine = commit.stage == self.stamp.stage
        if mine and commit.chain != self.stamp.chain:
            return False
        known = self.barrier.of(commit.stage)
        # Of two commits of my stage (a fork) the one with its aggregate here stays.
        if known is not None and (self._holds(known) or not (mine and self._holds(commit))):
            return False
        if not self._member.membership.believed(commit, now=now):
            return False
        self.barrier.replace(self._member.membership.with_votes(commit))
        if not mine:
            return True
        finished = self.finished
        if finished is not None and finished.id == commit.id and not commit.says(finished):
            self.part.finished = None  # the same round, other bits than my stage's: fetch them from a holder
            self._member.membership.give_up(commit_of(self.stamp, finished, self._member.table))
        self._lose_line()
        self.part.decide(commit)
        return True

    def _look_around(self, now: float) -> None:
        """Record the commits that have become credible since."""
        membership, view = self._member.membership, self._member.view
        of = membership.changes, view.arrivals
        # Nothing but time has passed, and not much.
        if of == self._looked_of and now - self._looked_at < view.timers.ask_s:
            return
        self._looked_at, self._looked_of = now, of
        for stage in sorted(membership.open_stages(self.stamp.step)):
            # A leader has all votes first, and waits for who is nearly there.
            if self.barrier.of(stage) is None and not (stage == self.stamp.stage and self.leader is not None):
                for commit in membership.candidates(stage, self.stamp.step):
                    self._learn(commit, now)

    def _to_leader(self, peer: PeerId, message: MemberState, now: float) -> None:
        told = message.commit
        mine = told is not None and (told.stage, told.step) == (self.stamp.stage, self.stamp.step)
        if told is not None and mine and self._member.membership.hear(told, now=now) and self._learn(told, now):
            self.advance(now)
        elif self.promised is None or message.ballot > self.promised:
            # The reporter promised a higher ballot: a leader under a lower one stops (rule 13). If the ballot is an old
            # one of mine (I have begun this step again since), members wait for me, and I run with the next number.
            # Made-up ones would end my term again and again: one from each peer, in steps that I may have begun before.
            mine = message.ballot.peer == self._member.me
            if mine and (peer in self._told_mine or not self._member.begins_again(self.stamp.step)):
                return
            self._promise(message.ballot, now, told_by=peer)
            if mine and self.promised == message.ballot:
                self._told_mine.add(peer)
        elif self.leader is not None:
            self.leader.on_state(peer, message, now=now)
        elif message.ballot < self.promised:
            # It takes me for its leader, sees me alive and would wait: my report names the leader.
            self._host.send(peer, self._make_report(self.promised))

    def turn(self, *, now: float) -> None:
        """All messages of this turn are in: the leader looks at all members, if one of them asks for that."""
        if self.leader is not None and self.leader.due(now):
            self.leader.advance(now=now, resend=False)

    def _on_plan(self, peer: PeerId, plan: StagePlan, now: float) -> None:
        """What the leader wants: follow it, then end an accumulator, then do and contribute what it assigns."""
        if plan.ballot != self.promised:
            self._promise(plan.ballot, now, told_by=peer)
            if self.promised is not None and plan.ballot < self.promised:
                self._host.send(peer, self._make_report(self.promised))  # the higher ballot: the old leader stops
            if plan.ballot != self.promised:
                return
        if plan.awaits:
            self._said = now, plan.awaits
        self.election.given |= plan.given  # while I am among those that would lead next
        if plan.generation == self.claims.generation:
            if plan.evicted:
                self._out = True
                self._lose_line()
                self._end_accumulator("evicted_me", discard=plan.evicted == "discard")
            else:
                self._on_answers(plan)
        for index in sorted(plan.execute):
            self._host.execute(self.stamp.step, index)
        if plan.attempt is not None:
            self._out = self._member.me not in plan.attempt.receivers
            self.election.opened(plan.attempt, now=now)
            voters, members = self._member.membership.roster(self.stamp.stage), frozenset(plan.attempt.receivers)
            with_vote = members & voters if voters else members
            self._delays.opened(with_vote, members - with_vote, now=now)
            self.part.hear(plan.attempt)
            self._join_round()
        if plan.whole:
            self._asked = True
            self.report()

    def attempt_refusal(self, attempt: Round) -> str | None:
        """Why I sign nothing that names the late and banned peers of this attempt, or None.

        A lying leader may name correct peers as late, as only the leader sees most lateness: but fewer than half of the
        voters, so that the others are a quorum, and the same names in all attempts of a step. All members must refuse
        the same, so what one of them alone has observed decides nothing: of a ban that is decided all voters are told
        before a correct leader names it.
        """
        membership = self._member.membership
        signed = membership.named_signed(self.stamp.step, attempt.id.ballot.peer)
        if signed not in (None, (attempt.late, attempt.bans)):
            return "names other late or banned peers than an aggregate of it that I signed"
        if not membership.vouched.issuperset(attempt.bans):
            return "names a ban that is not decided"
        named = {*attempt.late}
        # I may have begun lately, and know fewer voters than the leader: not even that I am still one of them.
        contributors = {peer for peer, _, indexes in attempt.contributions if indexes}
        voters = membership.roster(self.stamp.stage) | contributors | named | {self._member.me}
        if named and len(named) > minority(voters):
            return "names too many peers as late"
        return None

    def _promise(self, ballot: Ballot, now: float, *, told_by: PeerId) -> None:
        if not self.election.promise(ballot, told_by=told_by, now=now):
            if told_by not in self._refused and (self.promised is None or ballot > self.promised):
                self._refused.add(told_by)
                self._host.log("refused_ballot", peer=told_by, ballot=ballot.number, leader=ballot.peer)
            return
        self._lock_again(now)
        self._delays = Delays(self._member.view.timers, now)  # what the last leader has caused is no member's fault
        self._led_by(ballot.peer, now)
        self.part.drop()
        if self.leader is not None and self.leader.ballot != ballot:
            self.leader = None
            self._host.log("leader_stopped", step=self.stamp.step, **{"for": ballot.peer})
        self.report()

    def _on_answers(self, plan: StagePlan) -> None:
        """What I asked for is mine, or another replica's. An answer to work that was dropped has no effect: if a round
        names the index, `returns` tells the leader."""
        for index in sorted(plan.assigned) if self.phase not in DECIDED else ():
            if self.claims.move("assign", index):
                # A leader that assigns has no open round, so mine was given up. If others finish it all the same, its
                # sum stands.
                self.part.drop()
                self._host.contribute(self.stamp.step, index)
        for index, owner in plan.moved:
            if self.claims.move("move", index):
                self._host.redirect(self.stamp.step, index, owner)

    def _end_accumulator(self, event: str, *, discard: bool = True) -> None:
        """discard: it holds what was not assigned (I3), or not what it should. Else its work is offered again."""
        # Always a new generation: an answer still under way names the old one and is ignored.
        self.claims.renew(discard=discard)
        self.part.drop()
        if discard:
            self._host.discard(self.stamp.step)
        self._host.log(event, discard=discard, step=self.stamp.step)
        self.report()

    # ------------------------------------------------------------ inside

    @property
    def _own_commit(self) -> Commit | None:
        """What my stage has committed, unless its aggregate is lost and has to be made again."""
        return self.barrier.of(self.stamp.stage) if self.phase in DECIDED else None

    def _note_holders(self, now: float) -> None:
        """Has no replica handed over the committed aggregate for so long that all its holders must be gone?

        Then the stage makes it again. Replicas of one numerics class get the same bits, which the commit names; other
        bits are not signed (`sum_whole`).
        """
        commit, part, view = self.barrier.of(self.stamp.stage), self.part, self._member.view
        if commit is None or self.phase == "committed":
            return
        holders = {peer for peer, seen in view.mates() if seen.synced and seen.version > self.stamp.step}
        if part.exchange == commit.id:
            holders |= part.collecting or frozenset(part.round.receivers if part.round is not None else ())
            holders -= part.lacking
        handed = any(view.in_touch(peer, now=now) for peer in holders - {view.me})
        self._unheld_since = math.inf if handed else min(self._unheld_since, now)
        if now - self._unheld_since <= view.timers.lease_s:
            part.decide(commit)
        elif part.move("lose"):
            part.put_aside()
            self.leader = None  # its term ended with the commit: the next one begins with what members hold
            self.election.moves(now=now)

    def _holds(self, commit: Commit) -> bool:
        """Is the sum of this commit here, bit by bit?"""
        return self.finished is not None and commit.says(self.finished)

    def _make_report(self, ballot: Ballot) -> MemberState:
        claims, member, finished, current = self.claims, self._member, self.finished, self.part.round
        return MemberState(
            stamp=self.stamp,
            ballot=ballot,
            generation=claims.generation,
            owned=claims.assigned,
            summed=claims.accumulated,
            ack=commit_of(self.stamp, finished, self._member.table, named=False) if finished is not None else None,
            commit=self._own_commit,
            progress=self.progress,
            non_finite=frozenset(claims.non_finite),
            line=member.line,
            trouble=member.trouble if self.oldest else None,
            vote=self._vote if finished is not None else b"",
            revision=self._revision,
            round=current.id.number if current is not None and current.id.ballot == ballot else -1,
            wants=claims.asked,
            awaits=self._awaits,
        )

    @property
    def _awaits(self) -> tuple[PeerId, ...]:
        """Who keeps me waiting in the open round; of many it is none of them."""
        awaited = self._member.awaited if self.part.exchange is not None else ()
        return tuple(sorted(awaited)) if len(awaited) <= MOST_NAMED else ()

    def report(self) -> None:
        """Tell the leader what is here and what was not answered (rule 9): whole if that has changed or the leader
        asks, else by its revision alone."""
        last, ballot = self._reported, self.promised
        if ballot is None or not self._member.synced:
            return
        still = last is not None and self._still(last)
        if last is not None and still and not self._asked:
            number = self.part.round.id.number if self.part.round is not None else -1
            trouble = self._member.trouble if self.oldest else None
            news = {"progress": self.progress, "trouble": trouble, "round": number, "awaits": self._awaits}
            report = last.unchanged(**news, wants=self.claims.asked)
        else:
            self._revision += not still
            report = self._reported = self._make_report(ballot)
            # A line has many numbers: those that the leader has had are left out.
            if last is not None and not self._asked and (last.ballot, last.line) == (ballot, report.line):
                report = replace(report, line=None)
        self._asked = False
        self._host.send(ballot.peer, report)

    def _say(self, *, wants: Indexes = NONE, returns: Indexes = NONE) -> None:
        """Tell the leader one thing, without what has changed besides: the next heartbeat tells that."""
        last, ballot = self._reported, self.promised
        # Else the state that is due first says it.
        if last is not None and (last.ballot, last.generation) == (ballot, self.claims.generation):
            self._host.send(last.ballot.peer, last.unchanged(revision=0, wants=wants, returns=returns))

    def _still(self, last: MemberState) -> bool:
        """Does that report still say what I hold? A line that is measured again is no news."""
        finished, claims = self.finished, self.claims
        mine = (finished.id, finished.digest, self._vote) if finished is not None else None
        told = (last.ack.id, last.ack.digest, last.vote) if last.ack is not None else None
        return (
            (last.ballot, last.generation, last.commit) == (self.promised, claims.generation, self._own_commit)
            and (last.owned, last.summed, told) == (claims.assigned, claims.accumulated, mine)
            and last.non_finite == claims.non_finite
            and (last.line is None or last.line.relayed == self._member.line.relayed)
        )

    def _join_round(self) -> None:
        missing = self.part.join(self.claims) if self.oldest else None
        if missing:
            self._say(returns=missing)
        elif missing is not None:
            self.report()

    def advance(self, now: float, *, resend: bool = False) -> None:
        """Do whatever the state asks for: lead, take part, collect, apply. `resend`: say it again (every tick)."""
        member = self._member
        if not member.synced or self.applying or member.over(self.stamp.step):
            return
        if resend and self.oldest:
            self._note_holders(now)
        if not self.oldest or self.phase in DECIDED or not self._is_fed(now):
            self.election.moves(now=now)
        ballot = self.election.due(leading=self.leader is not None, now=now)
        if ballot is not None:
            self._lead_under(ballot, now)
        self._look_around(now)
        if self.leader is not None:
            if self._own_commit is not None and self.leader.commit is None:
                self.leader.publish(self._own_commit)
            self.leader.advance(now=now, resend=resend)
            if self.leader.commit is not None and self._own_commit is None:
                self._learn(self.leader.commit, now)
        self._note_delays(now, resend)
        if resend:
            self.part.stuck = member.stuck(now=now)
            self.part.locked = now - self._signed_at <= member.view.timers.suspect_s
            self._join_round()
        # Rounds, sums and the optimizer step are of the oldest open step alone.
        commit = self._own_commit
        if not self.oldest or commit is None:
            return
        if self.phase == "collecting":
            self._collect(commit)
        elif self.barrier.complete:
            self._apply()

    def _is_fed(self, now: float) -> bool:
        """Is the step under way? Work came to me or to a replica that does not lead, or another stage has committed."""
        view, leader = self._member.view, self.promised.peer if self.promised is not None else None
        others = (view.get(peer) for peer in view.live(self.stamp.stage, now=now) if peer != leader)
        return self._fed or bool(self.barrier.known) or any(seen is not None and seen.queue > 0 for seen in others)

    def _lead_under(self, ballot: Ballot, now: float) -> None:
        """My turn: lead under this ballot."""
        member = self._member
        self.election.promise(ballot, now=now)
        self._lock_again(now)
        self._delays = Delays(member.view.timers, now)
        self._led_by(member.me, now)
        self.part.drop()
        given, order = self.election.given, self.election.order
        self.leader = Leader(self.stamp, ballot, member, order, oldest=self.oldest, given=given, now=now)
        self._host.log("leader", step=self.stamp.step, ballot=ballot.number)
        self.report()
        self.leader.advance(now=now, resend=False)

    def _note_delays(self, now: float, resend: bool) -> None:
        """Note the members that hold up my exchange; while there is none, those that hold me up as the leader."""
        if self.part.exchange is not None and self.part.round is not None:
            awaited, view = self._member.awaited, self._member.view
            away = {peer for peer in awaited if (seen := view.get(peer)) is not None and seen.waits == "stage"}
            self._delays.note(awaited, len(self.part.round.receivers), away=away, now=now)
        elif self.leader is not None:
            late = self.leader.late()
            signatures = bool(self.leader.acks)
            self._delays.note(late, len(self.leader.members.keys() | late), signatures=signatures, now=now)
        else:
            self._delays.note(frozenset(), 0, now=now)
        self._led.note(self._waits_for_leader(now), now=now)
        if resend:
            self._led.lost(self._lost(now))

    def _lose_line(self) -> None:
        """The others go on without me, and the streams of one or two of them have stood still for so long that I have
        reported them: the lines to these may be broken, and no leader should have to find that out for itself."""
        trouble = self._member.trouble
        # Being left out proves nothing by itself; and a member that sent refused chunks has sent its stream.
        if self.phase != "exchanging" or trouble is None or trouble.refused:
            return
        late = [each.peer for each in trouble.late]
        if len(late) <= MOST_NAMED:
            self._member.lines.broken(self._member.me, late, step=self.stamp.step)

    def _led_by(self, leader: PeerId, now: float) -> None:
        if self._led.leader != leader:
            self._led, self._out, self._said = LeaderWaits(leader, now), False, (-math.inf, ())

    def _computes(self, leader: PeerId, now: float) -> bool:
        """Does any replica compute, as far as I know? The leader's word is no excuse of its own."""
        view = self._member.view
        # What is computed, and not assigned to a replica yet, is in a queue as well.
        if (self._member.queue and self._member.waits != "leader") or self.claims.assigned != self.claims.accumulated:
            return True
        works = (peer for peer, seen in view.mates() if peer != leader and seen.queue and seen.waits != "leader")
        return any(view.in_touch(peer, now=now) for peer in works)

    def _lost(self, now: float) -> Set[object]:
        """The peers out of touch that have contributed lately, to any stage."""
        view, stages = self._member.view, range(self._member.shape.num_stages)
        known = ((stage, peer) for stage in stages for peer in view.voters_of(stage) if peer != view.me)
        return {(stage, peer) for stage, peer in known if not view.may_live(peer, now=now, stage=stage)}

    def applied(self, now: float) -> None:
        """The step is over: charge the members that slowed it down."""
        commit = self.barrier.of(self.stamp.stage)
        named = commit.late if commit is not None else ()
        self._delays.charge(self._member.lateness, self._member.me, named, now=now)

    def led_s(self, *, now: float) -> tuple[float, float]:
        """How long this step, which is over, waited for its leader; and as that one says for others."""
        return self._led.seconds(now=now)

    def _waits_for_leader(self, now: float) -> Collection[PeerId]:
        """My leader, if there is work to be counted and no replica works, computes or exchanges; or the peers that it
        waits for, by its reports since the last heartbeat but one."""
        me, view, leader = self._member.me, self._member.view, self.promised
        waits = self.oldest and not self._out and self.phase in ("counting", "holding")
        if leader is None or leader.peer == me or not waits:
            return ()
        # A holder of the aggregate has nothing more to compute in this step.
        if self.phase == "counting" and (self._computes(leader.peer, now) or not self._is_fed(now)):
            return ()
        said_at, awaits = self._said
        return awaits if awaits and me not in awaits and now - said_at <= view.timers.settle_s else (leader.peer,)

    def _collect(self, commit: Commit) -> None:
        """My stage has committed an aggregate that is not here: fetch it from a holder (rule 16)."""
        # No replica says that it holds it: one that does not answers so at once.
        view = self._member.view
        holders = sorted(peer for peer, seen in view.mates() if seen.synced and not view.refused(peer))
        self.part.collect(Round(self.stamp, commit.id, (), (), ()), commit.digest, holders)

    def _apply(self) -> None:
        # A step beyond the end is the run's only if a commit of it names the notice that says so.
        if self.stamp.step < self._member.horizon_of(self.barrier.known).last and self.part.move("apply"):
            self._host.apply(self.barrier.known)
