"""Records of trainers that feed nothing cost a few steps some seconds, not every step its microbatches."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from swarmnet.ids import PeerId
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Enough, VirtualSwarm

BEFORE_S, FOR_S = 20.0, 60.0


def steps_with(phantoms: int) -> int:
    """How many steps are applied in FOR_S, in which so many announce that they feed."""
    swarm = VirtualSwarm(Plan(stages=1, served=((0,), (0,), (0,)), microbatches=8, steps=10_000, forward_s=0.05), 1)
    swarm.detailed = False
    reached: list[int] = []

    async def script(swarm: VirtualSwarm) -> None:
        await asyncio.sleep(BEFORE_S)
        reached.append(newest())
        (real,) = swarm.trainers
        record = next(each for each in await swarm.directory.records() if each.peer == real)
        until = asyncio.get_running_loop().time() + FOR_S
        while asyncio.get_running_loop().time() < until:
            for number in range(phantoms):
                await swarm.directory.publish(replace(record, peer=PeerId(f"phantom.{number}")))
            await asyncio.sleep(5.0)
        reached.append(newest())
        raise Enough

    def newest() -> int:
        return max(node.peer.replicas[0].member.version for node in swarm.honest)

    swarm.run(until_s=BEFORE_S + FOR_S + 60.0, script=script)
    return reached[1] - reached[0]


def test_phantom_trainers_cost_a_seventh_of_the_steps_at_most() -> None:
    alone = steps_with(0)
    assert alone > 50
    for phantoms in (1, 200):
        assert steps_with(phantoms) >= 0.85 * alone, phantoms
