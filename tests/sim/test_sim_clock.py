"""The simulator's own promises: time jumps, stopped processes hold still, killed ones never act again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from swarmnet.ids import PeerId
from swarmnet.testing.clock import SimulatedProcess, VirtualLoop
from swarmnet.testing.doubles import FakeService
from swarmnet.testing.links import Links
from swarmnet.testing.network import MemoryNetwork
from tests.contracts.transport_contract import CHECKS, End, Pair


@pytest.fixture
def loop():
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    yield loop
    asyncio.set_event_loop(None)
    loop.close()


async def count(into: list[tuple[str, float]], name: str, every_s: float = 1.0) -> None:
    for _ in range(5):
        await asyncio.sleep(every_s)
        into.append((name, asyncio.get_running_loop().time()))


def test_an_hour_takes_no_time_and_a_thousand_sleepers_wake_in_order(loop: VirtualLoop) -> None:
    woke: list[int] = []

    async def sleeper(number: int) -> None:
        await asyncio.sleep(3600.0 - number)
        woke.append(number)

    async def everybody() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(1000):
                group.create_task(sleeper(number))

    loop.run_until_complete(everybody())
    assert loop.time() == 3600.0 and woke == list(range(999, -1, -1))


def test_waiting_for_nothing_is_a_deadlock(loop: VirtualLoop) -> None:
    with pytest.raises(RuntimeError, match="deadlock"):
        loop.run_until_complete(asyncio.Event().wait())


def test_a_stopped_process_holds_still_and_catches_up_in_order(loop: VirtualLoop) -> None:
    seen: list[tuple[str, float]] = []
    process = SimulatedProcess("a")

    async def script() -> None:
        loop.start(process, count(seen, "a"))
        await asyncio.sleep(1.5)
        loop.stop_process(process)
        await asyncio.sleep(10.0)
        assert seen == [("a", 1.0)]
        loop.continue_process(process)
        await asyncio.sleep(10.0)

    loop.run_until_complete(script())
    assert [at for _, at in seen] == [1.0, 11.5, 12.5, 13.5, 14.5]


def test_what_piled_up_while_stopped_is_released_in_the_order_of_its_time(loop: VirtualLoop) -> None:
    order: list[int] = []
    process = SimulatedProcess("a")

    async def script() -> None:
        for number in (3, 1, 2):
            loop.call_later(number, order.append, number, context=process.context)
        loop.stop_process(process)
        await asyncio.sleep(5.0)
        loop.continue_process(process)
        await asyncio.sleep(0.1)

    loop.run_until_complete(script())
    assert order == [1, 2, 3]


def test_killing_runs_no_finally_and_leaves_the_others_alone(loop: VirtualLoop) -> None:
    ended: list[str] = []
    seen: list[tuple[str, float]] = []
    victim, other = SimulatedProcess("victim"), SimulatedProcess("other")

    async def careful() -> None:
        try:
            await asyncio.sleep(100.0)
        finally:
            ended.append("cleaned up")

    async def script() -> None:
        loop.start(victim, careful())
        loop.start(other, count(seen, "other"))
        await asyncio.sleep(1.5)
        loop.kill_process(victim)
        await asyncio.sleep(200.0)
        assert ended == []
        loop.bury_process(victim)  # only the end of the whole simulation does this
        await asyncio.sleep(0.0)

    loop.run_until_complete(script())
    assert len(seen) == 5


def test_tasks_of_tasks_belong_to_the_process(loop: VirtualLoop) -> None:
    seen: list[tuple[str, float]] = []
    process = SimulatedProcess("a")

    async def parent() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(count(seen, "child"))

    async def script() -> None:
        loop.start(process, parent())
        await asyncio.sleep(2.5)
        loop.kill_process(process)
        await asyncio.sleep(10.0)

    loop.run_until_complete(script())
    assert len(seen) == 2
    loop.bury_process(process)
    loop.run_until_complete(asyncio.sleep(0.1))


# ------------------------------------------------------------ the memory network keeps the transports' contract


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_memory_network_is_a_transport(loop: VirtualLoop, check: Callable[[Pair], Awaitable[None]]) -> None:
    network = MemoryNetwork(loop, Links(), seed=1)
    ends = []
    processes = {name: SimulatedProcess(name) for name in ("a", "b")}
    for name, process in processes.items():
        service = FakeService()
        network.attach(PeerId(name), process, service)
        ends.append(End(PeerId(name), network.transport(PeerId(name)), service))

    async def kill_b() -> None:
        network.kill(PeerId("b"))

    loop.run_until_complete(check(Pair(*ends, kill_b)))
    network.cut_off()
    for process in processes.values():
        loop.bury_process(process)
    loop.run_until_complete(asyncio.sleep(0.1))


def test_one_way_messages_keep_their_order_unless_they_are_late(loop: VirtualLoop) -> None:
    from tests.contracts.transport_contract import tells_arrive_in_order

    test_memory_network_is_a_transport(loop, tells_arrive_in_order)
