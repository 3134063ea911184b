"""One peer of `benchmarks/averaging.py`: the same vector averaged in three ways, on orders from a pipe.

Everything that forks (hivemind) starts before anything that has threads (gloo, gRPC). A turn answers when it began and
ended on the machine's monotonic clock, so that the parent can take the slowest peer's word.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

import torch
from links import enter
from raw_tcp import RawPeer

from swarmnet.averaging.exchange import Exchange
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId, RunId
from swarmnet.manifest.schema import Averaging, Manifest, Numerics
from swarmnet.messages import Answer, Control, Packed, Part, Request, Round, Stamp
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.net.tls import open_authority
from swarmnet.net.transport import ReadPayload
from swarmnet.stage.compute import ComputeThread, Turn, Work
from swarmnet.stage.engine import Contribution, Engine, Reduced
from swarmnet.stage.optimizer import square_norm
from swarmnet.stage.step_sum import StepSum

RUN = RunId("00" * 32)
SAMPLE = 512
"""Elements at either end of the vector by which a sum is checked."""

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
_TOKENS = 10
T = TypeVar("T")
Book = dict[PeerId, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Place:
    """Who this peer is among the others. file: where gloo's processes find each other.

    namespace: the network namespace to live in, "" for this one. hosts: where everybody listens, () for loopback.
    """

    rank: int
    peers: int
    parameters: int
    file: str
    hivemind: bool
    gloo: bool
    namespace: str = ""
    hosts: tuple[str, ...] = ()


def die() -> None:
    """Kill this peer's processes, hivemind's too."""
    os.killpg(0, signal.SIGKILL)


def vector_of(place: Place) -> torch.Tensor:
    """What this peer contributes: Gaussian, as gradients nearly are."""
    return torch.randn(place.parameters, generator=torch.Generator().manual_seed(place.rank))


def sample_of(vector: torch.Tensor) -> torch.Tensor:
    """A copy of both ends."""
    return torch.cat([vector[:SAMPLE], vector[-SAMPLE:]]).float()


def live(place: Place, pipe: Connection) -> None:
    """A peer's whole life: start, obey until the pipe closes, and leave without waiting for anybody's threads."""
    os.setsid()                                              # one group to count and to kill
    if place.namespace:
        enter(place.namespace)
    torch.set_num_threads(1)
    vector = vector_of(place)
    theirs = HivemindPeer(place, vector.clone(), pipe) if place.hivemind else None
    if place.gloo:
        start_gloo(place)
    asyncio.run(obey(place, pipe, vector, theirs))
    if theirs is not None:
        theirs.close()
    os._exit(0)


async def obey(place: Place, pipe: Connection, vector: torch.Tensor, theirs: HivemindPeer | None) -> None:
    """Carry out orders one after the other."""
    identity = Identity.generate()
    book: Book = {}
    admission = open_authority().admit(identity.peer)
    service = Member(place, identity.peer, vector)
    transport = GrpcTransport(
        identity, RUN, admission=admission, addresses=lambda p: book.get(p, ()), service=service,
        host=place.hosts[place.rank] if place.hosts else "127.0.0.1",
    )
    raw = RawPeer(place.rank, list(place.hosts)) if place.hosts else None
    service.transport = transport
    async with transport:
        pipe.send((identity.peer, transport.addresses, sample_of(vector)))
        book.update(await asyncio.to_thread(pipe.recv))
        service.everyone = tuple(sorted(book))
        while (order := await asyncio.to_thread(receive, pipe)) is not None:
            match order:
                case ("prepare", codec):
                    service.prepare(codec)
                    pipe.send(None)
                case ("ours", number, *bandwidths):
                    pipe.send(await service.turn(number, tuple(bandwidths)))
                case ("connect",):
                    assert raw is not None
                    await asyncio.to_thread(raw.connect)
                    pipe.send(identity.peer)
                case ("raw", num_bytes):
                    assert raw is not None
                    pipe.send(await asyncio.to_thread(raw.turn, num_bytes))
                case ("gloo",):
                    pipe.send(await asyncio.to_thread(gloo_turn, vector))
                case ("hivemind", name, exactly, timeout_s):
                    assert theirs is not None
                    pipe.send(await asyncio.to_thread(theirs.turn, name, exactly, timeout_s))
                case ("die", delay_s):
                    service.dies_after_s = delay_s
                    if theirs is not None:
                        theirs.die(delay_s)


def receive(pipe: Connection) -> tuple[Any, ...] | None:
    """The next order; None when the pipe is closed."""
    try:
        return cast(tuple[Any, ...], pipe.recv())
    except EOFError:
        return None


# ---------------------------------------------------------------- ours


class Given:
    """What `StepSum` asks of a replica's state and of its accumulator, over one given vector: version 0, one shape."""

    stage = version = voids = 0

    def __init__(self, vector: torch.Tensor, numerics: Numerics) -> None:
        self.vector, self._numerics = vector, numerics
        self.num_elements, self.parameter_shapes = vector.numel(), (tuple(vector.shape),)

    def read(self, step: int) -> torch.Tensor:
        """The sum of a step's gradients."""
        return self.vector

    def square_norm(self, total: torch.Tensor) -> float:
        """Of a flat sum."""
        return square_norm(total, numerics=self._numerics)


