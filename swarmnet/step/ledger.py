"""The assignment of one step's indexes in one stage: the leader's table, and the claims of a member for itself.

An index is free or assigned to one (peer, generation). The generation fences all of it (docs/protocol.md, I3 and rules
10 to 12): an evicted pair is never assigned an index again, its peer must come back under the next generation. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Set
from typing import Literal

from swarmnet.ids import Generation, PeerId
from swarmnet.messages import NONE, Indexes

Owner = tuple[PeerId, Generation]


class Ledger:
    """index -> owner for indexes 0..num_indexes-1. freed: free, and had an assignee before."""

    def __init__(self, num_indexes: int, freed: Indexes = NONE) -> None:
        self.owners: list[Owner | None] = [None] * num_indexes
        self.closed: set[Owner] = set()  # accumulators that have ended: what they report is not entered again
        self.discarded: set[int] = set()
        self.freed: set[int] = set(freed)  # Invariant: a subset of the free indexes
        self._free = set(range(num_indexes))  # Invariant: none of them has an owner
        self._owned: dict[PeerId, set[int]] = {}  # Invariant: the inverse of `owners`

    @property
    def complete(self) -> bool:
        """Every index has an owner, or is left out on purpose."""
        return not self._free

    def free(self) -> list[int]:
        """Indexes without an assignee."""
        return sorted(self._free)

    def given(self) -> Indexes:
        """Indexes that have or had an assignee."""
        return (frozenset(range(len(self.owners))) - self._free | self.freed) - self.discarded

    def of(self, peer: PeerId) -> Set[int]:
        """Indexes a peer owns, under any generation."""
        return self._owned.get(peer, frozenset())

    def claim(self, owner: Owner, index: int) -> Owner:
        """Give a free index to `owner`; returns who owns it now."""
        held = self.owners[index]
        if held is None:
            held = owner
            self._own(owner, index)
        return held

    def overlaps(self, peer: PeerId, indexes: Indexes) -> bool:
        """Would entering `indexes` under `peer` take any from another peer?"""
        return any((held := self.owners[index]) is not None and held[0] != peer for index in indexes)

    def enter(self, owner: Owner, indexes: Indexes) -> None:
        """Record what a member says it owns; the caller has checked `overlaps`."""
        for index in indexes:
            if self.owners[index] != owner:
                self._own(owner, index)

    def evict(self, owner: Owner) -> None:
        """Close a generation: its entries are free again and it never owns anything more."""
        self.closed.add(owner)
        for index in sorted(self.of(owner[0])):
            if self.owners[index] == owner:
                self._lose(index)

    def release(self, owner: Owner, indexes: Indexes) -> bool:
        """Free what `owner` says it does not hold. True if anything changed."""
        mine = [index for index in indexes if index < len(self.owners) and self.owners[index] == owner]
        for index in mine:
            self._lose(index)
        return bool(mine)

    def discard(self, index: int) -> bool:
        """Leave an index out: its gradient is not finite. False if it has an assignee, which found it finite."""
        if self.owners[index] is None:
            self.discarded.add(index)
            self._free.discard(index)
            self.freed.discard(index)
        return index in self.discarded

    def contributions(self) -> tuple[tuple[PeerId, Generation, Indexes], ...]:
        """Disjoint sets per owner, sorted by peer: what a round is opened with."""
        sets: dict[Owner, set[int]] = {}
        for index, owner in enumerate(self.owners):
            if owner is not None:
                sets.setdefault(owner, set()).add(index)
        return tuple((peer, generation, frozenset(sets[peer, generation])) for peer, generation in sorted(sets))

    def _own(self, owner: Owner, index: int) -> None:
        self._disown(index)
        self.owners[index] = owner
        self._owned.setdefault(owner[0], set()).add(index)
        self.freed.discard(index)
        self._free.discard(index)

    def _disown(self, index: int) -> None:
        held = self.owners[index]
        if held is not None:
            self._owned[held[0]].discard(index)

    def _lose(self, index: int) -> None:
        self._disown(index)
        self.owners[index] = None
        self.freed.add(index)
        self._free.add(index)


# ---------------------------------------------------------------- a member's claims

_STARTS, _ROUNDS_OF_A_START = 1 << 28, 1 << 24
"""Starts of a process that are told apart, and rounds that each may open; a round number holds their product."""


class Generations:
    """The generations of one process start."""

    def __init__(self, incarnation: int) -> None:
        self.newest = Generation(incarnation, 0)

    def next(self) -> Generation:
        """One that no accumulator of this replica has had."""
        self.newest = self.newest.next()
        return self.newest


def round_numbers(incarnation: int) -> Iterator[int]:
    """Numbers for the rounds that one process opens: none twice, and none that another start of its identity used.

    A replica may keep the same step twice under the same ballot: after a restart, or with a state of the same version
    taken from another replica. A member that still exchanges the earlier round must not take the later one for it.
    """
    return itertools.count((incarnation % _STARTS) * _ROUNDS_OF_A_START)


Claim = Literal["free", "asked", "assigned", "accumulated"]
ClaimEvent = Literal["begin", "assign", "move", "drop", "accumulate", "discard"]

CLAIMS: Mapping[tuple[Claim, ClaimEvent], Claim] = {
    ("free", "begin"): "asked",
    ("asked", "begin"): "asked",  # asked again: the answer may be lost
    ("asked", "assign"): "assigned",
    ("asked", "move"): "free",
    ("asked", "drop"): "free",
    ("assigned", "drop"): "free",
    ("assigned", "accumulate"): "accumulated",
    ("assigned", "discard"): "free",
    ("accumulated", "discard"): "free",
}
"""What becomes of an index in one replica. An event without a row changes nothing, and the caller learns that."""


class ClaimBook:
    """What one replica claims of a step, for one accumulator. Invariant: only what was assigned is accumulated."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self.generation = generations.newest
        self.non_finite: set[int] = set()
        self._claims: dict[int, Claim] = {}  # Invariant: none of them is free

    def move(self, event: ClaimEvent, index: int) -> bool:
        """Follow the table. False: it has no such row."""
        after = CLAIMS.get((self._claims.get(index, "free"), event))
        if after == "free":
            del self._claims[index]
        elif after is not None:
            self._claims[index] = after
        return after is not None

    def renew(self, *, discard: bool) -> None:
        """Close the generation: assignments in flight are dead. `discard` also drops what was assigned (rule 11)."""
        self.generation = self._generations.next()
        for index in list(self._claims) if discard else ():
            self.move("discard", index)

    def _all(self, *states: Claim) -> Indexes:
        return frozenset(index for index, state in self._claims.items() if state in states)

    @property
    def asked(self) -> Indexes:
        """Work on them is under way."""
        return self._all("asked")

    @property
    def assigned(self) -> Indexes:
        """Assigned, whether their gradients are accumulated or not."""
        return self._all("assigned", "accumulated")

    @property
    def accumulated(self) -> Indexes:
        """Their weight gradients are in the accumulator."""
        return self._all("accumulated")
