"""The payloads of one call, at either end: caller and callee do not know on which way one travels.

A large payload leaves on a bulk connection, if the session with the peer has a free one; any other is sent in chunks
among the messages of the call.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

from swarmnet.clock import loop_time
from swarmnet.messages import Packed
from swarmnet.net.bulk.connection import (
    BULK_FROM,
    BulkConnection,
    BulkSession,
    Incoming,
    Outgoing,
    PayloadLost,
    no_word,
)
from swarmnet.net.traffic import Flow
from swarmnet.wire.convert import Lane, TensorHeader
from swarmnet.wire.framing import Assembly


class Chunks:
    """A payload on its way in among the messages of its call. read(): the next message; it sees to stalls itself."""

    def __init__(self, assembly: Assembly, flow: Flow, read: Callable[[], Awaitable[bytes]]) -> None:
        self._assembly, self._flow, self._read = assembly, flow, read

    async def come(self, *, stall_s: float, within_s: float = math.inf) -> bool:
        """As `bulk.connection.Incoming.come`. Raises what `read` raises, and BadMessage."""
        until = loop_time() + within_s
        while not self._assembly.whole:
            await self._flow.down.turn()  # for the chunk before: unread, this one holds up its sender
            self._assembly.take(await self._read())
            if loop_time() >= until:
                break
        return self._assembly.whole

    @property
    def payload(self) -> tuple[Packed, ...]:
        """The tensors, once they have come."""
        return self._assembly.payload


class CallPayloads:
    """Of one call.

    session: the bulk connections with the peer; `BulkSession` itself has none. read(): the next message of the call.
    lane: what the header of the call says, where this end answers it; it names the connection that brings its payload.
    """

    def __init__(
        self,
        session: BulkSession,
        flow: Flow,
        read: Callable[[], Awaitable[bytes]],
        *,
        max_bytes: int,
        lane: Lane | None = None,
    ) -> None:
        self._session, self._flow, self._read, self._max_bytes = session, flow, read, max_bytes
        self._number, self._brings = (session.number(), 0) if lane is None else (lane.call, lane.connection)
        self._connection: BulkConnection | None = None
        self._outgoing: Outgoing | None = None
        self._incoming: Incoming | Chunks | None = None
        self.answered = False
        """Has the other end taken what was sent? The reader of its answer sets it."""

    # ------------------------------------------------------------ what leaves

    def send(self, payload: Sequence[Packed], moved: Callable[[], None] = no_word) -> Sequence[Packed]:
        """Begin to send a payload. Returns what the messages of the call have to carry: all of it, or nothing.

        moved(): called whenever a part of it has left elsewhere.
        """
        num_bytes, self._outgoing = sum(packed.num_bytes for packed in payload), None
        # One for all answers of a call.
        if self._connection is None:
            self._connection = self._session.take(num_bytes)
        if num_bytes < BULK_FROM or self._connection is None or not self._connection.ready:
            return payload
        self._outgoing = self._connection.send(self._number, payload, self._flow, moved)
        return ()

    @property
    def lane(self) -> Lane | None:
        """What the header of what was sent last says of it."""
        at = self._connection.number if self._connection is not None and self._outgoing is not None else 0
        return self._session.lane(self._number, at)

    @property
    def elsewhere(self) -> bool:
        """Does what was sent last travel outside of the messages of the call?"""
        return self._outgoing is not None

    @property
    def over(self) -> bool:
        """Has all that travels elsewhere left, or been given up?"""
        return self._outgoing is not None and self._outgoing.over

    @property
    def lost(self) -> bool:
        """Will what travels elsewhere not arrive?"""
        return self._outgoing is not None and self._outgoing.failed

    async def left(self, *, stall_s: float) -> None:
        """Return when all that travels elsewhere has left. Raises PeerGone; TimeoutError if too little moves."""
        if self._outgoing is not None:
            await self._outgoing.left(stall_s=stall_s)

    def stop(self) -> None:
        """Send no more of a payload."""
        if self._connection is not None and self._outgoing is not None:
            self._connection.give_up(self._outgoing)

    # ------------------------------------------------------------ what comes

    def receive(
        self, declared: Sequence[TensorHeader], lane: Lane | None = None, chunk: memoryview | None = None
    ) -> None:
        """Expect a payload. lane: what the header of an answer says; chunk: what came with it. Raises BadMessage."""
        assembly = Assembly(declared, max_bytes=self._max_bytes)
        if (connection := lane.connection if lane is not None else self._brings) and chunk is None:
            self._incoming = self._session.expect(connection, self._number, Incoming(assembly, self._flow))
            return
        self._session.grow(assembly.num_bytes)
        self._incoming = Chunks(assembly, self._flow, self._read)
        if chunk is not None:
            assembly.take(chunk)

    async def come(self, *, stall_s: float, within_s: float = math.inf) -> bool:
        """Is all that is expected here? False after `within_s`. Raises TimeoutError if too little moves in `stall_s`,
        PayloadLost, BadMessage, and what `read` raises."""
        assert self._incoming is not None, "expect it first"
        try:
            whole = await self._incoming.come(stall_s=stall_s, within_s=within_s)
        except (TimeoutError, PayloadLost):
            self._session.failed()
            raise
        if whole and isinstance(self._incoming, Incoming):
            self._session.carried()
        return whole

    @property
    def payload(self) -> tuple[Packed, ...]:
        """The tensors, once they have come."""
        assert self._incoming is not None, "expect it first"
        return self._incoming.payload

    # ------------------------------------------------------------ the end

    def failed(self) -> None:
        """What was sent has not arrived."""
        self._session.failed()

    def end(self) -> None:
        """The call has ended: what is still to come is thrown away."""
        if self.answered and self.over and not self.lost:
            self._session.carried()
        self.stop()
        if self._connection is not None:
            self._connection.release()
        self._session.end(self._number)
