"""Broken lines between members of a stage. Pure.

One broken line between two members costs a step two cuts and one of the two (`step.suspects`), and would cost that in
every step. So the two reduce nothing: members that only contribute exchange with the reducers alone, and not with
each other. A member that cannot call another says so before a round is opened, and that line costs no step anything. A
line that broke in a round is tried again some steps later: lines come back, and a Byzantine member can name others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set

from swarmnet.averaging.watch import LEAST_S
from swarmnet.bounds import Recent
from swarmnet.ids import PeerId

_BROKEN_STEPS = 32
"""How long a broken line is remembered."""

_MOST_BROKEN = 64
"""Broken lines that are remembered."""

_MOST_NAMED = 2
"""Members that a member is believed not to reach: one that names more is at fault itself."""


def _pairs(unreached: Mapping[PeerId, Collection[PeerId]]) -> list[frozenset[PeerId]]:
    """The broken lines that follow from whom each member says that it does not reach."""
    believed = sorted(one for one, others in unreached.items() if len(others) <= _MOST_NAMED)
    return [frozenset({one, other}) for one in believed for other in unreached[one]]


def broken_lines(
    unreached: Mapping[PeerId, Mapping[PeerId, float]], without: Set[PeerId], until: float
) -> Counter[PeerId]:
    """How many broken lines each member is an end of, those to `without` aside.

    unreached: the members that each one says it does not reach, and since when it says so. What is news since
    `until` has not come to all, and does not count.
    """
    firm = {one: [other for other, since in said.items() if since <= until] for one, said in unreached.items()}
    found = Counter(peer for pair in set(_pairs(firm)) if not pair & without for peer in pair)
    found.update({one: len(said) for one, said in firm.items() if len(said) > _MOST_NAMED})
    return found


class BrokenLines:
    """Broken lines of one stage. allowed: how long each member's stream may stand still in my round, by my count."""

    def __init__(self) -> None:
        self.allowed: Mapping[PeerId, float] = {}
        self._broken = Recent[frozenset[PeerId], int](_MOST_BROKEN)  # -> step

    def least_s(self, peer: PeerId) -> float:
        """Seconds for which a member's stream may stand still, whatever others say."""
        return max(LEAST_S, self.allowed.get(peer, 0.0))

    def broken(self, one: PeerId, others: Iterable[PeerId], *, step: int) -> None:
        """In that step nothing came through between them, and no other member complained."""
        for other in others:
            self._broken[frozenset({one, other})] = step

    def ends(self, step: int) -> Counter[PeerId]:
        """How many broken lines that are remembered each member is an end of."""
        return Counter(
            peer for pair, since in self._broken.items() if 0 <= step - since <= _BROKEN_STEPS for peer in pair
        )

    def broken_with(self, peer: PeerId, *, step: int) -> frozenset[PeerId]:
        """The other ends of the member's lines that broke in that step."""
        pairs = [pair for pair, since in self._broken.items() if since == step and peer in pair]
        return frozenset[PeerId]().union(*pairs) - {peer}

    def apart(
        self, members: Collection[PeerId], unreached: Mapping[PeerId, Collection[PeerId]], *, step: int
    ) -> frozenset[PeerId]:
        """Members that should reduce nothing, as a line between them is broken; a quarter reduce, and one at least.

        unreached: the members that each one says it does not reach.
        """
        pairs = [pair for pair, since in reversed(self._broken.items()) if 0 <= step - since <= _BROKEN_STEPS]
        pairs += _pairs(unreached)
        most = len(members) - max(1, len(members) // 4)
        found = frozenset[PeerId]()
        for pair in pairs:
            if pair <= set(members) and len(found | pair) <= most:
                found |= pair
        return found
