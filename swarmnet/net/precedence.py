"""Who waits when this peer's line is busy: state for a joiner gives way to microbatches and sums.

Whatever cannot wait says so while it is being sent; what can wait asks before every chunk. It waits for a second at
most, so a joiner gets a trickle even from a peer that never rests. Knows no messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

MOST_WAIT_S = 1.0


class Precedence:
    """Of one transport, both directions of calling."""

    def __init__(self) -> None:
        self._urgent = 0
        self._clear = asyncio.Event()
        self._clear.set()

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Something that cannot wait is being sent."""
        self._urgent += 1
        self._clear.clear()
        try:
            yield
        finally:
            self._urgent -= 1
            if not self._urgent:
                self._clear.set()

    async def turn(self) -> None:
        """Return when nothing urgent is being sent, or after MOST_WAIT_S."""
        try:
            async with asyncio.timeout(MOST_WAIT_S):
                await self._clear.wait()
        except TimeoutError:
            return
