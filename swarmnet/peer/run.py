"""`swarmnet peer` as a process: engines, endpoint, and the end of the run. Composes; decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swarmnet import telemetry
from swarmnet.audit.auditor import AuditLog
from swarmnet.audit.health import banned_of
from swarmnet.clock import boot_time, loop_runner, loop_time
from swarmnet.config.peer import PeerConfig
from swarmnet.data.source import load_tokens
from swarmnet.engine.compute_thread import ComputeThread
from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.errors import DeviceFull, MeshFailed, SwarmError, UsageError, leaves
from swarmnet.manifest.file import run_id
from swarmnet.manifest.schema import Manifest
from swarmnet.manifest.terms import RunTerms
from swarmnet.net.away import remember, until_answered, was_in
from swarmnet.net.endpoint import NOTHING_BETWEEN, JoinedRun, Wrap, join_run
from swarmnet.net.stop import stopped_by_signal, unless_stopped
from swarmnet.peer.checkup import advice
from swarmnet.peer.collect_remote import fetch_frozen
from swarmnet.peer.contributors import contributors
from swarmnet.peer.control_socket import ControlSocket
from swarmnet.peer.devices import NumericsClass, meaningless
from swarmnet.peer.engines import InitialWeights, backend_of, numerics_of, torch_engine
from swarmnet.peer.memory_fit import Capacity, full_in_words
from swarmnet.peer.moving import Moving, NewStage
from swarmnet.peer.peer import Peer, Tokens
from swarmnet.peer.rebalance import RecentMoves, Rules
from swarmnet.peer.replica import ReplicaLimits
from swarmnet.peer.web import RunLooks, serving_web
from swarmnet.pipeline.router import routing_rule
from swarmnet.pipeline.windows import OwnTokens, ProvenWindows
from swarmnet.stage.canonical import Initial
from swarmnet.stage.interfaces import Engine
from swarmnet.state.disk import CheckpointStore, DirectoryDisk
from swarmnet.telemetry.events import EventLog
from swarmnet.telemetry.journal import Journal, remind
from swarmnet.telemetry.kinds import OnEvent, kind_of
from swarmnet.telemetry.run_state import ContributorRank, LineBytes, RunState
from swarmnet.telemetry.trace import TraceFile, check_trace
from swarmnet.wire import kernel_build

if TYPE_CHECKING:
    from swarmnet.net.traffic import Traffic
    from swarmnet.peer.joining import PreparedJoin

log = telemetry.get(__name__)

TRACE_S = 1.0
"""How often spans are written: a peer that is killed loses so much of its trace."""

SeeState = Callable[[RunState, float], None]
"""Shown the run state after each event and once a second, with the time by the clock of its events."""

_OBSERVE_S = 1.0

_FINISHED = "the run is complete: `swarmnet export` writes its model; this peer serves it until you stop it (Ctrl+C)"
_NO_PAPERS = "receipts and evidence are not written, and those of this time stay missing; training goes on"


def run_peer(
    config: PeerConfig,
    manifest: Manifest,
    *,
    heard: OnEvent = lambda event, fields: None,
    see: SeeState = lambda state, now: None,
    data_at_source: bool = True,
    wrap: Wrap = NOTHING_BETWEEN,
    wrap_engine: Callable[[Engine], Engine] = lambda engine: engine,
    prepared: PreparedJoin | None = None,
    runner: asyncio.Runner | None = None,
) -> int:
    """Serve the configured stages until Ctrl+C or SIGTERM. Returns the exit code. Raises UsageError.

    heard: called with every event, in addition to the journal. see: is shown the run state.
    data_at_source: may data, and a checkpoint that the run begins with, be read from the paths in the manifest, if
    the config does not say it? A manifest from strangers must not decide which files are opened here.
    wrap, wrap_engine: fault injectors of a test; see `net.endpoint`.
    prepared: the result of `prepare_join`, in a loop of `runner`; None: this process joins the DHT when it can serve.
    """
    routing_rule(config.routing)  # refuses early
    if config.trace:
        check_trace(config.trace)
    # For arithmetic alone: what peers agree on, and what crosses the network, is the run's.
    capacity = prepared.capacity if prepared is not None else Capacity(config, manifest)
    mine, layout = capacity.manifest, capacity.layout
    torch.set_num_threads(config.threads)
    kernel_build.prepare(threads=config.threads)
    # Large pages for large CPU tensors: a fresh 50 MB sum then costs 3 ms of page faults instead of 20. torch asks the
    # environment for this once, at its first tensor, and offers no other way.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # A file written for a larger machine is not refused on a smaller one.
    if ignored := meaningless(config.mesh, layout):
        log.info("mesh_ignored", ignored=ignored, reason="this peer is one rank, which shares its stages with no other")
    memory, slots = capacity.setup(config).memory, capacity.slots(config, config.stages)
    # The operator left the number to this machine, or lends too little for so many.
    if slots != config.slots:
        log.info("slots_chosen", at_most=slots, stages=list(config.stages))

    numerics = numerics_of(mine, layout, memory)
    # Where its operator chose the stage, it stays there.
    if (
        prepared is not None
        and prepared.chosen
        and config.rebalance_s
        and layout.ranks == 1
        and len(config.stages) == 1
    ):
        capacity.fits = capacity.stages(config)
    elif prepared is not None and prepared.chosen:
        log.info("stays", reason="rebalance_s is 0, or this peer has several ranks or stages")
    carried: int | None = None
    recent_moves = RecentMoves()
    with full_in_words(), contextlib.ExitStack() as stack:  # left in reverse: ranks end first, and jobs that wait
        runner = runner or stack.enter_context(loop_runner())
        joined = prepared.joined if prepared is not None else None
        compute = ComputeThread()
        stack.callback(compute.close)

        def fetch(stage: int, path: Path, root: str, num_bytes: int) -> None:
            """Frozen weights, from other peers."""
            say = lambda phase, words: log.info("fetching", what=phase, progress=words)  # noqa: E731
            runner.run(
                fetch_frozen(config, manifest, joined, say, stage=stage, path=path, root=root, num_bytes=num_bytes)
            )

        begin = InitialWeights(config, manifest, at_source=data_at_source, fetch=fetch)

        def engine_of(stage: int, initial: Initial | None, base: Path | None) -> TorchEngine:
            backend = backend_of(mine, stage, layout, initial, memory, base=base)
            return torch_engine(mine, stage, compute, backend)

        while True:
            has_data = 0 in config.stages and (data_at_source or config.data is not None)
            tokens, state = own_tokens(config, manifest) if has_data else no_tokens, RunState()
            with contextlib.ExitStack() as here:
                engines: dict[int, TorchEngine] = {}
                for stage in config.stages:
                    engines[stage] = begin.engine(stage, engine_of)
                    here.callback(engines[stage].close)
                    if layout.ranks > 1:
                        fields: dict[str, object] = {"stage": stage, "mesh": layout.label, "ranks": layout.ranks}
                        state.on("mesh_starting", fields, now=boot_time())
                        heard("mesh_starting", fields)
                        see(state, boot_time())
                        log.at(logging.INFO, "mesh_starting", fields)
                seen = {stage: wrap_engine(Engine(engine, engine.sums)) for stage, engine in engines.items()}
                ranks = [engine.supervise for engine in engines.values() if layout.ranks > 1]
                limits = ReplicaLimits(
                    capacity.slots(config, config.stages),
                    config.caps.output_cache_bytes,
                    config.caps.keep_checkpoints,
                    no_initial_weights=begin.missing,
                    bases=begin.bases,
                    routing=config.routing,
                )
                with _given_up_in_words():
                    moved = runner.run(
                        _serve(
                            config,
                            manifest,
                            joined,
                            seen,
                            ranks,
                            tokens,
                            heard,
                            numerics,
                            wrap,
                            capacity,
                            limits,
                            carried=carried,
                            recent_moves=recent_moves,
                            state=state,
                            see=see,
                        )
                    )
                del engines, seen, ranks
            if moved is None:
                return 0
            # Its state is on disk, and the old stage is out of memory.
            config, carried = moved
            joined = joined.restarted() if joined is not None else None


@contextlib.contextmanager
def _given_up_in_words() -> Iterator[None]:
    """Raise alone, and not within a group of errors, what ends a peer: ranks that are given up, a full device, or that
    no peer can connect to it."""
    try:
        yield
    except BaseExceptionGroup as group:
        failed, others = group.split((MeshFailed, DeviceFull, UsageError))
        # Anything else is a bug, and shows its traceback.
        if others is not None or failed is None:
            raise
        raise next(leaves(failed)) from None


def own_tokens(config: PeerConfig, manifest: Manifest) -> Tokens:
    """This machine's tokens of the run, or none (they then come from trainers), said in words."""
    try:
        data = manifest.data
        tokens = load_tokens(config.data or data.source, data.tokenizer, base=config.data_folder)
        own = OwnTokens(tokens, data, manifest.training)
    except UsageError as error:
        # Data that the operator names has to be there.
        if config.data is not None:
            raise
        log.warning("no_data", reason=str(error), then="tokens come from trainers")
        return no_tokens
    return lambda step, index: own.training(step * manifest.training.microbatches + index)


