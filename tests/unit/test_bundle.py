"""Many byte streams over one connection: whole, in order, bounded, and none waits for another."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Coroutine

import pytest

from swarmnet.errors import PeerGone
from swarmnet.net.bundle import CLOSE, CREDIT, DATA, MOST_STREAMS, OPEN, WINDOW_BYTES, Bundle, BundledStream

Accept = Callable[[BundledStream], Coroutine[object, object, None]]
PATIENCE_S = 10.0


async def nobody(_: BundledStream) -> None:
    raise AssertionError("nobody opens a stream to this side")


async def echo(stream: BundledStream) -> None:
    while data := await stream.read():
        await stream.write(data)


@contextlib.asynccontextmanager
async def pair(accept: Accept = echo) -> AsyncGenerator[tuple[Bundle, Bundle], None]:
    """Two ends of one connection. accept: of the second one."""
    socks = socket.socketpair()
    ends = [await asyncio.open_connection(sock=sock) for sock in socks]
    both = [Bundle(*ends[0], first=True, accept=nobody), Bundle(*ends[1], first=False, accept=accept)]
    running = [asyncio.create_task(bundle.run()) for bundle in both]
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield both[0], both[1]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def received(stream: BundledStream, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        more = await stream.read()
        assert more, f"it ended after {len(data)} of {num_bytes} bytes"
        data += more
    return bytes(data)


async def test_more_than_a_window_goes_there_and_back_whole() -> None:
    sent = bytes(range(256)) * (3 * WINDOW_BYTES // 256)
    async with pair() as (one, _):
        stream = await one.open()
        sending = asyncio.create_task(stream.write(sent))
        assert await received(stream, len(sent)) == sent
        await sending
        await stream.close()
        with pytest.raises(PeerGone):
            await stream.write(b"more")


async def test_a_stream_that_nobody_reads_holds_up_its_own_writer_alone() -> None:
    reading: list[BundledStream] = []

    async def first_waits(stream: BundledStream) -> None:
        reading.append(stream)
        await (asyncio.Event().wait() if len(reading) == 1 else echo(stream))

    async with pair(first_waits) as (one, _):
        stuck, free = await one.open(), await one.open()
        sending = asyncio.create_task(stuck.write(bytes(WINDOW_BYTES + 1)))
        for _ in range(3):
            await free.write(b"short")
            assert await received(free, 5) == b"short"
        assert not sending.done(), "more was sent than is granted"
        assert len(await received(reading[0], WINDOW_BYTES + 1)) == WINDOW_BYTES + 1
        await sending


async def test_the_end_of_a_stream_and_of_the_connection_is_seen() -> None:
    async def says_one_word(stream: BundledStream) -> None:
        await stream.write(b"word")

    async with pair(says_one_word) as (one, other):
        stream = await one.open()
        assert await received(stream, 4) == b"word" and await stream.read() == b""
    assert one.over and other.over and await stream.read() == b""
    with pytest.raises(PeerGone):
        await one.open()


async def test_both_sides_open_streams_within_bounds() -> None:
    async with pair(lambda _: asyncio.Event().wait()) as (one, _):
        for _ in range(MOST_STREAMS):
            await one.open()
        with pytest.raises(PeerGone, match="too many"):
            await one.open()


FRAME = struct.Struct(">BII")
BAD = {
    "no kind": FRAME.pack(9, 0, 0),
    "a stream of the other side's": FRAME.pack(OPEN, 1, 0),
    "opened twice": FRAME.pack(OPEN, 0, 0) * 2,
    "no bytes": FRAME.pack(OPEN, 0, 0) + FRAME.pack(DATA, 0, 0),
    "too many at once": FRAME.pack(OPEN, 0, 0) + FRAME.pack(DATA, 0, 1 << 20),
    "more than granted": FRAME.pack(OPEN, 0, 0) + (FRAME.pack(DATA, 0, 1 << 16) + bytes(1 << 16)) * 65,
    "too much credit": FRAME.pack(OPEN, 0, 0) + FRAME.pack(CREDIT, 0, 1),
    "too many streams": b"".join(FRAME.pack(OPEN, 2 * at, 0) for at in range(MOST_STREAMS + 1)),
    "too many that are closed and still in use": b"".join(
        FRAME.pack(OPEN, 2 * at, 0) + FRAME.pack(CLOSE, 2 * at, 0) for at in range(2 * MOST_STREAMS + 1)
    ),
    "cut": FRAME.pack(OPEN, 0, 0)[:3],
}


@pytest.mark.parametrize("name", BAD)
async def test_what_is_no_frame_ends_the_connection(name: str) -> None:
    here, there = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=here)
    bundle = Bundle(reader, writer, first=False, accept=lambda _: asyncio.Event().wait())
    theirs = await asyncio.open_connection(sock=there)
    theirs[1].write(BAD[name])
    if name == "cut":
        theirs[1].write_eof()
    async with asyncio.timeout(PATIENCE_S):
        await bundle.run()
    assert bundle.over
    theirs[1].transport.abort()


async def test_what_comes_for_a_stream_that_is_over_is_dropped() -> None:
    here, there = socket.socketpair()
    bundle = Bundle(*await asyncio.open_connection(sock=here), first=False, accept=echo)
    reader, writer = await asyncio.open_connection(sock=there)
    running = asyncio.create_task(bundle.run())
    for frame in ((OPEN, 0, 0), (CLOSE, 0, 0), (DATA, 0, 3), None, (CREDIT, 0, 5), (CLOSE, 0, 0), (OPEN, 2, 0)):
        writer.write(FRAME.pack(*frame) if frame else b"abc")
    writer.write(FRAME.pack(DATA, 2, 4) + b"here")
    async with asyncio.timeout(PATIENCE_S):
        while (await reader.readexactly(FRAME.size))[:5] != FRAME.pack(DATA, 2, 4)[:5]:
            pass
        assert await reader.readexactly(4) == b"here"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    writer.transport.abort()
