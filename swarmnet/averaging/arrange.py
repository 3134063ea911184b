"""Which members of a round share a row: near ones, and a lost one leaves the other rows as they are.

Rows exchange whole vectors, columns only a part of one (`averaging.grid`): what is far apart belongs in different rows.
Pure and deterministic; the keeper asks, members obey what its round says.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from swarmnet.averaging.grid import Grid, in_rows, shape
from swarmnet.ids import PeerId

RoundTrips = Mapping[tuple[PeerId, PeerId], float]
"""(one, other) -> how far away `one` has found `other`, in any unit; pairs may be missing, or differ by direction."""


def arrange(
    members: Iterable[PeerId], round_trips: RoundTrips, group_size: int, bandwidths: Mapping[PeerId, int] | None = None
) -> Grid:
    """A grid of all members, each once: near peers share a row, and who is fast stands where something is reduced.

    Greedy: a row is begun by who is farthest from everybody left, and filled with who is nearest to those in it.
    """
    rates = bandwidths or {}
    left = sorted(set(members))
    lengths = shape(len(left), group_size)
    if len(lengths) == 1:
        return in_rows(left, lengths)
    if not round_trips:
        return in_rows(left, lengths)
    far = _Far(round_trips)
    total = {peer: sum(far(peer, other) for other in left) for peer in left}
    placed: list[PeerId] = []
    for length in lengths:
        row = [max(left, key=lambda peer: total[peer])]
        near = dict.fromkeys(left, 0.0)
        while True:
            newest = row[-1]
            left.remove(newest)
            for peer in left:
                near[peer] += far(peer, newest)
                total[peer] -= far(peer, newest)
            if len(row) == length:
                break
            row.append(min(left, key=lambda peer: near[peer]))
        placed += sorted(row, key=lambda peer: (-rates.get(peer, 0), peer))
    return in_rows(placed, lengths)


def rearranged(
    before: Grid | None, members: Iterable[PeerId], round_trips: RoundTrips, group_size: int,
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


class _Far:
    """Distance of two peers: the mean of what both have measured, or else that of everybody."""

    def __init__(self, round_trips: RoundTrips) -> None:
        found: dict[tuple[PeerId, PeerId], list[float]] = {}
        for (one, other), value in round_trips.items():
            found.setdefault((min(one, other), max(one, other)), []).append(value)
        self._known = {pair: statistics.fmean(values) for pair, values in found.items()}
        self._unknown = statistics.fmean(self._known.values())

    def __call__(self, one: PeerId, other: PeerId) -> float:
        if one == other:
            return 0.0
        return self._known.get((min(one, other), max(one, other)), self._unknown)
