"""From an invitation to a stage of the run: what `swarmnet join` finds out before it is a peer like any other.

Which run, by the link; its manifest, from any peer and checked by its hash; and the stage, from what all peers announce
(`placement` decides). It only asks in the DHT, under the peer's own identity; what serves the stage later is the same
identity and the same node. The state of the stage is fetched by the peer itself (`restore`). What it does is told in
words, phase by phase.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet.clock import wall_time
from swarmnet.config.peer import PeerConfig
from swarmnet.directory import Estimate, Record, Role, StageStatus
from swarmnet.errors import BadMessage, PeerTimeout, RejectCode, SwarmError, UsageError
from swarmnet.fetch.driver import expect
from swarmnet.ids import PeerId, RunId, first_chain
from swarmnet.manifest.file import load, run_id, to_toml
from swarmnet.manifest.schema import Manifest
from swarmnet.manifest.terms import RunTerms
from swarmnet.messages import Busy, ManifestData, ManifestRequest
from swarmnet.net.admission_files import admissions_of, notices_of
from swarmnet.net.away import until_answered, was_in
from swarmnet.net.dht import DhtDirectory
from swarmnet.net.dht_daemon import Listen
from swarmnet.net.dht_node import NoPeerAnswered
from swarmnet.net.endpoint import JoinedRun, listen_as, own_pass_of
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity, own_identity
from swarmnet.net.swarm_link import SwarmLink
from swarmnet.net.twins import new_boot_id
from swarmnet.peer.placement import Choice, Serving, placement_rule
from swarmnet.peer.rates import measured
from swarmnet.state.disk import CheckpointStore
from swarmnet.telemetry.text import counted, typed
from swarmnet.transport import Transport, ask

if TYPE_CHECKING:
    from swarmnet.peer.memory_fit import Capacity

LOOK_S = 10.0
"""How long a newcomer looks for a run: the nodes it meets first may not know yet what they will know in a moment."""

BETWEEN_LOOKS_S = 0.5

SILENT_S = 2.0
"""After looking for so long without result it tells the operator."""

SETTLE_S = 1.0
"""How long a newcomer says that it is choosing before it chooses: it learns meanwhile of others that came with it."""

Tell = Callable[[str, str], None]
"""Takes the name of a phase and what it came to, for a person."""


@dataclass(frozen=True, slots=True)
class PreparedJoin:
    """A prepared join, for `run_peer`. config names the manifest's file, the stages and the addresses to join by.

    chosen: the placement rule chose the stage, and may move the peer to another one later; else its operator did.
    joined: this process in the run's DHT, still as a client.
    """

    config: PeerConfig
    manifest: Manifest
    chosen: bool
    joined: JoinedRun
    capacity: Capacity


@contextlib.asynccontextmanager
async def prepare_join(
    config: PeerConfig, invitation: SwarmLink | Manifest, tell: Tell
) -> AsyncGenerator[PreparedJoin, None]:
    """Find the run that `invitation` means and choose the stages that `config` does not name.

    A manifest comes with addresses in `config.bootstrap`; a link brings its own. Raises UsageError, in words that say
    what to do.
    """
    async with contextlib.AsyncExitStack() as stack:
        identity = stack.enter_context(own_identity(config.dir))
        tell("identity", f"{identity.peer}, kept in {config.dir}")
        listen = listen_as(identity, config.network)  # refuses early
        placement_rule(config.placement)  # refuses early, too
        run = invitation.run if isinstance(invitation, SwarmLink) else run_id(invitation)
        # A newcomer was given a wrong address; who was in the run is offline for a while.
        found = await until_answered(
            lambda: stack.enter_async_context(reach(config, identity, invitation, tell, "stage", listen)),
            say=lambda _, words: tell("waiting", words),
            patient=was_in(config.dir, run),
        )
        yield await _prepared(found, tell)


async def _prepared(found: FoundRun, tell: Tell) -> PreparedJoin:
    joined, config = found.joined, found.config
    serving = [record for record in found.records if any(status.synced for status in record.stages)]
    # All of them: no single peer keeps newcomers out.
    if serving and all(record.finished for record in serving):
        raise UsageError(
            f"run {joined.terms.run[:12]} has finished, nothing is left to compute: `swarmnet export` writes its "
            "model, and who owns it can give it more steps with `swarmnet owner extend`"
        )
    # Before it announces that it chooses a stage.
    await joined.endpoint.refuse_twin()

    from swarmnet.peer.memory_fit import Capacity

    # In a thread: to find out what is free may take seconds.
    capacity = await asyncio.to_thread(Capacity, config, found.manifest)
    stages = await _stages(found, capacity, tell)
    chosen = config.model_copy(update={"stages": stages})
    return PreparedJoin(chosen, found.manifest, chosen=not config.stages, joined=joined, capacity=capacity)


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run that was found. config names the manifest's file and whom to join by; records are those of all other peers.

    joined: this process in the run's DHT, with the pass that it shows.
    """

    config: PeerConfig
    manifest: Manifest
    joined: JoinedRun
    records: tuple[Record, ...]


