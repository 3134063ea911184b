"""Byte streams joined: what a relay, a caller's tunnel and a hidden peer all do with bytes that they cannot read.

An *end* reads and writes bytes; there is one for a gRPC call, for a call that is answered, and for a local connection.
`splice` joins two, with no more than a chunk of each direction in memory. `Arrivals` are callers' appointments: who
waits under an id for a peer to come. A `Tunnel` is where a gRPC channel dials in this machine to reach a peer that
unreachable peer: each connection becomes a byte stream of its own, on which the channel's own TLS runs end to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, TypeVar

import grpc

from swarmnet import telemetry
from swarmnet.errors import PeerGone, Refused, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.net.background import BackgroundTasks
from swarmnet.net.identity import FileLock, own_directory, sweep
from swarmnet.net.tls import caller_of
from swarmnet.wire.convert import GreetFirst
from swarmnet.wire.relay import MAX_BYTES, checked

log = telemetry.get(__name__)

PREFIX = "swarmnet-sockets-"
"""How directories of sockets begin, in the system's directory for temporary files."""

STALL_S = 30.0
"""Who does not take a chunk for so long is not waited for."""


_AGAIN_S = 0.2
_GRPC_ERRORS = (grpc.aio.AioRpcError, grpc.aio.InternalError, grpc.aio.UsageError)

Message = TypeVar("Message")


class End(Protocol):
    """One side of a byte stream."""

    async def read(self) -> bytes:
        """The next bytes; none at the end. Raises PeerGone, BadMessage."""
        ...

    async def write(self, data: bytes) -> None:
        """Returns once the buffer accepts more. Raises PeerGone."""
        ...


class CallEnd:
    """The end of a gRPC call that this peer places or answers; `over` once it has been let go, or its caller has
    left."""

    def __init__(self, call: grpc.aio.StreamStreamCall | grpc.aio.ServicerContext) -> None:
        self._call, self.over = call, asyncio.Event()

    async def read(self) -> bytes:
        with _gone_if_broken():
            data = await self._call.read()
        return b"" if data is grpc.aio.EOF else checked(data)

    async def write(self, data: bytes) -> None:
        with _gone_if_broken():
            await self._call.write(data)


class Connection:
    """The end of a connection inside this machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self) -> bytes:
        with _gone_if_broken():
            return await self._reader.read(MAX_BYTES)

    async def write(self, data: bytes) -> None:
        with _gone_if_broken():
            self._writer.write(data)
            await self._writer.drain()

    def close(self) -> None:
        """Hang up, with nothing more to say."""
        self._writer.transport.abort()


def we_are_cancelled() -> bool:
    """gRPC raises CancelledError for a stream the other side cancelled too; only a cancelled task may believe it."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


@contextlib.contextmanager
def _gone_if_broken() -> Iterator[None]:
    """In all the ways in which gRPC and the system say that the other side is gone: raises PeerGone."""
    try:
        yield
    except asyncio.CancelledError as error:
        if we_are_cancelled():
            raise
        raise PeerGone("the stream was cancelled") from error
    except (*_GRPC_ERRORS, asyncio.InvalidStateError, OSError) as error:
        raise PeerGone("the stream broke") from error


async def hear(
    end: End, read: Callable[[bytes], Message], within_s: float, *, gone: str = "the other side left"
) -> Message:
    """The next message on a stream. gone: what its end means. Raises TimeoutError, PeerGone, BadMessage."""
    async with asyncio.timeout(within_s):
        data = await end.read()
    if not data:
        raise PeerGone(gone)
    return read(data)


async def _at_once(num_bytes: int) -> None:
    """There is no limit."""


