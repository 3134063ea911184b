"""An evaluation through a swarm that was found: calls of our own until all is scored, or somebody asks to stop.

Composes; what is scored, and how it is told, is the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from swarmnet.data.heldout import Tally
from swarmnet.directory import Directory
from swarmnet.errors import SwarmError, leaves
from swarmnet.ids import PeerId, RunId
from swarmnet.manifest.schema import Manifest
from swarmnet.manifest.terms import RunTerms
from swarmnet.net.greeting import Greeter
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.net.stop import stopped_by_signal
from swarmnet.net.tls import open_authority
from swarmnet.trainer.evaluation import Evaluation, Piece
from swarmnet.trainer.first_stage import FirstStage


@dataclass(frozen=True, slots=True)
class Ending:
    """How an evaluation ended. interrupted: by Ctrl+C or SIGTERM. failure: why nothing more can be scored."""

    interrupted: bool
    failure: SwarmError | None


async def score(
    identity: Identity,
    run: RunId,
    manifest: Manifest,
    directory: Directory,
    piece: Callable[[int], Piece],
    count: int,
    *,
    tally: Tally,
    heard: Callable[[bool], None],
    greeter: Greeter,
) -> Ending:
    """Have the run's peers score `count` microbatches; see Evaluation. What came of it is added to `tally`.

    greeter: as whom we greet. heard(served) after each that was scored, and now and then; served: somebody serves stage
    0. A first Ctrl+C ends it with what there is. Main thread only. A bug is raised.
    """

    def addresses(peer: PeerId) -> tuple[str, ...]:
        record = stage.records.get(peer)
        return record.addresses if record else ()

    transport = GrpcTransport(
        identity,
        run,
        admission=open_authority().admit(identity.peer),
        addresses=addresses,
        listens=False,
        config=GrpcConfig.of(RunTerms.of(manifest)),
        greeter=greeter,
    )
    stage = FirstStage(identity.peer, manifest, transport=transport, directory=directory, rerouted=lambda fields: None)
    evaluation = Evaluation(stage, piece, count, tally=tally, heard=lambda: heard(bool(stage.candidates())))
    transport.service = evaluation
    with stopped_by_signal() as stop:
        async with transport, asyncio.TaskGroup() as group:
            scoring = group.create_task(_outcome(evaluation.run()))
            scoring.add_done_callback(lambda _: stop.set())
            await stop.wait()
            interrupted = not scoring.done()
            scoring.cancel()
    return Ending(interrupted, None if scoring.cancelled() else scoring.result())


async def _outcome(work: Coroutine[Any, Any, None]) -> SwarmError | None:
    """Why it failed, if it did. A bug is raised."""
    try:
        await work
    except BaseExceptionGroup as group:
        named, bugs = group.split(SwarmError)
        if bugs is not None or named is None:
            raise
        return next(leaves(named))
    return None