@contextlib.asynccontextmanager
async def reach(
    config: PeerConfig,
    identity: Identity,
    invitation: SwarmLink | Manifest,
    tell: Tell,
    role: Role | None,
    listen: Listen = Listen(client=True),  # noqa: B008
) -> AsyncGenerator[FoundRun, None]:
    """Find the run that `invitation` means, by asking its DHT. Raises UsageError, in words that say what to do.

    role: as what this process has to be admitted, if the run is by invitation. listen: where it will serve, if it will.
    """
    link = invitation if isinstance(invitation, SwarmLink) else None
    if link is not None:
        bootstrap = (link.address, *config.bootstrap)
        config = config.model_copy(update={"bootstrap": bootstrap, "invitation": link.invitation or config.invitation})
    tell("asking", ", ".join(config.bootstrap))
    run = run_id(invitation) if isinstance(invitation, Manifest) else invitation.whole_run
    async with _directory(config, identity, run, listen) as directory:
        if way_in := _way_in(config, directory):
            tell("asking", way_in)
        if run is None:
            assert link is not None
            run = await _whole_run(directory, link, way_in, tell)
            directory.found(run)
        records = await _look(directory, LOOK_S, tell)
        tell("swarm", _seen(run, directory, records))
        if isinstance(invitation, SwarmLink):
            path = _file(config, run)
            manifest = await _manifest(path, run, identity, directory, tell, way_in)
            config = config.model_copy(update={"manifest": path})
        else:
            manifest = invitation
            tell("manifest", f"{_shape(manifest)}; from {config.manifest}")
        terms = RunTerms.of(manifest)
        admissions, notices = admissions_of(terms), notices_of(terms)
        directory.learn(terms.num_stages, admissions)
        # Only who will serve is the same identity the next time.
        own_pass = own_pass_of(admissions, identity, role, config.network, transient=role != "stage")
        # In a run by invitation only admitted peers count from now on.
        if own_pass.shown:
            tell("invitation", f"of the run's owner, good until {own_pass.ends}")
            records = _others(directory, directory.known())
        if not listen.client:
            await directory.take_part(notices, config.manifest)
            own_pass.check(now=wall_time())  # now that bans have arrived
            if notices.end != terms.total_steps:
                tell("extended", f"by the run's owner, to {notices.end:,} steps")
        joined = JoinedRun(identity, directory, terms, config.network, admissions, notices, own_pass, new_boot_id())
        yield FoundRun(config, manifest, joined, records)


# ---------------------------------------------------------------- which run


