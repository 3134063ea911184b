"""One bulk connection: a TCP connection for payloads next to gRPC, one at a time in each direction, in sealed records.

The call of a payload is named twice: by the call's header, over gRPC, and by the payload's first record.
`BulkSession` matches the two, in either order. A payload of an ended call is read and discarded; a payload that no
call expects yet stays unread, so TCP blocks its sender.

Each direction is worked by a task of its own, so that a call that is cancelled leaves the records in order: what it
sent is ended by a record that says so, what it was receiving is read to its end. Whatever is wrong with a record closes
the connection: nothing that comes after it could be believed. Every payload under way then ends with PeerGone.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
from collections.abc import Callable, Sequence

import numpy as np

from swarmnet import telemetry
from swarmnet.bounds import Recent
from swarmnet.clock import loop_time, set_within
from swarmnet.errors import BadMessage, PeerGone, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import Packed
from swarmnet.net.bulk.records import AROUND, HEAD_BYTES, RECORD_BYTES, Kind, Opener, Sealer, read_call, read_head
from swarmnet.net.sockets import fill_from
from swarmnet.net.traffic import Flow
from swarmnet.wire.convert import Lane
from swarmnet.wire.framing import CHUNK_BYTES, Assembly, pieces

BULK_FROM = 1 << 18
"""Payloads of fewer bytes go through gRPC: they fit one message of it."""

_AT_ONCE = 4
"""Records that are handed to the system together (measured: 8 % faster than one by one), or taken before others in this
process have a turn."""

_WASTE_BYTES = 32 << 20
"""Of a payload that no call expects at most so much is read: more than two systems buffer between them. By then its
sender should have ended it."""

_UNWANTED_S = 0.01
"""The pause between an unexpected payload and the next one on that connection, and in such a payload after every
`_AT_ONCE` records if they are short. Either may be a few bytes: without a pause an endless stream of them would occupy
this process completely."""

_HEADER_S = 3.0
"""The header of a call may come so much later than its payload. A call that was cancelled at once has none, and the
payload behind waits for that."""

_ENDED_CALLS = 512
"""Calls that have ended of which payloads may still come."""

log = telemetry.get(__name__)


class PayloadLost(PeerGone):
    """A payload does not arrive; whether the peer's process is gone is not known yet."""


def no_word() -> None:
    """The default for a callback: does nothing."""


class LeastRate:
    """By when more of a payload must have moved: `CHUNK_BYTES` within each `stall_s`, which over gRPC is one message.

    Else a record now and then would hold a call, and what its service holds for it, until its deadline. Pure: `now` in
    seconds of any clock.
    """

    def __init__(self, now: float) -> None:
        self._since, self._num_bytes, self._held_at = now, 0, math.inf

    def moves(self, num_bytes: int, now: float) -> None:
        """So many bytes have moved."""
        self._num_bytes += num_bytes
        if self._num_bytes >= CHUNK_BYTES:
            self._num_bytes, self._since = self._num_bytes % CHUNK_BYTES, now

    def hold(self, now: float) -> None:
        """From now on we hold it up ourselves, which is not the other end's time."""
        self._held_at = now

    def go_on(self, now: float) -> None:
        """We hold it up no longer."""
        self._since, self._held_at = self._since + now - self._held_at, math.inf

    def late_at(self, stall_s: float) -> float:
        """When it will have stalled, unless more moves; infinite while we hold it up."""
        return self._since + stall_s if self._held_at == math.inf else math.inf


class _UnderWay:
    """A payload that is under way."""

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self.rate = LeastRate(loop_time())

    @property
    def over(self) -> bool:
        """Has all of it crossed, or been given up?"""
        return self._over.is_set()

    async def ends(self, *, stall_s: float, within_s: float = math.inf) -> bool:
        """Is it over? False after `within_s`. Raises TimeoutError if too little moves in `stall_s`."""
        until = loop_time() + within_s
        while not self.over:
            now, late_at = loop_time(), self.rate.late_at(stall_s)
            if now >= until:
                return False
            if now >= late_at:
                raise TimeoutError
            await set_within(self._over, min(until, late_at, now + stall_s) - now)
        return True


