"""Peers that serve two stages each: {0, 3} and {1, 2} of four. No stage lends its slots to another (DECISIONS 12)."""

# ruff: noqa: ASYNC110  (on virtual time, looking again in two milliseconds costs nothing)

from __future__ import annotations

import asyncio

import pytest
from further import further
from strike import check_always, kill_and_restart, watched

from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

SINGLE = ((0, 3), (1, 2))
DOUBLE = ((0, 3), (1, 2), (0, 3), (1, 2))


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("served", [SINGLE, DOUBLE], ids=["single", "double"])
def test_they_train_without_deadlock(served: tuple[tuple[int, ...], ...], slots: int) -> None:
    swarm = watched(Plan(stages=4, served=served, microbatches=8, steps=4, slots=slots))
    swarm.run(until_s=60.0, script=check_always)
    assert swarm.counts["committed"] == 4 * 4 * len(served) // 2


@pytest.mark.parametrize(
    ("victim", "slots", "seed"),
    [(0, 1, 1), *further((0, 4, 1), (1, 1, 1)), (1, 4, 1), (0, 4, 16), *further((0, 4, 17), (0, 4, 20))],
    ids=["outer-1", "outer-4", "inner-1", "inner-4", "one-stage-ahead-16", "one-stage-ahead-17", "one-stage-ahead-20"],
)
def test_one_of_them_dies_and_comes_back(victim: int, slots: int, seed: int) -> None:
    swarm = watched(Plan(stages=4, served=DOUBLE, microbatches=8, steps=5, slots=slots), seed)

    async def script(swarm: VirtualSwarm) -> None:
        node = swarm.nodes[victim]
        while not any(
            r.member.version == 1 and r.member.oldest.claims.accumulated for r in node.peer.replicas.values()
        ):
            await asyncio.sleep(0.005)
        kill_and_restart(swarm, node)
        await check_always(swarm)

    swarm.run(until_s=90.0, script=script)
    assert swarm.counts["kills"] == 1
