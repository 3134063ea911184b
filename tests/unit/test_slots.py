"""Slots: never more than their number, work in line before calls at the door, and nobody who left keeps one."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.pipeline.slots import Slots

pytestmark = pytest.mark.virtual_time


async def test_a_call_at_the_door_enters_when_a_slot_is_given_back() -> None:
    slots = Slots(1)
    assert slots.try_take()
    async with asyncio.TaskGroup() as group:
        entering = group.create_task(slots.enter(patience_s=1.0))
        await asyncio.sleep(0.5)
        assert not entering.done()
        slots.give()
    assert entering.result()
    assert slots.taken == 1


async def test_a_slot_that_is_one_too_many_goes_to_nobody() -> None:
    slots = Slots(2)
    assert slots.try_take() and slots.try_take()
    slots.resize(1)
    async with asyncio.TaskGroup() as group:
        entering = group.create_task(slots.enter(patience_s=1.0))
        await asyncio.sleep(0.5)
        slots.give()
    assert not entering.result() and (slots.taken, slots.size) == (1, 1)
    slots.give()
    assert slots.try_take()


async def test_patience_at_the_door_ends() -> None:
    slots = Slots(1)
    assert slots.try_take()
    assert not await slots.enter(patience_s=0.5)
    assert asyncio.get_running_loop().time() == 0.5
    slots.give()
    assert slots.taken == 0
    assert slots.try_take(), "who gave up must not stand in the way"


async def test_the_door_is_bounded() -> None:
    slots = Slots(2)
    assert slots.try_take() and slots.try_take()
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(slots.enter(patience_s=5.0)) for _ in range(2)]
        await asyncio.sleep(0)
        assert slots.crowded
        assert not await slots.enter(patience_s=5.0)
        assert asyncio.get_running_loop().time() == 0.0, "turned away at once"
        slots.give()
        slots.give()
    assert all(task.result() for task in waiting)


async def test_work_in_line_goes_before_calls_at_the_door() -> None:
    slots, order = Slots(1), []

    async def enter() -> None:
        assert await slots.enter(patience_s=5.0)
        order.append("door")
        slots.give()

    async def take() -> None:
        await slots.take()
        order.append("line")
        slots.give()

    assert slots.try_take()
    async with asyncio.TaskGroup() as group:
        group.create_task(enter())
        await asyncio.sleep(0)
        group.create_task(take())
        await asyncio.sleep(0)
        slots.give()
    assert order == ["line", "door"]
    assert slots.taken == 0


async def test_a_caller_that_leaves_as_its_turn_comes_passes_the_slot_on() -> None:
    slots = Slots(2)
    assert slots.try_take() and slots.try_take()
    leaving = asyncio.ensure_future(slots.enter(patience_s=5.0))
    staying = asyncio.ensure_future(slots.enter(patience_s=5.0))
    await asyncio.sleep(0)
    slots.give()
    leaving.cancel()
    await asyncio.wait([leaving])
    assert leaving.cancelled()
    assert await staying
    assert slots.taken == 2
