"""Cuts between peers at exact points of a step, healed at exact points (docs/protocol.md, scenarios 4 and 5).

Sums behave as in fp32, so two sides that go on by themselves leave different chains behind. Whatever is cut and whenever
it heals: every sum on the way has each index once, every stage ends with one chain, and the exact part of its weights is
that of a single process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from strike import watched

from swarmnet.manifest.schema import Protocol
from swarmnet.simulate.plan import Plan
from swarmnet.simulate.swarm import Node, Swarm

STEP = 1
"""The step that is cut."""

LONG_S = Protocol().long_silence_s


def plan(replicas: int) -> Plan:
    return Plan(stages=3, replicas=replicas, microbatches=6, steps=5, rounding=True)


def halves(nodes: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Two sides, the first the smaller one."""
    return list(nodes[: len(nodes) // 2]), list(nodes[len(nodes) // 2 :])


def inside_one_stage(swarm: Swarm) -> tuple[list[Node], list[Node]]:
    """Both sides see the stages beside them."""
    return halves(swarm.replicas(1))


def whole_swarm(swarm: Swarm) -> tuple[list[Node], list[Node]]:
    """All stages on both sides; trainers reach both."""
    sides = [halves(swarm.replicas(stage)) for stage in range(swarm.plan.stages)]
    return [node for one, _ in sides for node in one], [node for _, other in sides for node in other]


def last_stage_on_one_side(swarm: Swarm) -> tuple[list[Node], list[Node]]:
    """The smaller side has no replica of the last stage."""
    one, other = whole_swarm(swarm)
    lost = [node for node in one if 2 in node.stages]
    return [node for node in one if node not in lost], other + lost


CUTS = {"inside_one_stage": inside_one_stage, "whole_swarm": whole_swarm, "last_stage_on_one_side": last_stage_on_one_side}


def members(nodes: Sequence[Node], stage: int = 1) -> list:
    return [node.peer.replicas[stage].member for node in nodes if node.up and stage in node.peer.replicas]


REACHED: dict[str, Callable[[list], bool]] = {
    "before_round": lambda found: any(m.version > STEP or (m.version == STEP and m.account.summed) for m in found),
    "after_sum": lambda found: any(m.version > STEP or (m.version == STEP and m.finished) for m in found),
    "after_commit": lambda found: any(m.version > STEP or (m.version == STEP and m.barrier.of(1)) for m in found),
    "after_apply": lambda found: any(m.version > STEP for m in found),
}


async def until(swarm: Swarm, reached: Callable[[], bool], *, within_s: float) -> bool:
    """Look every two milliseconds."""
    ends = swarm.loop.time() + within_s
    while not reached():
        if swarm.loop.time() > ends:
            return False
        swarm.check_now()
        await asyncio.sleep(0.002)
    return True


@pytest.mark.parametrize("directory", [False, True], ids=["", "directory_too"])
@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("heal_at", REACHED)
@pytest.mark.parametrize("cut_at", ["before_round", "after_sum", "after_commit"])
@pytest.mark.parametrize("cut", CUTS)
def test_cut_and_heal(cut: str, cut_at: str, heal_at: str, replicas: int, directory: bool) -> None:
    """Cut in step STEP when any replica of stage 1 is there; heal when the smaller side (or anybody) is that far on."""
    swarm = watched(plan(replicas))

    async def script(swarm: Swarm) -> None:
        assert await until(swarm, lambda: REACHED[cut_at](members(swarm.replicas(1))), within_s=60.0)
        one, other = CUTS[cut](swarm)
        swarm.partition(one, other, directory=directory)
        await until(
            swarm, lambda: all(REACHED[heal_at](members(side)) for side in (one, other) if members(side)),
            within_s=3 * LONG_S,
        )
        swarm.heal()
        await until(swarm, lambda: swarm.done, within_s=200.0)

    swarm.run(until_s=260.0, script=script)
    assert swarm.counts["partitions"] == 1
