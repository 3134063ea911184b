"""Members that reach each other through a relay alone: they contribute and receive, and no sum crosses the relay."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.ids import PeerId
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

PLAN = Plan(stages=1, replicas=4, microbatches=8, steps=20, forward_s=0.01, padding=250_000, padding_bytes=4.0)
SUM_BYTES = 1e6


def relayed_bytes(hidden: tuple[int, ...]) -> float:
    """Bytes of rounds that crossed the relay, per step. hidden: places of members."""
    swarm = VirtualSwarm(PLAN, 0)

    async def script(swarm: VirtualSwarm) -> None:
        replicas = [node.peer_id for node in swarm.replicas(0)]
        for at in hidden:
            for other in hidden:
                if at < other:
                    swarm.network.lines.relay_by(replicas[at], replicas[other], PeerId("relay"))
        await asyncio.sleep(0.0)

    swarm.run(until_s=300, script=script)  # checks every commit and the final weights against the reference
    return swarm.network.lines.relayed_bytes / PLAN.steps


@pytest.mark.parametrize("hidden", [(2, 3), (1, 2, 3)])
def test_nothing_of_a_round_crosses_a_relay(hidden: tuple[int, ...]) -> None:
    # The first round may be opened before the leader has heard of it.
    assert relayed_bytes(hidden) <= 0.1 * SUM_BYTES


def test_where_all_are_hidden_relays_carry_the_sums() -> None:
    assert relayed_bytes((0, 1, 2, 3)) >= SUM_BYTES
