"""What one caller may ask of a peer over real sockets, and that others are not the worse for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from test_grpc_transport import RUN, fetched, hostile, in_s, make_transport, raw_channel, say_hello, with_victim

from swarmnet.errors import PeerGone, PeerTimeout
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Busy, Fetched, HistoryRequest, ManifestRequest, Request
from swarmnet.net import dials, grpc_callee
from swarmnet.net.address import Address, endpoint_of
from swarmnet.net.grpc_caller import METHODS
from swarmnet.net.grpc_link import LINK
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.net.grpc_transport import GrpcTransport
from swarmnet.net.identity import Identity
from swarmnet.pacing import Backoff, Rate
from swarmnet.testing.doubles import FakeService
from swarmnet.transport import ReadPayload
from swarmnet.wire.convert import read_answer, write_control, write_request
from swarmnet.wire.deflate import Deflater
from tests.contracts.transport_contract import FETCH, LIMIT_S, PROCESS, execute

BURST = 20
SLOW = GrpcConfig(messages=Rate(0.01, burst_s=BURST / 0.01))
"""A burst, and then a message every hundred seconds."""

PING, GOAWAY = 6, 7
"""Frames of HTTP/2."""


def test_who_sends_too_much_waits_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(victim: GrpcTransport, service: FakeService) -> None:
        leaf = hostile()
        honest, _ = make_transport({victim.peer: victim.addresses})
        async with raw_channel(victim, leaf.key, leaf.chain) as channel, honest:
            await say_hello(channel)
            links = [channel.stream_stream(LINK)(timeout=15) for _ in range(2)]
            for link in links:
                assert read_answer(await link.read())[0] == Accepted()
                packed = Deflater()
                for number in range(BURST):
                    await link.write(packed(write_control(execute(number, honest.peer))))
            heard = [await service.told.get() for _ in range(BURST)]
            assert {caller for caller, _ in heard} != {honest.peer}
            few = BURST // 2  # a ping goes with them, and counts
            for number in range(few):
                honest.tell(victim.peer, execute(number, honest.peer))
            heard = [await service.told.get() for _ in range(few)]
            assert {caller for caller, _ in heard} == {honest.peer}, "the flood is left unread"

    with caplog.at_level(logging.WARNING, "swarmnet.net.grpc_callee"):
        with_victim(scenario, config=SLOW)
    assert [record.message for record in caplog.records].count("too_many_messages") == 1


def test_what_unpacks_to_little_is_counted_as_it_came(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(victim: GrpcTransport, service: FakeService) -> None:
        leaf = hostile()
        async with raw_channel(victim, leaf.key, leaf.chain) as channel:
            await say_hello(channel)
            link = channel.stream_stream(LINK)(timeout=15)
            assert read_answer(await link.read())[0] == Accepted()
            nothing = b"\x00\x00\x00\xff\xff" * 10_000  # stored blocks of no bytes
            for number in range(3):
                await link.write(nothing + Deflater()(write_control(execute(number, victim.peer))))
            await service.told.get()

    few = GrpcConfig(message_bytes=Rate(1_000.0, burst_s=60.0))
    with caplog.at_level(logging.WARNING, "swarmnet.net.grpc_callee"):
        with_victim(scenario, config=few)
    assert [record.message for record in caplog.records].count("too_many_messages") == 1


def test_a_caller_has_so_many_links_and_no_more() -> None:
    async def scenario(victim: GrpcTransport, service: FakeService) -> None:
        leaf = hostile()
        async with raw_channel(victim, leaf.key, leaf.chain) as channel:
            await say_hello(channel)
            links = [channel.stream_stream(LINK)(timeout=15) for _ in range(2)]
            for link in links:
                assert read_answer(await link.read())[0] == Accepted()
            one_too_many = channel.stream_stream(LINK)(timeout=15)
            assert isinstance(read_answer(await one_too_many.read())[0], Busy)
            links[0].cancel()
            while isinstance(read_answer(await channel.stream_stream(LINK)(timeout=15).read())[0], Busy):
                pass  # until the victim has noticed

    with_victim(scenario, config=GrpcConfig(links=2))


def test_who_has_not_greeted_has_few_open_calls_and_its_nonsense_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(victim: GrpcTransport, service: FakeService) -> None:
        leaf = hostile()
        async with raw_channel(victim, leaf.key, leaf.chain) as channel:
            calls = [channel.stream_stream(METHODS[ManifestRequest])(timeout=15) for _ in range(5)]
            answers = [asyncio.ensure_future(call.read()) for call in calls]
            (refused, *_), _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
            assert isinstance(read_answer(refused.result())[0], Busy), "four wait for what never comes"
            for call in calls:
                call.cancel()
            for _ in range(5):
                nonsense = channel.stream_stream(METHODS[ManifestRequest])(timeout=15)
                await nonsense.write(b"nonsense")
                await nonsense.read()

    with caplog.at_level(logging.WARNING, "swarmnet.net.grpc_callee"):
        with_victim(scenario)
    assert [record.message for record in caplog.records].count("bad_request") == 1


def test_silent_strangers_keep_no_newcomer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_callee, "_ALL_STRANGERS_CALLS", 1)
    monkeypatch.setattr(grpc_callee, "_STRANGERS_WORD_S", 0.5)

    async def scenario(victim: GrpcTransport, service: FakeService) -> None:
        service.answering = fetched
        silent, newcomer = hostile(), hostile()
        async with (
            raw_channel(victim, silent.key, silent.chain) as held,
            raw_channel(victim, newcomer.key, newcomer.chain) as channel,
        ):

            async def asked(request: Request) -> Answer:
                call = channel.stream_stream(METHODS[type(request)])(timeout=15)
                await call.write(write_request(request))
                return read_answer(await call.read())[0]

            call = held.stream_stream(METHODS[HistoryRequest])(timeout=15)
            reading = asyncio.ensure_future(call.read())
            while not victim._callee._calls:  # noqa: ASYNC110  (it has no event for that)
                await asyncio.sleep(0)
            assert isinstance(await asked(HistoryRequest(0)), Busy), "its place is taken"
            assert not isinstance(await asked(ManifestRequest()), Busy), "what is asked for here has places of its own"
            assert await reading is grpc.aio.EOF, "it has said nothing for too long"
            assert not isinstance(await asked(HistoryRequest(0)), Busy)

    with_victim(scenario, config=GrpcConfig(stall_s=60.0))


@pytest.mark.parametrize(("pings", "too_many"), [(500, False), (1500, True)])
def test_who_pings_without_end_is_disconnected(pings: int, too_many: bool, tmp_path: Path) -> None:
    async def scenario(victim: GrpcTransport, service: FakeService) -> None:
        leaf = hostile()
        (tmp_path / "key").write_bytes(leaf.key)
        (tmp_path / "chain").write_bytes(leaf.chain)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(tmp_path / "chain", tmp_path / "key")
        context.set_alpn_protocols(["h2"])
        where = Address.parse(victim.addresses[0])
        reader, writer = await asyncio.open_connection(where.host, where.port, ssl=context)
        settings, ping = bytes.fromhex("000000040000000000"), bytes.fromhex("000008060000000000") + b"8 bytes."
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + pings * ping)
        answered, kinds = 0, []
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # it ends
            while too_many or answered < pings:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                kinds.append(head[3])
                answered += head[3] == PING
        writer.close()
        assert (GOAWAY in kinds) == too_many

    with_victim(scenario)


def test_a_caller_has_so_many_open_calls_and_no_more() -> None:
    async def endless(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
        yield Accepted()
        await asyncio.Event().wait()

    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, _ = make_transport(book)
        b, service = make_transport(book, config=GrpcConfig(calls=2))
        other, _ = make_transport(book)
        service.answering = endless
        async with asyncio.timeout(LIMIT_S), a, b, other:
            book |= {b.peer: b.addresses}

            async def first(transport: GrpcTransport) -> Answer:
                calls.append(transport.call(b.peer, PROCESS, deadline=in_s(10)))
                return await anext(calls[-1])

            calls: list[AsyncGenerator[Answer, None]] = []
            assert [await first(a) for _ in range(2)] == [Accepted()] * 2
            assert isinstance(await first(a), Busy)
            assert await first(other) == Accepted()
            await calls[0].aclose()
            while isinstance(await first(a), Busy):
                pass  # until b has noticed
            for call in calls:
                await call.aclose()

    asyncio.run(main())


@asynccontextmanager
async def third_party() -> AsyncIterator[tuple[str, list[None]]]:
    """Somebody who has nothing to do with the run: its address, and one entry per connection that it got."""
    got: list[None] = []

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(None)
        writer.close()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with listener:
        yield f"/ip4/127.0.0.1/tcp/{listener.sockets[0].getsockname()[1]}", got


def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is dialled again within a test."""
    for again in ("DIAL_AGAIN", "DIAL_OF_ALL_AGAIN"):
        monkeypatch.setattr(dials, again, partial(Backoff, 30.0, 30.0))
    monkeypatch.setattr(dials, "DIAL_FIRST_S", 30.0)


