"""A run that begins with a checkpoint: who does not have it takes version 0 from a mate, or waits for one."""

from __future__ import annotations

import asyncio

from strike import reached, versions, watched

from swarmnet.errors import UsageError
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm


def how(swarm: VirtualSwarm, peer: str) -> list[object]:
    return [fields["how"] for _, who, event, fields in swarm.events if who == peer and event == "synced"]


def test_version_0_comes_from_a_mate() -> None:
    swarm = watched(Plan(stages=2, replicas=2, microbatches=4, steps=6, no_beginning=frozenset(["s0.1", "s1.3"])))
    swarm.run(until_s=60.0)
    assert swarm.plan.no_beginning < {node.peer_id for node in swarm.nodes}
    for node in swarm.nodes:
        lacks = node.peer_id in swarm.plan.no_beginning
        assert how(swarm, node.peer_id)[0] == ("snapshot" if lacks else "seed")


def test_who_has_it_no_longer_goes_back_to_version_0_with_a_mate() -> None:
    swarm = watched(Plan(stages=2, replicas=2, microbatches=4, steps=6, checkpoint_every=50))

    async def moved() -> None:
        raise UsageError("hf: cannot be read: it was moved")

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 2)
        swarm.replicas(0)[0].engines[0].reset_to_seed = moved
        for victim in swarm.replicas(1):
            swarm.kill(victim)
        await asyncio.sleep(2.0)
        swarm.add((1,), "somebody-else")

    swarm.run(script=script)
    assert set(versions(swarm, "restart")) == {0}
    assert [how(swarm, node.peer_id)[-1] for node in swarm.replicas(0)] == ["snapshot", "seed"]


def test_a_stage_that_nobody_can_begin_waits_in_words() -> None:
    plan = Plan(stages=2, replicas=1, microbatches=4, steps=6, no_beginning=frozenset(["lacking"]), served=((0,),))
    swarm = watched(plan)
    lacking = swarm.add([1], name="lacking")

    async def script(swarm: VirtualSwarm) -> None:
        await asyncio.sleep(20.0)
        waiting = [fields for _, who, event, fields in swarm.events if who == "lacking" and event == "waiting"]
        assert [fields["reason"] for fields in waiting] == ["no weights"]
        assert not lacking.peer.replicas[1].member.synced
        swarm.add([1], name="having")

    swarm.run(until_s=90.0, script=script)
    assert how(swarm, "having")[0] == "seed" and how(swarm, "lacking")[0] == "snapshot"