class VectorEngine:
    """The averaging part of `stage.engine.Engine` over one given vector: the run's own arithmetic, no model."""

    def __init__(self, vector: torch.Tensor, codec: str, compute: ComputeThread) -> None:
        exact = codec == "int64"
        manifest = Manifest(
            averaging=Averaging(codec=codec), numerics=Numerics(mode="deterministic" if exact else "fp32")
        )
        self._unit = 2.0**-manifest.numerics.grid_bits if exact else 1.0
        given: Any = Given((vector / self._unit).to(torch.int64) if exact else vector, manifest.numerics)
        self._sum = StepSum(manifest, given, (given,), device=vector.device)
        self.num_elements, self.phases, self._compute = vector.numel(), self._sum.phases, compute
        self.block, self.private_phases, self.sum_elements = self._sum.block, 0, vector.numel()

    async def _do(self, job: Callable[[], T]) -> T:
        return await self._compute.run(Turn(Work.ROUND, 0, 0, 0), job)

    async def open_round(self, round_id: RoundId, **stands: object) -> None:
        """See Engine."""
        await self._do(lambda: self._sum.begin(round_id))

    async def contribution(self, start: int, stop: int) -> Packed:
        """See Engine."""
        return await self._do(lambda: self._sum.contribution(start, stop))

    async def reduce(
        self, contributions: Sequence[Contribution], start: int, stop: int, *, hop: int = 0
    ) -> Reduced:
        """See Engine."""
        return await self._do(lambda: self._sum.reduce(contributions, start, stop, hop=hop))

    async def open_sum(self) -> None:
        """See Engine."""
        await self._do(self._sum.open)

    async def put(self, start: int, packed: Packed) -> None:
        """See Engine."""
        await self._do(lambda: self._sum.put(start, packed))

    async def next_phase(self) -> None:
        """See Engine."""
        await self._do(self._sum.next_phase)

    async def seal(self) -> tuple[bytes, float]:
        """See Engine."""
        return await self._do(self._sum.seal)

    def sample(self) -> torch.Tensor:
        """Both ends of the finished sum, in the vector's own unit."""
        return sample_of(self._sum.flat) * self._unit