class Incoming(_UnderWay):
    """A payload on its way in."""

    def __init__(self, assembly: Assembly, flow: Flow) -> None:
        super().__init__()
        self._assembly, self.flow = assembly, flow
        self._error: SwarmError | None = None
        self.dropped = False
        """Its call has ended: no call waits for it."""
        self.on_drop: Callable[[Incoming], None] = lambda incoming: None

    def drop(self) -> None:
        """No call waits for it any more."""
        self.dropped = True
        if not self.over:
            self.on_drop(self)

    def buffer(self, kind: Kind, num_bytes: int) -> memoryview:
        """Where this record's content goes. Raises BadMessage if it does not fit what was declared."""
        target = self._assembly.buffer(num_bytes, most=RECORD_BYTES)
        if (kind is Kind.LAST) != self._assembly.whole:
            raise BadMessage(RejectCode.MALFORMED, "a payload ends where it should not", kind=kind.name)
        return target

    def end(self, error: SwarmError | None = None) -> None:
        """All of it is here, or no more will come."""
        if not self.over:
            self._error = error
            self._over.set()

    async def come(self, *, stall_s: float, within_s: float = math.inf) -> bool:
        """Is the whole payload here? False after `within_s`. Raises TimeoutError if too little moves in `stall_s`,
        PeerGone, BadMessage."""
        over = await self.ends(stall_s=stall_s, within_s=within_s)
        if self._error is not None:
            raise self._error
        return over

    @property
    def payload(self) -> tuple[Packed, ...]:
        """The tensors, once they have come."""
        return self._assembly.payload


class Outgoing(_UnderWay):
    """A payload on its way out. moved(): told whenever a part of it has left."""

    def __init__(self, moved: Callable[[], None]) -> None:
        super().__init__()
        self._moved = moved
        self.stopped = self.failed = False

    def stop(self) -> None:
        """Send no more of it than was begun."""
        self.stopped = True

    def goes_on(self) -> None:
        """Our own line holds it up no longer."""
        self.rate.go_on(loop_time())
        self._moved()

    def moves(self, num_bytes: int) -> None:
        """So many bytes have left."""
        self.rate.moves(num_bytes, loop_time())
        self._moved()

    def end(self, *, failed: bool) -> None:
        """No more will leave."""
        self.failed = failed
        self._over.set()
        self._moved()
        self._moved = no_word  # it leads back here

    async def left(self, *, stall_s: float) -> None:
        """Return when the whole payload has left. Raises PeerGone; TimeoutError if too little moves in `stall_s`."""
        await self.ends(stall_s=stall_s)
        if self.failed:
            raise PayloadLost("the bulk connection broke")


