"""The slots of one step: a semaphore of variable size with two queues. How many there are: `pipeline/depth.py`."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """Bounds the microbatches that hold memory at once. Two queues wait for a slot: tasks of this replica in *line*,
    which go first, and waiting *calls*, at most as many as there are slots."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self._line: deque[asyncio.Future[None]] = deque()
        self._calls: deque[asyncio.Future[None]] = deque()

    def try_take(self) -> bool:
        """Take a slot if one is free and no task or call waits for it."""
        if self.taken >= self.size or self._line or self._calls:
            return False
        self.taken += 1
        return True

    async def take(self) -> None:
        """Wait for a slot, in line."""
        if not self.try_take():
            await self._wait(self._line)

    @property
    def crowded(self) -> bool:
        """Is the queue of calls full: do as many calls wait as there are slots?"""
        return len(self._calls) >= self.size

    @property
    def wanted(self) -> bool:
        """Does a task or call wait for a slot?"""
        return bool(self._line or self._calls)

    async def enter(self, *, patience_s: float) -> bool:
        """Wait in the queue of calls for at most `patience_s`. False: no slot came free, or the queue is full."""
        if self.try_take():
            return True
        if self.crowded:
            return False
        try:
            async with asyncio.timeout(patience_s):
                await self._wait(self._calls)
        except TimeoutError:
            return False
        return True

    def give(self) -> None:
        """Give a slot back: to the first in the queues, if one waits, and if there are not fewer slots by now."""
        if self.taken > self.size or not self._hand():
            self.taken -= 1
            assert self.taken >= 0

    def resize(self, size: int) -> None:
        """There are so many slots from now on. Those taken beyond are not given to others."""
        self.size = size
        while self.taken < self.size and self._hand():
            self.taken += 1

    def _hand(self) -> bool:
        """Give a slot to the first that waits for one. False: none waits."""
        for queue in (self._line, self._calls):
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