def no_tokens(step: int, index: int) -> None:
    """This machine has no data."""
    return None


async def _serve(
    config: PeerConfig,
    manifest: Manifest,
    joined: JoinedRun | None,
    engines: Mapping[int, Engine],
    ranks: Sequence[Callable[[], Awaitable[None]]],
    tokens: Tokens,
    heard: OnEvent,
    numerics: NumericsClass,
    wrap: Wrap,
    capacity: Capacity,
    limits: ReplicaLimits,
    *,
    carried: int | None,
    recent_moves: RecentMoves,
    state: RunState,
    see: SeeState,
) -> tuple[PeerConfig, int | None] | None:
    """Until it is asked to stop, or has to go on with another stage: then how, and with which version of its state."""

    def tell(event: str, fields: dict[str, object]) -> None:
        journal(event, fields)
        heard(event, fields)
        see(state, loop_time())
        # From now on a network that is away is waited for.
        if state.events[event] == 1 and "version" in kind_of(event).marks:
            remember(config.dir, run_id(manifest))

    def early(event: str, reason: str) -> None:
        """An event from before there is a peer."""
        state.on(event, {"reason": reason}, now=loop_time())
        tell(event, {"reason": reason})

    async with contextlib.AsyncExitStack() as stack:
        journal = Journal(stack.enter_context(EventLog(config.events)), log)
        stop = stack.enter_context(stopped_by_signal())
        if joined is None:
            joining = until_answered(
                lambda: stack.enter_async_context(join_run(RunTerms.of(manifest), config.network)),
                say=early,
                patient=was_in(config.dir, run_id(manifest)),
            )
            joined = await unless_stopped(stop, joining)
        if joined is None:
            early("stopped", "asked to stop before it had joined")
            return None
        endpoint = joined.endpoint
        endpoint.numerics = str(numerics)
        disk = DirectoryDisk(CheckpointStore(config.dir, endpoint.run, numerics=str(numerics)))
        control = ControlSocket(config, capacity, endpoint.transport.traffic, stop)

        peer = Peer(
            endpoint,
            wrap.transport(endpoint.transport),
            manifest,
            engines,
            numerics=numerics.apply,
            audit_log=AuditLog(
                config.dir, lambda reason: peer.say("no_papers", {"reason": reason, "then": _NO_PAPERS})
            ),
            tokens=tokens,
            windows=ProvenWindows.of(manifest.data, manifest.training),
            disk=disk,
            on_event=tell,
            state=state,
            limits=limits,
            carried=carried,
        )
        looks = RunLooks(lambda: endpoint.links, peer.say)
        if config.dashboard:
            web = serving_web(config.dashboard, peer, endpoint.transport.traffic, looks.page)
            peer.say("dashboard", {"at": f"{stack.enter_context(web)}/"})
        async with endpoint.serve(wrap.service(peer)), asyncio.TaskGroup() as group:
            peer.say("listening", endpoint.whereabouts())
            serving = group.create_task(_serve_peer(peer, (endpoint.transport.port, endpoint.directory.port)))
            ending = group.create_task(_keep_result(peer))
            beside = group.create_task(wrap.background())
            asked = group.create_task(control.run(peer))
            reminding = group.create_task(remind(log, peer.state))
            observed = group.create_task(_observe(peer, endpoint.transport.traffic, see))
            tracing = group.create_task(_trace(config, peer))
            shut_out = group.create_task(until_banned(peer))
            looking = group.create_task(looks.run())
            computing = [group.create_task(_compute(each, peer)) for each in ranks]
            moved = await unless_stopped(stop, _moving(peer, config, capacity, recent_moves))
            await control.resume()  # leaving takes over
            reason = "it was about to move"
            if moved is None:
                reason = await peer.drain(config.drain_s)
                for replica in peer.replicas.values():
                    await replica.state.checkpoints.write_now()
            await peer.leave()
            for task in (serving, ending, beside, reminding, observed, tracing, shut_out, asked, looking, *computing):
                task.cancel()
        peer.say("traffic", {"calls": endpoint.transport.traffic.rows()})
        # Perhaps it was asked while it left its old stage.
        if moved is None or stop.is_set():
            peer.say("stopped", {"reason": f"asked to stop: {reason}"})
            return None
        await endpoint.directory.rest()  # nothing here answers while the new stage is loaded
        peer.say("moved", {"from": config.stages[0], "to": moved.stage, "version": moved.version})
        # Its caps may have been changed while it ran.
        return control.config.model_copy(update={"stages": (moved.stage,)}), moved.version


