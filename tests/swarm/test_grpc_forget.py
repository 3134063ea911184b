"""Peers that have left the directory leave nothing behind; connections that are in use outlive their record."""

# ruff: noqa: ASYNC110  (forgetting is nothing that anybody could be told of)

from __future__ import annotations

import asyncio

import pytest

from swarmnet.messages import Fetched, Running
from swarmnet.net import grpc_caller
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from tests.contracts.transport_contract import FETCH, LIMIT_S, execute, packed, same
from tests.swarm.test_grpc_transport import make_transport


def kept(transport: GrpcTransport) -> tuple[int, int, int]:
    """Lines, links and tasks."""
    return len(transport._channels), len(transport._links), len(transport._tasks)


def test_strangers_are_forgotten_with_what_waited_for_them() -> None:
    async def main() -> None:
        book: dict = {}
        config = GrpcConfig(forget_s=0.4)
        a, _ = make_transport(book, config=config)
        b, heard = make_transport(book)
        async with asyncio.timeout(LIMIT_S), a, b:
            before = kept(a)
            book[b.peer] = b.addresses
            a.tell(b.peer, execute(1, a.peer))
            await heard.told.get()
            with_b = kept(a)
            del book[b.peer]  # its record expired; the link stands
            strangers = [Identity.generate().peer for _ in range(20)]
            for stranger in strangers:
                for index in range(5):
                    a.tell(stranger, execute(index, a.peer))
            assert kept(a) == tuple(count + 20 for count in with_b)
            while kept(a) != with_b:
                await asyncio.sleep(0.02)
            await asyncio.sleep(1.0)
            a.tell(b.peer, execute(2, a.peer))
            assert (await heard.told.get())[1].execute == {2}, "over the link it had"
            assert kept(a) == with_b and with_b != before
            await b.__aexit__(None, None, None)  # gone for good
            while kept(a) != before:
                await asyncio.sleep(0.02)

    asyncio.run(main())


def test_a_peer_that_comes_back_is_reached_again() -> None:
    async def main() -> None:
        book: dict = {}
        a, _ = make_transport(book, config=GrpcConfig(forget_s=0.2))
        b, heard = make_transport(book)
        async with asyncio.timeout(LIMIT_S), a, b:
            before = kept(a)
            a.tell(b.peer, execute(1, a.peer))  # not known yet
            while kept(a) != before:
                await asyncio.sleep(0.02)
            book[b.peer] = b.addresses
            a.tell(b.peer, execute(2, a.peer))
            assert (await heard.told.get())[1].execute == {2}

    asyncio.run(main())


def test_a_long_payload_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_caller, "_PROGRESS_S", 0.0)
    down = (packed(5_000_000), packed(0), packed(3_000_001, 9))

    async def answering(caller, request, payload):
        yield Fetched(down)

    async def main() -> None:
        book: dict = {}
        a, _ = make_transport(book)
        b, service = make_transport(book)
        service.answering = answering
        async with asyncio.timeout(LIMIT_S), a, b:
            book[b.peer] = b.addresses
            deadline = asyncio.get_running_loop().time() + LIMIT_S
            *signs, result = [answer async for answer in a.call(b.peer, FETCH, deadline=deadline)]
        assert isinstance(result, Fetched) and same(result.payload, down)
        assert signs == [Running()] * 3, "of five chunks of 2 MiB, one per chunk between the first and the last"

    asyncio.run(main())
