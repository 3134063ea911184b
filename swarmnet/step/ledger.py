"""Who owns which index of one step in one stage. Pure; the keeper's book (docs/protocol.md, rules 10 to 12).

An index is free or belongs to one (peer, generation). An evicted pair never owns again: its peer must come back under
the next generation.
"""

from __future__ import annotations

from collections.abc import Set

from swarmnet.ids import Generation, PeerId
from swarmnet.messages import NONE, Indexes

Owner = tuple[PeerId, Generation]


class Ledger:
    """index -> owner for indexes 0..num_indexes-1. freed: free, though somebody owned them before."""

    def __init__(self, num_indexes: int, freed: Indexes = NONE) -> None:
        self.owners: list[Owner | None] = [None] * num_indexes
        self.closed: set[Owner] = set()
        self.voided: set[int] = set()
        self.freed: set[int] = set(freed)
        self._free = set(range(num_indexes))
        self._owned: dict[PeerId, set[int]] = {}

    @property
    def complete(self) -> bool:
        """Every index has an owner, or is left out on purpose."""
        return not self._free

    def free(self) -> list[int]:
        """Indexes nobody owns, though somebody should."""
        return sorted(self._free)

    def given(self) -> Indexes:
        """Indexes that somebody owns, or that somebody owned before."""
        owned = (index for index, owner in enumerate(self.owners) if owner is not None)
        return frozenset({*owned, *self.freed})

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

    def _disown(self, index: int) -> None:
        held = self.owners[index]
        if held is not None:
            self._owned[held[0]].discard(index)

    def _lose(self, index: int) -> None:
        self._disown(index)
        self.owners[index] = None
        self.freed.add(index)
        self._free.add(index)
