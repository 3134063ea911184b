"""Gets the replicas of one peer their state: when the process starts, when one lags, and when the run goes back.

Asks `state.rollback` where from, does it, and asks again until the replica serves. One task per stage at a time; a
restart of the run replaces it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from swarmnet.directory import Record
from swarmnet.ids import NO_RESTART, PeerId, Restart
from swarmnet.messages import Stamp
from swarmnet.state.rollback import Holding, Move, RestartReport, Rollbacks, Source, of_one_lineage

if TYPE_CHECKING:
    from swarmnet.peer.peer import Peer

_WHY = {
    Move.GO_BACK: "most go on from there",
    Move.KEEP: "most went back; this side has got further and keeps its state",
    Move.TAKE_BACK: "taken back: most of the others have not come along",
}


_NOWHERE = (
    "no version before that step is on disk in every stage, or the run has been there too often: its false work stays "
    "in the weights; for the next time let peers keep more checkpoints (caps.keep_checkpoints)"
)
_TOO_FEW = (
    "too few of the other peers want to go back before that step: its false work stays in the weights; to be rid of it "
    "stop all peers, delete later checkpoints and start them again (docs/checkpoints.md)"
)

_DAMAGED = (
    "all checkpoints of stage {stage} in this --dir are damaged, and no peer serves it: start a peer that has a sound "
    "one, or this one with a new --dir to begin at step 0"
)


class StateSupply:
    """Keeps every replica of a peer supplied with state."""

    def __init__(self, peer: Peer) -> None:
        self._peer, self._replicas = peer, peer.replicas
        stages, training, timers = peer.manifest.cut.stages, peer.manifest.training, peer.timers
        self.rollbacks = Rollbacks(
            stages,
            training.total_steps,
            me=peer.me,
            settle_s=timers.suspect_s,
            lost_s=timers.long_silence_s,
            allow_drop=training.allow_drop,
            seed_until=training.checkpoint_every,
            undoes=peer.manifest.audit.on_late == "rollback",
        )
        self.opened = asyncio.Event()
        """Is it known what is on this peer's disk?"""
        self._opened_at, self._settle_s = 0.0, self.rollbacks.settle_s / 2
        self._unopened = 0
        self._heard_at: dict[PeerId, float] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._words: dict[int, tuple[str, float]] = {}
        """Why each stage waits, and when to say it; infinity: it is said."""

    def begin(self) -> None:
        """The process has started: no replica here has state yet."""
        self._unopened = len(self._replicas)
        for stage in self._replicas:
            self._replace(stage, self._start(stage))

    def lags(self, stage: int, donors: tuple[PeerId, ...]) -> None:
        """The replica is behind or on the losing side of a fork."""
        if not self._busy(stage):
            self._replace(stage, self._resync(stage, donors))

    def orphaned(self, stage: int) -> None:
        """The replica cannot catch up: only a replica that got further helps, or the run going back."""
        self.rollbacks.in_vain = True
        self._replace(stage, self._bring_up(stage, beyond=self._replicas[stage].state.held))
        self._peer.news.set()

    def hear(self, peer: PeerId) -> None:
        """A heartbeat, under whatever restart. Only of those who have a record is it of any interest."""
        # Strangers would fill the table.
        if peer in self._heard_at:
            self._heard_at[peer] = asyncio.get_running_loop().time()

    def consider(self) -> None:
        """Look at who holds and says what, if I know it of myself: may the run be stuck for good, or have gone back?"""
        for replica in self._replicas.values():
            self.rollbacks.learn(*map(replica.member.membership.latest, range(self.rollbacks.num_stages)))
        # What is on my own disk may change the answer, and so may what peers of far stages announce.
        if not self.opened.is_set() or not self._peer.sees_all:
            return
        before, wanted, now = self.rollbacks.current, self.rollbacks.wanted, asyncio.get_running_loop().time()
        serving = any(replica.member.synced for replica in self._replicas.values())
        move, holdings, records, spoilt = None, self.holdings(), self._peer.records, self.rollbacks.spoilt
        self._heard_at = {peer: self._heard_at.get(peer, now) for peer, record in records.items() if record.stages}
        # Where no peer names a restart, no report moves me unless I want one myself.
        if calm := before == NO_RESTART == self._peer.named:
            self.rollbacks.want(holdings, now=now)
        if not calm or self.rollbacks.wanted is not None:
            move = self.rollbacks.decide(holdings, self._words_of_others(now), serving=serving, now=now)
        if move is not None:
            self._follow(move, since=before)
        elif self.rollbacks.wanted != wanted:
            self._peer.news.set()
        for stage, replica in self._replicas.items():
            if not self._busy(stage):
                replica.state.checkpoints.spared = -1 if self.rollbacks.spoilt is None else self.rollbacks.spoilt
        if move is None and spoilt is not None and self.rollbacks.spoilt is None:
            nowhere = self.rollbacks.before(spoilt, holdings) is None
            self._peer.say("stays_applied", {"step": spoilt, "reason": _NOWHERE if nowhere else _TOO_FEW})

    def taint(self, stamp: Stamp, peer: PeerId, *, applied: bool) -> None:
        """That peer is banned for its work of that step. applied: is it known that its aggregate was applied here?"""
        before = self.rollbacks.tainted
        self.rollbacks.voters.pop(peer, None)  # it does not decide whether its own work is undone
        self.rollbacks.taint(stamp.restart, stamp.stage, stamp.step, applied=applied)
        if self.rollbacks.tainted != before:
            self._peer.say("tainted", {"step": stamp.step, "stage": stamp.stage, "peer": peer})
            self._peer.look()

    def holdings(self) -> list[Holding]:
        """Who holds what: the live peers of all stages, myself included. What is on disk is of one lineage."""
        announced = [
            (self._here(stage), replica.state.checkpoints.on_disk) for stage, replica in self._replicas.items()
        ]
        heard = self._known_peers()
        for peer, record in self._peer.records.items():
            # Of the many that serve far stages there is only their record.
            far = peer not in heard
            # Nothing is fetched from a banned peer, whatever it announces.
            if self._peer.admitted(peer) and (far or not self.dead(record)):
                for status in record.stages:
                    version = status.version if status.synced else None
                    held = Holding(peer, status.stage, record.restart, version)
                    announced.append((held if far else self._latest(record, held), status.disk))
        for _, disk in announced:
            for kept in disk:
                self.rollbacks.remember(kept.restart.number)  # the next one must not be taken for one of those
        return of_one_lineage(announced, self.rollbacks)

    # ------------------------------------------------------------ inside

    def _known_peers(self) -> set[PeerId]:
        """Peers with heartbeats that have arrived here."""
        return {peer for replica in self._replicas.values() for _, peer, _ in replica.member.view.known()}

    def _here(self, stage: int) -> Holding:
        """What this peer has of a stage, but for its disk."""
        replica = self._replicas[stage]
        member = replica.member
        return Holding(
            self._peer.me,
            stage,
            member.restart if member.synced else self.rollbacks.current,
            member.version if member.synced else None,
        )

    def _latest(self, record: Record, held: Holding) -> Holding:
        """The record's holding, or that of a newer heartbeat; in a network partition the record is the newer one."""
        now = asyncio.get_running_loop().time()
        for replica in self._replicas.values():
            seen = replica.member.view.get(record.peer, held.stage)
            heard = seen is not None and replica.member.view.in_touch(record.peer, now=now, stage=held.stage)
            if seen is not None and heard and seen.synced and seen.incarnation == record.incarnation:
                held = Holding(record.peer, held.stage, replica.member.restart, seen.version)
        return held

    def dead(self, record: Record) -> bool:
        """Is the process behind this record known to have ended?"""
        views, life = [replica.member.view for replica in self._replicas.values()], (record.peer, record.incarnation)
        return any(life in view.ended(status.stage) for view in views for status in record.stages)

    def _words_of_others(self, now: float) -> list[RestartReport]:
        """The restarts that others report. If a peer's heartbeats should arrive here and do not, it is not in touch,
        even if its record says otherwise."""
        return [
            RestartReport(
                record.restart,
                record.wants,
                peer=record.peer,
                heard=self.in_touch(record, now=now),
                holds=bool(record.restart.number) or any(status.synced for status in record.stages),
            )
            for record in self._peer.records.values()
            if record.stages
        ]

    def in_touch(self, record: Record, *, now: float) -> bool:
        """Do that peer's heartbeats arrive, if they should arrive here?"""
        ended = record.peer in self._known_peers() and self.dead(record)
        lately = now - self._heard_at.get(record.peer, now) <= self.rollbacks.lost_s
        return not ended and (lately or not any(self._peer.expects(record.peer, of.stage) for of in record.stages))

    def _may_seed(self) -> bool:
        """Do I see a peer of every stage, or have I looked for a while? A peer may have more on disk."""
        seen = {status.stage for record in self._peer.records.values() for status in record.stages}
        complete = len(seen | self._replicas.keys()) == self.rollbacks.num_stages
        return complete or asyncio.get_running_loop().time() - self._opened_at >= self._settle_s

    def _follow(self, move: Move, *, since: Restart) -> None:
        restart, keep = self.rollbacks.current, move is Move.KEEP
        new = not any(each.member.synced or each.state.checkpoints.on_disk for each in self._replicas.values())
        why = "the run went back before this peer had any state" if new else _WHY[move]
        self._peer.say("restart", {"number": restart.number, "version": restart.version, "kept": keep, "reason": why})
        for stage in self._replicas:
            self._replace(stage, self._go(stage, restart, since=since, keep=keep))
        self._peer.news.set()

    def _busy(self, stage: int) -> bool:
        task = self._tasks.get(stage)
        return task is not None and not task.done()

    def _replace(self, stage: int, work: Coroutine[Any, Any, None]) -> None:
        if self._busy(stage):
            self._tasks[stage].cancel()
        self._tasks[stage] = self._peer.spawn(work)

    async def _start(self, stage: int) -> None:
        checkpoints = self._replicas[stage].state.checkpoints
        await checkpoints.open()
        self.rollbacks.remember(checkpoints.memory.restart)
        self.rollbacks.recall([PeerId(voter) for voter in checkpoints.memory.voters])
        self._unopened -= 1
        if not self._unopened:
            self._opened_at = asyncio.get_running_loop().time()
            self.opened.set()
        await self.opened.wait()
        await self._peer.refresh(whole=True)
        await self._bring_up(stage)

    async def _go(self, stage: int, restart: Restart, *, since: Restart, keep: bool) -> None:
        replica = self._replicas[stage]
        keep = keep and replica.member.synced
        # The newer state goes to disk: the run may come back to it.
        if restart > since and not keep:
            replica.state.checkpoints.spared = restart.version
            await replica.state.put_by(restart)
        await replica.driver.follow(restart)
        replica.state.forget_past()
        # Before anything is computed under it: the next restart must not have the same number.
        await replica.state.checkpoints.remember(restart)
        replica.state.checkpoints.stand_under(restart)
        if keep:
            replica.state.stay()
            return
        await self._bring_up(stage)

    async def _resync(self, stage: int, donors: tuple[PeerId, ...]) -> None:
        replica = self._replicas[stage]
        if not await replica.state.restore_from(donors) and not replica.member.synced:
            replica.state.stay()

    async def _bring_up(self, stage: int, *, beyond: int | None = None) -> None:
        """Ask where from, take it, and again until there is state. beyond: what is not newer than this is no help."""
        # Until then the step would wait for it. Ranks may take minutes to start.
        await self._replicas[stage].compute.ready()
        while True:
            self.consider()
            if self._tasks[stage] is not asyncio.current_task():
                return  # the run goes on from elsewhere: another task has this replica now
            holdings = self.holdings()
            mine = next(h for h in holdings if (h.peer, h.stage) == (self._peer.me, stage))
            others = [h for h in holdings if h.peer != mine.peer]
            state = self._replicas[stage].state
            # The run has been further, and a peer that has that may come yet.
            damaged = _DAMAGED.format(stage=stage) if state.checkpoints.all_damaged else ""
            no_seed = damaged or state.no_initial_weights
            source = self.rollbacks.source(mine, others, held=state.held, beyond=beyond, no_seed=no_seed)
            # A replica serves only if others can call it.
            if source.kind != "nowhere":
                await self._peer.dialled_back.check()
            # It serves now.
            if await self._take(stage, source):
                self._peer.dialled_back.settle()
                self._words.pop(stage, None)
                self._peer.news.set()
                return
            await asyncio.sleep(self._peer.timers.beat_s)
            await self._peer.refresh(whole=True)

    async def _take(self, stage: int, source: Source) -> bool:
        """True if the replica serves now."""
        state = self._replicas[stage].state
        match source.kind:
            case "replicas":
                self.rollbacks.in_vain = not await state.restore_from(source.peers, version=source.version)
                return not self.rollbacks.in_vain
            case "here":
                state.stay()
                return True
            case "disk":
                becomes = max(source.version, self.rollbacks.current.version)
                return await state.load(source.version, becomes=becomes)
            case "seed":
                # A checkpoint of any peer is worth more than the seed.
                return self._may_seed() and await state.start_from_seed()
            case "nowhere":
                # After a restart of all peers most of it is over in a moment.
                self._say_waiting(stage, source.words, after_s=self.rollbacks.settle_s)
                return False

    def _say_waiting(self, stage: int, words: str, *, after_s: float = 0.0) -> None:
        """Say each reason once, when it has lasted that long."""
        now = asyncio.get_running_loop().time()
        known, say_at = self._words.get(stage, ("", 0.0))
        if known != words:
            say_at = now + after_s
        if now >= say_at:
            say_at = math.inf
            self._peer.say("waiting", {"stage": stage, "reason": words})
        self._words[stage] = words, say_at
