"""The state of one replica: where it comes from, when it may be served, and what others are handed of it.

A replica begins with the weights of version 0, with a checkpoint from its own disk, or with a copy of its mates' state:
then it fetches the copy, replays what was summed since, and serves once it has caught up. It decides neither when state
is needed nor who might have it: that is `state_supply`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from swarmnet.averaging.exchange import Exchange
from swarmnet.errors import BadCheckpoint, BadMessage, Refused, RejectCode, SwarmError, UsageError
from swarmnet.ids import PeerId, Restart, first_chain, next_chain
from swarmnet.manifest.extension import Horizon
from swarmnet.manifest.timers import TERM_STEPS
from swarmnet.messages import Answer, Commit, Finished, Round, Snapshot, SnapshotRequest, Stamp, TrailRequest, TrailStep
from swarmnet.stage.seams import Compute, Engine
from swarmnet.state.checkpoints import Checkpointer, CheckpointSchedule
from swarmnet.state.disk import CheckpointInfo, Written
from swarmnet.state.forecast import WITHIN, Ahead, line_needed, sums_arrive
from swarmnet.state.header import StateHeader, loop_time
from swarmnet.state.replay import Level, Replay, ReplayLogEnds
from swarmnet.state.snapshot_fetch import Donors, Fetcher, TransferProgress
from swarmnet.state.snapshot_index import Seal
from swarmnet.state.snapshot_source import Donor
from swarmnet.step.commits import evidence
from swarmnet.step.driver import StepDriver
from swarmnet.step.gate import Shape, commit_refusal
from swarmnet.step.member import Member
from swarmnet.transport import Transport

if TYPE_CHECKING:
    from swarmnet.peer.peer import Peer

Event = Callable[[str, dict[str, object]], None]


class Restorer:
    """Gives one replica its state, keeps it on disk, and hands it to mates."""

    def __init__(
        self,
        stage: int,
        shape: Shape,
        peer: Peer,
        *,
        engine: Engine,
        member: Member,
        driver: StepDriver,
        exchange: Exchange,
        event: Event,
    ) -> None:
        self._engine, self._sums = engine.compute, engine.sums
        self._member, self._driver, self._exchange = member, driver, exchange
        self._shape, self._event = shape, event
        self.no_initial_weights = peer.limits.no_initial_weights
        """Why this peer has no weights of version 0 and takes them from mates, in words for a person."""
        self._first_chain = first_chain(peer.run_id, stage)
        seal, training = Seal(peer.run_id, peer.signer), peer.manifest.training
        self.checkpoints = Checkpointer(
            stage,
            self._engine,
            self._sums,
            self.header,
            peer.disk,
            CheckpointSchedule(every=training.checkpoint_every, last=training.total_steps),
            keep=peer.limits.keep_checkpoints,
            on_event=event,
            common=peer.on_every_disk,
        )
        self.donor = Donor(
            stage,
            self._engine,
            self.header,
            seal,
            leads_on=self._leads_on,
            stored=self._checkpoint,
            piece_bytes=peer.limits.piece_bytes,
        )
        self._mates = FetchAndReplay(
            peer.transport,
            self._engine,
            exchange,
            seal,
            stage=stage,
            shape=shape,
            restart=lambda: member.restart,
            touch=self._touch,
            stand=self._stand,
            newest=self._newest,
            step_s=peer.step_s,
            event=event,
        )
        self.unfit = self._mates.unfit
        self._carried = peer.carried
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
                self.no_initial_weights = str(error)
                return False
        self._serve(Level(StateHeader(0, self._first_chain, self._first_chain, self._first_chain)))
        self._say_synced("seed", began=self._now(), num_bytes=0)
        return True

    def stay(self) -> None:
        """Go on with the weights that are here: nobody could hand over newer ones, or the run goes on from these."""
        self._serve(Level(self._stands_at()))

    async def load(self, version: int, *, becomes: int) -> bool:
        """Serve this peer's checkpoint of `version` as version `becomes`. False if it cannot be used.

        A later `becomes` drops what the stage has learned in between: the run allows it (training.allow_drop).
        """
        began = self._now()
        try:
            info, data = await self.checkpoints.load(version)
            self._check_notices(info)
            self._touch()
            await self._engine.restore(data, version=version, becomes=becomes)
        except BadCheckpoint:
            return False  # named already; announced no more
        except BadMessage as error:
            path = self.checkpoints.path(version)
            self.checkpoints.forget(version, BadCheckpoint(path, f"not this stage's state: {error.reason}"))
            return False
        header, notices = info.header, self._shape.notices
        # Only a state that is taken as it is continues its own error feedback.
        if becomes == version:
            await self._recall(version)
        else:
            dropped = (becomes - version) * self._shape.num_microbatches
            reason = "nobody had newer state of this stage (training.allow_drop)"
            self._event("dropped", {"from": version, "to": becomes, "microbatches": dropped, "reason": reason})
            # The state is not that of one process any more: it stands on a chain of its own.
            own = next_chain(header.chain, f"dropped/{becomes}".encode())
            # What was signed for the steps that are left out is taken to be in force, as it is in the other stages.
            held = Horizon(self._shape.total_steps, header.extensions)
            held = notices.foreseen(version, held, before=becomes)
            header = StateHeader(becomes, own, own, own, extensions=held.extensions)
        self._serve(Level(header))
        self._say_synced("checkpoint", began=began, num_bytes=len(data), path=self.checkpoints.path(version))
        return True

    def _check_notices(self, info: CheckpointInfo) -> None:
        """Learn what a checkpoint remembers. Raises BadCheckpoint: it is not the run's owner's, and is named so."""
        try:
            self._shape.notices.horizon(info.notices)
        except ValueError as error:
            bad = BadCheckpoint(self.checkpoints.path(info.version), str(error))
            self.checkpoints.forget(info.version, bad)
            raise bad from error

    async def _recall(self, version: int) -> None:
        """Take up again what this replica's averaging codec owed when it wrote that checkpoint."""
        owed = await self.checkpoints.owed(version)
        # The codec has no memory, or the disk has lost it: only error feedback starts anew.
        if owed is None:
            return
        try:
            await self._sums.recall(owed)
        except BadMessage as error:
            path = self.checkpoints.path(version)
            self.checkpoints.say_not_owed(BadCheckpoint(path, f"what was owed beside it is not so: {error.reason}"))

    def _serve(self, level: Level) -> None:
        at = level.header
        self._whole = True
        self.checkpoints.stand_under(self._member.restart)
        self._driver.restored(
            at.version,
            at.chain,
            at.before,
            at.term_chain,
            level.finished,
            level.commits,
            level.last_commits,
            extensions=at.extensions,
        )
        self.checkpoints.ends_at(self._member.horizon.last)

    def _say_synced(self, how: str, *, began: float, num_bytes: int, **more: object) -> None:
        seconds = round(self._now() - began, 3)
        self._event(
            "synced", {"version": self._member.version, "how": how, **more, "seconds": seconds, "bytes": num_bytes}
        )

    async def restore_from(self, donors: Sequence[PeerId], *, version: int = -1) -> bool:
        """Take over the state of `version` (-1: the newest) from all who have it, catch up by replay, and serve.

        False if nobody hands it over.
        """
        # One copy at a time: two would overwrite each other.
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
                first=await self._brought() if version < 0 else None,
            )
        except SwarmError as error:
            self._mates.say_given_up(error)
            return False
        finally:
            self._restoring = False
        self._serve(level)
        self._say_synced("snapshot", began=began, num_bytes=num_bytes)
        return True

    async def _brought(self) -> tuple[StateHeader, memoryview] | None:
        """What this peer has put on its disk to move here, once."""
        version, self._carried = self._carried, None
        if version is None:
            return None
        try:
            info, data = await self.checkpoints.load(version)
            self._check_notices(info)
        except BadCheckpoint:
            return None
        return (info.header, data) if info.restart == self._member.restart else None

    def _newest(self) -> int:
        """The version that the mates have reached, as far as they are heard."""
        return max((seen.version for _, seen in self._member.view.mates() if seen.synced), default=0)

    def _sound(self, donors: Sequence[PeerId]) -> Sequence[PeerId]:
        """Those of them whose weights have not drifted, if there are such."""
        return [donor for donor in donors if not self._member.drift.strays(donor)] or donors

    async def put_by(self, restart: Restart) -> None:
        """Before the run goes back: write my newer version. If no other peer follows, the run may return to it."""
        # Nothing is lost by going back.
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
        """The engine holds this version now; not to be served before it has caught up with the others."""
        self._touch()
        member = self._member
        member.version, member.chain = header.version, header.chain
        member.before, member.term_chain = header.before, header.term_chain
        member.horizon = Horizon(self._shape.total_steps, header.extensions)

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
        return self._stands_at()

    def _stands_at(self) -> StateHeader:
        member = self._member
        return StateHeader(
            member.version, member.chain, member.before, member.term_chain, member.restart, member.horizon.extensions
        )

    async def _checkpoint(self, version: int) -> tuple[StateHeader, memoryview] | None:
        """This peer's checkpoint, to be handed to a mate."""
        # Forgotten since it was announced.
        if version not in self.checkpoints.versions:
            return None
        try:
            info, data = await self.checkpoints.load(version)
        except BadCheckpoint:
            return None  # named already; announced no more
        return info.header, data

    def _leads_on(self, header: StateHeader) -> bool:
        """Could somebody who has that state be told what came next?"""
        stamp = header.oldest(self._member.stage, self._engine.delay)
        return stamp == self._member.stamp or self._exchange.replay_log.step(stamp) is not None

    def snapshot(self, request: SnapshotRequest) -> AsyncGenerator[Answer, None]:
        """Answer one `SnapshotRequest`; see Donor.serve."""
        self._exchange.replay_log.wanted()
        return self.donor.serve(request)

    async def replay(self, request: TrailRequest) -> AsyncGenerator[Answer, None]:
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
        newest: tells the version that the mates have reached.
        step_s: tells how long a step takes them; 0 if nobody knows.
        event: `fetching`, `following` and `fetching_again` say how far it is, `too_slow` that it will never be level,
            `join_failed` who did not deliver.
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
        newest: Callable[[], int],
        step_s: Callable[[], float],
        event: Event,
    ) -> None:
        self._newest, self._step_s = newest, step_s
        self._began = self._collected = 0.0  # when what is under way began, and the bytes of sums before
        self._copy_rate = 0.0  # bytes per second of the last copy; 0: there was none
        self._donors = 0
        self._too_slow = False
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

    async def run(
        self, donors: Donors, *, version: int = -1, first: tuple[StateHeader, memoryview] | None = None
    ) -> tuple[Level, int]:
        """Fetch and follow; returns where the engine stands then, and the bytes of the copy.

        first: a copy that is here already, to begin with. donors() is asked again and again. Raises NoReplica if they
        hand nothing over, or what the last of them raised; the engine may then stand at an older version (`stand` was
        told).
        """
        self._too_slow = False
        while True:
            self._began = loop_time()
            if first is not None:
                (header, data), first = first, None
            else:
                snapshot, data = await self._fetcher.fetch(donors, version=version)
                # A checkpoint of a mate may be older than the restart that goes on from it.
                header = StateHeader.of(snapshot, self._restart())
            num_bytes = len(data)
            self._touch()
            try:
                await self._engine.restore(data, version=header.version)
            except BadMessage as error:
                self._fetcher.useless(error)
                continue
            del data
            self._stand(header)
            self._engine.lengthen(header.extensions)
            self._began, self._collected = loop_time(), self._exchange.collected_bytes
            try:
                level = await self._replay.run(header, lambda: self._fetcher.trusted(donors()))
            # The mates have moved on by more than they remember: a newer copy.
            except ReplayLogEnds as error:
                self._event("fetching_again", {"version": header.version, "reason": str(error)})
                continue
            self._failed.clear()
            return level, num_bytes

    def forget(self) -> None:
        """The run has gone back: half a copy of a past that was given up is of no use."""
        self._fetcher.forget()

    def unfit(self, snapshot: Snapshot, version: int) -> Refused | BadMessage | None:
        """Why a described copy is not to be had. One asked for by number may come from a disk, and is then as good as
        any up to where the run has last gone back to; the newest one is of the present, or of no use."""
        # No honest donor has this.
        try:
            self._shape.notices.horizon(snapshot.notices)
        except ValueError as error:
            return BadMessage(RejectCode.MALFORMED, str(error), version=snapshot.version)
        if snapshot.version > self._shape.furthest:
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
        if await self._exchange.collect_from(wanted, finished.digest, *holders, kind="replay") != finished:
            raise BadMessage(RejectCode.MALFORMED, "not the sum its holders describe", step=stamp.step)

    def _after(self, header: StateHeader, commits: tuple[Commit, ...]) -> StateHeader:
        """Where a replica stands that has applied on these commits of all stages; as Member.applied."""
        chain = next_chain(header.chain, evidence(commits))
        begins_term = (header.version + 1) % TERM_STEPS == 0
        learn, held = self._shape.notices.learn, Horizon(self._shape.total_steps, header.extensions)
        held = held.after(header.version, [learn(commit.notice) for commit in commits if commit.notice])
        return StateHeader(
            header.version + 1,
            chain,
            header.chain,
            chain if begins_term else header.term_chain,
            header.restart,
            held.extensions,
        )

    def _moved(self, header: StateHeader) -> None:
        self._stand(header)
        collected, since_s = self._exchange.collected_bytes - self._collected, loop_time() - self._began
        rate = sums_arrive(collected, since_s, copy=self._copy_rate, step_s=self._step_s())
        level_in = self._level_in(header.version, 0, rate)
        newest = max(self._newest(), header.version)
        self._event("following", {"version": header.version, "newest": newest, "level_in": level_in})

    def _say(self, fields: dict[str, object], *known: object) -> None:
        if known not in self._failed:
            self._failed.add(known)
            self._event("join_failed", fields)

    def _say_progress(self, progress: TransferProgress) -> None:
        left, self._donors, self._copy_rate = progress.seconds_left, progress.donors, progress.bytes_per_s
        level_in = self._level_in(progress.version, progress.total_bytes - progress.done_bytes, progress.bytes_per_s)
        self._event(
            "fetching",
            {
                "version": progress.version,
                "bytes": progress.done_bytes,
                "total": progress.total_bytes,
                "donors": progress.donors,
                "seconds_left": None if left is None else round(left, 1),
                "level_in": level_in,
            },
        )

    def _level_in(self, version: int, state_bytes: int, bytes_per_s: float) -> float | None:
        """In how many steps, at this rate. If never, or after the run's end, it says so once, after two steps' time."""
        if not (step_s := self._step_s()) or not bytes_per_s:
            return None
        newest = max(self._newest(), version)
        ahead = Ahead(state_bytes, newest - version, self._exchange.sum_bytes, step_s)
        steps, last = ahead.steps(bytes_per_s), self._shape.furthest - newest
        # A rate over less than two steps says little: lines rest in one part of each.
        never = last > 0 and (steps is None or steps > last)
        if never and not self._too_slow and loop_time() - self._began > 2 * step_s:
            self._too_slow = True
            needs = ahead.needs(min(WITHIN, last))
            self._event(
                "too_slow",
                {
                    "bytes_per_s": round(bytes_per_s),
                    "sum_bytes": round(ahead.sum_bytes),
                    "step_s": round(step_s, 1),
                    "within": min(WITHIN, last),
                    "needs": round(needs),
                    "donors": self._donors,
                    "needs_each": round(line_needed(needs, max(self._donors, 1))),
                },
            )
        return None if steps is None else round(steps, 1)
