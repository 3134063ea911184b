"""Joiners at exact points of a step, and messages that arrive again much later (docs/protocol.md, 6, 10 and 11)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from further import further
from strike import check_always, kill_and_restart, leader_of, member_of, watched

from swarmnet.ids import PeerId
from swarmnet.messages import Control
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

STEP = 1


async def until(swarm: VirtualSwarm, reached: Callable[[], object], *, within_s: float = 60.0) -> None:
    ends = swarm.loop.time() + within_s
    while not reached():
        assert swarm.loop.time() < ends, swarm.describe()
        swarm.check_now()
        await asyncio.sleep(0.002)


def standing(swarm: VirtualSwarm, stage: int) -> list:
    return [node.peer.replicas[stage].member for node in swarm.replicas(stage) if stage in node.peer.replicas]


POINTS: dict[str, Callable[[list], bool]] = {
    "execution": lambda found: any(m.oldest.claims.accumulated for m in found),
    "round": lambda found: any(m.oldest.part.exchange is not None for m in found),
    "sum": lambda found: any(m.oldest.finished is not None for m in found),
    "commit": lambda found: any(m.oldest.barrier.of(1) is not None for m in found),
}


@pytest.mark.parametrize(
    ("point", "killed", "seed"),
    [
        *((point, killed, 1) for point in POINTS for killed in (False, True)),
        # The leader is back before the joiner has seen it contribute: both must draw the next leader from one order.
        ("round", True, 0),
        ("round", True, 5),
    ],
)
def test_a_replica_joins_during(point: str, killed: bool, seed: int) -> None:
    swarm = watched(Plan(stages=2, replicas=2, microbatches=6, steps=6, classes=2), seed)

    async def script(swarm: VirtualSwarm) -> None:
        await until(swarm, lambda: POINTS[point]([m for m in standing(swarm, 1) if m.version == STEP]))
        swarm.add([1], "joiner")
        leader = leader_of(swarm, 1)
        if killed and leader is not None and swarm.may_die(leader):
            kill_and_restart(swarm, leader)
        await check_always(swarm)

    swarm.run(until_s=120.0, script=script)
    joiner = member_of(swarm, PeerId("joiner"), 1)
    assert joiner is not None and joiner.done and swarm.checker.forks == 0


def test_a_committed_sum_outlives_its_stage_by_one_joiner() -> None:
    """Stage 1 has committed and loses all but one, stage 0 still executes the step (H8); a joiner takes over sum and
    commit with the state, and only then may the last one leave."""
    swarm = watched(Plan(stages=2, replicas=2, microbatches=6, steps=5, forward_s=0.05, classes=2))
    swarm.slowdown = {PeerId(f"s0.{number}"): 8.0 for number in range(2)}

    def committed(stage: int) -> bool:
        return any(
            m.version > STEP or (m.version == STEP and m.oldest.barrier.of(stage)) for m in standing(swarm, stage)
        )

    async def script(swarm: VirtualSwarm) -> None:
        await until(swarm, lambda: committed(1))
        await until(swarm, lambda: all(m.version == STEP and m.oldest.finished for m in standing(swarm, 1)))
        last, gone = swarm.replicas(1)
        swarm.kill(gone)
        swarm.add([1], "joiner")
        await until(swarm, lambda: (m := member_of(swarm, PeerId("joiner"), 1)) is not None and m.synced)
        joiner = member_of(swarm, PeerId("joiner"), 1)
        assert not committed(0), "stage 0 was not slow enough for this to show anything"
        assert joiner.version == STEP and joiner.oldest.finished is not None and joiner.oldest.barrier.of(1) is not None
        swarm.kill(last)
        await check_always(swarm)

    swarm.run(until_s=200.0, script=script)
    assert swarm.counts["kills"] == 2


@pytest.mark.parametrize("seed", [0, *further(1, 2, 3)])
def test_every_message_arrives_again_much_later(seed: int) -> None:
    """Each one-way message once more, up to eight seconds later: of an older step, ballot, round, generation and, as
    leaders are killed and come back, incarnation."""
    swarm = watched(Plan(stages=2, replicas=3, microbatches=6, steps=10, forward_s=0.05, classes=2), seed)
    rng, tell, killed = random.Random(seed), swarm.network.tell, []

    def echoed(sender: PeerId, receiver: PeerId, message: Control) -> None:
        tell(sender, receiver, message)
        swarm.loop.call_later(rng.uniform(0.05, 8.0), lambda: swarm.over or tell(sender, receiver, message))

    swarm.network.tell = echoed  # type: ignore[method-assign]

    async def script(swarm: VirtualSwarm) -> None:
        while not swarm.done:
            await asyncio.sleep(2.0)
            leader = leader_of(swarm, rng.randrange(2))
            if leader is not None and swarm.may_die(leader) and len(killed) < 4:
                killed.append(leader.peer_id)
                kill_and_restart(swarm, leader, after_s=0.3)
            swarm.check_now()

    swarm.run(until_s=200.0, script=script)
    assert killed


def test_a_newcomer_can_tell_others_how_the_step_before_ended() -> None:
    """Stage 1 has not heard that stage 0 committed; whoever could tell dies, and the newcomer has it from them."""
    swarm = watched(Plan(stages=2, replicas=1, microbatches=4, steps=5))
    deaf = False

    def hush(sender: PeerId, receiver: PeerId, message: Control) -> bool:
        return not (deaf and isinstance(message, Control) and sender.startswith("s0") and receiver.startswith("s1"))

    swarm.network.intercepts.append(hush)

    async def script(swarm: VirtualSwarm) -> None:
        nonlocal deaf
        old, other = swarm.replicas(0)[0], swarm.replicas(1)[0]
        at_two, applied, joined = asyncio.Event(), asyncio.Event(), asyncio.Event()

        def look(peer: PeerId, event: str, fields: dict[str, object]) -> None:
            if event == "applied" and fields["stage"] == 0:
                (at_two if fields["version"] == 2 else applied if fields["version"] == 3 else asyncio.Event()).set()
            if event == "synced" and peer == "newcomer" and fields["version"] == 3:
                joined.set()

        swarm.hooks.append(look)
        await at_two.wait()
        deaf = True
        await applied.wait()
        assert other.peer.replicas[1].member.version == 2
        swarm.add((0,), "newcomer")
        await joined.wait()
        swarm.kill(old)
        deaf = False

    swarm.run(until_s=60.0, script=script)
    assert swarm.counts["restart"] == swarm.counts["orphaned"] == 0


@pytest.mark.parametrize("joins_s", [0.08, 0.112, 0.14])
def test_who_was_overruled_as_leader_lets_the_other_keep_the_next_step(joins_s: float) -> None:
    """The second replica of stage 1 signs the commit that the first makes alone, and the first does not hear it.

    So the second counts for itself and not for the first, and each takes itself for the first in order.
    """
    swarm = watched(Plan(stages=3, microbatches=8, steps=8, classes=2, served=((0,), (0,), (1,), (1,), (2,))))

    async def script(swarm: VirtualSwarm) -> None:
        await asyncio.sleep(joins_s)
        swarm.add([2], "zz")

    swarm.run(until_s=120.0, script=script)
    kept = [fields["step"] for _, peer, event, fields in swarm.events if event == "leader" and fields["stage"] == 1]
    assert sorted(kept) == [0, *range(8)] and swarm.checker.forks == 0
    # Ten seconds are in it in which the second waits for the first in a round that the first has left.
    assert swarm.loop.time() < 20.0, "forty and more, if both keep all the time"
