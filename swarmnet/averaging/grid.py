"""The groups of an aggregation round, hop by hop; the rows of the group mesh; and random gossip groups.

Up to `group_size` members are one group. More members form a mesh (Moshpit, arXiv:2103.03239) of about as many rows as
columns. The vector is cut into one part per column, the same in every row:

| hop | who sums | what |
|---|---|---|
| 0 | each row its own contributions, the member of a column its column's part | the vector, once per row |
| 1 | each column its part over all rows, cut once more among its members | the vector, once |
| then | the finished part goes from each member of a column to the rest of its row | |

So every element is summed once per row and once over the rows, every member receives it once, and a member sends about
2 S bytes of a vector of S, as in one group: half of what two successive complete all-reduces would send. A column
longer than `group_size` is a mesh again. Pure; knows no bytes and no time.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from swarmnet.averaging.parts import Range, chunk_elements, chunks, parts
from swarmnet.ids import PeerId
from swarmnet.messages import NONE, Indexes, Round


@dataclass(frozen=True, slots=True)
class Speaker:
    """What `peer` adds to its group's sum: its own contribution, or those of the group that it summed in the last hop.

    indexes: the microbatches that it speaks for; none among partners.
    """

    peer: PeerId
    indexes: Indexes = NONE

    @property
    def weight(self) -> int:
        """In a weighted reducer. Partners all weigh the same."""
        return len(self.indexes) or 1


@dataclass(frozen=True, slots=True)
class Group:
    """One sum among a few members.

    speakers: the contributors, in the order of summing. chunks: what each reducer reduces of `span`, contiguous and in
    order; together they are the span. last: all members receive this aggregate; else the next hop sums it further.
    """

    hop: int
    span: Range
    speakers: tuple[Speaker, ...]
    chunks: tuple[tuple[PeerId, tuple[Range, ...]], ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Grid:
    """Members in rows. With one row each member has its part; else every row is cut into as many parts as the shortest
    row has members, one part a column, and the last members of longer rows reduce nothing."""

    rows: tuple[tuple[PeerId, ...], ...]

    @property
    def columns(self) -> list[tuple[PeerId, ...]]:
        """One member of every row each."""
        return list(zip(*self.rows, strict=False))


def shape(num_members: int, group_size: int) -> tuple[int, ...]:
    """Lengths of the rows: one up to `group_size`; else of about the d-th root, d the axes that are needed.

    A row is at most one longer than another and never longer than `group_size`. Raises ValueError for groups below 2.
    """
    if group_size < 2 or num_members < 1:
        raise ValueError(f"no groups of up to {group_size} among {num_members}")
    if num_members <= group_size:
        return (num_members,)
    axes = next(axes for axes in itertools.count(2) if group_size**axes >= num_members)
    side = next(side for side in itertools.count(2) if side**axes >= num_members)
    num_rows = -(-num_members // side)
    short, longer = divmod(num_members, num_rows)
    return tuple(short + (row < longer) for row in range(num_rows))


def in_rows(members: Sequence[PeerId], lengths: Sequence[int]) -> Grid:
    """Members in rows of these lengths, in their order. Raises ValueError unless the rows are these members."""
    if sum(lengths) != len(members) or not lengths or min(lengths) < 1:
        raise ValueError(f"{len(members)} members in rows of {tuple(lengths)}")
    edges = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    return Grid(tuple(tuple(members[start:stop]) for start, stop in edges))


def grid_of(current: Round) -> Grid:
    """How the receivers of a round stand."""
    return in_rows(current.receivers, current.rows or (len(current.receivers),))


def circles(grid: Grid, group_size: int) -> Iterator[tuple[PeerId, ...]]:
    """Who exchanges with whom in some hop: the rows, then the columns, or their rows and columns if they are long."""
    yield from grid.rows
    if len(grid.rows) > 1:
        for column in grid.columns:
            yield from circles(in_rows(column, shape(len(column), group_size)), group_size)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a vector is cut. size: of chunks. bandwidths: bytes per second, of members for whom it is known."""

    group_size: int
    size: int
    block: int
    bandwidths: Mapping[PeerId, int]

    def parts(self, span: Range, columns: Sequence[Sequence[PeerId]]) -> list[Range]:
        """One part per column, by the slowest member it has."""
        rates = [min(self.bandwidths.get(peer, 0) for peer in column) for column in columns]
        first, last = span
        return [(first + start, first + stop) for start, stop in parts(last - first, rates, block=self.block)]

    def chunks(self, members: Sequence[PeerId], span: Range) -> Iterator[tuple[PeerId, tuple[Range, ...]]]:
        """What a group cuts: (reducer, chunks) in order, without reducers that get no chunk."""
        for peer, (start, stop) in zip(members, self.parts(span, [[peer] for peer in members]), strict=True):
            if start < stop:
                yield peer, tuple(chunks(start, stop, self.size))

    def pieces(self, members: Sequence[PeerId], span: Range) -> Iterator[Range]:
        """The chunks that pass through these members' hops, in order."""
        grid = in_rows(members, shape(len(members), self.group_size))
        if len(grid.rows) == 1:
            for _, cut in self.chunks(members, span):
                yield from cut
            return
        for column, part in self.columns(grid, span):
            yield from self.pieces(column, part)

    def columns(self, grid: Grid, span: Range) -> list[tuple[tuple[PeerId, ...], Range]]:
        """(members, part) of every column that has any."""
        columns = grid.columns
        return [
            (column, part) for column, part in zip(columns, self.parts(span, columns), strict=True) if part[0] < part[1]
        ]


