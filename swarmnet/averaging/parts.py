"""Which member reduces what: a vector cut in one contiguous part per member, and a part in chunks that travel one by
one.

A member of n that reduces the share s of a vector of S bytes sends the rest of its own vector and its reduced part to
all others: (1 + (n - 2) s) S bytes each way. The cut that lets the slowest member finish soonest therefore gives shares
by filling up: all members with a part need the same time, and a member that is too slow for that reduces nothing (as in
Moshpit's load balancing, arXiv:2103.03239). Fractions are exact, so that all members cut alike. Parts and chunks begin
at multiples of the codec's blocks, so that no decoded value depends on the cut. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

Range = tuple[int, int]

LEAST_CHUNK, MOST_CHUNK = 1 << 16, 1 << 20
"""Elements. Smaller ones cost more in calls than they bring, larger ones leave the cache."""

_CHUNKS_PER_PART = 2
_CHUNK_S = 0.04


def shares(bandwidths: Sequence[int]) -> list[Fraction]:
    """The share of each member: min max (1 + (n - 2) share) / bandwidth. Even if a bandwidth is unknown (0).

    bandwidths: bytes per second, at least one. With two members every cut costs the same, so it is even, unless one
    has a quarter of the other's bandwidth or less: that one reduces nothing.
    """
    n = len(bandwidths)
    if n == 2 and 0 < 4 * min(bandwidths) <= max(bandwidths):
        return [Fraction(bandwidth == max(bandwidths)) for bandwidth in bandwidths]
    # Two members move the same bytes however the vector is cut.
    if n <= 2 or min(bandwidths) <= 0:
        return [Fraction(1, n)] * n
    fastest = sorted(bandwidths, reverse=True)
    seconds = next(
        seconds for k in range(n, 0, -1) if (seconds := Fraction(n - 2 + k, sum(fastest[:k]))) * fastest[k - 1] >= 1
    )
    return [max(Fraction(0), (seconds * bandwidth - 1) / (n - 2)) for bandwidth in bandwidths]


def parts(num_elements: int, bandwidths: Sequence[int], *, block: int = 1) -> list[Range]:
    """Cut [0, num_elements) into one contiguous part per member, in order, by `shares`, at multiples of `block`.

    Parts may be empty. Rounding to blocks makes a part at most a block larger or smaller than its share.
    """
    so_far = itertools.accumulate(shares(bandwidths), initial=Fraction(0))
    edges = [
        min(round(share * num_elements / block) * block, num_elements) if share < 1 else num_elements
        for share in so_far
    ]
    return list(itertools.pairwise(edges))


def chunk_elements(num_elements: int, num_members: int, element_bytes: float, bandwidths: Sequence[int] = ()) -> int:
    """About how much travels, is reduced and is installed at a time: a few chunks per part, so that they overlap.

    Two if a part is small: every chunk costs half a millisecond of CPU, whatever its size. More where the slowest of
    the known `bandwidths` would take longer than `_CHUNK_S` for one, since the first and the last overlap with nothing.
    element_bytes: of the run's codec, about.
    """
    ideal = num_elements // (num_members * _CHUNKS_PER_PART)
    known = [bandwidth for bandwidth in bandwidths if bandwidth]
    if known:
        ideal = min(ideal, int(min(known) * _CHUNK_S / element_bytes))
    return min(max(ideal, LEAST_CHUNK), MOST_CHUNK)


def chunks(start: int, stop: int, size: int) -> list[Range]:
    """Cut [start, stop) evenly into chunks of about `size`, at multiples of `LEAST_CHUNK`: no codec's block is cut.

    A remainder as a chunk of its own would cost as much as a whole one. An empty range is one empty chunk.
    """
    number = max(round((stop - start) / size), -(-(stop - start) // MOST_CHUNK), 1)
    even = (start + (stop - start) * place // number for place in range(1, number))
    edges = {round(edge / LEAST_CHUNK) * LEAST_CHUNK for edge in even}  # two may meet where `size` is as small
    return list(itertools.pairwise([start, *sorted(edges), stop]))
