"""Many byte streams over one connection: what two peers that found a hole in their routers do with it.

A hole holds one connection, and two peers need several: of either to the other, for messages and for tensors. Each
frame is a kind, a stream and a number; behind DATA as many bytes as the number says:

    OPEN stream | DATA stream n, n bytes | CREDIT stream n: n more bytes may come | CLOSE stream

Nothing here is secret or proved: every stream carries a TLS connection of its own. A stream's reader grants what may be
on its way to it, so what a peer can make us hold is bounded. A frame that is none ends the connection, and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Coroutine

from swarmnet import telemetry
from swarmnet.errors import PeerGone
from swarmnet.net.background import BackgroundTasks

log = telemetry.get(__name__)

OPEN, DATA, CREDIT, CLOSE = range(4)
_FRAME = struct.Struct(">BII")

CHUNK_BYTES = 64 << 10
"""In one frame: what a short message waits for at most."""
WINDOW_BYTES = 4 << 20
"""On its way in one stream: 600 Mbit/s at 50 ms."""
MOST_STREAMS = 16
"""Of each side."""

_UNSENT_BYTES = 128 << 10
"""What the system takes of us beyond what the line carries; more would delay short messages."""
_SILENCE_S = 15


class BundledStream:
    """One stream: an `End` (net/circuits.py)."""

    def __init__(self, bundle: Bundle, number: int) -> None:
        self._bundle, self._number = bundle, number
        self._came: deque[bytes] = deque()
        self._granted, self._taken = WINDOW_BYTES, 0
        """Bytes that may still come, and bytes read that were not granted anew."""
        self._credit = WINDOW_BYTES
        self._changed = asyncio.Event()
        self._over = False

    async def read(self) -> bytes:
        """The next bytes; none at the end."""
        while not self._came:
            if self._over:
                return b""
            await self._wait()
        data = self._came.popleft()
        self._taken += len(data)
        # Seldom: a grant is a frame.
        if self._taken >= WINDOW_BYTES // 4 and not self._over:
            granted, self._taken = self._taken, 0
            self._granted += granted
            await self._bundle.say(CREDIT, self._number, granted)
        return data

    async def write(self, data: bytes) -> None:
        """Returns once there is room for more. Raises PeerGone."""
        view = memoryview(data)
        while view:
            while not self._credit and not self._over:
                await self._wait()
            if self._over:
                raise PeerGone("the stream is over")
            chunk = view[: min(self._credit, CHUNK_BYTES)]
            self._credit -= len(chunk)
            await self._bundle.say(DATA, self._number, len(chunk), chunk)
            view = view[len(chunk) :]

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def take(self, data: bytes) -> bool:
        """Bytes came. False: more than may."""
        self._granted -= len(data)
        self._came.append(data)
        self._changed.set()
        return self._granted >= 0

    def credit(self, num_bytes: int) -> bool:
        """So many more may be sent. False: more than a stream can have on its way."""
        self._credit += num_bytes
        self._changed.set()
        return self._credit <= WINDOW_BYTES

    def end(self) -> None:
        """The other side has closed it, or the connection is over."""
        self._over = True
        self._changed.set()

    async def close(self) -> None:
        """Nothing more is said or heard on it. Idempotent."""
        await self._bundle.forget(self._number)


class Bundle:
    """One connection. first: the side whose streams have even numbers; the two differ.

    accept(stream): what is done with a stream that the other side opens; the stream ends with it.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        first: bool,
        accept: Callable[[BundledStream], Coroutine[object, object, None]],
    ) -> None:
        self._reader, self._writer, self._accept = reader, writer, accept
        self._next, self._theirs = (0, 1) if first else (1, 0)
        self._streams: dict[int, BundledStream] = {}
        self._turn = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self.over = False

    async def open(self) -> BundledStream:
        """A stream to the other side. Raises PeerGone."""
        if sum(number % 2 != self._theirs for number in self._streams) >= MOST_STREAMS:
            raise PeerGone("too many streams")
        number, self._next = self._next, self._next + 2
        stream = self._streams[number] = BundledStream(self, number)
        await self.say(OPEN, number)
        return stream

    async def say(self, kind: int, stream: int, number: int = 0, data: bytes | memoryview = b"") -> None:
        """Send one frame, each writer in its turn. Raises PeerGone."""
        async with self._turn:
            if self.over:
                raise PeerGone("the connection is over")
            try:
                self._writer.write(_FRAME.pack(kind, stream, number))
                if data:
                    self._writer.write(data)
                await self._writer.drain()
            except OSError as error:
                raise PeerGone("the connection broke") from error

    async def run(self) -> None:
        """Until the connection ends."""
        _hasten(self._writer.get_extra_info("socket"))
        try:
            while True:
                await self._take(*_FRAME.unpack(await self._reader.readexactly(_FRAME.size)))
        except (asyncio.IncompleteReadError, OSError, PeerGone) as error:
            log.debug("bundle_over", error=error)
        finally:
            self.over = True
            for stream in self._streams.values():
                stream.end()
            self._tasks.cancel()
            self._writer.transport.abort()

    async def _take(self, kind: int, number: int, amount: int) -> None:
        """Raises PeerGone for a frame that is none."""
        stream = self._streams.get(number)
        if kind == OPEN and stream is None and number % 2 == self._theirs and self._has_room():
            self._opened(number)
        elif kind == DATA and 0 < amount <= CHUNK_BYTES:
            data = await self._reader.readexactly(amount)
            # It may have been closed here while that was on its way.
            if stream is not None and not stream.take(data):
                raise PeerGone("more bytes than were granted")
        elif kind == CREDIT:
            if stream is not None and not stream.credit(amount):
                raise PeerGone("more credit than a stream has")
        elif kind == CLOSE:
            if stream is not None:
                del self._streams[number]
                stream.end()
        else:
            raise PeerGone("not a frame", kind=kind)

    def _has_room(self) -> bool:
        """For one more stream of the other side's, which counts its own."""
        open_now = sum(number % 2 == self._theirs for number in self._streams)
        # What is closed is held until its bytes have gone where they belong.
        return open_now < MOST_STREAMS and len(self._tasks) < 2 * MOST_STREAMS

    def _opened(self, number: int) -> None:
        stream = self._streams[number] = BundledStream(self, number)

        async def answer() -> None:
            try:
                await self._accept(stream)
            finally:
                with contextlib.suppress(PeerGone):
                    await stream.close()

        # The reader itself never writes: two of them could wait for each other.
        self._tasks.spawn(answer())

    async def forget(self, number: int) -> None:
        """This side has closed a stream."""
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.end()
            await self.say(CLOSE, number)


def _hasten(sock: socket.socket) -> None:
    """Short messages do not wait behind what the line has not taken yet; a router that forgot us is noticed."""
    options = {
        "TCP_NODELAY": 1,
        "TCP_NOTSENT_LOWAT": _UNSENT_BYTES,
        "TCP_KEEPIDLE": _SILENCE_S // 3,
        "TCP_KEEPINTVL": _SILENCE_S // 3,
        "TCP_KEEPCNT": 2,
        "TCP_USER_TIMEOUT": _SILENCE_S * 1000,
    }
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):  # of this system
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
