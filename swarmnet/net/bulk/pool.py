"""Which bulk connections there are: the pool of who opens them, and the listening port of who takes them.

A pool asks once, over mutual TLS, where to connect, and both ends derive the keys of a session from what each says
there (`records.BulkKeys`). It grows by a connection when a payload finds none free, in the background: no call
waits for a dial. A port that does not answer is tried again later and later; meanwhile gRPC carries everything.

A connection begins with the session and its own number in the clear, then one empty sealed record each way. Numbers
only grow, so a recording of one connection opens no second one. A connection that has not sent that record is
unverified: only a few may be so at a time, and only briefly.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import grpc

from swarmnet import telemetry
from swarmnet.bounds import one_less
from swarmnet.clock import loop_time
from swarmnet.errors import BadMessage, RejectCode, UsageError
from swarmnet.ids import PeerId, RunId
from swarmnet.net.address import endpoint_of, home_of
from swarmnet.net.background import BackgroundTasks
from swarmnet.net.bulk.connection import BULK_FROM, BulkConnection, BulkSession
from swarmnet.net.bulk.records import AROUND, BulkKeys, Kind, Opener, Sealer, read_head
from swarmnet.net.descriptors import set_options
from swarmnet.net.limits import BULK_AGAIN, BULK_JUNK, BULK_SESSIONS
from swarmnet.net.nat.circuits import CallEnd, Handler, for_members
from swarmnet.net.nat.dial_back import public_home
from swarmnet.net.sockets import connected, read_exactly
from swarmnet.pacing import Budgets
from swarmnet.wire.convert import SECRET_BYTES, SESSION_BYTES, BulkAsk, BulkOffer, Lane, read_bulk_ask, write_bulk_offer

BULK = "/swarmnet.v1.Run/Bulk"

MOST_CONNECTIONS = 8
"""Of one pool."""

_MOST_TAKEN = 2 * MOST_CONNECTIONS
"""Of one caller, those of its last process among them."""

_PLACE_S = 1.0
"""The slot of a connection is reused so long after its end."""

_MOST_SESSIONS = 1 << 14
_MOST_UNPROVEN, _MOST_UNPROVEN_OF_LINE = 128, 16
_PROVE_S = 5.0
"""For the first record to come."""

_REFUSED_S = 1e-3
"""Pause after a dial that is closed unread: a flood of them leaves the process to others."""

_FULL_PAUSE_S = 1.0
_IDLE_S = 60.0
"""A pool that is not used for so long closes its connections."""

_SILENCE_S = 25
"""A host that does not answer for so long is gone."""

_OPENING = struct.Struct(f">4s{SESSION_BYTES}sQ")
"""What a connection begins with: the protocol, the session, the connection's number."""
_PROTOCOL = b"swb1"

log = telemetry.get(__name__)


@dataclass(frozen=True, slots=True)
class BulkTarget:
    """Where a peer takes bulk connections, and under which session."""

    host: str
    port: int
    session: BulkKeys