@contextlib.asynccontextmanager
async def _directory(
    config: PeerConfig, identity: Identity, run: RunId | None, listen: Listen
) -> AsyncGenerator[DhtDirectory, None]:
    """The DHT, where this process only asks so far. Raises UsageError if no peer answers."""
    joining = DhtDirectory(
        identity, run, bootstrap=config.bootstrap, state_dir=config.dir, listen=listen, only_asks=True
    )
    try:
        async with joining as directory:
            yield directory
    except NoPeerAnswered as error:
        kept = _file(config, run) if run else None
        alone = (
            f"; if all are gone, be the first one back with `swarmnet peer --manifest {typed(kept)} "
            f"--dir {typed(config.dir)} --stage N`, of the stage that it served: its checkpoints are there"
        )
        raise NoPeerAnswered(
            f"no peer answers at {', '.join(config.bootstrap)}: check that this machine is online, and that the "
            "address is whole and has the peer's DHT port, not its data port; or ask for a link to a peer that is up "
            f"now (any peer of the run prints one){alone if kept and kept.is_file() else ''}"
        ) from error


def _way_in(config: PeerConfig, directory: DhtDirectory) -> str:
    """What is odd about how the DHT was joined, if anything is."""
    if not directory.by_memory:
        return ""
    return (
        f"no peer answers at {', '.join(config.bootstrap)}; peers that were met before, in this run or another, do "
        f"({config.dir})"
    )


async def _whole_run(directory: DhtDirectory, link: SwarmLink, way_in: str, tell: Tell) -> RunId:
    """The announced run with an id that begins as in the link. way_in: see `_way_in`."""
    run = await announced(directory, link.run, LOOK_S, tell)
    if run is None:
        advice = f"{way_in}: ask for a link to a peer that is up now" if way_in else "is one of its peers up?"
        raise UsageError(f"no peer announces a run with an id that begins with {link.run}: {advice}")
    return run


async def announced(directory: DhtDirectory, digits: str, look_s: float, tell: Tell) -> RunId | None:
    """The run with an id that begins so, if a peer announces it within `look_s`. Raises UsageError if there are
    several."""
    async for _ in _looks(look_s, tell):
        if found := await directory.runs(digits):
            break
    # Which one is meant only the whole id says.
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} announced runs begin with {digits}, {', '.join(run[:24] for run in found[:3])}... among "
            "them: ask for the whole link"
        )
    return found[0] if found else None


async def _look(directory: DhtDirectory, look_s: float, tell: Tell) -> tuple[Record, ...]:
    """The records of all others; none if there is none for `look_s`."""
    async for _ in _looks(look_s, tell):
        if others := _others(directory, await directory.records()):
            return others
    return ()


async def _looks(look_s: float, tell: Tell) -> AsyncGenerator[None, None]:
    clock = asyncio.get_running_loop().time
    began, told = clock(), False
    while True:
        yield
        passed = clock() - began
        if passed >= look_s:
            return
        if passed >= SILENT_S and not told:
            told = True
            tell("swarm", f"no peer announces the run so far; looking for {look_s - passed:.0f} s more")
        await asyncio.sleep(BETWEEN_LOOKS_S)


def _others(directory: DhtDirectory, records: Sequence[Record]) -> tuple[Record, ...]:
    return tuple(record for record in records if record.peer != directory.peer)


def _seen(run: RunId, directory: DhtDirectory, records: Sequence[Record]) -> str:
    peers = sum(bool(record.stages) for record in records)
    trainers = sum(record.feeds for record in records)
    if not records:
        return f"run {run[:12]}: no peer announces it yet"
    return f"run {run[:12]}: {counted(peers, 'peer')} and {counted(trainers, 'trainer')}"


# ---------------------------------------------------------------- the manifest


