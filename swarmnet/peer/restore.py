"""The state of one replica: where it comes from, when it may be served, and what others are handed of it.

A replica begins with the weights of version 0, with a checkpoint from its own disk, or with a snapshot of the other
replicas' state: then it fetches the snapshot, catches up, and serves (`joiner`). It decides neither when state is
needed nor which peers might have it: that is `state_supply`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from swarmnet.averaging.exchange import Exchange
from swarmnet.clock import loop_time
from swarmnet.errors import BadCheckpoint, BadMessage, SwarmError, UsageError
from swarmnet.ids import PeerId, Restart, first_chain, next_chain
from swarmnet.manifest.extension import Horizon
from swarmnet.messages import Answer, SnapshotRequest, StateHeader, TrailRequest, TrailStep
from swarmnet.peer.joiner import Joiner
from swarmnet.stage.seams import Engine
from swarmnet.state.catch_up import InSync, next_stamp
from swarmnet.state.checkpoints import Checkpointer, CheckpointSchedule
from swarmnet.state.disk import Written
from swarmnet.state.snapshot_source import SnapshotSource
from swarmnet.step.driver import StepDriver
from swarmnet.step.gate import Shape
from swarmnet.step.member import Member

if TYPE_CHECKING:
    from swarmnet.peer.peer import Peer

Event = Callable[[str, dict[str, object]], None]

_BANNED_WITHIN = 3
"""Steps from the decision of a case to the commit that bans the peer, by which other stages learn where to go back."""


class Restorer:
    """Gives one replica its state, keeps it on disk, and hands it to other replicas."""

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
        self._engine = engine.compute
        self._member, self._driver, self._exchange = member, driver, exchange
        self._shape, self._event = shape, event
        self.no_initial_weights = peer.limits.no_initial_weights
        """Why this peer has no weights of version 0 and takes them from other replicas, in words for a person."""
        self._first_chain = first_chain(peer.run_id, stage)
        training, for_bans = peer.manifest.training, 0
        if peer.manifest.audit.on_late == "rollback" and training.checkpoint_every:
            for_bans = math.ceil(_BANNED_WITHIN / training.checkpoint_every)
        self.checkpoints = Checkpointer(
            stage,
            self._engine,
            self.header,
            peer.disk,
            CheckpointSchedule(every=training.checkpoint_every, last=training.total_steps),
            keep=peer.limits.keep_checkpoints + for_bans,
            on_event=event,
            common=peer.on_every_disk,
            voters=peer.voters,
            check_notices=shape.notices.horizon,
        )
        self.source = SnapshotSource(
            stage,
            self._engine,
            self.header,
            leads_on=self._leads_on,
            on_disk=lambda: self.checkpoints.versions,
            load=self._checkpoint,
            piece_bytes=peer.limits.piece_bytes,
        )
        self.joiner = Joiner(
            peer.transport,
            self._engine,
            exchange,
            member,
            stage=stage,
            shape=shape,
            serving=peer.have_state,
            step_s=peer.step_s,
            event=event,
        )
        self._carried = peer.carried
        self._restoring = False
        self._still = False  # no longer served, and nothing changes it: it may still be written

    @property
    def held(self) -> int | None:
        """Version of the weights in the engine, None while there are none that could be served."""
        return self._member.version if self.joiner.whole else None

    async def start_from_seed(self) -> bool:
        """Serve the weights of version 0, which every engine is built with. False: this peer has them no longer."""
        if self.joiner.touched or self._member.version:
            self.joiner.whole = False
            try:
                await self._engine.reset_to_seed()
            except UsageError as error:  # the checkpoint that the run began with was moved, or is another one now
                self.no_initial_weights = str(error)
                return False
        self._serve(InSync(StateHeader(0, self._first_chain, self._first_chain, self._first_chain)))
        self._say_synced("seed", began=loop_time(), num_bytes=0)
        return True

    def stay(self) -> None:
        """Go on with the weights that are here: no replica hands over newer ones, or the run goes on from these."""
        self._serve(InSync(self._member.header))

    async def load(self, version: int, *, becomes: int) -> bool:
        """Serve this peer's checkpoint of `version` as version `becomes`. False if it cannot be used.

        A later `becomes` drops what the stage has learned in between: the run allows it (training.allow_drop).
        """
        began = loop_time()
        if (found := await self.checkpoints.load(version)) is None:
            return False
        info, data = found
        self.joiner.touch()
        try:
            await self._engine.restore(data, version=version, becomes=becomes)
        except BadMessage as error:
            path = self.checkpoints.path(version)
            self.checkpoints.forget(version, BadCheckpoint(path, f"not this stage's state: {error.reason}"))
            return False
        header, notices = info.header, self._shape.notices
        if becomes != version:
            dropped = (becomes - version) * self._shape.num_microbatches
            reason = "nobody had newer state of this stage (training.allow_drop)"
            self._event("dropped", {"from": version, "to": becomes, "microbatches": dropped, "reason": reason})
            # The state is not that of one process any more: it stands on a chain of its own.
            own = next_chain(header.chain, f"dropped/{becomes}".encode())
            # What was signed for the steps that are left out is taken to be in force, as it is in the other stages.
            held = Horizon(self._shape.total_steps, header.notices)
            held = notices.foreseen(version, held, before=becomes)
            header = StateHeader(becomes, own, own, own, notices=held.notices, exclusions=header.exclusions)
        self._serve(InSync(header))
        self._say_synced("checkpoint", began=began, num_bytes=len(data), path=self.checkpoints.path(version))
        return True

    def _serve(self, reached: InSync) -> None:
        self.joiner.whole = True
        self.checkpoints.stand_under(self._member.restart)
        self._driver.restored(reached.header, reached.finished, reached.commits, reached.last_commits)
        self.checkpoints.ends_at(self._member.horizon.last)

    def _say_synced(self, how: str, *, began: float, num_bytes: int, **more: object) -> None:
        seconds = round(loop_time() - began, 3)
        self._event(
            "synced", {"version": self._member.version, "how": how, **more, "seconds": seconds, "bytes": num_bytes}
        )

    async def restore_from(self, donors: Sequence[PeerId], *, version: int = -1) -> bool:
        """Take over the state of `version` (-1: the newest) from all who have it, catch up by replay, and serve.

        False if no replica hands it over.
        """
        # One copy at a time: two would overwrite each other.
        if self._restoring:
            return False
        self._restoring = True
        began, view = loop_time(), self._member.view
        self._driver.suspend()
        try:
            reached, num_bytes = await self.joiner.run(
                lambda: self._sound(
                    [*donors, *(peer for peer, seen in view.mates() if seen.synced and not view.refused(peer))]
                ),
                version=version,
                first=await self._brought() if version < 0 else None,
            )
        except SwarmError as error:
            self.joiner.say_given_up(error)
            return False
        finally:
            self._restoring = False
        self._serve(reached)
        self._say_synced("snapshot", began=began, num_bytes=num_bytes)
        return True

    async def _brought(self) -> tuple[StateHeader, memoryview] | None:
        """What this peer has put on its disk to move here, once."""
        version, self._carried = self._carried, None
        found = None if version is None else await self._checkpoint(version)
        return found if found is not None and found[0].restart == self._member.restart else None

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
        self.source.forget()
        self.joiner.forget()

    async def write_last(self) -> Written | None:
        """Write the newest whole version, as nothing can be computed here any more. None: there is none.

        Also one that could not be led on from. Lets a running apply end first.
        """
        await self._driver.settled()
        self._still = True
        return await self.checkpoints.write_now()

    def header(self) -> StateHeader | None:
        member = self._member
        stands = self._still and self.joiner.whole and self._driver.is_settled  # also after an apply that failed
        if not stands and (not member.synced or member.oldest.applying):
            return None
        return member.header

    async def _checkpoint(self, version: int) -> tuple[StateHeader, memoryview] | None:
        """This peer's checkpoint, as a snapshot is; None if it cannot be used."""
        found = await self.checkpoints.load(version)
        return None if found is None else (found[0].header, found[1])

    def _leads_on(self, header: StateHeader) -> bool:
        """Can a replica that has that state be told what came next?"""
        stamp = next_stamp(header, self._member.stage, self._engine.delay)
        return stamp == self._member.oldest.stamp or self._exchange.replay_log.step(stamp) is not None

    def snapshot(self, request: SnapshotRequest) -> AsyncGenerator[Answer, None]:
        """Answer one `SnapshotRequest`; see SnapshotSource.serve."""
        self._exchange.replay_log.wanted()
        return self.source.serve(request)

    async def replay(self, request: TrailRequest) -> AsyncGenerator[Answer, None]:
        """Answer one `TrailRequest`."""
        member = self._member
        here = member.oldest.stamp if member.synced else None
        yield self._exchange.follow(
            request, here, TrailStep(member.oldest.finished, member.oldest.barrier.known, member.last_commits)
        )
