"""Runs that their owner extends, on virtual time: whoever hears of it when, all apply the same schedule."""

from __future__ import annotations

import asyncio
import random

import pytest
from further import further

from swarmnet.ids import PeerId
from swarmnet.manifest.extension import Extension, Horizon, Notices
from swarmnet.step.member import Member
from swarmnet.testing.plan import OWNER, RUN, Plan
from swarmnet.testing.virtual_reference import SimulatedReference
from swarmnet.testing.virtual_swarm import Guise, Node, SimulatedSigner, VirtualSwarm
from swarmnet.wire.signed import sign


def members(swarm: VirtualSwarm, *, without: Node | None = None) -> list[Member]:
    replicas = [
        replica for node in swarm.nodes if node.up and node is not without for replica in node.peer.replicas.values()
    ]
    return [replica.member for replica in replicas if replica.member.synced]


async def reached(swarm: VirtualSwarm, version: int, *, without: Node | None = None) -> None:
    """Until every live replica is there, but for those of `without`."""
    while not (found := members(swarm, without=without)) or min(member.version for member in found) < version:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def told(swarm: VirtualSwarm, event: str) -> set[PeerId]:
    return {peer for _, peer, name, _ in swarm.events if name == event}


@pytest.mark.parametrize("sync", ["exact", "overlap"])
def test_one_who_hears_of_it_is_enough(sync: str) -> None:
    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 1)
        swarm.extend(14, 26, swarm.nodes[0])

    swarm = VirtualSwarm(Plan(steps=20, sync=sync, eval_every=4), 1)  # type: ignore[arg-type]
    swarm.run(script=script)
    assert told(swarm, "extended") == {node.peer_id for node in swarm.nodes}
    assert {member.version for member in members(swarm)} == {26}
    # The trainer goes on as well.
    assert {f["step"] for _, _, event, f in swarm.events if event == "evaluated"} >= {0, 4, 8, 12, 16, 20, 24}


@pytest.mark.parametrize("sync", ["exact", "overlap"])
def test_a_run_that_is_over_goes_on(sync: str) -> None:
    """Peers serve read-only for a while; a trainer has to be started again."""

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 5)
        await asyncio.sleep(20)
        assert all(node.peer.finished.is_set() for node in swarm.nodes)
        swarm.extend(5, 9, swarm.nodes[2])
        await asyncio.sleep(5)
        assert not any(
            node.peer.finished.is_set() for node in swarm.nodes if node.peer.replicas[node.stages[0]].member.version < 9
        )
        swarm.add_trainer("another")
        await reached(swarm, 9)
        swarm.extend(9, 11, swarm.nodes[0])

    swarm = VirtualSwarm(Plan(steps=5, sync=sync), 1)  # type: ignore[arg-type]
    swarm.run(script=script)
    assert {member.version for member in members(swarm)} == {11}


def test_all_peers_have_gone_home_and_come_back() -> None:
    """Checkpoints of the last version are on their disks, and one of them has the notice there."""

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 5)
        for node in list(swarm.nodes):
            replica = node.peer.replicas[node.stages[0]]
            await replica.state.checkpoints.write_now()
            swarm.kill(node)
        await asyncio.sleep(30)
        for node in list(swarm.nodes):
            swarm.add(node.stages, node.peer_id)
        swarm.extend(5, 9, swarm.nodes[-1])
        await asyncio.sleep(1)

    swarm = VirtualSwarm(Plan(steps=5), 1)
    swarm.run(script=script)
    assert {member.version for member in members(swarm)} == {9}


@pytest.mark.parametrize("checkpoints", [0, 4])
def test_who_was_cut_off_while_it_took_force_catches_up(checkpoints: int) -> None:
    """It comes back past the step: with the trail, or the copy, it gets what is in force."""

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 3)
        late = swarm.nodes[2]
        swarm.partition([late], directory=True)
        swarm.extend(8, 40, swarm.nodes[0], swarm.nodes[3])
        await reached(swarm, 20, without=late)
        swarm.heal()

    swarm = VirtualSwarm(Plan(steps=12, replicas=3, checkpoint_every=checkpoints), 3)
    swarm.run(script=script)
    assert {member.horizon.last for member in members(swarm)} == {40}


