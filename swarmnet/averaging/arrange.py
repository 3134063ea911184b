"""Which members of a round share a row: near ones, and a lost one leaves the other rows as they are.

Rows exchange whole vectors, columns only a part of one (`averaging.grid`): what is far apart belongs in different rows.
Pure and deterministic; the keeper asks, members obey what its round says.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Set

from swarmnet.averaging.grid import Grid, in_rows, shape
from swarmnet.ids import PeerId

RoundTrips = Mapping[tuple[PeerId, PeerId], float]
"""(one, other) -> how far away `one` has found `other`, in any unit; pairs may be missing, or differ by direction."""


def arrange(
    members: Iterable[PeerId], round_trips: RoundTrips, group_size: int, bandwidths: Mapping[PeerId, int] | None = None
) -> Grid:
    """A grid of all members, each once: near peers share a row, and who is fast stands where something is reduced.

    Greedy: a row is begun by who is farthest from all others, on average over what is known, and filled with who is
    nearest to it, as measured or over one mate between them. Of whom nothing is known comes last.
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


def rearranged(
    before: Grid | None,
    members: Iterable[PeerId],
    round_trips: RoundTrips,
    group_size: int,
    bandwidths: Mapping[PeerId, int] | None = None,
) -> Grid:
    """The grid of the next round of a step: `before` without who is gone, so that other rows stay as they are.

    All anew if somebody has come, or a row is down to half of what is reduced in it.
    """
    present = set(members)
    if before is not None and len(before.rows) > 1 and present <= {peer for row in before.rows for peer in row}:
        rows = tuple(tuple(peer for peer in row if peer in present) for row in before.rows)
        if all(2 * len(row) > before.columns for row in rows):
            return Grid(rows, before.columns)
    return arrange(present, round_trips, group_size, bandwidths)


def _distances(round_trips: RoundTrips, members: Set[PeerId]) -> dict[PeerId, dict[PeerId, float]]:
    """Peer -> other -> the mean of what both have measured, as far as anybody has."""
    found: dict[PeerId, dict[PeerId, list[float]]] = {peer: {} for peer in members}
    for (one, other), value in round_trips.items():
        if one != other and one in members and other in members:
            found[one].setdefault(other, []).append(value)
            found[other].setdefault(one, []).append(value)
    return {peer: {other: statistics.fmean(each) for other, each in mates.items()} for peer, mates in found.items()}


def _near(first: PeerId, known: Mapping[PeerId, Mapping[PeerId, float]]) -> dict[PeerId, float]:
    """How far everybody is from `first`, itself included: what is known, or the shortest way over one other."""
    found = {first: 0.0}
    for mate, distance in known[first].items():
        for other, further in known[mate].items():
            found[other] = min(distance + further, found.get(other, math.inf))
    found.update(known[first])
    found[first] = 0.0
    return found