class BulkSession:
    """The open connections of one session, its open calls, and which of their payloads are waited for.

    mine: I number the calls, so a number that I do not know is of one that has ended.
    """

    def __init__(self, *, mine: bool) -> None:
        self.connections: dict[int, BulkConnection] = {}
        self._mine, self._last = mine, 0
        self._open: dict[int, list[Incoming]] = {}
        self._wanted: dict[tuple[int, int], Incoming] = {}
        self._ended: Recent[int, None] = Recent(_ENDED_CALLS)
        self._news = asyncio.Event()

    def number(self) -> int:
        """Begin a call of mine."""
        self._last += 1
        self._open[self._last] = []
        return self._last

    def begin(self, call: int) -> None:
        """A call of the other end has begun. Raises BadMessage if another has its number, PeerGone if its payload has
        come and gone."""
        if call in self._open:
            raise BadMessage(RejectCode.MALFORMED, "two calls of one number", call=call)
        if call in self._ended:
            raise PeerGone("its payload came long before it")
        self._open[call] = []
        self._tell()

    def end(self, call: int) -> None:
        """The call has ended: what is left of its payloads is thrown away."""
        for incoming in self._open.pop(call, ()):
            incoming.drop()
        self._wanted = {key: incoming for key, incoming in self._wanted.items() if not incoming.dropped}
        self._ended[call] = None
        self._tell()

    def expect(self, connection: int, call: int, incoming: Incoming) -> Incoming:
        """The caller waits for the payload that this connection brings for this open call."""
        if connection not in self.connections:
            incoming.end(PayloadLost("the bulk connection broke"))
            return incoming
        self._open[call].append(incoming)
        self._wanted[connection, call] = incoming
        self._tell()
        return incoming

    def lane(self, call: int, connection: int) -> Lane | None:
        """What a header says of a payload that leaves on this connection; 0: on none."""
        return Lane(connection=connection) if connection else None

    def carried(self) -> None:
        """A payload got through. Who opens the connections goes by this and by the next two."""

    def failed(self) -> None:
        """A payload did not get through."""

    def grow(self, num_bytes: int) -> None:
        """A payload of so many bytes found no connection."""

    def lost(self, connection: int) -> None:
        """The connection broke: what was to come there does not."""
        self.connections.pop(connection, None)
        for key in [key for key in self._wanted if key[0] == connection]:
            self._wanted.pop(key).end(PayloadLost("the bulk connection broke"))

    @property
    def idle(self) -> bool:
        """Is no call open?"""
        return not self._open

    async def taker(self, connection: int, call: int) -> Incoming | None:
        """The payload's receiver, once a call waits for it; None: no call will."""
        until = loop_time() + _HEADER_S
        while call in self._open or not (self._mine or call in self._ended):
            if (incoming := self._wanted.pop((connection, call), None)) is not None:
                return incoming
            try:
                # It may stay unread for as long as its call is open.
                async with asyncio.timeout_at(None if call in self._open else until):
                    await self._news.wait()
            except TimeoutError:
                self._ended[call] = None
        return None

    def take(self, num_bytes: int) -> BulkConnection | None:
        """A free connection for a payload of so many bytes; None: gRPC carries it."""
        if num_bytes < BULK_FROM:
            return None
        return next((each.take() for each in self.connections.values() if each.free), None)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class BulkConnection:
    """An authenticated connection, which it owns. sealer, opener: past the first record of each direction.

    session: is called once, when it is closed. stall_s: what the other end may leave undone for so long.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: PeerId,
        number: int,
        sealer: Sealer,
        opener: Opener,
        session: BulkSession,
        *,
        stall_s: float,
    ) -> None:
        self.peer, self.number = peer, number
        self._sock, self._sealer, self._opener, self._session = sock, sealer, opener, session
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None
        self._closed = self._held = False
        self._reading = self._loop.create_task(self._run())
        self._reading.add_done_callback(self._ended)

    # ------------------------------------------------------------ life

    @property
    def free(self) -> bool:
        """Can a call have it for its payloads?"""
        return self.ready and not self._held

    @property
    def ready(self) -> bool:
        """Can the call that has it send a payload?"""
        return not self._closed and self._sending is None

    def take(self) -> BulkConnection:
        """Reserve it for one call until `release`: what was sent may stay unread, and would block another payload."""
        self._held = True
        return self

    def release(self) -> None:
        """The call has ended."""
        self._held = False

    def close(self) -> None:
        """End it, and with it what is under way."""
        self._closed = True
        self._reading.cancel()

    async def _run(self) -> None:
        try:
            while True:
                await self._receive()
        except (OSError, BadMessage) as error:
            log.debug("bulk_connection_ends", peer=self.peer, error=repr(error))

    def _ended(self, _: object) -> None:
        self._closed = True
        if self._sending is None:
            self._sock.close()
        else:
            # The loop still watches the socket for it.
            self._sending.add_done_callback(lambda _: self._sock.close())
            self._sending.cancel()
        self._session.lost(self.number)

    # ------------------------------------------------------------ sending

    def send(self, call: int, payload: Sequence[Packed], flow: Flow, moved: Callable[[], None] = no_word) -> Outgoing:
        """Begin to send a payload of this call; the connection must be ready."""
        assert self.ready, "one payload at a time"
        outgoing = Outgoing(moved)
        self._sending = self._loop.create_task(self._write(outgoing, call, payload, flow))
        self._sending.add_done_callback(lambda task: self._sent(task, outgoing))
        return outgoing

    def give_up(self, outgoing: Outgoing) -> None:
        """Stop sending. A receiver that does not take what was begun loses the connection."""
        outgoing.stop()
        if not outgoing.over:
            self._loop.call_later(self._stall_s, self._close_unless_over, outgoing)

    def _sent(self, task: asyncio.Task[None], outgoing: Outgoing) -> None:
        self._sending = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.debug("bulk_connection_breaks", peer=self.peer, error=repr(error))
            self.close()
        outgoing.end(failed=task.cancelled() or error is not None or outgoing.stopped)

    async def _write(self, outgoing: Outgoing, call: int, payload: Sequence[Packed], flow: Flow) -> None:
        if outgoing.stopped:
            return  # nothing was said of it here
        start = self._sealer.start(call)
        out = np.empty(len(start) + _AT_ONCE * (RECORD_BYTES + AROUND), np.uint8).data
        out[: len(start)] = start
        fill, left = len(start), sum(packed.num_bytes for packed in payload)
        for piece in pieces(payload, RECORD_BYTES):
            if fill + AROUND + len(piece) > len(out):
                await self._flush(outgoing, out[:fill], flow)
                fill = 0
                if outgoing.stopped:
                    await self._loop.sock_sendall(self._sock, self._sealer.record(Kind.STOP))
                    return
            left -= len(piece)
            fill += self._sealer.seal(Kind.DATA if left else Kind.LAST, piece, out[fill:])
        await self._flush(outgoing, out[:fill], flow)

    async def _flush(self, outgoing: Outgoing, records: memoryview, flow: Flow) -> None:
        # Our own line holds it up, not the receiver.
        outgoing.rate.hold(loop_time())
        await flow.up.turn()
        outgoing.goes_on()
        flow.sends(len(records))
        await self._loop.sock_sendall(self._sock, records)
        outgoing.moves(len(records))

    # ------------------------------------------------------------ receiving

    async def _receive(self) -> None:
        """Receive one payload for its call. Raises BadMessage, OSError."""
        start = memoryview(bytearray(AROUND + 8))
        # The head first: the end of what another kind is may never come.
        fill = await fill_from(self._sock, start, 0, HEAD_BYTES)
        if read_head(start)[0] is not Kind.START:
            raise BadMessage(RejectCode.MALFORMED, "no payload begins here")
        await fill_from(self._sock, start, fill, len(start))
        plain = memoryview(bytearray(8))
        self._opener.open(start, plain)
        incoming = await self._session.taker(self.number, read_call(plain))
        if unwanted := incoming is None:
            incoming = Incoming(Assembly((), max_bytes=0), Flow())
            incoming.dropped = True
        incoming.rate = LeastRate(loop_time())
        incoming.on_drop = self._drain  # no closure: a cycle would keep the payload until it is collected
        if incoming.dropped:
            self._drain(incoming)
        try:
            await self._records(incoming)
        except BadMessage as error:
            incoming.end(PayloadLost("the bulk connection broke", peer=self.peer, error=str(error)))
            raise
        finally:
            incoming.end(PayloadLost("the bulk connection broke", peer=self.peer))
        # Its sender chose how many there are of these, and pays nothing for the next one.
        if unwanted:
            await asyncio.sleep(_UNWANTED_S)

    def _drain(self, incoming: Incoming) -> None:
        """Its sender has some time to end it."""
        self._loop.call_later(self._stall_s, self._close_unless_over, incoming)

    def _close_unless_over(self, payload: Incoming | Outgoing) -> None:
        if not payload.over:
            self.close()

    async def _records(self, incoming: Incoming) -> None:
        records = np.empty(AROUND + RECORD_BYTES + HEAD_BYTES, np.uint8).data
        fill = wasted = 0
        length = RECORD_BYTES
        for number in itertools.count(1):
            # What has come already is read without waiting, and would keep everything else in this process waiting.
            if number % _AT_ONCE == 0:
                await asyncio.sleep(_UNWANTED_S if incoming.dropped and length < RECORD_BYTES else 0)
            fill = await fill_from(self._sock, records, fill, HEAD_BYTES)
            kind, length = read_head(records)
            if kind in (Kind.HELLO, Kind.START):
                raise BadMessage(RejectCode.MALFORMED, "no such record in a payload", kind=kind.name)
            end, over = AROUND + length, kind is not Kind.DATA
            # With the head of the next one: one call of the system each.
            fill = await fill_from(self._sock, records, fill, end, most=end if over else end + HEAD_BYTES)
            if incoming.dropped or kind is Kind.STOP:
                target, wasted = np.empty(length, np.uint8).data, wasted + length
                if wasted > _WASTE_BYTES:
                    raise BadMessage(RejectCode.TOO_LARGE, "a payload that no call expects goes on")
            else:
                target = incoming.buffer(kind, length)
            self._opener.open(records[:end], target)
            incoming.flow.receives(end)
            if over:
                incoming.end(PayloadLost("its sender has ended it", peer=self.peer) if kind is Kind.STOP else None)
                return
            fill -= end
            records[:fill] = records[end : end + fill]
            incoming.rate.moves(length, loop_time())
            if incoming.flow.down.bytes_per_s:
                incoming.rate.hold(loop_time())
                await incoming.flow.down.turn()
                incoming.rate.go_on(loop_time())
