"""Peers that nobody can dial, over real sockets: through a relay, or coming to their callers themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from swarmnet.ids import PeerId, RunId
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from tests.contracts.transport_contract import (
    CHECKS,
    LIMIT_S,
    End,
    Pair,
    ScriptedService,
    calling_the_dead_is_definite,
    death_breaks_a_link,
    death_of_the_callee_is_definite,
)

RUN = RunId("ab" * 32)


class World:
    """Transports on loopback that know each other's addresses. A hidden one's port is told to nobody."""

    def __init__(self) -> None:
        self.transports: dict[PeerId, GrpcTransport] = {}
        self.said: list[tuple[PeerId, str, dict[str, object]]] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> World:
        await self._stack.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._stack.__aexit__(*raised)

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        return self.transports[peer].addresses if peer in self.transports else ()

    async def member(self, **options: object) -> End:
        service, identity = ScriptedService(), Identity.generate()
        transport = GrpcTransport(identity, RUN, addresses=self.addresses, service=service, **options)
        await self._stack.enter_async_context(transport)
        self.transports[transport.peer] = transport
        return End(transport.peer, transport, service)

    async def hidden(self, **options: object) -> End:
        found = await self.member(**options)

        def candidates() -> list[PeerId]:
            return [peer for peer, transport in self.transports.items() if not transport.hidden]

        del self.transports[found.peer]  # a candidate would be dialled
        transport = found.transport
        hidden = await transport.hide(candidates, lambda event, fields: self.said.append((found.peer, event, fields)))
        assert hidden
        self.transports[found.peer] = transport
        return found


@asynccontextmanager
async def pair_of(kind: str) -> AsyncIterator[Pair]:
    async with World() as world:
        await world.member(relay_bytes_per_s=1e10)
        a = await (world.hidden() if kind == "both hidden" else world.member())
        b = await world.hidden()
        assert all("/p2p-circuit/" in address for address in world.addresses(b.peer))
        yield Pair(a, b, lambda: b.transport.__aexit__(None, None, None))


OF_THE_DEAD = (death_of_the_callee_is_definite, calling_the_dead_is_definite, death_breaks_a_link)
"""Only a relay says that nobody listens behind it, and its word proves nothing."""


@pytest.mark.parametrize("kind", ["one hidden", "both hidden"])
@pytest.mark.parametrize(
    "check", [each for each in CHECKS if each not in OF_THE_DEAD], ids=lambda check: check.__name__
)
def test_contract(check: Callable[[Pair], Awaitable[None]], kind: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), pair_of(kind) as pair:
            await check(pair)

    asyncio.run(main())
