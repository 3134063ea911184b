"""A restart of the run that meets something else: a stranger's word, a cut, an older memory, newcomers, a lost step."""

from __future__ import annotations

import asyncio

import pytest
from further import further
from strike import until

from swarmnet.directory import Record, StageStatus
from swarmnet.ids import PeerId, Restart, first_chain
from swarmnet.testing.plan import RUN, Plan
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm
from tests.sim.going_back import GoingBack
from tests.sim.strike import leader_of, node_of, watched
from tests.sim.test_sim_restart import kill_everybody, reached


def member(node: Node):
    """The step machine of a peer of one stage, None before it has one."""
    replica = node.peer.replicas.get(node.stages[0])
    return replica and replica.member


def all_serve(swarm: VirtualSwarm, version: int) -> bool:
    """Has every live replica got so far?"""
    found = [member(node) for node in swarm.nodes if node.up]
    return all(one is not None and one.synced and one.version >= version for one in found)


def last_step_at(swarm: VirtualSwarm) -> float:
    """When the last replica came to the end."""
    return max(at for at, _, event, fields in swarm.events if event == "applied")


def committed_after(swarm: VirtualSwarm, began: float) -> list[int]:
    return [int(str(fields["step"])) for at, _, event, fields in swarm.events if event == "committed" and at > began]


# ------------------------------------------------------------ a stranger's word


BEYOND = 1 << 53


@pytest.mark.parametrize(
    ("number", "version", "data_at_peers"),
    [
        *((BEYOND, BEYOND, True), (1, 31, True), (1, 0, True), (1, 4, False)),
        *further((1, BEYOND, False), (BEYOND, 4, True), (BEYOND, 0, False), (1, 30, False), (1000, 2, True)),
    ],
)
def test_a_strangers_word_moves_nobody(number: int, version: int, data_at_peers: bool) -> None:
    """Whatever restart a record names: a run that lacks nothing executes every step once, and in its time."""
    swarm = watched(Plan(stages=2, replicas=2, steps=30, checkpoint_every=2, data_at_peers=data_at_peers))
    back = GoingBack(swarm)
    everybody = [PeerId(name) for name in ("s0.0", "s0.1", "s1.2", "s1.3")]

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 8)
        for _ in range(3):
            status = StageStatus(0, 0, first_chain(RUN, 0), False)
            await swarm.directory.publish(
                Record(RUN, PeerId("stranger"), 7, ("memory",), (status,), restart=Restart(number, version))
            )
            await asyncio.sleep(1.0)
            swarm.add((len(swarm.nodes) % 2,))
            await asyncio.sleep(1.0)

    swarm.run(script=script)
    assert all(at < 15.0 for at, peer, event, _ in swarm.events if event == "synced" and peer not in everybody)
    assert not back.went_back(*everybody) and not back.twice(*everybody)
    assert back.restarts <= {Restart(number, version)} and (version <= 30 or not back.restarts)
    assert last_step_at(swarm) < 15.0  # 10 s undisturbed


# ------------------------------------------------------------ a cut


def test_the_side_that_is_whole_and_further_goes_back_for_nobody() -> None:
    """Both sides have all stages; one loses a stage, goes back, and has the higher restart when the cut heals."""
    swarm = watched(Plan(stages=2, replicas=2, steps=196, checkpoint_every=4))
    back = GoingBack(swarm)
    healthy = [PeerId("s0.0"), PeerId("s1.2")]
    far: list[int] = []

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 9)
        left: list[Node | PeerId] = [node for node in swarm.nodes if node.peer_id in healthy] + [PeerId("trainer.0")]
        right = [node for node in swarm.nodes if node.peer_id not in healthy]
        swarm.partition(left, right, directory=True)
        await asyncio.sleep(20.0)
        victim = right.pop()
        swarm.kill(victim)
        right.append(swarm.add(victim.stages, victim.peer_id))
        swarm.partition(left, right, directory=True)
        await until(lambda: all(member(node) and member(node).restart.number for node in right))
        await asyncio.sleep(5.0)
        far.append(min(member(node).version for node in swarm.nodes if node.peer_id in healthy))
        assert max(member(node).version for node in right) < far[0] - 20
        swarm.heal()
        await asyncio.sleep(5.0)
        assert all_serve(swarm, far[0] + 4), swarm.describe()

    swarm.run(script=script)
    assert back.moves and not back.went_back(*healthy) and not back.twice(*healthy)
    assert len(back.restarts) <= 2
    assert all(move.kept for move in back.moves if move.peer in healthy)


