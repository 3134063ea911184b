"""The link to one peer: one-way messages in order over one long-lived stream, best effort.

Opened when the first message waits, re-opened with back-off while messages wait. The queue is bounded: when it is full
the oldest message that will be said again anyway goes first. What a broken stream had not delivered is lost; every
message of the step protocol is re-sent until the state it reports has changed.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque

import grpc

from swarmnet import telemetry
from swarmnet.errors import PeerGone, SwarmError
from swarmnet.messages import Accepted, Control, Heartbeat, Prepare, Report
from swarmnet.net.grpc_callee import LINK
from swarmnet.net.grpc_line import Lane, Line
from swarmnet.net.grpc_options import GrpcConfig
from swarmnet.wire.convert import read_answer, write_control
from swarmnet.wire.convert_calls import GreetFirst

log = telemetry.get(__name__)

_PERIODIC = (Heartbeat, Prepare, Report)
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 3.0


class Outbox:
    """A bounded queue of written messages."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[tuple[bool, bytes]] = deque()
        self._filled = asyncio.Event()

    def put(self, message: Control) -> None:
        """Append. When full, drop the oldest periodic message, or the oldest of all if there is none."""
        if len(self._waiting) >= self._limit:
            periodic = (at for at, (repeats, _) in enumerate(self._waiting) if repeats)
            del self._waiting[next(periodic, 0)]
        self._waiting.append((isinstance(message, _PERIODIC), write_control(message)))
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


class Link:
    """Carries one outbox to one peer."""

    def __init__(self, line: Line, config: GrpcConfig) -> None:
        self._line, self._config = line, config
        self.outbox = Outbox(config.outbox)

    async def run(self) -> None:
        """Until cancelled: connect when a message waits, stream, back off when it breaks."""
        backoff = _FIRST_BACKOFF_S
        while True:
            await self.outbox.filled()
            if await self._connect_and_stream():
                backoff = _FIRST_BACKOFF_S
            else:
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(2 * backoff, _LONGEST_BACKOFF_S)

    async def _connect_and_stream(self) -> bool:
        """Returns whether the peer took the link."""
        deadline = asyncio.get_running_loop().time() + self._config.stall_s
        try:
            refusal = await self._line.greet(deadline=deadline)
            if refusal is not None:
                log.warning("link_refused", peer=self._line.peer, code=refusal.code.value, reason=refusal.reason)
                self.outbox.clear()
                return False
            async with self._line.lane(bulk=False) as lane:
                return await self._stream(lane)
        except SwarmError as error:
            log.debug("link_failed", peer=self._line.peer, error=error)
            return False

    async def _stream(self, lane: Lane) -> bool:
        stream = lane.channel.stream_stream(LINK)()
        try:
            async with asyncio.timeout(self._config.stall_s):
                said = await self._line.read(stream, lane)
            answer = read_answer(said)[0] if said is not None else None
            if isinstance(answer, GreetFirst):
                self._line.greet_again()
            if not isinstance(answer, Accepted):
                log.debug("link_not_taken", peer=self._line.peer, answer=answer)
                return False
            await self._carry(stream, lane)
            return True
        except TimeoutError:
            self._line.retire(lane)
            return False
        finally:
            stream.cancel()

    async def _carry(self, stream: grpc.aio.StreamStreamCall, lane: Lane) -> None:
        """Write what waits until the stream ends; the read is what notices the end."""
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(self._write(stream))
            try:
                said = await self._line.read(stream, lane)
                log.info("link_closed", peer=self._line.peer, answer=read_answer(said)[0] if said else None)
            except SwarmError as error:
                log.debug("link_broke", peer=self._line.peer, error=error)
                if isinstance(error, PeerGone) and error.definite:
                    self.outbox.clear()
            writer.cancel()

    async def _write(self, stream: grpc.aio.StreamStreamCall) -> None:
        try:
            while True:
                await self.outbox.filled()
                await stream.write(self.outbox.pop())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return                                           # the reader says why
