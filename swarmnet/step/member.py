"""One replica's side of the step: claims, grants, its part in rounds, the barrier, and the keeper if it is one. Pure.

Events come in as method calls with `now`; each returns actions for the driver. All protocol state is of one
(peer, stage) and one step; only version, chain, generation and incarnation outlive a step (docs/protocol.md). It
knows nothing of tensors: the driver tells it what compute has done.
"""

from __future__ import annotations

from swarmnet.ids import NO_RESTART, Ballot, Chain, Generation, PeerId, Restart, RoundId, next_chain
from swarmnet.messages import (
    Claim,
    Commit,
    Committed,
    Control,
    Evicted,
    Execute,
    Finished,
    Granted,
    Heartbeat,
    Line,
    Moved,
    Prepare,
    Release,
    Report,
    Round,
    Stamp,
)
from swarmnet.step import actions as act
from swarmnet.step.account import Account
from swarmnet.step.actions import Action, Broadcast, Note, Send
from swarmnet.step.barrier import Barrier, evidence
from swarmnet.step.election import Election
from swarmnet.step.gate import Shape, refusal
from swarmnet.step.keeper import Keeper
from swarmnet.step.lag import Lag, yields
from swarmnet.step.pace import Pace
from swarmnet.step.rounds import Differs, Lacks, Part
from swarmnet.step.view import Timers, View