def groups(me: PeerId, current: Round, span: Range, cutting: Cutting) -> list[Group]:
    """The groups in which `me` takes part to sum this span of a vector over the whole round, hop by hop.

    Those who have counted microbatches contribute, and weigh what they have counted.

    Raises:
        ValueError: the round's rows are not its receivers.
    """
    speakers = {peer: Speaker(peer, indexes) for peer, _, indexes in current.contributions if indexes}
    return list(_groups(me, grid_of(current), speakers, span, cutting, 0))


def lone_group(members: Sequence[PeerId], span: Range, cutting: Cutting) -> Group:
    """A separate group that sums this span: all contribute with equal weight, and the result stays in the group."""
    speakers = tuple(map(Speaker, members))
    return Group(0, span, speakers, tuple(cutting.chunks(members, span)), last=True)


def cutting_of(
    current: Round, members: Sequence[PeerId], span: Range, group_size: int, block: int, element_bytes: float
) -> Cutting:
    """How these receivers of the round cut a span. block, element_bytes: see `Summation` in `swarmnet.stage`."""
    known = dict(zip(current.receivers, current.bandwidths, strict=True)) if current.bandwidths else {}
    bandwidths = {peer: known.get(peer, 0) for peer in members}
    size = chunk_elements(span[1] - span[0], len(members), element_bytes, [*bandwidths.values()])
    return Cutting(group_size, size, block, bandwidths)


def _groups(
    me: PeerId, grid: Grid, speakers: Mapping[PeerId, Speaker], span: Range, cutting: Cutting, hop: int
) -> Iterator[Group]:
    if len(grid.rows) == 1:
        yield Group(hop, span, tuple(speakers.values()), tuple(cutting.chunks(grid.rows[0], span)), last=True)
        return
    mine = next((row for row in grid.rows if me in row), grid.rows[0])  # a member that came later only receives
    columns = cutting.columns(grid, span)
    reduced: dict[PeerId, list[Range]] = {}
    for column, part in columns:
        reduced.setdefault(next(peer for peer in column if peer in mine), []).extend(cutting.pieces(column, part))
    in_row = [[speakers[peer] for peer in row if peer in speakers] for row in grid.rows]
    cut = tuple((peer, tuple(chunks)) for peer, chunks in reduced.items())
    yield Group(hop, span, tuple(in_row[grid.rows.index(mine)]), cut, last=False)
    for column, part in columns:
        if me in column:
            for_rows = {
                peer: Speaker(peer, NONE.union(*(speaker.indexes for speaker in row)))
                for peer, row in zip(column, in_row, strict=True)
                if row
            }
            inner = in_rows(column, shape(len(column), cutting.group_size))
            yield from _groups(me, inner, for_rows, part, cutting, hop + 1)


