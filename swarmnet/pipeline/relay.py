"""Run something on behalf of a caller and show signs of life meanwhile; a caller that leaves ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Generic, TypeVar

from swarmnet.errors import SwarmError
from swarmnet.messages import Running

T = TypeVar("T")

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task that somebody owns."""


class Relay(Generic[T]):
    """A coroutine in a task of its own; iterate `signs`, then take the `result`."""

    def __init__(self, spawn: Spawn, work: Coroutine[Any, Any, T]) -> None:
        self._outcome: asyncio.Future[tuple[T | None, SwarmError | None]] = asyncio.get_running_loop().create_future()
        self._task = spawn(self._run(work))

    async def signs(self, every_s: float) -> AsyncGenerator[Running, None]:
        """`Running` every `every_s` seconds until the work is done."""
        try:
            while not self._outcome.done():
                await asyncio.wait([self._outcome], timeout=every_s)
                if not self._outcome.done():
                    yield Running()
        finally:
            self._task.cancel()

    def result(self) -> T:
        """What the work returned. Raises the SwarmError it raised."""
        value, error = self._outcome.result()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # None only where T is None

    async def _run(self, work: Coroutine[Any, Any, T]) -> None:
        try:
            outcome: tuple[T | None, SwarmError | None] = (await work, None)
        except SwarmError as error:
            outcome = (None, error)
        except asyncio.CancelledError:
            self._outcome.cancel()
            raise
        if not self._outcome.done():
            self._outcome.set_result(outcome)
