"""A line that is lent in part, on real sockets: payloads keep to it in both directions, and messages overtake them.

Only what the cap forbids is asserted of the clock, so that a busy machine fails nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest
from test_grpc_transport import grpc_pair

from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Fetched, Gradient, Process, Request
from swarmnet.transport import ReadPayload
from swarmnet.wire.framing import CHUNK_BYTES
from tests.contracts.transport_contract import FETCH, LIMIT_S, PROCESS, Pair, execute, packed

LENT = 8 << 20
"""Bytes per second."""

PAYLOAD = (packed(5 * CHUNK_BYTES),)


async def answering(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
    if isinstance(request, Process):
        yield Accepted()
        await payload()
        yield Gradient(0.0, 1)
    else:
        yield Fetched(PAYLOAD)


async def seconds_of(pair: Pair, request: Request) -> float:
    """Of a call from a to b whose payload goes up (`Process`) or comes down."""
    now = asyncio.get_running_loop().time
    began = now()
    async with contextlib.aclosing(pair.call_b(request, PAYLOAD if request is PROCESS else ())) as answers:
        async for _ in answers:
            pass
    return now() - began


@pytest.mark.parametrize(
    ("request_", "lender", "way"),
    [(PROCESS, "a", "up"), (PROCESS, "b", "down"), (FETCH, "b", "up"), (FETCH, "a", "down")],
    ids=["upload", "callee_downloads", "callee_uploads", "download"],
)
def test_a_payload_keeps_to_what_is_lent(request_: Request, lender: str, way: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), grpc_pair() as pair:
            pair.b.service.answering = answering
            lent = getattr(getattr(pair, lender).transport.traffic, way)
            await seconds_of(pair, request_)
            before, total = await seconds_of(pair, request_), lent.total
            assert total > 2 * PAYLOAD[0].num_bytes
            lent.set_rate(LENT)
            capped_s = await seconds_of(pair, request_)
            # The first piece goes at once; of the last, a reader waits for nothing more.
            held_s = (PAYLOAD[0].num_bytes - 2 * CHUNK_BYTES) / LENT
            assert capped_s > held_s
            # Within a tenth of what is lent, over what was held back; the uncapped call says what all else takes.
            if capped_s < 1.5 * held_s + before:
                assert (lent.total - total) / (capped_s + 2 * CHUNK_BYTES / LENT) < 1.1 * LENT

    asyncio.run(main())


def test_a_message_overtakes_a_payload_that_waits() -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), grpc_pair() as pair:
            pair.b.service.answering = answering
            pair.a.transport.tell(pair.b.peer, execute(0, pair.a.peer))
            await pair.b.service.told.get()
            pair.a.transport.traffic.up.set_rate(2 * CHUNK_BYTES)
            upload = asyncio.create_task(seconds_of(pair, PROCESS))
            await asyncio.sleep(0)
            for index in range(20):
                pair.a.transport.tell(pair.b.peer, execute(index, pair.a.peer))
                await pair.b.service.told.get()
            assert not upload.done()
            await upload

    asyncio.run(main())
