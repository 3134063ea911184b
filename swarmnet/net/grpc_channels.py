"""What reaches one peer: its address, its channels, whether it was greeted, and whether it is gone.

One control channel carries greetings and the link, so that small messages do not queue behind tensors; one to four
channels carry calls. All are opened when first used and replaced when they break. Every connection begins with a
greeting, which asks whether the address may be dialled now (`dials`). gRPC's errors become ours here, and a broken
connection is told from the death of a process. Knows nothing of messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import grpc

from swarmnet import telemetry
from swarmnet.clock import loop_time
from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import Rejected
from swarmnet.net.address import Address
from swarmnet.net.bulk.pool import BULK, BulkPool, BulkTarget
from swarmnet.net.bulk.records import BulkKeys
from swarmnet.net.dials import Dials
from swarmnet.net.greeting import HELLO, Greeter
from swarmnet.net.grpc_options import CHANNEL_OPTIONS, GrpcConfig
from swarmnet.net.limits import DIAL_FIRST_S
from swarmnet.net.nat.circuits import CallEnd, Stream, we_are_cancelled
from swarmnet.net.tls import Leaf
from swarmnet.net.twins import TWIN_REFUSED, Lives
from swarmnet.wire.convert import (
    SECRET_BYTES,
    BulkAsk,
    Hello,
    read_bulk_offer,
    read_hello_reply,
    write_bulk_ask,
    write_hello,
)

# ---------------------------------------------------------------- gRPC's errors in our words


SERVICE_FAILED = "the service failed; its log says why"
"""Details of the INTERNAL status that answers a call our own bug has ended."""

_LOOK_S = 0.5
_PROBES = 3
_PROBE_EVERY_S = 0.04
_PROBE_TIMEOUT_S = 0.3


def translate(error: grpc.aio.AioRpcError, peer: PeerId, *, definite: bool = False) -> SwarmError:
    """What a failed call means. `definite`: the result of `all_refuse` for a broken connection."""
    details = (error.details() or "")[:300]
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return PeerTimeout("no answer in time", peer=peer)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            # gRPC's word for a message beyond its limit of bytes.
            return BadMessage(RejectCode.TOO_LARGE, "message is too long", peer=peer, details=details)
        case grpc.StatusCode.UNIMPLEMENTED:
            # It runs an older swarmnet, which lacks this method.
            return BadMessage(RejectCode.WRONG_VERSION, "the peer does not know this call", peer=peer, details=details)
    return PeerGone("connection broke", definite=definite, peer=peer, status=error.code().name, details=details)


def is_break(error: grpc.aio.AioRpcError) -> bool:
    """Whether the connection failed, and not only the call."""
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return True
        case grpc.StatusCode.INTERNAL:  # a reset stream, unless the callee confessed
            return bool(error.details() != SERVICE_FAILED)
    return False


async def all_refuse(addresses: Sequence[Address]) -> bool:
    """Dial a peer that just broke off. True proves its process gone: every address refuses the connection.

    A killed process's port may outlive its connections by an instant, so an open port is dialled again.
    """
    for attempt in range(_PROBES):
        if attempt:
            await asyncio.sleep(_PROBE_EVERY_S)
        # A machine with several addresses is gone only when none of them answers.
        if all([await refuses(address) for address in addresses]):
            return True
    return False


REFUSED = "refused"
"""The result of `tcp_probe` where the connection is refused. Any other result proves nothing."""


async def tcp_probe(address: Address, *, limit_s: float) -> str:
    """Dial an address once by plain TCP, and hang up. Returns why it could not be done; "" if it could."""
    # A firewall drops without a word, and the system would wait for two minutes.
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return "no answer"
    except ConnectionRefusedError:
        return REFUSED
    except OSError:
        return "no way there"
    writer.close()
    return ""


async def refuses(address: Address) -> bool:
    """Does the address refuse connections? A circuit proves nothing, because it is only the relay's answer."""
    return address.direct and await tcp_probe(address, limit_s=_PROBE_TIMEOUT_S) == REFUSED


