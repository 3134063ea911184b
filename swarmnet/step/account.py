"""What one replica counts in one step, and the words in which it accounts for it to its keeper. Pure.

An index is *asked* for while work on it is under way, *granted* once the keeper said so, *summed* once its weight
gradient is in the accumulator. The generation fences all of it (docs/protocol.md, I3); its number is drawn from one
counter of the replica, which outlives all steps and only grows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from swarmnet.ids import Ballot, Generation
from swarmnet.messages import NONE, Claim, Commit, Finished, Indexes, LinkQuality, Release, Report, Stamp, Trouble
from swarmnet.step.actions import Action, Send

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
    """For the rounds that one process opens: none twice, and none that another start of its identity has used.

    A replica may keep the same step twice under the same ballot: after a restart, or with a state of the same version
    taken from a mate. Who still exchanges the earlier round must not take the later one for it.
    """
    return itertools.count((incarnation % _STARTS) * _ROUNDS_OF_A_START)


class Account:
    """Index sets of one step under one generation. `ballot` arguments are what is promised; None: nobody to tell."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self.generation = generations.newest
        self.asked: set[int] = set()
        self.granted: set[int] = set()
        self.summed: set[int] = set()
        self.non_finite: set[int] = set()

    def renew(self, *, void: bool) -> None:
        """Close the generation: grants in flight are dead. `void` also closes what is in the accumulator (rule 11)."""
        self.generation = self._generations.next()
        if void:
            self.granted.clear()
            self.summed.clear()

    @property
    def owned(self) -> Indexes:
        """Granted or summed."""
        return frozenset(self.granted | self.summed)

    def ask(self, stamp: Stamp, ballot: Ballot | None) -> list[Action]:
        """Claims of everything asked for and not answered."""
        return [action for index in sorted(self.asked) for action in self.claim(index, stamp, ballot)]

    def claim(self, index: int, stamp: Stamp, ballot: Ballot | None) -> list[Action]:
        """The claim of one index."""
        return [Send(ballot.peer, Claim(stamp, ballot, self.generation, index))] if ballot is not None else []

    def release(self, indexes: Indexes, stamp: Stamp, ballot: Ballot | None) -> list[Action]:
        """The word that these are not held (rule 10)."""
        return [Send(ballot.peer, Release(stamp, ballot, self.generation, indexes))] if ballot is not None else []

    def report(
        self,
        stamp: Stamp,
        ballot: Ballot,
        finished: Finished | None,
        commit: Commit | None,
        progress: int,
        line: LinkQuality,
        trouble: Trouble | None,
        vote: bytes,
    ) -> Report:
        """Everything a keeper must know of this replica (rule 9)."""
        return Report(
            stamp=stamp,
            ballot=ballot,
            generation=self.generation,
            owned=self.owned,
            summed=frozenset(self.summed),
            finished=finished,
            commit=commit,
            progress=progress,
            non_finite=frozenset(self.non_finite) if self.non_finite else NONE,
            line=line,
            trouble=trouble,
            vote=vote,
        )
