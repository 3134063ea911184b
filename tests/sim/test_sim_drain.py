"""Peers that leave as asked, at each point of a step: nothing is lost, and nothing is computed a second time.

Every run ends with the weights of the single process, as all simulations do. A peer that may go is gone at once, as a
process is that has exited.
"""

# ruff: noqa: ASYNC110  (on virtual time, looking again in two milliseconds costs nothing)

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from further import further
from strike import check_always, soon, until, watched
from test_sim_scenarios import PLAN, POINTS, Trap

from swarmnet.testing.network import Links
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Enough, Node, VirtualSwarm


@dataclass
class Farewells:
    """Who has left, when it was asked, when it went, and what it said."""

    swarm: VirtualSwarm
    asked: dict[str, float] = field(default_factory=dict)
    gone: dict[str, tuple[float, str]] = field(default_factory=dict)

    def ask(self, node: Node, *, drain_s: float = 60.0) -> None:
        """SIGTERM."""
        self.asked[node.peer_id] = self.swarm.loop.time()
        self.swarm.loop.start(node.process, self._leave(node, drain_s))

    async def _leave(self, node: Node, drain_s: float) -> None:
        words = await node.peer.drain(drain_s)
        await node.peer.leave()
        self.gone[node.peer_id] = self.swarm.loop.time(), words
        soon(self.swarm, lambda: self.swarm.kill(node))

    def seconds(self, node: Node) -> float:
        return self.gone[node.peer_id][0] - self.asked[node.peer_id]

    def said(self, node: Node) -> list[str]:
        return [
            str(fields["left"])
            for _, peer, event, fields in self.swarm.events
            if event == "draining" and peer == node.peer_id
        ]


def executions(swarm: VirtualSwarm) -> int:
    """Training forwards of everybody who ever was."""
    return sum(replica.execution.executions for node in swarm.nodes for replica in node.peer.replicas.values())


def indexes(plan: Plan) -> int:
    return plan.stages * plan.steps * plan.microbatches


async def at_step(swarm: VirtualSwarm, step: int) -> None:
    """Until everybody has reached that version, at the latest moment at which nothing of it has begun."""
    while not all(replica.member.version >= step for node in swarm.nodes for replica in node.peer.replicas.values()):
        swarm.check_now()
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("leader", [False, True], ids=["member", "leader"])
@pytest.mark.parametrize("point", POINTS)
def test_leaving_at(point: str, leader: bool) -> None:
    stage = (list(POINTS).index(point) + leader) % 3
    swarm = watched(PLAN)
    farewells = Farewells(swarm)
    left: list[Node] = []

    def strike(node: Node) -> None:
        left.append(node)
        farewells.ask(node)

    trap = Trap(swarm, stage, point, leader=leader, strike=strike)
    swarm.run(until_s=60.0, script=trap.watch)
    assert farewells.seconds(left[0]) < 3.0
    assert farewells.gone[left[0].peer_id][1] == "nothing here is needed any more"
    assert executions(swarm) == indexes(PLAN), "a farewell made somebody compute again"
    assert swarm.counts["evicted"] <= 1 and swarm.counts["evicted_me"] == 0


@pytest.mark.parametrize("trainers", [0, 1], ids=["on_orders", "fed"])
def test_one_after_the_other_until_each_stage_has_one(trainers: int) -> None:
    plan = Plan(stages=3, replicas=3, microbatches=6, steps=8, trainers=trainers)
    swarm = watched(plan)
    farewells = Farewells(swarm)

    async def script(swarm: VirtualSwarm) -> None:
        for step, node in enumerate([node for node in swarm.nodes if not node.peer_id.endswith((".0", ".3", ".6"))]):
            while swarm.replicas(0)[0].peer.replicas[0].member.version < step:
                await asyncio.sleep(0.01)
            farewells.ask(node)
        await check_always(swarm)

    swarm.run(until_s=200.0, script=script)
    assert len(farewells.gone) == 6
    assert executions(swarm) == indexes(plan)


def test_a_leaving_peer_begins_nothing_new() -> None:
    swarm = watched(Plan(stages=2, replicas=2, microbatches=12, steps=4, slots=2))
    farewells = Farewells(swarm)
    begun: list[int] = []

    async def script(swarm: VirtualSwarm) -> None:
        node = swarm.replicas(1)[0]
        await until(lambda: node.peer.replicas and node.peer.replicas[1].execution.num_tasks == 2)
        farewells.ask(node)
        await asyncio.sleep(0)
        execution = node.peer.replicas[1].execution
        tasks = [task for each in execution.steps.values() for task in each.by_index.values()]
        before = execution.executions + sum(not task.computing for task in tasks)
        while node.up:
            begun.append(execution.executions - before)
            await asyncio.sleep(0.002)
        assert any("microbatch" in words and "left, step 0" in words for words in farewells.said(node))

    swarm.run(until_s=60.0, script=script)
    assert begun and max(begun) <= 0


