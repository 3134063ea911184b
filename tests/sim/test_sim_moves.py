"""Peers that move to the stage that needs them: a whole simulated swarm, killed at every phase of a move.

Every run ends with the weights of the single process, as all simulations do: a move loses nothing and counts nothing
twice.
"""

# ruff: noqa: ASYNC110  (on virtual time, looking again in a few milliseconds costs nothing)

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from going_back import GoingBack
from strike import soon, until, watched

from swarmnet.ids import PeerId
from swarmnet.peer.leaving import hand_over, standing_of
from swarmnet.peer.rebalance import Rules
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm

RULES = Rules(period_s=6.0, settle_s=2.5, hurry_s=2.0, promise_s=30.0)


def plan_of(*counts: int, steps: int = 20, **more: Any) -> Plan:
    served = tuple((stage,) for stage, count in enumerate(counts) for _ in range(count))
    return Plan(stages=len(counts), served=served, microbatches=8, steps=steps, rebalance=RULES, forward_s=0.25, **more)


def counts(swarm: VirtualSwarm) -> list[int]:
    return [len(swarm.replicas(stage)) for stage in range(swarm.plan.stages)]


def events(swarm: VirtualSwarm, name: str) -> list[tuple[PeerId, dict[str, Any]]]:
    return [(peer, fields) for _, peer, event, fields in swarm.events if event == name]


async def at_version(swarm: VirtualSwarm, version: int) -> None:
    await until(
        lambda: any(
            replica.member.version >= version for node in swarm.nodes for replica in node.peer.replicas.values()
        ),
        every_s=0.05,
    )


def lose_all_but_one(stage: int, *, at: int = 2):
    async def script(swarm: VirtualSwarm) -> None:
        await at_version(swarm, at)
        for node in swarm.replicas(stage)[1:]:
            swarm.kill(node)

    return script


def test_a_stage_that_lost_replicas_gets_others() -> None:
    swarm = watched(plan_of(3, 3))
    swarm.run(until_s=400.0, script=lose_all_but_one(1))
    assert counts(swarm) == [2, 2]
    (mover, said), *others = events(swarm, "moving")
    assert (said["from"], said["to"]) == (0, 1) and not others and not swarm.counts["move_failed"]
    its = [(at, event) for at, peer, event, _ in swarm.events if peer == mover and event in ("moving", "synced")]
    (left, _), (arrived, _) = its[-2:]
    assert arrived - left < 10.0
    # It came with the state that it had put on its disk, and took up what had been summed since.
    assert not [of for peer, of in events(swarm, "fetching") if peer == mover]


def test_nobody_moves_once_the_slowest_stage_cannot_be_helped() -> None:
    """Of 4, 2 and 2 replicas another move would make no step faster. (Two may go at once, and one comes back.)"""
    moved = []
    for seed in range(4):
        swarm = watched(plan_of(4, 3, 1), seed)
        swarm.run(until_s=600.0)
        assert min(counts(swarm)) == 2
        moved.append(swarm.counts["moved"])
    assert moved.count(1) >= 3, moved


@pytest.mark.parametrize("standstill", [True, False])
def test_of_all_that_go_elsewhere_at_once_one_stays(standstill: bool) -> None:
    """Even if all hold nothing at that moment: nobody leaves before the others can have said that they go."""
    swarm = watched(Plan(stages=2, replicas=3, microbatches=6, steps=40))
    gone: list[PeerId] = []

    async def go(node: Node) -> None:
        if not await hand_over(node.peer, 30.0, standstill=standstill):
            gone.append(node.peer_id)
            soon(swarm, lambda: swarm.kill(node))

    async def script(swarm: VirtualSwarm) -> None:
        await at_version(swarm, 3)
        movers = swarm.replicas(1)
        await until(
            lambda: all(standing_of(node.peer, node.peer.replicas[1], swarm.loop.time()).free for node in movers),
            every_s=0.001,
        )
        for node in movers:
            swarm.loop.start(node.process, go(node))

    swarm.run(until_s=200.0, script=script)
    assert 0 < len(gone) < 3 and counts(swarm)[1] == 3 - len(gone)


def test_a_replica_that_is_first_at_a_version_waits_for_the_others() -> None:
    """They have applied the step a moment later: until then none of them has all of the stage."""
    swarm = watched(Plan(stages=2, replicas=3, microbatches=6, steps=30))
    ended: list[str] = []

    async def go(node: Node) -> None:
        ended.append(await hand_over(node.peer, 30.0, standstill=False))
        soon(swarm, lambda: swarm.kill(node))

    async def script(swarm: VirtualSwarm) -> None:
        await at_version(swarm, 3)
        while True:
            for node in swarm.replicas(1):
                standing = standing_of(node.peer, node.peer.replicas[1], swarm.loop.time())
                if not standing.heirs and standing.followers == 2:
                    swarm.loop.start(node.process, go(node))
                    return
            await asyncio.sleep(0.0005)

    swarm.run(until_s=200.0, script=script)
    assert ended == [""]


def test_a_run_in_balance_moves_nobody() -> None:
    swarm = watched(plan_of(2, 2, steps=12))
    swarm.run(until_s=400.0)
    assert swarm.counts["applied"] and not swarm.counts["moving"] and not swarm.counts["moved"]


