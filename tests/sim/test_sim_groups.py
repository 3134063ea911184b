"""64 and 256 members in groups with 15 % absentees a round: exact rounds end with the sum;
gossip mixes as the paper says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from types import ModuleType

import pytest
from benchmark_modules import load
from further import further
from strike import leader_of

from swarmnet.averaging.grid import grid_of
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Protocol
from swarmnet.messages import Control, Round, StagePlan
from swarmnet.stage.seams import Contribution, Reduced
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_engine import SimulatedEngine
from swarmnet.testing.virtual_swarm import VirtualSwarm


@pytest.fixture(scope="module")
def grouping() -> ModuleType:
    return load("grouping")


def watch_sums(engine: SimulatedEngine, over_rows: asyncio.Event) -> None:
    """Tell when something has been summed over the rows."""
    reduce = engine.reduce

    async def watched(contributions: Sequence[Contribution], start: int, stop: int, *, hop: int = 0) -> Reduced:
        result = await reduce(contributions, start, stop, hop=hop)
        if hop:
            over_rows.set()
        return result

    engine.reduce = watched  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("members", "num_rows", "num_lost", "protocol"),
    [
        (64, 8, 10, Protocol(suspect_s=12.0)),  # 64 times 63 heartbeats
        pytest.param(256, 16, 38, Protocol(suspect_s=48.0, long_silence_s=96.0), marks=pytest.mark.long),
    ],
)
def test_replicas_are_lost_in_the_middle_of_a_round(
    members: int, num_rows: int, num_lost: int, protocol: Protocol
) -> None:
    """The whole product. What was summed and where everybody ends is the single process's, to the bit."""
    plan = Plan(stages=1, replicas=members, microbatches=members, steps=1, group_size=16, protocol=protocol)
    swarm = VirtualSwarm(plan, seed=1)
    lost: set[PeerId] = set()
    rounds: list[Round] = []

    def watch(sender: PeerId, receiver: PeerId, message: Control) -> None:
        attempt = message.attempt if isinstance(message, StagePlan) else None
        if attempt is not None and attempt not in rounds:
            rounds.append(attempt)

    swarm.network.intercepts.append(watch)

    def strike() -> None:
        leader = leader_of(swarm, 0)
        candidates = sorted(node.peer_id for node in swarm.replicas(0) if node is not leader)
        lost.update(random.Random(3).sample(candidates, num_lost))
        for node in swarm.replicas(0):
            if node.peer_id in lost:
                swarm.kill(node)

    async def script(swarm: VirtualSwarm) -> None:
        struck = asyncio.Event()
        for node in swarm.nodes:
            watch_sums(node.engines[0], struck)
        await struck.wait()
        strike()

    swarm.run(until_s=240.0, script=script)
    assert len(lost) == num_lost and len(swarm.replicas(0)) == members - num_lost
    assert len(grid_of(rounds[0]).rows) == num_rows
    assert any(event == "ordered" for _, _, event, _ in swarm.events), "what was lost was counted again"


@pytest.mark.parametrize(("members", "size"), [(64, 8), *further((64, 2), (256, 16))])
def test_random_groups_mix_nearly_as_the_paper_predicts(grouping: ModuleType, members: int, size: int) -> None:
    found = grouping.by_chance(members, size, 0.15, rounds=12, seed=5)
    assert 0.9 < found.measured / found.predicted < 1.15, found


@pytest.mark.parametrize("members", [64, *further(256)])
def test_two_rounds_of_a_full_grid_are_the_mean_and_absentees_cost_no_more_than_by_chance(
    grouping: ModuleType, members: int
) -> None:
    names = grouping.peers_of(members)
    grid = grouping.in_rows(names, grouping.shape(members, 16))
    values = {peer: [float(place), float(place**2)] for place, peer in enumerate(names)}
    grouping.mix(values, grid.rows, frozenset())
    grouping.mix(values, grid.columns, frozenset())
    assert grouping.spread(values) < 1e-9 * members**4
    found = grouping.by_turns(members, 16, 0.15, rounds=12, seed=2)
    assert found.measured < 1.1 * found.predicted, found


def test_a_replica_that_sums_alone_says_why() -> None:
    swarm = VirtualSwarm(Plan(stages=1, replicas=2, microbatches=4, steps=6, state_bytes=1 << 21), seed=2)
    first_applied = asyncio.Event()
    swarm.hooks.append(lambda peer, event, fields: first_applied.set() if event == "applied" else None)

    async def script(swarm: VirtualSwarm) -> None:
        await first_applied.wait()
        gone = swarm.nodes[1]
        swarm.kill(gone)
        await asyncio.sleep(0.2)
        swarm.add(gone.stages, gone.peer_id)  # it is alive, and its copy of the state takes a while

    swarm.run(until_s=120.0, script=script)
    alone = [(peer, fields["reason"]) for _, peer, event, fields in swarm.events if event == "averaged_alone"]
    assert set(alone) == {("s0.0", "s0.1 has no state yet")}


def test_a_grid_moves_the_bytes_of_one_group_and_few_of_them_far(grouping: ModuleType) -> None:
    """Eight sites of eight: each is a row, and only columns reach beyond it."""
    one, grid = grouping.traffic(64, 8, 64), grouping.traffic(64, 8, 16)
    assert one.vectors == grid.vectors == pytest.approx(2 * 63 / 64)
    assert (one.mates, grid.mates) == (63, 14)
    assert grid.from_afar == pytest.approx(one.from_afar / 8)