# ---------------------------------------------------------------- channels


log = telemetry.get(__name__)


@dataclass(eq=False)
class Channel:
    """One connection to a peer. A retired channel takes no new calls and closes with its last one."""

    aio: grpc.aio.Channel
    address: Address
    stream: Stream
    users: int = 0
    retired: bool = False
    heard_at: float = -math.inf
    """When bytes of any call last arrived on it."""

    async def close(self) -> None:
        """Cancel what is under way."""
        await self.aio.close()
        self.stream.close()


@dataclass(frozen=True, slots=True)
class Dialling:
    """What the channels of a transport share."""

    leaf: Leaf
    greeter: Greeter
    config: GrpcConfig
    addresses: Callable[[PeerId], Sequence[Address]]
    connect: Callable[[PeerId, Address], Stream]
    dials: Dials
    on_gone: Callable[[PeerId, bool], None]
    find: Callable[[PeerId], Awaitable[None]] | None = None
    """Reads the record of a peer that I call by name, of a large stage; None: all that there are have been read."""
    lives: Lives = field(default_factory=Lives)
    on_twin: Callable[[Hello, str, bool], None] = lambda hello, host, clocks_agree: None
    """Another process greets me under my own identity, from this host."""


class PeerChannels:
    """The channels to one peer, opened when first used and replaced when they break."""

    def __init__(self, peer: PeerId, dialling: Dialling) -> None:
        self.peer, self.config = peer, dialling.config
        self._dialling = dialling
        self._control: Channel | None = None
        self._calls: list[Channel | None] = [None] * dialling.config.call_channels
        self._retired: list[Channel] = []  # replaced, but still in use
        self.bulk = BulkPool(peer, self._ask_for_bulk, stall_s=self.config.stall_s)
        self._failed: list[Address] = []  # dials failed, oldest first
        self.clock_offset_s: float | None = None
        """By how much the peer's clock is ahead of mine, as far as its greeting told."""
        self.boot_id = 0
        """Of the process that answered last."""
        self._greeted = False
        self._greeting = asyncio.Lock()
        self._probing = asyncio.Lock()
        self._checked: tuple[float, bool] = (float("-inf"), False)
        self._closed = False
        self._told: bool | None = None  # the last `definite` reported since it was alive

    @property
    def in_use(self) -> bool:
        """Is a call or a link under way?"""
        return any(channel.users for channel in (*self._open_channels(), *self._retired))

    # ------------------------------------------------------------ channels

    @asynccontextmanager
    async def channel(self, *, calls: bool) -> AsyncIterator[Channel]:
        """A channel for one call: the control channel, or that for calls with the fewest of them. Raises PeerGone."""
        self._leave_old_addresses()
        if calls:
            channel = self._call_channel()
        else:
            channel = self._control = self._control or self._open()
        channel.users += 1
        try:
            await self._close_idle()
            yield channel
        finally:
            channel.users -= 1
            await self._close_idle()

    def _open_channels(self) -> list[Channel]:
        return [channel for channel in (self._control, *self._calls) if channel is not None]

    def _leave_old_addresses(self) -> None:
        """A restarted peer listens on other addresses; a peer with an expired record keeps its connections."""
        known = self.addresses()
        for channel in self._open_channels():
            # An empty list means that its record expired, which says nothing about the connection.
            if known and channel.address not in known:
                self.retire(channel)

    def leave_relays(self) -> None:
        """There is a shorter way: what begins from now on takes it, and what is under way ends where it is."""
        for channel in self._open_channels():
            if channel.address.relay not in (None, self.peer):
                self.retire(channel)

    async def _close_idle(self) -> None:
        """Close the retired channels without users."""
        idle = [channel for channel in self._retired if channel.users == 0]
        self._retired = [channel for channel in self._retired if channel.users > 0]
        for channel in idle:
            await channel.close()

    def _call_channel(self) -> Channel:
        slot = min(range(len(self._calls)), key=lambda at: channel.users if (channel := self._calls[at]) else 0)
        # Opened one by one: a peer that is called seldom keeps one connection.
        channel = self._calls[slot]
        if channel is None:
            channel = self._calls[slot] = self._open()
        return channel

    def _open(self) -> Channel:
        address = self._next_address()
        # A hole-punched connection is one stream, which all calls share.
        if address.relay == self.peer and (
            channel := next((each for each in self._open_channels() if each.address == address), None)
        ):
            return channel
        credentials = self._dialling.leaf.channel_credentials(self.peer)
        stream = self._dialling.connect(self.peer, address)
        aio = grpc.aio.secure_channel(stream.target, credentials, options=CHANNEL_OPTIONS)
        channel = Channel(aio, address, stream)
        # Its relay is lost, or there is a better stream: the next call takes another.
        stream.on_end = partial(self.retire, channel)
        return channel

    def addresses(self) -> Sequence[Address]:
        """Where the peer is said to be reached."""
        return self._dialling.addresses(self.peer)

    def _next_address(self) -> Address:
        """Of those that may be dialled now the one that failed longest ago, untried ones first. Raises PeerGone if
        there is none."""
        known = self.addresses()
        if not known:
            raise PeerGone("no address is known", peer=self.peer)
        self._failed = [at for at in self._failed if at in known]
        pauses_s = self._pauses_s(known)
        ready = [at for at in known if not pauses_s[at]]
        # An address where it has answered comes before one that it only names, which may be a victim's. A circuit is
        # asked for at its relay.
        if self._greeted:
            ready = [at for at in ready if not at.direct or self._dialling.dials.shown(self.peer, at)] or ready
        if not ready:
            raise PeerGone(
                "a dial failed a moment ago",
                definite=bool(self._told),
                peer=self.peer,
                again_in_s=round(min(pauses_s.values()), 2),
            )
        return min(ready, key=lambda at: self._failed.index(at) + 1 if at in self._failed else 0)

    def _pauses_s(self, known: Sequence[Address]) -> dict[Address, float]:
        now = loop_time()
        return {at: self._dialling.dials.pause_s(self.peer, at, now) for at in known}

    # ------------------------------------------------------------ greeting

    async def greet(self, *, deadline: float) -> Rejected | None:
        """Say Hello unless that was done. Returns a refusal of either end. Raises PeerGone, PeerTimeout, BadMessage."""
        async with self._greeting:
            if self._dialling.find is not None and not self.addresses():
                await self._dialling.find(self.peer)
            # Calls that start together wait for one greeting.
            if self._greeted and self._shows_an_address():
                return None
            refusal = await self._greet_any(deadline)
            self._greeted = refusal is None
            return refusal

    def _shows_an_address(self) -> bool:
        """False for a peer with a record that names other addresses than those at which it answered."""
        known = self.addresses()
        return not known or any(self._dialling.dials.shown(self.peer, at) for at in known)

    def greet_again(self) -> None:
        """The peer does not know us any more (it restarted)."""
        self._greeted = False

    async def _greet_any(self, deadline: float) -> Rejected | None:
        # Another task dials there just now, or did a moment ago, perhaps to see whether its last process is gone.
        if 0 < (pause_s := min(self._pauses_s(self.addresses()).values(), default=0.0)) <= DIAL_FIRST_S:
            await asyncio.sleep(pause_s)
        for _ in range(len(self.addresses()) - 1):
            try:
                return await self._greet_once(deadline)
            except grpc.aio.AioRpcError as error:
                log.debug("greeting_failed", peer=self.peer, error=error)
        try:
            return await self._greet_once(deadline)
        except grpc.aio.AioRpcError as error:
            raise await self.failed(error, None) from error

    async def _greet_once(self, deadline: float) -> Rejected | None:
        """Raises AioRpcError where the connection broke, which `failed` explains."""
        greeter, dials = self._dialling.greeter, self._dialling.dials
        deadline = min(deadline, loop_time() + self._dialling.config.stall_s)
        async with self.channel(calls=False) as channel:
            dials.begin(self.peer, channel.address, loop_time())
            try:
                async with asyncio.timeout_at(deadline):
                    sent = greeter.clock()
                    said = channel.aio.unary_unary(HELLO)(write_hello(greeter.hello()))
                    reply = await self._while_there(channel, said)
                dials.answered(self.peer, channel.address)
            except TimeoutError as error:
                # It may be stopped or overloaded. That is no proof of death, so nothing is said to the service.
                self.stalled(channel, for_s=self._dialling.config.stall_s)
                dials.failed(self.peer, channel.address, refused=False, now=loop_time())
                raise PeerTimeout("no answer to Hello", peer=self.peer, address=str(channel.address)) from error
            except grpc.aio.AioRpcError as error:
                # The connection is fine; another address would answer the same.
                if not is_break(error):
                    raise translate(error, self.peer) from error
                self.retire(channel)
                # Asked at once: later the address may be let alone, and this process would not learn that the peer is
                # gone.
                refused = await refuses(channel.address)
                dials.failed(self.peer, channel.address, refused=refused, now=loop_time())
                raise
            finally:
                dials.left(channel.address)
        answer = read_hello_reply(reply)
        if isinstance(answer, Rejected):
            return answer
        self.boot_id = answer.boot_id
        if self._dialling.lives.another(self.peer, answer.boot_id, loop_time()):
            self.retire(channel)
            return TWIN_REFUSED
        self.alive(channel)
        # It was read about half way between.
        self.clock_offset_s = answer.clock - (sent + greeter.clock()) / 2
        return greeter.judge(answer, self.peer, sent=sent)

    async def _while_there(self, channel: Channel, call: Awaitable[bytes]) -> bytes:
        """What the call returns. Raises TimeoutError if the peer's record names other addresses meanwhile: dials of a
        peer that has become unreachable could otherwise fail for as long as the call may take."""
        waiting = asyncio.ensure_future(call)
        try:
            while not waiting.done():
                await asyncio.wait([waiting], timeout=_LOOK_S)
                if not waiting.done() and (known := self.addresses()) and channel.address not in known:
                    raise TimeoutError
            return waiting.result()
        finally:
            waiting.cancel()

    @asynccontextmanager
    async def asked(
        self, method: str, ask: bytes, *, limit_s: float, calls: bool = True
    ) -> AsyncGenerator[CallEnd, None]:
        """A stream that begins with this question, once the peer has been greeted. Raises SwarmError, TimeoutError."""
        deadline = loop_time() + limit_s
        async with AsyncExitStack() as stack:
            async with asyncio.timeout_at(deadline):
                if (refusal := await self.greet(deadline=deadline)) is not None:
                    raise Refused(refusal.code, refusal.reason, peer=self.peer)
                channel = await stack.enter_async_context(self.channel(calls=calls))
                stream: grpc.aio.StreamStreamCall = channel.aio.stream_stream(method)()
                stack.callback(stream.cancel)
                end = CallEnd(stream)
                # A refusal may have come first: the reader gets it.
                with contextlib.suppress(PeerGone):
                    await end.write(ask)
            try:
                yield end
            except TimeoutError:
                self.stalled(channel, for_s=limit_s)
                raise

    async def _ask_for_bulk(self) -> BulkTarget | None:
        """Raises AioRpcError, PeerGone, BadMessage, TimeoutError."""
        if self._dialling.greeter.unwelcome(self.peer) is not None:
            return None
        mine = secrets.token_bytes(SECRET_BYTES)
        async with self.channel(calls=False) as channel, asyncio.timeout(self.config.stall_s):
            offer = read_bulk_offer(await channel.aio.unary_unary(BULK)(write_bulk_ask(BulkAsk(mine))))
        # The port is the peer's word, the host is where it has proved to be: no third party is dialled.
        at = channel.address
        if not offer.port or not at.direct or not self._dialling.dials.shown(self.peer, at):
            return None
        run, me = self._dialling.greeter.run or "", self._dialling.leaf.peer
        return BulkTarget(at.host, offer.port, BulkKeys(run, me, self.peer, offer.session, mine + offer.secret))

    # ------------------------------------------------------------ breaking

    def alive(self, channel: Channel) -> None:
        """Bytes arrived on this channel."""
        self._told, channel.heard_at = None, loop_time()
        if self._failed:
            self._failed = [at for at in self._failed if at != channel.address]

    def stalled(self, channel: Channel, *, for_s: float) -> None:
        """A call on this channel has received nothing for so long. The next call takes another connection, unless other
        calls receive something on this one: then that call is slow, and not the connection."""
        if loop_time() - channel.heard_at >= for_s:
            self.retire(channel)

    def retire(self, channel: Channel) -> None:
        """Replace a broken channel at its next use."""
        # Several calls may find the same channel broken.
        if not channel.retired:
            channel.retired = True
            channel.stream.retire()
            self._retired.append(channel)
            self._failed = [at for at in self._failed if at != channel.address] + [channel.address]
        if self._control is channel:
            self._control = None
        self._calls = [None if other is channel else other for other in self._calls]

    async def read(self, stream: grpc.aio.StreamStreamCall, channel: Channel) -> bytes | None:
        """The next message of a stream; None at its good end. Raises what `failed` finds."""
        try:
            data = await stream.read()
        except grpc.aio.AioRpcError as error:
            raise await self.failed(error, channel) from error
        except asyncio.CancelledError as error:
            if we_are_cancelled():
                raise
            definite = not self._closed and await self.broke(channel)
            raise PeerGone("the stream was cancelled", definite=definite, peer=self.peer) from error
        self.alive(channel)
        return None if data is grpc.aio.EOF else data

    async def failed(self, error: grpc.aio.AioRpcError, channel: Channel | None) -> Exception:
        """Translate a failed call; a broken connection is classified and reported."""
        definite = is_break(error) and await self.broke(channel)
        return translate(error, self.peer, definite=definite)

    async def broke(self, channel: Channel | None) -> bool:
        """A connection broke: find out whether the process is gone, tell the service once, and say which."""
        noticed = loop_time()
        if channel is not None:
            self.retire(channel)
        async with self._probing:
            # Ten calls break at once with one connection; the first of them finds out for all.
            if self._checked[0] < noticed:  # else: found out while we waited for the lock
                self._checked = loop_time(), await self._all_refuse()
                self._report(self._checked[1])
        return self._checked[1]

    async def _all_refuse(self) -> bool:
        """Does every address refuse us? Those that the peer has not shown are dialled as any other, in their turn."""
        dials, now = self._dialling.dials, loop_time()
        known = self.addresses()
        shown = [at for at in known if dials.shown(self.peer, at)]
        if not all(address.direct for address in known):
            return False
        for address in known:
            if address not in shown and not dials.pause_s(self.peer, address, now):
                dials.begin(self.peer, address, now)
                try:
                    # A process listens there: the next call finds out which.
                    if await refuses(address):
                        dials.failed(self.peer, address, refused=True, now=now)
                    else:
                        return False
                finally:
                    dials.left(address)
        named = [at for at in known if at not in shown]
        return bool(known) and all(map(dials.refused, named)) and await all_refuse(shown)

    def _report(self, definite: bool) -> None:
        if definite:
            # The next process that listens there is another one, without our greeting.
            self._greeted = False
            self.bulk.close()
            for channel in self._open_channels():
                self.retire(channel)
        # Said once; a second time only if what was a guess has become certain.
        news = self._told is None or (definite and not self._told)
        if news and not self._closed:
            self._told = definite
            self._dialling.on_gone(self.peer, definite)

    async def close(self) -> None:
        """Cancel what is under way and close all connections."""
        self._closed = True
        self.bulk.close()
        for channel in self._open_channels():
            self.retire(channel)
        for channel in self._retired:
            await channel.close()
