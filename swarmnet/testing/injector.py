"""A peer or trainer with faults below it, as a process: `python -m swarmnet.testing.injector PEER.toml ORDERS`.

The same `run_peer` and `run_trainer` as `swarmnet peer` and `swarmnet trainer`, which know nothing of orders. What the
orders say stands between its protocol and its engine, and its network. A child holds in a phase by taking longer there,
as a slow machine would; whether it is then killed or stopped is the supervisor's business. A cut link loses one-way
messages, lets calls hang and then breaks them; a slow one delays messages and paces payloads. Only what a child sends
and receives by itself is touched: its DHT node is not, and below a cut link gRPC still thinks that it is connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from swarmnet import telemetry
from swarmnet.config import toml
from swarmnet.config.check import check
from swarmnet.config.peer import PeerConfig
from swarmnet.errors import PeerTimeout, UsageError
from swarmnet.ids import PeerId
from swarmnet.manifest.file import load
from swarmnet.messages import Answer, Commit, Control, Packed, Request, Running, SnapshotPiece, SnapshotRequest
from swarmnet.net.endpoint import Wrap
from swarmnet.net.identity import IDENTITY_FILE, Identity
from swarmnet.peer.run import run_peer
from swarmnet.stage.interfaces import Compute, Engine, OuterStep, SavedActivations, Summation
from swarmnet.telemetry.events import EventLog, EventReader
from swarmnet.testing.byzantine import SENDS, Deceit, Double, FalseSender, Wary, lying_engine
from swarmnet.testing.fault import LinkLimit, Moment, Phase
from swarmnet.trainer.run import run_trainer
from swarmnet.transport import ReadPayload, Service, Transport

POLL_S = 0.01
"""How often the orders are read."""

BREAK_S = 5.0
"""A call over a cut link breaks after so long, as keepalive would break it."""

PULSE_S = 0.25
"""The interval of progress reports to the caller while a paced payload is under way."""

HOLDING_S = 5.0
"""How often a child says what it holds."""

Say = Callable[..., None]


class Interposed:
    """What the orders of one child amount to. Event loop only; `say(event, **fields)` writes to its events."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._holds: dict[str, Mapping[str, Any]] = {}
        self._going_on: dict[str, asyncio.Event] = {}
        self.cut: frozenset[PeerId] = frozenset()  # to whom the link is cut
        self.paces: dict[PeerId, LinkLimit] = {}  # to whom it is slow, and how
        self._healed = asyncio.Event()
        self._asked = self._traced = False
        self.deceit: Deceit | None = None  # how its work is false

    def take(self, order: Mapping[str, Any]) -> None:
        """From now on this line of the orders holds."""
        match order["event"]:
            case "hold":
                self._holds[order["id"]] = order
            case "go_on":
                self._holds.pop(order["id"], None)
                if order["id"] in self._going_on:
                    self._going_on.pop(order["id"]).set()
            case "trace":
                self._traced = True
            case "lie":
                self.deceit = self.deceit or Deceit(order["kind"], order["seed"], self._say)
            case "links":
                self.cut = frozenset(order["cut"])
                self.paces = {PeerId(peer): LinkLimit(*pace) for peer, pace in order["paces"].items()}
                self._healed.set()
                self._healed = asyncio.Event()

    async def reach(self, phase: Phase, moment: Moment | None, step: int | None) -> None:
        """This phase begins or ends now; returns when it may go on.

        `reached` is said of each hold. step None: not known here, as a joiner knows none; the event then has no step.
        """
        for id, hold in [*self._holds.items()]:
            due = hold["phase"] == phase and moment in (None, hold["moment"])
            if due and (step is None or step >= hold["step"]) and id in self._holds:
                del self._holds[id]  # while I am held, no other call is
                go_on = self._going_on[id] = asyncio.Event()
                self._say("reached", hold=id, phase=phase, **({} if step is None else {"step": step}))
                await go_on.wait()

    def working(self, phase: str, step: int, index: int) -> None:
        """A microbatch has come this far here: "begun"; "forward", which is done; "counted", its gradient is in."""
        if self._traced:
            self._say("worked", phase=phase, step=step, index=index)

    def asking(self) -> None:
        """A snapshot is asked for. It is said the first time since this child was started."""
        if not self._asked:
            self._asked = True
            self._say("asking")

    def holding(self, *, tasks: int, blocks: int) -> None:
        """Of asyncio, and of the interpreter's allocator: what grows there is a leak that /proc does not show yet."""
        self._say("holding", tasks=tasks, blocks=blocks)

    async def healed(self, peer: PeerId, *, deadline: float) -> None:
        """Returns when the link to `peer` is not cut. Raises PeerTimeout after BREAK_S or at the deadline."""
        try:
            async with asyncio.timeout_at(min(deadline, asyncio.get_running_loop().time() + BREAK_S)):
                while peer in self.cut:
                    await self._healed.wait()
        except TimeoutError:
            raise PeerTimeout("the link is cut", peer=peer) from None


