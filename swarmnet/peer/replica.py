"""One replica: everything one (peer, stage) is made of, wired together. READ FIRST.

    network -> Peer -> Replica -> Execution (microbatches)   \\
                               -> StepDriver -> Member (what counts)  > Engine (arithmetic)
                               -> Exchange (sums)             /
                               -> Donor (state for joiners)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass

from swarmnet.averaging.exchange import Exchange
from swarmnet.directory import Role
from swarmnet.errors import BadCheckpoint, BadMessage, SwarmError, UsageError
from swarmnet.ids import Chain, PeerId, Restart, RunId, Signer, first_chain, next_chain
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Answer, Commit, Finished, Packed, Process, SnapshotRequest, TrailRequest, TrailStep
from swarmnet.peer.restoring import Footing, Restoring
from swarmnet.pipeline.caller import Caller
from swarmnet.pipeline.execution import Execution
from swarmnet.pipeline.inputs import AnswerCheck, InputCheck, Known, TurnedAway, Windows, may_feed
from swarmnet.pipeline.recovery import Recovery, Spawn
from swarmnet.pipeline.router import AdaptiveTimeout, Router, RoutingRule, least_time
from swarmnet.pipeline.tasks import PipelineContext, PipelineLimits
from swarmnet.stage.seams import Engine
from swarmnet.state.checkpoints import Checkpointer, CheckpointSchedule
from swarmnet.state.disk import Disk, Written
from swarmnet.state.header import StateHeader
from swarmnet.state.snapshot_index import PIECE_BYTES, Seal
from swarmnet.state.snapshot_source import Donor
from swarmnet.step.drift import NO_DRIFT, DriftRules
from swarmnet.step.driver import Listener, StepDriver
from swarmnet.step.gate import Shape
from swarmnet.step.member import Member
from swarmnet.step.view import Timers
from swarmnet.transport import ReadPayload, Transport

Admitted = Callable[[PeerId, Role], bool]

_MOST_NAMED = 64
"""Peers that are named for bad inputs, at one version of the weights."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a replica is given by its peer.

    holders(): who may have tokens; tokens(step, index): this peer's own, with their proof; windows: what tells whether
    others' are the run's. common(): the newest version that every stage is known to have on some disk. numerics: the
    class of this peer's arithmetic, the same bits inside it. admitted(peer, role): does the run take it as that?
    routing(): a rule for one caller.
    """

    me: PeerId
    run: RunId
    incarnation: int
    manifest: Manifest
    transport: Transport
    listener: Listener
    spawn: Spawn
    signer: Signer
    holders: Callable[[], Sequence[PeerId]]
    tokens: Callable[[int, int], tuple[Packed, ...] | None]
    windows: Windows
    disk: Disk
    common: Callable[[], int | None]
    numerics: str = ""
    admitted: Admitted = lambda peer, role: True
    routing: Callable[[], RoutingRule] = lambda: least_time


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """What the operator allows, per stage: microbatches in flight, bytes remembered, checkpoints kept on disk.

    piece_bytes: of the pieces in which state is handed over. no_beginning: why this peer has no weights of version 0
    and takes them from mates, in words for a person; empty: it has them.
    """

    slots: int
    memo_bytes: int
    keep_checkpoints: int = 3
    piece_bytes: int = PIECE_BYTES
    no_beginning: str = ""


def timers_of(manifest: Manifest) -> Timers:
    """The run's timers."""
    protocol = manifest.protocol
    return Timers(protocol.heartbeat_s, protocol.suspect_s, protocol.long_silence_s, protocol.idle_index_s)


def drift_rules_of(manifest: Manifest) -> DriftRules:
    """When the run's replicas measure their weights, and what follows."""
    averaging = manifest.averaging
    if not averaging.equal_bits:
        return NO_DRIFT
    return DriftRules(averaging.drift_every, averaging.resync_every, manifest.training.total_steps)


