"""Hole punching through two routers: both peers dial each other at the same moment from ports with a known mapping.

A `PunchPort` is a local port that many sockets share, so that the mapping that one member observes holds for all.
`punch` makes one connection of two ports. `Holes` is one peer's: it asks members for the address of its calls, and
agrees with the other peer on the moment over the circuit to it. The connection belongs to the asking peer: its gRPC
channel to the other one uses it instead of the circuit, until it ends. The other peer asks for its own connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc

from swarmnet import telemetry
from swarmnet.clock import loop_time
from swarmnet.errors import BadMessage, PeerGone, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import Busy, Rejected
from swarmnet.net.address import Address, endpoint_of
from swarmnet.net.background import BackgroundTasks
from swarmnet.net.descriptors import set_options
from swarmnet.net.grpc_channels import PeerChannels
from swarmnet.net.grpc_options import CHANNEL_OPTIONS
from swarmnet.net.nat.circuits import CallEnd, Connection, End, Handler, LocalSockets, Tunnel, enter, for_members, hear
from swarmnet.net.nat.dial_back import Say
from swarmnet.net.nat.kinds import BUSY_S, Endpoint, Punches, Sight, dialled
from swarmnet.net.sockets import connected, read_exactly
from swarmnet.net.tls import Leaf
from swarmnet.wire.convert import NONCE_BYTES, Ping, Pong
from swarmnet.wire.punch import (
    MOST_OUTSIDE,
    TOKEN_BYTES,
    Now,
    Observe,
    Offer,
    SeenPort,
    read_punch_ask,
    read_punch_reply,
    write_punch_ask,
    write_punch_reply,
)

PUNCH, OBSERVE = (f"/swarmnet.v1.Relay/{name}" for name in ("Punch", "Observe"))

log = telemetry.get(__name__)

PUNCH_S = 4.0
"""How long both try. A lost first packet is sent again after 1 and 3 s."""

_MOST_DIALS, _AGAIN_S = 8, 0.25
"""Of one address: a peer that refuses immediately may listen a moment later."""
_CHOSEN = b"\x01"


class PunchPort:
    """A local port for incoming and outgoing connections. As a context: the port is free afterwards."""

    def __init__(self, family: socket.AddressFamily = socket.AF_INET) -> None:
        self._family, self.port = family, 0
        # A peer that is let in by a router may call before we do.
        self.listener = self.another()
        self.port = self.listener.getsockname()[1]
        self.listener.listen()

    def __enter__(self) -> PunchPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()

    def another(self) -> socket.socket:
        """One more that calls from this port."""
        sock = socket.socket(self._family)
        sock.setblocking(False)
        for option in ("SO_REUSEADDR", "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
        sock.bind(("", self.port))
        return sock

    async def dial(self, place: Endpoint) -> socket.socket:
        """Raises OSError."""
        return await connected(self.another(), place)


async def punch(
    hole: PunchPort, places: Sequence[Endpoint], *, mine: bytes, theirs: bytes, decides: bool, limit_s: float = PUNCH_S
) -> socket.socket:
    """Dial all addresses and take calls, until one leads to the peer that says `theirs`; to whom `mine` is said.

    decides: of the two, which chooses the connection where there are several. Raises PeerGone.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[socket.socket] = loop.create_future()

    async def try_out(sock: socket.socket) -> None:
        try:
            await loop.sock_sendall(sock, mine)
            if await read_exactly(sock, TOKEN_BYTES) != theirs:
                raise OSError("another peer")
            if decides:
                if found.done():
                    raise OSError("another was quicker")
                # Without a pause in between, so that only one connection is chosen.
                found.set_result(sock)
                await loop.sock_sendall(sock, _CHOSEN)
            else:
                await read_exactly(sock, len(_CHOSEN))
                found.set_result(sock)
        except BaseException as error:
            if not (found.done() and not found.cancelled() and found.result() is sock):
                sock.close()
            if not isinstance(error, OSError):
                raise

    async def dial(place: Endpoint) -> None:
        for _ in range(_MOST_DIALS):
            try:
                sock = await hole.dial(place)
            except OSError as error:
                log.debug("not_through", place=place, error=error)
                await asyncio.sleep(_AGAIN_S)
            else:
                await try_out(sock)

    async def listen() -> None:
        while True:
            came, _ = await loop.sock_accept(hole.listener)
            came.setblocking(False)
            tasks.spawn(try_out(came))

    tasks = BackgroundTasks()
    for place in places:
        tasks.spawn(dial(place))
    tasks.spawn(listen())
    try:
        async with asyncio.timeout(limit_s):
            return await found
    except TimeoutError as error:
        raise PeerGone("no hole-punched connection", places=list(places)) from error
    finally:
        await tasks.end()


