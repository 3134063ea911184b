"""State gives way to what cannot wait, and never for ever."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.net.traffic import STATE_SHARE, Priority
from swarmnet.testing.doubles import run_virtual

pytestmark = pytest.mark.virtual_time

PIECE = 2 << 20


async def waited(priority: Priority) -> float:
    began = asyncio.get_running_loop().time()
    await priority.turn(PIECE)
    return asyncio.get_running_loop().time() - began


async def test_nobody_waits_for_nothing() -> None:
    priority = Priority()
    with priority.urgent():
        pass
    assert await waited(priority) == 0.0


def test_beside_what_is_urgent_state_has_a_tenth_of_the_line_however_many_fetch_it() -> None:
    async def story() -> float:
        priority = Priority()
        priority.bytes_per_s = 10 * PIECE
        with priority.urgent():
            return max(await asyncio.gather(*(waited(priority) for _ in range(11))))

    assert abs(run_virtual(story()) - 10.0) < 1e-9, "the first one is there at once, the others a second apart"


def test_state_goes_on_when_the_line_rests() -> None:
    async def story() -> float:
        priority = Priority()
        priority.bytes_per_s = PIECE

        async def send(seconds: float) -> None:
            with priority.urgent():
                await asyncio.sleep(seconds)

        async with asyncio.TaskGroup() as group:
            for seconds in (0.1, 0.4, 0.2):
                group.create_task(send(seconds))
            await asyncio.sleep(0)
            return sum([await waited(priority) for _ in range(5)])

    assert abs(run_virtual(story()) - 0.4) < 1e-9


def test_what_the_idle_line_carries_is_not_counted() -> None:
    async def story() -> float:
        priority = Priority()
        priority.bytes_per_s = PIECE
        for _ in range(100):
            await waited(priority)
        with priority.urgent():
            return await waited(priority)

    assert run_virtual(story()) == 0.0


def test_whoever_leaves_the_queue_holds_up_nobody() -> None:
    async def story() -> float:
        priority = Priority()
        priority.bytes_per_s = PIECE
        with priority.urgent():
            await waited(priority)
            left = [asyncio.create_task(waited(priority)) for _ in range(3)]
            await asyncio.sleep(1.0)
            for task in left:
                task.cancel()
            return await waited(priority)

    assert abs(run_virtual(story()) - (1.0 / STATE_SHARE - 1.0)) < 1e-9