async def _observe(peer: Peer, traffic: Traffic, see: SeeState) -> None:
    """Until cancelled, once a second: what no event says is written into the run state."""
    while True:
        observe(peer, traffic, now=loop_time())
        see(peer.state, loop_time())
        await asyncio.sleep(_OBSERVE_S)


def observe(peer: Peer, traffic: Traffic, *, now: float) -> None:
    """Write into the peer's run state what no event says, as it is now."""
    state, training = peer.state, peer.manifest.training
    state.microbatch_tokens = training.microbatch_size * training.sequence_length
    records = [peer.status(), *peer.records.values()]
    out = {each.peer for each in banned_of(records)}  # as `status` has it
    table = contributors(each for each in records if each.peer not in out)
    rank, mine = next(((rank, row) for rank, row in enumerate(table, 1) if row.peer == peer.me), (0, None))
    state.standing = ContributorRank(rank, len(table), mine.share if mine is not None else 0.0)
    state.lent = traffic.up.bytes_per_s, traffic.down.bytes_per_s
    state.crossed.append(LineBytes(now, traffic.up.total, traffic.down.total))


async def _moving(peer: Peer, config: PeerConfig, capacity: Capacity, recent_moves: RecentMoves) -> NewStage:
    """Until the peer has left its stage for another one; for ever if it does not move."""
    if capacity.fits is None:
        await asyncio.Event().wait()
    return await Moving(peer, Rules(period_s=config.rebalance_s), capacity, recent_moves).run()