async def in_vain(transport: GrpcTransport, peer: PeerId) -> PeerGone:
    with pytest.raises(PeerGone) as caught:
        async for _ in transport.call(peer, FETCH, deadline=in_s(10)):
            raise AssertionError("a third party answered")
    return caught.value


def test_a_third_party_is_not_dialled_for_everybody_who_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    long_pauses(monkeypatch)

    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, _ = make_transport(book)
        async with asyncio.timeout(LIMIT_S), a, third_party() as (address, got):
            bogus = [Identity.generate().peer for _ in range(20)]
            book |= dict.fromkeys(bogus, (address,))
            await in_vain(a, bogus[0])
            once = len(got)
            assert 1 <= once <= 2, "one connection, and one to see whether anybody listens"
            for peer in bogus:
                await in_vain(a, peer)
                a.tell(peer, execute(0, a.peer))
            assert len(got) == once

    asyncio.run(main())


def test_a_peer_whose_address_others_name_is_reached_when_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    long_pauses(monkeypatch)

    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, answers = make_transport(book)
        b, service = make_transport(book)
        service.answering = answers.answering = fetched
        async with asyncio.timeout(LIMIT_S), a, b:
            impostor = Identity.generate().peer
            book |= {impostor: (f"/ip4/127.0.0.1/tcp/{b.port}",), b.peer: b.addresses, a.peer: a.addresses}
            await in_vain(a, impostor)
            await in_vain(a, b.peer)
            assert [answer async for answer in b.call(a.peer, FETCH, deadline=in_s(10))] == [Fetched()]
            assert [answer async for answer in a.call(b.peer, FETCH, deadline=in_s(10))] == [Fetched()]

    asyncio.run(main())


