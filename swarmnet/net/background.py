"""Tasks that run while something else does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def running(*works: Coroutine[Any, Any, Any]) -> AsyncGenerator[None, None]:
    """Run these while the block runs. One that raises ends the block; what either raises comes in a group."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


class BackgroundTasks(set["asyncio.Task[Any]"]):
    """The running tasks. The event loop alone would drop a task without a reference."""

    def spawn(self, work: Coroutine[Any, Any, Any], group: asyncio.TaskGroup | None = None) -> asyncio.Task[Any]:
        """Begin one. group: the task ends with it, and if the task raises, the group's other tasks end."""
        task = (group or asyncio.get_running_loop()).create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task

    def cancel(self) -> None:
        """Cancel all. Some may end only later."""
        for task in tuple(self):
            task.cancel()

    async def end(self) -> None:
        """Cancel all, and return when they have ended."""
        self.cancel()
        await asyncio.gather(*self, return_exceptions=True)