class BulkPool(BulkSession):
    """The bulk connections to one peer, which I open.

    ask(): says `BulkAsk` to the peer; None: it takes none. Raises SwarmError.
    """

    def __init__(self, peer: PeerId, ask: Callable[[], Awaitable[BulkTarget | None]], *, stall_s: float) -> None:
        super().__init__(mine=True)
        self._peer, self._ask, self._stall_s = peer, ask, stall_s
        self._target: BulkTarget | None = None
        self._number = 0
        self._dialling: asyncio.Task[None] | None = None
        self._backoff, self._used_at = BULK_AGAIN(), 0.0

    @property
    def session(self) -> bytes:
        """What answers may be sent in; b"": there is no connection, or there is to be none for a while."""
        return self._target.session.id if self._target is not None and self.connections and not self._pausing else b""

    @property
    def _pausing(self) -> bool:
        return self._backoff.wait_s(loop_time()) > 0.0

    def failed(self) -> None:
        """A payload did not get through. A path may let connections begin and hold up what they carry: none is used for
        a while, longer each time until one has carried a payload."""
        if self._pausing:
            return
        self._backoff.failed(loop_time())
        for connection in self.connections.values():
            if connection.free:
                connection.close()

    def carried(self) -> None:
        """A payload got through."""
        self._backoff.reset()

    def lane(self, call: int, connection: int) -> Lane | None:
        """Likewise; without a connection for this payload an answer may still come on one."""
        return Lane(self.session, connection, call) if self.session else None

    def take(self, num_bytes: int) -> BulkConnection | None:
        """Likewise; where none is free there may be one next time."""
        self._used_at = loop_time()
        if num_bytes < BULK_FROM or self._pausing:
            return None
        if (taken := super().take(num_bytes)) is None:
            self.grow()
        return taken

    def grow(self, num_bytes: int = BULK_FROM) -> None:
        """Open one more for payloads of so many bytes, unless there are enough or that failed a moment ago."""
        if (
            num_bytes >= BULK_FROM
            and self._dialling is None
            and not self._pausing
            and len(self.connections) < MOST_CONNECTIONS
        ):
            self._dialling = asyncio.create_task(self._connect())
            self._dialling.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._dialling = None
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        # Another process may listen there by now: it is asked again.
        self._target = self._target if self.connections else None
        again_in_s = self._backoff.failed(loop_time())
        log.debug("no_bulk_connection", peer=self._peer, error=repr(error), again_in_s=again_in_s)

    async def _connect(self) -> None:
        self._target = self._target or await self._ask()
        if self._target is None:
            raise OSError("the peer takes none")
        self._number += 1
        number, (up, down) = self._number, self._target.session.secrets(self._number)
        sealer, opener = Sealer(up), Opener(down)
        async with asyncio.timeout(_PROVE_S):
            sock = await _dial(self._target.host, self._target.port)
            try:
                loop = asyncio.get_running_loop()
                opening = _OPENING.pack(_PROTOCOL, self._target.session.id, number) + sealer.record(Kind.HELLO)
                await loop.sock_sendall(sock, opening)
                await _hello(sock, opener)
            except BaseException:
                sock.close()
                raise
        self.connections[number] = BulkConnection(sock, self._peer, number, sealer, opener, self, stall_s=self._stall_s)

    def lost(self, connection: int) -> None:
        """Likewise."""
        super().lost(connection)
        # It may have restarted: the next session is its next process's.
        if not self.connections:
            self._target = None

    def close_idle(self, *, welcome: bool) -> None:
        """Close what was not used for long; all, if the peer is not welcome any more."""
        idle = self.idle and loop_time() - self._used_at > _IDLE_S
        if idle or not welcome:
            self.close()

    def close(self) -> None:
        """Close all of them."""
        if self._dialling is not None:
            self._dialling.cancel()
        for connection in self.connections.values():
            connection.close()


