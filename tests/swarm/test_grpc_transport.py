"""The gRPC transport on real sockets: the common contract, hostile peers, and real deaths."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from swarmnet.ids import PeerId, RunId
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.net.tls import open_authority
from tests.contracts.transport_contract import CHECKS, LIMIT_S, End, Pair, ScriptedService

RUN = RunId("ab" * 32)


def make_transport(
    book: dict[PeerId, tuple[str, ...]], *, run: RunId | None = RUN, identity: Identity | None = None, **options
) -> tuple[GrpcTransport, ScriptedService]:
    """A transport that looks peers up in `book`."""
    identity = identity or Identity.generate()
    service = ScriptedService()
    transport = GrpcTransport(
        identity, run, admission=open_authority().admit(identity.peer),
        addresses=lambda peer: book.get(peer, ()), service=service, **options,
    )
    return transport, service


@asynccontextmanager
async def grpc_pair(config: GrpcConfig = GrpcConfig()) -> AsyncIterator[Pair]:  # noqa: B008
    """Two transports in this process, over TLS on loopback."""
    book: dict[PeerId, tuple[str, ...]] = {}
    a, service_a = make_transport(book, config=config)
    b, service_b = make_transport(book, config=config)
    async with a, b:
        book |= {a.peer: a.addresses, b.peer: b.addresses}
        yield Pair(End(a.peer, a, service_a), End(b.peer, b, service_b), b.close)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Pair], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), grpc_pair() as pair:
            await check(pair)

    asyncio.run(main())
