"""Peers that pause: others get their microbatches, they follow the state, and nothing stands still for them.

Every run ends with the weights of the single process, as all simulations do.
"""

# ruff: noqa: ASYNC110  (on virtual time, looking again in two milliseconds costs nothing)

from __future__ import annotations

import asyncio

from strike import watched
from test_sim_drain import Farewells, at_step, executions, indexes

from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm


def counted(node: Node) -> int:
    return sum(replica.execution.executions for replica in node.peer.replicas.values())


def pause(swarm: VirtualSwarm, node: Node) -> asyncio.Task[None]:
    return swarm.loop.start(node.process, node.peer.hold())


def test_a_paused_replica_computes_nothing_and_follows_until_it_is_resumed() -> None:
    plan = Plan(stages=2, replicas=2, microbatches=8, steps=16)
    swarm = watched(plan)

    async def script(swarm: VirtualSwarm) -> None:
        node = swarm.replicas(1)[0]
        await at_step(swarm, 3)
        held = pause(swarm, node)
        await at_step(swarm, 5)  # what it had is finished
        before = counted(node)
        await at_step(swarm, 10)
        assert counted(node) == before
        mate = swarm.replicas(0)[0]
        record = next(r for r in await mate.peer._directory.records() if r.peer == node.peer_id)
        assert record.paused and record.stages[0].draining and record.stages[0].version >= 6
        held.cancel()
        await at_step(swarm, 14)
        assert counted(node) > before and not node.peer.paused

    swarm.run(until_s=200.0, script=script)
    assert executions(swarm) == indexes(plan), "a pause made somebody compute again"
    said = [fields for *_, event, fields in swarm.events if event == "paused"]
    assert said == [{}], "of a moment's being alone at a new version nobody has to hear"
    assert not swarm.counts["evicted"]


def test_of_all_that_pause_one_serves_on_and_says_so() -> None:
    swarm = watched(Plan(stages=2, replicas=2, microbatches=6, steps=15))

    async def script(swarm: VirtualSwarm) -> None:
        await at_step(swarm, 2)
        nodes = swarm.replicas(1)
        for node in nodes:
            pause(swarm, node)
        await at_step(swarm, 9)
        before = [counted(node) for node in nodes]
        await at_step(swarm, 13)
        lowest, other = (counted(node) - was for node, was in zip(nodes, before, strict=True))
        assert lowest == 24 and other == 0
        said = [fields for _, peer, event, fields in swarm.events if event == "paused" and peer == nodes[0].peer_id]
        assert said[-1] == {"serves_on": [1]}

    swarm.run(until_s=200.0, script=script)


def test_who_leaves_need_not_wait_for_more_than_a_paused_mate() -> None:
    swarm = watched(Plan(stages=2, replicas=2, microbatches=6, steps=24))
    farewells = Farewells(swarm)

    async def script(swarm: VirtualSwarm) -> None:
        await at_step(swarm, 2)
        leaver, mate = swarm.replicas(0)
        pause(swarm, mate)
        await asyncio.sleep(3.0)  # its record says so
        farewells.ask(leaver)
        while leaver.up:
            await asyncio.sleep(0.01)
        assert farewells.seconds(leaver) < 5.0
        assert farewells.gone[leaver.peer_id][1] == "nothing here is needed any more"

    swarm.run(until_s=200.0, script=script)
