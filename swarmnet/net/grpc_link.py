"""The link: one long-lived stream of one-way messages to one peer, best effort, in order.

It is opened when the first message waits, and re-opened with back-off while messages wait. The queue is bounded: when
it is full the oldest message that will be said again anyway goes first. What a broken stream had not delivered is lost;
every message of the step protocol is re-sent until the state it reports has changed. Among the messages goes a ping now
and then: its nonce, coming back, proves that the peer can be called and that its event loop runs. While nothing is said
nothing is asked, so it needs no timer. On the way back come the one-way messages of a peer that cannot connect to us
(`Told`). Its other end is in `grpc_callee`.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Awaitable, Callable

import grpc

from swarmnet import telemetry
from swarmnet.clock import loop_time
from swarmnet.errors import BadMessage, PeerGone, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Control, Heartbeat, MemberState, StagePlan
from swarmnet.net.background import running
from swarmnet.net.grpc_channels import Channel, PeerChannels
from swarmnet.net.limits import LINK_AGAIN, REPEATS
from swarmnet.net.traffic import BandwidthLimit
from swarmnet.pacing import Budgets
from swarmnet.wire.convert import NONCE_BYTES, GreetFirst, Ping, Pong, Signal, Told, read_answer, write_control
from swarmnet.wire.deflate import Deflater, Inflater

LINK = "/swarmnet.v1.Control/Link"

log = telemetry.get(__name__)

_PERIODIC = (Heartbeat, StagePlan, MemberState)

PING_S = 0.4
"""Pings are at least so far apart: each of the default heartbeats, half a second apart, brings one."""


_LATELY = 8
"""Messages that may be told to the next peer, too."""

_MOST_REASONS = 8
"""For which a peer refuses the link, each of which is logged now and then."""


class MessageWriter:
    """Writes messages. The same object told to many peers, one after the other, is written once."""

    def __init__(self) -> None:
        self._lately: deque[tuple[Control, bytes]] = deque(maxlen=_LATELY)

    def __call__(self, message: Control) -> bytes:
        """One message of a link."""
        # The same object, not an equal one: comparing large messages would cost more than it saves.
        for known, data in self._lately:
            if known is message:
                return data
        data = write_control(message)
        self._lately.append((message, data))
        return data


class Outbox:
    """A bounded queue of written messages."""

    def __init__(self, limit: int, write: Callable[[Control], bytes]) -> None:
        self._limit, self._write = limit, write
        self._waiting: deque[tuple[bool, bytes]] = deque()
        self._filled = asyncio.Event()

    def put(self, message: Control) -> None:
        """Append. When full, drop the oldest periodic message, or the oldest of all if there is none."""
        # What is periodic will be said again, and newer; what is not may be said only once.
        if len(self._waiting) >= self._limit:
            periodic = (at for at, (repeats, _) in enumerate(self._waiting) if repeats)
            del self._waiting[next(periodic, 0)]
        self._waiting.append((isinstance(message, _PERIODIC), self._write(message)))
        self._filled.set()

    async def filled(self) -> None:
        """Wait until a message waits."""
        await self._filled.wait()

    def pop(self) -> bytes:
        """The oldest message; one must wait."""
        _, data = self._waiting.popleft()
        if not self._waiting:
            self._filled.clear()
        return data

    def clear(self) -> None:
        """Forget everything."""
        self._waiting.clear()
        self._filled.clear()

    def __len__(self) -> int:
        return len(self._waiting)


class Probe:
    """When to ask for an answer, and which answer counts. One stream's; `now` in seconds of any clock."""

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._nonce: bytes | None = None  # of the ping that is not answered yet
        self._asked_at = -math.inf

    def ask(self, *, now: float) -> Ping | None:
        """The ping to send now, if one is due: one is under way at a time (a stream loses nothing)."""
        # One at a time: an answer then says which ping it answers, and how old it is.
        if self._nonce is not None or now - self._asked_at < PING_S:
            return None
        self._nonce, self._asked_at = secrets.token_bytes(NONCE_BYTES), now
        return Ping(self._nonce)

    def answered(self, pong: Pong, *, now: float) -> bool:
        """Has the peer just answered? An answer that took too long may have waited here, while we were stopped.

        Raises BadMessage if it was not asked for.
        """
        if pong.nonce != self._nonce:
            raise BadMessage(RejectCode.MALFORMED, "a pong that answers no ping")
        self._nonce = None
        return now - self._asked_at <= self._patience_s


