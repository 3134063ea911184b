"""State gives way to what cannot wait, and never for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from swarmnet.net.traffic import MOST_WAIT_S, Priority
from swarmnet.simulate.clock import VirtualLoop


def play(story: Coroutine[Any, Any, float]) -> float:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(story)


async def waited(priority: Priority) -> float:
    began = asyncio.get_running_loop().time()
    await priority.turn()
    return asyncio.get_running_loop().time() - began


def test_nobody_waits_for_nothing() -> None:
    async def story() -> float:
        priority = Priority()
        with priority.urgent():
            pass
        return await waited(priority)

    assert play(story()) == 0.0


def test_what_can_wait_waits_until_the_last_urgent_one_is_through() -> None:
    async def story() -> float:
        priority = Priority()

        async def send(seconds: float) -> None:
            with priority.urgent():
                await asyncio.sleep(seconds)

        async with asyncio.TaskGroup() as group:
            for seconds in (0.1, 0.4, 0.2):
                group.create_task(send(seconds))
            await asyncio.sleep(0)
            return await waited(priority)

    assert abs(play(story()) - 0.4) < 1e-9


def test_a_line_that_never_rests_lets_a_trickle_through() -> None:
    async def story() -> float:
        priority = Priority()
        with priority.urgent():
            return await waited(priority) + await waited(priority)

    assert play(story()) == 2 * MOST_WAIT_S
