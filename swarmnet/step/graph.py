"""The graph of heartbeats between replicas. Pure.

In a run of small stages each replica exchanges heartbeats with all of its stage and of the adjacent stages, and of
replicas that have contributed nothing with those next to it on the ring. If one of these stages has more than `DENSE`
contributors, or replicas while there are no contributors, each replica chooses a few:

| of | it chooses |
|---|---|
| its own stage | those next to it on the ring, in the order of their marks; the leader that it follows |
| its own stage, if it counts | all others that count |
| its own stage, if it does not | two of those that count, by lot |
| its own stage, if it leads | all that it knows |
| an adjacent stage | those next to its own mark there |

A replica that is chosen sends heartbeats back for as long as it is chosen, so the graph is symmetric. A replica without
an edge to this one is not dead for that: the leader has an edge to all.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Set

from swarmnet.bounds import Recent
from swarmnet.ids import Chain, PeerId, mark_of

DENSE = 24
"""Replicas of a stage that all hear each other."""

_EACH_WAY = 4
"""Neighbours on the ring of my stage, and in a neighbour stage, in each direction."""

_LOTS = 2

_MOST_ANSWERED = 2048
"""Peers that are answered because they have chosen me."""


def ring(me: PeerId, names: Iterable[PeerId], each_way: int = _EACH_WAY) -> frozenset[PeerId]:
    """The names with the marks next to mine in each direction, all around."""
    others = sorted((mark_of(peer), peer) for peer in {*names} - {me})
    if len(others[each_way:]) <= each_way:
        return frozenset(peer for _, peer in others)
    at = bisect.bisect(others, (mark_of(me), me))
    return frozenset(others[(at + step) % len(others)][1] for step in range(-each_way, each_way))


def lots(me: PeerId, counting: Iterable[PeerId], most: int = _LOTS) -> frozenset[PeerId]:
    """Those of them that a peer that does not count listens to (rendezvous hashing)."""
    return frozenset(sorted(counting, key=lambda peer: hashlib.sha256(f"{peer}/{me}".encode()).digest())[:most])


def mates(me: PeerId, names: Set[PeerId], counting: Set[PeerId]) -> frozenset[PeerId]:
    """Whom I choose of my own stage, unless I lead it. names: of its replicas. counting: those of them that count."""
    if len(names | {me}) <= DENSE:
        return frozenset(names - {me})
    return ring(me, names) | (counting - {me} if me in counting else lots(me, counting))


@functools.lru_cache(maxsize=16)
def _ranks(term_chain: Chain, stage: int) -> Callable[[PeerId], bytes]:
    # A cache for each term, because one of all keeps the ended terms until thousands of newer ones have come.
    @functools.lru_cache(maxsize=1 << 14)
    def rank(peer: PeerId) -> bytes:
        return hashlib.sha256(f"{term_chain}/{stage}/{peer}".encode()).digest()

    return rank


def leader_rank(term_chain: Chain, stage: int, peer: PeerId) -> bytes:
    """Where a peer stands in the order of leaders of a term; lowest first."""
    return _ranks(term_chain, stage)(peer)


class Graph:
    """The neighbours of one replica of a stage."""

    def __init__(self, me: PeerId, stage: int) -> None:
        self._me, self._stage = me, stage
        self._asked_at = Recent[PeerId, float](_MOST_ANSWERED)  # who has chosen me
        self._chosen_by: object = None  # of what it has last been chosen
        self.chosen: frozenset[PeerId] = frozenset()
        self.sparse: frozenset[int] = frozenset()
        """The stages near me of which I hear a few replicas only."""

    def asked(self, peer: PeerId, *, chosen: bool, now: float) -> None:
        """A heartbeat: has its sender chosen me?"""
        if chosen:
            self._asked_at[peer] = now
        else:
            self._asked_at.pop(peer, None)

    def choose(
        self,
        names: Mapping[int, Set[PeerId]],
        counting: Mapping[int, Set[PeerId]],
        contributors: Mapping[int, Set[PeerId]],
        *,
        leader: PeerId | None,
    ) -> None:
        """names: the replicas known of my stage and of its neighbour stages. counting: the voters of each.
        contributors: to the aggregates of each. leader: the one that I follow."""
        # Mostly all are as they were a moment ago.
        if (of := (names, counting, contributors, leader)) == self._chosen_by:
            return
        self._chosen_by = of
        proven = {stage: {*counting.get(stage, ()), *contributors.get(stage, ())} for stage in {*names, self._stage}}
        mine = {*names.get(self._stage, ()), *contributors.get(self._stage, ())} - {self._me}
        # A record costs nothing: where peers have contributed they alone make a stage large.
        sizes = {stage: len(contributors.get(stage, ())) or len(found) for stage, found in names.items()}
        sizes[self._stage] = len(contributors.get(self._stage, ())) or len(mine) + 1
        # Of two neighbour stages both ends have to see that one is large.
        self.sparse = frozenset(stage for stage in sizes if max(sizes[stage], sizes[self._stage]) > DENSE)
        if self._stage not in self.sparse:
            found = self._all(mine, proven[self._stage])
        elif leader == self._me:
            found = mine
        else:
            found = {*mates(self._me, mine, counting.get(self._stage, frozenset())), *({leader} - {None} or ())}
        for stage in names.keys() - {self._stage}:
            found |= ring(self._me, names[stage]) if stage in self.sparse else self._all(names[stage], proven[stage])
        # My other stages have views of their own.
        mine_elsewhere = {self._me for stage in names.keys() - {self._stage} if self._me in names[stage]}
        self.chosen = frozenset((found - {self._me}) | mine_elsewhere)

    def _all(self, names: Set[PeerId], proven: Set[PeerId]) -> Set[PeerId]:
        """Of a small stage all replicas; but of those that have contributed nothing few, as identities are free."""
        return names & proven | ring(self._me, names - proven, DENSE // 2)

    def neighbours(self, *, for_s: float, now: float) -> Collection[PeerId]:
        """Whom I send heartbeats: those whom I have chosen, and who have chosen me within so many seconds."""
        self._asked_at.drop(lambda peer, at: now - at > for_s)
        return sorted(self.chosen | self._asked_at.keys())
