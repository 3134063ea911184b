"""One microbatch at work in one stage of this replica: what has arrived, who may count it, how it ended."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from swarmnet.errors import SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import Busy, Gradient, MovedTo, Packed

Outcome = Gradient | MovedTo | Busy | SwarmError


@dataclass(slots=True, eq=False)
class MicrobatchTask:
    """input and outcome are set once; `voids` (granted) and `owner` (counted by another) follow the keeper's word.

    patient: learn who owns it before computing (a repair's call). hedged: a caller found the owner hung, so it is
    computed whoever owns it.
    waiting: callers attached while the input is missing, the one who sends it among them. sending: who sends it now,
    and since when; unsent: the last upload came to nothing.
    """

    index: int
    patient: bool
    hedged: bool
    input: asyncio.Future[tuple[Packed, ...]]
    outcome: asyncio.Future[Outcome]
    waiting: int = 0
    sending: dict[PeerId, float] = field(default_factory=dict)
    unsent: asyncio.Event = field(default_factory=asyncio.Event)
    has_slot: bool = False
    computing: bool = False
    voids: int | None = None
    owner: PeerId | None = None
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    starved: bool = False
    fed_or_starved: asyncio.Event = field(default_factory=asyncio.Event)

    def granted(self, voids: int) -> None:
        """This replica counts it, under void counter `voids`."""
        self.voids, self.owner = voids, None
        self.decided.set()

    def owned_by(self, owner: PeerId) -> None:
        """Another replica counts it."""
        self.owner, self.voids = owner, None
        self.decided.set()

    def undecided(self) -> None:
        """The grant is void, or the other owner gone: the claim is open again."""
        self.voids = self.owner = None
        self.decided.clear()

    def may_send(self, caller: PeerId, *, now: float, slow_s: float) -> bool:
        """One caller at a time sends the input; another one only if the last to begin takes longer than `slow_s`."""
        return caller not in self.sending and all(now - began >= slow_s for began in self.sending.values())

    def feed(self, payload: tuple[Packed, ...]) -> None:
        """The input has arrived; the first one counts."""
        if not self.input.done():
            self.input.set_result(payload)
            self.fed_or_starved.set()

    def starve(self) -> None:
        """Nobody is sending the input."""
        self.starved = True
        self.fed_or_starved.set()

    def finish(self, outcome: Outcome) -> None:
        """Tell everybody attached how it ended."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class Slots:
    """Bounds the microbatches that hold memory at once. Work that waits in line goes before calls at the door."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self._line: deque[asyncio.Future[None]] = deque()
        self._door: deque[asyncio.Future[None]] = deque()

    def try_take(self) -> bool:
        """Take a slot if one is free and nobody waits for it."""
        if self.taken >= self.size or self._line or self._door:
            return False
        self.taken += 1
        return True

    async def take(self) -> None:
        """Wait for a slot, in line."""
        if not self.try_take():
            await self._wait(self._line)

    @property
    def crowded(self) -> bool:
        """As many wait at the door as there are slots: nobody else may."""
        return len(self._door) >= self.size

    @property
    def wanted(self) -> bool:
        """Does anybody wait for a slot?"""
        return bool(self._line or self._door)

    async def enter(self, *, patience_s: float) -> bool:
        """Wait at the door for at most `patience_s`. False: no slot came free, or the door is crowded."""
        if self.try_take():
            return True
        if self.crowded:
            return False
        try:
            async with asyncio.timeout(patience_s):
                await self._wait(self._door)
        except TimeoutError:
            return False
        return True

    def give(self) -> None:
        """Give a slot back, to the first who waits if anybody does."""
        for queue in (self._line, self._door):
            while queue:
                ticket = queue.popleft()
                if not ticket.done():
                    ticket.set_result(None)
                    return
        self.taken -= 1
        assert self.taken >= 0

    async def _wait(self, queue: deque[asyncio.Future[None]]) -> None:
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(ticket)
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket in queue:
                queue.remove(ticket)
            elif ticket.done() and not ticket.cancelled():
                self.give()
            raise
