"""The step machine of one replica of one stage: its version, the live replicas, and its open steps. Pure.

Events come in as method calls with `now`, and calls of the host go out (`host`). What belongs to one step is in
`open_step.OpenStep`; a message finds its step by its stamp. A replica of version v has steps v .. v + ahead open: one
as a rule, two where steps overlap; the *oldest* is applied next. What outlives a step is here. The machine knows
nothing of tensors: the driver reports to it what compute has done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from swarmnet.ids import NO_RESTART, Ballot, Chain, PeerId, Restart, RoundId, Signer, next_chain
from swarmnet.manifest.extension import Horizon, Notice
from swarmnet.manifest.timers import TERM_STEPS, Timers
from swarmnet.messages import (
    MAX_LATE,
    UNMEASURED,
    BannedPeers,
    Commit,
    Committed,
    Finished,
    Heartbeat,
    LineQuality,
    Measure,
    StagePlan,
    Stamp,
    StateHeader,
    StepControl,
    Trouble,
    Waits,
)
from swarmnet.quorum import quorum
from swarmnet.step.commits import commit_of, digest_of, evidence
from swarmnet.step.drift import NO_DRIFT, Drift, DriftRules
from swarmnet.step.exclusion import after
from swarmnet.step.gate import Shape, refusal
from swarmnet.step.heartbeats import Heartbeats
from swarmnet.step.host import Deferred, StepHost
from swarmnet.step.lag import Lag
from swarmnet.step.lateness import Lateness
from swarmnet.step.ledger import Generations, round_numbers
from swarmnet.step.lines import BrokenLines
from swarmnet.step.membership import Membership
from swarmnet.step.open_step import OpenStep
from swarmnet.step.pace import Pace
from swarmnet.step.view import View


class Member:
    """The step machine of one replica of one stage."""

    def __init__(
        self,
        me: PeerId,
        stage: int,
        shape: Shape,
        timers: Timers,
        *,
        incarnation: int,
        chain: Chain,
        now: float,
        signer: Signer,
        drift: DriftRules = NO_DRIFT,
        numerics: str = "",
    ) -> None:
        self.me, self.stage, self.shape, self.timers = me, stage, shape, timers
        self.view = View(me, stage, timers)
        self.calls = Deferred()
        self.host: StepHost = self.calls
        self.drift = Drift(self.view, drift, numerics, self.host)
        self.membership = Membership(me, stage, self.view, signer, self.host)
        self.view.voters_of = self.membership.voters
        self.lateness, self.pace, self.lines = Lateness(timers, self.host), Pace(timers), BrokenLines()
        self.generations, self.round_numbers = Generations(incarnation), round_numbers(incarnation)
        self.restart = NO_RESTART
        self.stand(StateHeader(0, chain, chain, chain))
        self._restored = 0  # the version at which this process last took state over
        self.synced = False
        """Do I have state? Without it I take no part in the step."""
        self.bans: BannedPeers = ()
        """What commits of my stage should ban. Invariant: the other voters have been told that it is decided."""
        self.overruled_by: PeerId | None = None
        """Who leads this term while I thought that I did, and does not follow me."""
        self.line: LineQuality = UNMEASURED
        """What I have measured of my own network line."""
        self.trouble: Trouble | None = None
        """What holds me up in the round I take part in."""
        self.awaited: frozenset[PeerId] = frozenset()
        """Members with streams that are later than their measured links explain."""
        self._waits: Mapping[PeerId, bool] = {}
        self.queue = 0
        self.waits: Waits = ""
        self.last_commits: tuple[Commit, ...] = ()
        self.evidence: tuple[bytes, ...] = ()
        """Of the last two steps, the one before this version last."""
        self.last_finished: Finished | None = None
        self._last_stamp: Stamp | None = None
        self.last_ballot: Ballot | None = None
        """The ballot that I followed in the step before: heartbeats name it until I follow one in this step."""
        self._lag = Lag(self.view, self.membership, self.host)
        self._bad_voters: set[PeerId] = set()
        self.heartbeats = Heartbeats(self)
        self._begin(now, None)

    def _begin(self, now: float, finished: Finished | None) -> None:
        """Open all steps of this version again."""
        self.pace.begin()
        oldest = self.before if self.shape.delay.behind(self.version) else self.chain
        stamp = self._stamp(self.version, oldest)
        self.steps = [OpenStep(stamp, self, oldest=True, now=now, finished=finished)]
        self.steps += self._following(now)
        self.heartbeats.questions.begin(self.version)
        self._early_plan: StagePlan | None = None

    def _following(self, now: float) -> list[OpenStep]:
        """The steps that this version opens in addition to the open ones: they are computed on its weights.

        Mostly one; two where steps begin to overlap, for the first of them was not open a version earlier.
        """
        return [
            OpenStep(self._stamp(step, self.chain), self, oldest=step == self.version, now=now)
            for step in range(self.version + len(self.steps), self.version + self._ahead + 1)
        ]

    @property
    def _ahead(self) -> int:
        """How many steps beyond the oldest are open."""
        return self.shape.delay.ahead(self.version)

    def _stamp(self, step: int, chain: Chain) -> Stamp:
        return Stamp(step, self.stage, chain, self.restart)

    # ------------------------------------------------------------ what others may know

    @property
    def oldest(self) -> OpenStep:
        """The open step that is averaged and applied next."""
        return self.steps[0]

    @property
    def done(self) -> bool:
        """The run has reached its last version."""
        return self.over(self.version)

    def over(self, step: int) -> bool:
        """Is that step none of the run's, as far as can be foreseen?"""
        return step >= self.shape.notices.last(self.horizon)

    def notice(self, step: int) -> Notice | None:
        """What a round of that step names; None: nothing that is known here begins at it."""
        return self.shape.notices.due(step, self.horizon)

    def horizon_of(self, commits: Iterable[Commit]) -> Horizon:
        """What holds in the step that is applied next, which these commits end."""
        learn = self.shape.notices.learn
        return self.horizon.after(self.version, [learn(commit.notice) for commit in commits if commit.notice])

    def stuck(self, *, now: float) -> bool:
        """Is my exchange unable to end by itself? A stream stands still, breaks, or comes from a dead member."""
        return self.trouble is not None or any(
            broken or not self.view.may_live(peer, now=now) for peer, broken in self._waits.items()
        )

    def sum_of(self, stamp: Stamp, round_id: RoundId) -> Finished | None:
        """The finished sum of that round of this step or the last one. Round ids repeat from step to step."""
        kept = {self._last_stamp: self.last_finished, self.oldest.stamp: self.oldest.finished}
        finished = kept.get(stamp)
        return finished if finished is not None and finished.id == round_id else None

    def heartbeat(self, to: PeerId | None = None) -> Heartbeat:
        """My heartbeat, to that peer or to any."""
        return self.heartbeats.to(to)

    def passed_over(self, stage: int, *, now: float) -> frozenset[PeerId]:
        """The peers that a stage next to mine does not wait for, and that most of it cannot reach."""
        return self.view.cut_off(stage, now=now).union(self.membership.excluded(stage, self.version))

    # ------------------------------------------------------------ events from my own replica

    def begins_again(self, step: int) -> bool:
        """May an earlier process of this peer have led in that step, or this one before it fetched the state again?"""
        return step <= self._restored + self._ahead

    def stand(self, header: StateHeader) -> None:
        """The state that is here is this one."""
        self.header, self.version, self.table = header, header.version, digest_of(header.exclusions)
        self.chain, self.before, self.term_chain = header.chain, header.before, header.term_chain
        self.horizon = Horizon(self.shape.total_steps, header.notices)  # by the notices in force at this version

    def after(self, commits: tuple[Commit, ...]) -> StateHeader:
        """The state that follows from this one and the commits of all stages."""
        chain, version = next_chain(self.chain, evidence(commits)), self.version + 1
        # Leaders are drawn again from a chain that no replica knew when the last term began.
        term_chain = chain if version % TERM_STEPS == 0 else self.term_chain
        before, bans = self.header.exclusions, [ban for commit in commits for ban in commit.bans]
        exclusions = after(before, commits[self.stage], bans)
        notices = self.horizon_of(commits).notices
        return StateHeader(version, chain, self.chain, term_chain, self.restart, notices, exclusions, before)

    def restored(
        self,
        header: StateHeader,
        finished: Finished | None,
        commits: tuple[Commit, ...],
        last_commits: tuple[Commit, ...] = (),
        *,
        now: float,
    ) -> None:
        """This state is installed (seed or snapshot), with the oldest step's complete aggregate if there is one.

        last_commits: of the step before, all or none: others may still need to get them from this replica.
        """
        self.generations.next()
        self._restored = header.version
        # A fetched aggregate is signed only if my stage has committed it, because its source may have forged it.
        if not any(commit.stage == self.stage and finished and commit.says(finished) for commit in commits):
            finished = None
        left = self.oldest
        self.stand(header)
        self.synced = True
        self.last_commits, self.last_finished, self._last_stamp = last_commits, None, None
        self.evidence = (evidence(last_commits),) if last_commits else ()
        for commit in (*commits, *last_commits):
            self.membership.hear(commit, now=now)
        self.membership.restored(last_commits, header.exclusions)
        for commit in last_commits:
            if commit.stage == self.stage:  # who has taken over what followed from it stands by it, too
                self.membership.hear_vote(commit, self.me, self.membership.sign(commit), now=now)
        self.drift.forget()
        self._lag.caught_up()
        self.pace.interrupted()
        self._begin(now, finished)
        if left.stamp == self.oldest.stamp:
            self.oldest.part.remember(left.part)
        self.oldest.inherit(commits)
        self.host.stop()
        self.host.beat()
        self._advance(now)

    def follow(self, restart: Restart) -> None:
        """The run goes on from another version: nothing said before counts, and I have no state until `restored`."""
        self.restart, self.synced, self.bans = restart, False, ()
        self.header = replace(self.header, restart=restart)
        self.membership.follow(restart)
        self.view.forget_all()
        self.drift.forget()

    def claim(self, step: int, index: int, *, now: float) -> None:
        """Work on (step, index) has begun: ask to count it (rule 3)."""
        if (of := self.step(step)) is not None:
            of.claim(index, now=now)

    def withdraw(self, step: int, index: int) -> None:
        """The work was dropped. A grant that still comes is ignored; the leader learns of it, now or later."""
        if (of := self.step(step)) is not None:
            of.withdraw(index)

    def add(self, step: int, index: int) -> None:
        """The weight gradient of (step, index) is in the step's accumulator, which has not been discarded since."""
        if (of := self.step(step)) is not None:
            for behind in self.steps[self.steps.index(of) :]:
                behind.progress += 1  # compute goes to the older step first, so it is progress of the newer one too
            of.add(index)

    def found_non_finite(self, step: int, index: int) -> None:
        """(step, index) gave a non-finite value here."""
        if (of := self.step(step)) is not None:
            of.found_non_finite(index)

    def sums_lost(self) -> None:
        """What computes here has lost all sums of open steps and all work in flight, but no weights."""
        for step in self.steps:
            step.sum_lost()

    def feel(
        self,
        line: LineQuality,
        trouble: Trouble | None,
        allowed: Mapping[PeerId, float],
        waits: Mapping[PeerId, bool],
        awaited: frozenset[PeerId] = frozenset(),
    ) -> None:
        """Record what the exchange measured of my link and of members that hold up the round; reports carry it.

        allowed: how long each member's stream may stand still. waits: the members that I wait for; True: the stream
        breaks each time that I request it.
        """
        self.line, self.trouble, self.lines.allowed = line, trouble, allowed
        self._waits, self.awaited = waits, awaited

    def applied(self, *, now: float) -> None:
        """The optimizer step is done: the next version begins."""
        ended = self.oldest
        assert ended.applying and ended.barrier.complete
        self.last_commits, self.last_finished, self._last_stamp = ended.barrier.known, ended.finished, ended.stamp
        self.last_ballot, self._bad_voters = ended.promised, set()
        leader = self.last_commits[self.stage].id.ballot.peer
        rival = self.view.get(leader) if ended.promised is not None and ended.promised.peer == self.me else None
        overruled = rival is not None and rival.leader != ended.promised
        stays = leader == self.overruled_by and (self.version + 1) % TERM_STEPS != 0  # mates draw another order then
        self.overruled_by = leader if overruled or stays else None
        ended.applied(now)
        self._review_leader(ended, now)
        self.steps = self.steps[1:]
        self.evidence = (*self.evidence[-1:], evidence(self.last_commits))
        self._exclude(self.last_commits[self.stage], now)
        before = self.membership.voters(self.stage)
        self.membership.applied(self.last_commits, self.last_finished)
        if self.me in self.membership.voters(self.stage) - before:
            self.overruled_by = None  # the others rank a voter as drawn, and one without a vote last
        self.stand(self.after(self.last_commits))
        self._lag.caught_up()
        self.membership.patience_s = 2 * (self.pace.usual_s or 0.0)
        self.pace.begin()
        follows = bool(self.steps)
        opened = self._following(now)
        self.steps += opened
        self.heartbeats.questions.begin(self.version)
        plan, self._early_plan = self._early_plan, None
        self.host.beat()
        if plan is not None and plan.stamp == opened[0].stamp:
            opened[0].receive(plan.ballot.peer, plan, now=now)
        if follows:
            self.oldest.become_oldest(now=now)
        self.drift.review(now=now)
        if self._mend(now, begins=True):
            return  # nothing is counted at this version yet: now it costs least
        if self.drift.rules.due(self.version, last=self.horizon.last):
            self.host.measure(self.version, self.chain, self.term_chain)
        self._advance(now)

    def _review_leader(self, ended: OpenStep, now: float) -> None:
        """A leader owes what the step was longer than usual steps under others, if it waited for the leader."""
        leader = self.last_ballot.peer if self.last_ballot is not None else None
        over_s = self.pace.applied(leader, now=now)
        if leader is not None and leader != self.me:
            rest_s, waits_s = ended.led_s(now=now)
            self.lateness.charge_leader(leader, over_s=over_s, rest_s=rest_s, waits_s=waits_s, now=now)

    def _exclude(self, commit: Commit, now: float) -> None:
        """The commit of my stage names late peers: log the table's new rows."""
        if commit.table != self.table:
            self._lag.told_other_exclusions(self.version, now=now)
        table = after(self.membership.exclusions, commit)
        leader, voters = self.membership.named_by(commit), self.membership.roster(self.stage)
        self.lateness.committed(commit.late, {each.peer for each in table}, leader, voters, now=now)
        for each in table:
            if each.peer in commit.late:
                self.host.log("excluded", peer=each.peer, until_step=each.until_step, level=each.level)

    def measured(self, measure: Measure, term_chain: Chain, *, now: float) -> None:
        """The weights of a version were measured; term_chain: as it was then."""
        self.drift.measured(measure, term_chain, now=now)
        self.host.beat()
        self.drift.review(now=now)

    def gone(self, peer: PeerId, *, definite: bool, now: float) -> None:
        """A connection to `peer` broke."""
        if definite and self.view.refuse(peer, now=now):
            self._advance(now)

    def tick(self, *, now: float) -> None:
        """Every heartbeat interval: say again whatever state asks for."""
        self.view.voters = self.membership.voters(self.stage)
        self.view.review(broken=self.lines.broken_to(self.me, step=self.version), now=now)
        self.view.late = tuple(sorted(self.lateness.late(now=now)[:MAX_LATE]))
        self.lateness.agree(self.view.observed_late(now=now), now=now)
        if not self.synced:
            return
        if not self.oldest.applying and self._lag.orphaned(self.version, now=now):
            self._lag.caught_up()
            self.host.orphan()
            self.host.log("orphaned", step=self.version)
            return
        self.drift.review(now=now)
        if self.done:
            self._mend(now, begins=False)
        for step in self.steps:
            step.report()
        if (leader := self.oldest.leader) is not None and (mine := self.oldest.finished) is not None:
            self._lag.tell_table(leader.acks, commit_of(self.oldest.stamp, mine, self.table), leader.stamp, now=now)
        self.heartbeats.ask(None, now=now)
        self._advance(now, resend=True)

    # ------------------------------------------------------------ events from others

    def receive(self, peer: PeerId, message: StepControl, *, now: float, more: bool = False) -> None:
        """Any message of the step protocol. Wrong step, stage or chain: without effect.

        more: others have come with it, and follow immediately; a leader checks all members after the last one.
        """
        self._receive(peer, message, now)
        for step in self.steps if not more else ():
            step.turn(now=now)

    def _highest_ballot(self) -> int:
        """The highest number that two replicas report to have voted for; of voters, if there are any."""
        voters = self.view.voters
        said = sorted(
            seen.leader.number
            for peer, seen in self.view.mates()
            if seen.leader is not None and (peer in voters or not voters)
        )
        return said[-2] if len(said) > 1 else 0

    def _receive(self, peer: PeerId, message: StepControl, now: float) -> None:
        """What cannot be true in this run is dropped (`gate`); only replicas of my stage have a say in it."""
        about = None if isinstance(message, Heartbeat | Committed) else self.step(message.stamp.step)
        promised = about.promised if about is not None else None
        reason = refusal(peer, message, self.shape, promised, self._highest_ballot)
        if reason is None and isinstance(message, StagePlan) and message.attempt is not None and about is not None:
            reason = about.attempt_refusal(message.attempt) if message.stamp == about.stamp else None
        if reason is not None:
            self.host.log("refused_message", peer=peer, kind=type(message).__name__, reason=reason)
            # No correct leader has such a plan, and waiting for a better one would cost its whole term.
            if isinstance(message, StagePlan) and about is not None and about.promised == message.ballot:
                about.election.reject(peer, now=now)
            return
        # Heartbeats come from all stages, everything else but commits from replicas of my stage.
        if isinstance(message, Heartbeat):
            self._on_heartbeat(peer, message, now)
            return
        self.view.touch(peer, now=now)
        if not self.synced:
            return
        if isinstance(message, Committed):
            if message.restart == self.restart:
                self._on_told(peer, message.commit, now)
            return
        # A peer that never sent a heartbeat as a replica of my stage has no say in it.
        if message.stamp.stage != self.stage or (peer != self.me and self.view.get(peer) is None):
            return
        if isinstance(message, StagePlan) and message.stamp.step == self.version + self._ahead + 1:
            if self._early_plan is None or message.ballot >= self._early_plan.ballot:
                self._early_plan = message  # its leader is ahead of us
            return
        # Else it is of another past or another fork, or the step is decided here.
        if about is not None and message.stamp == about.stamp and not about.applying:
            about.receive(peer, message, now=now)

    def _on_told(self, peer: PeerId, commit: Commit, now: float) -> None:
        """A peer says that it believes this commit."""
        # Steps that are far away cannot be checked: any peer could send commits of them, and they would be stored.
        if abs(commit.step - self.version) > self._ahead + 1:
            return
        self.membership.told(peer, commit)
        self._on_commit(peer, commit, now)
        self._lag.has_other_table(commit, self.oldest.stamp, self.table, now=now)
        if commit in self.oldest.barrier.known:
            self.heartbeats.questions.answered(peer)

    def _on_heartbeat(self, peer: PeerId, beat: Heartbeat, now: float) -> None:
        if beat.stamp.restart != self.restart:
            # It follows another restart, so it has no say here. One peer alone cannot move the run (state/rollback.py).
            self.view.forget(peer)
            return
        before = self._decides_by(peer, now)
        self.heartbeats.graph.asked(peer, chosen=beat.asks, now=now)
        fresh = self.view.hear(peer, beat, now=now)
        if fresh and self.synced:
            self.host.send(peer, self.heartbeat(peer))
        # Without state neither side can tell the other anything about the step.
        if not self.synced or not beat.synced:
            return
        step, mate = beat.stamp.step, beat.stamp.stage == self.stage
        if mate and step == self.version and beat.stamp.chain != self.chain:
            self._on_fork(peer, beat, now)
            return
        if step == self.version:
            listed = self.heartbeats.listed(beat)
            if listed or not beat.known:  # else what that is, it says if it is asked
                self.membership.lists(peer, beat.stamp.stage, listed)
        if step in (self.version, self.version + 1):
            # What has applied the step that I am at has all its commits (rule 17).
            for commit in (*beat.last_commits, *beat.commits):
                self._on_told(peer, commit, now)
            self.heartbeats.ask((peer, beat), now=now)
        if beat.wants:
            self.heartbeats.answer(peer, beat, now=now)
        # By one step the sum may still be fetched; by more the state must (rule 18).
        if mate and step > self.version and not self.oldest.applying:
            part = self.oldest.part  # holders that have moved on keep no aggregate: the state is left to fetch
            fetching = part.exchange is not None and not part.lacking
            if not self._lag.behind(self.version, fetching=fetching, now=now):
                self._advance(now)
        elif (
            mate
            and self.version - self.shape.delay.most <= step <= self.version
            and self._decides_by(peer, now) != before
        ):
            for open_step in self.steps:
                if open_step.leader is not None:
                    open_step.leader.looks = True

    def _decides_by(self, peer: PeerId, now: float) -> tuple[object, ...]:
        """What a leader decides by of a replica: unless it changes, a tick is early enough to look."""
        seen = self.view.get(peer)
        if seen is None:
            return ()
        in_touch = self.view.in_touch(peer, now=now)
        return in_touch, seen.incarnation, seen.version, seen.chain, seen.before, seen.synced, seen.draining

    def _on_commit(self, peer: PeerId, commit: Commit, now: float) -> None:
        """A commit from any peer; its votes are stored, also of a step that is not open here yet."""
        if not self.version <= commit.step <= self.version + self._ahead + 1:
            return
        if self.membership.hear(commit, now=now):
            if (of := self.step(commit.step)) is not None:
                of.add_commit(commit, now=now)
        elif peer not in self._bad_voters:
            self._bad_voters.add(peer)  # said once a version: it is said again with every message that carries it
            self.host.log("bad_vote", peer=peer, stage=commit.stage, step=commit.step)

    def _on_fork(self, peer: PeerId, beat: Heartbeat, now: float) -> None:
        # I hold the sum of a step before the fork, perhaps as the only one: I apply it first and give way afterwards.
        if self.oldest.finished is not None and beat.before == self.oldest.stamp.chain:
            return
        seen = self.view.get(peer)
        theirs = seen is not None and seen.committed
        mine = self.oldest.barrier.of(self.stage) is not None
        live = self.membership.in_sight(self.stage, now=now)
        others = [self.view.get(mate) for mate in live - {self.me}]
        chains = Counter(seen.chain for seen in others if seen is not None and seen.version == self.version)
        with_them, with_me = chains[beat.stamp.chain], chains[self.chain] + 1
        tied = with_them == with_me and chains.total() + 1 >= quorum(live)  # by most, not by who speaks first
        # Rule 19: of two forks that are tied, one that holds a commit never yields to one that has none.
        if with_them >= quorum(live) or (tied and (theirs, beat.stamp.chain) > (mine, self.chain)):
            self._lag.resync((peer,), "fork", self.version, now=now)

    # ------------------------------------------------------------ inside

    def _mend(self, now: float, *, begins: bool) -> bool:
        """Take another replica's weights if mine have diverged, or are of another class. begins: a version begins."""
        if donors := self.drift.donors(now=now):
            if resyncs := self._lag.resync(donors, "drift", self.version, now=now):
                self.drift.repairing()
            return resyncs
        donors = self.drift.class_donors(self.version, self.term_chain, now=now) if begins else ()
        return self._lag.resync(donors, "numerics", self.version, now=now)

    def step(self, number: int) -> OpenStep | None:
        """The open step of that number."""
        place = number - self.version
        return self.steps[place] if 0 <= place < len(self.steps) else None

    def _advance(self, now: float, *, resend: bool = False) -> None:
        for step in self.steps:
            step.advance(now, resend=resend)
