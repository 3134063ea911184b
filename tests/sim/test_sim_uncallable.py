"""A member that is heard and cannot be called, and one that never reports: the run goes on without them."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from further import further

from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Audits
from swarmnet.messages import Heartbeat, Stamp
from swarmnet.testing.clock import SimulatedProcess
from swarmnet.testing.doubles import FakeService
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm


def gaps(swarm: VirtualSwarm, since_s: float) -> list[float]:
    """Seconds between two steps' first commits."""
    first: dict[object, float] = {}
    for at, _, event, fields in swarm.events:
        if event == "committed":
            first.setdefault(fields["step"], at)
    times = sorted(at for at in first.values() if at >= since_s)
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def struck(swarm: VirtualSwarm) -> set[object]:
    return {fields["peer"] for _, _, event, fields in swarm.events if event == "late"}


UNCHECKED = Audits(microbatches=0.0, contributions=0.0)
"""Who has not heard all pledges does not hold a checked sum: then it is never one alone."""


@pytest.mark.parametrize(
    ("seed", "alone"),
    [(0, False), *further((7, False)), (7, True), *further((37, True))],
    ids=["0", "7", "7-it-alone-holds-the-sum", "37-it-alone-holds-the-sum"],
)
def test_a_member_that_nobody_can_call_any_more_holds_the_run_up_once(seed: int, alone: bool) -> None:
    audit = UNCHECKED if alone else Audits()
    swarm = VirtualSwarm(Plan(stages=2, replicas=3, microbatches=6, steps=70, forward_s=0.05, audit=audit), seed)

    async def script(swarm: VirtualSwarm) -> None:
        await asyncio.sleep(3.0)
        victim = swarm.replicas(seed % 2)[seed % 3]
        for node in swarm.nodes:
            if node is not victim:
                swarm.block_dial(node, victim)
        await asyncio.sleep(25.0)
        swarm.heal()

    swarm.run(until_s=300, script=script)  # checks every commit and the final weights against the reference
    waited = gaps(swarm, 0.0)
    assert max(waited) <= 5.0  # until all have said that they cannot call it, and a step
    assert sum(gap > 2.0 for gap in waited) == 1, "it was waited for again"
    assert not struck(swarm), "it has no fault"
    evicted = [fields["reason"] for _, _, event, fields in swarm.events if event == "evicted"]
    assert evicted == ["silent"]


@pytest.mark.parametrize(("replicas", "blocked", "seed"), [(3, ((0, 2),), 0), (4, ((0, 3), (1, 3), (2, 3)), 1)])
def test_who_cannot_call_a_mate_that_calls_it_costs_the_steps_nothing(replicas: int, blocked: tuple, seed: int) -> None:
    """Each speaks on the link of the other, and pulls nothing: both reduce nothing, or the one sits out."""
    swarm = VirtualSwarm(Plan(stages=2, replicas=replicas, microbatches=4, steps=50), seed)

    async def script(swarm: VirtualSwarm) -> None:
        mates = swarm.replicas(0)
        for caller, called in blocked:
            swarm.block_dial(mates[caller], mates[called])

    swarm.run(until_s=300, script=script)
    assert max(gaps(swarm, 0.0)) < 1.0


@pytest.mark.parametrize("replicas", [3, *further(2)])
def test_an_identity_that_only_sends_heartbeats_is_waited_for_once_in_a_while(replicas: int) -> None:
    swarm = VirtualSwarm(Plan(stages=2, replicas=replicas, microbatches=6, steps=60, forward_s=0.05), 1)
    stranger = PeerId("stranger")

    async def script(swarm: VirtualSwarm) -> None:
        swarm.network.attach(stranger, SimulatedProcess("stranger"), FakeService(lambda *_: []))
        await asyncio.sleep(2.0)
        while not swarm.done:
            for node in swarm.replicas(0):
                member = node.peer.replicas[0].member
                stamp = Stamp(member.version, 0, member.chain, member.restart)
                beat = Heartbeat(stamp, 7, True, member.oldest.promised, before=member.before)
                swarm.network.tell(stranger, node.peer_id, beat)
            await asyncio.sleep(0.25)

    swarm.run(until_s=300, script=script)
    assert max(gaps(swarm, 0.0)) <= 20.0
    assert struck(swarm) == {stranger}
