"""A microbatch without a finite gradient: left out alike by every stage, and too many of them stop the run in words."""

import asyncio

import pytest

from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Broken, VirtualSwarm


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_non_finite_microbatch_is_left_out_everywhere(stage: int, replicas: int) -> None:
    plan = Plan(
        stages=3, replicas=replicas, microbatches=4, steps=3, max_discarded=1, poison=frozenset({(stage, 1, 2)})
    )
    swarm = VirtualSwarm(plan, seed=stage)
    swarm.run(until_s=120)  # checks sums, discarded sets and final weights against the reference
    found_by = {peer for _, peer, event, fields in swarm.events if event == "discarded"}
    assert found_by and all(fields["index"] == 2 for _, _, event, fields in swarm.events if event == "discarded")


def test_the_leader_s_death_does_not_bring_it_back() -> None:
    plan = Plan(stages=2, replicas=3, microbatches=4, steps=3, max_discarded=1, poison=frozenset({(0, 1, 0)}))
    swarm = VirtualSwarm(plan, seed=4)

    async def script(swarm: VirtualSwarm) -> None:
        discarded = asyncio.Event()
        swarm.hooks.append(lambda peer, event, fields: discarded.set() if event == "discarded" else None)
        await discarded.wait()
        leader = next(peer for _, peer, event, _ in swarm.events if event == "discarded")
        swarm.kill(next(node for node in swarm.nodes if node.peer_id == leader))

    swarm.run(until_s=120, script=script)
    assert swarm.counts["kills"] == 1


def test_too_many_stop_the_run_with_words() -> None:
    poison = frozenset({(1, 1, 0), (1, 1, 2)})
    swarm = VirtualSwarm(Plan(stages=2, replicas=2, microbatches=4, steps=3, max_discarded=1, poison=poison), seed=1)
    with pytest.raises(Broken, match="no end"):
        swarm.run(until_s=60)
    reasons = {fields["reason"] for _, _, event, fields in swarm.events if event == "halted"}
    assert any("2 microbatches of step 1" in reason and "max_discarded = 1" in reason for reason in reasons)
    assert max(step for _, step in swarm.checker.committed) == 0
