"""One peer of `benchmarks/averaging.py`: the same vector averaged in three ways, on orders from a pipe.

Everything that forks (hivemind) starts before anything that has threads (gloo, gRPC). A turn answers when it began and
ended on the machine's monotonic clock, so that the parent can take the slowest peer's word.
"""

from __future__ import annotations

import asyncio
import os
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from averaging_ours import Member
from averaging_place import Place, sample_of, vector_of
from averaging_theirs import HivemindPeer, gloo_turn, start_gloo
from links import enter
from raw_tcp import RawPeer

from swarmnet.ids import PeerId, RunId
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.wire import kernel_build

RUN = RunId("00" * 32)


def live(place: Place, pipe: Connection) -> None:
    """A peer's whole life: start, obey until the pipe closes, and leave without waiting for anybody's threads."""
    os.setsid()  # one group to count and to kill
    if place.namespace:
        enter(place.namespace)
    torch.set_num_threads(1)
    vector = vector_of(place)
    theirs = HivemindPeer(place, vector.clone(), pipe) if place.hivemind else None
    if place.gloo:
        start_gloo(place)
    kernel_build.prepare(threads=1).join()  # a run has them after its first seconds
    asyncio.run(obey(place, pipe, vector, theirs))
    if theirs is not None:
        theirs.close()
    os._exit(0)


async def obey(place: Place, pipe: Connection, vector: torch.Tensor, theirs: HivemindPeer | None) -> None:
    """Carry out orders one after the other."""
    identity = Identity.generate()
    book: dict[PeerId, tuple[str, ...]] = {}
    service = Member(identity.peer, vector, identity)
    transport = GrpcTransport(
        identity,
        RUN,
        addresses=lambda p: book.get(p, ()),
        service=service,
        host=place.hosts[place.rank] if place.hosts else "127.0.0.1",
    )
    raw = RawPeer(place.rank, list(place.hosts)) if place.hosts else None
    service.transport = transport
    async with transport:
        pipe.send((identity.peer, transport.addresses, sample_of(vector)))
        book.update(await asyncio.to_thread(pipe.recv))
        service.meet(list(book))
        while (order := await asyncio.to_thread(receive, pipe)) is not None:
            match order:
                case ("prepare", codec):
                    service.prepare(codec)
                    pipe.send(None)
                case ("ours", number):
                    pipe.send(await service.turn(number))
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