async def _dial(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    error = OSError("no address")
    places = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, proto, _, place in places:
        try:
            return await connected(_ready(socket.socket(family, kind, proto)), place)
        except OSError as found:
            error = found
    raise error


def _ready(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    # A host that vanished says nothing, and what it had open would count as its own for ever.
    set_options(sock, silence_s=_SILENCE_S)
    return sock


async def _hello(sock: socket.socket, opener: Opener) -> None:
    """Read the first record. Raises OSError, BadMessage if who sent it does not have the keys."""
    record = await read_exactly(sock, AROUND)
    if read_head(record)[0] is not Kind.HELLO:
        raise BadMessage(RejectCode.MALFORMED, "no bulk connection begins so")
    opener.open(record, memoryview(bytearray()))


# ---------------------------------------------------------------- who takes them


class TakenSession(BulkSession):
    """A session that I have offered, with the connections that came. on_lost: called when one of them has ended."""

    def __init__(self, keys: BulkKeys, caller: PeerId, on_lost: Callable[[], object]) -> None:
        super().__init__(mine=False)
        self.keys, self.caller, self._on_lost = keys, caller, on_lost
        self.last = 0
        """The highest number that a connection of it has shown it may have."""

    def lost(self, connection: int) -> None:
        """Likewise."""
        super().lost(connection)
        self._on_lost()


class BulkListener:
    """Takes bulk connections of peers that have asked for them."""

    def __init__(self, me: PeerId, run: RunId | None, *, stall_s: float) -> None:
        self._me, self._run, self._stall_s = me, run or "", stall_s
        self._sessions: dict[bytes, TakenSession] = {}
        self._of_caller: Counter[PeerId] = Counter()
        self._unproven: Counter[str] = Counter()
        self._asks, self._junk = Budgets[PeerId](BULK_SESSIONS), Budgets[str](BULK_JUNK)
        self._tasks = BackgroundTasks()
        self.port = 0
        self.outside_port: int | None = None
        """The router's, which it forwards to ours; 0: it forwards others of ours, not this one, None: none of ours."""

    @property
    def callers(self) -> frozenset[PeerId]:
        """The callers with open connections."""
        return frozenset(taken.caller for taken in self._sessions.values() if taken.connections)

    def methods(self, welcome: Callable[[PeerId], bool]) -> dict[str, Handler]:
        """What this port answers over gRPC. welcome(peer): has it greeted, and is it admitted?"""

        async def answer(caller: PeerId, end: CallEnd, context: grpc.aio.ServicerContext) -> None:
            outside = bool(public_home(endpoint_of(context.peer())[0]))
            offer = self.offer(caller, read_bulk_ask(await end.read()), now=loop_time(), outside=outside)
            await end.write(write_bulk_offer(offer))

        # It asks again by and by; what is wrong with it, its next call is told.
        return {BULK: for_members(welcome, lambda _: write_bulk_offer(BulkOffer(0)), answer)}

    def offer(self, caller: PeerId, ask: BulkAsk, *, now: float, outside: bool = False) -> BulkOffer:
        """Answer a caller that is proved and admitted: a new session of its own, unless it asks too often. outside: it
        calls from elsewhere, and has to come by the router."""
        port = self.outside_port if outside and self.port and self.outside_port is not None else self.port
        if not port or self._asks.of(caller).ask(now):
            return BulkOffer(0)
        if len(self._sessions) >= _MOST_SESSIONS:
            idle = next((taken for taken in self._sessions.values() if not taken.connections), None)
            if idle is None:
                return BulkOffer(0)
            del self._sessions[idle.keys.id]
        mine, name = secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(SESSION_BYTES)
        keys = BulkKeys(self._run, caller, self._me, name, ask.secret + mine)
        taken = TakenSession(keys, caller, partial(self._lose, caller))
        self._sessions[name] = taken
        return BulkOffer(port, name, mine)

    def session(self, caller: PeerId, lane: Lane) -> BulkSession:
        """That of a call which begins with this header; one without connections, if it has ended. Raises BadMessage,
        PeerGone."""
        taken = self._sessions.get(lane.session)
        if taken is None or taken.caller != caller:
            return BulkSession(mine=False)
        taken.begin(lane.call)
        return taken

    def drop(self, unwelcome: Callable[[PeerId], object]) -> None:
        """Close the connections of all callers that are not welcome any more."""
        for taken in [taken for taken in self._sessions.values() if unwelcome(taken.caller)]:
            self._close(taken)

    def _close(self, taken: TakenSession) -> None:
        self._sessions.pop(taken.keys.id, None)
        for connection in taken.connections.values():
            connection.close()

    # ------------------------------------------------------------ the port

    def listen(self, host: str, port: int) -> None:
        """Raises UsageError if the port cannot be bound."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = family is socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
        try:
            listening = socket.create_server((host, port), family=family, dualstack_ipv6=both, backlog=_MOST_UNPROVEN)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host} port {port} ({error}): choose another with --bulk-port"
            ) from error
        listening.setblocking(False)
        self.port = listening.getsockname()[1]
        self._tasks.spawn(self._accept(listening))

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    sock, at = await loop.sock_accept(listening)
                except OSError as error:
                    log.debug("bulk_accept_failed", error=error)  # no descriptor is left, for one
                    await asyncio.sleep(_FULL_PAUSE_S)
                    continue
                line = home_of(at[0])
                if (
                    self._unproven.total() >= _MOST_UNPROVEN
                    or self._unproven[line] >= _MOST_UNPROVEN_OF_LINE
                    or self._junk.of(line).wait_s(loop_time())
                ):
                    sock.close()
                    await asyncio.sleep(_REFUSED_S)
                    continue
                self._unproven[line] += 1
                self._tasks.spawn(self._take(_ready(sock), line))

    async def _take(self, sock: socket.socket, line: str) -> None:
        """Verify the caller of a connection. An unverified one gets no answer."""
        taken = None
        try:
            async with asyncio.timeout(_PROVE_S):
                taken = await self._prove(sock)
        except (OSError, BadMessage) as error:
            self._junk.of(line).take(loop_time())
            log.debug("no_bulk_connection_of_ours", host=line, error=repr(error))
        finally:
            one_less(self._unproven, line)
            if taken is None:
                sock.close()

    async def _prove(self, sock: socket.socket) -> TakenSession:
        protocol, name, number = _OPENING.unpack(await read_exactly(sock, _OPENING.size))
        taken = self._sessions.get(name)
        if protocol != _PROTOCOL or taken is None:
            raise BadMessage(RejectCode.MALFORMED, "no such session")
        up, down = taken.keys.secrets(number)
        sealer, opener = Sealer(down), Opener(up)
        await _hello(sock, opener)
        # Only now: who has no keys must not use up numbers. From here to the answer nothing is waited for.
        if number <= taken.last or self._of_caller[taken.caller] >= _MOST_TAKEN:
            raise BadMessage(RejectCode.MALFORMED, "a number that was used, or too many", number=number)
        taken.last = number
        sock.send(sealer.record(Kind.HELLO))  # the first bytes: the socket's buffer is empty
        self._of_caller[taken.caller] += 1
        taken.connections[number] = BulkConnection(
            sock, taken.caller, number, sealer, opener, taken, stall_s=self._stall_s
        )
        return taken

    def _lose(self, caller: PeerId) -> None:
        # Not at once: each that is opened costs us a millisecond, and its caller next to nothing.
        asyncio.get_running_loop().call_later(_PLACE_S, one_less, self._of_caller, caller)

    async def close(self) -> None:
        """Close the port and all connections."""
        self.port = 0
        for taken in tuple(self._sessions.values()):
            self._close(taken)
        await self._tasks.end()
