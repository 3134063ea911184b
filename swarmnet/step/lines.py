"""What a replica has learned of the lines between its mates, for the steps that it keeps. Pure.

One broken line between two members costs a step two cuts and one of the two (`step.dispute`), and would cost that in
every step. So for some steps the two reduce nothing (`step.opening`): members that only contribute exchange with the
reducers alone, and not with each other. Later it is tried again: lines come back, and a liar can have somebody named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from swarmnet.averaging.watch import LEAST_S
from swarmnet.ids import PeerId

_STEPS = 32
"""How long a broken line is remembered."""

_MOST = 64
"""Broken lines that are remembered."""


class BrokenLinks:
    """Of one stage. allowed: how long each member's stream may stand still in the round I take part in, by my count."""

    def __init__(self) -> None:
        self.allowed: Mapping[PeerId, float] = {}
        self._broken: dict[frozenset[PeerId], int] = {}  # the latest last -> step

    def least_s(self, peer: PeerId) -> float:
        """So long a member's stream may stand still, whatever others allow it."""
        return max(LEAST_S, self.allowed.get(peer, 0.0))

    def broken(self, one: PeerId, others: Iterable[PeerId], *, step: int) -> None:
        """In that step nothing came through between them, and nobody else complained."""
        for other in others:
            pair = frozenset({one, other})
            self._broken.pop(pair, None)
            self._broken[pair] = step
        for pair in list(self._broken)[:-_MOST]:
            del self._broken[pair]

    def apart(self, members: Collection[PeerId], *, step: int) -> frozenset[PeerId]:
        """Who should reduce nothing: half of the members at the most, or one pair of three; the latest pairs first."""
        found = frozenset[PeerId]()
        for pair, since in reversed(self._broken.items()):
            wider = found | pair
            known = pair <= set(members) and 0 <= step - since <= _STEPS
            if known and len(wider) < len(members) and len(wider) <= max(2, len(members) // 2):
                found = wider
        return found