# ---------------------------------------------------------------- who shares a row
#
# Rows exchange whole vectors, columns only a part of one: what is far apart belongs in different rows. The leader asks,
# members obey what its round says.

RoundTrips = Mapping[tuple[PeerId, PeerId], float]
"""(one, other) -> how far away `one` has found `other`, in any unit; pairs may be missing, or differ by direction."""


def arrange(
    members: Iterable[PeerId], round_trips: RoundTrips, group_size: int, bandwidths: Mapping[PeerId, int] | None = None
) -> Grid:
    """A grid of all members, each once: near peers share a row, and fast ones are placed where something is reduced.

    Greedy: the peer that is farthest from all others (the mean of its known distances) begins a row, and the peers
    nearest to it fill the row, by the measured distance or the path over one other member. Unknown peers come last.
    """
    rates = bandwidths or {}
    left = sorted(set(members))
    lengths = shape(len(left), group_size)
    if len(lengths) == 1:
        return in_rows(left, lengths)
    known = _distances(round_trips, set(left))
    left.sort(key=lambda peer: -statistics.fmean(known[peer].values() or (0.0,)))
    placed: list[PeerId] = []
    for length in lengths:
        near = _near(left[0], known)
        row = sorted(left, key=lambda peer: near.get(peer, math.inf))[:length]
        left = [peer for peer in left if peer not in row]
        placed += sorted(row, key=lambda peer: (-rates.get(peer, 0), peer))
    return in_rows(placed, lengths)


def _distances(round_trips: RoundTrips, members: Set[PeerId]) -> dict[PeerId, dict[PeerId, float]]:
    """Peer -> other -> the mean of what both have measured, where at least one has."""
    found: dict[PeerId, dict[PeerId, list[float]]] = {peer: {} for peer in members}
    for (one, other), value in round_trips.items():
        if one != other and one in members and other in members:
            found[one].setdefault(other, []).append(value)
            found[other].setdefault(one, []).append(value)
    return {peer: {other: statistics.fmean(each) for other, each in mates.items()} for peer, mates in found.items()}


def _near(first: PeerId, known: Mapping[PeerId, Mapping[PeerId, float]]) -> dict[PeerId, float]:
    """The distance of each peer from `first`, itself included: the known one, or the shortest path over one other."""
    found = {first: 0.0}
    for mate, distance in known[first].items():
        for other, further in known[mate].items():
            found[other] = min(distance + further, found.get(other, math.inf))
    found.update(known[first])
    found[first] = 0.0
    return found


# ---------------------------------------------------------------- random groups
#
# Drawn by hash from what all members of a round know, so no message is needed (NoLoCo, arXiv:2506.10911, for pairs). A
# few draws take turns: the same members meet again in the same turn, so that each need remember few of those it agreed
# with (`sums.references`). A peer that misses a round is a group of its own. How fast values mix is measured in
# tests/sim/test_sim_groups.py.


def random_groups(members: Iterable[PeerId], size: int, stage: int, turn: int) -> list[tuple[PeerId, ...]]:
    """Partition `members` into groups of `size`, one of them with the remainder, so of 2 * size - 1 at most.

    The same for the same members in any order, stage and turn. Raises ValueError for a size below 2.
    """
    if size < 2:
        raise ValueError(f"a group of {size} has no member to average with")
    # Pairs of odd turns are cut from the ring of the turn before, one further on: so the two lead around all of it.
    odd = turn % 2 if size == 2 else 0
    ring = sorted(members, key=lambda peer: hashlib.sha256(f"{stage}/{turn - odd}/{peer}".encode()).digest())
    drawn = ring[odd:] + ring[:odd]
    num_groups = max(len(drawn) // size, 1)
    edges = [len(drawn) * number // num_groups for number in range(num_groups + 1)]
    return [tuple(drawn[start:stop]) for start, stop in itertools.pairwise(edges)]


def partners(me: PeerId, members: Iterable[PeerId], size: int, stage: int, turn: int) -> tuple[PeerId, ...]:
    """The random group of this turn that I am in, myself included. Raises ValueError if I am no member."""
    found = next((group for group in random_groups(members, size, stage, turn) if me in group), None)
    if found is None:
        raise ValueError("no member of this round")
    return found
