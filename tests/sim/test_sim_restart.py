"""Everybody dies, or the last replica of a stage does: the run goes on from the newest version every stage has."""

from __future__ import annotations

import asyncio
import random

import pytest
from further import further
from strike import node_of, reached, versions, watched

from swarmnet.ids import PeerId
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

PLAN = Plan(stages=3, replicas=2, microbatches=4, steps=12, checkpoint_every=2)


def kill_everybody(swarm: VirtualSwarm) -> list[tuple[PeerId, tuple[int, ...]]]:
    """SIGKILL of all peers and trainers at one moment; returns who they were."""
    victims = [(node.peer_id, node.stages) for node in swarm.nodes if node.up]
    swarm.kill_all(None)
    return victims


def all_come_back(apart_s: float) -> VirtualSwarm:
    """Everybody is killed at version 6, and starts again, each so long after the one before."""
    swarm = watched(PLAN)

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 6)
        victims = kill_everybody(swarm)
        await asyncio.sleep(40.0)  # longer than any record lives
        for peer, stages in victims:
            swarm.add(stages, peer)
            await asyncio.sleep(apart_s)
        swarm.add_trainer()

    swarm.run(script=script)
    return swarm


def test_everybody_is_killed_and_comes_back() -> None:
    swarm = all_come_back(0.0)
    assert set(versions(swarm, "restart")) == {6}
    assert versions(swarm, "synced", "checkpoint") == [6] * 6 or set(versions(swarm, "synced", "snapshot")) <= {6}


def test_what_the_next_peer_brings_a_moment_later_is_not_asked_for() -> None:
    swarm = all_come_back(0.2)
    said = [str(fields["reason"]) for _, _, name, fields in swarm.events if name == "waiting" and "stage" in fields]
    assert not any("start" in words for words in said), said


def test_a_restart_from_the_same_version_has_a_number_of_its_own() -> None:
    """After an orderly end the run is killed before its next checkpoint: the steps in between are done again."""
    swarm = watched(Plan(stages=2, replicas=2, microbatches=4, steps=12, checkpoint_every=50))

    async def start_again(swarm: VirtualSwarm) -> None:
        victims = kill_everybody(swarm)
        await asyncio.sleep(40.0)  # longer than any record lives
        for peer, stages in victims:
            swarm.add(stages, peer)
        swarm.add_trainer()

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 4)
        replicas = [node.peer.replicas[node.stages[0]] for node in swarm.nodes]

        def stand() -> set[int | None]:
            return {header and header.version for replica in replicas if [header := replica.state.header()]}

        while len(stand()) > 1 or None in stand():  # noqa: ASYNC110  (virtual time)
            await asyncio.sleep(0.01)
        await asyncio.gather(*[replica.state.checkpoints.write_now() for replica in replicas])
        await start_again(swarm)
        await reached(swarm, 8)
        await start_again(swarm)

    swarm.run(script=script)
    restarts = [(fields["number"], fields["version"]) for _, _, name, fields in swarm.events if name == "restart"]
    (first, at), (second, again) = dict.fromkeys(restarts)
    assert (first, second) == (1, 2) and at == again


def test_the_last_replica_of_a_stage_comes_back_and_the_others_go_back_to_it() -> None:
    swarm = watched(Plan(stages=3, replicas=1, microbatches=4, steps=9, checkpoint_every=3))

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 4)
        victim = swarm.replicas(1)[0]
        swarm.kill(victim)
        await asyncio.sleep(2.0)
        swarm.add((1,), victim.peer_id)

    swarm.run(script=script)
    assert set(versions(swarm, "restart")) == {3}


def test_a_stage_that_never_came_so_far_as_a_checkpoint_goes_back_to_the_seed() -> None:
    swarm = watched(Plan(stages=2, replicas=1, microbatches=4, steps=6, checkpoint_every=50))

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 2)
        swarm.kill(swarm.replicas(1)[0])
        await asyncio.sleep(2.0)
        swarm.add((1,), "somebody-else")

    swarm.run(script=script)
    assert set(versions(swarm, "restart")) == {0}


def test_a_checkpoint_that_was_altered_is_named_and_an_older_one_used() -> None:
    swarm = watched(PLAN)

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 6)
        victims = kill_everybody(swarm)
        for peer, stages in victims:
            if 1 in stages:
                swarm.disks[peer].spoil(1, max(v for stage, v in swarm.disks[peer].files if stage == 1))
        for peer, stages in victims:
            swarm.add(stages, peer)
        swarm.add_trainer()

    swarm.run(script=script)
    assert swarm.counts["checkpoint_bad"] >= 1
    assert versions(swarm, "restart")[-1] == 4


def test_who_has_only_damaged_checkpoints_waits_for_a_sound_one() -> None:
    swarm = watched(PLAN)

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 6)
        victims = kill_everybody(swarm)
        damaged = next(peer for peer, stages in victims if 1 in stages)
        for stage, version in [*swarm.disks[damaged].files]:
            swarm.disks[damaged].spoil(stage, version)
        await asyncio.sleep(40.0)  # longer than any record lives
        swarm.add((1,), damaged)
        await asyncio.sleep(60.0)
        said = [str(fields["reason"]) for _, _, name, fields in swarm.events if name == "waiting"]
        assert any("checkpoints of stage 1" in words and "damaged" in words for words in said), said
        assert 0 not in versions(swarm, "restart")
        for peer, stages in victims:
            if peer != damaged:
                swarm.add(stages, peer)
        swarm.add_trainer()

    swarm.run(script=script)
    assert set(versions(swarm, "restart")) == {6}