class HeldCompute(Double[Compute]):
    """A Compute that takes longer where its child holds."""

    def __init__(self, inner: Compute, between: Interposed) -> None:
        super().__init__(inner)
        self._between, self._step = between, 0

    @property
    def averaged(self) -> int:
        """The step that rounds are about: where steps overlap, not the one computed last."""
        return int(getattr(self._inner, "version", self._step))

    async def forward(self, step: int, index: int, payload: Sequence[Packed], *, train: bool) -> SavedActivations:
        if not train:  # an evaluation is in no phase of a step
            return await self._inner.forward(step, index, payload, train=False)
        self._step = step
        self._between.working("begun", step, index)
        await self._between.reach("forward", "begin", step)
        stash = await self._inner.forward(step, index, payload, train=True)
        self._between.working("forward", step, index)
        await self._between.reach("forward", "end", step)
        return stash

    async def backward(self, stash: SavedActivations, gradient: Sequence[Packed]) -> tuple[Packed, ...]:
        await self._between.reach("backward", "begin", stash.step)
        answer = await self._inner.backward(stash, gradient)
        await self._between.reach("backward", "end", stash.step)
        return answer

    async def accumulate(self, stash: SavedActivations) -> bool:
        counted = await self._inner.accumulate(stash)
        if counted:
            self._between.working("counted", stash.step, stash.index)
        return counted

    async def apply(self, commits: Sequence[Commit]) -> OuterStep | None:
        step = commits[0].step
        await self._between.reach("apply", "begin", step)
        outer = await self._inner.apply(commits)
        self._step = step + 1
        await self._between.reach("apply", "end", step)
        return outer


class HeldSums(Double[Summation]):
    """A Summation that takes longer where its child holds."""

    def __init__(self, inner: Summation, compute: HeldCompute, between: Interposed) -> None:
        super().__init__(inner)
        self._compute, self._between = compute, between

    async def contribution(self, start: int, stop: int, reference: bytes = b"") -> Packed:
        await self._between.reach("averaging", "begin", self._compute.averaged)
        return await self._inner.contribution(start, stop, reference)

    async def seal(self) -> tuple[bytes, float]:
        digest = await self._inner.seal()
        await self._between.reach("averaging", "end", self._compute.averaged)
        return digest


def held_engine(inner: Engine, between: Interposed) -> Engine:
    """`inner`, longer where its child holds, and false if it is Byzantine."""
    if between.deceit is not None:
        inner = lying_engine(inner, between.deceit)
    compute = HeldCompute(inner.compute, between)
    return Engine(cast(Compute, compute), cast(Summation, HeldSums(inner.sums, compute, between)))


