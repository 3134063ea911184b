"""Bulk connections between real transports on loopback: what they carry, and that nothing on them does harm."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest
from test_grpc_transport import RUN, grpc_pair, make_transport

from swarmnet.errors import PeerGone, PeerTimeout, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Fetch, Gradient, Packed, Process, Rejected, Request, SnapshotRequest
from swarmnet.net import grpc_caller
from swarmnet.net.bulk import connection as connections
from swarmnet.net.bulk import pool as pools
from swarmnet.net.bulk.connection import BULK_FROM, BulkConnection
from swarmnet.net.bulk.pool import BulkPool
from swarmnet.net.bulk.records import AROUND
from swarmnet.net.greeting import Greeter
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.net.limits import BULK_JUNK
from swarmnet.transport import ReadPayload
from tests.contracts.transport_contract import CHECKS, FETCH, LIMIT_S, PROCESS, Pair, packed, same

UP, DOWN = (packed(3_000_000), packed(0), packed(BULK_FROM + 1, 3)), (packed(2_000_001, 9),)
QUICK = GrpcConfig(stall_s=0.5)


def pool_of(pair: Pair) -> BulkPool:
    return pair.a.transport._channels_to(pair.b.peer).bulk


async def grown(pool: BulkPool) -> None:
    """Open one more connection."""
    pool.grow()
    assert pool._dialling is not None
    await pool._dialling


async def until(holds: Callable[[], object]) -> None:
    """Let the loop run until it holds."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def greet(pair: Pair) -> None:
    """After this a has what it needs to ask for bulk connections."""
    async with aclosing(pair.call_b(SnapshotRequest(0, 0, bytes(32), 0))) as answers:
        assert [answer async for answer in answers]


async def open_bulk(pair: Pair) -> BulkPool:
    """After this what is called has a connection to use."""
    await greet(pair)
    await grown(pool := pool_of(pair))
    assert pool.session
    return pool