def test_a_newcomer_without_anything_does_not_start_the_run_again() -> None:
    """It is there first, and takes the seed; when the others come with what they have, it goes on with them."""
    swarm = watched(PLAN)

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 6)
        victims = kill_everybody(swarm)
        swarm.add((0,), "newcomer")
        swarm.add_trainer()
        await asyncio.sleep(5.0)
        for peer, stages in victims:
            swarm.add(stages, peer)

    swarm.run(script=script)
    assert versions(swarm, "restart")[-1] == 6
    began = next(at for at, _, name, _ in swarm.events if name == "restart")
    assert min(fields["step"] for at, _, name, fields in swarm.events if name == "committed" and at > began) == 6
    told = [fields["reason"] for _, who, name, fields in swarm.events if (who, name) == ("newcomer", "restart")]
    assert told == ["the run went back before this peer had any state"]


def test_a_stage_whose_state_nobody_has_is_waited_for_in_words() -> None:
    swarm = watched(Plan(stages=3, replicas=1, microbatches=4, steps=9, checkpoint_every=2))

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 4)
        victim = swarm.replicas(1)[0]
        swarm.kill(victim)
        swarm.add((1,), "empty-handed")
        await asyncio.sleep(120.0)
        assert max(step for _, step in swarm.checker.committed) == 4
        said = [str(fields["reason"]) for _, _, name, fields in swarm.events if name == "waiting"]
        assert any("no peer has the state of stage 1" in words for words in said), said
        swarm.add((1,), victim.peer_id)  # with its checkpoint, the run goes on

    swarm.run(script=script)


def test_a_stage_whose_only_replica_is_gone_is_named_before_its_record_expires() -> None:
    swarm = watched(Plan(stages=2, replicas=1, microbatches=4, steps=9, checkpoint_every=2))
    waited: list[float] = []

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 4)
        victim = swarm.replicas(1)[0]
        swarm.kill(victim)
        killed_at = swarm.loop.time()
        await asyncio.sleep(20.0)
        waited.extend(at - killed_at for at, _, name, fields in swarm.events if name == "waiting" and at > killed_at)
        swarm.add((1,), victim.peer_id)

    swarm.run(script=script)
    assert waited


def test_with_leave_to_drop_the_others_do_not_go_back() -> None:
    plan = Plan(stages=3, replicas=1, microbatches=4, steps=9, checkpoint_every=3, allow_drop=True)
    swarm = VirtualSwarm(plan, 1)
    swarm.exact = False  # what is dropped makes the curve another one, and is counted

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 4)
        victim = swarm.replicas(1)[0]
        swarm.kill(victim)
        await asyncio.sleep(1.0)
        swarm.add((1,), victim.peer_id)

    swarm.run(script=script)
    dropped = [fields for _, _, name, fields in swarm.events if name == "dropped"]
    assert [(d["stage"], d["from"], d["microbatches"]) for d in dropped] == [(1, 3, 4 * (dropped[0]["to"] - 3))]
    assert dropped[0]["to"] in (4, 5)
    assert {"stage": 0, "version": 9} in [
        {"stage": f["stage"], "version": f["version"]} for _, _, name, f in swarm.events if name == "applied"
    ]


def test_a_full_disk_is_said_and_costs_nothing_else() -> None:
    swarm = watched(PLAN)

    async def script(swarm: VirtualSwarm) -> None:
        for peer in swarm.disks:
            swarm.fill_disk(peer, full=True)

    swarm.run(script=script)
    assert swarm.counts["checkpoint_failed"] >= 6
    assert swarm.counts["checkpoint"] == 0


@pytest.mark.parametrize("seed", [0, 1, *further(*range(2, 6))])
def test_the_swarm_is_killed_again_and_again(seed: int) -> None:
    """At any moment, in the middle of whatever, some come back late and some under a new name."""
    rng = random.Random(seed)
    swarm = watched(Plan(stages=rng.choice([1, 2, 3]), replicas=2, microbatches=4, steps=12, checkpoint_every=2), seed)

    async def script(swarm: VirtualSwarm) -> None:
        for _ in range(3):
            await asyncio.sleep(rng.uniform(0.5, 6.0))
            if swarm.done:
                return
            victims = kill_everybody(swarm)
            await asyncio.sleep(rng.uniform(0.0, 40.0))
            for peer, stages in rng.sample(victims, len(victims)):
                swarm.add(stages, peer)
                await asyncio.sleep(rng.expovariate(2.0))
            if rng.random() < 0.5:
                swarm.add((rng.randrange(swarm.plan.stages),), f"new-{rng.getrandbits(20)}")
            swarm.add_trainer()

    swarm.run(script=script, until_s=900.0)
    assert node_of(swarm, swarm.nodes[-1].peer_id) is not None


def test_a_stage_that_lost_a_sum_others_have_applied_brings_the_run_back() -> None:
    """One replica is stopped, the other commits alone and dies once its commit is out: nobody has that sum any more."""
    swarm = watched(Plan(stages=3, replicas=2, microbatches=4, steps=10, checkpoint_every=2))

    async def script(swarm: VirtualSwarm) -> None:
        survivor, victim = swarm.replicas(2)
        begun, passed = asyncio.Event(), asyncio.Event()

        def look(peer: PeerId, event: str, fields: dict[str, object]) -> None:
            if event == "applied" and peer == survivor.peer_id and fields["version"] == 5:
                begun.set()
            if event == "applied" and fields["stage"] != 2 and fields["step"] == 5:
                passed.set()

        swarm.hooks.append(look)
        await begun.wait()
        swarm.stop(survivor)
        await passed.wait()
        swarm.kill(victim)
        swarm.resume(survivor)

    swarm.run(script=script)
    assert swarm.counts["orphaned"] == 1
    assert set(versions(swarm, "restart")) == {4}