def test_the_last_but_one_replica_of_a_stage_does_not_move() -> None:
    swarm = watched(plan_of(1, 2, steps=12))

    async def script(swarm: VirtualSwarm) -> None:
        await at_version(swarm, 9)
        assert all(count >= 1 for count in counts(swarm))

    swarm.run(until_s=600.0, script=script)
    assert sorted(counts(swarm)) in ([1, 2],)


def test_who_has_no_room_for_the_copy_leaves_the_move_to_others() -> None:
    swarm = watched(plan_of(3, 3))
    swarm.free_bytes = {PeerId("s0.0"): 0, PeerId("s0.2"): 0}
    swarm.run(until_s=400.0, script=lose_all_but_one(1))
    assert [peer for peer, _ in events(swarm, "moving")] == ["s0.1"] and counts(swarm) == [2, 2]


PHASES = ["announced", "fetching", "handing_over", "left", "synced"]


@pytest.mark.parametrize("phase", PHASES)
def test_killed_while_it_moves(phase: str) -> None:
    """SIGKILL in each phase: another one moves in its place, and nothing is lost."""
    swarm = watched(plan_of(4, 3))
    killed: list[PeerId] = []

    def kill(peer: PeerId) -> None:
        node = next((each for each in swarm.nodes if each.up and each.peer_id == peer), None)
        if node is not None and not killed:
            killed.append(peer)
            soon(swarm, lambda: swarm.kill(node))

    def hook(peer: PeerId, event: str, fields: dict[str, Any]) -> None:
        if phase == "fetching" and event == "moving":
            swarm.loop.call_later(0.02, lambda: kill(peer))
        if phase == "synced" and event == "synced" and swarm.counts["moved"]:
            kill(peer)

    async def script(swarm: VirtualSwarm) -> None:
        await lose_all_but_one(1)(swarm)
        while not killed:
            await asyncio.sleep(0.005)
            for node in list(swarm.nodes):
                if not node.up or not node.peer.replicas:
                    continue
                intent, moves = node.peer.intent, swarm.counts["moved"]
                view = next(iter(node.peer.replicas.values())).member.view
                if phase == "announced" and intent.to is not None and not intent.surely:
                    kill(node.peer_id)
                if phase == "handing_over" and intent.surely and view.draining:
                    kill(node.peer_id)
                if phase == "left" and moves and node is swarm.nodes[-1]:
                    kill(node.peer_id)
        while counts(swarm)[1] < 2:
            await asyncio.sleep(0.1)

    swarm.hooks.append(hook)
    swarm.run(until_s=400.0, script=script)
    assert killed and swarm.counts["moved"] >= 1


def test_the_donors_die_while_the_state_is_fetched() -> None:
    """The mover stays where it is, says why, and the run goes on as soon as somebody has the state again."""
    plan = plan_of(3, 1, state_bytes=200_000, checkpoint_every=1)
    swarm = watched(plan)

    async def script(swarm: VirtualSwarm) -> None:
        await until(lambda: swarm.counts["moving"], every_s=0.01)
        (donor,) = swarm.replicas(1)
        swarm.kill(donor)
        await until(lambda: swarm.counts["move_failed"], every_s=0.1)
        assert counts(swarm)[0] == 3
        swarm.add([1], donor.peer_id)

    swarm.limit(PeerId("s1.3"), up_bytes_per_s=50_000)
    swarm.run(until_s=400.0, script=script)


def lost(stage: int, *, leaves_disk_to: str | None = None):
    """All replicas of a stage are gone, and their disks; a copy of those may lie with somebody of another stage."""

    async def script(swarm: VirtualSwarm) -> None:
        await at_version(swarm, 5)
        swarm.check_now()
        for node in swarm.replicas(stage):
            swarm.kill(node)
            disk = swarm.disks.pop(node.peer_id)
            if leaves_disk_to is not None:
                old = {at: file for at, file in disk.files.items() if at[0] == stage}
                swarm.disks[PeerId(leaves_disk_to)].files.update(old)

    return script


def test_a_stage_that_nobody_serves_comes_back_from_the_disk_of_a_mover() -> None:
    """Only one of three has a checkpoint of it: whoever else is the most useful mover fails to fetch one, and stays."""
    swarm = watched(plan_of(3, 2, steps=9, checkpoint_every=2))
    back = GoingBack(swarm)
    swarm.run(until_s=400.0, script=lost(1, leaves_disk_to="s0.2"))
    assert [node.peer_id for node in swarm.replicas(1)][:1] == ["s0.2"] and len(back.versions) == 1


def test_nobody_moves_to_a_stage_whose_state_is_nowhere() -> None:
    """They stay where they are, and say why; whoever has its state on disk brings it back."""
    swarm = watched(plan_of(3, 2, steps=9, checkpoint_every=2))

    async def script(swarm: VirtualSwarm) -> None:
        donor = swarm.replicas(1)[0]
        kept = swarm.disks[donor.peer_id]
        await lost(1)(swarm)
        while swarm.counts["move_failed"] < 2:
            await asyncio.sleep(0.1)
        assert counts(swarm) == [3, 0] and not swarm.counts["moved"]
        swarm.disks[donor.peer_id] = kept
        swarm.add([1], donor.peer_id)

    swarm.run(until_s=400.0, script=script)
    assert "no peer hands over a copy" in events(swarm, "move_failed")[0][1]["reason"]
