"""One end of a bulk connection, with an other end that has the keys and does as it likes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from swarmnet.errors import PeerGone
from swarmnet.ids import PeerId
from swarmnet.messages import Packed
from swarmnet.net.bulk import connection as connections
from swarmnet.net.bulk.connection import BulkConnection, BulkSession, Incoming, LeastRate, Outgoing
from swarmnet.net.bulk.pool import BulkListener, TakenSession
from swarmnet.net.bulk.records import RECORD_BYTES, BulkKeys, Kind, Opener, Sealer
from swarmnet.net.limits import BULK_SESSIONS
from swarmnet.net.traffic import Flow
from swarmnet.wire.convert import BulkAsk, Lane, TensorHeader
from swarmnet.wire.framing import CHUNK_BYTES, Assembly

CALL = 7


@dataclass
class Ends:
    """A connection, and what its other end has."""

    connection: BulkConnection
    calls: BulkSession
    sock: socket.socket
    sealer: Sealer
    closed: asyncio.Event

    async def say(self, *records: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, b"".join(records))

    def want(self, *lengths: int, call: int = CALL) -> Incoming:
        declared = [TensorHeader("uint8", (length,), length) for length in lengths]
        incoming = Incoming(Assembly(declared, max_bytes=1 << 30), Flow())
        self.calls.begin(call)
        return self.calls.expect(1, call, incoming)


@contextlib.asynccontextmanager
async def open_ends(*, stall_s: float = 60.0) -> AsyncIterator[Ends]:
    """Other than `stall_s` nothing here takes time."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    up, down = BulkKeys("run", "caller", "callee", bytes(16), bytes(64)).secrets(1)
    closed = asyncio.Event()
    calls = TakenSession(BulkKeys("run", "caller", "callee", bytes(16), bytes(64)), PeerId("caller"), closed.set)
    connection = BulkConnection(ours, PeerId("caller"), 1, Sealer(down), Opener(up), calls, stall_s=stall_s)
    calls.connections[1] = connection
    async with asyncio.timeout(20):
        with theirs:
            yield Ends(connection, calls, theirs, Sealer(up), closed)
            connection.close()
            await closed.wait()


async def test_tensors_come_whole_and_no_record_is_shared() -> None:
    async with open_ends() as ends:
        incoming = ends.want(RECORD_BYTES + 1, 0, 3)
        seal, first, last = ends.sealer, b"a" * RECORD_BYTES, b"xyz"
        await ends.say(seal.start(CALL), seal.record(Kind.DATA, first), seal.record(Kind.DATA, b"b"))
        await ends.say(seal.record(Kind.LAST, last))
        assert await incoming.come(stall_s=1.0)
        assert [bytes(part.data) for part in incoming.payload] == [first + b"b", b"", last]
        assert not ends.closed.is_set()


@pytest.mark.parametrize(
    "records",
    [
        [(Kind.LAST, b"12")],  # ends too early
        [(Kind.DATA, b"1234")],  # does not end where it should
        [(Kind.DATA, b"1")],  # in pieces of its own size
        [(Kind.LAST, b"12345")],  # too much
        [(Kind.START, bytes(8))],  # another begins inside
        [(Kind.HELLO, b"")],
    ],
    ids=["early", "open", "small", "long", "start", "hello"],
)
async def test_what_does_not_fit_the_header_ends_the_connection(records: list[tuple[Kind, bytes]]) -> None:
    async with open_ends() as ends:
        incoming = ends.want(4)
        await ends.say(ends.sealer.start(CALL), *(ends.sealer.record(*record) for record in records))
        with pytest.raises(PeerGone):
            await incoming.come(stall_s=60.0)
        await ends.closed.wait()


@pytest.mark.parametrize(
    "record", [(Kind.DATA, b"12345678"), (Kind.STOP, b""), (Kind.HELLO, b"")], ids=["data", "stop", "hello"]
)
async def test_what_is_no_beginning_of_a_payload_ends_the_connection_at_once(record: tuple[Kind, bytes]) -> None:
    """Some are shorter than a START, and nothing comes after them."""
    async with open_ends() as ends:
        await ends.say(ends.sealer.record(*record))
        await ends.closed.wait()


async def test_who_waits_hears_at_once_that_the_connection_is_gone() -> None:
    async with open_ends() as ends:
        incoming = ends.want(4)
        ends.sock.close()
        with pytest.raises(PeerGone):
            await incoming.come(stall_s=60.0)