def input_check_of(manifest: Manifest, stage: int, windows: Windows) -> InputCheck:
    """What the input of `stage` must look like in this run."""
    batch, length = manifest.training.microbatch_size, manifest.training.sequence_length
    tokens = ("int32", (batch, length + 1))
    hidden = (manifest.wire.activations, (batch, length, manifest.model.hidden_size))
    return InputCheck((tokens, hidden) if stage > 0 else (tokens,), manifest.model.vocab_size, windows)


def answer_check_of(manifest: Manifest, stage: int) -> AnswerCheck:
    """What the answers of `stage` must look like in this run."""
    batch, length = manifest.training.microbatch_size, manifest.training.sequence_length
    gradient = (manifest.wire.gradients, (batch, length, manifest.model.hidden_size))
    return AnswerCheck((gradient,) if stage > 0 else (), batch * length)


class Replica:
    """A stage served by this peer."""

    def __init__(self, stage: int, engine: Engine, around: Surroundings, caps: ReplicaLimits) -> None:
        manifest, timers = around.manifest, timers_of(around.manifest)
        num_stages = manifest.cut.stages
        self.stage, self.engine, self._sums, self._around = stage, engine.compute, engine.sums, around
        self._first_chain = first_chain(around.run, stage)
        shape = Shape(
            num_stages,
            manifest.training.microbatches,
            manifest.training.total_steps,
            manifest.protocol.keeper_term_steps,
            manifest.training.max_void,
            manifest.averaging.delay,
            manifest.averaging.group_size,
        )
        self.member = Member(
            around.me,
            stage,
            shape,
            timers,
            incarnation=around.incarnation,
            chain=self._first_chain,
            now=self._now(),
            signer=around.signer,
            drift=drift_rules_of(manifest),
            numerics=around.numerics,
        )
        self.exchange = Exchange(
            around.me,
            engine.sums,
            around.transport,
            self.member.sum_of,
            running_s=timers.heartbeat_s,
            num_tokens=manifest.training.microbatch_size * manifest.training.sequence_length,
            on_event=self._event,
            group_size=manifest.averaging.group_size,
        )
        self.driver = StepDriver(
            self.member,
            transport=around.transport,
            engine=self.engine,
            exchange=self.exchange,
            listener=around.listener,
            spawn=around.spawn,
        )
        self.caller: Caller | None = None
        answer_check = answer_check_of(manifest, stage + 1)
        if stage + 1 < num_stages:
            self.caller = Caller(
                around.transport,
                Router(AdaptiveTimeout.of(manifest.protocol, stages=num_stages - stage - 1), rule=around.routing()),
                self._next_replicas,
                answer_check,
                self._rerouted,
                leaving=self._next_leaving,
            )
        check = input_check_of(manifest, stage, around.windows)
        context = PipelineContext(
            stage,
            num_stages,
            engine=self.engine,
            claims=self.driver,
            caller=self.caller,
            recovery=Recovery(
                around.transport,
                stage,
                before=lambda: self._live(stage - 1),
                after=lambda: self._live(stage + 1),
                holders=around.holders,
                tokens=around.tokens,
                check=check,
                check_answer=answer_check.remembered,
                on_bad_input=self._bad_input,
            ),
            check=check,
            limits=PipelineLimits(caps.slots, timers.heartbeat_s, 2 * timers.suspect_s, caps.memo_bytes),
            spawn=around.spawn,
            on_bad_input=self._bad_input,
        )
        self.execution = Execution(context, may_feed=self._may_feed)
        self.driver.attach(self.execution)
        seal = Seal(around.run, around.signer)
        self.donor = Donor(
            stage, self.engine, self._header, seal, stored=self._checkpoint, piece_bytes=caps.piece_bytes
        )
        self._state = Restoring(
            around.transport,
            self.engine,
            self.exchange,
            seal,
            Footing(lambda: self.member.restart, self._touch, self._stand, self._event),
            stage=stage,
            shape=shape,
        )
        self.checkpoints = Checkpointer(
            stage,
            self.engine,
            self._sums,
            self._header,
            around.disk,
            CheckpointSchedule(every=manifest.training.checkpoint_every, last=manifest.training.total_steps),
            keep=caps.keep_checkpoints,
            on_event=self._event,
            common=around.common,
        )
        self.no_beginning = caps.no_beginning
        self._whole = False  # is the state in the engine one that can be served?
        self._restoring = False
        self._touched = False  # does the engine hold other weights than it was built with?
        self._still = False  # does nothing move the state here any more, though it is served no longer?
        self._named_at, self._named = -1, set[tuple[str, PeerId]]()

    # ------------------------------------------------------------ state

    @property
    def held(self) -> int | None:
        """Version of the weights in the engine, None while there are none that could be served."""
        return self.member.version if self._whole else None

    async def start_from_seed(self) -> bool:
        """Serve the weights of version 0, which every engine is built with. False: this peer has them no longer."""
        if self._touched or self.member.version:
            self._whole = False
            try:
                await self.engine.reset_to_seed()
            except UsageError as error:  # the checkpoint that the run began with was moved, or is another one now
                self.no_beginning = str(error)
                return False
        self._serve(StateHeader(0, self._first_chain, self._first_chain, self._first_chain))
        self._event("synced", {"version": 0, "how": "seed", "seconds": 0.0, "bytes": 0})
        return True

    def stay(self) -> None:
        """Go on with the weights that are here: nobody could hand over newer ones, or the run goes on from these."""
        member = self.member
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
            microbatches = self._around.manifest.training.microbatches
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
        await self.engine.restore(data, version=version, becomes=becomes)

    def _serve(
        self,
        header: StateHeader,
        finished: Finished | None = None,
        commits: tuple[Commit, ...] = (),
        last_commits: tuple[Commit, ...] = (),
    ) -> None:
        self._whole = True
        self.checkpoints.stand_under(self.member.restart)
        self.driver.restored(
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
        self.driver.suspend()
        try:
            level, num_bytes = await self._state.run(
                lambda: self._sound(
                    [*donors, *(peer for peer, seen in self.member.view.mates() if seen.synced and not seen.dead)]
                ),
                version=version,
            )
        except SwarmError as error:
            self._state.say_given_up(error)
            return False
        finally:
            self._restoring = False
        self._serve(level.header, level.finished, level.commits, level.last_commits)
        self._event(
            "synced",
            {
                "version": self.member.version,
                "how": "snapshot",
                "seconds": round(self._now() - began, 3),
                "bytes": num_bytes,
            },
        )
        return True

    def _sound(self, donors: Sequence[PeerId]) -> Sequence[PeerId]:
        """Those of them whose weights have not drifted, if there are such."""
        return [donor for donor in donors if not self.member.drift.strays(donor)] or donors

    async def put_by(self, restart: Restart) -> None:
        """Write what is newer here than where the run goes back to: nobody may come along, and it is taken back."""
        if not self.member.synced or self.member.version <= restart.version:
            return
        await self.driver.settled()
        self.driver.suspend()
        self._still = True
        try:
            await self.checkpoints.write_now()
        finally:
            self._still = False

    def forget_past(self) -> None:
        """The run goes on from elsewhere: hand out nothing that was summed, copied or fetched by halves before."""
        self.exchange.forget()
        self.donor.forget()
        self._state.forget()

    def _touch(self) -> None:
        """From now on the engine may hold weights that nothing is known of: a job that has begun ends all the same."""
        self._touched, self._whole = True, False

    def _stand(self, header: StateHeader) -> None:
        """The engine holds this version now; not to be served before it is level with the others."""
        self._touch()
        member = self.member
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
        await self.driver.settled()
        self._still = True
        return await self.checkpoints.write_now()

    def _header(self) -> StateHeader | None:
        member = self.member
        stands = self._still and self._whole and self.driver.is_settled  # also after an apply that failed
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
        self.exchange.replay_log.wanted()
        return self.donor.serve(caller, request)

    async def trail(self, request: TrailRequest) -> AsyncGenerator[Answer, None]:
        """Answer one `TrailRequest`."""
        member = self.member
        here = member.stamp if member.synced else None
        yield self.exchange.follow(request, here, TrailStep(member.finished, member.barrier.known, member.last_commits))

    # ------------------------------------------------------------ microbatches

    def process(self, caller: PeerId, request: Process, read: ReadPayload) -> AsyncGenerator[Answer, None]:
        return self.execution.process(caller, request, read)

    def gone(self, peer: PeerId, *, definite: bool) -> None:
        """A connection to `peer` broke."""
        if definite and self.caller is not None:
            self.caller.gone(peer)
        self.driver.gone(peer, definite=definite)

    def _live(self, stage: int) -> list[PeerId]:
        return self.member.view.live(stage, now=self._now())

    def _next_replicas(self) -> Mapping[PeerId, int]:
        view = self.member.view
        live = ((peer, view.get(peer, self.stage + 1)) for peer in self._live(self.stage + 1))
        found = {peer: seen for peer, seen in live if seen is not None}
        without, newest = view.left_out(self.stage + 1, now=self._now()), self.member.version + 1
        chains = Counter((seen.version, seen.chain) for seen in found.values())
        apart = {at for at in chains if any(at[0] == other[0] and chains[at] < chains[other] for other in chains)}
        fit = {
            peer: seen.queue
            for peer, seen in found.items()
            if peer not in without and seen.version <= newest and (seen.version, seen.chain) not in apart
        }
        return fit or {peer: seen.queue for peer, seen in found.items()}

    def _next_leaving(self) -> frozenset[PeerId]:
        view = self.member.view
        live = ((peer, view.get(peer, self.stage + 1)) for peer in self._live(self.stage + 1))
        return frozenset(peer for peer, seen in live if seen is not None and seen.draining)

    def _rerouted(self, request: Process, peer: PeerId, reason: str) -> None:
        self._event("rerouted", {"step": request.step, "index": request.index, "from": peer, "reason": reason})

    def _may_feed(self, caller: PeerId, request: Process) -> TurnedAway | None:
        view, before = self.member.view, self.stage - 1
        away = may_feed(
            Known(
                feeds=caller == self._around.me or self._is_live(caller, before),
                mate=self._is_live(caller, self.stage),
                heard=view.get(caller, before) is not None,
                admitted=self._around.admitted(caller, "trainer"),
            ),
            request,
        )
        if away is not None and not away.soon:
            self._name("turned_away", caller, {"step": request.step, "index": request.index, "reason": away.reason})
        return away

    def _is_live(self, peer: PeerId, stage: int) -> bool:
        """As `_live`, of one peer: this is asked with every call."""
        seen = self.member.view.get(peer, stage)
        return seen is not None and seen.synced and self.member.view.alive(peer, now=self._now(), stage=stage)

    def _bad_input(self, peer: PeerId, step: int, index: int, error: BadMessage) -> None:
        self._name("bad_input", peer, {"step": step, "index": index, "code": error.code.value, "reason": error.reason})

    def _name(self, event: str, peer: PeerId, fields: dict[str, object]) -> None:
        """Say what a peer did: once a version and peer, and not of more than so many, or it could fill a disk."""
        if self._named_at != self.member.version:
            self._named_at, self._named = self.member.version, set()
        if (event, peer) not in self._named and len(self._named) < _MOST_NAMED:
            self._named.add((event, peer))
            self._event(event, {"peer": peer, **fields})

    def _event(self, event: str, fields: dict[str, object]) -> None:
        self._around.listener.on_event(self.stage, event, fields)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _inexact(chain: Chain, how: str, version: int) -> StateHeader:
    """Where a stage stands whose state is not that of one process any more: on a chain of its own."""
    apart = next_chain(chain, f"{how}/{version}".encode())
    return StateHeader(version, apart, apart, apart)