def test_the_only_replica_serves_on_until_another_has_its_state() -> None:
    plan = Plan(stages=2, replicas=1, microbatches=6, steps=30)
    swarm = watched(plan)
    farewells = Farewells(swarm)

    async def script(swarm: VirtualSwarm) -> None:
        node = swarm.replicas(1)[0]
        await at_step(swarm, 2)
        farewells.ask(node, drain_s=500.0)
        await at_step(swarm, 4)  # the run goes on meanwhile
        assert node.up
        assert farewells.said(node) == ["no other replica has the state of stage 1: waiting for one, 500 s at most"]
        newcomer = swarm.add([1])
        while node.up:
            await asyncio.sleep(0.01)
        assert newcomer.peer.replicas[1].member.synced
        await check_always(swarm)

    swarm.run(until_s=200.0, script=script)
    assert executions(swarm) == indexes(plan)


def test_the_only_replica_leaves_when_its_time_is_up() -> None:
    swarm = watched(Plan(stages=2, replicas=1, microbatches=6, steps=60))
    farewells = Farewells(swarm)

    async def script(swarm: VirtualSwarm) -> None:
        node = swarm.replicas(1)[0]
        await at_step(swarm, 2)
        farewells.ask(node, drain_s=4.0)
        while node.up:
            await asyncio.sleep(0.01)
        assert farewells.seconds(node) == pytest.approx(4.0, abs=0.2)
        assert farewells.gone[node.peer_id][1].startswith("4 s have passed, going all the same: no other replica")
        raise Enough

    swarm.run(until_s=60.0, script=script)


@pytest.mark.parametrize(("stages", "seed"), [(3, 11), (5, 1), *further((3, 29), (3, 118), (5, 2))])
def test_when_everybody_leaves_nobody_waits_and_all_stages_stand_at_the_same_version(stages: int, seed: int) -> None:
    """The first three seeds leave stages apart when nobody waits to apply what it holds (`SETTLE_S`)."""
    swarm = watched(Plan(stages=stages, replicas=2, microbatches=6, steps=20))
    farewells, rng = Farewells(swarm), random.Random(seed)

    async def script(swarm: VirtualSwarm) -> None:
        await at_step(swarm, 3)
        await asyncio.sleep(0.4 * rng.random())
        everybody = list(swarm.nodes)
        for node in everybody:
            farewells.ask(node)
            await asyncio.sleep(0.05 * rng.random())
        while any(node.up for node in everybody):
            await asyncio.sleep(0.01)
        assert max(farewells.seconds(node) for node in everybody) < 1.5
        newest = [
            max(node.peer.replicas[stage].member.version for node in everybody if stage in node.stages)
            for stage in range(stages)
        ]
        assert len(set(newest)) == 1, newest
        raise Enough

    swarm.run(until_s=60.0, script=script)


def test_of_two_that_leave_together_the_last_one_stays() -> None:
    swarm = watched(Plan(stages=2, replicas=2, microbatches=6, steps=40), 3)
    farewells = Farewells(swarm)

    async def script(swarm: VirtualSwarm) -> None:
        await at_step(swarm, 2)
        first, second = swarm.replicas(0)
        farewells.ask(first, drain_s=500.0)
        farewells.ask(second, drain_s=500.0)
        while first.up and second.up:
            await asyncio.sleep(0.01)
        await asyncio.sleep(3.0)
        assert [first.up, second.up] == [True, False]
        swarm.add([0])
        while first.up:
            await asyncio.sleep(0.01)
        await check_always(swarm)

    swarm.run(until_s=200.0, script=script)
    assert executions(swarm) == indexes(swarm.plan)


def test_a_newcomer_without_state_leaves_at_once() -> None:
    swarm = watched(Plan(stages=2, replicas=2, microbatches=6, steps=6))
    farewells = Farewells(swarm)

    async def script(swarm: VirtualSwarm) -> None:
        await at_step(swarm, 2)
        node = swarm.add([0])
        await until(lambda: node.peer.replicas, every_s=0)
        farewells.ask(node)
        while node.up:
            await asyncio.sleep(0.001)
        assert farewells.seconds(node) < 0.2  # one look at what it holds
        await check_always(swarm)

    swarm.run(until_s=60.0, script=script)
    assert executions(swarm) == indexes(swarm.plan)


@pytest.mark.parametrize("seed", [0, 1, *further(*range(2, 8))])
def test_peers_that_come_and_leave_all_the_time_on_a_bad_network(seed: int) -> None:
    """Whoever leaves is followed by a newcomer of another name. No crash: each index is executed about once."""
    plan = Plan(
        stages=3,
        replicas=2,
        microbatches=8,
        steps=12,
        trainers=1 + seed % 2,
        links=Links(loss=0.05, double=0.05, late=0.05) if seed % 4 else Links(),
    )
    swarm = watched(plan, seed)
    farewells, rng = Farewells(swarm), random.Random(seed)

    async def script(swarm: VirtualSwarm) -> None:
        while not any(step == plan.steps - 1 for _, step in swarm.checker.committed):
            await asyncio.sleep(0.5 * rng.random())
            swarm.check_now()
            stage = rng.randrange(plan.stages)
            staying = [node for node in swarm.replicas(stage) if node.peer_id not in farewells.asked]
            if len(staying) >= 2:
                farewells.ask(rng.choice(staying))
            elif len(swarm.replicas(stage)) < 3:
                swarm.add([stage], f"late.{len(swarm.nodes)}")

    swarm.run(until_s=120.0, script=script)
    assert len(farewells.gone) >= 2
    assert not any("going all the same" in words for _, words in farewells.gone.values())
    if not seed % 4 and plan.trainers == 1:
        assert executions(swarm) == indexes(plan)