async def test_a_stop_ends_the_payload_and_nothing_else() -> None:
    async with open_ends() as ends:
        incoming = ends.want(RECORD_BYTES + 1)
        await ends.say(ends.sealer.start(CALL), ends.sealer.record(Kind.DATA, bytes(RECORD_BYTES)))
        await ends.say(ends.sealer.record(Kind.STOP))
        with pytest.raises(PeerGone):
            await incoming.come(stall_s=60.0)
        again = ends.want(2, call=8)
        await ends.say(ends.sealer.start(8), ends.sealer.record(Kind.LAST, b"ok"))
        assert await again.come(stall_s=60.0)


async def test_who_goes_on_with_what_nobody_wants_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_WASTE_BYTES", 3 * RECORD_BYTES)
    async with open_ends() as ends:
        ends.calls.begin(CALL)
        ends.calls.end(CALL)
        await ends.say(ends.sealer.start(CALL))
        with pytest.raises(OSError, match=r"[Bb]roken pipe|reset"):
            for _ in range(100):
                await ends.say(ends.sealer.record(Kind.DATA, bytes(RECORD_BYTES)))
        await ends.closed.wait()


async def test_who_stops_in_what_nobody_wants_loses_the_connection() -> None:
    async with open_ends(stall_s=0.05) as ends:
        incoming = ends.want(4)
        await ends.say(ends.sealer.start(CALL))
        while ends.calls._wanted:  # noqa: ASYNC110
            await asyncio.sleep(0)
        ends.calls.end(CALL)
        assert incoming.dropped
        await ends.closed.wait()


async def test_a_receiver_that_does_not_take_the_end_of_a_payload_loses_the_connection() -> None:
    async with open_ends(stall_s=0.05) as ends:
        outgoing = ends.connection.send(CALL, (Packed("uint8", (50 << 20,), bytes(50 << 20)),), Flow())
        with pytest.raises(TimeoutError):
            await outgoing.left(stall_s=0.05)
        ends.connection.give_up(outgoing)
        await ends.closed.wait()
        with pytest.raises(PeerGone):
            await outgoing.left(stall_s=60.0)


async def test_a_second_call_of_one_number_is_refused() -> None:
    async with open_ends() as ends:
        ends.want(4)
        with pytest.raises(Exception, match="two calls of one number"):
            ends.calls.begin(CALL)


async def test_what_has_come_already_leaves_others_their_turns() -> None:
    """Two thousand records lie there to be read, and nothing in them is waited for."""
    async with open_ends() as ends:
        turns, seal, incoming = 0, ends.sealer, ends.want(*[1] * 2001)

        async def others() -> None:
            nonlocal turns
            while not incoming.over:
                turns += 1
                await asyncio.sleep(0)

        await ends.say(
            seal.start(CALL), *(seal.record(Kind.DATA, b"x") for _ in range(2000)), seal.record(Kind.LAST, b"x")
        )
        await others()
        assert await incoming.come(stall_s=1.0) and turns >= 500


