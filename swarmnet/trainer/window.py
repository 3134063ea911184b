"""Bounds how many microbatches are on their way at once, whatever step they are of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Window:
    """A semaphore whose size may change: `size()` is asked whenever a place is wanted."""

    def __init__(self, size: Callable[[], int]) -> None:
        self._size = size
        self._taken = 0
        self._given = asyncio.Event()

    async def take(self) -> None:
        """Wait for a place."""
        while self._taken >= self._size():
            self._given.clear()
            await self._given.wait()
        self._taken += 1

    def give(self) -> None:
        """Give a place back."""
        self._taken -= 1
        self._given.set()
