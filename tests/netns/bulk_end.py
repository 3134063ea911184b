"""`python bulk_end.py NAMESPACE HOST [PEER ADDRESS]`: one end of a transport in that network namespace.

Without PEER it answers every payload with itself, and says where until its input ends. With it, it sends 4 MB again and
again, and says for each call how many bytes came back and how many bulk connections there are, as JSON lines.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator

from benchmark_modules import load

from swarmnet.ids import PeerId, RunId
from swarmnet.messages import Answer, Gradient, Packed, Process, Request
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.testing.doubles import FakeService
from swarmnet.transport import ReadPayload

PORT = 31340
CALLS, SIZE = 12, 4_000_000


async def echo(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
    """Answers with what came."""
    yield Gradient(0.0, 0, payload=await payload())


async def main(host: str, *known: str) -> None:
    book = {PeerId(known[0]): (known[1],)} if known else {}
    transport = GrpcTransport(
        Identity.generate(),
        RunId("00" * 32),
        addresses=lambda peer: book.get(peer, ()),
        service=FakeService(echo),
        host=host,
        port=0 if known else PORT,
    )
    async with transport:
        if not known:
            print(transport.peer, *transport.addresses, flush=True)
            await asyncio.to_thread(sys.stdin.read)
            return
        peer, loop = PeerId(known[0]), asyncio.get_running_loop()
        data = bytes(range(250)) * (SIZE // 250)
        for _ in range(CALLS):
            payload = (Packed("uint8", (SIZE,), data),)
            began = loop.time()
            answers = [a async for a in transport.call(peer, Process(0, 0, 0), payload, deadline=began + 60)]
            came = [part for answer in answers if isinstance(answer, Gradient) for part in answer.payload]
            same = [bytes(part.data) == data for part in came]
            connections = len(transport._channels_to(peer).bulk.connections)
            line = {"same": same, "seconds": loop.time() - began, "connections": connections}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    load("links").enter(sys.argv[1])
    asyncio.run(main(*sys.argv[2:]))