async def splice(one: End, other: End, *, turn: Callable[[int], Awaitable[None]] = _at_once) -> None:
    """Pass bytes on, both ways, until either side ends, breaks or does not take them. turn(bytes): returns when so many
    may be passed on."""

    async def pass_on(source: End, sink: End) -> None:
        with contextlib.suppress(SwarmError, TimeoutError):
            while data := await source.read():
                await turn(len(data))
                async with asyncio.timeout(STALL_S):
                    await sink.write(data)

    ways = [asyncio.create_task(pass_on(one, other)), asyncio.create_task(pass_on(other, one))]
    over = [asyncio.create_task(end.over.wait()) for end in (one, other) if isinstance(end, CallEnd)]
    try:
        await asyncio.wait((*ways, *over), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (*ways, *over):
            task.cancel()
        await asyncio.gather(*ways, *over, return_exceptions=True)


async def enter(far: End, local_socket: str, first: bytes = b"") -> None:
    """Connect a stream for this peer to its own port, at the local socket `local_socket`. TLS verifies the caller.

    first: what was read of it already. Raises PeerGone, OSError."""
    near = Connection(*await asyncio.open_unix_connection(local_socket))
    try:
        await near.write(first)
        await splice(far, near)
    finally:
        near.close()


Handler = Callable[[object, grpc.aio.ServicerContext], Awaitable[None]]
"""How gRPC has a stream answered."""


def for_members(
    welcome: Callable[[PeerId], bool],
    write: Callable[[GreetFirst], bytes],
    answer: Callable[[PeerId, CallEnd, grpc.aio.ServicerContext], Awaitable[None]],
) -> Handler:
    """Handle a stream of a caller that has greeted and is admitted; tell another caller to greet."""

    async def handle(_: object, context: grpc.aio.ServicerContext) -> None:
        if (caller := caller_of(context.auth_context())) is None:
            return
        end = CallEnd(context)
        with contextlib.suppress(SwarmError, TimeoutError):
            if welcome(caller):
                await answer(caller, end, context)
            else:
                await end.write(write(GreetFirst()))

    return handle


# ---------------------------------------------------------------- who waits for whom


class Arrivals:
    """Who is expected here, under which id."""

    def __init__(self) -> None:
        self._expected: dict[tuple[PeerId, bytes], asyncio.Future[CallEnd]] = {}

    @contextlib.contextmanager
    def expect(self, peer: PeerId, ident: bytes) -> Iterator[asyncio.Future[CallEnd]]:
        """The peer's end of a stream, once it has come, or Refused; leaving the block lets it go."""
        coming: asyncio.Future[CallEnd] = asyncio.get_running_loop().create_future()
        self._expected[peer, ident] = coming
        try:
            yield coming
        finally:
            del self._expected[peer, ident]
            if coming.done() and not coming.cancelled() and not coming.exception():
                coming.result().over.set()

    def come(self, peer: PeerId, ident: bytes, end: CallEnd) -> bool:
        """The peer is here. False: it is not expected under that id, or has come already."""
        coming = self._expected.get((peer, ident))
        if coming is None or coming.done():
            return False
        coming.set_result(end)
        return True

    def refuse(self, peer: PeerId, ident: bytes) -> None:
        """The peer does not come."""
        coming = self._expected.get((peer, ident))
        if coming is not None and not coming.done():
            coming.set_exception(Refused(RejectCode.NOT_SERVED, "the peer has too many callers", peer=peer))


# ---------------------------------------------------------------- tunnels


Way = Callable[[], AbstractAsyncContextManager[End]]
"""Opens a byte stream to the peer. Raises SwarmError."""


class LocalSockets:
    """Local sockets of this process: in a directory of its own, which is created at the first use."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._held: tuple[Path, FileLock] | None = None

    def path(self) -> str:
        """For one more socket."""
        if self._held is None:
            sweep(PREFIX)
            self._held = own_directory(PREFIX)
        return str(self._held[0] / str(next(self._numbers)))

    def remove(self) -> None:
        """Idempotent."""
        if self._held is not None:
            shutil.rmtree(self._held[0], ignore_errors=True)
            self._held[1].release()
            self._held = None


class Stream:
    """Where a gRPC channel dials. on_end: called when it should be replaced; set by its user."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.on_end: Callable[[], None] = lambda: None

    def retire(self) -> None:
        """Its user makes no new calls there. Idempotent."""

    def close(self) -> None:
        """Idempotent."""


class Tunnel(Stream):
    """A socket at `path` in this machine: each connection to it goes on as a byte stream of its own. retire: called
    when it takes no new calls, and when it is closed."""

    def __init__(self, path: str, way: Way, retire: Callable[[bool], None] = lambda closed: None) -> None:
        super().__init__(f"unix:{path}")
        self.path, self._way, self._retire = path, way, retire
        self._tasks = BackgroundTasks()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        # A dial before the event loop accepts waits here.
        self._socket.listen()
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._listen()

    def retire(self) -> None:
        self._retire(False)

    def close(self) -> None:
        """And all connections. Idempotent."""
        self._tasks.cancel()
        self._retire(True)
        # First of all: looked at longer, its number may be that of another socket.
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
        self._socket.close()
        Path(self.path).unlink(missing_ok=True)

    def _listen(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            accepted, _ = self._socket.accept()
        except BlockingIOError:  # the caller has left
            return
        except OSError:  # no descriptor is free
            self._loop.remove_reader(self._socket)
            self._loop.call_later(_AGAIN_S, self._listen)
            return
        self._tasks.spawn(self._carry(accepted))

    async def _carry(self, accepted: socket.socket) -> None:
        near = Connection(*await asyncio.open_unix_connection(sock=accepted))
        try:
            async with self._way() as far:
                await splice(near, far)
        except (SwarmError, TimeoutError) as error:
            # The caller sees the connection end, and tries another address.
            log.debug("no_way", path=self.path, error=error)
        finally:
            near.close()
            self.on_end()