class FaultyTransport(Double[Transport]):
    """A Transport with links that can be cut and slow."""

    def __init__(self, inner: Transport, between: Interposed) -> None:
        super().__init__(inner)
        self._between = between
        self._late: dict[PeerId, deque[tuple[float, Control]]] = {}
        self._free_at: dict[PeerId, float] = {}

    def tell(self, peer: PeerId, message: Control) -> None:
        if peer in self._between.cut:
            return  # lost, as a datagram
        pace, late = self._between.paces.get(peer), self._late.setdefault(peer, deque())
        if pace is None and not late:
            self._inner.tell(peer, message)
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + (pace.latency_s if pace else 0.0)
        late.append((max(due, late[-1][0]) if late else due, message))  # in order, whatever the pace becomes
        loop.call_at(late[-1][0], self._deliver, peer)

    def _deliver(self, peer: PeerId) -> None:
        _, message = self._late[peer].popleft()
        # The link may have been cut while the message was under way.
        if peer not in self._between.cut:
            self._inner.tell(peer, message)

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        if isinstance(request, SnapshotRequest):
            self._between.asking()
        async for pulse in self._transit(peer, payload, deadline):
            yield pulse
        async with contextlib.aclosing(self._inner.call(peer, request, payload, deadline=deadline)) as answers:
            async for answer in answers:
                async for pulse in self._transit(peer, getattr(answer, "payload", ()), deadline):
                    yield pulse
                if isinstance(answer, SnapshotPiece):
                    # The joiner has it, and has not looked at it yet.
                    await self._between.reach("fetch", None, None)
                yield answer

    async def dial(self, peer: PeerId, address: str, *, deadline: float) -> None:
        await self._between.healed(peer, deadline=deadline)
        await self._inner.dial(peer, address, deadline=deadline)

    async def _transit(self, peer: PeerId, payload: Iterable[Packed], deadline: float) -> AsyncGenerator[Answer, None]:
        """Wait for as long as this takes on the link; yields a pulse now and then. Raises PeerTimeout."""
        await self._between.healed(peer, deadline=deadline)
        pace = self._between.paces.get(peer)
        if pace is None:
            return
        loop = asyncio.get_running_loop()
        free_at = max(loop.time(), self._free_at.get(peer, 0.0))  # one after the other
        if pace.bytes_per_s:
            free_at += sum(len(packed.data) for packed in payload) / pace.bytes_per_s
        self._free_at[peer] = free_at
        arrives = free_at + pace.latency_s
        while (left := min(arrives, deadline) - loop.time()) > 0:
            await asyncio.sleep(min(left, PULSE_S))
            if left > PULSE_S:
                yield Running()
        if arrives > deadline:
            # The caller would have given up before the last byte came.
            raise PeerTimeout("the link is slow", peer=peer)
        await self._between.healed(peer, deadline=deadline)


class FaultyService(Double[Service]):
    """A Service that holds before it hands over state, and that cannot tell death from silence behind a cut link."""

    def __init__(self, inner: Service, between: Interposed) -> None:
        super().__init__(inner)
        self._between = between

    async def on_call(self, caller: PeerId, request: Request, payload: ReadPayload) -> AsyncGenerator[Answer, None]:
        async with contextlib.aclosing(self._inner.on_call(caller, request, payload)) as answers:
            async for answer in answers:
                if isinstance(answer, SnapshotPiece):
                    await self._between.reach("snapshot", None, None)
                yield answer

    def on_reached(self, peer: PeerId) -> None:
        if peer not in self._between.cut:
            self._inner.on_reached(peer)

    def on_gone(self, peer: PeerId, *, definite: bool) -> None:
        self._inner.on_gone(peer, definite=definite and peer not in self._between.cut)


def main(argv: list[str]) -> int:
    """The exit code of the peer or trainer; 2 and a line when its config or manifest is wrong."""
    path, orders = Path(argv[0]), EventReader(Path(argv[1]))
    try:
        config = check(PeerConfig, toml.read(path), origin=lambda _: str(path))
        telemetry.setup(config.log.level, format=config.log.format)
        assert config.manifest is not None
        manifest = load(config.manifest)
        with EventLog(config.events) as events:
            between = Interposed(events.emit)

            def sign(data: bytes) -> bytes:
                return Identity.from_bytes((config.dir / IDENTITY_FILE).read_bytes()).sign(data)

            def heard(service: Service) -> Service:
                inner = service if between.deceit is None else cast(Service, Wary(service, between.deceit, sign))
                return cast(Service, FaultyService(inner, between))

            def said(transport: Transport) -> Transport:
                deceit = between.deceit
                if deceit is not None and deceit.kind in SENDS:
                    transport = cast(Transport, FalseSender(transport, deceit, sign))
                return cast(Transport, FaultyTransport(transport, between))

            wrap = Wrap(transport=said, service=heard, background=lambda: follow(orders, between))
            # What holds from the start is there before the first message.
            _read(orders, between)
            if "trainer" in config.roles:
                return run_trainer(config, manifest, wrap=wrap)
            return run_peer(config, manifest, wrap=wrap, wrap_engine=lambda engine: held_engine(engine, between))
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2


async def follow(orders: EventReader, between: Interposed) -> None:
    """Carry out what is written, as it is written; say now and then what this process holds. Never returns."""
    loop, say_at = asyncio.get_running_loop(), 0.0
    while True:
        _read(orders, between)
        if loop.time() >= say_at:
            between.holding(tasks=len(asyncio.all_tasks()), blocks=sys.getallocatedblocks())
            say_at = loop.time() + HOLDING_S
        await asyncio.sleep(POLL_S)


def _read(orders: EventReader, between: Interposed) -> None:
    for order in orders.read():
        between.take(order)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
