"""One call being answered: its stream, and the bulk connections beside it.

While a service thinks, pulses tell the caller that this process is alive. A caller that dies in the middle of an upload
looks like a clean end of stream: a payload is whole when every declared byte has come, and not before.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence

import grpc

from swarmnet.errors import PeerGone
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Packed
from swarmnet.net.bulk_connection import BULK_FROM, BulkConnection, Incoming
from swarmnet.net.bulk_pool import TakenSession
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.net.traffic import Flow
from swarmnet.transport import ReadPayload
from swarmnet.wire.convert import Done, Lane, Pulse, Signal, TensorHeader, write_answer
from swarmnet.wire.framing import Assembly, answer_messages, read_payload

PULSES_PER_STALL = 4


class Inbound:
    """One call being answered: its stream, guarded against callers that stop moving."""

    def __init__(
        self, context: grpc.aio.ServicerContext, caller: PeerId | None, config: GrpcConfig, flow: Flow
    ) -> None:
        self.context = context
        self.unread = True  # the caller may still be sending
        self.gives_way = False  # it asks for what can wait
        self._caller, self._config, self._flow = caller, config, flow
        self._writing = asyncio.Lock()
        self._session: TakenSession | None = None
        self._lane = Lane()
        self._way: BulkConnection | None = None  # of answers

    def take_lane(self, session: TakenSession, lane: Lane) -> None:
        """Payloads may cross bulk connections of this session of the caller's. Raises BadMessage."""
        session.calls.begin(lane.call)
        self._session, self._lane = session, lane

    def leave_lane(self) -> None:
        """What is still to come of the payload is thrown away."""
        if self._session is not None:
            self._session.calls.end(self._lane.call)
        if self._way is not None:
            self._way.release()

    async def read(self, *, within_s: float = math.inf) -> bytes:
        """The caller's next message. Raises PeerGone if there is none or it does not come."""
        try:
            async with asyncio.timeout(min(within_s, self._config.stall_s)):
                data: bytes = await self.context.read()
        except TimeoutError as error:
            raise PeerGone("the caller stalls", peer=self._caller) from error
        # A dying sender looks like one that has finished; this one had not.
        if data is grpc.aio.EOF:
            raise PeerGone("the caller left in the middle", peer=self._caller)
        self._flow.receives(len(data))
        return data

    async def _read_piece(self) -> bytes:
        """Of a payload."""
        await self._flow.down.turn()  # for the piece before: unread, this one holds up its sender
        return await self.read()

    def payload_reader(self, declared: Sequence[TensorHeader]) -> ReadPayload:
        """Read what was declared, once."""
        reading = False

        async def payload() -> tuple[Packed, ...]:
            nonlocal reading
            assert not reading, "a payload can be read once"
            reading = True
            if self._session is not None and self._lane.connection:
                received = await self._read_bulk(self._session, declared)
            else:
                received = await read_payload(self._read_piece, declared, max_bytes=self._config.max_payload_bytes)
            self.unread = False
            return received

        return ReadPayload(tuple((tensor.codec, tensor.shape) for tensor in declared), payload)

    async def _read_bulk(self, session: TakenSession, declared: Sequence[TensorHeader]) -> tuple[Packed, ...]:
        """The payload, from the bulk connection that the header names. Raises BadMessage, PeerGone."""
        if self._lane.connection not in session.connections:
            raise PeerGone("its bulk connection is gone", peer=self._caller)
        incoming = Incoming(Assembly(declared, max_bytes=self._config.max_payload_bytes), self._flow)
        session.calls.want(self._lane.connection, self._lane.call, incoming)
        try:
            await incoming.come(stall_s=self._config.stall_s)
        except TimeoutError as error:
            raise PeerGone("the caller stalls", peer=self._caller) from error
        return incoming.payload

    async def answer(self, answer: Answer | Signal) -> None:
        """Send one answer with its payload. Raises PeerGone if the caller is gone or does not take it."""
        payload: tuple[Packed, ...] = getattr(answer, "payload", ())
        num_bytes = sum(packed.num_bytes for packed in payload)
        # State for a joiner gives way to all other tensors. While it waits the caller hears pulses.
        if payload and self.gives_way:
            await self._flow.priority.turn(num_bytes)
        async with self._writing:
            way = self._way_of(num_bytes)
            header = write_answer(answer, Lane(connection=way.number) if way is not None else None)
            with self._flow.priority.urgent() if payload and not self.gives_way else contextlib.nullcontext():
                if way is not None:
                    await self._send_bulk(way, header, payload)
                    return
                for message in answer_messages(header, payload):
                    if payload:
                        await self._flow.up.turn()
                    await self._write(message)

    def _way_of(self, num_bytes: int) -> BulkConnection | None:
        """The bulk connection for an answer with so many bytes: one for all answers of a call."""
        if self._session is None or num_bytes < BULK_FROM:
            return None
        if self._way is None:
            self._way = self._session.lane(num_bytes)
        return self._way if self._way is not None and self._way.ready else None

    async def _send_bulk(self, way: BulkConnection, header: bytes, payload: tuple[Packed, ...]) -> None:
        """An answer and its payload beside it. Raises PeerGone."""
        outgoing = way.send(self._lane.call, payload, self._flow)
        try:
            await self._write(header)
            await outgoing.left(stall_s=self._config.stall_s)
        except TimeoutError as error:
            raise PeerGone("the caller does not read", peer=self._caller) from error
        finally:
            way.give_up(outgoing)

    async def finish(self) -> None:
        """After the last answer: a caller that may still be uploading is told to leave, and leaving cancels us here."""
        if self.unread:
            await self.answer(Done())
            await asyncio.sleep(self._config.stall_s)

    async def pulse(self) -> None:
        """Until cancelled: let the caller know that we are alive."""
        while True:
            await asyncio.sleep(self._config.stall_s / PULSES_PER_STALL)
            # What is being written is a sign of life itself.
            if not self._writing.locked():
                try:
                    await self.answer(Pulse())
                except PeerGone:
                    return

    async def _write(self, message: bytes) -> None:
        self._flow.sends(len(message))  # first: a caller that has all it wants leaves, and cancels us in the write
        try:
            async with asyncio.timeout(self._config.stall_s):
                await self.context.write(message)
        except TimeoutError as error:
            raise PeerGone("the caller does not read", peer=self._caller) from error
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError) as error:
            raise PeerGone("the caller left", peer=self._caller) from error