@pytest.mark.parametrize("away_s", [12.0, *further(1.0)])
def test_whoever_restarts_alone_behind_a_cut_takes_nobody_back(away_s: float) -> None:
    """It has all the stages there are, so it goes back by itself once the others' records have expired; afterwards it
    takes that back, and catches up with them."""
    swarm = watched(Plan(stages=1, replicas=4, steps=160, checkpoint_every=4))
    back = GoingBack(swarm)
    rest = [PeerId("s0.0"), PeerId("s0.1"), PeerId("s0.2")]
    lone = PeerId("s0.3")

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 9)
        victim = node_of(swarm, lone)
        assert victim is not None
        swarm.kill(victim)
        swarm.partition([*rest, PeerId("trainer.0")], [lone], directory=True)
        await asyncio.sleep(away_s)
        swarm.add((0,), lone)
        await until(lambda: any(move.peer == lone for move in back.moves))
        await asyncio.sleep(5.0)
        swarm.heal()
        await asyncio.sleep(5.0)
        newest = max(member(node).version for node in swarm.nodes if node.up)
        assert all_serve(swarm, newest - 2), swarm.describe()

    swarm.run(script=script)
    assert [(move.peer, move.restart.number) for move in back.moves] == [(lone, 1), (lone, 0)]
    assert not back.went_back(*rest) and not back.twice(*rest)


# ------------------------------------------------------------ disks


@pytest.mark.parametrize("seed", [1, *further(3)])
def test_disks_that_remember_a_higher_restart_are_not_forgotten(seed: int) -> None:
    """Of a run that went back twice, two machines come back empty: they would call the next restart the first."""
    swarm = watched(Plan(stages=2, replicas=2, steps=46, checkpoint_every=2), seed)
    back = GoingBack(swarm)
    ends: list[int] = []

    async def again(swarm: VirtualSwarm, *empty: str) -> None:
        ends.append(min(member(node).version for node in swarm.nodes if node.up))
        victims = kill_everybody(swarm)
        for name in empty:
            swarm.disks[PeerId(name)].files.clear()
        await asyncio.sleep(40.0)
        for peer, stages in victims:
            swarm.add(stages, peer)
        swarm.add_trainer()

    async def script(swarm: VirtualSwarm) -> None:
        for version, empty in ((7, ()), (14, ()), (22, ("s0.1", "s1.3")), (36, ())):
            await until(lambda version=version: all_serve(swarm, version), every_s=0.05)
            await again(swarm, *empty)

    swarm.run(script=script, until_s=400.0)
    # Each time from the newest checkpoint that all have, under a number of its own. The two without a memory may have
    # said the first number again before they heard of the higher one.
    numbered: dict[int, set[int]] = {}
    for restart in back.restarts:
        numbered.setdefault(restart.number, set()).add(restart.version)
    for number, end in enumerate(ends, start=1):
        assert max(numbered[number]) >= end - 2 and min(numbered[number]) >= end - 2, (number, numbered, ends)
    assert max(numbered) == len(ends)
    assert len(back.restarts) <= len(ends) + 1
    for node in swarm.replicas(0) + swarm.replicas(1):
        checkpoints = node.peer.replicas[node.stages[0]].state.checkpoints
        assert {version for _, version in swarm.disks[node.peer_id].files} == set(checkpoints.versions)


def test_checkpoints_of_a_run_under_a_lower_number_than_disks_remember_are_good() -> None:
    """Newcomers who know of no restart began again and went back once; who remembers two has to go along with them."""
    swarm = watched(Plan(stages=2, replicas=1, steps=40, checkpoint_every=2))
    back = GoingBack(swarm)

    async def script(swarm: VirtualSwarm) -> None:
        for version in (5, 7, 9):
            await until(lambda version=version: all_serve(swarm, version), every_s=0.05)
            victims = kill_everybody(swarm)
            await asyncio.sleep(40.0)
            for peer, stages in victims * (version < 9):
                swarm.add(stages, peer)
            swarm.add_trainer()
        newcomers = [swarm.add((stage,), f"newcomer-{stage}") for stage in range(2)]
        await until(lambda: all_serve(swarm, 15), every_s=0.05)
        swarm.kill(newcomers[1])
        swarm.add((1,), newcomers[1].peer_id)
        await until(lambda: back.moves and back.moves[-1].restart.version >= 14)
        await asyncio.sleep(2.0)
        held = [swarm.add(stages, peer) for peer, stages in victims]
        await until(lambda: all(member(node) is not None and member(node).synced for node in held))
        for node in held:  # what was written under the second restart is not this run's
            of = swarm.disks[node.peer_id].files
            announced = node.peer.replicas[node.stages[0]].state.checkpoints.versions
            assert any(info.restart_number == 2 for info, _ in of.values())
            assert not any(of[node.stages[0], version][0].restart_number == 2 for version in announced)

    swarm.run(script=script, until_s=400.0)
    assert [move.restart.number for move in back.moves][-2:] == [1, 1]
    assert {restart.number for restart in back.restarts} == {1, 2}
    for node in swarm.replicas(0) + swarm.replicas(1):
        checkpoints = node.peer.replicas[node.stages[0]].state.checkpoints
        assert {version for _, version in swarm.disks[node.peer_id].files} == set(checkpoints.versions)
        assert max(checkpoints.versions) >= 38


