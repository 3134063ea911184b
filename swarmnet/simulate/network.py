"""A network in memory, with the faults of a real one injected below the code under test.

One-way messages may be delayed, lost, doubled and overtaken; calls are delayed and may break. Death of a process is
seen by everybody connected to it, its silence (a stopped process) by nobody.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Control, Packed, Rejected, Request
from swarmnet.net.transport import Service
from swarmnet.simulate.clock import Process, VirtualLoop

_LOOKS_PER_STALL = 4


@dataclass(frozen=True, slots=True)
class Links:
    """latency_s: one way, plus up to as much jitter. loss, double: of one-way messages. late: share of messages held up
    for up to a second (so that others overtake them). broken: share of calls whose connection breaks. stall_s: a callee
    whose process shows no life for so long has timed out."""

    latency_s: float = 0.005
    loss: float = 0.0
    double: float = 0.0
    late: float = 0.0
    broken: float = 0.0
    bytes_per_s: float = 1e9
    stall_s: float = 10.0


class _Call:
    """One call as both ends see it. Answers arrive in order."""

    def __init__(self, caller: PeerId, callee: PeerId) -> None:
        self.caller, self.callee = caller, callee
        self.answers: deque[Answer | BaseException | None] = deque()
        self.arrived = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.over = False
        self.last_at = 0.0

    def put(self, answer: Answer | BaseException | None) -> None:
        self.answers.append(answer)
        self.arrived.set()


@dataclass(slots=True)
class _Node:
    peer: PeerId
    process: Process
    service: Service


class MemoryNetwork:
    """Connects the transports of simulated processes."""

    def __init__(self, loop: VirtualLoop, links: Links, seed: int) -> None:
        self.loop, self.links, self.rng = loop, links, random.Random(seed)
        self.sent: Counter[str] = Counter()
        self._nodes: dict[PeerId, _Node] = {}
        self._last_at: dict[tuple[PeerId, PeerId], float] = {}
        self._calls: dict[_Call, None] = {}  # in order: a run is the same in every process

    def attach(self, peer: PeerId, process: Process, service: Service) -> None:
        """A process listens under this id; an older one of the same id is forgotten."""
        self._nodes[peer] = _Node(peer, process, service)

    def transport(self, peer: PeerId) -> MemoryTransport:
        """The transport of one peer."""
        return MemoryTransport(self, peer)

    def kill(self, peer: PeerId) -> None:
        """SIGKILL the process behind this id: its connections break, everybody connected notices."""
        node = self._nodes.pop(peer)
        self.loop.kill_process(node.process)
        for call in [call for call in self._calls if peer in (call.caller, call.callee)]:
            self.break_call(call)
        for other in list(self._nodes.values()):
            self._at(other, self.delay(), other.service.on_gone, peer, True)

    def stop(self, peer: PeerId) -> None:
        """SIGSTOP."""
        self.loop.stop_process(self._nodes[peer].process)

    def is_stopped(self, peer: PeerId) -> bool:
        """Is the process behind this id stopped?"""
        node = self._nodes.get(peer)
        return node is not None and node.process.stopped

    def resume(self, peer: PeerId) -> None:
        """SIGCONT."""
        self.loop.continue_process(self._nodes[peer].process)

    def cut_off(self) -> None:
        """Nothing reaches anybody from now on."""
        self._nodes.clear()
        self._calls.clear()

    # ------------------------------------------------------------ for the transports

    def delay(self, num_bytes: int = 0) -> float:
        """Seconds a message takes."""
        wait = self.latency() + num_bytes / self.links.bytes_per_s
        return wait + (self.rng.random() if self.rng.random() < self.links.late else 0.0)

    def latency(self) -> float:
        """Seconds an empty message takes that nothing holds up."""
        return self.links.latency_s * (1 + self.rng.random())

    def tell(self, sender: PeerId, peer: PeerId, message: Control) -> None:
        """One-way message."""
        self.sent[type(message).__name__] += 1
        node = self._nodes.get(peer)
        if node is None:
            mine = self._nodes.get(sender)
            if mine is not None:
                self._at(mine, self.delay(), mine.service.on_gone, peer, True)
            return
        for _ in range(1 + (self.rng.random() < self.links.double)):
            if self.rng.random() >= self.links.loss:
                self._at(node, self._in_order(sender, peer), self._hand_over, node, sender, message)

    def _in_order(self, sender: PeerId, peer: PeerId) -> float:
        """Seconds a one-way message takes: never less than the one before it on this link, unless that was late."""
        delay = self.latency()
        if self.rng.random() < self.links.late:
            return delay + self.rng.random()
        now = self.loop.time()
        arrives = max(now + delay, self._last_at.get((sender, peer), 0.0) + 1e-6)
        self._last_at[sender, peer] = arrives
        return arrives - now

    def _hand_over(self, node: _Node, sender: PeerId, message: Control) -> None:
        node.service.on_tell(sender, message)

    def open(self, sender: PeerId, peer: PeerId, request: Request, payload: tuple[Packed, ...]) -> _Call:
        """Begin a call."""
        self.sent[type(request).__name__] += 1
        call = _Call(sender, peer)
        node = self._nodes.get(peer)
        mine = self._nodes.get(sender)
        if node is None:
            if mine is not None:
                self._at(mine, self.delay(), call.put, PeerGone("refused", definite=True, peer=peer))
            return call
        self._calls[call] = None
        self._at(node, self.delay(), self._accept, node, call, request, payload)
        if self.rng.random() < self.links.broken:
            self.loop.call_later(self.rng.random(), self.break_call, call)
        return call

    def close(self, call: _Call) -> None:
        """The caller has left."""
        if call in self._calls:
            self._calls.pop(call, None)
            call.over = True
            node = self._nodes.get(call.callee)
            if node is not None:
                self._at(node, self.links.latency_s, self._cancel, call)

    def break_call(self, call: _Call) -> None:
        """The connection of a call breaks: both ends notice."""
        if call not in self._calls:
            return
        self._calls.pop(call, None)
        call.over = True
        caller, callee = self._nodes.get(call.caller), self._nodes.get(call.callee)
        if caller is not None:
            self._at(caller, self.delay(), call.put, PeerGone("broken", definite=callee is None, peer=call.callee))
        if callee is not None:
            self._at(callee, self.links.latency_s, self._cancel, call)

    # ------------------------------------------------------------ inside

    def _at(self, node: _Node, delay: float, callback: object, *args: object) -> None:
        """Run something in a node's process after a while."""
        if callback == node.service.on_gone:
            peer, definite = args
            self.loop.call_later(
                delay, lambda: node.service.on_gone(peer, definite=definite), context=node.process.context  # type: ignore[arg-type]
            )
        else:
            self.loop.call_later(delay, callback, *args, context=node.process.context)  # type: ignore[arg-type]

    @staticmethod
    def _cancel(call: _Call) -> None:
        if call.task is not None:
            call.task.cancel()

    def _accept(self, node: _Node, call: _Call, request: Request, payload: tuple[Packed, ...]) -> None:
        if call.over:
            return
        call.task = self.loop.start(node.process, self._serve(node, call, request, payload))

    async def _serve(self, node: _Node, call: _Call, request: Request, payload: tuple[Packed, ...]) -> None:
        async def read() -> tuple[Packed, ...]:
            await asyncio.sleep(self.delay(sum(packed.num_bytes for packed in payload)))
            if call.over:
                raise PeerGone("the caller died while uploading", peer=call.caller)
            return payload

        try:
            async for answer in node.service.on_call(call.caller, request, read):
                self._answer(call, answer)
        except (BadMessage, Refused) as error:
            self._answer(call, Rejected(error.code, error.reason))
        except PeerGone:
            pass
        self._answer(call, None)

    def _answer(self, call: _Call, answer: Answer | None) -> None:
        caller = self._nodes.get(call.caller)
        if call.over or caller is None:
            return
        call.last_at = max(call.last_at + 1e-6, self.loop.time() + self.delay())     # a stream keeps its order
        self.loop.call_at(call.last_at, call.put, answer, context=caller.process.context)
        if answer is None:
            self._calls.pop(call, None)


class MemoryTransport:
    """A Transport over a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, me: PeerId) -> None:
        self._network, self._me = network, me

    def tell(self, peer: PeerId, message: Control) -> None:
        """See Transport.tell."""
        self._network.tell(self._me, peer, message)

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        """See Transport.call."""
        call = self._network.open(self._me, peer, request, payload)
        try:
            while True:
                await self._answered(call, deadline)
                answer = call.answers.popleft()
                if answer is None:
                    return
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
        finally:
            self._network.close(call)

    async def _answered(self, call: _Call, deadline: float) -> None:
        """Wait as long as the callee's process lives, however slow it or the line is, as gRPC's pulses let us."""
        loop, stall_s = self._network.loop, self._network.links.stall_s
        lived = loop.time()
        while not call.answers:
            call.arrived.clear()
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + stall_s / _LOOKS_PER_STALL)):
                    await call.arrived.wait()
            except TimeoutError:
                if loop.time() >= deadline:
                    raise PeerTimeout("deadline", peer=call.callee) from None
                if not self._network.is_stopped(call.callee):
                    lived = loop.time()
                elif loop.time() - lived >= stall_s:
                    raise PeerTimeout("the peer stalls", peer=call.callee) from None
