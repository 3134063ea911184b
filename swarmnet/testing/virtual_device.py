"""One compute thread on virtual time: a job at a time, the most urgent first, and a log of what it did when."""

from __future__ import annotations

import asyncio
import enum
import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from swarmnet.clock import loop_time


class JobKind(enum.IntEnum):
    """What a job is; of one step, the most urgent first."""

    STATE = 0
    BACKWARD = 1
    FORWARD = 2
    WEIGHTS = 3
    AUDIT = 4


@dataclass(frozen=True, slots=True, order=True)
class JobTurn:
    """When a job runs: compared field by field, the lowest first, so the older of two open steps goes first.
    `later_stage` is the stage's number, negated."""

    step: int
    kind: JobKind
    later_stage: int
    index: int


@dataclass(frozen=True, slots=True)
class Stint:
    """A job that was done: from when to when, in virtual seconds."""

    start: float
    stop: float
    turn: JobTurn


class Device:
    """One compute thread. forward_s: seconds of a forward; others in proportion. log: every job, in order, of a device
    that is `detailed`. busy_s: of all that it ever did. forwards: how many of them it has done, by step."""

    def __init__(self, forward_s: float, *, detailed: bool = True) -> None:
        self.forward_s, self._detailed = forward_s, detailed
        self.log: list[Stint] = []
        self.busy_s = 0.0
        self.forwards: Counter[int] = Counter()
        self._line: list[tuple[JobTurn, int, asyncio.Future[None]]] = []
        self._tickets = itertools.count()
        self._running = False

    async def run(self, seconds: float, turn: JobTurn) -> None:
        """Occupy the device."""
        await self._turn(turn)
        began = loop_time()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._next()
            self._done(began, turn)

    async def see_through(self, seconds: float, turn: JobTurn, job: Callable[[], None]) -> None:
        """Occupy the device, then do the job. A caller that gives up while it waits for its turn takes the job back;
        once it has begun it ends all the same, as on a thread."""
        await self._turn(turn)
        began = loop_time()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end() -> None:
            job()
            self._next()
            self._done(began, turn)
            if not ended.done():
                ended.set_result(None)

        asyncio.get_running_loop().call_later(seconds, end)
        await ended

    def _done(self, began: float, turn: JobTurn) -> None:
        now = loop_time()
        self.busy_s += now - began
        if turn.kind is JobKind.FORWARD:
            self.forwards[turn.step] += 1
        if self._detailed:
            self.log.append(Stint(began, now, turn))

    async def _turn(self, turn: JobTurn) -> None:
        if self._running:
            ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._line, (turn, next(self._tickets), ticket))
            try:
                await ticket
            except asyncio.CancelledError:
                # It was given the device in the same moment: the next in line has it.
                if ticket.done() and not ticket.cancelled():
                    self._next()
                raise
        self._running = True

    def _next(self) -> None:
        while self._line:
            ticket = heapq.heappop(self._line)[2]
            # A caller that has given up is still in line.
            if not ticket.done():
                ticket.set_result(None)
                return
        self._running = False
