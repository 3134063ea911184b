"""The caller's side of calls: payload up and answers down, at the same time.

A request and its payload are sent eagerly; a refusal stops the upload. A peer that moves nothing in either direction
for `stall_s` has timed out, whatever the deadline: a callee with a slow service sends keepalives (`grpc_callee`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from swarmnet.clock import loop_time
from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, RejectCode
from swarmnet.messages import (
    STRANGERS_ASK,
    Answer,
    AuditRequest,
    Busy,
    DialBack,
    Fetch,
    HistoryRequest,
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
from swarmnet.net.bulk.connection import PayloadLost
from swarmnet.net.grpc_channels import Channel, PeerChannels
from swarmnet.net.payloads import CallPayloads
from swarmnet.net.traffic import Flow
from swarmnet.wire.convert import Done, GreetFirst, Pong, Pulse, Told, declare, with_payload, write_request
from swarmnet.wire.framing import payload_messages, split_answer

METHODS: dict[type, str] = {
    Process: "/swarmnet.v1.Stage/Process",
    Fetch: "/swarmnet.v1.Stage/Fetch",
    AuditRequest: "/swarmnet.v1.Stage/Audit",
    Part: "/swarmnet.v1.Averaging/Part",
    SnapshotRequest: "/swarmnet.v1.State/Snapshot",
    TrailRequest: "/swarmnet.v1.Averaging/Trail",
    DialBack: "/swarmnet.v1.Run/DialBack",
    ManifestRequest: "/swarmnet.v1.Run/Manifest",
    HistoryRequest: "/swarmnet.v1.Run/History",
}

_PROGRESS_S = 0.25
"""While a payload arrives, the interval of the progress reports to the caller."""

_GREETINGS = 2
"""Greet, and greet once more if the peer restarted since."""


async def call_peer(
    channels: PeerChannels, request: Request, payload: tuple[Packed, ...], *, deadline: float, flow: Flow
) -> AsyncGenerator[Answer, None]:
    """Greet if needed, call, and yield the answers; see `transport.Transport.call`."""
    # A peer that asks for the manifest has no run yet, and cannot greet; an observer may have no admission at all.
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
        self._deadline = deadline
        self._moved = loop_time()
        self._guard: asyncio.Timeout | None = None
        self._refused = False
        self._arriving: Answer | None = None
        self._uploading = contextlib.ExitStack()
        # A call that cannot begin keeps nothing: neither its number nor a connection.
        with contextlib.ExitStack() as taken:
            taken.callback(self._uploading.close)
            if payload:
                # State that we hand out to joiners waits until this upload is over.
                self._uploading.enter_context(flow.priority.urgent())
            max_bytes = self._config.max_bytes(type(request))
            self._payloads = CallPayloads(channels.bulk, flow, self._read_chunk, max_bytes=max_bytes)
            taken.callback(self._payloads.end)
            self._begin(channel, request, payload)
            self._taken = taken.pop_all()

    def _begin(self, channel: Channel, request: Request, payload: tuple[Packed, ...]) -> None:
        # Together with the header, not after it: the callee brings the two together.
        left = self._payloads.send(payload, self._advance)
        self._header = write_request(request, declare(payload), self._payloads.lane)
        method = channel.aio.stream_stream(METHODS[type(request)])
        # Without gRPC's own deadline, a time of day that is computed here: `_patience` ends the call, by our clock.
        self._stream = method(self._upload(left))

    def leave(self) -> None:
        """Cancel whatever is still under way."""
        self._refused = True
        self._taken.close()
        self._stream.cancel()

    async def next(self) -> Answer | GreetFirst | None:
        """The next answer with its payload, or Running while that arrives; None after the last one.

        Raises PeerGone, PeerTimeout, BadMessage.
        """
        if self._arriving is not None:
            return await self._receive(self._arriving)
        while (data := await self._read()) is not None:
            header, chunk = split_answer(data)
            answer, declared, lane = self._config.reader.answer(header)
            if isinstance(answer, Pulse):
                continue
            if isinstance(answer, Done):
                break
            # The callee does not want the payload: stop sending it.
            if isinstance(answer, Busy | MovedTo | Rejected | GreetFirst):
                self._refused = True
                self._payloads.stop()
            if isinstance(answer, GreetFirst):
                return answer
            if isinstance(answer, Pong | Told):
                raise BadMessage(RejectCode.MALFORMED, "what is said on links, in a call", peer=self._channels.peer)
            self._payloads.receive(declared, lane, chunk)
            self._payloads.answered = not self._refused
            return await self._receive(answer)
        # The callee ends a call without a word when its payload does not come.
        if self._payloads.elsewhere and not (self._payloads.answered or self._refused):
            raise await self._lost()
        return None

    async def _receive(self, answer: Answer) -> Answer:
        """Go on receiving, and report progress: the waiting caller must not take a long payload for silence."""
        self._arriving = answer
        try:
            within_s = min(_PROGRESS_S, self._deadline - loop_time())
            whole = await self._payloads.come(stall_s=self._config.stall_s, within_s=within_s)
        except TimeoutError as error:
            raise PeerTimeout("the peer stalls", peer=self._channels.peer) from error
        except PayloadLost as error:
            raise await self._lost() from error
        # A sign of life to our own caller; the next `next` goes on with the same payload.
        if not whole:
            if loop_time() >= self._deadline:
                raise PeerTimeout("no answer in time", peer=self._channels.peer)
            return Running()
        self._arriving = None
        if payload := self._payloads.payload:
            await self._flow.down.turn()  # unread, what comes next holds up its sender
        return with_payload(answer, payload)

    async def _lost(self) -> PeerGone:
        """A payload does not arrive: is the process gone?"""
        self._payloads.failed()
        definite = await self._channels.broke(None)
        return PeerGone("the bulk connection broke", definite=definite, peer=self._channels.peer)

    async def _read_chunk(self) -> bytes:
        # gRPC ended the stream well, so this is no broken line: the callee said less than it declared.
        if (chunk := await self._read()) is None:
            raise BadMessage(RejectCode.MALFORMED, "the answer ends in the middle", peer=self._channels.peer)
        return chunk

    async def _upload(self, payload: Sequence[Packed]) -> AsyncGenerator[bytes, None]:
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
        if not self._payloads.elsewhere:
            self._uploading.close()

    def _advance(self) -> None:
        self._moved = loop_time()
        if self._payloads.over:
            self._uploading.close()
        # Sending is movement, too: who uploads for minutes has not stalled.
        if self._guard is not None and not self._guard.expired():
            self._guard.reschedule(self._moved if self._upload_lost else self._patience())

    @property
    def _upload_lost(self) -> bool:
        """Did a connection break under our payload?"""
        return self._payloads.lost and not self._refused

    def _patience(self) -> float:
        return min(self._deadline, self._moved + self._config.stall_s)

    async def _read(self) -> bytes | None:
        """The next message, None at the end of a finished call."""
        self._moved = loop_time()
        if self._upload_lost:
            raise await self._lost()
        try:
            async with asyncio.timeout_at(self._patience()) as self._guard:
                data = await self._channels.read(self._stream, self._channel)
        except TimeoutError as error:
            if self._upload_lost:
                raise await self._lost() from error
            if loop_time() >= self._deadline:
                raise PeerTimeout("no answer in time", peer=self._channels.peer) from error
            # Not a pulse came.
            self._channels.stalled(self._channel, for_s=self._config.stall_s)
            raise PeerTimeout("the peer stalls", peer=self._channels.peer) from error
        finally:
            self._guard = None
        self._flow.receives(len(data or b""))
        return data
