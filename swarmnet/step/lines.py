"""Broken lines between members of a stage. Pure.

One broken line between two members costs a step two cuts and one of the two (`step.suspects`), and would cost that in
every step. So the two reduce nothing: members that only contribute exchange with the reducers alone, and not with
each other. A member that cannot call another says so before a round is opened, and that line costs no step anything. A
line that broke in a round is tried again some steps later: lines come back, and a Byzantine member can name others. Of
two ends the one is at fault that has more broken lines; one broken line is no member's fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass

from swarmnet.averaging.watch import LEAST_S
from swarmnet.bounds import Recent
from swarmnet.ids import PeerId

_BROKEN_STEPS = (64, 128, 256)
"""How long a broken line is remembered, by how often it has broken; and once more that long it counts as the same."""

_MOST_BROKEN = 64
"""Broken lines that are remembered."""

MOST_NAMED = 2
"""Members that a member is believed not to reach: one that names more is at fault itself."""


def _pairs(unreached: Mapping[PeerId, Collection[PeerId]]) -> list[frozenset[PeerId]]:
    """The broken lines that follow from whom each member says that it does not reach."""
    believed = sorted(one for one, others in unreached.items() if len(others) <= MOST_NAMED)
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
    found.update({one: len(said) for one, said in firm.items() if len(said) > MOST_NAMED})
    return found


@dataclass(frozen=True, slots=True)
class _Broken:
    """A line that has broken so many times, in that step last."""

    step: int
    times: int

    @property
    def steps(self) -> int:
        return _BROKEN_STEPS[min(self.times, len(_BROKEN_STEPS)) - 1]

    def again(self, step: int) -> int:
        """The times, if it breaks in this step."""
        if step == self.step:
            return self.times
        return self.times + 1 if step - self.step <= 2 * self.steps else 1


class BrokenLines:
    """Broken lines of one stage. allowed: how long each member's stream may stand still in my round, by my count."""

    def __init__(self) -> None:
        self.allowed: Mapping[PeerId, float] = {}
        self._broken = Recent[frozenset[PeerId], _Broken](_MOST_BROKEN)
        self._refused = Recent[tuple[PeerId, PeerId], int](_MOST_BROKEN)  # who refused what whom sent -> the last step

    def least_s(self, peer: PeerId) -> float:
        """Seconds for which a member's stream may stand still, whatever others say."""
        return max(LEAST_S, self.allowed.get(peer, 0.0))

    def broken(self, one: PeerId, others: Collection[PeerId], *, step: int) -> PeerId | None:
        """In that step nothing came through between them, and no other member complained.

        Returns the end that is at fault: the one with more broken lines. None: none has more than the others.
        """
        for other in others:
            before = self._broken.get(pair := frozenset({one, other}))
            self._broken[pair] = _Broken(step, before.again(step) if before is not None else 1)
        ends = self.ends(step)
        by_ends = sorted({one, *others}, key=lambda peer: ends[peer])
        return by_ends[-1] if len(by_ends) > 1 and ends[by_ends[-1]] > ends[by_ends[-2]] else None

    def refused(self, one: PeerId, other: PeerId, *, step: int) -> bool:
        """In that step it alone refused what the other sent. Has it lately refused what others sent, too?

        It says nothing of those: two that collude could refuse one in turn.
        """
        self._refused[one, other] = step
        lately = {pair for pair, at in self._refused.items() if pair[0] == one and 0 <= step - at <= _BROKEN_STEPS[0]}
        return len(lately) > 1

    def ends(self, step: int) -> Counter[PeerId]:
        """How many broken lines that are remembered each member is an end of."""
        return Counter(peer for pair in self._remembered(step) for peer in pair)

    def _remembered(self, step: int) -> list[frozenset[PeerId]]:
        """The latest first."""
        return [pair for pair, broken in reversed(self._broken.items()) if 0 <= step - broken.step <= broken.steps]

    def broken_to(self, peer: PeerId, *, step: int) -> frozenset[PeerId]:
        """The other ends of the member's broken lines that are remembered."""
        return frozenset[PeerId]().union(*(pair for pair in self._remembered(step) if peer in pair)) - {peer}

    def broken_with(self, peer: PeerId, *, step: int) -> frozenset[PeerId]:
        """The other ends of the member's lines that broke in that step."""
        pairs = [pair for pair, broken in self._broken.items() if broken.step == step and peer in pair]
        return frozenset[PeerId]().union(*pairs) - {peer}

    def apart(
        self, members: Collection[PeerId], unreached: Mapping[PeerId, Collection[PeerId]], *, step: int
    ) -> frozenset[PeerId]:
        """Members that should reduce nothing, as a line between them is broken; a quarter reduce, and one at least.

        unreached: the members that each one says it does not reach.
        """
        pairs = [*self._remembered(step), *_pairs(unreached)]
        most = len(members) - max(1, len(members) // 4)
        found = frozenset[PeerId]()
        for pair in pairs:
            if pair <= set(members) and len(found | pair) <= most:
                found |= pair
        return found
