"""Random groups that average among themselves: everybody in exactly one, nobody alone.

Drawn by hash from what all members of a round know, so nobody is asked and nobody can choose (NoLoCo, arXiv:2506.10911,
for pairs; Moshpit, arXiv:2103.03239, for groups). How fast values mix, of any random partition of N members into r
groups: the expected squared distance from the mean shrinks by (r - 1) / N + r / N^2 per round (Moshpit, theorem 3.2);
exactly by (r - 1) / (N - 1). Who misses a round is a group of its own. Pure.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

from swarmnet.ids import PeerId, RoundId
from swarmnet.messages import Stamp


def random_groups(members: Sequence[PeerId], size: int, salt: str) -> list[tuple[PeerId, ...]]:
    """Partition `members` into groups of `size`, some one larger; of fewer than `size`, one group.

    The same for the same members in any order, and drawn anew with every salt. Raises ValueError for a size below 2.
    """
    if size < 2:
        raise ValueError(f"a group of {size} has nobody to average with")
    drawn = sorted(members, key=lambda peer: hashlib.sha256(f"{salt}/{peer}".encode()).digest())
    num_groups = max(len(drawn) // size, 1)
    edges = [len(drawn) * number // num_groups for number in range(num_groups + 1)]
    return [tuple(drawn[start:stop]) for start, stop in itertools.pairwise(edges)]


def partners(me: PeerId, members: Sequence[PeerId], size: int, stamp: Stamp, round_id: RoundId) -> tuple[PeerId, ...]:
    """The random group of this round that I am in, myself included. Raises ValueError if I am no member."""
    salt = f"{stamp.stage}/{stamp.step}/{stamp.chain}/{round_id}"
    found = next((group for group in random_groups(members, size, salt) if me in group), None)
    if found is None:
        raise ValueError("no member of this round")
    return found


def contraction(num_members: int, num_groups: int) -> float:
    """By what one round of a random partition shrinks the expected squared distance from the mean (the paper's)."""
    return (num_groups - 1) / num_members + num_groups / num_members**2
