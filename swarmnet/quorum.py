"""How many votes decide. Every majority of this code base is counted here. Pure.

| question | function |
|---|---|
| do these votes decide? | `has_quorum`: more than half of the voters, so two quorums share a voter |
| how many votes decide? | `quorum` |
| can the other voters no longer decide? | `blocks`: half of the voters is enough |
| how many voters may be passed over at a time? | `minority`: fewer than half, so the others are a quorum |
| how far has a quorum got, and how far half? | `reached_by_most`, `reached_by_half` |

Lamport, "The part-time parliament" (1998), section 2; a voter is a peer, or whatever stands for one.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import Any, TypeVar

_T = TypeVar("_T", bound=Any)  # anything with an order


def quorum(voters: Collection[object] | int) -> int:
    """The least number of votes that decides. One for no voters: an empty set decides nothing."""
    return (voters if isinstance(voters, int) else len(voters)) // 2 + 1


def has_quorum(votes: Set[_T], voters: Set[_T]) -> bool:
    """Do these votes decide? Votes of peers that are no voters do not count."""
    return len(votes & voters) >= quorum(voters)


def blocks(votes: Set[_T], voters: Set[_T]) -> bool:
    """Have so many voters said no that the others are no quorum? True of no voters."""
    return not has_quorum(voters - votes, voters)


def minority(voters: Collection[object] | int) -> int:
    """The most voters that may be passed over at a time: fewer than half."""
    count = voters if isinstance(voters, int) else len(voters)
    return max(count - quorum(count), 0)


def reached_by_most(values: Collection[_T]) -> _T:
    """The highest value that more than half of these are at, or beyond. Raises IndexError if there are none."""
    return sorted(values, reverse=True)[len(values) // 2]


def reached_by_half(values: Collection[_T]) -> _T:
    """The highest value that at least half of these are at, or beyond. Raises IndexError if there are none."""
    return sorted(values)[len(values) // 2]
