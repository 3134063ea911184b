"""Stages of which a replica hears a few others only: same weights, and failures are noticed as by all-to-all."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from further import further
from strike import until

from swarmnet import messages
from swarmnet.ids import PeerId
from swarmnet.messages import Committed, Control, Heartbeat
from swarmnet.step import graph, membership
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm

REPLICAS = 16

Fault = Callable[[VirtualSwarm, Node, list[Node]], list[Node]]


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large as a test can simulate: of 16 replicas 7 count, and more than 8 do not hear each other."""
    monkeypatch.setattr(graph, "DENSE", 8)
    monkeypatch.setattr(messages, "MAX_COUNTING", 7)
    monkeypatch.setattr(membership, "_PRESUMED", 5)


def leader_of(swarm: VirtualSwarm, stage: int) -> Node:
    return next(node for node in swarm.replicas(stage) if node.peer.replicas[stage].member.oldest.leader is not None)


def counting(swarm: VirtualSwarm, stage: int) -> list[Node]:
    roster = swarm.replicas(stage)[0].peer.replicas[stage].member.membership.roster(stage)
    return [node for node in swarm.replicas(stage) if node.peer_id in roster]


def member(swarm: VirtualSwarm, leader: Node, others: list[Node]) -> list[Node]:
    return [others[3]]


def leader(swarm: VirtualSwarm, leader: Node, others: list[Node]) -> list[Node]:
    return [leader]


def leader_and_successor(swarm: VirtualSwarm, leader: Node, others: list[Node]) -> list[Node]:
    order = leader.peer.replicas[0].member.oldest.election.order(swarm.loop.time())
    return [leader, next(node for node in others if node.peer_id == order[1])]


def half_of_those_who_count(swarm: VirtualSwarm, leader: Node, others: list[Node]) -> list[Node]:
    return [node for node in counting(swarm, 0) if node is not leader][:3]


def swarm_of(
    script: Callable[[VirtualSwarm], Awaitable[None]] | None, *, stages: int = 2, steps: int = 3
) -> VirtualSwarm:
    swarm = VirtualSwarm(
        Plan(stages=stages, replicas=REPLICAS, microbatches=2 * REPLICAS, steps=steps, forward_s=0.2), 1
    )
    swarm.run(until_s=300.0, script=script)  # checks every commit and the final weights against the reference
    return swarm


async def in_step_1(swarm: VirtualSwarm) -> tuple[Node, list[Node]]:
    await until(
        lambda: any(replica.member.version for node in swarm.nodes for replica in node.peer.replicas.values()),
        every_s=0.05,
    )
    await asyncio.sleep(1.0)
    found = leader_of(swarm, 0)
    return found, [node for node in swarm.replicas(0) if node is not found]


@pytest.mark.parametrize("fault", [*further(member, leader), leader_and_successor, half_of_those_who_count])
def test_the_death_of_some_is_noticed_at_once(fault: Fault) -> None:
    killed: list[Node] = []
    at: list[float] = []

    async def script(swarm: VirtualSwarm) -> None:
        killed.extend(fault(swarm, *await in_step_1(swarm)))
        at.append(swarm.loop.time())
        for node in killed:
            swarm.kill(node)

    swarm = swarm_of(script)
    events = [(when - at[0], event, fields) for when, _, event, fields in swarm.events if when >= at[0]]
    noticed = [after for after, event, fields in events if event in ("evicted", "leader") and fields["stage"] == 0]
    assert min(noticed) < 0.5


def test_a_replica_has_few_neighbours_and_the_leader_all() -> None:
    seen: list[tuple[int, int]] = []

    async def script(swarm: VirtualSwarm) -> None:
        found, others = await in_step_1(swarm)
        heard = [sum(1 for _ in node.peer.replicas[0].member.view.mates()) for node in [found, *others]]
        mates = {node.peer_id for node in swarm.replicas(0)}
        chosen = [len(mates & node.peer.replicas[0].member.heartbeats.graph.chosen) for node in others]
        seen.append((heard[0], max(chosen)))

    swarm = swarm_of(script)
    leader_hears, most = seen[0]
    assert leader_hears == REPLICAS - 1 and most < REPLICAS - 1
    # All to all each would send 31 heartbeats twice a second.
    assert swarm.network.sent["Heartbeat"] < 31 * swarm.loop.time() * 2 * REPLICAS


def test_a_stopped_member_and_a_stopped_leader_are_missed() -> None:
    at: list[float] = []

    async def script(swarm: VirtualSwarm) -> None:
        found, others = await in_step_1(swarm)
        for node in (found, others[3]):
            swarm.stop(node)
        at.append(swarm.loop.time())
        await asyncio.sleep(20.0)
        for node in (found, others[3]):
            swarm.resume(node)

    swarm = swarm_of(script)
    stands = [when for when, _, event, fields in swarm.events if event == "leader" and fields["stage"] == 0]
    assert min(when for when in stands if when > at[0]) - at[0] <= 3.0 + 3.0


def test_a_cut_through_a_large_stage_heals() -> None:
    async def script(swarm: VirtualSwarm) -> None:
        _, others = await in_step_1(swarm)
        away = others[:5]
        swarm.partition(away, [node for node in swarm.nodes if node not in away])
        await asyncio.sleep(8.0)
        swarm.heal()

    assert swarm_of(script).checker.forks == 0


def test_a_replica_gets_each_commit_about_once() -> None:
    """Whoever lacks one asks one neighbour for it, though all know it. Those of the first step are not counted: nobody
    knows who counts far away, so the word of many is needed."""
    copies: Counter[tuple[PeerId, int, int]] = Counter()

    def count(sender: PeerId, receiver: PeerId, message: Control) -> None:
        told = (*message.commits, *message.last_commits) if isinstance(message, Heartbeat) else ()
        for commit in (message.commit,) if isinstance(message, Committed) else told:
            copies[receiver, commit.stage, commit.step] += sender != receiver

    async def script(swarm: VirtualSwarm) -> None:
        swarm.network.intercepts.append(count)

    swarm_of(script, stages=3)
    later = [number for (_, _, step), number in copies.items() if step]
    assert statistics.mean(later) <= 2.0 and statistics.median(later) == 1


def test_a_commit_whose_messages_are_lost_comes_all_the_same() -> None:
    """No push of a commit reaches anybody but the leader itself: all have to ask."""

    async def script(swarm: VirtualSwarm) -> None:
        swarm.network.intercepts.append(lambda sender, receiver, message: not isinstance(message, Committed))

    assert swarm_of(script, stages=3).loop.time() < 60.0
