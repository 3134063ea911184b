"""The caller's side of calls: payload up and answers down, at the same time.

A request and its payload are sent eagerly; a refusal stops the upload. A peer that moves nothing in either direction
for `stall_s` has timed out, whatever the deadline: a callee whose service is merely slow sends pulses (`grpc_callee`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

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
from swarmnet.net.bulk.connection import Incoming, Outgoing
from swarmnet.net.grpc_channels import Channel, PeerChannels
from swarmnet.net.traffic import Flow
from swarmnet.wire.convert import Done, GreetFirst, Pong, Pulse, Told, declare, with_payload, write_request
from swarmnet.wire.framing import Assembly, payload_messages, split_answer

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
        self._deadline = deadline
        self._moved = loop_time()
        self._guard: asyncio.Timeout | None = None
        self._refused = self._answered = False
        self._arriving: tuple[Answer, Assembly | Incoming] | None = None
        self._outgoing: Outgoing | None = None
        self._uploading = contextlib.ExitStack()
        # A call that cannot begin keeps nothing: neither its number nor a connection.
        with contextlib.ExitStack() as taken:
            taken.callback(self._uploading.close)
            if payload:
                # State that we hand out to joiners waits until this upload is over.
                self._uploading.enter_context(flow.priority.urgent())
            self._bulk = channels.bulk.call()
            taken.callback(self._bulk.end)
            self._begin(channel, request, payload)
            self._taken = taken.pop_all()

    def _begin(self, channel: Channel, request: Request, payload: tuple[Packed, ...]) -> None:
        # Beside the header, not after it: the callee brings the two together.
        self._outgoing = self._bulk.send(payload, self._flow, self._advance)
        self._header = write_request(request, declare(payload), self._channels.bulk.lane(self._bulk))
        if self._outgoing is not None:
            payload = ()
        method = channel.aio.stream_stream(METHODS[type(request)])
        # Without gRPC's own deadline, a time of day that is computed here: `_patience` ends the call, by our clock.
        self._stream = method(self._upload(payload))

    def leave(self) -> None:
        """Cancel whatever is still under way."""
        if self._outgoing is not None and self._outgoing.over and self._answered and not self._refused:
            self._channels.bulk.carried()
        self._refused = True
        self._taken.close()
        self._stream.cancel()

    def _stop(self) -> None:
        """Send no more of the payload."""
        self._refused = True
        self._bulk.stop()

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
                try:
                    self._arriving = answer, self._bulk.receive(lane.connection, assembly, self._flow)
                except PeerGone as error:
                    raise await self._lost() from error
            elif chunk is not None:
                assembly.take(chunk)
                await self._flow.down.turn()
            self._answered = True
            return await self._receive(*self._arriving)
        # The callee ends a call without a word when its payload does not come.
        if self._outgoing is not None and not self._answered:
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
            within_s = min(_PROGRESS_S, self._deadline - loop_time())
            whole = await incoming.come(stall_s=self._config.stall_s, within_s=within_s)
        except TimeoutError as error:
            self._channels.bulk.failed()
            raise PeerTimeout("the peer stalls", peer=self._channels.peer) from error
        except PeerGone as error:
            raise await self._lost() from error
        if not whole and loop_time() >= self._deadline:
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
        self._channels.bulk.grow(assembly.num_bytes)
        began = loop_time()
        while not assembly.whole:
            # gRPC ended the stream well, so this is no broken line: the callee said less than it declared.
            if (chunk := await self._read()) is None:
                raise BadMessage(RejectCode.MALFORMED, "the answer ends in the middle", peer=self._channels.peer)
            assembly.take(chunk)
            await self._flow.down.turn()  # unread, the rest holds up its sender
            if not assembly.whole and loop_time() - began >= _PROGRESS_S:
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
        self._moved = loop_time()
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