def test_a_joiner_gets_it_with_the_state_and_a_restart_with_its_checkpoint() -> None:
    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 3)
        swarm.extend(5, 30, swarm.nodes[0])
        await reached(swarm, 9)
        swarm.add([0], "joiner")
        await reached(swarm, 15)
        swarm.extend(22, 36, swarm.nodes[0])
        old = swarm.nodes[1]
        swarm.kill(old)
        await asyncio.sleep(5)
        del swarm.notices[old.peer_id]  # what its checkpoint remembers has to be enough
        swarm.add(old.stages, old.peer_id)

    swarm = VirtualSwarm(Plan(steps=8, checkpoint_every=4), 2)
    swarm.run(script=script)
    assert {member.horizon.last for member in members(swarm)} == {36}
    assert {len(member.horizon.notices) for member in members(swarm)} == {2}


def test_the_run_goes_back_to_before_it_took_force() -> None:
    """A stage is lost with its newest state: the steps are done again, with the notice again."""

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 3)
        swarm.extend(6, 14, swarm.nodes[0])
        await reached(swarm, 7)
        lost = [node for node in swarm.nodes if node.stages == (1,)]
        for node in lost:
            swarm.kill(node)
        await asyncio.sleep(5)
        for node in lost:
            swarm.add(node.stages, node.peer_id)

    swarm = VirtualSwarm(Plan(steps=10, checkpoint_every=4), 2)
    swarm.run(script=script, until_s=900)
    assert swarm.counts["restart"] and {member.version for member in members(swarm)} == {14}


@pytest.mark.parametrize("seed", [*range(5), *further(*range(5, 24))])
def test_heard_of_at_the_last_moment_it_holds_for_all_or_for_nobody(seed: int) -> None:
    """One peer hears of it about when its step is under way, perhaps another of a second one; peers are killed.

    Whether it takes force is the commits' to say, and all weights of all stages follow from the same answer.
    """
    rng = random.Random(seed)

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, rng.randrange(3, 6))
        await asyncio.sleep(rng.uniform(0, 0.5))
        swarm.extend(5, 12, rng.choice(swarm.nodes), takes=False, number=1)
        if rng.random() < 0.5:
            swarm.extend(5, 10, rng.choice(swarm.nodes), takes=False, number=2)
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(rng.uniform(0, 0.5))
            victim = rng.choice([node for node in swarm.nodes if node.up])
            if swarm.may_die(victim):
                swarm.kill(victim)
                swarm.add(victim.stages, victim.peer_id)

    swarm = VirtualSwarm(Plan(steps=8, replicas=3, checkpoint_every=2), seed)
    swarm.exact = False  # which single process it is shows at the end
    swarm.run(script=script, until_s=900)
    (held,) = {member.horizon for member in members(swarm)}
    reference = SimulatedReference(swarm.plan, held.notices)
    assert {member.version for member in members(swarm)} == {held.last}
    for node in swarm.honest:
        assert all(engine.weights == reference.weights[stage] for stage, engine in node.engines.items())
    if not held.notices:
        assert told(swarm, "notice_missed")


def test_a_notice_of_anybody_else_costs_its_sender_only() -> None:
    """A peer believes one that the run's owner has not signed, tells the others, and waits for a step that never is."""

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 2)
        liar = swarm.nodes[0]
        forged = sign(Extension(RUN, 1, 6, 90), OWNER, SimulatedSigner(liar.peer_id).sign)
        believes = Notices(8, RUN, OWNER, lambda peer, data, signature: True)
        believes.learn(forged)
        liar.peer.notices.__dict__.update(believes.__dict__)

    swarm = VirtualSwarm(Plan(steps=8, replicas=3), 1)
    swarm.guises[PeerId("s0.0")] = Guise()
    swarm.run(script=script, until_s=900)
    assert all(member.version == 8 for member in members(swarm, without=swarm.nodes[0]))
    refused = {fields["reason"] for _, _, event, fields in swarm.events if event == "notice_refused"}
    assert refused == {"a notice that is not signed by the run's owner"}


def test_what_a_late_notice_says_is_named() -> None:
    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 6)
        swarm.extend(3, 20, takes=False)
        await asyncio.sleep(3)

    swarm = VirtualSwarm(Plan(steps=8), 1)
    swarm.run(script=script)
    (reason,) = {fields["reason"] for _, _, event, fields in swarm.events if event == "notice_missed"}
    assert reason == "step 3 was committed without it, so it changes nothing"
    assert {member.horizon for member in members(swarm)} == {Horizon(8)}
