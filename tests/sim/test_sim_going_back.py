"""Who goes back and who does not: a peer that was away, one that makes things up, one that went alone."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from further import further

from swarmnet.directory import Record, StageStatus
from swarmnet.ids import NO_RESTART, OnDisk, PeerId, Restart, first_chain
from swarmnet.messages import Heartbeat, Stamp
from swarmnet.state.rollback import Move
from swarmnet.testing.plan import RUN, Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm
from tests.sim.going_back import GoingBack
from tests.sim.strike import watched
from tests.sim.test_sim_restart import reached
from tests.sim.test_sim_restart_races import all_serve, member, until


def newest(swarm: VirtualSwarm) -> int:
    return max(member(node).version for node in swarm.nodes if node.up)


@pytest.mark.parametrize("checkpoint_every", [4, *further(50)])
@pytest.mark.parametrize("away_s", [20.0, 50.0])
@pytest.mark.parametrize("replicas", [1, 2, *further(3)])
def test_one_peer_whose_cable_is_out_takes_nobody_back(replicas: int, away_s: float, checkpoint_every: int) -> None:
    """Longer than the long silence, and longer than records live: neither it nor anybody else goes back."""
    swarm = watched(Plan(stages=2, replicas=replicas, steps=90, checkpoint_every=checkpoint_every))
    back = GoingBack(swarm)

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 14)
        lone = swarm.replicas(1)[0]
        swarm.partition([lone], [*[n for n in swarm.nodes if n is not lone], *swarm.trainers], directory=True)
        await asyncio.sleep(away_s)
        swarm.heal()
        healed = newest(swarm)
        await asyncio.sleep(10.0)
        assert all_serve(swarm, min(healed + 2, 88)), swarm.describe()

    swarm.run(script=script)
    assert not back.moves
    assert not back.twice(*[node.peer_id for node in swarm.nodes])


@pytest.mark.parametrize(
    ("restart", "wants", "disk", "version", "crowd"),
    [
        (Restart(1, 0), Restart(1, 0), (), None, 1),
        (Restart(1000, 4), Restart(1000, 4), (4,), 4, 1),
        (NO_RESTART, Restart(1, 4), (4,), None, 1),
        (NO_RESTART, NO_RESTART, (30,), None, 1),
        (Restart(1, 30), Restart(2, 30), (30,), 30, 1),
        (Restart(1, 4), Restart(1, 4), (4,), 4, 9),
        (Restart(1, 80), Restart(1, 80), (80,), 80, 9),
    ],
)
def test_what_free_identities_say_moves_nobody(
    restart: Restart, wants: Restart, disk: tuple[int, ...], version: int | None, crowd: int
) -> None:
    """In records, of all stages, and in heartbeats to all peers. One alone misleads no joining peer either."""
    swarm = watched(Plan(stages=2, replicas=2, steps=84 if crowd > 1 else 30, checkpoint_every=2))
    back = GoingBack(swarm)
    liars = [PeerId(f"liar.{number}") for number in range(crowd)]
    statuses = tuple(
        StageStatus(
            stage,
            version or 0,
            first_chain(RUN, stage),
            version is not None,
            disk=tuple(OnDisk(v, restart) for v in disk),
        )
        for stage in range(1 if crowd > 1 else 2)
    )

    async def lie() -> None:
        while not swarm.done:
            for liar in liars:
                await swarm.directory.publish(Record(RUN, liar, 7, ("memory",), statuses, restart=restart, wants=wants))
                for node, stage in itertools.product(swarm.nodes, range(2)):
                    stamp = Stamp(version or 0, stage, first_chain(RUN, stage), max(restart, wants))
                    beat = Heartbeat(stamp, 7, version is not None, None, (), ())
                    node.peer.on_tell(liar, beat)
            await asyncio.sleep(0.5)

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 68 if crowd > 1 else 4)
        async with asyncio.TaskGroup() as group:
            lying = group.create_task(lie())
            if crowd == 1:
                await reached(swarm, 9)
                comer = swarm.add((1,), "comer")
                await until(lambda: member(comer) is not None and member(comer).synced)
                assert member(comer).restart == NO_RESTART
            await until(lambda: swarm.done)
            await lying

    swarm.run(script=script, until_s=60.0 * (1 + (crowd > 1)))
    assert not back.moves and not back.twice(*[node.peer_id for node in swarm.nodes])


def test_one_that_went_back_alone_takes_it_back_and_nothing_is_lost() -> None:
    """The only replica of a stage, made to go back to the fourth version; what it had is on its disk."""
    swarm = watched(Plan(stages=2, replicas=1, steps=20, checkpoint_every=4))
    back = GoingBack(swarm)
    had: list[int] = []

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 9)
        lone = swarm.replicas(1)[0]
        await until(lambda: not member(lone).oldest.applying)
        had.append(member(lone).version)
        lone.peer._supply.rollbacks.current = Restart(1, 4)
        lone.peer._supply._follow(Move.GO_BACK, since=NO_RESTART)
        await until(lambda: member(lone).restart.number and member(lone).synced and member(lone).version == 4)
        await until(lambda: member(lone).restart == NO_RESTART and member(lone).synced)
        assert member(lone).version >= had[0]

    swarm.run(script=script)
    assert [move.restart for move in back.moves] == [Restart(1, 4), NO_RESTART]
    assert not back.twice(*[node.peer_id for node in swarm.nodes])
    assert last_commit_s(swarm) < 25.0


def last_commit_s(swarm: VirtualSwarm) -> float:
    return max(at for at, _, event, _ in swarm.events if event == "committed")