@pytest.mark.parametrize("between_s", [0.5, *further(0.0, 4.0)])
@pytest.mark.parametrize("empty_first", [False, True])
def test_newcomers_without_a_disk_do_not_begin_the_run_again(between_s: float, empty_first: bool) -> None:
    """They serve all stages, and come before, with or after those who have the run on disk."""
    swarm = watched(Plan(stages=2, replicas=2, steps=34, checkpoint_every=2))
    back = GoingBack(swarm)
    empty = {PeerId("s0.1"), PeerId("s1.3")}
    times: list[float] = []

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 22)
        victims = kill_everybody(swarm)
        await asyncio.sleep(40.0)
        for peer in empty:
            swarm.disks[peer].files.clear()
        for peer, stages in sorted(victims, key=lambda victim: (victim[0] in empty) != empty_first):
            swarm.add(stages, peer)
            await asyncio.sleep(between_s)
        swarm.add_trainer()
        times.append(swarm.loop.time())

    swarm.run(script=script)
    assert len(back.restarts) == 1 and back.versions <= {22, 24}
    [restart] = back.restarts
    began = max(move.at for move in back.moves if move.restart == restart)
    assert began < times[0] + 8.0
    assert min(committed_after(swarm, began)) >= restart.version
    fresh = [peer for peer in empty if any(move.peer == peer and move.served for move in back.moves)]
    assert not fresh or empty_first  # they had begun before anybody with a disk was to be seen


@pytest.mark.parametrize("stage", [0, 1])
def test_one_newcomer_looks_for_a_moment_before_it_begins_at_the_seed(stage: int) -> None:
    """It sees nobody of the other stage yet; a second later those with the run on disk are there."""
    swarm = watched(Plan(stages=2, replicas=1, steps=16, checkpoint_every=2))
    back = GoingBack(swarm)

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 8)
        victims = kill_everybody(swarm)
        await asyncio.sleep(40.0)
        swarm.add((stage,), "newcomer")
        await asyncio.sleep(1.0)
        for peer, stages in victims:
            swarm.add(stages, peer)
        swarm.add_trainer()

    swarm.run(script=script)
    how = [fields["how"] for _, peer, event, fields in swarm.events if event == "synced" and peer == "newcomer"]
    assert how == ["snapshot"] and back.restarts == {Restart(1, 8)}


@pytest.mark.parametrize("first", [0, 1])
def test_a_run_begun_again_gives_way_when_the_last_stage_of_the_old_one_is_back(first: int) -> None:
    """Until then whoever has some of it on disk waits: with the new beginning's state its disk would be overwritten."""
    swarm = watched(Plan(stages=2, replicas=1, steps=60, checkpoint_every=2))
    back = GoingBack(swarm)

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 44)
        victims = sorted(kill_everybody(swarm), key=lambda victim: victim[1] != (first,))
        await asyncio.sleep(40.0)
        swarm.add((0,), "newcomer-0")
        swarm.add((1,), "newcomer-1")
        await asyncio.sleep(3.0)
        for peer, stages in victims:
            swarm.add(stages, peer)
            await asyncio.sleep(5.0)
        assert not any(move.restart.version < 44 for move in back.moves)

    swarm.run(script=script)
    assert back.restarts == {Restart(1, 44)}
    waited = [str(fields["reason"]) for _, _, event, fields in swarm.events if event == "waiting"]
    assert any("begun again" in words and "step 44" in words for words in waited)


# ------------------------------------------------------------ one step


def test_the_sum_of_a_step_that_is_done_a_second_time_is_handed_over() -> None:
    """The run goes back by one step, so the last step done is the next one to do; its sum is the second one's."""
    swarm = watched(Plan(stages=2, replicas=3, steps=12, checkpoint_every=4, forward_s=0.05))
    back = GoingBack(swarm)
    frozen: list[tuple[PeerId, float]] = []

    def all_at(version: int) -> bool:
        return all(member(node) is not None and member(node).version == version for node in swarm.replicas(0))

    async def script(swarm: VirtualSwarm) -> None:
        await until(lambda: len(swarm.replicas(0)) == 3 and all_at(5))
        lost = swarm.replicas(1)
        for node in lost:
            swarm.kill(node)
        await asyncio.sleep(1.0)
        for node in lost:
            swarm.add(node.stages, node.peer_id)
        await until(lambda: all(member(n).restart.number == 1 and member(n).synced for n in swarm.replicas(0)))
        assert all_at(4)

        def summing() -> bool:
            leader = leader_of(swarm, 0)
            return leader is not None and any(member(n).oldest.part.round is not None for n in swarm.replicas(0))

        await until(summing, every_s=0.0005)
        leader = leader_of(swarm, 0)
        assert leader is not None and all_at(4)
        holder, late = (node for node in swarm.replicas(0) if node is not leader)
        swarm.stop(late)
        await until(lambda: member(holder).oldest.finished is not None or member(holder).version == 5)
        swarm.kill(leader)  # `holder` alone has the sum
        await asyncio.sleep(1.0)
        swarm.resume(late)
        frozen.append((late.peer_id, swarm.loop.time()))

    swarm.run(script=script, until_s=120.0)
    [(late_peer, resumed)] = frozen
    applied = [
        at
        for at, peer, event, fields in swarm.events
        if event == "applied" and peer == late_peer and fields["version"] == 5 and at > resumed
    ]
    assert applied and applied[0] < resumed + 10.0
    assert back.restarts == {Restart(1, 4)}
