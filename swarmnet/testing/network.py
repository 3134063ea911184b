"""A network in memory, with the faults of a real one injected below the code under test.

One-way messages may be delayed, lost, doubled and overtaken; calls are delayed and may break. Death of a process is
seen by every connected peer, silence (a stopped process, a cut) by none: calls across a cut hang and then break
without a word on who is to blame, answers go on when it heals in time, one-way messages are lost. Where only one of two
can dial the other, the same holds for what the one who cannot opens, and for nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Control, Heartbeat, Packed, Rejected, Request, gives_way
from swarmnet.net.traffic import Priority
from swarmnet.testing.clock import SimulatedProcess, VirtualLoop
from swarmnet.testing.links import Links, SimulatedLinks
from swarmnet.transport import ReadPayload, Service, layout_of

_LOOKS_PER_STALL = 4

SILENCE_S = 3.5
"""A dial into silence is given up after this long."""

Message = Control | Request | Answer
Intercept = Callable[[PeerId, PeerId, Message], Message | bool | None]
"""Sees each message, request and answer before it is sent: (sender, receiver, message).

False loses it: a caller gets nothing more. A message replaces it. None and True let it pass.
"""


class _SimulatedCall:
    """One call as both ends see it. Answers arrive in order."""

    def __init__(self, caller: PeerId, callee: PeerId) -> None:
        self.caller, self.callee = caller, callee
        self.answers: deque[Answer | BaseException | None] = deque()
        self.arrived = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.node: _Node | None = None
        self.over = False
        self.last_at = 0.0

    def put(self, answer: Answer | BaseException | None) -> None:
        self.answers.append(answer)
        self.arrived.set()


@dataclass(slots=True)
class _Node:
    peer: PeerId
    process: SimulatedProcess
    service: Service
    answers: bool


class MemoryNetwork:
    """Connects the transports of simulated processes."""

    def __init__(self, loop: VirtualLoop, links: Links, seed: int) -> None:
        self.loop, self.links, self.rng = loop, links, random.Random(seed)
        self.lines = SimulatedLinks(links)
        self.sent: Counter[str] = Counter()
        self.intercepts: list[Intercept] = []
        self.priorities: defaultdict[PeerId, Priority] = defaultdict(Priority)
        self._nodes: dict[PeerId, _Node] = {}
        self._last_at: dict[tuple[PeerId, PeerId], float] = {}
        self._calls: dict[_SimulatedCall, None] = {}  # in order: a run is the same in every process
        self._held: list[tuple[_SimulatedCall, Answer | None]] = []  # answers on the wrong side of a cut
        self._knocking: list[tuple[_SimulatedCall, Request, tuple[Packed, ...]]] = []  # calls opened across one

    def attach(self, peer: PeerId, process: SimulatedProcess, service: Service, *, answers: bool = True) -> None:
        """A process listens under this id; an older one of the same id is forgotten. answers: does it answer pings?"""
        self._nodes[peer] = _Node(peer, process, service, answers)

    def transport(self, peer: PeerId) -> MemoryTransport:
        """The transport of one peer."""
        return MemoryTransport(self, peer)

    def kill(self, peer: PeerId) -> None:
        """SIGKILL the process behind this id: its connections break, every connected peer notices."""
        node = self._nodes.pop(peer)
        self.loop.kill_process(node.process)
        # The kernel closes the connections of a dead process.
        for call in [call for call in self._calls if peer in (call.caller, call.callee)]:
            # Across a cut no peer learns that the connection has broken.
            if self.lines.connected(call.caller, call.callee):
                self.break_call(call)
        for other in list(self._nodes.values()):
            if self.lines.connected(peer, other.peer):
                definite = self.lines.dials(other.peer, peer)  # else it may be behind its firewall as ever
                gone = functools.partial(other.service.on_gone, peer, definite=definite)
                self._at(other, self.delay(peer, other.peer), gone)

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

    def heal(self, key: object = None) -> None:
        """End this cut, None: every cut. Answers of calls that have not broken yet go on where no other cut holds."""
        self.lines.heal(key)
        for call in list(self._calls):
            died = call.node is not None and self._nodes.get(call.callee) is not call.node
            if died and self.lines.connected(call.caller, call.callee):
                self.break_call(call)  # its process died behind the cut
        held, self._held = self._held, []
        for call, answer in held:
            self._deliver(call, answer)
        knocking, self._knocking = self._knocking, []
        for call, request, payload in knocking:
            if call not in self._calls:
                continue
            if not self.lines.dials(call.caller, call.callee):
                self._knocking.append((call, request, payload))
                continue
            call.node = node = self._nodes.get(call.callee)
            if node is None:
                self.break_call(call)
            else:
                self._at(node, self.delay(call.caller, call.callee), self._accept, node, call, request, payload)

    def cut_off(self) -> None:
        """Nothing reaches any peer from now on."""
        self._nodes.clear()
        self._calls.clear()

    # ------------------------------------------------------------ for the transports

    def delay(self, sender: PeerId, receiver: PeerId) -> float:
        """Seconds a message takes."""
        return self.latency(sender, receiver) + (self.rng.random() if self.rng.random() < self.links.late else 0.0)

    def latency(self, sender: PeerId, receiver: PeerId) -> float:
        """Seconds an empty message takes that nothing holds up."""
        return self.lines.latency_s(sender, receiver) * (1 + self.rng.random())

    def tell(self, sender: PeerId, peer: PeerId, message: Control) -> None:
        """One-way message."""
        if (message := self._passed(sender, peer, message)) is None:
            return
        self.sent[type(message).__name__] += 1
        node, mine = self._nodes.get(peer), self._nodes.get(sender)
        # Who cannot dial the other speaks on the link that the other has opened.
        dials = not self.lines.blocked(sender, peer)
        back = node is not None and not self.lines.blocked(peer, sender)
        if not self.lines.reaches(sender, peer) or not (dials or back):
            return  # lost without a report
        if node is None:
            if mine is not None and self.lines.connected(sender, peer):
                gone = functools.partial(mine.service.on_gone, peer, definite=True)
                self._at(mine, self.delay(peer, sender), gone)
            return
        # Each copy of a message may be lost by itself.
        for _ in range(1 + (self.rng.random() < self.links.double)):
            if self.rng.random() >= self.links.loss:
                self._at(node, self._in_order(sender, peer), self._hand_over, node, sender, mine, message)

    def _in_order(self, sender: PeerId, peer: PeerId) -> float:
        """Seconds a one-way message takes: never less than the one before it on this link, unless that was late."""
        delay = self.latency(sender, peer)
        if self.rng.random() < self.links.late:
            return delay + self.rng.random()  # others overtake it
        now = self.loop.time()
        arrives = max(now + delay, self._last_at.get((sender, peer), 0.0) + 1e-6)
        self._last_at[sender, peer] = arrives
        return arrives - now

    def _hand_over(self, node: _Node, sender: PeerId, mine: _Node | None, message: Control) -> None:
        node.service.on_tell(sender, message)
        if mine is not None and node.answers and isinstance(message, Heartbeat):
            # gRPC pings among its messages: here every heartbeat brings one, and the answer takes no time to come back.
            self.loop.at_once(mine.process, self._hand_back, node.peer, mine)

    def _hand_back(self, peer: PeerId, mine: _Node) -> None:
        if self._nodes.get(mine.peer) is mine and self.lines.dials(mine.peer, peer):
            mine.service.on_reached(peer)

    def open(self, sender: PeerId, peer: PeerId, request: Request, payload: tuple[Packed, ...]) -> _SimulatedCall:
        """Begin a call."""
        call = _SimulatedCall(sender, peer)
        if (request := self._passed(sender, peer, request)) is None:
            return call
        self.sent[type(request).__name__] += 1
        node = self._nodes.get(peer)
        mine = self._nodes.get(sender)
        if not self.lines.dials(sender, peer):
            self._calls[call] = None
            self._knocking.append((call, request, payload))
            return call  # no peer answers: the caller sees no life and gives up, if it does not heal before
        if node is None:
            if mine is not None:
                self._at(mine, self.delay(peer, sender), call.put, PeerGone("refused", definite=True, peer=peer))
            return call
        self._calls[call] = None
        call.node = node
        self._at(node, self.delay(sender, peer), self._accept, node, call, request, payload)
        # It breaks at any moment, even before it has arrived.
        if self.rng.random() < self.links.broken:
            self.loop.call_later(self.rng.random(), self.break_call, call)
        return call

    async def dial(self, sender: PeerId, peer: PeerId, deadline: float) -> None:
        """A new connection, there and back. Silence is a firewall, unless the process is stopped."""
        await asyncio.sleep(2 * self.lines.latency_s(sender, peer))
        if not self.lines.dials(sender, peer):
            await asyncio.sleep(max(0.0, min(deadline - self.loop.time(), SILENCE_S)))
            raise PeerGone("no answer", peer=peer)
        if peer not in self._nodes:
            raise PeerGone("refused", peer=peer)  # its machine says so
        if self.is_stopped(peer):
            await asyncio.sleep(max(0.0, deadline - self.loop.time()))
            raise PeerTimeout("something answers, and does not say in time who it is", peer=peer)

    def close(self, call: _SimulatedCall) -> None:
        """The caller has left."""
        if call in self._calls:
            self._calls.pop(call, None)
            call.over = True
            node = self._nodes.get(call.callee)
            if node is not None:
                # Behind a cut the callee learns nothing of it; its own pulses fail in the end.
                cut_s = 0.0 if self.lines.connected(call.caller, call.callee) else self.links.stall_s
                self._at(node, self.links.latency_s + cut_s, self._cancel, call)

    def reaches_caller(self, call: _SimulatedCall) -> bool:
        """Would pulses of the callee's process reach the caller?"""
        # A call that was opened across a cut has no callee yet.
        if call.node is None and not self.lines.dials(call.caller, call.callee):
            return False
        return not self.is_stopped(call.callee) and self.lines.connected(call.caller, call.callee)

    def break_call(self, call: _SimulatedCall) -> None:
        """The connection of a call breaks: both ends notice."""
        if call not in self._calls:
            return
        self._calls.pop(call, None)
        call.over = True
        caller, callee = self._nodes.get(call.caller), self._nodes.get(call.callee)
        if caller is not None:
            definite = callee is None and self.lines.dials(call.caller, call.callee)
            broken = PeerGone("broken", definite=definite, peer=call.callee)
            self._at(caller, self.delay(call.callee, call.caller), call.put, broken)
        if callee is not None:
            self._at(callee, self.links.latency_s, self._cancel, call)

    # ------------------------------------------------------------ inside

    def _at(self, node: _Node, delay: float, callback: Callable[..., object], *args: object) -> None:
        """Run something in a node's process after a while."""
        self.loop.call_later(delay, callback, *args, context=node.process.context)

    def _passed(self, sender: PeerId, receiver: PeerId, message: Any) -> Any:
        """What the intercepts make of a message; None: it is lost."""
        for intercept in self.intercepts:
            if (changed := intercept(sender, receiver, message)) is False:
                return None
            message = message if changed in (None, True) else changed
        return message

    @staticmethod
    def _cancel(call: _SimulatedCall) -> None:
        if call.task is not None:
            call.task.cancel()

    def _accept(self, node: _Node, call: _SimulatedCall, request: Request, payload: tuple[Packed, ...]) -> None:
        if call.over:
            return  # the caller left while the request was under way
        call.task = self.loop.start(node.process, self._serve(node, call, request, payload))

    async def _serve(self, node: _Node, call: _SimulatedCall, request: Request, payload: tuple[Packed, ...]) -> None:
        async def read() -> tuple[Packed, ...]:
            await asyncio.sleep(self.delay(call.caller, call.callee))
            with self.priorities[call.caller].urgent():
                await self.lines.carry(call.caller, call.callee, sum(packed.num_bytes for packed in payload))
            # A cut in the middle of an upload: it goes on if the cut heals in time.
            cut_s = 0.0
            while not self.lines.connected(call.caller, call.callee) and cut_s < self.links.stall_s:
                await asyncio.sleep(self.links.stall_s / _LOOKS_PER_STALL)
                cut_s += self.links.stall_s / _LOOKS_PER_STALL
            if call.over or not self.lines.connected(call.caller, call.callee):
                raise PeerGone("the caller died while uploading", peer=call.caller)
            return payload

        priority = self.priorities[call.callee]
        try:
            async for answer in node.service.on_call(call.caller, request, ReadPayload(layout_of(payload), read)):
                num_bytes = sum(packed.num_bytes for packed in getattr(answer, "payload", ()))
                if num_bytes and gives_way(request):
                    await priority.turn(num_bytes)
                with priority.urgent() if num_bytes and not gives_way(request) else contextlib.nullcontext():
                    await self.lines.carry(call.callee, call.caller, num_bytes)
                self._answer(call, answer)
        except (BadMessage, Refused) as error:
            self._answer(call, Rejected(error.code, error.reason))
        except PeerGone:
            pass  # who would hear of it is the one that has gone
        self._answer(call, None)

    def _answer(self, call: _SimulatedCall, answer: Answer | None) -> None:
        if call.over or call.caller not in self._nodes:
            return
        if answer is None or (answer := self._passed(call.callee, call.caller, answer)) is not None:
            self._deliver(call, answer)

    def _deliver(self, call: _SimulatedCall, answer: Answer | None) -> None:
        """Send what the intercepts have let pass: they see it once, also if it waits until a cut heals."""
        caller = self._nodes.get(call.caller)
        if call.over or caller is None:
            return
        if not self.lines.connected(call.caller, call.callee):
            self._held.append((call, answer))  # it goes on if the cut heals in time
            return
        delay = self.delay(call.callee, call.caller)
        call.last_at = max(call.last_at + 1e-6, self.loop.time() + delay)  # a stream keeps its order
        self.loop.call_at(call.last_at, call.put, answer, context=caller.process.context)
        if answer is None:
            self._calls.pop(call, None)


class MemoryTransport:
    """A Transport over a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, me: PeerId) -> None:
        self._network, self._me = network, me

    def tell(self, peer: PeerId, message: Control) -> None:
        self._network.tell(self._me, peer, message)

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
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

    def relayed(self, peer: PeerId) -> bool:
        return self._network.lines.relay(self._me, peer) is not None

    def carries(self, bytes_per_s: int) -> None:
        self._network.priorities[self._me].bytes_per_s = bytes_per_s

    async def dial(self, peer: PeerId, address: str, *, deadline: float) -> None:
        await self._network.dial(self._me, peer, deadline)

    async def _answered(self, call: _SimulatedCall, deadline: float) -> None:
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
                # Pulses of its process arrive, whatever the work does.
                if self._network.reaches_caller(call):
                    lived = loop.time()
                elif loop.time() - lived >= stall_s:
                    self._network.close(call)
                    if self._network.is_stopped(call.callee):
                        raise PeerTimeout("the peer stalls", peer=call.callee) from None
                    raise PeerGone("silence", definite=False, peer=call.callee) from None
