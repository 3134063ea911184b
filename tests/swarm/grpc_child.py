"""A peer in a process of its own, to be killed or stopped: it takes every call with Accepted and then says nothing."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from swarmnet.ids import RunId
from swarmnet.messages import Accepted, Fetch, Fetched
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.testing.doubles import FakeService


async def main(run: str, key: str, port: str, stall_s: str, handshake_s: str = "10.0") -> None:
    identity = Identity.load_or_create(Path(key))
    transport = GrpcTransport(
        identity,
        RunId(run),
        addresses=lambda _: (),
        service=FakeService(lambda _, request, __: Fetched() if isinstance(request, Fetch) else [Accepted(), None]),
        port=int(port),
        config=GrpcConfig(stall_s=float(stall_s), handshake_s=float(handshake_s)),
    )
    async with transport:
        print(transport.peer, *transport.addresses, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
