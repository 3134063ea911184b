"""Steps that overlap from the `overlap_after`-th on: until then exactly the exact run, and no fault between shows."""

# ruff: noqa: ASYNC110  (on virtual time, looking again in five milliseconds costs nothing)

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from further import further
from strike import check_always, kill_and_restart, until, watched
from test_sim_scenarios import STEP, Trap

from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_reference import SimulatedReference
from swarmnet.testing.virtual_swarm import VirtualSwarm

PLAN = Plan(stages=2, replicas=2, microbatches=6, steps=6, averaging_s=0.3, sync="overlap", overlap_after=3)


@pytest.mark.parametrize("after", [1, 3, 6, *further(2, 5, 40)])
def test_it_is_the_single_process_that_is_late_from_that_step_on(after: int) -> None:
    swarm = watched(replace(PLAN, overlap_after=after, eval_every=1))

    async def script(swarm: VirtualSwarm) -> None:
        await until(lambda: swarm.counts["done"], every_s=0.05)

    swarm.run(until_s=60.0, script=script)
    assert swarm.counts["executed"] == swarm.counts["applied"] == 2 * 2 * 6
    exact = SimulatedReference(replace(PLAN, sync="exact")).history
    same = min(after, 6)  # step `after` is the first that is late
    assert swarm.reference.history[: same + 1] == exact[: same + 1]
    assert all(
        ours != other for ours, other in zip(swarm.reference.history[same + 1 :], exact[same + 1 :], strict=True)
    )
    evaluated = [fields["step"] for _, _, event, fields in swarm.events if event == "evaluated"]
    assert len(evaluated) == len(set(evaluated)) and {0, 6} <= set(evaluated)


def test_until_then_nobody_computes_ahead() -> None:
    swarm = watched(PLAN)
    ahead: set[tuple[int, int]] = set()

    async def script(swarm: VirtualSwarm) -> None:
        while not swarm.counts["done"]:
            for node in swarm.nodes:
                for replica in node.peer.replicas.values():
                    version, steps = replica.member.version, [step.stamp.step for step in replica.member.steps]
                    ahead.add((version, max(steps) - version))
            await asyncio.sleep(0.005)

    swarm.run(until_s=60.0, script=script)
    assert {(0, 0), (1, 0), (2, 1), (3, 1)} <= ahead and not ahead & {(0, 1), (1, 1), (2, 0), (3, 0)}


@pytest.mark.parametrize(
    "after", [STEP + 1, *further(STEP, STEP + 2)], ids=lambda after: f"late-from-{after - STEP:+d}"
)
@pytest.mark.parametrize("leader", [False, True], ids=["member", "leader"])
@pytest.mark.parametrize("point", ["after_claim", "after_summed", "in_round_before_ack", "after_commit"])
def test_kill_where_steps_begin_to_overlap(point: str, leader: bool, after: int) -> None:
    swarm = watched(replace(PLAN, overlap_after=after, averaging_s=0.001))
    trap = Trap(swarm, 1, point, leader=leader, strike=lambda node: kill_and_restart(swarm, node))
    swarm.run(until_s=60.0, script=trap.watch)
    assert trap.sprung and swarm.counts["kills"] == 1


@pytest.mark.parametrize("for_s", [2.0, 40.0])
def test_a_replica_that_slept_over_the_change_comes_back(for_s: float) -> None:
    swarm = watched(replace(PLAN, replicas=3))

    async def script(swarm: VirtualSwarm) -> None:
        while min(node.peer.replicas[0].member.version for node in swarm.replicas(0)) < 1:
            await asyncio.sleep(0.005)
        asleep = swarm.replicas(0)[0]
        swarm.stop(asleep)
        await asyncio.sleep(for_s)
        swarm.resume(asleep)
        await check_always(swarm)

    swarm.run(until_s=150.0, script=script)
