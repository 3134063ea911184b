"""A peer in a process of its own, to be killed or stopped: it takes every call with Accepted and then says nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from swarmnet.ids import PeerId, RunId
from swarmnet.messages import Accepted, Answer, Control, Fetch, Fetched, Request
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.transport import ReadPayload


class Silent:
    """Accepts; answers only `Fetch`."""

    def on_tell(self, caller: PeerId, message: Control) -> None:
        """Not interested."""

    async def on_call(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
        """Fetch is answered, the rest waits for ever."""
        if isinstance(request, Fetch):
            yield Fetched()
            return
        yield Accepted()
        await asyncio.Event().wait()

    def on_reached(self, peer: PeerId) -> None:
        """Not interested."""

    def on_gone(self, peer: PeerId, *, definite: bool) -> None:
        """Not interested."""


async def main(run: str, key: str, port: str, stall_s: str, handshake_s: str = "10.0") -> None:
    identity = Identity.load_or_create(Path(key))
    transport = GrpcTransport(
        identity,
        RunId(run),
        addresses=lambda _: (),
        service=Silent(),
        port=int(port),
        config=GrpcConfig(stall_s=float(stall_s), handshake_s=float(handshake_s)),
    )
    async with transport:
        print(transport.peer, *transport.addresses, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
