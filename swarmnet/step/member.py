"""One replica's side of the step: claims, grants, its part in rounds, the barrier, and the keeper if it is one. Pure.

Events come in as method calls with `now`; each returns actions for the driver. All protocol state is of one
(peer, stage) and one step; only version, chain, generation and incarnation outlive a step (docs/protocol.md). It
knows nothing of tensors: the driver tells it what compute has done.
"""

from __future__ import annotations

from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId, next_chain
from swarmnet.messages import (
    NONE,
    Claim,
    Commit,
    Committed,
    Control,
    Evicted,
    Execute,
    Finished,
    Granted,
    Heartbeat,
    Indexes,
    Moved,
    Prepare,
    Release,
    Report,
    Round,
    Stamp,
)
from swarmnet.step import actions as act
from swarmnet.step.actions import Action, Broadcast, Note, Send
from swarmnet.step.barrier import Barrier, evidence
from swarmnet.step.gate import Shape, refusal
from swarmnet.step.keeper import Keeper
from swarmnet.step.view import Timers, View


class Member:
    """The step machine of one replica of one stage."""

    def __init__(
        self, me: PeerId, stage: int, shape: Shape, timers: Timers, *, incarnation: int, chain: Chain, now: float
    ) -> None:
        self.me, self.stage, self.shape, self.timers = me, stage, shape, timers
        self.view = View(me, stage, timers)
        self.generation = Generation(incarnation, 0)
        self.version, self.chain, self.term_chain = 0, chain, chain
        self.synced = False
        self.progress = 0
        self.queue = 0
        self.draining = False
        self.last_commits: tuple[Commit, ...] = ()
        self.last_finished: Finished | None = None
        self._last_stamp: Stamp | None = None
        self._claimed_at: float | None = None
        self._claim_gap_s: float | None = None
        self._resync_at = -1e9
        self._behind_since: float | None = None
        self._begin(now)

    def _begin(self, now: float) -> None:
        self.began_at = now
        self._claimed_at = None
        self.promised: Ballot | None = None
        self.promised_at = now
        self.keeper: Keeper | None = None
        self.asked: set[int] = set()
        self.granted: set[int] = set()
        self.summed: set[int] = set()
        self.non_finite: set[int] = set()
        self.round: Round | None = None
        self.exchange: RoundId | None = None
        self.collecting: frozenset[PeerId] = frozenset()  # from whom, while a finished sum is fetched
        self.finished: Finished | None = None
        self.barrier = Barrier(self.version, self.shape.num_stages)
        self.applying = False
        self._next_prepare: Prepare | None = None
        self._next_commits: dict[int, Commit] = {}

    # ------------------------------------------------------------ what others may know

    @property
    def stamp(self) -> Stamp:
        """What my messages are about."""
        return Stamp(self.version, self.stage, self.chain)

    @property
    def done(self) -> bool:
        """The run has reached its last version."""
        return self.version >= self.shape.total_steps

    def sum_of(self, stamp: Stamp, round_id: RoundId) -> Finished | None:
        """The finished sum of that round of this step or the last one. Round ids repeat from step to step."""
        finished = {self.stamp: self.finished, self._last_stamp: self.last_finished}.get(stamp)
        return finished if finished is not None and finished.id == round_id else None

    def heartbeat(self, to: PeerId | None = None) -> Heartbeat:
        """My heartbeat, with the last step's commits if `to` is not known to have applied them."""
        behind = to is None or self.view.everyone().get(to, -1) < self.version
        return Heartbeat(
            stamp=self.stamp,
            incarnation=self.generation.incarnation,
            synced=self.synced,
            keeper=self.promised,
            commits=self.barrier.known,
            last_commits=self.last_commits if behind else (),
            queue=self.queue,
            draining=self.draining,
        )

    # ------------------------------------------------------------ events from my own replica

    def restored(
        self, version: int, chain: Chain, term_chain: Chain, finished: Finished | None, commits: tuple[Commit, ...],
        *, now: float,
    ) -> list[Action]:
        """State of `version` is in place (seed or snapshot), with the step's finished sum if there is one."""
        self.generation = self.generation.next()
        self.version, self.chain, self.term_chain, self.synced = version, chain, term_chain, True
        self.last_commits, self.last_finished, self._behind_since = (), None, None
        self._begin(now)
        self.finished = finished
        for commit in commits:
            self.barrier.add(commit)
        return [act.StopSum(), Broadcast(self.heartbeat()), *self._advance(now)]

    def claim(self, index: int, *, now: float) -> list[Action]:
        """Work on `index` has begun: ask to count it (rule 3)."""
        if index in self.granted:
            return [act.Granted(index)]
        if self._claimed_at is not None:
            self._claim_gap_s = max(0.9 * (self._claim_gap_s or 0.0), now - self._claimed_at)
        self._claimed_at = now
        self.asked.add(index)
        return self._ask(index)

    def withdraw(self, index: int) -> list[Action]:
        """The work was dropped. A grant that still comes is ignored; the keeper hears of it, now or later."""
        self.asked.discard(index)
        if index not in self.granted or index in self.summed:
            return []
        self.granted.discard(index)
        return self._release(frozenset({index}))

    def add(self, index: int, *, now: float) -> list[Action]:
        """The weight gradient of `index` is in the accumulator, which has not been voided since."""
        self.progress += 1
        if index not in self.granted:
            return self._void_myself()
        self.summed.add(index)
        return self._join_round(now) if self.round is not None else []

    def found_non_finite(self, index: int, *, now: float) -> list[Action]:
        """`index` gave a non-finite value here."""
        actions = self.withdraw(index)
        self.non_finite.add(index)
        return [*actions, *self._report()]

    def sum_whole(self, finished: Finished, *, now: float) -> list[Action]:
        """The exchange of a round, or the collection of a finished sum, is complete and digest-checked."""
        self.exchange = None
        wanted = self._wanted_sum()
        mine = self.barrier.of(self.stage)
        foreign = mine is not None and finished.digest != mine.digest  # not what my stage has committed
        if wanted is None or finished.id != wanted or foreign:
            return self._join_round(now) if self.round else []
        self.finished = finished
        return [*self._report(), *self._advance(now)]

    def sum_failed(self, round_id: RoundId, *, now: float) -> list[Action]:
        """The exchange gave up; the next Round message (or tick) starts it again."""
        if self.exchange == round_id:
            self.exchange = None
        return []

    def applied(self, *, now: float) -> list[Action]:
        """The optimizer step is done: the next version begins."""
        assert self.applying and self.barrier.complete
        self.last_commits, self.last_finished, self._last_stamp = self.barrier.known, self.finished, self.stamp
        self.chain = next_chain(self.chain, evidence(self.last_commits))
        self.version += 1
        if self.version % self.shape.keeper_term_steps == 0:
            self.term_chain = self.chain
        prepare, commits = self._next_prepare, self._next_commits
        self._behind_since = None
        self._begin(now)
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
        actions: list[Action] = []
        if self.promised is not None:
            actions += self._report()
            for index in sorted(self.asked):
                actions += self._ask(index)
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
            return self._on_commit(message.commit, now) if mate or message.commit.stage != self.stage else []
        if message.stamp.stage != self.stage or not mate:
            return []
        if isinstance(message, Prepare) and message.stamp.step == self.version + 1:
            best = self._next_prepare
            if best is None or message.ballot > best.ballot:
                self._next_prepare = message
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
                return self._on_evicted(message, now)
            case Round():
                return self._on_round(message, now)
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
        if mate and step > self.version:
            actions += self._catch_up(now)
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
            holds = self.finished is not None and self.finished.id == commit.id
            if known is not None and known.id != commit.id and holds:
                self.barrier.replace(commit)  # two commits of one stage: the one whose sum I hold (A4)
        news = self.barrier.add(commit)
        return self._advance(now) if news else []

    def _on_prepare(self, peer: PeerId, prepare: Prepare, now: float) -> list[Action]:
        if self.promised is not None and prepare.ballot < self.promised:
            return [Send(peer, self._make_report())]  # carries the higher ballot: the old keeper stops
        if prepare.ballot == self.promised:
            self.promised_at = now
            return self._report()
        return self._promise(prepare.ballot, now)

    def _promise(self, ballot: Ballot, now: float) -> list[Action]:
        if self.promised is not None and ballot <= self.promised:
            return []
        self.promised, self.promised_at = ballot, now
        actions = self._drop_round()
        if self.keeper is not None and self.keeper.ballot != ballot:
            self.keeper = None
            actions.append(Note("keeper_stopped", {"step": self.version, "for": ballot.peer}))
        actions += self._report()
        for index in sorted(self.asked):
            actions += self._ask(index)
        return actions

    def _on_granted(self, granted: Granted) -> list[Action]:
        ours = granted.ballot == self.promised and granted.generation == self.generation
        if not ours or granted.index not in self.asked or self.finished is not None or self.applying:
            return []  # the keeper hears of it by Release (A1)
        self.asked.discard(granted.index)
        self.granted.add(granted.index)
        # Who grants has no open round: what I take part in was given up. Whoever finishes it all the same wins.
        return [*self._drop_round(), act.Granted(granted.index)]

    def _on_moved(self, moved: Moved) -> list[Action]:
        if moved.ballot != self.promised or moved.generation != self.generation or moved.index not in self.asked:
            return []
        self.asked.discard(moved.index)
        return [act.Owned(moved.index, moved.owner)]

    def _on_evicted(self, evicted: Evicted, now: float) -> list[Action]:
        if evicted.ballot != self.promised or evicted.generation != self.generation:
            return []
        self.generation = self.generation.next()  # always: grants in flight for the old one are dead (A2)
        actions = self._drop_round()
        if evicted.void:
            self.granted.clear()
            self.summed.clear()
            actions.append(act.Void())
        actions.append(Note("evicted_me", {"void": evicted.void, "step": self.version}))
        return actions + self._report()

    def _on_round(self, message: Round, now: float) -> list[Action]:
        if message.ballot != self.promised:
            return []
        actions: list[Action] = []
        if self.exchange is not None and self.exchange != message.id:
            actions = self._drop_round()  # the keeper has given that one up; its set need not be mine any more
        self.round = message
        return actions + self._join_round(now)

    def _on_fork(self, peer: PeerId, beat: Heartbeat, now: float) -> list[Action]:
        """Rule 19: the lower of (has a commit, chain) resyncs; one with a commit never yields to one without."""
        theirs = any(commit.stage == self.stage for commit in beat.commits)
        mine = self.barrier.of(self.stage) is not None
        if (theirs, beat.stamp.chain) <= (mine, self.chain):
            return []
        return self._resync((peer,), "fork", now)

    def _catch_up(self, now: float) -> list[Action]:
        """Rule 18: a mate is ahead. Collect the sum if the commits are known, else fetch a snapshot."""
        if self.applying:
            return []
        if self._behind_since is None:
            self._behind_since = now
        ahead = [p for p, seen in self.view.mates() if seen.version > self.version and seen.synced and not seen.dead]
        newest = max((seen.version for p, seen in self.view.mates() if p in ahead), default=self.version)
        if newest > self.version + 1 or now - self._behind_since > 2 * self.timers.suspect_s:
            return self._resync(tuple(sorted(ahead)), "behind", now)
        return self._advance(now)

    def _resync(self, donors: tuple[PeerId, ...], reason: str, now: float) -> list[Action]:
        if not donors or now - self._resync_at < self.timers.suspect_s:
            return []
        self._resync_at = now
        return [act.Resync(donors, reason), Note("resync", {"reason": reason, "version": self.version})]

    # ------------------------------------------------------------ inside

    @property
    def _idle_limit_s(self) -> float:
        """How long nothing may be claimed before idle indexes are ordered: a multiple of the pauses between claims."""
        if self._claim_gap_s is None:
            return self.timers.idle_index_s
        # One step that was stuck must not make the next ones wait four times as long, and so on.
        return min(max(2 * self.timers.heartbeat_s, 4 * self._claim_gap_s), self.timers.long_silence_s)

    def _wanted_sum(self) -> RoundId | None:
        mine = self.barrier.of(self.stage)
        if mine is not None:
            return mine.id
        return self.round.id if self.round is not None else None

    def _ask(self, index: int) -> list[Action]:
        if self.promised is None:
            return []
        return [Send(self.promised.peer, Claim(self.stamp, self.promised, self.generation, index))]

    def _make_report(self) -> Report:
        assert self.promised is not None
        return Report(
            stamp=self.stamp,
            ballot=self.promised,
            generation=self.generation,
            owned=frozenset(self.granted | self.summed),
            summed=frozenset(self.summed),
            finished=self.finished,
            commit=self.barrier.of(self.stage),
            progress=self.progress,
            non_finite=frozenset(self.non_finite) if self.non_finite else NONE,
        )

    def _report(self) -> list[Action]:
        if self.promised is None or not self.synced:
            return []
        return [Send(self.promised.peer, self._make_report())]

    def _release(self, indexes: Indexes) -> list[Action]:
        if self.promised is None:
            return []
        return [Send(self.promised.peer, Release(self.stamp, self.promised, self.generation, indexes))]

    def _void_myself(self) -> list[Action]:
        """The accumulator holds what nobody granted: it is worth nothing (I3)."""
        self.generation = self.generation.next()
        self.granted.clear()
        self.summed.clear()
        return [*self._drop_round(), act.Void(), Note("voided_myself", {"step": self.version}), *self._report()]

    def _drop_round(self) -> list[Action]:
        self.round = None
        if self.exchange is None:
            return []
        self.exchange = None
        return [act.StopSum()]

    def _join_round(self, now: float) -> list[Action]:
        """Contribute, receive, collect or release, as the current round asks (rules 10, 14, 15)."""
        current = self.round
        if current is None or self.applying or (self.finished is not None and self.finished.id == current.id):
            return []
        if current.holders:
            return self._collect(current, [holder for holder in current.holders if holder != self.me])
        if self.finished is not None:
            return self._report()  # mine is whole, that one is not: the keeper adopts it (A5)
        if self.exchange == current.id or not current.contributions:
            return []
        mine = [indexes for peer, generation, indexes in current.contributions
                if peer == self.me and generation == self.generation]
        named = any(peer == self.me for peer, _, _ in current.contributions)
        if named and not mine:
            return []  # under a generation I have left: the keeper learns it from my report
        if mine:
            missing = mine[0] - self.granted - self.summed
            if missing:
                return self._release(missing)
            if not (self.summed == self.granted == mine[0]):
                return []
        elif self.granted or self.summed:
            return self._report()  # I hold indexes this round gives to others: the keeper must decide
        return self._start(current.id, act.Sum(current))

    def _collect(self, current: Round, holders: list[PeerId]) -> list[Action]:
        if not holders or (self.exchange == current.id and self.collecting & set(holders)):
            return []
        # Taking part in the round itself may wait for a contribution that is void by now, and those it was collected
        # from may all be gone: either way, start again with who holds it now.
        message = Round(current.stamp, current.ballot, current.id, (), (), tuple(holders))
        return self._start(current.id, act.CollectSum(message))

    def _start(self, round_id: RoundId, action: Action) -> list[Action]:
        stop: list[Action] = [act.StopSum()] if self.exchange is not None else []
        self.exchange = round_id
        self.collecting = frozenset(action.round.holders) if isinstance(action, act.CollectSum) else frozenset()
        return [*stop, action]

    def _advance(self, now: float, *, resend: bool = False) -> list[Action]:
        if not self.synced or self.done or self.applying:
            return []
        actions: list[Action] = self._elect(now)
        if self.keeper is not None:
            actions += self.keeper.advance(now=now, resend=resend)
        if resend and self.round is not None:
            actions += self._join_round(now)
        actions += self._collect_committed()
        return actions + self._try_apply()

    def _elect(self, now: float) -> list[Action]:
        """Rule 13: the first in order keeps; the next ones wait their turn when it is silent."""
        limit = self.timers.suspect_s
        order = self.view.keeper_order(self.term_chain, now=now)
        place = order.index(self.me)
        if self.promised is None:
            if place == 0 or now - self.began_at > (2 + place) * limit:
                return self._promote(0, now)
            return []
        keeper = self.promised.peer
        if keeper == self.me:
            # Promised by myself in a keeper object that was dropped: only a new ballot may keep again.
            return [] if self.keeper is not None else self._promote(self.promised.number + 1, now)
        seen = self.view.get(keeper)
        if seen is not None and seen.dead:
            return self._promote(self.promised.number + 1, now) if place == 0 else []
        if not self.view.alive(keeper, now=now):
            silent_since = seen.heard_at if seen is not None else self.promised_at
            if now - silent_since > (1 + place) * limit:
                return self._promote(self.promised.number + 1, now)
        return []

    def _promote(self, number: int, now: float) -> list[Action]:
        ballot = Ballot(number, self.me)
        if self.promised is not None and ballot <= self.promised:
            return []
        actions = self._drop_round()
        self.promised, self.promised_at = ballot, now
        self.keeper = Keeper(
            self.stamp, ballot, self.shape.num_microbatches, self.view, idle_s=self._idle_limit_s,
            max_void=self.shape.max_void, now=now,
        )
        actions.append(Note("keeper", {"step": self.version, "ballot": number}))
        actions += self._report()
        for index in sorted(self.asked):
            actions += self._ask(index)
        return actions + self.keeper.advance(now=now, resend=False)

    def _collect_committed(self) -> list[Action]:
        """My stage has committed a sum I do not hold: fetch it from whoever holds it (rule 16)."""
        commit = self.barrier.of(self.stage)
        if commit is None or (self.finished is not None and self.finished.id == commit.id):
            return []
        if self.promised is None:
            return []
        holders = sorted(p for p, seen in self.view.mates() if seen.synced and not seen.dead)
        return self._collect(Round(self.stamp, self.promised, commit.id, (), (), ()), holders)

    def _try_apply(self) -> list[Action]:
        commit = self.barrier.of(self.stage)
        if commit is None or self.finished is None or self.finished.id != commit.id or not self.barrier.complete:
            return []
        self.applying = True
        return [act.Apply(self.barrier.known)]
