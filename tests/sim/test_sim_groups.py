"""64 and 256 members in groups with 15 % absentees a round: exact rounds end with the sum;
gossip mixes as the paper says."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
from further import further
from strike import leader_of

from swarmnet.averaging.grid import Group, cutting_of, grid_of, groups, in_rows, random_groups, shape
from swarmnet.ids import Ballot, Chain, Generation, PeerId
from swarmnet.manifest.schema import Protocol
from swarmnet.messages import MAX_MATES, Control, LineQuality, Round, StagePlan, Stamp
from swarmnet.stage.interfaces import Contribution, Reduced
from swarmnet.step.ledger import Ledger
from swarmnet.step.rounds import RoundBuilder
from swarmnet.sums.references import TURNS
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_engine import SimulatedEngine
from swarmnet.testing.virtual_swarm import VirtualSwarm

STAMP = Stamp(3, 0, Chain("00" * 32))
DIMENSIONS, ELEMENTS = 24, 1 << 20

Partition = Sequence[Sequence[PeerId]]


@dataclass(frozen=True)
class Mixing:
    """By what a round shrinks the squared distance from the mean, on average over rounds."""

    way: str
    members: int
    group: int
    absent: float
    measured: float
    predicted: float


@dataclass(frozen=True)
class Traffic:
    """What a member receives in a round on average. vectors: in all, and from_afar: from other sites, as a share of the
    whole vector. mates: from how many members, at most."""

    members: int
    sites: int
    group: int
    vectors: float
    from_afar: float
    mates: int


def contraction(num_members: int, num_groups: int) -> float:
    """By what one round of a random partition shrinks the expected squared distance from the mean (Moshpit, 3.2)."""
    return (num_groups - 1) / num_members + num_groups / num_members**2


def peers_of(number: int) -> list[PeerId]:
    """Names."""
    return [PeerId(f"p{place:03}") for place in range(number)]


def spread(values: dict[PeerId, list[float]]) -> float:
    """The squared distance from the mean, summed over members."""
    means = [statistics.fmean(column) for column in zip(*values.values(), strict=True)]
    return sum((value - mean) ** 2 for vector in values.values() for value, mean in zip(vector, means, strict=True))


def mix(values: dict[PeerId, list[float]], partition: Partition, absent: frozenset[PeerId]) -> int:
    """One round, in place. Returns the number of groups, absentees as groups of their own."""
    num_groups = 0
    for group in partition:
        present = [peer for peer in group if peer not in absent]
        num_groups += len(group) - len(present) + bool(present)
        if present:
            mean = [statistics.fmean(column) for column in zip(*(values[peer] for peer in present), strict=True)]
            for peer in present:
                values[peer] = mean
    return num_groups


def mixing(
    way: str,
    members: int,
    size: int,
    absent: float,
    partition: Callable[[int], Partition],
    *,
    rounds: int,
    seed: int,
    fresh_every: int,
) -> Mixing:
    """Measure it. fresh_every: rounds after which all vectors are drawn anew."""
    rng, names = random.Random(seed), peers_of(members)
    ratios: list[float] = []
    predicted: list[float] = []
    values: dict[PeerId, list[float]] = {}
    for turn in range(rounds):
        if turn % fresh_every == 0:
            values = {peer: [rng.gauss(0.0, 1.0) for _ in range(DIMENSIONS)] for peer in names}
        gone = frozenset(rng.sample(names, round(absent * members)))
        before = spread(values)
        num_groups = mix(values, partition(turn), gone)
        ratios.append(spread(values) / before)
        predicted.append(contraction(members, num_groups))
    return Mixing(way, members, size, absent, statistics.fmean(ratios), statistics.fmean(predicted))


def by_chance(members: int, size: int, absent: float, *, rounds: int, seed: int) -> Mixing:
    """Random groups, in as many draws as take turns; vectors are drawn anew after two cycles."""
    names = peers_of(members)
    return mixing(
        "random",
        members,
        size,
        absent,
        lambda turn: random_groups(names, size, seed, turn % TURNS),
        rounds=rounds,
        seed=seed,
        fresh_every=2 * TURNS,
    )


def by_turns(members: int, size: int, absent: float, *, rounds: int, seed: int) -> Mixing:
    """Rows and columns of one grid in turns: per round, over both turns together."""
    grid = in_rows(peers_of(members), shape(members, size))
    ways: tuple[Partition, Partition] = grid.rows, grid.columns
    return mixing(
        "grid", members, len(grid.rows[0]), absent, lambda turn: ways[turn % 2], rounds=rounds, seed=seed, fresh_every=2
    )


def traffic(members: int, sites: int, size: int) -> Traffic:
    """Of one round in which everybody has counted something."""
    names = peers_of(members)
    site = {peer: place % sites for place, peer in enumerate(names)}
    ledger, opening = Ledger(members), RoundBuilder(STAMP, Ballot(1, names[0]), size, itertools.count())
    for index, peer in enumerate(names):
        ledger.claim((peer, Generation(1, 0)), index)
        opening.measured(
            peer,
            LineQuality(
                0,
                tuple(
                    (other, 1_000 if site[other] == site[peer] else 50_000)
                    for other in names[:MAX_MATES]
                    if other != peer
                ),
            ),
        )
    current = opening.open(names, ledger)
    elements: Counter[bool] = Counter()
    mates = 0
    cutting = cutting_of(current, names, (0, ELEMENTS), size, 1, 8.0)
    for peer in names:
        found = [
            received for group in groups(peer, current, (0, ELEMENTS), cutting) for received in _received(peer, group)
        ]
        mates = max(mates, len({other for other, _ in found}))
        for other, num_elements in found:
            elements[site[other] != site[peer]] += num_elements
    whole = members * ELEMENTS
    return Traffic(members, sites, size, elements.total() / whole, elements[True] / whole, mates)


def _received(peer: PeerId, group: Group) -> Iterator[tuple[PeerId, int]]:
    """(from whom, how many elements) comes to `peer` in this group."""
    sizes = {reducer: sum(stop - start for start, stop in chunks) for reducer, chunks in group.chunks}
    yield from ((reducer, num_elements) for reducer, num_elements in sizes.items() if reducer != peer)
    if peer in sizes:
        yield from ((speaker.peer, sizes[peer]) for speaker in group.speakers if speaker.peer != peer)


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
def test_random_groups_mix_nearly_as_the_paper_predicts(members: int, size: int) -> None:
    found = by_chance(members, size, 0.15, rounds=12, seed=5)
    assert 0.9 < found.measured / found.predicted < 1.15, found


@pytest.mark.parametrize("members", [64, *further(256)])
def test_two_rounds_of_a_full_grid_are_the_mean_and_absentees_cost_no_more_than_by_chance(members: int) -> None:
    names = peers_of(members)
    grid = in_rows(names, shape(members, 16))
    values = {peer: [float(place), float(place**2)] for place, peer in enumerate(names)}
    mix(values, grid.rows, frozenset())
    mix(values, grid.columns, frozenset())
    assert spread(values) < 1e-9 * members**4
    found = by_turns(members, 16, 0.15, rounds=12, seed=2)
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


def test_a_grid_moves_the_bytes_of_one_group_and_few_of_them_far() -> None:
    """Eight sites of eight: each is a row, and only columns reach beyond it."""
    one, grid = traffic(64, 8, 64), traffic(64, 8, 16)
    assert one.vectors == grid.vectors == pytest.approx(2 * 63 / 64)
    assert (one.mates, grid.mates) == (63, 14)
    assert grid.from_afar == pytest.approx(one.from_afar / 8)