async def echo(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
    """Answer with what came, or with DOWN."""
    if not isinstance(request, Process | Fetch):
        yield Rejected(RejectCode.NOT_SERVED, "no")
        return
    received = await payload()
    yield Gradient(0.0, 0, payload=received or DOWN)


async def answered(pair: Pair, payload: tuple[Packed, ...] = UP, **limit: float) -> tuple[Packed, ...]:
    """The payload of the last answer of b's."""
    answers = [answer async for answer in pair.call_b(PROCESS, payload, **limit)]
    assert isinstance(answers[-1], Gradient), answers[-1:]
    return answers[-1].payload


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each payload that a bulk connection was given."""
    sizes: list[int] = []
    send = BulkConnection.send

    def counting(self, call, payload, *rest):
        sizes.append(sum(part.num_bytes for part in payload))
        return send(self, call, payload, *rest)

    monkeypatch.setattr(BulkConnection, "send", counting)
    return sizes


def run(scenario: Callable[[Pair], Awaitable[None]], config: GrpcConfig = GrpcConfig()) -> None:  # noqa: B008
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), grpc_pair(config) as pair:
            pair.b.service.answering = echo
            await scenario(pair)

    asyncio.run(main())


# ---------------------------------------------------------------- what they carry


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_with_every_payload_on_bulk(
    check: Callable[[Pair], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "BULK_FROM", 1)
    monkeypatch.setattr(connections, "BULK_FROM", 1)

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), grpc_pair() as pair:
            await open_bulk(pair)
            await check(pair)

    asyncio.run(main())


def test_payloads_cross_both_ways_and_are_counted(carried: list[int]) -> None:
    async def scenario(pair: Pair) -> None:
        await open_bulk(pair)
        assert same(await answered(pair), UP)
        assert same(await answered(pair, ()), DOWN)
        size = sum(part.num_bytes for part in UP)
        assert carried == [size, size, DOWN[0].num_bytes]
        for end, other in ((pair.a, pair.b), (pair.b, pair.a)):
            (row,) = (row for row in end.transport.traffic.rows() if row["request"] == "Process")
            assert row["peer"] == other.peer
            least = size + DOWN[0].num_bytes
            assert min(row["sent"], row["received"]) >= size
            assert least + size <= row["sent"] + row["received"] < (least + size) * 1.01

    run(scenario)


def test_small_payloads_and_a_first_one_go_through_grpc(carried: list[int]) -> None:
    async def scenario(pair: Pair) -> None:
        assert same(await answered(pair), UP), "there is no connection yet"
        pool = pool_of(pair)
        await until(lambda: pool.session)  # it opens one for the next
        small = (packed(BULK_FROM - 1),)
        assert same(await answered(pair, small), small)
        assert carried == []
        await answered(pair)
        assert len(carried) == 2

    run(scenario)


def test_the_pool_grows_to_a_bound_and_what_finds_no_lane_goes_through_grpc(
    carried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "MOST_CONNECTIONS", 2)

    async def scenario(pair: Pair) -> None:
        pool = await open_bulk(pair)
        for _ in range(4):
            await asyncio.gather(*(answered(pair) for _ in range(5)))
            if pool._dialling is not None:
                await pool._dialling
        assert len(pool.connections) == 2
        assert 8 <= len(carried) < 40

    run(scenario)


def test_a_payload_at_the_door_holds_up_no_other_call(carried: list[int]) -> None:
    async def scenario(pair: Pair) -> None:
        pool = await open_bulk(pair)
        let_in = asyncio.Event()

        async def hold(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
            if isinstance(request, Process):
                await let_in.wait()
            yield Gradient(0.0, 0, payload=await payload() or DOWN)

        pair.b.service.answering = hold
        waits = asyncio.create_task(answered(pair, (packed(30_000_000),)))
        await until(lambda: carried)
        await grown(pool)
        async with aclosing(pair.call_b(FETCH)) as answers:
            assert [answer.payload for answer in [a async for a in answers] if isinstance(answer, Gradient)]
        assert not waits.done()
        let_in.set()
        assert same(await waits, (packed(30_000_000),))

    run(scenario, GrpcConfig(stall_s=2.0))


def test_what_has_left_and_lies_unread_has_its_lane_until_its_call_ends(carried: list[int]) -> None:
    """It fits what two systems hold between them; the next payload would lie behind it."""

    async def scenario(pair: Pair) -> None:
        pool = await open_bulk(pair)
        (connection,) = pool.connections.values()
        let_in = asyncio.Event()

        async def hold(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
            if not let_in.is_set():
                await let_in.wait()
            yield Gradient(0.0, 0, payload=await payload())

        pair.b.service.answering = hold
        waits = asyncio.create_task(answered(pair, (packed(300_000),)))
        await until(lambda: carried and connection._sending is None)
        assert not connection.free
        let_in.set()
        assert same(await waits, (packed(300_000),))
        assert connection.free

    run(scenario, GrpcConfig(stall_s=2.0))


def test_an_answer_has_its_lane_until_its_call_ends(carried: list[int]) -> None:
    """Its caller may read it late; the call's own next answer takes the same lane."""

    async def scenario(pair: Pair) -> None:
        pool = await open_bulk(pair)
        await grown(pool)
        theirs = [each for taken in pair.b.transport.bulk._sessions.values() for each in taken.connections.values()]
        asked = asyncio.Event()

        async def twice(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
            for _ in range(2):
                yield Gradient(0.0, 0, payload=DOWN)
            await asked.wait()

        pair.b.service.answering = twice
        async with aclosing(pair.call_b(FETCH)) as answers:
            for _ in range(2):
                while not isinstance(answer := await anext(answers), Gradient):
                    pass
                assert same(answer.payload, DOWN)
            await until(lambda: all(each.ready for each in theirs))
            assert [each.free for each in theirs].count(False) == 1 and len(carried) == 2
            asked.set()
        await until(lambda: all(each.free for each in theirs))

    run(scenario)


def test_a_path_that_lets_connections_begin_and_holds_up_payloads_is_left_longer_and_longer() -> None:
    async def scenario(pair: Pair) -> None:
        pool = await open_bulk(pair)
        for failures in (1, 2, 3):
            pool.failed()
            pool.failed()  # at the same time
            assert pool._backoff.failures == failures and not pool.session
            await until(lambda: not pool.connections)
            pool._backoff.until = 0.0
            await grown(pool)
        assert pool._backoff.failures == 3, "a connection proves nothing"
        await greet(pair)
        assert same(await answered(pair), UP) and pool._backoff.failures == 0

    run(scenario)


def test_a_refused_payload_ends_early_and_its_lane_goes_on(carried: list[int]) -> None:
    large = (packed(200_000_000),)

    async def refuse(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
        yield Rejected(RejectCode.STALE, "no")

    async def scenario(pair: Pair) -> None:
        pool = await open_bulk(pair)
        (connection,) = pool.connections.values()
        pair.b.service.answering = refuse
        assert [answer async for answer in pair.call_b(PROCESS, large)] == [Rejected(RejectCode.STALE, "no")]
        await until(lambda: connection.free)
        pair.b.service.answering = echo
        assert same(await answered(pair), UP)
        assert len(carried) == 3 and pool.connections == {connection.number: connection}
        (row,) = (row for row in pair.a.transport.traffic.rows() if row["request"] == "Process")
        assert row["sent"] < large[0].num_bytes / 2

    run(scenario)


def test_a_payload_whose_call_never_comes_costs_the_next_one_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEADER_S", 0.1)

    async def scenario(pair: Pair) -> None:
        pool = await open_bulk(pair)
        (connection,) = pool.connections.values()
        connection.send(10**6, UP, pair.a.transport.traffic.flow(pair.b.peer, Process))
        await until(lambda: connection.free)
        assert same(await answered(pair), UP)
        assert pool.connections == {connection.number: connection}

    run(scenario)


def test_a_call_that_comes_after_its_payload_was_thrown_away_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(pair: Pair) -> None:
        pool = await open_bulk(pair)
        (session,) = pair.b.transport.bulk._sessions.values()
        upload = grpc_caller._Call._upload

        async def late(self, payload):
            await until(lambda: self._number in session._ended)
            async for message in upload(self, payload):
                yield message

        with monkeypatch.context() as patch:
            patch.setattr(connections, "_HEADER_S", 0.0)
            patch.setattr(grpc_caller._Call, "_upload", late)
            with pytest.raises(PeerGone):
                await answered(pair)
        assert same(await answered(pair), UP)
        assert len(pool.connections) == 1

    run(scenario)


def test_a_cancelled_call_leaves_its_lanes_to_the_next(carried: list[int]) -> None:
    async def scenario(pair: Pair) -> None:
        pool = await open_bulk(pair)
        (connection,) = pool.connections.values()
        large = (packed(50_000_000),)

        begun = asyncio.Event()

        async def answer_large(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
            begun.set()
            await payload()
            yield Gradient(0.0, 0, payload=large)

        pair.b.service.answering = answer_large
        for payload in (large, ()):
            carried.clear()
            call = asyncio.create_task(answered(pair, payload))
            await begun.wait()
            begun.clear()
            await until(lambda: carried)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            await until(lambda: connection.free)
        pair.b.service.answering = echo
        assert same(await answered(pair), UP)
        assert pool.connections == {connection.number: connection}

    run(scenario)


@pytest.mark.parametrize("broken", ["write_request", "METHODS"], ids=["before sending", "sending"])
def test_a_call_that_cannot_begin_keeps_neither_its_number_nor_its_lane(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(pair: Pair) -> None:
        pool = await open_bulk(pair)
        (connection,) = pool.connections.values()
        with monkeypatch.context() as patch:
            patch.setattr(grpc_caller, broken, None)
            with pytest.raises(TypeError):
                await answered(pair)
        assert pool.idle and not pair.a.transport.traffic.priority._urgent
        await until(lambda: connection.free)
        assert same(await answered(pair), UP) and pool.connections == {1: connection}

    run(scenario)


def test_a_connection_that_breaks_under_a_payload_is_gone_and_grpc_goes_on(carried: list[int]) -> None:
    async def scenario(pair: Pair) -> None:
        for payload in (UP, ()):
            pool = await open_bulk(pair)
            carried.clear()
            call = asyncio.create_task(answered(pair, payload))
            await until(lambda: carried)
            for connection in pool.connections.values():
                connection._sock.shutdown(socket.SHUT_RDWR)
            with pytest.raises(PeerGone) as raised:
                await call
            assert not raised.value.definite
            assert pool._backoff.failures and pool.take(1 << 20) is None, "for a while"
            assert same(await answered(pair), UP)
            pool._backoff.until = 0.0

    run(scenario)


def test_a_payload_over_the_limit_is_refused_unread() -> None:
    async def scenario(pair: Pair) -> None:
        await open_bulk(pair)
        answers = [answer async for answer in pair.call_b(PROCESS, UP)]
        assert isinstance(answers[-1], Rejected) and answers[-1].code is RejectCode.TOO_LARGE
        (row,) = (row for row in pair.b.transport.traffic.rows() if row["request"] == "Process")
        assert row["received"] < 10_000, "what was drained is nobody's payload"

    run(scenario, GrpcConfig(max_payload_bytes=1_000_000))


# ---------------------------------------------------------------- who comes between


class Between:
    """A line of the attacker's between the two ends of bulk connections. change(bytes of a's): what b gets."""

    def __init__(self, change: Callable[[bytes], bytes | None]) -> None:
        self._change = change
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.heard = b""

    async def place(self, pool: BulkPool) -> None:
        """Stand where the pool dials."""
        ask = pool._ask

        async def here():
            self._there = await ask()
            self._listening_at = await asyncio.start_server(self._pass, sock=self._listening)
            return dataclasses.replace(self._there, port=self._listening.getsockname()[1])

        pool._ask = here

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._there.host, self._there.port)

        async def up() -> None:
            while data := await reader.read(1 << 16):
                self.heard += data
                if (changed := self._change(data)) is None:
                    break
                back.write(changed)
                await back.drain()

        async def down() -> None:
            while data := await there.read(1 << 16):
                writer.write(data)

        ways = [asyncio.create_task(way()) for way in (up, down)]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        writer.close()
        back.close()


@pytest.mark.parametrize("what", ["flip", "drop", "repeat", "cut"])
def test_who_changes_records_on_the_way_gets_the_call_ended_and_no_wrong_tensor(what: str) -> None:
    passed = 0

    def change(data: bytes) -> bytes | None:
        nonlocal passed
        before, passed = passed, passed + len(data)
        if not before < 1_000_000 <= passed:
            return data
        at = 1_000_000 - before - 1
        changed = {
            "flip": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
            "drop": data[:at] + data[at + 1 :],
            "repeat": data + data,
        }
        return changed.get(what)

    async def scenario(pair: Pair) -> None:
        await greet(pair)
        await Between(change).place(pool := pool_of(pair))
        await grown(pool)
        read = asyncio.get_running_loop().create_future()

        async def take(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
            try:
                yield Gradient(0.0, 0, payload=await payload())
                read.set_result(None)
            except PeerGone as error:
                read.set_result(error)
                raise

        pair.b.service.answering = take
        with pytest.raises(PeerGone):
            await answered(pair)
        assert isinstance(await read, PeerGone)
        await until(lambda: not pool.connections)
        pair.b.service.answering = echo
        assert same(await answered(pair), UP), "gRPC goes on"

    run(scenario, GrpcConfig(stall_s=2.0))


def test_a_line_that_swallows_everything_is_a_timeout_at_both_ends() -> None:
    passed = 0

    def swallow(data: bytes) -> bytes:
        nonlocal passed
        passed += len(data)
        return data if passed < 1_000_000 else b""

    async def scenario(pair: Pair) -> None:
        await greet(pair)
        await Between(swallow).place(pool := pool_of(pair))
        await grown(pool)
        (connection,) = pool.connections.values()
        with pytest.raises((PeerTimeout, PeerGone)):
            await answered(pair)
        await until(lambda: connection.number not in pool.connections)

    run(scenario, QUICK)


def test_what_was_overheard_opens_no_connection_and_is_not_readable() -> None:
    async def scenario(pair: Pair) -> None:
        await greet(pair)
        between = Between(lambda data: data)
        await between.place(pool := pool_of(pair))
        await grown(pool)
        secret = b"nobody may read this" * 20_000
        assert same(await answered(pair, (Packed("uint8", (len(secret),), secret),)), (packed_bytes(secret),))
        assert secret[:20] not in between.heard
        listener = pair.b.transport.bulk
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(between.heard)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b"", "not a word to who repeats what was said"
        writer.close()
        assert same(await answered(pair), UP)

    run(scenario)


def packed_bytes(data: bytes) -> Packed:
    return Packed("uint8", (len(data),), data)


# ---------------------------------------------------------------- strangers at the port


@pytest.mark.parametrize("known_session", [False, True])
def test_hostile_bytes_get_no_word_and_do_no_harm(known_session: bool) -> None:
    async def scenario(pair: Pair) -> None:
        pool = await open_bulk(pair)
        listener = pair.b.transport.bulk
        name = pool.session if known_session else bytes(16)
        for said in (b"GET / HTTP/1.1\r\n" * 10, pools._OPENING.pack(b"swb1", name, 2) + bytes(AROUND)):
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(said)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        assert listener._unproven.total() == 0
        # A number that a stranger named is not used up.
        await grown(pool)
        assert len(pool.connections) == 2
        assert same(await answered(pair), UP)

    run(scenario)


def test_a_flood_of_strangers_is_bounded_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_PROVE_S", 0.3)

    async def scenario(pair: Pair) -> None:
        await open_bulk(pair)
        listener = pair.b.transport.bulk
        most = pools._MOST_UNPROVEN_OF_LINE
        lines = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(3 * most)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in lines]
        # Those beyond the bound are closed at once, the others when they have not proved anything in time.
        await asyncio.wait(ends[:1], return_when=asyncio.FIRST_COMPLETED)
        assert listener._unproven.total() <= most
        assert same(await answered(pair), UP), "who is inside feels nothing"
        await asyncio.gather(*ends, return_exceptions=True)
        await until(lambda: not listener._unproven.total())
        for _, writer in lines:
            writer.close()

    run(scenario)


def test_junk_dials_cost_their_line_its_next_ones_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(pair: Pair) -> None:
        pool = await open_bulk(pair)
        listener = pair.b.transport.bulk
        proving: list[str] = []
        prove = listener._prove
        monkeypatch.setattr(listener, "_prove", lambda sock: proving.append("") or prove(sock))

        async def junk() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            with contextlib.suppress(ConnectionError):
                writer.write(bytes(pools._OPENING.size))
                assert await reader.read() == b""
            writer.close()

        began = asyncio.get_running_loop().time()
        for _ in range(100):
            await junk()
        took_s = asyncio.get_running_loop().time() - began
        each = BULK_JUNK
        assert len(proving) <= each.per_s * (each.burst_s + took_s), "the rest is closed unread"
        assert same(await answered(pair), UP), "who is inside feels nothing"
        # To the listener this dial comes from another line.
        monkeypatch.setattr(pools, "home_of", lambda host: "another")
        await grown(pool)
        assert len(pool.connections) == 2

    run(scenario)


def test_where_the_port_is_closed_grpc_carries_all_and_dials_back_off(carried: list[int]) -> None:
    async def scenario(pair: Pair) -> None:
        await greet(pair)
        pool = pool_of(pair)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            pair.b.transport.bulk.port = taken.getsockname()[1]
        pool.grow()
        await asyncio.wait([pool._dialling])
        assert same(await answered(pair), UP)
        assert pool._dialling is None and pool._backoff.failures == 1
        for _ in range(3):
            pool._backoff.until = 0.0
            pool.grow()
            await asyncio.wait([pool._dialling])
        assert pool._backoff.failures == 4
        assert carried == [] and not pool.session

    run(scenario)


@pytest.mark.parametrize("is_open", [True, False])
def test_who_dials_a_peer_back_opens_a_bulk_connection_too_where_it_can(is_open: bool) -> None:
    """So the peer learns whether that port can be connected to."""

    async def scenario(pair: Pair) -> None:
        there = pair.b.transport
        if not is_open:
            await there.bulk.close()
        await pair.a.transport.dial(pair.b.peer, there.addresses[0], deadline=asyncio.get_running_loop().time() + 10)
        pool = pool_of(pair)
        await until(lambda: pool.connections or pool._pausing)
        await until(lambda: len(there.bulk.callers) == is_open)
        assert there.bulk.callers == ({pair.a.peer} if is_open else set())

    run(scenario)


def test_only_the_host_where_the_peer_answered_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(pair: Pair) -> None:
        await greet(pair)
        channels = pair.a.transport._channels_to(pair.b.peer)
        place = await channels._ask_for_bulk()
        assert (place.host, place.port) == ("127.0.0.1", pair.b.transport.bulk.port)
        monkeypatch.setattr(channels._dialling.dials, "shown", lambda peer, address: False)
        assert await channels._ask_for_bulk() is None

    run(scenario)


def test_a_banned_peer_loses_its_connections() -> None:
    banned: set[PeerId] = set()

    class Admissions:
        def show(self, peer: PeerId, invitation: object, *, now: float) -> None: ...

        def why_not(self, peer: PeerId, *, now: float) -> str:
            return "banned" if peer in banned else ""

        def proof_against(self, peer: PeerId) -> None: ...

    async def main() -> None:
        book: dict[PeerId, tuple[str, ...]] = {}
        a, _ = make_transport(book)
        b, service = make_transport(book, greeter=Greeter(RUN, 60.0, admissions=Admissions()))
        service.answering = echo
        async with asyncio.timeout(LIMIT_S), a, b:
            book |= {a.peer: a.addresses, b.peer: b.addresses}
            pair = Pair(*(type("End", (), {"peer": t.peer, "transport": t}) for t in (a, b)), None)
            pool = await open_bulk(pair)
            banned.add(a.peer)
            b.bulk.drop(b._dialling.greeter.unwelcome)
            await until(lambda: not pool.connections)
            answers = [answer async for answer in pair.call_b(PROCESS, UP)]
            assert isinstance(answers[-1], Rejected)
            assert pool.session not in b.bulk._sessions
            pool._backoff.until = 0.0
            pool.grow()
            await asyncio.wait([pool._dialling])
            assert not pool.connections, "it gets no new ones"

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no such options")
def test_a_host_that_vanished_is_gone_after_25_s_at_both_ends() -> None:
    """The system probes a silent host, and gives up what is sent to one that does not acknowledge it."""

    async def scenario(pair: Pair) -> None:
        pool = await open_bulk(pair)
        (taken,) = pair.b.transport.bulk._sessions.values()
        await until(lambda: taken.connections)
        for connection in (*pool.connections.values(), *taken.connections.values()):
            sock = connection._sock
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            idle, apart, probes, unacknowledged = (
                sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names
            )
            assert (idle + apart * probes, unacknowledged) == (25, 25_000)

    run(scenario)


def test_closing_a_transport_closes_its_connections() -> None:
    async def scenario(pair: Pair) -> None:
        pool = await open_bulk(pair)
        await pair.kill_b()
        await until(lambda: not pool.connections)
        assert pair.b.transport.bulk._sessions == {}

    run(scenario)
