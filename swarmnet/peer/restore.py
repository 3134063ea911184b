"""The state of one replica: where it comes from, when it may be served, and what others are handed of it.

A replica begins with the weights of version 0, with a checkpoint from its own disk, or with a copy of its mates' state:
then it fetches the copy, replays what was summed since, and serves once it is level. It decides neither when state is
needed nor who might have it: that is `state_supply`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from swarmnet.averaging.exchange import Exchange
from swarmnet.errors import BadCheckpoint, BadMessage, Refused, RejectCode, SwarmError, UsageError
from swarmnet.ids import Chain, PeerId, Restart, RunId, Signer, first_chain, next_chain
from swarmnet.messages import Answer, Commit, Finished, Round, Snapshot, SnapshotRequest, Stamp, TrailRequest, TrailStep
from swarmnet.stage.seams import Compute, Engine
from swarmnet.state.checkpoints import Checkpointer, CheckpointSchedule
from swarmnet.state.disk import Disk, Written
from swarmnet.state.header import StateHeader
from swarmnet.state.replay import Level, Replay, ReplayLogEnds
from swarmnet.state.snapshot_fetch import Donors, Fetcher, TransferProgress
from swarmnet.state.snapshot_index import Seal
from swarmnet.state.snapshot_source import Donor
from swarmnet.step.driver import StepDriver
from swarmnet.step.gate import Shape, commit_refusal
from swarmnet.step.member import Member
from swarmnet.step.membership import evidence
from swarmnet.transport import Transport

Event = Callable[[str, dict[str, object]], None]


class Restorer:
    """Gives one replica its state, keeps it on disk, and hands it to mates.

    Args:
        common: tells the newest version that every stage is known to have on some disk.
        schedule, keep: at which versions a checkpoint is written, and how many stay.
        piece_bytes: of the pieces in which state is handed over.
        no_beginning: why this peer has no weights of version 0 and takes them from mates, in words for a person; empty:
            it has them.
    """

    def __init__(
        self,
        run: RunId,
        stage: int,
        shape: Shape,
        *,
        engine: Engine,
        member: Member,
        driver: StepDriver,
        exchange: Exchange,
        transport: Transport,
        signer: Signer,
        disk: Disk,
        schedule: CheckpointSchedule,
        keep: int,
        common: Callable[[], int | None],
        piece_bytes: int,
        no_beginning: str,
        event: Event,
    ) -> None:
        self._engine, self._sums = engine.compute, engine.sums
        self._member, self._driver, self._exchange = member, driver, exchange
        self._shape, self._event, self.no_beginning = shape, event, no_beginning
        self._first_chain = first_chain(run, stage)
        seal = Seal(run, signer)
        self.checkpoints = Checkpointer(
            stage, self._engine, self._sums, self.header, disk, schedule, keep=keep, on_event=event, common=common
        )
        self.donor = Donor(stage, self._engine, self.header, seal, stored=self._checkpoint, piece_bytes=piece_bytes)
        self._mates = FetchAndReplay(
            transport,
            self._engine,
            exchange,
            seal,
            stage=stage,
            shape=shape,
            restart=lambda: member.restart,
            touch=self._touch,
            stand=self._stand,
            event=event,
        )
        self._whole = False  # is the state in the engine one that can be served?
        self._restoring = False
        self._touched = False  # does the engine hold other weights than it was built with?
        self._still = False  # no longer served, and nothing changes it: it may still be written

    @property
    def held(self) -> int | None:
        """Version of the weights in the engine, None while there are none that could be served."""
        return self._member.version if self._whole else None

    async def start_from_seed(self) -> bool:
        """Serve the weights of version 0, which every engine is built with. False: this peer has them no longer."""
        if self._touched or self._member.version:
            self._whole = False
            try:
                await self._engine.reset_to_seed()
            except UsageError as error:  # the checkpoint that the run began with was moved, or is another one now
                self.no_beginning = str(error)
                return False
        self._serve(StateHeader(0, self._first_chain, self._first_chain, self._first_chain))
        self._event("synced", {"version": 0, "how": "seed", "seconds": 0.0, "bytes": 0})
        return True

    def stay(self) -> None:
        """Go on with the weights that are here: nobody could hand over newer ones, or the run goes on from these."""
        member = self._member
        self._serve(StateHeader(member.version, member.chain, member.before, member.term_chain))

    async def load(self, version: int, *, becomes: int) -> bool:
        """Serve this peer's checkpoint of `version` as version `becomes`. False if it cannot be used.

        A later `becomes` drops what the stage has learned in between: the run allows it (training.allow_drop).
        """
        began = self._now()
        try:
            info, data = await self.checkpoints.load(version)
            await self._take_over(data, version=version, becomes=becomes)
        except BadCheckpoint:
            return False  # named already; announced no more
        except BadMessage as error:
            path = self.checkpoints.path(version)
            self.checkpoints.forget(version, BadCheckpoint(path, f"not this stage's state: {error.reason}"))
            return False
        header = info.header
        if becomes == version:
            await self._recall(version)
        else:
            microbatches = self._shape.num_microbatches
            self._event(
                "dropped",
                {
                    "from": version,
                    "to": becomes,
                    "microbatches": (becomes - version) * microbatches,
                    "reason": "nobody had newer state of this stage (training.allow_drop)",
                },
            )
            header = _inexact(header.chain, "dropped", becomes)
        self._serve(header)
        self._event(
            "synced",
            {
                "version": becomes,
                "how": "checkpoint",
                "path": self.checkpoints.path(version),
                "seconds": round(self._now() - began, 3),
                "bytes": len(data),
            },
        )
        return True

    async def _recall(self, version: int) -> None:
        """Take up again what this replica's averaging codec owed when it wrote that checkpoint."""
        owed = await self.checkpoints.owed(version)
        if owed is None:
            return
        try:
            await self._sums.recall(owed)
        except BadMessage as error:
            path = self.checkpoints.path(version)
            self.checkpoints.say_not_owed(BadCheckpoint(path, f"what was owed beside it is not so: {error.reason}"))

    async def _take_over(self, data: bytes | memoryview, *, version: int, becomes: int) -> None:
        self._touch()
        await self._engine.restore(data, version=version, becomes=becomes)

    def _serve(
        self,
        header: StateHeader,
        finished: Finished | None = None,
        commits: tuple[Commit, ...] = (),
        last_commits: tuple[Commit, ...] = (),
    ) -> None:
        self._whole = True
        self.checkpoints.stand_under(self._member.restart)
        self._driver.restored(
            header.version, header.chain, header.before, header.term_chain, finished, commits, last_commits
        )

    async def restore_from(self, donors: Sequence[PeerId], *, version: int = -1) -> bool:
        """Take over the state of `version` (-1: the newest) from all who have it, follow until level, and serve.

        False if nobody hands it over.
        """
        if self._restoring:
            return False
        self._restoring = True
        began = self._now()
        self._driver.suspend()
        try:
            level, num_bytes = await self._mates.run(
                lambda: self._sound(
                    [*donors, *(peer for peer, seen in self._member.view.mates() if seen.synced and not seen.dead)]
                ),
                version=version,
            )
        except SwarmError as error:
            self._mates.say_given_up(error)
            return False
        finally:
            self._restoring = False
        self._serve(level.header, level.finished, level.commits, level.last_commits)
        self._event(
            "synced",
            {
                "version": self._member.version,
                "how": "snapshot",
                "seconds": round(self._now() - began, 3),
                "bytes": num_bytes,
            },
        )
        return True

    def _sound(self, donors: Sequence[PeerId]) -> Sequence[PeerId]:
        """Those of them whose weights have not drifted, if there are such."""
        return [donor for donor in donors if not self._member.drift.strays(donor)] or donors

    async def put_by(self, restart: Restart) -> None:
        """Before the run goes back: write my newer version. If no other peer follows, the run may return to it."""
        if not self._member.synced or self._member.version <= restart.version:
            return
        await self._driver.settled()
        self._driver.suspend()
        self._still = True
        try:
            await self.checkpoints.write_now()
        finally:
            self._still = False

    def forget_past(self) -> None:
        """The run goes on from elsewhere: hand out nothing that was summed, copied or fetched by halves before."""
        self._exchange.forget()
        self.donor.forget()
        self._mates.forget()

    def _touch(self) -> None:
        """From now on the weights may not be served: a restore runs on in the compute thread even if cancelled."""
        self._touched, self._whole = True, False

    def _stand(self, header: StateHeader) -> None:
        """The engine holds this version now; not to be served before it is level with the others."""
        self._touch()
        member = self._member
        member.version, member.chain, member.before, member.term_chain = (
            header.version,
            header.chain,
            header.before,
            header.term_chain,
        )

    async def write_last(self) -> Written | None:
        """Write the newest whole version, as nothing can be computed here any more. None: there is none.

        Also one that could not be led on from. Lets a running apply end first.
        """
        await self._driver.settled()
        self._still = True
        return await self.checkpoints.write_now()

    def header(self) -> StateHeader | None:
        member = self._member
        stands = self._still and self._whole and self._driver.is_settled  # also after an apply that failed
        if not stands and (not member.synced or member.applying):
            return None
        return StateHeader(member.version, member.chain, member.before, member.term_chain, member.restart)

    async def _checkpoint(self, version: int) -> tuple[StateHeader, memoryview] | None:
        """This peer's checkpoint, to be handed to a mate."""
        if version not in self.checkpoints.versions:
            return None
        try:
            info, data = await self.checkpoints.load(version)
        except BadCheckpoint:
            return None  # named already; announced no more
        return info.header, data

    def snapshot(self, caller: PeerId, request: SnapshotRequest) -> AsyncGenerator[Answer, None]:
        """Answer one `SnapshotRequest`; see Donor.serve."""
        self._exchange.replay_log.wanted()
        return self.donor.serve(caller, request)

    async def trail(self, request: TrailRequest) -> AsyncGenerator[Answer, None]:
        """Answer one `TrailRequest`."""
        member = self._member
        here = member.stamp if member.synced else None
        yield self._exchange.follow(
            request, here, TrailStep(member.finished, member.barrier.known, member.last_commits)
        )

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class FetchAndReplay:
    """Brings one (peer, stage) to where its mates are. Decides neither when state is needed nor who might have it.

    Args:
        restart: tells the restart of the run that the replica follows.
        touch: is told that from now on the engine may hold other weights than those the replica stands on, also if
            whoever wanted them gives up.
        stand: is told where the engine stands now.
        event: `fetching`, `following` and `fetching_again` say how far it is, `join_failed` who did not deliver.
    """

    def __init__(
        self,
        transport: Transport,
        engine: Compute,
        exchange: Exchange,
        seal: Seal,
        *,
        stage: int,
        shape: Shape,
        restart: Callable[[], Restart],
        touch: Callable[[], None],
        stand: Callable[[StateHeader], None],
        event: Event,
    ) -> None:
        self._engine, self._exchange, self._shape = engine, exchange, shape
        self._restart, self._touch, self._stand, self._event = restart, touch, stand, event
        self._fetcher = Fetcher(
            transport,
            stage,
            seal,
            max_bytes=engine.snapshot_bytes(stage),
            failed=self.say_failed,
            progress=self._say_progress,
            unfit=self.unfit,
        )
        self._replay = Replay(
            transport,
            engine,
            stage,
            shape.num_stages,
            collect=self._collect,
            after=self._after,
            moved=self._moved,
            failed=self._fetcher.failed,
            refusal=lambda commit: commit_refusal(commit, shape),
        )
        self._failed: set[tuple[object, ...]] = set()

    async def run(self, donors: Donors, *, version: int = -1) -> tuple[Level, int]:
        """Fetch and follow; returns where the engine stands then, and the bytes of the copy.

        donors() is asked again and again. Raises NoReplica if they hand nothing over, or what the last of them raised;
        the engine may then stand at an older version (`stand` was told).
        """
        while True:
            snapshot, data = await self._fetcher.fetch(donors, version=version)
            num_bytes = len(data)
            # A checkpoint of a mate may be older than the restart that goes on from it.
            header = StateHeader.of(snapshot, self._restart())
            self._touch()
            try:
                await self._engine.restore(data, version=snapshot.version)
            except BadMessage as error:
                self._fetcher.useless(error)
                continue
            del data
            self._stand(header)
            try:
                level = await self._replay.run(header, lambda: self._fetcher.trusted(donors()))
            except ReplayLogEnds as error:
                self._event("fetching_again", {"version": snapshot.version, "reason": str(error)})
                continue
            self._failed.clear()
            return level, num_bytes

    def forget(self) -> None:
        """The run has gone back: half a copy of a past that was given up is of no use."""
        self._fetcher.forget()

    def unfit(self, snapshot: Snapshot, version: int) -> Refused | BadMessage | None:
        """Why a described copy is not to be had. One asked for by number may come from a disk, and is then as good as
        any up to where the run has last gone back to; the newest one is of the present, or of no use."""
        if snapshot.version > self._shape.total_steps:
            return BadMessage(RejectCode.MALFORMED, "a copy of a step after the last", version=snapshot.version)
        restart = self._restart()
        if snapshot.restart == restart or (version >= 0 and snapshot.version <= restart.version):
            return None
        return Refused(RejectCode.STALE, "a copy from before the run went back", version=snapshot.version)

    def say_failed(self, donor: PeerId, error: SwarmError) -> None:
        """Once per donor and kind of failure until a join succeeds: it is tried again at every heartbeat."""
        self._say({"donor": donor, "reason": str(error)}, donor, type(error), error.facts.get("code"))

    def say_given_up(self, error: SwarmError, words: str = "") -> None:
        """No donor has delivered. Once per reason until a join succeeds."""
        self._say({"reason": f"{words}{error}"}, words, type(error), error.message)

    # ------------------------------------------------------------ inside

    async def _collect(self, stamp: Stamp, finished: Finished, holders: Sequence[PeerId]) -> None:
        wanted = Round(stamp, finished.id.ballot, finished.id, (), (), tuple(holders))
        if await self._exchange.collect_from(wanted, finished.digest, *holders) != finished:
            raise BadMessage(RejectCode.MALFORMED, "not the sum its holders describe", step=stamp.step)

    def _after(self, header: StateHeader, commits: tuple[Commit, ...]) -> StateHeader:
        """Where a replica stands that has applied on these commits of all stages; as Member.applied."""
        chain = next_chain(header.chain, evidence(commits))
        begins_term = (header.version + 1) % self._shape.keeper_term_steps == 0
        return StateHeader(
            header.version + 1, chain, header.chain, chain if begins_term else header.term_chain, header.restart
        )

    def _moved(self, header: StateHeader) -> None:
        self._stand(header)
        self._event("following", {"version": header.version})

    def _say(self, fields: dict[str, object], *known: object) -> None:
        if known not in self._failed:
            self._failed.add(known)
            self._event("join_failed", fields)

    def _say_progress(self, progress: TransferProgress) -> None:
        left = progress.seconds_left
        self._event(
            "fetching",
            {
                "version": progress.version,
                "bytes": progress.done_bytes,
                "total": progress.total_bytes,
                "donors": progress.donors,
                "seconds_left": None if left is None else round(left, 1),
            },
        )


def _inexact(chain: Chain, how: str, version: int) -> StateHeader:
    """Where a stage stands whose state is not that of one process any more: on a chain of its own."""
    apart = next_chain(chain, f"{how}/{version}".encode())
    return StateHeader(version, apart, apart, apart)
