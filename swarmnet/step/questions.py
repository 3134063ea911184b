"""Whom a replica asks for commits that it lacks, and to whom it hands out its own. Pure.

Each commit is asked of one peer at a time. The peer that has left most questions without an answer is asked last, and
the leader of a large stage, which has an edge to all, after the others.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Set

from swarmnet.ids import PeerId

MOST_GIVEN = 32
"""Askers in a large stage that get one commit of one peer at a time; the others get it of those."""

_MOST_DEBTORS = 256
"""Peers that are remembered for not having answered."""


class Questions:
    """One member's. patience_s: for so long a commit is asked of no other peer."""

    def __init__(self, me: PeerId, patience_s: float) -> None:
        self._me, self._patience_s = me, patience_s
        self._asked_at: dict[int, float] = {}
        self._owes: Counter[PeerId] = Counter()  # questions since its last answer
        self._given: dict[tuple[int, int], list[tuple[float, PeerId]]] = {}  # (step, stage) -> lately, to whom

    def begin(self, version: int) -> None:
        """That version begins: commits of steps before the last are not handed out any more."""
        self._asked_at.clear()
        self._owes = Counter(dict(self._owes.most_common(_MOST_DEBTORS)))
        self._given = {of: found for of, found in self._given.items() if of[0] >= version - 1}

    def whom(
        self, lacking: Set[int], known: Mapping[PeerId, Set[int]], *, last: PeerId | None, now: float
    ) -> dict[PeerId, Set[int]]:
        """Whom to ask for which of these stages' commits. known: by peer. last: who is asked last."""
        due = sorted(stage for stage in lacking if now - self._asked_at.get(stage, -math.inf) >= self._patience_s)
        found: dict[PeerId, set[int]] = {}
        for stage in due:
            having = [peer for peer, stages in known.items() if stage in stages]
            if having:
                peer = min(
                    having, key=lambda each: (self._owes[each], each == last, each not in found, self._lot(each))
                )
                found.setdefault(peer, set()).add(stage)
                self._asked_at[stage] = now
        self._owes.update(found.keys())
        return {**found}

    def _lot(self, peer: PeerId) -> bytes:
        return hashlib.sha256(f"{peer}/{self._me}".encode()).digest()

    def owes(self, peer: PeerId) -> bool:
        """Has it left a question without an answer?"""
        return self._owes[peer] > 0

    def answered(self, peer: PeerId) -> None:
        """It has told me of a commit."""
        self._owes.pop(peer, None)

    def give(self, peer: PeerId, step: int, stages: Set[int], *, few: bool, now: float) -> Set[int]:
        """The stages of which a peer that asks gets the commits; few: others may ask those who have got them."""
        given = set()
        for stage in stages:
            # As long as its question, and the answer, may be on their way.
            lately = [(at, to) for at, to in self._given.get((step, stage), ()) if now - at < self._patience_s / 2]
            if (not few or len(lately) < MOST_GIVEN) and all(to != peer for _, to in lately):
                lately.append((now, peer))
                given.add(stage)
            self._given[step, stage] = lately
        return given
