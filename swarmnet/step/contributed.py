"""How often the replicas of a stage have contributed, by its commits: which are waited for, and which vote. Pure.

| contributions of a replica | what it is |
|---|---|
| fewer than 8 | new: no step waits for it |
| from 8 | waited for, the longer the more there are (`patience_s`) |
| from 32, or a quarter of the steps of a young run | a voter, until a commit names it late: then it is new again |
| from 64, or any of the first eight steps of a run | a voter that keeps its vote |

A run is young after a rollback, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from swarmnet.ids import PeerId
from swarmnet.messages import Commit
from swarmnet.quorum import minority

_STAYS = 32
"""Steps without a contribution or a signature, after which a replica no longer votes."""

_NEW, _VOTES, _KEEPS = 8, 32, 64
"""Contributions from which a replica is waited for, has a vote, and keeps it when it is late."""

_YOUNG = 4
"""A replica has a vote, too, if it has contributed to one of so many steps of the run."""

_GRACE = 4.0
"""A leader waits for a replica at most this fraction (one part of so many) of the time in which it has contributed."""


@dataclass(frozen=True, slots=True)
class Contributed:
    """last: the step to which a replica contributed, or of which it signed the aggregate, last. times: up to
    `_KEEPS`; in a young run more than they were."""

    last: int = -1
    times: int = 0


class Contributors:
    """Those who have contributed lately to one stage."""

    def __init__(self) -> None:
        self._of: dict[PeerId, Contributed] = {}

    @property
    def peers(self) -> Set[PeerId]:
        """However often they have contributed."""
        return self._of.keys()

    def of(self, peer: PeerId) -> Contributed:
        """Of one replica, as far as is known here."""
        return self._of.get(peer, Contributed())

    def is_new(self, peer: PeerId) -> bool:
        """Does no step wait for it?"""
        return self.of(peer).times < _NEW

    def votes(self, peer: PeerId) -> bool:
        """Has it contributed often enough for a vote?"""
        return self.of(peer).times >= _VOTES

    def keeps_vote(self, peer: PeerId) -> bool:
        """Has it contributed for so long that lateness does not cost its vote? True of all while none has."""
        return self.of(peer).times >= _KEEPS or not self._of

    def patience_s(self, peer: PeerId, *, usual_s: float, least_s: float) -> float:
        """How long a step waits for a replica in touch that does not do its part. usual_s: how long a step takes.

        Keys cost nothing, so one that has contributed for a short time, and then keeps the others waiting, may cost
        them a part of that time only: the next key would do the same.
        """
        return max(self.of(peer).times * usual_s / _GRACE, least_s)

    def applied(
        self, commit: Commit, named: Set[PeerId], signed: Set[PeerId], until: Mapping[PeerId, int], *, age: int
    ) -> Iterable[PeerId]:
        """A step is over. Returns those who count no more, because they have been silent for long.

        named: its contributors. signed: replicas that signed its aggregate. until: the step in which the exclusion of a
        peer ends. age: of the run, in steps.
        """
        # Of contributions before the first commit that is known here nothing is known: its contributors have a vote.
        begins = not self._of
        for peer in named | (signed if begins else signed & self._of.keys()):
            times = self.of(peer).times
            if begins or peer in named:
                times = _counted(times, age=age, begins=begins)
            self._of[peer] = Contributed(commit.step, times)
        self._set_back(commit.late)
        # An excluded peer contributes nothing: it keeps its vote, or lying leaders would choose the voters.
        last = {peer: max(each.last, until.get(peer, each.last)) for peer, each in self._of.items()}
        stale = sorted((step, peer) for peer, step in last.items() if commit.step - step > _STAYS)
        gone = [peer for _, peer in stale[: minority(self._of)]]
        for peer in gone:
            del self._of[peer]
        return gone

    def _set_back(self, late: Iterable[PeerId]) -> None:
        """Peers were late: one that has not contributed for long has to do so again before it votes.

        Of all that have contributed lately fewer than half at a time, or a lying leader would choose the voters.
        """
        room = minority(self._of) - sum(not each.times for each in self._of.values())
        for peer in late:
            if 0 < self.of(peer).times < _KEEPS and room > 0:
                self._of[peer], room = replace(self._of[peer], times=0), room - 1


def _counted(before: int, *, age: int, begins: bool) -> int:
    """The contributions of a replica after one more. begins: it is of the first commit that is known here."""
    enough = min(_VOTES, max(age // _YOUNG, 1))
    if enough == 1:
        return _KEEPS
    return min(max(before + 1, _VOTES if begins or before + 1 >= enough else 0), _KEEPS)
