"""A memo of any size, none included: exact with faults, and without them nothing is executed twice."""

# ruff: noqa: ASYNC110  (on virtual time, looking again in two milliseconds costs nothing)

from __future__ import annotations

import asyncio

import pytest
from further import further
from strike import check_always, kill_and_restart, watched

from swarmnet.messages import Process
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm

SIZES = [0, 200, 1 << 20]
"""Nothing; two or three entries; everything."""


def executions_per_index(swarm: VirtualSwarm) -> float:
    plan = swarm.plan
    executed = sum(replica.execution.executions for node in swarm.nodes for replica in node.peer.replicas.values())
    return executed / (plan.stages * plan.steps * plan.microbatches)


@pytest.mark.parametrize("data_at_peers", [True, False], ids=["data_at_peers", "data_at_trainers"])
@pytest.mark.parametrize("output_cache_bytes", SIZES)
def test_without_faults_each_index_is_executed_once_in_each_stage(output_cache_bytes: int, data_at_peers: bool) -> None:
    swarm = watched(
        Plan(
            stages=3,
            replicas=3,
            microbatches=12,
            steps=6,
            output_cache_bytes=output_cache_bytes,
            data_at_peers=data_at_peers,
        )
    )
    swarm.run(until_s=120.0, script=check_always)
    assert executions_per_index(swarm) == 1.0


@pytest.mark.parametrize("output_cache_bytes", SIZES)
@pytest.mark.parametrize("stage", [1, *further(0, 2)])
def test_a_loss_late_in_the_step_is_repaired_with_what_is_remembered_or_without(
    output_cache_bytes: int, stage: int
) -> None:
    """The run ends with the single process's weights (every simulation checks that); the rest is economy."""
    swarm = watched(Plan(stages=3, replicas=2, microbatches=8, steps=4, output_cache_bytes=output_cache_bytes))
    lost: list[int] = []

    def victim() -> Node | None:
        for node in swarm.replicas(stage):
            member = node.peer.replicas[stage].member if node.peer.replicas else None
            if member is not None and member.version == 1 and len(member.oldest.claims.accumulated) >= 2:
                return node
        return None

    async def script(swarm: VirtualSwarm) -> None:
        while (node := victim()) is None:
            await asyncio.sleep(0.002)
        lost.append(node.peer.replicas[stage].execution.executions)
        kill_and_restart(swarm, node)
        await check_always(swarm)

    swarm.run(until_s=120.0, script=script)
    assert lost and swarm.counts["kills"] == 1
    repaired = executions_per_index(swarm) - 1.0
    assert repaired > 0.0
    if output_cache_bytes == SIZES[-1]:
        # The victim's own indexes of one step, once again, in its stage alone.
        assert repaired <= 8 / (3 * 4 * 8)


def test_what_is_remembered_is_what_went_over_the_wire() -> None:
    swarm = watched(Plan(stages=2, replicas=1, microbatches=4, steps=2))
    sent: list[bool] = []
    opened = swarm.network.open

    def watching(caller, callee, request, payload):
        node = next(node for node in swarm.nodes if node.peer_id == caller) if caller.startswith("s") else None
        if node is not None and isinstance(request, Process) and request.purpose == "train":
            kept = node.peer.replicas[0].execution.steps[request.step].cache.output(request.index)
            sent.append(kept is not None and kept.payload is payload)
        return opened(caller, callee, request, payload)

    swarm.network.open = watching  # type: ignore[method-assign]
    swarm.run(until_s=60.0)
    assert len(sent) == 8 and all(sent)