async def _manifest(
    path: Path, run: RunId, identity: Identity, directory: DhtDirectory, tell: Tell, way_in: str
) -> Manifest:
    """The manifest of `run`, from `path` if it is there already, else from a peer that has it; then kept at `path`.

    way_in: see `_way_in`.
    """
    # Its hash was checked: no peer needs to be asked.
    if (kept := _kept(path, run)) is not None:
        tell("manifest", f"{_shape(kept)}; kept in {path}")
        return kept
    addresses: dict[PeerId, tuple[str, ...]] = {}

    async def whom() -> list[PeerId]:
        # A flood of records may have been there before the record of whom we were told to ask: look again each time.
        seen = _others(directory, await directory.records(at_once=True))
        # Through a relay only peers of the run speak to each other. Each relay can be dialled, and has the manifest.
        able = [record for record in seen if (record.stages or record.feeds) and not record.hidden]
        addresses.update({record.peer: record.addresses for record in able if record.addresses})
        peers = list(addresses)
        random.shuffle(peers)
        # Records cost nothing, and a thousand may name peers that never answer: who answered in the DHT comes first.
        peers.sort(key=lambda peer: (peer not in directory.met, peer not in directory.neighbours))
        return peers

    if not await whom():
        raise UsageError(
            f"no peer that serves a stage of run {run[:12]} is announced, so none can send its manifest: "
            f"{f'{way_in}; ask for a link to a peer that is up now' if way_in else 'wait until a peer of it is up'}, "
            "or join with the manifest's file: swarmnet join run.toml --bootstrap ADDRESS"
        )
    failures: list[str] = []

    def failed(peer: PeerId, error: SwarmError) -> None:
        lied = error.facts.get("code") in (RejectCode.WRONG_RUN.value, RejectCode.MALFORMED.value)
        failures.append(f"{peer} {'sent no genuine manifest' if lied else 'did not answer'}: {error.message}")
        tell("manifest", f"{failures[-1]}; asking another")

    transport = GrpcTransport(identity, None, addresses=lambda peer: addresses.get(peer, ()), listens=False)
    async with transport:
        manifest = await fetch_manifest(transport, run, whom, on_failure=failed)
    if manifest is None:
        raise UsageError(
            f"none of {counted(len(addresses), 'peer')} gave the manifest of run {run[:12]} ({failures[-1]}): join "
            "with its file instead, swarmnet join run.toml --bootstrap ADDRESS"
        )
    _keep(path, manifest)
    tell("manifest", f"{_shape(manifest)}; its hash is the run's id")
    return manifest


def _file(config: PeerConfig, run: RunId) -> Path:
    """Where the manifest of a run is kept."""
    return config.dir / f"run-{run[:12]}.toml"


def _kept(path: Path, run: RunId) -> Manifest | None:
    """What an earlier join left; None if there is nothing, or something else."""
    try:
        manifest = load(path)
    except UsageError:
        return None
    return manifest if run_id(manifest) == run else None