class Member:
    """The step machine of one replica of one stage."""

    def __init__(
        self, me: PeerId, stage: int, shape: Shape, timers: Timers, *, incarnation: int, chain: Chain, now: float
    ) -> None:
        self.me, self.stage, self.shape, self.timers = me, stage, shape, timers
        self.view = View(me, stage, timers)
        self.account = Account(Generation(incarnation, 0))
        self.version, self.chain, self.term_chain = 0, chain, chain
        self.restart = NO_RESTART
        self.synced = False
        self.progress = 0
        self.queue = 0
        self.line = Line()
        self.last_commits: tuple[Commit, ...] = ()
        self.last_finished: Finished | None = None
        self._last_stamp: Stamp | None = None
        self._pace, self._lag = Pace(timers), Lag(self.view)
        self._begin(now, None)

    def _begin(self, now: float, finished: Finished | None) -> None:
        self._pace.begin()
        self.account.begin()
        self._election = Election(self.view, now=now)
        self.keeper: Keeper | None = None
        self.part = Part(self.me, finished)
        self.barrier = Barrier(self.version, self.shape.num_stages)
        self.applying = False
        self._next_commits: dict[int, Commit] = {}

    # ------------------------------------------------------------ what others may know

    @property
    def stamp(self) -> Stamp:
        """What my messages are about."""
        return Stamp(self.version, self.stage, self.chain, self.restart)

    @property
    def promised(self) -> Ballot | None:
        """The highest ballot heard of: whom I report to."""
        return self._election.promised

    @property
    def finished(self) -> Finished | None:
        """The finished sum of this step, if it is here (R)."""
        return self.part.finished

    @property
    def done(self) -> bool:
        """The run has reached its last version."""
        return self.version >= self.shape.total_steps

    def sum_of(self, stamp: Stamp, round_id: RoundId) -> Finished | None:
        """The finished sum of that round of this step or the last one. Round ids repeat from step to step."""
        finished = self.finished if stamp == self.stamp else self.last_finished if stamp == self._last_stamp else None
        return finished if finished is not None and finished.id == round_id else None

    def heartbeat(self, to: PeerId | None = None) -> Heartbeat:
        """My heartbeat, with the last step's commits if `to` is not known to have applied them."""
        behind = to is None or self.view.everyone().get(to, -1) < self.version
        return Heartbeat(
            stamp=self.stamp,
            incarnation=self.account.generation.incarnation,
            synced=self.synced,
            keeper=self.promised,
            commits=self.barrier.known,
            last_commits=self.last_commits if behind else (),
            queue=self.queue,
            draining=self.view.draining,
        )

    # ------------------------------------------------------------ events from my own replica

    def restored(
        self, version: int, chain: Chain, term_chain: Chain, finished: Finished | None, commits: tuple[Commit, ...],
        last_commits: tuple[Commit, ...] = (), *, now: float,
    ) -> list[Action]:
        """State of `version` is in place (seed or snapshot), with the step's finished sum if there is one.

        last_commits: of the step before, all or none: others may still need to hear them from me.
        """
        self.account.renew(void=True)
        self.version, self.chain, self.term_chain, self.synced = version, chain, term_chain, True
        self.last_commits, self.last_finished, self._last_stamp = last_commits, None, None
        self._lag.caught_up()
        self._begin(now, finished)
        for commit in commits:
            self.barrier.add(commit)
        return [act.StopSum(), Broadcast(self.heartbeat()), *self._advance(now)]

    def follow(self, restart: Restart) -> None:
        """The run goes on from another version: nothing said before counts, and I have no state until `restored`."""
        self.restart, self.synced = restart, False
        self.view.forget_all()

    def claim(self, index: int, *, now: float) -> list[Action]:
        """Work on `index` has begun: ask to count it (rule 3)."""
        if index in self.account.granted:
            return [act.Granted(index)]
        self._pace.claimed(now=now)
        self.account.asked.add(index)
        return self.account.claim(index, self.stamp, self.promised)

    def withdraw(self, index: int) -> list[Action]:
        """The work was dropped. A grant that still comes is ignored; the keeper hears of it, now or later."""
        account = self.account
        account.asked.discard(index)
        if index not in account.granted or index in account.summed:
            return []
        account.granted.discard(index)
        return account.release(frozenset({index}), self.stamp, self.promised)

    def add(self, index: int, *, now: float) -> list[Action]:
        """The weight gradient of `index` is in the accumulator, which has not been voided since."""
        self.progress += 1
        if index not in self.account.granted:
            return self._void_myself()
        self.account.summed.add(index)
        return self._join_round()

    def found_non_finite(self, index: int, *, now: float) -> list[Action]:
        """`index` gave a non-finite value here."""
        actions = self.withdraw(index)
        self.account.non_finite.add(index)
        return [*actions, *self._report()]

    def sum_whole(self, finished: Finished, *, now: float) -> list[Action]:
        """The exchange of a round, or the collection of a finished sum, is complete and digest-checked."""
        self.part.exchange = None
        wanted = self._wanted_sum()
        mine = self.barrier.of(self.stage)
        foreign = mine is not None and finished.digest != mine.digest  # not what my stage has committed
        if wanted is None or finished.id != wanted or foreign:
            return self._join_round()
        self.part.finished = finished
        return [*self._report(), *self._advance(now)]

    def sum_failed(self, round_id: RoundId, *, now: float) -> list[Action]:
        """The exchange gave up; the next Round message (or tick) starts it again."""
        if self.part.exchange == round_id:
            self.part.exchange = None
        return []

    def applied(self, *, now: float) -> list[Action]:
        """The optimizer step is done: the next version begins."""
        assert self.applying and self.barrier.complete
        self.last_commits, self.last_finished, self._last_stamp = self.barrier.known, self.finished, self.stamp
        self.chain = next_chain(self.chain, evidence(self.last_commits))
        self.version += 1
        if self.version % self.shape.keeper_term_steps == 0:
            self.term_chain = self.chain
        prepare, commits = self._election.of_next_step, self._next_commits
        self._lag.caught_up()
        self._begin(now, None)
        for commit in commits.values():
            self.barrier.add(commit)
        actions: list[Action] = [Broadcast(self.heartbeat())]
        if prepare is not None and prepare.stamp.chain == self.chain:
            actions += self._on_prepare(prepare.ballot.peer, prepare, now)
        return actions + self._advance(now)

    def gone(self, peer: PeerId, *, definite: bool, now: float) -> list[Action]:
        """A connection to `peer` broke."""
        if definite and self.view.gone(peer, now=now):
            return self._advance(now)
        return []

    def tick(self, *, now: float) -> list[Action]:
        """Every heartbeat interval: say again whatever state asks for."""
        self.view.forget_silent(now=now)
        if not self.synced:
            return []
        if not self.applying and self._lag.orphaned(self.version, now=now):
            self._lag.caught_up()
            return [act.Orphaned(), Note("orphaned", {"step": self.version})]
        actions: list[Action] = []
        if self.promised is not None:
            actions += self._report()
            actions += self.account.ask(self.stamp, self.promised)
        return actions + self._advance(now, resend=True)

    # ------------------------------------------------------------ events from others

    def receive(self, peer: PeerId, message: Control, *, now: float) -> list[Action]:
        """Any message of the step protocol. Wrong step, stage or chain: without effect.

        What cannot be true in this run is dropped (`gate`); only replicas of my stage have a say in it.
        """
        reason = refusal(peer, message, self.shape, self.promised)
        if reason is not None:
            return [Note("refused_message", {"peer": peer, "kind": type(message).__name__, "reason": reason})]
        if isinstance(message, Heartbeat):
            return self._on_heartbeat(peer, message, now)
        self.view.touch(peer, now=now)
        if not self.synced:
            return []
        mate = peer == self.me or self.view.get(peer) is not None
        if isinstance(message, Committed):
            if message.restart != self.restart:
                return []
            return self._on_commit(message.commit, now) if mate or message.commit.stage != self.stage else []
        if message.stamp.stage != self.stage or not mate:
            return []
        if isinstance(message, Prepare) and message.stamp.step == self.version + 1:
            self._election.early(message)
            return []
        if message.stamp != self.stamp or self.applying:
            return []
        match message:
            case Prepare():
                return self._on_prepare(peer, message, now)
            case Granted():
                return self._on_granted(message)
            case Moved():
                return self._on_moved(message)
            case Evicted():
                return self._on_evicted(message)
            case Round():
                return self._on_round(message)
            case Execute():
                return [act.Execute(message.index)] if message.ballot == self.promised else []
            case Claim() | Report() | Release():
                return self._to_keeper(peer, message, now)
        return []

    def _to_keeper(self, peer: PeerId, message: Claim | Report | Release, now: float) -> list[Action]:
        if isinstance(message, Report) and self.promised is not None and message.ballot > self.promised:
            # Somebody has promised a higher ballot: whoever keeps under a lower one stops (rule 13).
            return self._promise(message.ballot, now)
        if self.keeper is None:
            return []
        match message:
            case Claim():
                actions = self.keeper.on_claim(peer, message, now=now)
            case Release():
                actions = self.keeper.on_release(peer, message, now=now)
            case Report():
                actions = self.keeper.on_report(peer, message, now=now)
        return actions + self.keeper.advance(now=now, resend=False)

    def _on_heartbeat(self, peer: PeerId, beat: Heartbeat, now: float) -> list[Action]:
        if beat.stamp.restart > self.restart:
            return [act.Follow(beat.stamp.restart)]
        if beat.stamp.restart < self.restart:  # it has no say before it follows; my own heartbeat tells it
            self.view.forget(peer)
            return [Send(peer, self.heartbeat(peer))]
        fresh = self.view.hear(peer, beat, now=now)
        actions: list[Action] = [Send(peer, self.heartbeat(peer))] if fresh and self.synced else []
        if not self.synced or not beat.synced:
            return actions
        step, mate = beat.stamp.step, beat.stamp.stage == self.stage
        if mate and step == self.version and beat.stamp.chain != self.chain:
            return actions + self._on_fork(peer, beat, now)
        if step == self.version:
            for commit in beat.commits:
                if mate or commit.stage != self.stage:
                    actions += self._on_commit(commit, now)
        elif step == self.version + 1:
            for commit in beat.last_commits:
                actions += self._on_commit(commit, now)
            for commit in beat.commits:
                self._next_commits.setdefault(commit.stage, commit)
        if mate and step > self.version and not self.applying:
            actions += self._lag.behind(self.version, now=now) or self._advance(now)
        elif step == self.version and mate and self.keeper is not None:
            actions += self.keeper.advance(now=now, resend=False)
        return actions

    def _on_commit(self, commit: Commit, now: float) -> list[Action]:
        if commit.step == self.version + 1:
            self._next_commits.setdefault(commit.stage, commit)
            return []
        if commit.step != self.version or self.applying:
            return []
        if commit.stage == self.stage:
            if commit.chain != self.chain:
                return []
            known = self.barrier.of(self.stage)
            if known is not None and known.id != commit.id and self._holds(commit):
                self.barrier.replace(commit)  # two commits of one stage: the one whose sum I hold (A4)
        news = self.barrier.add(commit)
        mine = self.finished if news and commit.stage == self.stage else None
        if mine is not None and mine.id == commit.id and mine.digest != commit.digest:
            self.part.finished = None  # the same round, other bits than my stage's: fetch them from whoever holds them
        return self._advance(now) if news else []

    def _on_prepare(self, peer: PeerId, prepare: Prepare, now: float) -> list[Action]:
        if self.promised is not None and prepare.ballot < self.promised:
            return [Send(peer, self._make_report(self.promised))]  # carries the higher ballot: the old keeper stops
        if prepare.ballot == self.promised:
            self._election.heard(prepare, now=now)
            return self._report()
        return self._promise(prepare.ballot, now)

    def _promise(self, ballot: Ballot, now: float) -> list[Action]:
        if not self._election.promise(ballot, now=now):
            return []
        actions = self.part.drop()
        if self.keeper is not None and self.keeper.ballot != ballot:
            self.keeper = None
            actions.append(Note("keeper_stopped", {"step": self.version, "for": ballot.peer}))
        return actions + self._report() + self.account.ask(self.stamp, self.promised)

    def _on_granted(self, granted: Granted) -> list[Action]:
        ours = granted.ballot == self.promised and granted.generation == self.account.generation
        if not ours or granted.index not in self.account.asked or self.finished is not None or self.applying:
            return []  # the keeper hears of it by Release (A1)
        self.account.asked.discard(granted.index)
        self.account.granted.add(granted.index)
        # Who grants has no open round: what I take part in was given up. Whoever finishes it all the same wins.
        return [*self.part.drop(), act.Granted(granted.index)]

    def _on_moved(self, moved: Moved) -> list[Action]:
        ours = moved.ballot == self.promised and moved.generation == self.account.generation
        if not ours or moved.index not in self.account.asked:
            return []
        self.account.asked.discard(moved.index)
        return [act.Owned(moved.index, moved.owner)]

    def _on_evicted(self, evicted: Evicted) -> list[Action]:
        if evicted.ballot != self.promised or evicted.generation != self.account.generation:
            return []
        self.account.renew(void=evicted.void)  # a new generation always: grants in flight for the old one are dead (A2)
        actions = self.part.drop()
        if evicted.void:
            actions.append(act.Void())
        actions.append(Note("evicted_me", {"void": evicted.void, "step": self.version}))
        return actions + self._report()

    def _on_round(self, message: Round) -> list[Action]:
        if message.ballot != self.promised:
            return []
        return self.part.hear(message) + self._join_round()

    def _on_fork(self, peer: PeerId, beat: Heartbeat, now: float) -> list[Action]:
        theirs = any(commit.stage == self.stage for commit in beat.commits)
        mine = self.barrier.of(self.stage) is not None
        if not yields(mine=(mine, self.chain), theirs=(theirs, beat.stamp.chain)):
            return []
        return self._lag.resync((peer,), "fork", self.version, now=now)

    # ------------------------------------------------------------ inside

    def _holds(self, commit: Commit) -> bool:
        """Is the sum of this commit here, bit by bit?"""
        return self.finished is not None and (self.finished.id, self.finished.digest) == (commit.id, commit.digest)

    def _wanted_sum(self) -> RoundId | None:
        mine = self.barrier.of(self.stage)
        if mine is not None:
            return mine.id
        return self.part.round.id if self.part.round is not None else None

    def _make_report(self, ballot: Ballot) -> Report:
        return self.account.report(
            self.stamp, ballot, self.finished, self.barrier.of(self.stage), self.progress, self.line
        )

    def _report(self) -> list[Action]:
        if self.promised is None or not self.synced:
            return []
        return [Send(self.promised.peer, self._make_report(self.promised))]

    def _void_myself(self) -> list[Action]:
        """The accumulator holds what nobody granted: it is worth nothing (I3)."""
        self.account.renew(void=True)
        return [*self.part.drop(), act.Void(), Note("voided_myself", {"step": self.version}), *self._report()]

    def _join_round(self) -> list[Action]:
        if self.applying:
            return []
        match self.part.join(self.account):
            case Lacks(indexes):
                return self.account.release(indexes, self.stamp, self.promised)
            case Differs():
                return self._report()
            case actions:
                return actions

    def _advance(self, now: float, *, resend: bool = False) -> list[Action]:
        if not self.synced or self.done or self.applying:
            return []
        ballot = self._election.due(self.term_chain, keeping=self.keeper is not None, now=now)
        actions = self._keep(ballot, now) if ballot is not None else []
        if self.keeper is not None:
            actions += self.keeper.advance(now=now, resend=resend)
        if resend:
            actions += self._join_round()
        actions += self._collect_committed()
        return actions + self._try_apply()

    def _keep(self, ballot: Ballot, now: float) -> list[Action]:
        """My turn: keep under this ballot."""
        self._election.promise(ballot, now=now)
        actions = self.part.drop()
        self.keeper = Keeper(
            self.stamp, ballot, self.shape.num_microbatches, self.view, idle_s=self._pace.idle_s,
            max_void=self.shape.max_void, now=now, given=self._election.given,
        )
        actions.append(Note("keeper", {"step": self.version, "ballot": ballot.number}))
        actions += self._report() + self.account.ask(self.stamp, ballot)
        return actions + self.keeper.advance(now=now, resend=False)

    def _collect_committed(self) -> list[Action]:
        """My stage has committed a sum I do not hold: fetch it from whoever holds it (rule 16)."""
        commit = self.barrier.of(self.stage)
        if commit is None or self._holds(commit):
            return []
        if self.promised is None:
            return []
        holders = sorted(p for p, seen in self.view.mates() if seen.synced and not seen.dead)
        return self.part.collect(Round(self.stamp, self.promised, commit.id, (), (), ()), holders)

    def _try_apply(self) -> list[Action]:
        commit = self.barrier.of(self.stage)
        if commit is None or not self._holds(commit) or not self.barrier.complete:
            return []
        self.applying = True
        return [act.Apply(self.barrier.known)]
