"""The caller's side: calls (payload up, answers down, at the same time), and the link of one-way messages to one peer.

A request and its payload are sent eagerly; a refusal stops the upload. A peer that moves nothing in either direction
for `stall_s` has timed out, whatever the deadline: a callee whose service is merely slow sends pulses (`grpc_callee`).

A link is one long-lived stream, best effort, in order: opened when the first message waits, re-opened with back-off
while messages wait. The queue is bounded: when it is full the oldest message that will be said again anyway goes first.
What a broken stream had not delivered is lost; every message of the step protocol is re-sent until the state it reports
has changed. Among the messages goes a ping now and then: its nonce, coming back, proves that the peer can be called and
that its event loop runs. While nothing is said nothing is asked, so it needs no timer. On the way back come the
one-way messages of a peer that cannot connect to us (`Told`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable

import grpc

from swarmnet import telemetry
from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import (
    STRANGERS_ASK,
    Accepted,
    Answer,
    Busy,
    Control,
    DialBack,
    Fetch,
    Heartbeat,
    HistoryRequest,
    LineTest,
    ManifestRequest,
    MovedTo,
    Packed,
    Part,
    Prepare,
    Process,
    Rejected,
    Report,
    Request,
    Running,
    SnapshotRequest,
    TrailRequest,
)
from swarmnet.net.bulk_connection import Incoming, Outgoing
from swarmnet.net.grpc_channels import Channel, PeerChannels
from swarmnet.net.traffic import Flow, LentLine
from swarmnet.wire.convert import (
    NONCE_BYTES,
    Done,
    GreetFirst,
    Lane,
    Ping,
    Pong,
    Pulse,
    Signal,
    Told,
    declare,
    read_answer,
    with_payload,
    write_control,
    write_request,
)
from swarmnet.wire.deflate import Deflater, Inflater
from swarmnet.wire.framing import Assembly, payload_messages, split_answer

LINK = "/swarmnet.v1.Control/Link"
METHODS: dict[type, str] = {
    Process: "/swarmnet.v1.Stage/Process",
    Fetch: "/swarmnet.v1.Stage/Fetch",
    Part: "/swarmnet.v1.Averaging/Part",
    SnapshotRequest: "/swarmnet.v1.State/Snapshot",
    TrailRequest: "/swarmnet.v1.Averaging/Trail",
    DialBack: "/swarmnet.v1.Run/DialBack",
    LineTest: "/swarmnet.v1.Run/LineTest",
    ManifestRequest: "/swarmnet.v1.Run/Manifest",
    HistoryRequest: "/swarmnet.v1.Run/History",
}

_PROGRESS_S = 0.25
"""While a payload arrives, how often the caller hears of it."""

_GREETINGS = 2
"""Greet, and greet once more if the peer restarted since."""


async def place_call(
    channels: PeerChannels, request: Request, payload: tuple[Packed, ...], *, deadline: float, flow: Flow
) -> AsyncGenerator[Answer, None]:
    """Greet if needed, call, and yield the answers; see `transport.Transport.call`."""
    # Who asks for the manifest has no run yet, and cannot greet; who only looks on may be nobody who is admitted.
    greets = not isinstance(request, STRANGERS_ASK)
    for _ in range(_GREETINGS):
        refusal = await channels.greet(deadline=deadline) if greets else None
        if refusal is not None:
            yield refusal
            return
        unknown = False
        async with channels.channel(calls=greets) as channel:
            call = _Call(channels, channel, request, payload, deadline=deadline, flow=flow)
            try:
                while (answer := await call.next()) is not None:
                    # It has restarted, or forgotten us. Nothing of the payload was used: greet and say it again.
                    if isinstance(answer, GreetFirst):
                        unknown = True
                        break
                    yield answer
            finally:
                call.leave()
        if not unknown:
            return
        channels.greet_again()
    raise BadMessage(RejectCode.MALFORMED, "the peer greets and then does not know us", peer=channels.peer)


class _Call:
    """One gRPC stream pair."""

    def __init__(
        self,
        channels: PeerChannels,
        channel: Channel,
        request: Request,
        payload: tuple[Packed, ...],
        *,
        deadline: float,
        flow: Flow,
    ) -> None:
        self._channels, self._channel, self._config, self._flow = channels, channel, channels.config, flow
        self._max_bytes = self._config.max_bytes(type(request))
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._moved = self._loop.time()
        self._guard: asyncio.Timeout | None = None
        self._refused = self._answered = False
        self._arriving: tuple[Answer, Assembly | Incoming] | None = None
        self._outgoing: Outgoing | None = None
        self._uploading = contextlib.ExitStack()
        if payload:
            # State that we hand out to joiners waits until this upload is over.
            self._uploading.enter_context(flow.priority.urgent())
        bulk = channels.bulk
        self._number = bulk.calls.number()
        self._way = bulk.lane(sum(packed.num_bytes for packed in payload))
        number = self._way.number if self._way is not None else 0
        lane = Lane(bulk.session, number, self._number) if bulk.session else None
        self._header = write_request(request, declare(payload), lane)
        if self._way is not None:
            # Beside the header, not after it: the callee brings the two together.
            self._outgoing = self._way.send(self._number, payload, flow, self._advance)
            payload = ()
        method = channel.aio.stream_stream(METHODS[type(request)])
        remaining = max(0.0, deadline - self._loop.time())
        self._stream = method(self._upload(payload), timeout=remaining)

    def leave(self) -> None:
        """Cancel whatever is still under way."""
        if self._outgoing is not None and self._outgoing.over and self._answered and not self._refused:
            self._channels.bulk.carried()
        self._stop()
        self._uploading.close()
        self._channels.bulk.calls.end(self._number)
        self._stream.cancel()
        if self._way is not None:
            self._way.release()

    def _stop(self) -> None:
        """Send no more of the payload."""
        self._refused = True
        if self._way is not None and self._outgoing is not None:
            self._way.give_up(self._outgoing)

    async def next(self) -> Answer | GreetFirst | None:
        """The next answer with its payload, or Running while that arrives; None after the last one.

        Raises PeerGone, PeerTimeout, BadMessage.
        """
        if self._arriving is not None:
            return await self._receive(*self._arriving)
        while (data := await self._read()) is not None:
            header, chunk = split_answer(data)
            answer, declared, lane = self._config.reader.answer(header)
            if isinstance(answer, Pulse):
                continue
            if isinstance(answer, Done):
                break
            # The callee does not want the payload: stop sending it.
            if isinstance(answer, Busy | MovedTo | Rejected | GreetFirst):
                self._stop()
            if isinstance(answer, GreetFirst):
                return answer
            if isinstance(answer, Pong | Told):
                raise BadMessage(RejectCode.MALFORMED, "what is said on links, in a call", peer=self._channels.peer)
            assembly = Assembly(declared, max_bytes=self._max_bytes)
            self._arriving = answer, assembly
            if lane is not None:
                # It broke since.
                if not self._channels.bulk.has(lane.connection):
                    raise await self._lost()
                incoming = Incoming(assembly, self._flow)
                self._channels.bulk.calls.want(lane.connection, self._number, incoming)
                self._arriving = answer, incoming
            elif chunk is not None:
                assembly.take(chunk)
                await self._flow.down.turn()
            self._answered = True
            return await self._receive(*self._arriving)
        # The callee ends a call without a word when its payload does not come.
        if self._way is not None and not self._answered:
            raise await self._lost()
        return None

    async def _receive(self, answer: Answer, payload: Assembly | Incoming) -> Answer:
        """Go on receiving: whoever waits must not take a long payload for silence."""
        whole = self._receive_chunks(payload) if isinstance(payload, Assembly) else self._receive_bulk(payload)
        # A sign of life to our own caller; the next `next` goes on with the same payload.
        if not await whole:
            return Running()
        self._arriving = None
        return with_payload(answer, payload.payload)

    async def _receive_bulk(self, incoming: Incoming) -> bool:
        """Is all of it here?"""
        try:
            within_s = min(_PROGRESS_S, self._deadline - self._loop.time())
            whole = await incoming.come(stall_s=self._config.stall_s, within_s=within_s)
        except TimeoutError as error:
            self._channels.bulk.failed()
            raise PeerTimeout("the peer stalls", peer=self._channels.peer) from error
        except PeerGone as error:
            raise await self._lost() from error
        if not whole and self._loop.time() >= self._deadline:
            raise PeerTimeout("no answer in time", peer=self._channels.peer)
        if whole:
            self._channels.bulk.carried()
        return whole

    async def _lost(self) -> PeerGone:
        """A bulk connection broke under the call: is the process gone?"""
        self._channels.bulk.failed()
        definite = await self._channels.broke(None)
        return PeerGone("the bulk connection broke", definite=definite, peer=self._channels.peer)

    async def _receive_chunks(self, assembly: Assembly) -> bool:
        """Likewise, over gRPC."""
        self._channels.bulk.wish(assembly.num_bytes)
        began = self._loop.time()
        while not assembly.whole:
            # gRPC ended the stream well, so this is no broken line: the callee said less than it declared.
            if (chunk := await self._read()) is None:
                raise BadMessage(RejectCode.MALFORMED, "the answer ends in the middle", peer=self._channels.peer)
            assembly.take(chunk)
            await self._flow.down.turn()  # unread, the rest holds up its sender
            if not assembly.whole and self._loop.time() - began >= _PROGRESS_S:
                return False
        return True

    async def _upload(self, payload: tuple[Packed, ...]) -> AsyncGenerator[bytes, None]:
        """What gRPC sends; it asks for the next message when the one before has left."""
        self._flow.sends(len(self._header))
        yield self._header
        for message in payload_messages(payload):
            await self._flow.up.turn()
            if self._refused:
                return
            self._advance()
            self._flow.sends(len(message))
            yield message
        if self._outgoing is None:
            self._uploading.close()

    def _advance(self) -> None:
        self._moved = self._loop.time()
        if self._outgoing is not None and self._outgoing.over:
            self._uploading.close()
        # Sending is movement, too: who uploads for minutes has not stalled.
        if self._guard is not None and not self._guard.expired():
            self._guard.reschedule(self._moved if self._upload_lost else self._patience())

    @property
    def _upload_lost(self) -> bool:
        """Did the bulk connection break under our payload?"""
        return self._outgoing is not None and self._outgoing.failed and not self._refused

    def _patience(self) -> float:
        return min(self._deadline, self._moved + self._config.stall_s)

    async def _read(self) -> bytes | None:
        """The next message, None at the end of a finished call."""
        self._moved = self._loop.time()
        if self._upload_lost:
            raise await self._lost()
        try:
            async with asyncio.timeout_at(self._patience()) as self._guard:
                data = await self._channels.read(self._stream, self._channel)
        except TimeoutError as error:
            if self._upload_lost:
                raise await self._lost() from error
            if self._loop.time() >= self._deadline:
                raise PeerTimeout("no answer in time", peer=self._channels.peer) from error
            # Not a pulse came: the next call takes another connection.
            self._channels.retire(self._channel)
            raise PeerTimeout("the peer stalls", peer=self._channels.peer) from error
        finally:
            self._guard = None
        self._channels.alive(self._channel)
        self._flow.receives(len(data or b""))
        return data


# ---------------------------------------------------------------- the link


log = telemetry.get(__name__)

_PERIODIC = (Heartbeat, Prepare, Report)
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 3.0

PING_S = 0.4
"""Pings are at least so far apart: each of the default heartbeats, half a second apart, brings one."""


_LATELY = 8
"""Messages that may be told to the next peer, too."""


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

        Raises BadMessage if nobody asked for it.
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
        up: LentLine,
    ) -> None:
        self._channels, self._config, self._on_reached, self._on_told = channels, channels.config, on_reached, on_told
        self.outbox, self._up = Outbox(self._config.outbox, write), up
        self.is_open = self._moves = False

    async def run(self) -> None:
        """Until cancelled: connect when a message waits, stream, back off when it breaks."""
        backoff = _FIRST_BACKOFF_S
        while True:
            await self.outbox.filled()
            if await self._connect_and_stream():
                backoff = _FIRST_BACKOFF_S
            else:
                # At random, so that the peers of one that restarted do not all come back at once.
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(2 * backoff, _LONGEST_BACKOFF_S)

    def move(self) -> None:
        """There is a better way to the peer: end the stream with the next message, and open another."""
        self._moves = self.is_open

    async def _connect_and_stream(self) -> bool:
        """Returns whether the peer took the link."""
        deadline = asyncio.get_running_loop().time() + self._config.stall_s
        try:
            refusal = await self._channels.greet(deadline=deadline)
            if refusal is not None:
                log.warning("link_refused", peer=self._channels.peer, code=refusal.code.value, reason=refusal.reason)
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
            # A better way may have been found since this one was begun.
            self.is_open, self._moves = True, channel.retired
            await self._carry(stream, channel)
            return True
        except TimeoutError:
            self._channels.retire(channel)
            return False
        finally:
            self.is_open = False
            stream.cancel()

    async def _carry(self, stream: grpc.aio.StreamStreamCall, channel: Channel) -> None:
        """Write what waits until the stream ends; the read is what notices the end."""
        probe = Probe(patience_s=self._config.stall_s)
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(self._write(stream, probe))
            try:
                answer = await self._listen(stream, channel, probe)
                log.info("link_closed", peer=self._channels.peer, answer=answer)
            except SwarmError as error:
                log.debug("link_broke", peer=self._channels.peer, error=error)
                # Its process is gone: what waited was for that one.
                if isinstance(error, PeerGone) and error.definite:
                    self.outbox.clear()
            writer.cancel()

    async def _listen(
        self, stream: grpc.aio.StreamStreamCall, channel: Channel, probe: Probe
    ) -> Answer | Signal | None:
        """Hear pongs and messages until anything else is said, which ends the link. Raises as PeerChannels.read, and
        BadMessage."""
        unpacked = Inflater(self._config.reader.longest)
        while (said := await self._channels.read(stream, channel)) is not None:
            match read_answer(said)[0]:
                case Pong() as pong:
                    if probe.answered(pong, now=asyncio.get_running_loop().time()):
                        self._on_reached(self._channels.peer)
                case Told(message):
                    await self._on_told(self._channels.peer, message, unpacked)
                case answer:
                    return answer
        return None

    async def _write(self, stream: grpc.aio.StreamStreamCall, probe: Probe) -> None:
        packed = Deflater()
        try:
            while True:
                await self.outbox.filled()
                if self._moves:
                    # The callee has read all when it ends the stream.
                    await stream.done_writing()
                    return
                if ping := probe.ask(now=asyncio.get_running_loop().time()):
                    await stream.write(packed(write_control(ping)))
                if self.outbox:  # it may have been cleared meanwhile
                    data = packed(self.outbox.pop())
                    self._up.spend(len(data))
                    await stream.write(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader says why