def _keep(path: Path, manifest: Manifest) -> None:
    try:
        path.write_text(to_toml(manifest), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot keep the manifest in {path}: {error.strerror}; choose another --dir") from error


def _shape(manifest: Manifest) -> str:
    return f'"{manifest.name}", {counted(manifest.cut.stages, "stage")}, {manifest.training.total_steps:,} steps'


# ---------------------------------------------------------------- the stage


async def _stages(found: FoundRun, capacity: Capacity, tell: Tell) -> tuple[int, ...]:
    config, num_stages = found.config, found.manifest.cut.stages
    if config.stages:
        if max(config.stages) >= num_stages:
            raise UsageError(
                f"--stage {max(config.stages)}: there is no such stage: the run has stages 0 to {num_stages - 1}"
            )
        tell("stage", f"{', '.join(map(str, config.stages))}, as you said")
        return config.stages
    # Its own checkpoints draw it back to the stage that it served.
    on_disk = CheckpointStore(config.dir, found.joined.terms.run)
    held = [stage for stage in range(num_stages) if on_disk.found(stage).good]
    fits = await asyncio.to_thread(capacity.some_stages, config)
    choice = await _choose(found, fits, held)
    too_large = "" if len(fits) == num_stages else f"; {num_stages - len(fits)} of {num_stages} stages do not fit here"
    tell("stage", f"{choice.stage}: {choice.reason}{too_large}")
    return (choice.stage,)


async def _choose(found: FoundRun, fits: Sequence[int], held: Collection[int]) -> Choice:
    """Say that I am choosing, listen for others who are, choose, and say what. fits: stages that this machine holds."""
    directory, rule = found.joined.directory, placement_rule(found.config.placement)

    async def choice() -> Choice:
        records = await directory.records()
        return rule(directory.peer, fits, servings(records), held=held)

    first = await choice()
    await directory.publish(_intent(found, first.stage, slots=0))
    await asyncio.sleep(SETTLE_S)
    chosen = await choice()
    await directory.publish(_intent(found, chosen.stage, slots=found.config.slots or 1))
    return chosen


def _intent(found: FoundRun, stage: int, *, slots: int) -> Record:
    """What a newcomer says of itself before it serves; no slots: it is still choosing."""
    joined = found.joined
    status = StageStatus(stage, 0, first_chain(joined.terms.run, stage), synced=False, slots=slots)
    return Record(
        run=joined.terms.run,
        peer=joined.identity.peer,
        incarnation=joined.boot_id,
        addresses=(),
        stages=(status,),
        invitation=joined.own_pass.shown,
    )


def servings(records: Sequence[Record]) -> list[Serving]:
    """Records as `placement` takes them."""
    said: dict[int, dict[PeerId, tuple[Estimate, ...]]] = {}
    for record in records:
        for status in record.stages:
            # A peer that does not serve measures no peer, and none measures it.
            if status.synced:
                said.setdefault(status.stage, {})[record.peer] = record.estimates
    rates = {stage: measured(of) for stage, of in said.items()}
    return [
        Serving(
            record.peer,
            status.stage,
            has_state=status.synced or bool(status.disk),
            leaving=status.draining,
            paused=record.paused,
            load=status.queue / max(status.slots, 1),
            choosing=not status.slots and not status.synced,
            synced=status.synced,
            rate=rates[status.stage].get(record.peer) if status.synced else None,
            may_move=record.may_move and len(record.stages) == 1,
            going=record.going,
            surely=record.surely,
        )
        for record in records
        for status in record.stages
    ]


PATIENCE_S = 5.0
"""A peer that says nothing for so long is passed over."""

BUSY_S, _ROUNDS = 2.0, 10
"""Who is busy is asked again after about so long, so often in all."""


async def fetch_manifest(
    transport: Transport,
    run: RunId,
    whom: Callable[[], Awaitable[Sequence[PeerId]]],
    *,
    on_failure: Callable[[PeerId, SwarmError], None],
) -> Manifest | None:
    """Ask for the manifest of `run`, busy peers again; None if none had it.

    whom() returns the peers to ask, best first, and is called before each of them is asked.
    on_failure(peer, error) is called for each that failed: PeerGone, PeerTimeout, Refused, or BadMessage (it sent false
    data, or has another version of swarmnet).
    """
    asked: set[PeerId] = set()
    for round_ in range(_ROUNDS):
        busy: set[PeerId] = set()
        while (peer := next((each for each in await whom() if each not in asked), None)) is not None:
            asked.add(peer)
            try:
                answer = await ask(transport, peer, ManifestRequest(), patience=lambda: PATIENCE_S)
                if isinstance(answer, Busy):
                    busy.add(peer)
                    raise PeerTimeout("it is busy with other newcomers", peer=peer)
                return genuine(expect(answer, ManifestData, peer).toml, run, peer=peer)
            except SwarmError as error:
                on_failure(peer, error)
        if not busy or round_ == _ROUNDS - 1:
            break
        asked -= busy
        await asyncio.sleep(BUSY_S * random.uniform(0.5, 1.5))
    return None


def genuine(text: str, run: RunId, *, peer: PeerId) -> Manifest:
    """`text` as a manifest, if it is the one of `run`. Raises BadMessage."""
    try:
        manifest = load(f"{text}\n", where="what it sent")  # with a line break it is never taken for a path
    except UsageError as error:
        raise BadMessage(RejectCode.MALFORMED, f"not a manifest of this version: {error}", peer=peer) from error
    if (found := run_id(manifest)) != run:
        raise BadMessage(RejectCode.WRONG_RUN, f"the manifest of another run, {found[:12]}", peer=peer)
    return manifest