class Link:
    """Carries one outbox to one peer. on_reached: told that the peer has just answered on this link. on_told: given
    what the peer says on it, packed, and what unpacks it. write: shared by all links, so that what many are told is
    written once. up: my line, on which messages wait for nothing."""

    def __init__(
        self,
        channels: PeerChannels,
        write: Callable[[Control], bytes],
        on_reached: Callable[[PeerId], None],
        on_told: Callable[[PeerId, bytes, Inflater], Awaitable[None]],
        up: BandwidthLimit,
    ) -> None:
        self._channels, self._config, self._on_reached, self._on_told = channels, channels.config, on_reached, on_told
        self.outbox, self._up = Outbox(self._config.outbox, write), up
        self._refusals = Budgets[str](REPEATS, _MOST_REASONS)
        self.is_open = False

    async def run(self) -> None:
        """Until cancelled: connect when a message waits, stream, back off when it breaks."""
        backoff = LINK_AGAIN()
        while True:
            await self.outbox.filled()
            if await self._connect_and_stream():
                backoff.reset()
            else:
                await asyncio.sleep(backoff.failed(loop_time()))

    async def _connect_and_stream(self) -> bool:
        """Returns whether the peer took the link."""
        deadline = loop_time() + self._config.stall_s
        try:
            refusal = await self._channels.greet(deadline=deadline)
            if refusal is not None:
                code, reason = refusal.code.value, refusal.reason
                if not self._refusals.of(reason).ask(loop_time()):
                    log.warning("link_refused", peer=self._channels.peer, code=code, reason=reason)
                self.outbox.clear()
                return False
            async with self._channels.channel(calls=False) as channel:
                return await self._stream(channel)
        except SwarmError as error:
            log.debug("link_failed", peer=self._channels.peer, error=error)
            return False

    async def _stream(self, channel: Channel) -> bool:
        stream = channel.aio.stream_stream(LINK)()
        try:
            async with asyncio.timeout(self._config.stall_s):
                said = await self._channels.read(stream, channel)
            answer = read_answer(said)[0] if said is not None else None
            if isinstance(answer, GreetFirst):
                self._channels.greet_again()
            # Too many links, or not greeted: back off, greet, and try again.
            if not isinstance(answer, Accepted):
                log.debug("link_not_taken", peer=self._channels.peer, answer=answer)
                return False
            self.is_open = True
            await self._carry(stream, channel)
            return True
        except TimeoutError:
            self._channels.stalled(channel, for_s=self._config.stall_s)
            return False
        finally:
            self.is_open = False
            stream.cancel()

    async def _carry(self, stream: grpc.aio.StreamStreamCall, channel: Channel) -> None:
        """Write what waits until the stream ends; the read is what notices the end."""
        probe = Probe(patience_s=self._config.stall_s)
        async with running(self._write(stream, channel, probe)):
            try:
                answer = await self._listen(stream, channel, probe)
                log.info("link_closed", peer=self._channels.peer, answer=answer)
            except SwarmError as error:
                log.debug("link_broke", peer=self._channels.peer, error=error)
                # Its process is gone: what waited was for that one.
                if isinstance(error, PeerGone) and error.definite:
                    self.outbox.clear()

    async def _listen(
        self, stream: grpc.aio.StreamStreamCall, channel: Channel, probe: Probe
    ) -> Answer | Signal | None:
        """Hear pongs and messages until anything else is said, which ends the link. Raises as PeerChannels.read, and
        BadMessage."""
        unpacked = Inflater(self._config.reader.longest)
        while (said := await self._channels.read(stream, channel)) is not None:
            match read_answer(said)[0]:
                case Pong() as pong:
                    if probe.answered(pong, now=loop_time()):
                        self._on_reached(self._channels.peer)
                case Told(message):
                    await self._on_told(self._channels.peer, message, unpacked)
                case answer:
                    return answer
        return None

    async def _write(self, stream: grpc.aio.StreamStreamCall, channel: Channel, probe: Probe) -> None:
        packed = Deflater()
        try:
            while True:
                await self.outbox.filled()
                # There is a better channel. The callee ends this stream once it has read all.
                if channel.retired:
                    await stream.done_writing()
                    return
                if ping := probe.ask(now=loop_time()):
                    await stream.write(packed(write_control(ping)))
                if self.outbox:  # it may have been cleared meanwhile
                    data = packed(self.outbox.pop())
                    self._up.spend(len(data))
                    await stream.write(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader says why
