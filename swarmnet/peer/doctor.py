"""`swarmnet doctor`: looks at this machine, and with a link at its line to a run, before or while a peer runs here.

What it finds is put in words by `checkup`. With a link it does what a joiner does up to the point of serving: it finds
the run, listens where the peer would, has members dial it back, and measures the line to a few of them. It serves
nothing and holds no weights; its record says that it has left already.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path

from swarmnet import __version__, host
from swarmnet.clock import CLOCK, loop_time, run_loop
from swarmnet.config.peer import PeerConfig
from swarmnet.directory import Record
from swarmnet.errors import PeerTimeout, Refused, RejectCode, SwarmError, UsageError, leaves
from swarmnet.fetch.plan import address
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Manifest
from swarmnet.manifest.terms import RunTerms
from swarmnet.messages import Answer, Control, HistoryRequest, Rejected, Request, Snapshot, SnapshotRequest
from swarmnet.net.address import announced_at, peer_in
from swarmnet.net.bulk.pool import BulkListener
from swarmnet.net.descriptors import raise_limit
from swarmnet.net.endpoint import Endpoint, listen_as
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import holder_of, own_identity
from swarmnet.net.nat.dial_back import Asking
from swarmnet.net.nat.kinds import Sight
from swarmnet.net.ports import LastPorts, check_free
from swarmnet.net.swarm_link import SwarmLink
from swarmnet.peer import checkup
from swarmnet.peer.checkup import Row
from swarmnet.peer.joining import reach
from swarmnet.peer.memory_fit import free_on_gpus
from swarmnet.transport import ReadPayload, Transport, ask
from swarmnet.wire import kernel_build

PACKAGES = ("torch", "grpcio", "hivemind")
MEMBERS = 3
"""To so many the network link is measured."""

_PINGS, _PING_S, _FETCH_S = 3, 20.0, 20.0
_NO_STEP = 1 << 53
"""No run is so long: a member has next to nothing to answer."""
_LEAST_BYTES = 1 << 18
"""Less state crosses within a round trip or two, and says nothing of the bandwidth."""

_PROBE_S = 0.5
_BULK_S = 5.0
"""A dial takes some round trips; one that a firewall drops takes for ever."""
_LOOKS = 4  # tries to hear from two members where calls of this machine come from
_BETWEEN_LOOKS_S = 2.0
_SIZES = {"cuda": 4096, "cpu": 1024}
"""Of the matrices that are multiplied: large enough that waiting for the device does not count."""


def run_doctor(config: PeerConfig, invited: SwarmLink | Manifest | None, *, as_json: bool) -> int:
    """Print what is found, as lines or as one JSON object. Returns 0 if all is well, 1 if something is not."""
    rows: list[Row] = []
    # Without a key of its own it takes the id that the addresses name.
    me = next(filter(None, map(peer_in, config.announce)), PeerId(""))
    announced_at(config.announce, me, port=config.port, dht_port=config.dht_port)

    def found(row: Row) -> None:
        rows.append(row)
        if not as_json:
            print("\n".join(checkup.lines([row])), flush=True)

    for row in machine(config):
        found(row)
    if invited is not None:
        run_loop(_swarm(config, invited, found))
    if as_json:
        print(json.dumps({"well": not checkup.exit_code(rows), "rows": [row.record() for row in rows]}, indent=2))
    return checkup.exit_code(rows)


# ---------------------------------------------------------------- this machine


def machine(config: PeerConfig) -> Iterator[Row]:
    """The checks that need no other peer."""
    yield checkup.software(
        sys.version_info[:3], {"swarmnet": __version__} | {name: _version(name) for name in PACKAGES}
    )

    import torch  # takes a second or two

    gpus = range(torch.cuda.device_count() if config.device != "cpu" else 0)
    unseen = config.device != "cpu" and not gpus and Path("/dev/nvidia0").exists()
    name = torch.cuda.get_device_name(0) if gpus else f"CPU with {host.cores()} cores, {config.threads} of them used"
    missing = config.device == "cuda" and not gpus
    tflops = _tflops("cuda" if gpus else "cpu", config.threads)
    yield checkup.compute(name, tflops, gpu_unseen=unseen, gpu_missing=missing)
    yield checkup.kernels(kernel_build.compiler())
    limits = host.group_limits()
    yield checkup.memory(host.available_memory(), free_on_gpus(gpus), limit=limits.memory_limit)
    place = next(each for each in (config.dir, *config.dir.parents) if each.exists())
    yield checkup.disk(str(config.dir), shutil.disk_usage(place).free)
    yield checkup.descriptors(raise_limit())
    yield checkup.tasks(limits.tasks)
    # NCCL's ranks exchange through it; ranks on the CPU bring memory of their own.
    if len(gpus) > 1 and Path("/dev/shm").exists():
        yield checkup.shared_memory(shutil.disk_usage("/dev/shm").free)
    taken = {}
    ports = {"--port": config.port, "--dht-port": config.dht_port, "--bulk-port": config.bulk_port}
    for flag, port in ports.items():
        try:
            check_free(config.host, port, flag=flag)
        except UsageError:
            taken[flag] = port
    running = holder_of(config.dir) is not None
    yield checkup.listening(taken, own=astuple(LastPorts.read(config.dir)) if running else ())


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _tflops(device: str, threads: int) -> float:
    """Of products of matrices, in the format in which a stage is computed there by default."""
    import torch

    torch.set_num_threads(threads)
    size, dtype = _SIZES[device], torch.bfloat16 if device == "cuda" else torch.float32
    one = torch.ones(size, size, dtype=dtype, device=device)

    def multiply() -> float:
        began = time.perf_counter()
        float((one @ one)[0, 0])  # waits for the device
        return time.perf_counter() - began

    multiply()  # kernels are chosen, and loaded
    until, times = time.perf_counter() + _PROBE_S, [multiply()]
    while time.perf_counter() < until:
        times.append(multiply())
    return 2 * size**3 / min(times) / 1e12


# ---------------------------------------------------------------- the swarm


class _Silent:
    """A service that serves nothing."""

    def on_tell(self, caller: PeerId, message: Control) -> None:
        pass

    async def on_call(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        raise Refused(RejectCode.NOT_SERVED, "a doctor serves nothing")
        yield

    def on_reached(self, peer: PeerId) -> None:
        pass

    def on_gone(self, peer: PeerId, *, definite: bool) -> None:
        pass


async def _swarm(config: PeerConfig, invited: SwarmLink | Manifest, found: Callable[[Row], None]) -> None:
    with contextlib.ExitStack() as stack:
        # Its peer has the ports and the key: what others see of this machine is the same for any other.
        mine = holder_of(config.dir)
        if mine is not None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            config = config.model_copy(update={"dir": place, "port": 0, "dht_port": 0, "bulk_port": 0, "announce": ()})
        try:
            with own_identity(config.dir) as identity:
                listen = listen_as(identity, config.network)
                async with reach(config, identity, invited, lambda phase, words: None, "stage", listen) as run:
                    terms, endpoint = run.joined.terms, run.joined.endpoint
                    found(checkup.swarm(terms.run, sum(bool(record.stages) for record in run.records)))
                    async with endpoint.serve(_Silent()):
                        await _as_member(endpoint, terms, found, mine)
        except* SwarmError as errors:
            # In its own words, which say what to do.
            found(checkup.no_swarm("; ".join(dict.fromkeys(str(each) for each in leaves(errors)))))


async def _as_member(endpoint: Endpoint, terms: RunTerms, found: Callable[[Row], None], mine: PeerId | None) -> None:
    """As a member that serves nothing. mine: the peer that runs here, to which a line says nothing."""
    directory, transport = endpoint.directory, endpoint.transport
    await directory.records()
    # Members open connections only to announced peers. No member depends on a trainer that has left.
    await directory.publish(replace(endpoint.record(), trainer=True, finished=True))

    def members() -> dict[PeerId, Record]:
        return {record.peer: record for record in directory.known() if record.peer != endpoint.me}

    events: dict[str, dict[str, object]] = {}
    asking = Asking(
        endpoint.record,
        transport,
        members,
        lambda event, fields: events.update({event: fields}),
        hide=endpoint.hide,
        proofs=transport,
    )
    with contextlib.suppress(UsageError):  # it is among the events
        await asking.check()
    said = next((events[name] for name in ("hidden", "unreachable", "dialled_back") if name in events), {})
    reached = checkup.reached(said, (transport.port, directory.port))
    found(reached)
    how = reached.facts["how"]
    if transport.bulk.port:
        found(checkup.bulk(how, transport.bulk.port, await _bulk_callers(transport.bulk, how)))
    offsets = {}
    serving = [record for record in directory.known() if record.peer not in (endpoint.me, mine) and record.stages]
    for record in sorted(serving, key=lambda record: record.hidden)[:MEMBERS]:
        peer = record.peer
        try:
            round_trip_s = await _round_trip(transport, peer)
            down = await _fetch_rate(transport, peer, record.stages[0].stage, round_trip_s)
        except SwarmError as error:
            found(checkup.no_line(peer, error.message or type(error).__name__))
        else:
            found(checkup.line(peer, round_trip_s, down))
        if (offset := transport.clock_offset_s(peer)) is not None:
            offsets[peer] = offset + CLOCK.ahead_s()  # the system's clock is what its owner can set
    await _nat(endpoint, mine, how, found)
    found(checkup.clock(offsets, terms.max_clock_offset_s))


async def _round_trip(transport: Transport, peer: PeerId) -> float:
    """The shortest of a few calls that ask for next to nothing. Raises PeerGone, PeerTimeout, BadMessage."""
    round_trips = []
    for _ in range(_PINGS):  # the first one opens the connection
        began = loop_time()
        await ask(transport, peer, HistoryRequest(_NO_STEP), limit_s=_PING_S)
        round_trips.append(loop_time() - began)
    return min(round_trips)


async def _fetch_rate(transport: GrpcTransport, peer: PeerId, stage: int, round_trip_s: float) -> float:
    """Bytes per second at which one piece of the peer's state arrives, fetched as by a joining replica; 0.0: it has no
    state, little of it, or other replicas to serve. Raises PeerGone, BadMessage, Refused."""
    flow = transport.traffic.flow(peer, SnapshotRequest)
    with contextlib.suppress(PeerTimeout):
        answer = await ask(transport, peer, SnapshotRequest(stage), limit_s=_FETCH_S)
        if isinstance(answer, Rejected) and answer.code is not RejectCode.NOT_READY:
            raise Refused(answer.code, answer.reason, peer=peer)
        if not isinstance(answer, Snapshot) or answer.content.num_bytes < _LEAST_BYTES:
            return 0.0
        began, before = loop_time(), flow.received
        piece = SnapshotRequest(stage, answer.header.version, address(answer.content), 0)
        # Of a large stage a piece is large: what has arrived within the limit is enough to tell.
        with contextlib.suppress(PeerTimeout):
            await ask(transport, peer, piece, limit_s=_FETCH_S)
        seconds = loop_time() - began
        # The round trip was another one, and on a busy machine it may take as long as all of this one.
        return (flow.received - before) / max(seconds - round_trip_s, seconds / 4, 1e-6)
    return 0.0


async def _bulk_callers(bulk: BulkListener, how: str) -> frozenset[PeerId]:
    """Who has connected to the port of bulk connections: members that dial back try that as well."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_BULK_S):
            while how == "direct" and not bulk.callers:  # noqa: ASYNC110
                await asyncio.sleep(_BULK_S / 50)
    return bulk.callers


async def _nat(endpoint: Endpoint, mine: PeerId | None, how: str, found: Callable[[Row], None]) -> None:
    sight = Sight(("", 0), ())
    for look in range(_LOOKS):
        # A busy member may have been late, as may its record.
        if look:
            await asyncio.sleep(_BETWEEN_LOOKS_S)
        records = await endpoint.directory.records(at_once=True)
        serving = [record for record in records if record.stages and record.peer not in (endpoint.me, mine)]
        members = [record.peer for record in serving if not record.hidden]
        with contextlib.suppress(SwarmError, TimeoutError):  # no peer can tell
            sight = await endpoint.transport.network.holes.sight(members)
        if sight.kind() != "unknown":
            break
    found(checkup.nat(sight.kind(), how=how, ports=(endpoint.transport.port, endpoint.directory.port)))
