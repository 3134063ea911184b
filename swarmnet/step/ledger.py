"""Who owns which index of one step in one stage: the leader's ledger, and what a member claims for itself.

An index is free or belongs to one (peer, generation). A member has *asked* for it while work on it is under way, was
*granted* it once the leader said so, and has *summed* it once its weight gradient is in the accumulator. The generation
fences all of it (docs/protocol.md, I3 and rules 10 to 12): an evicted pair never owns again, its peer must come back
under the next generation. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Set

from swarmnet.ids import Generation, PeerId
from swarmnet.messages import NONE, Indexes

Owner = tuple[PeerId, Generation]


class Ledger:
    """index -> owner for indexes 0..num_indexes-1. freed: free, though somebody owned them before."""

    def __init__(self, num_indexes: int, freed: Indexes = NONE) -> None:
        self.owners: list[Owner | None] = [None] * num_indexes
        self.closed: set[Owner] = set()  # accumulators that have ended: what they report is not entered again
        self.voided: set[int] = set()
        self.freed: set[int] = set(freed)  # Invariant: a subset of the free indexes
        self._free = set(range(num_indexes))  # Invariant: none of them has an owner
        self._owned: dict[PeerId, set[int]] = {}  # Invariant: the inverse of `owners`
        self._given: Indexes | None = None

    @property
    def complete(self) -> bool:
        """Every index has an owner, or is left out on purpose."""
        return not self._free

    def free(self) -> list[int]:
        """Indexes nobody owns, though somebody should."""
        return sorted(self._free)

    def given(self) -> Indexes:
        """Indexes that somebody owns, or that somebody owned before."""
        if self._given is None:
            self._given = frozenset(index for index in range(len(self.owners)) if index not in self._free) | self.freed
        return self._given - self.voided if self.voided else self._given

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
        """Would entering `indexes` under `peer` take any from somebody else?"""
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

    def void(self, index: int) -> bool:
        """Leave an index out: its gradient is not finite. False if somebody owns it (and so found it finite)."""
        if self.owners[index] is None:
            self.voided.add(index)
            self._free.discard(index)
            self.freed.discard(index)
            self._given = None
        return index in self.voided

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
        self._given = None

    def _disown(self, index: int) -> None:
        held = self.owners[index]
        if held is not None:
            self._owned[held[0]].discard(index)

    def _lose(self, index: int) -> None:
        self._disown(index)
        self.owners[index] = None
        self.freed.add(index)
        self._free.add(index)
        self._given = None


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
    taken from a mate. Who still exchanges the earlier round must not take the later one for it.
    """
    return itertools.count((incarnation % _STARTS) * _ROUNDS_OF_A_START)


class ClaimBook:
    """Index sets of one step under one generation. changes: how often what a member's whole state says has changed."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self.generation = generations.newest
        self.asked: set[int] = set()  # work on them is under way. Invariant: none of them is assigned
        self.granted: set[int] = set()  # assigned to this replica
        self.summed: set[int] = set()  # Invariant: accumulated is a subset of assigned
        self.non_finite: set[int] = set()
        self.changes = 0

    def grant(self, index: int) -> None:
        """The leader said so."""
        self.asked.discard(index)
        self.granted.add(index)
        self.changes += 1

    def give_back(self, index: int) -> None:
        """It was granted, and its work was dropped."""
        self.granted.discard(index)
        self.changes += 1

    def add(self, index: int) -> None:
        """Its weight gradient is in the accumulator."""
        self.summed.add(index)
        self.changes += 1

    def find_non_finite(self, index: int) -> None:
        """It gave a value that is not finite."""
        self.non_finite.add(index)
        self.changes += 1

    def renew(self, *, void: bool) -> None:
        """Close the generation: grants in flight are dead. `void` also closes what is in the accumulator (rule 11)."""
        self.generation = self._generations.next()
        self.changes += 1
        if void:
            self.granted.clear()
            self.summed.clear()

    @property
    def owned(self) -> Indexes:
        """Assigned or summed."""
        return frozenset(self.granted | self.summed)
