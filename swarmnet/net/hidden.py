"""A peer that nobody can dial, and how others get to it all the same (docs/relays.md).

`Places` is the hidden peer's side: it keeps a place at two relays, and comes when it is summoned, to the relay or, if
the caller can be dialled, to the caller itself. `Ways` is the caller's: how a byte stream to such a peer is opened.
Whoever accepts a connection on it is found out by TLS, end to end: a relay can only drop what it passes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Protocol

import grpc

from swarmnet import telemetry
from swarmnet.bounds import Recent
from swarmnet.errors import PeerGone, PeerTimeout, Refused, RejectCode, SwarmError, leaves
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Rejected
from swarmnet.net.circuits import Arrivals, Called, Connection, Doors, End, Tunnel, splice
from swarmnet.net.dial_back import Say
from swarmnet.net.grpc_channels import PeerChannels
from swarmnet.net.relay import ARRIVE, COME_S, CONNECT, PING_S, RESERVE, SILENCE_S, Relay
from swarmnet.wire.convert import NONCE_BYTES, GreetFirst, Ping, Pong
from swarmnet.wire.relay import ID_BYTES, Arrive, Connect, Reserve, Reserved, Summon, read_reply, write_ask

WANTED = 2
"""Places to keep: when one relay is lost, callers try the other."""

REVERSE_S = 3.0
"""A caller that can be dialled waits so long for the peer to come to it directly."""

_REVERSE_AGAIN_S = 60.0
"""And after it was in vain so long before it tries again."""

_RELAY_AGAIN_S = 20.0
_LOOK_S = 0.5
_MOST_COMING = 64

ChannelsTo = Callable[[PeerId], PeerChannels]

log = telemetry.get(__name__)


@asynccontextmanager
async def asked(channels: PeerChannels, method: str, ask: bytes, *, limit_s: float) -> AsyncGenerator[Called, None]:
    """A stream that begins with this question, once the callee has been greeted. Raises SwarmError, TimeoutError."""
    deadline = asyncio.get_running_loop().time() + limit_s
    async with AsyncExitStack() as stack:
        async with asyncio.timeout_at(deadline):
            if (refusal := await channels.greet(deadline=deadline)) is not None:
                raise Refused(refusal.code, refusal.reason, peer=channels.peer)
            channel = await stack.enter_async_context(channels.channel(bulk=method != RESERVE))
            stream: grpc.aio.StreamStreamCall = channel.aio.stream_stream(method)()
            stack.callback(stream.cancel)
            end = Called(stream)
            # A refusal may have come first: whoever reads hears it.
            with contextlib.suppress(PeerGone):
                await end.write(ask)
        yield end


async def _answer_of(end: Called, channels: PeerChannels) -> object:
    """The callee's first word, if it is a good one. Raises SwarmError, TimeoutError."""
    async with asyncio.timeout(COME_S + SILENCE_S / 2):
        data = await end.read()
    if not data:
        raise PeerGone("the stream ended", peer=channels.peer)
    reply = read_reply(data)
    if isinstance(reply, GreetFirst):
        channels.greet_again()
    if isinstance(reply, Rejected):
        raise Refused(reply.code, reply.reason, peer=channels.peer)
    if not isinstance(reply, Accepted | Reserved):
        raise Refused(RejectCode.NOT_READY, f"it says {type(reply).__name__}", peer=channels.peer)
    return reply


# ---------------------------------------------------------------- the hidden peer


