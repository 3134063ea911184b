"""One stage of many replicas, with the bounds of production: who is in sight and who counts are few of them."""

from __future__ import annotations

import asyncio

import pytest
from strike import until

from swarmnet.messages import MAX_COUNTING
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm


@pytest.mark.parametrize("replicas", [40, pytest.param(200, marks=(pytest.mark.long, pytest.mark.timeout(1200)))])
def test_the_leader_and_two_who_count_die_and_the_step_ends_in_its_time(replicas: int) -> None:
    """Sums and weights are held against those of one process; nobody else is evicted."""
    killed: list[Node] = []

    async def script(swarm: VirtualSwarm) -> None:
        members = [node.peer.replicas[0].member for node in swarm.nodes]
        await until(lambda: any(member.version for member in members), every_s=0.05)
        await asyncio.sleep(0.5)
        leader = next(node for node in swarm.nodes if node.peer.replicas[0].member.oldest.leader is not None)
        roster = leader.peer.replicas[0].member.membership.roster(0)
        assert len(roster) <= MAX_COUNTING < replicas and leader.peer.replicas[0].member.view.sparse
        killed.extend([leader, *[node for node in swarm.nodes if node.peer_id in roster and node is not leader][:2]])
        for node in killed:
            swarm.kill(node)

    plan = Plan(replicas=replicas, stages=1, microbatches=2 * replicas, steps=2, forward_s=0.2, between_reads_s=2.0)
    swarm = VirtualSwarm(plan, 1)
    swarm.run(until_s=60.0, script=script)
    applied = {peer for _, peer, event, fields in swarm.events if event == "applied" and fields["version"] == 2}
    assert len(applied) == replicas - len(killed)
    evicted = {fields["peer"] for _, _, event, fields in swarm.events if event == "evicted"}
    assert evicted <= {node.peer_id for node in killed}
    # A heartbeat goes to the few of `step.graph`, and not to all.
    assert swarm.network.sent["Heartbeat"] < replicas * replicas * swarm.loop.time()