# ---------------------------------------------------------------- what is said before


Word = TypeVar("Word")


class _NotNow(PeerGone):
    """The callee is busy."""


async def _receive(end: End, kind: type[Word]) -> Word:
    """The callee's next word. Raises SwarmError, TimeoutError."""
    reply = await hear(end, read_punch_reply, _WORD_S)
    if isinstance(reply, Busy):
        raise _NotNow("it has others to see to")
    if not isinstance(reply, kind):
        raise PeerGone(f"it says {type(reply).__name__}")
    return reply


async def _asked_for(end: End, kind: type[Word]) -> Word:
    """The caller's next word. Raises SwarmError, TimeoutError."""
    ask = await hear(end, read_punch_ask, _WORD_S)
    if not isinstance(ask, kind):
        raise BadMessage(RejectCode.MALFORMED, f"{type(ask).__name__} where {kind.__name__} belongs")
    return ask


# ---------------------------------------------------------------- one peer's holes


_WORD_S = 10.0
"""For each word of the other's: it asks two members first, over lines as slow as ours."""
_OBSERVE_S = 6.0

_UNSENT_BYTES = 128 << 10
"""What the system takes of us beyond what the line carries; more would delay short messages."""
_SILENCE_S = 15
"""A router that forgot us is noticed."""


@dataclass(slots=True, eq=False)
class _Mine:
    """A connection that I call through. retired: calls under way end there, and others go elsewhere."""

    sock: socket.socket
    began: float
    taken: bool = False
    retired: bool = False