def test_a_peer_that_answered_cannot_send_us_elsewhere_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers at its own address, and then names a third party's."""
    long_pauses(monkeypatch)

    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, _ = make_transport(book)
        b, service = make_transport(book)
        service.answering = fetched
        async with asyncio.timeout(LIMIT_S), a, b, third_party() as (address, got):
            book[b.peer] = b.addresses
            assert [answer async for answer in a.call(b.peer, FETCH, deadline=in_s(10))] == [Fetched()]
            book[b.peer] = (address,)
            await in_vain(a, b.peer)
            once = len(got)
            for _ in range(10):
                await in_vain(a, b.peer)
            assert len(got) == once <= 2

    asyncio.run(main())


def test_silent_connections_keep_no_caller_out(tmp_path: Path) -> None:
    """Three hundred of them, and the peer may have 256 descriptors in all: it holds half as many, each for 2.5 s."""

    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, _ = make_transport(book)
        child = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            'ulimit -n 256; exec "$@"',
            "sh",
            sys.executable,
            str(Path(__file__).with_name("grpc_child.py")),
            RUN,
            str(tmp_path / "key"),
            "0",
            "10.0",
            "2.5",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        try:
            assert child.stdout is not None
            peer, address = (await child.stdout.readline()).decode().split()
            book[PeerId(peer)] = (address,)
            where = Address.parse(address)
            silent = [socket.create_connection((where.host, where.port)) for _ in range(300)]
            while not await reached(a, PeerId(peer)):
                pass  # the others are closed after 2.5 s
            for connection in silent:
                connection.close()
        finally:
            child.kill()
            said = await child.stderr.read() if child.stderr is not None else b""
            await child.wait()
        assert b"descriptors_run_out" not in said

    async def reached(a: GrpcTransport, peer: PeerId) -> bool:
        try:
            return [answer async for answer in a.call(peer, FETCH, deadline=in_s(5))] == [Fetched()]
        except (PeerGone, PeerTimeout):
            return False

    async def limited() -> None:
        async with asyncio.timeout(60.0):
            await main()

    asyncio.run(limited())


def test_hosts_are_read_as_grpc_writes_them() -> None:
    assert endpoint_of("ipv4:127.0.0.1:4711") == ("127.0.0.1", 4711)
    assert endpoint_of("ipv6:%5B2001:db8::1%5D:4711") == ("2001:db8::1", 4711)
    assert endpoint_of("unix:/tmp/socket") == ("", 0)
