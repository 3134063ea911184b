"""Groups on paper: how fast gossip mixes beside what the paper predicts, and how far vectors travel.

    python benchmarks/grouping.py [--members 64,256] [--absent 0,0.15] [--rounds N] [--seed N] [--json FILE]

No network: the pure classes that production's rounds are made of, driven over lists of numbers.

Mixing. Every member holds a vector; in a round each group replaces its members' vectors by their mean, and who is
absent keeps its own. Printed is what a round leaves of the squared distance from the mean, on average, beside
(r - 1) / N + r / N^2 of arXiv:2103.03239 (theorem 3.2), r the number of groups, an absentee a group of its own.
`random`: the draws that take turns where `sync = "local"` has partners (`averaging.grid`). `grid`: rows and columns in
turns, which is no random partition: without absentees two rounds give the exact mean.

Traffic. Members at sites of equal size, a millisecond from each other inside one and fifty between two. Printed is what
a member receives in a round, in vectors, what of that comes from another site, and from how many members it comes: in
one group of all, and in a grid that the leader has arranged by what members report of their distances.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swarmnet.averaging.grid import Group, cutting_of, groups, in_rows, random_groups, shape
from swarmnet.ids import Ballot, Chain, Generation, PeerId
from swarmnet.messages import MAX_MATES, LineQuality, Stamp
from swarmnet.step.ledger import Ledger
from swarmnet.step.rounds import RoundBuilder
from swarmnet.sums.references import TURNS

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


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", default="64,256", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--absent", default="0,0.15", type=lambda text: [float(part) for part in text.split(",")])
    parser.add_argument("--rounds", default=40, type=int)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    drawn: list[Mixing] = []
    for members, absent in itertools.product(options.members, options.absent):
        for size in (2, 8, 16):
            drawn.append(by_chance(members, size, absent, rounds=options.rounds, seed=options.seed))
        drawn.append(by_turns(members, 16, absent, rounds=options.rounds, seed=options.seed))
    print("| groups | members | in a group | absent | a round leaves | predicted | ratio |")
    print("|---|---|---|---|---|---|---|")
    for row in drawn:
        print(
            f"| {row.way} | {row.members} | {row.group} | {row.absent:.0%} | {row.measured:.4f} | "
            f"{row.predicted:.4f} | {row.measured / row.predicted:.2f} |"
        )
    moved = [traffic(members, 8, size) for members in options.members for size in (1024, 16)]
    print("\n| members | sites | largest group | vectors received | from other sites | from members |")
    print("|---|---|---|---|---|---|")
    for way in moved:
        print(f"| {way.members} | {way.sites} | {way.group} | {way.vectors:.3f} | {way.from_afar:.3f} | {way.mates} |")
    if options.json:
        rows = [*map(asdict, drawn), *map(asdict, moved)]
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