async def _trace(config: PeerConfig, peer: Peer) -> None:
    """Write the peer's spans as they are over, until cancelled, if that is asked for. Raises UsageError."""
    if config.trace is None:
        return
    file, seen = TraceFile(config.trace, peer.me, peer.label), 0
    try:
        while True:
            await asyncio.sleep(TRACE_S)
            new, seen = peer.spans.since(seen), peer.spans.added
            file.write(new)
    finally:
        file.write(peer.spans.since(seen))
        file.close()


async def _serve_peer(peer: Peer, ports: tuple[int, int]) -> None:
    """Raises UsageError, with advice, if no peer can connect to this one: it has served nothing, and leaves."""
    try:
        await peer.run()
    except* UsageError as unreachable:
        await peer.leave()
        reason = next(leaves(unreachable)).message
        peer.say("stopped", {"reason": reason})
        raise UsageError(f"{reason}; {advice('unreachable', *ports)}") from None
    except* DeviceFull as full:
        await _end(peer, next(leaves(full)))
        raise


async def until_banned(peer: Peer) -> None:
    """Raises UsageError once a fault of this peer is proven: all peers of the run ignore it from then on."""
    await peer.banned.wait()
    await peer.leave()
    peer.say("stopped", {"reason": "banned for wrong work"})
    raise UsageError(peer.ban_notice)


async def _compute(ranks: Callable[[], Awaitable[None]], peer: Peer) -> None:
    """Have the ranks up as long as the peer is. Raises MeshFailed, DeviceFull: then the peer ends, and what it holds
    is on disk."""
    try:
        await ranks()
    except (MeshFailed, DeviceFull) as failed:
        await _end(peer, failed)
        raise


async def _end(peer: Peer, failed: SwarmError) -> None:
    """Nothing can be computed here any more."""
    for replica in peer.replicas.values():
        try:
            await replica.state.write_last()
        except SwarmError as error:  # the ranks ended while they wrote it
            peer.say("checkpoint_failed", {"reason": str(error)})
    peer.say("stopped", {"reason": failed.message})


async def _keep_result(peer: Peer) -> None:
    """At the last version: write the final snapshot and say so; the peer goes on serving it read-only.

    Again if the run was extended, or went back, and has ended again.
    """
    while True:
        await peer.finished.wait()
        await _keep_last(peer)
        await peer.goes_on.wait()


async def _keep_last(peer: Peer) -> None:
    for stage, replica in sorted(peer.replicas.items()):
        written = await replica.state.checkpoints.write_now()
        if written is None:  # the run went back meanwhile, and will end again
            continue
        peer.say(
            "finished",
            {
                "stage": stage,
                "version": written.info.version,
                "weights_sha256": written.info.sha256,
                "path": replica.state.checkpoints.path(written.info.version),
                # With a problem it is not there.
                **({"advice": _FINISHED} if written.problem is None else {"problem": written.problem}),
            },
        )
