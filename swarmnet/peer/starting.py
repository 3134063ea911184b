"""Gets the replicas of one peer their state: when the process starts, when one lags, and when the run goes back.

Asks `state.restart` where from, does it, and asks again until the replica serves. One task per stage at a time; a
restart of the run replaces it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from swarmnet.ids import PeerId, Restart
from swarmnet.net.directory import Record
from swarmnet.peer.replica import Replica
from swarmnet.pipeline.relay import Spawn
from swarmnet.state.pasts import of_one_past
from swarmnet.state.restart import (
    Disk,
    Heard,
    Holding,
    InPlace,
    Live,
    MateDisk,
    Reseed,
    Restarts,
    Seed,
    Source,
    Wait,
)

Say = Callable[[str, dict[str, object]], None]


@dataclass(frozen=True, slots=True)
class Means:
    """What this needs of its peer. look(): read the directory again. news(): my record has changed."""

    me: PeerId
    records: Callable[[], Mapping[PeerId, Record]]
    look: Callable[[], Awaitable[None]]
    say: Say
    spawn: Spawn
    news: Callable[[], None]


class Starting:
    """Keeps every replica of a peer supplied with state."""

    def __init__(self, replicas: Mapping[int, Replica], restarts: Restarts, means: Means, *, pause_s: float) -> None:
        self._replicas, self.restarts, self._means, self._pause_s = replicas, restarts, means, pause_s
        self.opened = asyncio.Event()
        self._opened_at, self._settle_s = 0.0, restarts.settle_s / 2
        self._unopened = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._words: dict[int, str] = {}

    def begin(self) -> None:
        """The process has started: nobody here has state yet."""
        self._unopened = len(self._replicas)
        for stage in self._replicas:
            self._replace(stage, self._start(stage))

    def lags(self, stage: int, donors: tuple[PeerId, ...]) -> None:
        """The replica is behind or on the losing side of a fork."""
        if not self._busy(stage):
            self._replace(stage, self._catch_up(stage, donors))

    def orphaned(self, stage: int) -> None:
        """The replica cannot be brought level: only a mate that got further helps, or the run going back."""
        self._replace(stage, self._bring_up(stage, beyond=self._replicas[stage].held))
        self._means.news()

    def hear(self, restart: Restart) -> None:
        """Somebody is under this restart of the run. Before the disks have been read nothing is made of it: it will be
        said again, and what is on them counts."""
        if not self.opened.is_set():
            return
        serving = any(replica.member.synced for replica in self._replicas.values())
        match self.restarts.hear(restart, self.everybody(), serving=serving):
            case Heard.FOLLOW:
                self._follow("others go on from there")
            case Heard.ADOPT:
                self._follow("others went back; this side has got further and keeps its state", keep=True)

    def consider(self) -> None:
        """Look at who holds what, if I know it of myself: may the run be stuck for good?"""
        if not self.opened.is_set():
            return
        for restart in {record.restart: None for record in self._means.records().values()}:     # mostly one
            self.hear(restart)
        holdings = self.everybody()
        if self.restarts.advance(holdings, now=asyncio.get_running_loop().time()) is not None:
            self._follow("a stage has lost its newest state")

    def everybody(self) -> list[Holding]:
        """Who holds what: the live peers of all stages, myself included. What is on disk is of one past."""
        announced = [(self._here(stage), replica.checkpoints.on_disk) for stage, replica in self._replicas.items()]
        announced += [
            (self._heard(record, status.stage, status.version if status.synced else None, status.reseed), status.disk)
            for record in self._means.records().values() if not self._dead(record) for status in record.stages
        ]
        for _, disk in announced:
            for kept in disk:
                self.restarts.remember(kept.restart.number)  # the next one must not be taken for one of those
        return of_one_past(announced, self.restarts.current, self.restarts.common)

    # ------------------------------------------------------------ inside

    def _here(self, stage: int) -> Holding:
        """What this peer has of a stage, apart from its disk."""
        replica = self._replicas[stage]
        member = replica.member
        return Holding(
            self._means.me, stage, member.restart if member.synced else self.restarts.current,
            member.version if member.synced else None, (), replica.reseeds,
        )

    def _heard(self, record: Record, stage: int, version: int | None, reseed: bool) -> Holding:
        """What a record says, or a heartbeat that is newer; behind a cut the record is."""
        restart, now = record.restart, asyncio.get_running_loop().time()
        for replica in self._replicas.values():
            seen = replica.member.view.get(record.peer, stage)
            heard = seen is not None and replica.member.view.alive(record.peer, now=now, stage=stage)
            if seen is not None and heard and seen.synced and seen.incarnation == record.incarnation:
                restart, version = replica.member.restart, seen.version
        return Holding(record.peer, stage, restart, version, (), reseed)

    def _dead(self, record: Record) -> bool:
        """Is the process behind this record known to have ended?"""
        return any(
            seen is not None and seen.dead and seen.incarnation == record.incarnation
            for replica in self._replicas.values() for status in record.stages
            for seen in (replica.member.view.get(record.peer, status.stage),)
        )

    def _may_seed(self) -> bool:
        """Do I see a peer of every stage, or have I looked for a while? Somebody may have more on disk."""
        seen = {status.stage for record in self._means.records().values() for status in record.stages}
        complete = len(seen | self._replicas.keys()) == self.restarts.num_stages
        return complete or asyncio.get_running_loop().time() - self._opened_at >= self._settle_s

    def _follow(self, why: str, *, keep: bool = False) -> None:
        restart = self.restarts.current
        self._means.say("restart", {"number": restart.number, "version": restart.version, "kept": keep, "reason": why})
        for stage in self._replicas:
            self._replace(stage, self._go_back(stage, restart, keep=keep))
        self._means.news()

    def _busy(self, stage: int) -> bool:
        task = self._tasks.get(stage)
        return task is not None and not task.done()

    def _replace(self, stage: int, work: object) -> None:
        if self._busy(stage):
            self._tasks[stage].cancel()
        self._tasks[stage] = self._means.spawn(work)  # type: ignore[arg-type]

    async def _start(self, stage: int) -> None:
        checkpoints = self._replicas[stage].checkpoints
        await checkpoints.open()
        self.restarts.remember(checkpoints.restart.number)
        self._unopened -= 1
        if not self._unopened:
            self._opened_at = asyncio.get_running_loop().time()
            self.opened.set()
        await self.opened.wait()
        await self._means.look()
        await self._bring_up(stage)

    async def _go_back(self, stage: int, restart: Restart, *, keep: bool) -> None:
        replica = self._replicas[stage]
        keep = keep and replica.member.synced
        await replica.driver.follow(restart)
        replica.forget_past()
        replica.checkpoints.go_back(restart)
        if keep:
            replica.stay()
            return
        await self._bring_up(stage)

    async def _catch_up(self, stage: int, donors: tuple[PeerId, ...]) -> None:
        replica = self._replicas[stage]
        if not await replica.restore_from(donors) and not replica.member.synced:
            replica.stay()

    async def _bring_up(self, stage: int, *, beyond: int | None = None) -> None:
        """Ask where from, take it, and again until there is state. beyond: what is not newer than this is no help."""
        while True:
            self.consider()
            if self._tasks[stage] is not asyncio.current_task():
                return  # the run goes on from elsewhere: another task has this replica now
            everybody = self.everybody()
            mine = next(h for h in everybody if (h.peer, h.stage) == (self._means.me, stage))
            others = [h for h in everybody if h.peer != mine.peer]
            source = self.restarts.source(mine, others, held=self._replicas[stage].held, beyond=beyond)
            if await self._take(stage, source):
                self._words.pop(stage, None)
                self._means.news()
                return
            await asyncio.sleep(self._pause_s)
            await self._means.look()

    async def _take(self, stage: int, source: Source) -> bool:
        """True if the replica serves now."""
        replica = self._replicas[stage]
        match source:
            case Live(donors):
                return await replica.restore_from(donors)
            case InPlace():
                replica.stay()
                return True
            case Disk(version):
                return await replica.load(version, becomes=self.restarts.current.version)
            case MateDisk(version, donors):
                return await replica.restore_from(donors, version=version)
            case Reseed(before, after):
                return await replica.reseed(before, after, version=self.restarts.current.version)
            case Seed():
                if not self._may_seed():
                    return False
                if not replica.no_beginning and await replica.start_from_seed():
                    return True
                return await self._begin_with_mates(stage)
            case Wait(words):
                self._say_waiting(stage, words)
                return False

    async def _begin_with_mates(self, stage: int) -> bool:
        """The weights of version 0 are not here: take those of whoever serves the stage. True if it serves now."""
        replica, restart = self._replicas[stage], self.restarts.current
        donors = tuple(sorted(
            h.peer for h in self.everybody()
            if h.stage == stage and h.peer != self._means.me and h.version is not None and h.restart == restart
        ))
        if donors and await replica.restore_from(donors):
            return True
        self._say_waiting(stage, replica.no_beginning)
        return False

    def _say_waiting(self, stage: int, words: str) -> None:
        if self._words.get(stage) != words:
            self._words[stage] = words
            self._means.say("waiting", {"stage": stage, "reason": words})