@pytest.mark.parametrize(
    ("unwanted", "pauses"),
    [(([Kind.STOP],) * 500, 500), (([*[Kind.DATA] * 399, Kind.STOP],), 101)],
    ids=["many", "one"],
)
async def test_payloads_that_nobody_wants_are_no_way_to_keep_a_process_busy(
    unwanted: Sequence[Sequence[Kind]], pauses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five hundred, each begun and ended at once, or one in records of a byte: others have time to go on."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def counted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    async with open_ends() as ends:
        ends.want(9)
        ends.calls.end(CALL)
        seal, incoming = ends.sealer, ends.want(3, call=CALL + 1)
        monkeypatch.setattr(connections.asyncio, "sleep", counted)
        for kinds in unwanted:
            records = (seal.record(kind, b"x" if kind is Kind.DATA else b"") for kind in kinds)
            await ends.say(seal.start(CALL), *records)
        await ends.say(seal.start(CALL + 1), seal.record(Kind.LAST, b"end"))
        assert await incoming.come(stall_s=1.0)
        assert slept == [connections._UNWANTED_S] * pauses


STALL_S = 10.0
FLOOR = CHUNK_BYTES / STALL_S
"""Bytes per second of a payload over gRPC: a message within `stall_s`."""


async def trickle_in(payload: Incoming, bytes_per_s: float) -> None:
    while not payload.over:
        await asyncio.sleep(RECORD_BYTES / bytes_per_s)
        payload.rate.moves(RECORD_BYTES, asyncio.get_running_loop().time())


async def trickle_out(payload: Outgoing, bytes_per_s: float) -> None:
    while not payload.over:
        await asyncio.sleep(RECORD_BYTES / bytes_per_s)
        payload.moves(RECORD_BYTES)


@pytest.mark.virtual_time
@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("share", [1 / 8, 0.9, 1.1])
async def test_a_payload_slower_than_over_grpc_has_stalled(way: str, share: float) -> None:
    now = asyncio.get_running_loop().time
    began = now()
    incoming, outgoing = Incoming(Assembly((), max_bytes=0), Flow()), Outgoing(lambda: None)
    work = trickle_in(incoming, share * FLOOR) if way == "in" else trickle_out(outgoing, share * FLOOR)
    waits = incoming.come(stall_s=STALL_S) if way == "in" else outgoing.left(stall_s=STALL_S)
    trickle = asyncio.create_task(work)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(100 * STALL_S):
            await waits
    trickle.cancel()
    assert now() - began == pytest.approx(STALL_S if share < 1 else 100 * STALL_S)


def test_what_we_hold_up_ourselves_is_nobodys_stall_and_no_excuse() -> None:
    pace = LeastRate(now=0.0)
    pace.moves(CHUNK_BYTES - 1, now=4.0)
    pace.hold(now=9.0)
    assert pace.late_at(STALL_S) == math.inf
    pace.go_on(now=500.0)
    assert pace.late_at(STALL_S) == 501.0
    pace.moves(2, now=500.5)
    assert pace.late_at(STALL_S) == 510.5


async def test_records_count_with_what_they_carry() -> None:
    async with open_ends() as ends:
        incoming = ends.want(2 * CHUNK_BYTES)
        await ends.say(ends.sealer.start(CALL))
        while ends.calls._wanted:  # noqa: ASYNC110
            await asyncio.sleep(0)
        late_at, data = incoming.rate.late_at(STALL_S), bytes(RECORD_BYTES)
        for count in range(1, CHUNK_BYTES // RECORD_BYTES):
            await ends.say(ends.sealer.record(Kind.DATA, data))
            while incoming.rate._num_bytes < count * RECORD_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert incoming.rate.late_at(STALL_S) == late_at
        await ends.say(ends.sealer.record(Kind.DATA, data))
        while incoming.rate.late_at(STALL_S) == late_at:  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("forwarded", "from_outside"), [(None, 7), (0, 0), (8, 8)], ids=["no router", "not this port", "another port"]
)
def test_who_comes_by_the_router_is_told_its_port(forwarded: int | None, from_outside: int) -> None:
    listener = BulkListener(PeerId("callee"), None, stall_s=1.0)
    listener.port, listener.outside_port = 7, forwarded
    caller, ask = PeerId("caller"), BulkAsk(bytes(32))
    assert listener.offer(caller, ask, now=0.0, outside=True).port == from_outside
    assert listener.offer(caller, ask, now=0.0).port == 7, "at home nothing stands between"
    listener.port = 0
    assert listener.offer(caller, ask, now=0.0, outside=True).port == 0, "it is closed"


def test_a_session_is_its_callers_alone() -> None:
    listener = BulkListener(PeerId("callee"), None, stall_s=1.0)
    listener.port = 1
    offer = listener.offer(PeerId("caller"), BulkAsk(bytes(32)), now=0.0)
    lane = Lane(offer.session, connection=3, call=5)
    assert not isinstance(listener.session(PeerId("another"), lane), TakenSession)
    found = listener.session(PeerId("caller"), lane)
    assert isinstance(found, TakenSession) and not found.idle
    assert listener.offer(PeerId("caller"), BulkAsk(bytes(32)), now=0.0).session != offer.session


def test_who_asks_again_and_again_gets_no_more_sessions_and_keeps_its_last_one() -> None:
    listener = BulkListener(PeerId("callee"), None, stall_s=1.0)
    listener.port, ask = 1, BulkAsk(bytes(32))
    offers = [listener.offer(PeerId("flood"), ask, now=0.0) for _ in range(100)]
    most = int(BULK_SESSIONS.per_s * BULK_SESSIONS.burst_s)
    assert [offer.port for offer in offers] == [1] * most + [0] * (100 - most)
    assert isinstance(listener.session(PeerId("flood"), Lane(offers[most - 1].session, call=1)), TakenSession)
    assert listener.offer(PeerId("other"), ask, now=0.0).port == 1, "nobody else pays for it"
    assert listener.offer(PeerId("flood"), ask, now=1.1).port == 1, "nor does it for ever"