class Places:
    """Keeps places at relays while `run` runs.

    candidates(): members that can be dialled. door: the socket at which this peer's own port listens inside this
    machine. say: takes the events `relay_reserved` and `relay_lost`.
    """

    def __init__(
        self, me: PeerId, channels: ChannelsTo, candidates: Callable[[], Sequence[PeerId]], door: str, say: Say
    ) -> None:
        self._me, self._channels, self._candidates, self._door, self._say = me, channels, candidates, door, say
        self.relays: list[PeerId] = []
        """Where there is a place now, the oldest first."""
        self.settled = asyncio.Event()
        """There is a place, or everybody who could be asked has refused one."""
        self._keeping: set[PeerId] = set()
        self._again_at: Recent[PeerId, float] = Recent(1024)
        self._changed = asyncio.Event()
        self._coming: set[asyncio.Task[None]] = set()
        self.refused: dict[PeerId, str] = {}
        """Who did not relay, and why."""

    async def run(self) -> None:
        """Until cancelled: find relays, keep the places, and replace what is lost."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._changed.clear()
                    for relay in self._next():
                        self._keeping.add(relay)
                        group.create_task(self._keep(relay))
                    if not self._keeping and self.refused:
                        self.settled.set()
                    # A candidate may be new, or may be tried again.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_S):
                            await self._changed.wait()
        finally:
            for task in self._coming:
                task.cancel()

    def _next(self) -> list[PeerId]:
        """Whom to ask now, in an order that nobody can choose, so that hidden peers spread over the relays."""
        now = asyncio.get_running_loop().time()
        able = [
            peer
            for peer in self._candidates()
            if peer != self._me and peer not in self._keeping and self._again_at.get(peer, now) <= now
        ]
        able.sort(key=lambda peer: hashlib.sha256(f"{self._me}/{peer}".encode()).digest())
        return able[: WANTED - len(self._keeping)] if len(self._keeping) < WANTED else []

    async def _keep(self, relay: PeerId) -> None:
        reason = ""
        try:
            channels = self._channels(relay)
            async with asked(channels, RESERVE, write_ask(Reserve()), limit_s=SILENCE_S) as end:
                terms = await _answer_of(end, channels)
                self.relays.append(relay)
                self.refused.pop(relay, None)
                self.settled.set()
                self._say("relay_reserved", {"relay": relay, "bytes_per_s": getattr(terms, "bytes_per_s", 0)})
                async with asyncio.TaskGroup() as group:
                    pinging = group.create_task(_ping(end))
                    try:
                        await self._listen(relay, end)
                    finally:
                        pinging.cancel()
        except* SwarmError as errors:
            reason = str(next(leaves(errors)))
        except* TimeoutError:
            reason = f"nothing was heard for {SILENCE_S:g} s"
        finally:
            self._keeping.discard(relay)
            self._again_at[relay] = asyncio.get_running_loop().time() + _RELAY_AGAIN_S
            self._changed.set()
            if relay in self.relays:
                self.relays.remove(relay)
                self._say("relay_lost", {"relay": relay, "reason": reason})
            else:
                self.refused[relay] = reason
                log.debug("no_place", relay=relay, reason=reason)

    async def _listen(self, relay: PeerId, end: Called) -> None:
        while True:
            async with asyncio.timeout(SILENCE_S):
                data = await end.read()
            if not data:
                raise PeerGone("the relay gave the place away", peer=relay)
            match read_reply(data):
                case Summon() as summon if len(self._coming) < _MOST_COMING:
                    self._spawn(self._come(relay, summon))
                case Summon() | Pong():
                    pass
                case other:
                    raise PeerGone(f"the relay says {type(other).__name__}", peer=relay)

    async def _come(self, relay: PeerId, summon: Summon) -> None:
        """Bring the caller's stream to my own port."""
        target = summon.caller if summon.reverse else relay
        try:
            channels = self._channels(target)
            # A caller that cannot be dialled itself has no business in asking for it.
            if all(address.relay for address in channels.addresses()):
                raise PeerGone("it cannot be dialled", peer=target)
            async with asked(channels, ARRIVE, write_ask(Arrive(summon.id)), limit_s=COME_S) as far:
                await _answer_of(far, channels)
                near = Connection(*await asyncio.open_unix_connection(self._door))
                try:
                    await splice(far, near)
                finally:
                    near.close()
        except (SwarmError, TimeoutError, OSError) as error:
            log.debug("did_not_come", caller=summon.caller, relay=relay, reverse=summon.reverse, error=error)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)


async def _ping(end: Called) -> None:
    with contextlib.suppress(SwarmError):
        while True:
            await asyncio.sleep(PING_S)
            await end.write(write_ask(Ping(secrets.token_bytes(NONCE_BYTES))))


# ---------------------------------------------------------------- the caller


