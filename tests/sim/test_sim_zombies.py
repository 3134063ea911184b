"""Processes that are stopped and come back after the others have gone on without them.

A stopped owner, a stopped member of a round, a stopped leader: whoever comes back finds its generation closed, its
round over or another leader in its place, and nothing it does then counts twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from further import further
from strike import leader_of, watched

from swarmnet.manifest.schema import Protocol
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm

STEP = 1
LONG_S = Protocol().long_silence_s
PLAN = Plan(stages=2, replicas=3, microbatches=6, steps=5, classes=2)
PAIRS = Plan(stages=2, replicas=2, microbatches=6, steps=5, classes=2)


def member(node: Node):
    return node.peer.replicas[1].member


POINTS: dict[str, Callable[[Node], bool]] = {
    "granted": lambda node: bool(member(node).oldest.claims.assigned - member(node).oldest.claims.accumulated),
    "summed": lambda node: bool(member(node).oldest.claims.accumulated),
    "frozen_in_round": lambda node: member(node).oldest.part.exchange is not None,
    "holding_the_sum": lambda node: member(node).oldest.finished is not None,
}


async def stop_at(swarm: VirtualSwarm, point: str, *, leader: bool) -> Node:
    """Stop the first replica of stage 1 that gets there in step STEP."""
    while True:
        keeps = leader_of(swarm, 1)
        for node in swarm.replicas(1):
            if member(node).version == STEP and (node is keeps) == leader and POINTS[point](node):
                swarm.stop(node)
                return node
        swarm.check_now()
        await asyncio.sleep(0.001)


async def version_reached(swarm: VirtualSwarm, version: int, *, but: Node, within_s: float) -> float:
    """Seconds until every other replica of stage 1 has that version."""
    began = swarm.loop.time()
    others = [node for node in swarm.replicas(1) if node is not but]
    while min(member(node).version for node in others) < version:
        assert swarm.loop.time() < began + within_s, swarm.describe()
        swarm.check_now()
        await asyncio.sleep(0.01)
    return swarm.loop.time() - began


@pytest.mark.parametrize("after", ["index_executed_again", "two_steps", *further("step_applied")])
@pytest.mark.parametrize("leader", [False, True], ids=["member", "leader"])
@pytest.mark.parametrize("point", POINTS)
def test_stopped_and_continued(point: str, leader: bool, after: str) -> None:
    swarm = watched(PLAN)

    async def script(swarm: VirtualSwarm) -> None:
        zombie = await stop_at(swarm, point, leader=leader)
        if after == "index_executed_again":
            await asyncio.sleep(4.0)  # beyond the silence limit: the others have begun to do its share
        else:
            await version_reached(swarm, STEP + (1 if after == "step_applied" else 2), but=zombie, within_s=LONG_S)
        swarm.resume(zombie)

    swarm.run(until_s=120.0, script=script)
    assert swarm.checker.forks == 0


@pytest.mark.parametrize("leader", [False, True], ids=["member", "leader"])
@pytest.mark.parametrize("point", ["granted", "summed"])
def test_with_a_majority_the_others_go_on_within_the_silence_limit(point: str, leader: bool) -> None:
    swarm = watched(PLAN)

    async def script(swarm: VirtualSwarm) -> None:
        zombie = await stop_at(swarm, point, leader=leader)
        assert await version_reached(swarm, STEP + 1, but=zombie, within_s=LONG_S) < 5.0
        swarm.resume(zombie)

    swarm.run(until_s=120.0, script=script)
    assert swarm.checker.forks == 0


@pytest.mark.parametrize("leader", [False, True], ids=["member", "leader"])
@pytest.mark.parametrize("point", POINTS)
def test_of_two_replicas_the_other_waits_for_the_long_silence_and_nothing_forks(point: str, leader: bool) -> None:
    swarm = watched(PAIRS)

    async def script(swarm: VirtualSwarm) -> None:
        zombie = await stop_at(swarm, point, leader=leader)
        await asyncio.sleep(0.8 * LONG_S)
        (other,) = (node for node in swarm.replicas(1) if node is not zombie)
        # With its sum committed, the other one goes on: whoever has not begun the next step is no member of it.
        assert point == "holding_the_sum" or member(other).version == STEP, "silence of the only other is not death"
        swarm.resume(zombie)

    swarm.run(until_s=120.0, script=script)
    assert swarm.checker.forks == 0


@pytest.mark.parametrize("leader", [False, True], ids=["member", "leader"])
@pytest.mark.parametrize("point", POINTS)
def test_of_two_replicas_the_other_goes_on_after_the_long_silence(point: str, leader: bool) -> None:
    swarm = watched(PAIRS)

    async def script(swarm: VirtualSwarm) -> None:
        zombie = await stop_at(swarm, point, leader=leader)
        await version_reached(swarm, STEP + 1, but=zombie, within_s=3 * LONG_S)
        swarm.resume(zombie)

    swarm.run(until_s=160.0, script=script)


def test_a_replica_that_is_stopped_again_and_again_delays_but_never_breaks_a_step() -> None:
    swarm = watched(Plan(stages=2, replicas=3, microbatches=6, steps=12, forward_s=0.05, classes=2))

    async def script(swarm: VirtualSwarm) -> None:
        node = swarm.replicas(1)[0]
        while not swarm.done:
            swarm.stop(node)
            await asyncio.sleep(4.0)
            swarm.resume(node)
            await asyncio.sleep(1.5)

    swarm.run(until_s=200.0, script=script)