class Holes:
    """Connections through holes: those that this peer calls through, and those that it is called through.

    welcome(peer): has it greeted, and is it admitted?
    on_open(peer): it can be called through a hole-punched connection now.
    """

    def __init__(
        self,
        leaf: Leaf,
        channels: Callable[[PeerId], PeerChannels],
        local_sockets: LocalSockets,
        welcome: Callable[[PeerId], bool],
        on_open: Callable[[PeerId], None],
    ) -> None:
        self._leaf, self._channels, self._local_sockets, self._local_socket = leaf, channels, local_sockets, ""
        self._on_open = on_open
        self._hidden = False
        self._observers: Callable[[], Sequence[PeerId]] = tuple
        self._say: Say = lambda event, fields: None
        self._punches = Punches()
        self._mine: dict[PeerId, _Mine] = {}
        """By whom they lead to."""
        self._theirs: dict[PeerId, asyncio.Task[None]] = {}
        self._wanted: set[PeerId] = set()
        self._tasks = BackgroundTasks()
        self.methods: dict[str, Handler] = {
            PUNCH: for_members(welcome, write_punch_reply, self._answer),
            OBSERVE: for_members(welcome, write_punch_reply, self._observe),
        }

    def begin(self, local_socket: str, observers: Callable[[], Sequence[PeerId]], say: Say) -> None:
        """This peer is unreachable: from now on it punches holes. local_socket: where its own port listens inside this
        machine. observers(): members that can be dialled. say: takes the events `punched`, `not_punched` and
        `hole_lost`."""
        self._hidden, self._local_socket, self._observers, self._say = True, local_socket, observers, say

    def leads_to(self, peer: PeerId) -> bool:
        """Can this peer be called through a hole-punched connection?"""
        return peer in self._mine and not self._mine[peer].retired

    def joins(self, peer: PeerId) -> bool:
        """Is there a hole-punched connection in either direction?"""
        return peer in self._mine or peer in self._theirs

    def tunnel(self, peer: PeerId) -> Tunnel:
        """Through the hole-punched connection to this peer, with which it ends. Once that is retired, its calls go on
        and new ones take a circuit."""
        mine = self._mine[peer]

        @asynccontextmanager
        async def way() -> AsyncGenerator[End, None]:
            # One connection is one stream: gRPC dials a second time only when the first has ended.
            if mine.taken:
                raise PeerGone("the hole-punched connection is lost", peer=peer)
            mine.taken = True
            try:
                async with _over(mine.sock) as end:
                    yield end
            finally:
                self._lose(peer, mine)

        def retire(closed: bool) -> None:
            mine.retired = True
            if closed:
                self._lose(peer, mine)

        return Tunnel(self._local_sockets.path(), way, retire)

    def want(self, peer: PeerId) -> None:
        """A circuit leads to this peer: a direct connection would be better."""
        if self._hidden and peer not in self._wanted and not self.leads_to(peer):
            self._wanted.add(peer)
            self._tasks.spawn(self._find(peer))

    def close(self) -> None:
        """Close all."""
        self._tasks.cancel()
        for peer, mine in tuple(self._mine.items()):
            self._lose(peer, mine)

    async def _find(self, peer: PeerId) -> None:
        """Try once, and then until there is a direct connection or until this peer sends the other one nothing any
        more."""
        tried = False
        try:
            while not self.leads_to(peer) and (self._channels(peer).in_use or not tried):
                # The other peer keeps one of ours: a retired one has calls under way.
                if (wait_s := BUSY_S if peer in self._mine else self._punches.wait_s(peer, loop_time())) > 0:
                    await asyncio.sleep(wait_s)
                else:
                    tried = True
                    await self._try(peer, self._ask(peer), asks=False)
        finally:
            self._wanted.discard(peer)

    async def _try(self, peer: PeerId, work: Awaitable[tuple[socket.socket, Sight]], *, asks: bool) -> None:
        """One punch, which this peer wants or the other one asks for."""
        began = loop_time()
        self._punches.under_way.add((peer, asks))
        try:
            sock, sight = await work
        except _NotNow as error:
            log.debug("not_now", peer=peer, error=error)
            await asyncio.sleep(BUSY_S)
        except (SwarmError, OSError, TimeoutError) as error:
            self._punches.failed(peer, loop_time(), asks=asks)
            reason = (error.message if isinstance(error, SwarmError) else "") or type(error).__name__
            self._say("not_punched", {"peer": peer, "reason": reason})
        else:
            set_options(sock, silence_s=_SILENCE_S, unsent_bytes=_UNSENT_BYTES)
            if asks:
                self._let_in(peer, sock)
            else:
                self._mine[peer] = _Mine(sock, loop_time())
                self._say("punched", {"peer": peer, "nat": sight.kind(), "seconds": round(loop_time() - began, 3)})
                self._on_open(peer)
        finally:
            self._punches.under_way.discard((peer, asks))

    def _lose(self, peer: PeerId, mine: _Mine) -> None:
        """Idempotent."""
        mine.sock.close()
        if self._mine.get(peer) is mine:
            del self._mine[peer]
            self._punches.ended(peer, loop_time(), lasted_s=loop_time() - mine.began)
            self._say("hole_lost", {"peer": peer})

    def _let_in(self, peer: PeerId, sock: socket.socket) -> None:
        """Splice the other peer's punched connection to this peer's own port: TLS verifies the caller."""

        async def splice() -> None:
            with sock, contextlib.suppress(SwarmError, OSError):
                async with _over(sock) as far:
                    await enter(far, self._local_socket)

        def over(task: asyncio.Task[None]) -> None:
            if self._theirs.get(peer) is task:
                del self._theirs[peer]

        # Of one peer one at a time, so that none can make us hold many.
        if (before := self._theirs.get(peer)) is not None:
            before.cancel()
        self._theirs[peer] = task = self._tasks.spawn(splice())
        task.add_done_callback(over)

    # ------------------------------------------------------------ both ends of a punch

    async def _ask(self, peer: PeerId) -> tuple[socket.socket, Sight]:
        """Raises SwarmError, OSError, TimeoutError."""
        async with AsyncExitStack() as stack:
            hole, sight = await self._sight(stack, self._observers())
            mine = _offer(sight)
            async with self._channels(peer).asked(PUNCH, write_punch_ask(mine), limit_s=_WORD_S) as end:
                theirs = await _receive(end, Offer)
                ping, asked_at = Ping(secrets.token_bytes(NONCE_BYTES)), loop_time()
                await end.write(write_punch_ask(ping))
                if (await _receive(end, Pong)).nonce != ping.nonce:
                    raise BadMessage(RejectCode.MALFORMED, "a pong that answers no ping", peer=peer)
                round_trip_s = loop_time() - asked_at
                places = self._places(sight, theirs, asks=False)
                await end.write(write_punch_ask(Now()))
                # When the message arrives.
                await asyncio.sleep(round_trip_s / 2)
                sock = await punch(hole, places, mine=mine.token, theirs=theirs.token, decides=True)
                # The other peer ends this stream once it takes calls there. Cancelled earlier, it would not.
                with contextlib.suppress(SwarmError, TimeoutError):
                    async with asyncio.timeout(_WORD_S):
                        await end.read()
                return sock, sight

    async def _answer(self, caller: PeerId, end: CallEnd, context: grpc.aio.ServicerContext) -> None:
        if not self._hidden:
            await end.write(write_punch_reply(Rejected(RejectCode.NOT_SERVED, "this peer can be dialled")))
        elif (wait_s := self._punches.wait_s(caller, loop_time(), asks=True)) > 0:
            await end.write(write_punch_reply(Busy(wait_s, -1)))
        else:
            await self._try(caller, self._take_part(end), asks=True)

    async def _take_part(self, end: CallEnd) -> tuple[socket.socket, Sight]:
        """Raises SwarmError, OSError, TimeoutError."""
        async with AsyncExitStack() as stack:
            theirs = await _asked_for(end, Offer)
            hole, sight = await self._sight(stack, self._observers())
            mine = _offer(sight)
            await end.write(write_punch_reply(mine))
            ping = await _asked_for(end, Ping)
            await end.write(write_punch_reply(Pong(ping.nonce)))
            await _asked_for(end, Now)
            places = self._places(sight, theirs, asks=True)
            return await punch(hole, places, mine=mine.token, theirs=theirs.token, decides=False), sight

    def _places(self, sight: Sight, theirs: Offer, *, asks: bool) -> list[Endpoint]:
        """Raises PeerGone if there is nothing to dial."""
        seen = Sight(_endpoint(theirs.inside), tuple(map(_endpoint, theirs.outside)))
        places = self._punches.take(dialled(sight, seen), loop_time(), asks=asks)
        if not places:
            raise PeerGone("no address to dial", mine=sight.kind(), theirs=seen.kind())
        return places

    # ------------------------------------------------------------ from where my calls come

    async def sight(self, members: Sequence[PeerId]) -> Sight:
        """What members, who know me, see of a port of mine. Raises PeerGone."""
        async with AsyncExitStack() as stack:
            _, sight = await self._sight(stack, members)
            return sight

    async def _sight(self, stack: AsyncExitStack, members: Sequence[PeerId]) -> tuple[PunchPort, Sight]:
        """A port and its public mapping; the calls to the observing members stay open meanwhile. Raises PeerGone."""
        addresses = [
            (peer, address)
            for peer in members
            for address in self._channels(peer).addresses()[:1]
            if not address.relay and address.kind.endswith("4")
        ][:MOST_OUTSIDE]
        hole = stack.enter_context(PunchPort())
        looks = [self._look(stack, hole, peer, address) for peer, address in addresses]
        found = await asyncio.gather(*looks, return_exceptions=True)
        seen = [each for each in found if isinstance(each, tuple)]
        if not seen:
            raise PeerGone("no member says where I call from", reasons=list(map(repr, found)))
        return hole, Sight(seen[0][0], tuple(outside for _, outside in seen))

    async def _look(
        self, stack: AsyncExitStack, hole: PunchPort, peer: PeerId, address: Address
    ) -> tuple[Endpoint, Endpoint]:
        """My own address, and how this member sees it."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_OBSERVE_S):
            (*_, place), *_ = await loop.getaddrinfo(address.host, address.port, family=socket.AF_INET)
            sock = await hole.dial((str(place[0]), int(place[1])))
            stack.callback(sock.close)
            host, port = sock.getsockname()[:2]
            tunnel = Tunnel(self._local_sockets.path(), lambda: _over(sock))
            stack.callback(tunnel.close)
            credentials = self._leaf.channel_credentials(peer)
            channel = grpc.aio.secure_channel(f"unix:{tunnel.path}", credentials, options=CHANNEL_OPTIONS)
            stack.push_async_callback(channel.close)
            end = CallEnd(channel.stream_stream(OBSERVE)())
            await end.write(write_punch_ask(Observe()))
            return (host, port), _endpoint(await _receive(end, SeenPort))

    async def _observe(self, caller: PeerId, end: CallEnd, context: grpc.aio.ServicerContext) -> None:
        host, port = endpoint_of(context.peer())
        # Through a relay it comes from nowhere.
        reply = SeenPort(host, port) if port else Rejected(RejectCode.NOT_SERVED, "that came through a relay")
        await end.write(write_punch_reply(reply))


@asynccontextmanager
async def _over(sock: socket.socket) -> AsyncGenerator[End, None]:
    # A descriptor of its own: the event loop watches it until the stream has ended, when the number of `sock`, closed
    # by then, may be that of another connection, which would be watched no longer.
    end = Connection(*await asyncio.open_connection(sock=sock.dup()))
    try:
        yield end
    finally:
        end.close()


def _offer(sight: Sight) -> Offer:
    outside = tuple(SeenPort(*each) for each in sight.outside)
    return Offer(SeenPort(*sight.inside), outside, secrets.token_bytes(TOKEN_BYTES))


def _endpoint(place: SeenPort) -> Endpoint:
    return place.host, place.port