class Shortcuts(Protocol):
    """Connections that need no relay (`punch.Holes`)."""

    def leads_to(self, peer: PeerId) -> bool:
        """Is there one to this peer?"""
        ...

    def stream(self, peer: PeerId) -> AbstractAsyncContextManager[End]:
        """A byte stream on it. Raises PeerGone."""
        ...

    def want(self, peer: PeerId) -> None:
        """A relay carries what goes to this peer."""
        ...


class Ways:
    """How this peer gets to peers that nobody can dial. hidden(): can nobody dial this peer itself?"""

    def __init__(
        self,
        channels: ChannelsTo,
        arrivals: Arrivals,
        relay: Relay,
        doors: Doors,
        hidden: Callable[[], bool],
        shortcuts: Shortcuts,
    ) -> None:
        self._channels, self._arrivals, self._relay, self._shortcuts = channels, arrivals, relay, shortcuts
        self._doors, self._hidden = doors, hidden
        self._in_vain: Recent[PeerId, float] = Recent(4096)
        """Peers that did not come to us directly, and when."""

    def tunnel(self, peer: PeerId, relay: PeerId) -> Tunnel:
        """Where to dial in this machine to get to `peer` through `relay`."""
        return Tunnel(self._doors.path(), partial(self._open, peer, relay))

    def relays(self, peer: PeerId) -> bool:
        """Does a relay carry what we say to this peer, which nobody can dial?"""
        return not self._comes(peer) and not self._shortcuts.leads_to(peer)

    def _comes(self, peer: PeerId) -> bool:
        """Does the peer come to us?"""
        now = asyncio.get_running_loop().time()
        return not self._hidden() and now - self._in_vain.get(peer, -_REVERSE_AGAIN_S) >= _REVERSE_AGAIN_S

    @asynccontextmanager
    async def _open(self, peer: PeerId, relay: PeerId) -> AsyncGenerator[End, None]:
        """A byte stream to the peer. Raises SwarmError, TimeoutError."""
        async with AsyncExitStack() as stack:
            yield await self._way(stack, peer, relay)

    async def _way(self, stack: AsyncExitStack, peer: PeerId, relay: PeerId) -> End:
        if self._shortcuts.leads_to(peer):
            return await stack.enter_async_context(self._shortcuts.stream(peer))
        if relay == self._relay.me:
            return await self._expect(stack, peer, self._summon)
        channels = self._channels(relay)
        # Circuits do not lead through circuits.
        if all(address.relay for address in channels.addresses()):
            raise PeerGone("its relay cannot be dialled", peer=peer, relay=relay)
        if self._comes(peer):
            try:
                return await self._expect(stack, peer, partial(self._reverse, channels))
            except TimeoutError:
                self._in_vain[peer] = asyncio.get_running_loop().time()
                log.debug("does_not_come", peer=peer, relay=relay)
        connect = Connect(peer, secrets.token_bytes(ID_BYTES))
        end = await stack.enter_async_context(asked(channels, CONNECT, write_ask(connect), limit_s=COME_S))
        await _answer_of(end, channels)
        self._shortcuts.want(peer)
        return end

    async def _expect(
        self, stack: AsyncExitStack, peer: PeerId, call: Callable[[PeerId, bytes], Coroutine[object, object, None]]
    ) -> End:
        """The peer's own stream to us. Raises TimeoutError if it does not come."""
        ident = secrets.token_bytes(ID_BYTES)
        coming = stack.enter_context(self._arrivals.expect(peer, ident))
        await call(peer, ident)
        async with asyncio.timeout(REVERSE_S):
            return await coming

    async def _summon(self, peer: PeerId, ident: bytes) -> None:
        if self._relay.summon(self._relay.me, peer, ident, reverse=False) > 0:
            raise PeerTimeout("it has no place here now, or was called too often", peer=peer)

    async def _reverse(self, channels: PeerChannels, peer: PeerId, ident: bytes) -> None:
        ask = Connect(peer, ident, reverse=True)
        async with asked(channels, CONNECT, write_ask(ask), limit_s=COME_S) as end:
            await _answer_of(end, channels)