class Member:
    """The service: an exchange per codec, and as much of a keeper as opens a round. Rank 0 keeps.

    A round lasts from the moment the keeper tells of it until the slowest member holds the checked sum. When a member's
    process is gone the keeper opens the next round without it.
    """

    def __init__(self, place: Place, me: PeerId, vector: torch.Tensor) -> None:
        self.place, self.me, self._vector = place, me, vector
        self.transport: GrpcTransport
        self.everyone: tuple[PeerId, ...] = ()
        self._compute = ComputeThread()
        self._exchanges: dict[str, tuple[Exchange, VectorEngine]] = {}
        self._codec = ""
        self._told: asyncio.Queue[Round] = asyncio.Queue()
        self._gone: set[PeerId] = set()
        self.dies_after_s: float | None = None

    def _exchange(self, codec: str) -> tuple[Exchange, VectorEngine]:
        if codec not in self._exchanges:
            self._exchanges.clear()                          # one vector's memory at a time
            engine = VectorEngine(self._vector, codec, self._compute)
            exchange = Exchange(
                self.me, cast(Engine, engine), self.transport, lambda stamp, number: None, num_tokens=_TOKENS
            )
            self._exchanges[codec] = exchange, engine
        return self._exchanges[codec]

    def prepare(self, codec: str) -> None:
        """Have this codec's exchange ready."""
        self._codec = codec
        self._exchange(codec)

    async def turn(self, number: int, bandwidths: tuple[int, ...] = ()) -> dict[str, Any]:
        """One good round: open it (rank 0) or hear of it, and sum; again if a member is lost on the way.

        bandwidths: what members have measured, in the order of their names; (): nothing yet.
        """
        exchange, engine = self._exchange(self._codec)
        sent = self._sent()
        began = time.monotonic() if self.place.rank == 0 else math.inf
        if self.place.rank == 0:
            self._open(number, bandwidths)
        rounds, summing = 0, None
        async with asyncio.TaskGroup() as group:
            while True:
                hearing = group.create_task(self._told.get())
                await asyncio.wait([task for task in (hearing, summing) if task], return_when="FIRST_COMPLETED")
                if summing is not None and summing.done():
                    hearing.cancel()
                    break
                if summing is not None:
                    summing.cancel()
                    exchange.close()
                if self.dies_after_s is not None:
                    asyncio.get_running_loop().call_later(self.dies_after_s, die)
                current, rounds, entered = hearing.result(), rounds + 1, time.monotonic()
                summing = group.create_task(exchange.sum(current, {self.everyone.index(self.me): (1.0, _TOKENS)}))
        ended = time.monotonic()
        return {
            "began": began, "ended": ended, "phase": (entered, ended), "rounds": rounds, "sample": engine.sample(),
            "digest": summing.result().digest, "sent": self._sent() - sent, "members": len(current.receivers),
            "line": exchange.line.bytes_per_s, "peer": self.me,
        }

    def _open(self, number: int, bandwidths: tuple[int, ...] = ()) -> None:
        members = tuple(peer for peer in self.everyone if peer not in self._gone)
        shares = tuple(
            (peer, Generation(1, 0), frozenset({self.everyone.index(peer)})) for peer in members
        )
        ballot = Ballot(1, self.me)
        stamp = Stamp(number, 0, Chain("00" * 32))
        self._number = number
        current = Round(stamp, ballot, RoundId(ballot, len(self._gone)), shares, members, (), bandwidths=bandwidths)
        for peer in members:
            if peer != self.me:
                self.transport.tell(peer, current)
        self._told.put_nowait(current)

    def _sent(self) -> int:
        return sum(int(str(row["sent"])) for row in self.transport.traffic.rows())

    # Service

    def on_tell(self, caller: PeerId, message: Control) -> None:
        """A round of the keeper's."""
        assert isinstance(message, Round)
        self._told.put_nowait(message)

    async def on_call(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        """My share of a round."""
        assert isinstance(request, Part)
        async with contextlib.aclosing(self._exchange(self._codec)[0].serve(request)) as answers:
            async for answer in answers:
                yield answer

    def on_gone(self, peer: PeerId, *, definite: bool) -> None:
        """The keeper goes on without it."""
        if definite and self.place.rank == 0 and peer not in self._gone:
            self._gone.add(peer)
            self._open(self._number)


# ---------------------------------------------------------------- gloo


def start_gloo(place: Place) -> None:
    """Join the group, over loopback."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place.file}", rank=place.rank, world_size=place.peers,
        timeout=datetime.timedelta(seconds=120),
    )


def gloo_turn(vector: torch.Tensor) -> dict[str, Any]:
    """One all-reduce of a copy."""
    copy = vector.clone()
    torch.distributed.barrier()
    began = time.monotonic()
    torch.distributed.all_reduce(copy)
    ended = time.monotonic()
    return {"began": began, "ended": ended, "sample": sample_of(copy)}


# ---------------------------------------------------------------- hivemind


class HivemindPeer:
    """A DHT node and one averager per compression, in processes of their own as hivemind has it.

    An averager stamps when its all-reduce proper began and ended; what is left of a step is matchmaking.
    """

    def __init__(self, place: Place, vector: torch.Tensor, pipe: Connection) -> None:
        import hivemind
        from hivemind.averaging import DecentralizedAverager
        from hivemind.compression import Float16Compression, NoCompression

        multiprocessing.set_start_method("fork", force=True)  # what hivemind expects
        stamps = multiprocessing.get_context("fork").Array("d", 3)

        class Stamped(DecentralizedAverager):  # type: ignore[misc]
            """Says when it averaged."""

            async def _aggregate_with_group(self, *args: Any, **kwargs: Any) -> Any:
                stamps[0] = time.monotonic()
                if stamps[2]:
                    asyncio.get_running_loop().call_later(stamps[2], die)
                try:
                    return await super()._aggregate_with_group(*args, **kwargs)
                finally:
                    stamps[1] = time.monotonic()

        self._stamps = stamps
        if place.rank == 0:
            self._dht = hivemind.DHT(host_maddrs=LOOPBACK, start=True)
            pipe.send([str(address) for address in self._dht.get_visible_maddrs()])
        else:
            self._dht = hivemind.DHT(initial_peers=pipe.recv(), host_maddrs=LOOPBACK, start=True)
        self.vector = vector
        self._averagers = {
            name: Stamped(
                [self.vector], self._dht, prefix=f"bench_{name}", target_group_size=place.peers, start=True,
                compression=compression, min_matchmaking_time=3.0, declare_state_period=3600,
                allow_state_sharing=False,
            )
            for name, compression in {"fp32": NoCompression(), "fp16": Float16Compression()}.items()
        }
        self._mine = vector_of(place)

    def die(self, delay_s: float) -> None:
        """Kill this peer so long after its next all-reduce began."""
        self._stamps[2] = delay_s

    def turn(self, name: str, exactly: int, timeout_s: float) -> dict[str, Any]:
        """Average until a group of `exactly` so many has done so, or `timeout_s` has passed."""
        members = [0]
        # After a member's death `step` itself can block without end, whatever its timeout says: leave it behind.
        trying = threading.Thread(target=self._try, args=(name, exactly, timeout_s, members), daemon=True)
        began = time.monotonic()
        trying.start()
        trying.join(timeout_s)
        return {
            "began": began, "ended": time.monotonic(), "phase": (self._stamps[0], self._stamps[1]),
            "members": members[-1], "rounds": len(members) - 1, "sample": sample_of(self.vector),
        }

    def _try(self, name: str, exactly: int, timeout_s: float, members: list[int]) -> None:
        with self._averagers[name].get_tensors() as (tensor,):
            tensor.copy_(self._mine)
        until = time.monotonic() + timeout_s
        while members[-1] != exactly and (left_s := until - time.monotonic()) > 0:
            step = self._averagers[name].step(timeout=left_s, wait=False)
            try:
                members.append(len(step.result(left_s) or ()))
            except Exception:                                # whatever went wrong, the next attempt counts
                members.append(0)
                step.cancel()

    def close(self) -> None:
        """End the processes."""
        for averager in self._averagers.values():
            averager.kill()
        self._dht.kill()
