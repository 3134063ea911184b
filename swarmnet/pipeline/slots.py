"""The slots of one step: a semaphore with two queues whose size may change. How many there are: `pipeline/depth.py`."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """Bounds the microbatches that hold memory at once. Two queues wait for a slot: tasks of this replica in *line*,
    which go first, and calls at the *door*, as many as there are slots."""

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
        """Is the door full: do as many calls wait there as there are slots?"""
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
        """Give a slot back, to the first who waits if anybody does, and if there are not fewer slots by now."""
        if self.taken > self.size or not self._hand():
            self.taken -= 1
            assert self.taken >= 0

    def resize(self, size: int) -> None:
        """There are so many slots from now on. Those taken beyond are not given to others."""
        self.size = size
        while self.taken < self.size and self._hand():
            self.taken += 1

    def _hand(self) -> bool:
        """A slot to the first who waits for one. False: nobody does."""
        for queue in (self._line, self._door):
            while queue:
                ticket = queue.popleft()
                if not ticket.done():
                    ticket.set_result(None)
                    return True
        return False

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
