"""The caller's side of one call: payload up, answers down, at the same time.

The request and its payload are sent eagerly; a refusal stops the upload. A peer that moves nothing in either direction
for `stall_s` has timed out, whatever the deadline: a callee whose service is merely slow sends pulses (`grpc_callee`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

from swarmnet.errors import BadMessage, PeerTimeout, RejectCode
from swarmnet.messages import (
    Answer,
    Busy,
    DialBack,
    Fetch,
    ManifestRequest,
    MovedTo,
    Packed,
    Part,
    Process,
    Rejected,
    Request,
    Running,
    SnapshotRequest,
    TrailRequest,
)
from swarmnet.net.grpc_line import Channel, PeerChannels
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.net.traffic import Flow
from swarmnet.wire.convert import Done, GreetFirst, Pong, Pulse, declare, with_payload, write_request
from swarmnet.wire.framing import Assembly, payload_messages, split_answer

METHODS: dict[type, str] = {
    Process: "/swarmnet.v1.Stage/Process",
    Fetch: "/swarmnet.v1.Stage/Fetch",
    Part: "/swarmnet.v1.Averaging/Part",
    SnapshotRequest: "/swarmnet.v1.State/Snapshot",
    TrailRequest: "/swarmnet.v1.Averaging/Trail",
    DialBack: "/swarmnet.v1.Run/DialBack",
    ManifestRequest: "/swarmnet.v1.Run/Manifest",
}

_PROGRESS_S = 0.25
"""While a payload arrives, how often the caller hears of it."""

_GREETINGS = 2
"""Greet, and greet once more if the peer restarted since."""


async def place_call(
    channels: PeerChannels,
    request: Request,
    payload: tuple[Packed, ...],
    *,
    deadline: float,
    config: GrpcConfig,
    flow: Flow,
) -> AsyncGenerator[Answer, None]:
    """Greet if needed, call, and yield the answers; see `transport.Transport.call`."""
    greets = not isinstance(request, ManifestRequest)
    for _ in range(_GREETINGS):
        refusal = await channels.greet(deadline=deadline) if greets else None
        if refusal is not None:
            yield refusal
            return
        unknown = False
        async with channels.channel(bulk=greets) as channel:
            call = _Call(channels, channel, request, payload, deadline=deadline, config=config, flow=flow)
            try:
                while (answer := await call.next()) is not None:
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
        config: GrpcConfig,
        flow: Flow,
    ) -> None:
        self._channels, self._channel, self._config, self._flow = channels, channel, config, flow
        self._max_bytes = config.max_bytes(type(request))
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._moved = self._loop.time()
        self._guard: asyncio.Timeout | None = None
        self._refused = False
        self._arriving: tuple[Answer, Assembly] | None = None
        self._uploading = contextlib.ExitStack()
        if payload:
            self._uploading.enter_context(flow.precedence.urgent())
        self._header = write_request(request, declare(payload))
        method = channel.aio.stream_stream(METHODS[type(request)])
        remaining = max(0.0, deadline - self._loop.time())
        self._stream = method(self._upload(payload), timeout=remaining)

    def leave(self) -> None:
        """Cancel whatever is still under way."""
        self._refused = True
        self._uploading.close()
        self._stream.cancel()

    async def next(self) -> Answer | GreetFirst | None:
        """The next answer with its payload, or Running while that arrives; None after the last one.

        Raises PeerGone, PeerTimeout, BadMessage.
        """
        if self._arriving is not None:
            return await self._receive(*self._arriving)
        while (data := await self._read()) is not None:
            header, chunk = split_answer(data)
            answer, declared = self._config.reader.answer(header)
            if isinstance(answer, Pulse):
                continue
            if isinstance(answer, Done):
                return None
            if isinstance(answer, Busy | MovedTo | Rejected | GreetFirst):
                self._refused = True
            if isinstance(answer, GreetFirst):
                return answer
            if isinstance(answer, Pong):
                raise BadMessage(RejectCode.MALFORMED, "a pong in a call", peer=self._channels.peer)
            assembly = Assembly(declared, max_bytes=self._max_bytes)
            if chunk is not None:
                assembly.take(chunk)
            self._arriving = answer, assembly
            return await self._receive(*self._arriving)
        return None

    async def _receive(self, answer: Answer, assembly: Assembly) -> Answer:
        """Go on receiving: whoever waits must not take a long payload for silence."""
        began = self._loop.time()
        while not assembly.whole:
            assembly.take(await self._read_chunk())
            if not assembly.whole and self._loop.time() - began >= _PROGRESS_S:
                return Running()
        self._arriving = None
        return with_payload(answer, assembly.payload)

    def _upload(self, payload: tuple[Packed, ...]) -> Iterator[bytes]:
        """What gRPC sends; it asks for the next message when the one before has left."""
        self._flow.sent += len(self._header)
        yield self._header
        for message in payload_messages(payload):
            if self._refused:
                return
            self._advance()
            self._flow.sent += len(message)
            yield message
        self._uploading.close()

    def _advance(self) -> None:
        self._moved = self._loop.time()
        if self._guard is not None and not self._guard.expired():
            self._guard.reschedule(self._patience())

    def _patience(self) -> float:
        return min(self._deadline, self._moved + self._config.stall_s)

    async def _read_chunk(self) -> bytes:
        data = await self._read()
        if data is None:
            raise BadMessage(RejectCode.MALFORMED, "the answer ends in the middle", peer=self._channels.peer)
        return data

    async def _read(self) -> bytes | None:
        """The next message, None at the end of a finished call."""
        self._moved = self._loop.time()
        try:
            async with asyncio.timeout_at(self._patience()) as self._guard:
                data = await self._channels.read(self._stream, self._channel)
        except TimeoutError as error:
            reason = "no answer in time" if self._loop.time() >= self._deadline else "the peer stalls"
            raise PeerTimeout(reason, peer=self._channels.peer) from error
        finally:
            self._guard = None
        self._channels.alive(self._channel)
        self._flow.received += len(data or b"")
        return data
