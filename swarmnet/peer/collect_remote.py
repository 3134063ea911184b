"""Fetch a checkpoint of every stage from a live swarm, as a client that takes no part in it.

The checkpoints that peers announce decide the step: the newest that every stage has, of one ancestry. Each stage's copy
comes from all peers that have it, as for a joining replica (`state.snapshot_fetch`), and is put on disk as a peer would
do it. The copy is the one that most sources describe, so it is only as correct as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnet.clock import loop_time
from swarmnet.config.peer import PeerConfig
from swarmnet.directory import Record
from swarmnet.errors import NoReplica, SwarmError, UsageError
from swarmnet.fetch.driver import HolderCalls
from swarmnet.ids import PeerId, RunId
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Snapshot
from swarmnet.net.endpoint import JoinedRun
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.net.swarm_link import SwarmLink
from swarmnet.peer.joining import FoundRun, Tell, reach
from swarmnet.peer.swarm_health import holdings_of
from swarmnet.stage.canonical import Canonical
from swarmnet.state.base_fetch import fetch_base
from swarmnet.state.collect import listed
from swarmnet.state.disk import CheckpointStore
from swarmnet.state.rollback import newest_on_disk
from swarmnet.state.snapshot_fetch import SnapshotFetch
from swarmnet.transport import Transport

_SAY_S, PATIENCE_S = 5.0, 600.0
"""How often a fetch of frozen weights says how far it is, and how long it looks for peers that have them."""

LOOK_S, BETWEEN_LOOKS_S = 5.0, 0.5
"""How long announcements are waited for that make a version whole, and how often they are read."""


@dataclass(frozen=True, slots=True)
class CollectedRun:
    """A run, and the version of which every stage has been fetched."""

    manifest: Manifest
    run: RunId
    version: int


async def collect_remote(
    invitation: SwarmLink | Manifest,
    folder: Path,
    tell: Tell,
    *,
    version: int | None = None,
    bootstrap: Sequence[str] = (),
    agreed: Callable[[Manifest], None] = lambda manifest: None,
) -> CollectedRun:
    """Put a checkpoint of every stage below `folder`.

    Args:
        version: which one; None: the newest that is whole.
        bootstrap: addresses of peers that are up. A link brings its own.
        agreed: called with the manifest before anything is fetched, and may raise.

    Raises: UsageError: no peer answers, no such version is announced, or no peer hands over a stage.
    """
    identity = Identity.generate()
    config = PeerConfig(dir=folder, bootstrap=tuple(bootstrap))
    async with reach(config, identity, invitation, tell, None) as found:
        agreed(found.manifest)
        terms = found.joined.terms
        chosen, donors, records = await _choose(found, version)
        transport = asking(found.joined, records)
        store = CheckpointStore(folder, terms.run)
        async with transport:
            for stage, peers in enumerate(donors):
                snapshot, data = await _fetch(found, transport, stage, peers, chosen)
                info = store.describe(stage, snapshot.header, data)
                # Gigabytes: the event loop must go on answering.
                await asyncio.to_thread(store.write, info, data)
                tell("stage", f"{stage}: {len(data):,} bytes")
        return CollectedRun(found.manifest, terms.run, chosen)


def asking(joined: JoinedRun, records: Iterable[Record]) -> GrpcTransport:
    """A transport that asks the peers of these records, and serves nobody."""
    addresses = {record.peer: record.addresses for record in records}
    return GrpcTransport(
        joined.identity,
        joined.terms.run,
        addresses=lambda peer: addresses.get(peer, ()),
        listens=False,
        config=GrpcConfig.of(joined.terms),
        greeter=joined.greeter,
    )


async def fetch_frozen(
    config: PeerConfig,
    manifest: Manifest,
    joined: JoinedRun | None,
    tell: Tell,
    *,
    stage: int,
    path: Path,
    root: str,
    num_bytes: int,
) -> None:
    """Put the frozen weights of a stage into `path`, from the peers of that stage.

    joined: this process in the run's DHT, if it is in it already. Raises NoReplica, UsageError.
    """
    if joined is None and not config.bootstrap:
        raise NoReplica("there is no --bootstrap to ask other peers by", stage=stage)
    said_at = -math.inf

    def fetched(done: int, all_bytes: int) -> None:
        nonlocal said_at
        if loop_time() - said_at >= _SAY_S or done == all_bytes:
            said_at = loop_time()
            tell("base", f"{done / all_bytes:.0%} of {all_bytes:,} bytes of stage {stage}")

    async with contextlib.AsyncExitStack() as stack:
        if joined is None:
            reached = reach(config, Identity.generate(), manifest, tell, None)
            joined = (await stack.enter_async_context(reached)).joined
        # A peer that has the checkpoint may still be making its file, and holders come and go.
        until = loop_time() + PATIENCE_S
        while True:
            records = [record for record in await joined.directory.records() if record.peer != joined.identity.peer]
            holders = [record.peer for record in records if any(status.stage == stage for status in record.stages)]
            try:
                async with asking(joined, records) as transport:
                    calls = HolderCalls(transport, lambda peer, error: tell("base", f"not from {peer}: {error}"))
                    await fetch_base(calls, holders, stage, path, root=root, num_bytes=num_bytes, fetched=fetched)
                return
            except NoReplica as error:
                if loop_time() >= until:
                    raise
                tell("base", f"{error.message}: trying again for {until - loop_time():.0f} s")
            await asyncio.sleep(_SAY_S)


async def _choose(found: FoundRun, version: int | None) -> tuple[int, list[list[PeerId]], Sequence[Record]]:
    """The version, who has it of each stage, and their records."""
    num_stages, until = found.manifest.cut.stages, asyncio.get_running_loop().time() + LOOK_S
    while True:
        records = [record for record in await found.joined.directory.records() if record.stages]
        _, holdings = holdings_of(records, num_stages, allow_drop=found.manifest.training.allow_drop)
        chosen = newest_on_disk(holdings, num_stages) if version is None else version
        donors = [[h.peer for h in holdings if h.stage == stage and chosen in h.disk] for stage in range(num_stages)]
        # Every stage of one version, or it is no checkpoint of the model.
        if chosen is not None and all(donors):
            return chosen, donors, records
        # Records of some stages may come later than those of others.
        if asyncio.get_running_loop().time() >= until:
            break
        await asyncio.sleep(BETWEEN_LOOKS_S)
    held = "; ".join(
        f"stage {stage}: {listed({v for h in holdings if h.stage == stage for v in h.disk})}"
        for stage in range(num_stages)
    )
    what = "no step has" if version is None else f"step {version} does not have"
    raise UsageError(
        f"{what} a checkpoint of every stage in the swarm ({held}): peers write one every "
        f"{found.manifest.training.checkpoint_every} steps (training.checkpoint_every), and at the end"
    )


async def _fetch(
    found: FoundRun, transport: Transport, stage: int, donors: Sequence[PeerId], version: int
) -> tuple[Snapshot, memoryview]:
    failures: list[str] = []
    fetch = SnapshotFetch(
        transport,
        stage,
        max_bytes=Canonical.of(found.manifest.of_stage(stage)).layout.num_bytes,
        failed=lambda peer, error: failures.append(f"{peer}: {error}"),
    )
    try:
        return await fetch.fetch(lambda: donors, version=version)
    except SwarmError as error:
        raise UsageError(
            f"no peer hands over stage {stage} at step {version} "
            f"({failures[-1] if failures else error}): try again, or another --step"
        ) from error
