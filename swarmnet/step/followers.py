"""What a leader knows of the replicas of its stage in one term, and what it tells them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass

from swarmnet.ids import Ballot, Generation, PeerId
from swarmnet.messages import MAX_MOVED, NONE, Indexes, MemberState, StagePlan, Stamp
from swarmnet.step.host import StepHost
from swarmnet.step.view import Seen, View


@dataclass(slots=True)
class Follower:
    """One replica."""

    state: MemberState | None = None  # the last whole one
    remaining: int = 0  # what it is assigned and has not accumulated, by that state
    asked_at: float = -math.inf  # when it was asked for a whole state
    echoed_at: float = -math.inf  # when it last said a state of this term
    given: Indexes | None = None
    """The given indexes that it was told of with the term; None: it was not told of the term."""
    awaits: frozenset[PeerId] = frozenset()  # members with a stream that it waits for, by its last report
    knows: int = -1  # the number of the round that it was told of, by its state
    offences: int = 0  # how often the step was restarted because of it
    charged: bool = False  # for sending nothing while work stands still


class Plans:
    """What the members are told next: each gets one message."""

    def __init__(self, stamp: Stamp, ballot: Ballot, host: StepHost) -> None:
        self._stamp, self._ballot, self._host = stamp, ballot, host
        self._plans: dict[PeerId, StagePlan] = {}

    def of(self, peer: PeerId, generation: Generation | None = None) -> StagePlan:
        """The plan of a member. generation: the accumulator that it is to be about; of two it is the later."""
        plan = self._plans.setdefault(peer, StagePlan(self._stamp, self._ballot))
        if generation is not None and generation != plan.generation:
            plan.generation, plan.assigned, plan.moved, plan.evicted = generation, NONE, (), ""
        return plan

    def move(self, peer: PeerId, generation: Generation, index: int, assignee: PeerId) -> None:
        """Another one contributes that index."""
        plan = self.of(peer, generation)
        # A member asks again for what is not answered.
        if len(plan.moved) < MAX_MOVED:
            plan.moved += ((index, assignee),)

    def discard(self, peer: PeerId, generation: Generation) -> None:
        """What is in that accumulator does not count."""
        self.of(peer, generation).evicted = "discard"

    def send(self) -> None:
        """Tell all of them."""
        plans, self._plans = self._plans, {}
        for peer, plan in sorted(plans.items()):
            self._host.send(peer, plan)


class AtStep:
    """The other replicas at one step, as of the leader's last look. delay: of the weights of the step, in versions.

    running: those that are not refused. live: those of them that are not given up.
    """

    def __init__(self, view: View, stamp: Stamp, delay: int) -> None:
        self._view, self._stamp, self.delay = view, stamp, delay
        self.given_up: Set[PeerId] = frozenset()
        self.running: list[PeerId] = []
        self.live: list[PeerId] = []

    def look(self, now: float) -> None:
        """Find them."""
        self.given_up = self._view.given_up(self._stamp.step, now=now)
        known = ((peer, seen) for peer, seen in self._view.mates() if seen.synced and self._is_open_at(seen))
        self.running = [peer for peer, _ in known if not self._view.refused(peer)]
        self.live = [peer for peer in self.running if peer not in self.given_up]

    def _is_open_at(self, seen: Seen) -> bool:
        """Does this replica have the weights that the step is computed on?"""
        of = self._stamp.step
        if not self.delay:
            return seen.version == of and seen.chain == self._stamp.chain
        return (seen.version, seen.before) == (of, self._stamp.chain) or (
            (seen.version, seen.chain) == (of - 1, self._stamp.chain)
        )

    def behind(self, members: Mapping[PeerId, Generation]) -> list[PeerId]:
        """Members that have not applied the step before: they count, but cannot contribute yet."""
        if not self.delay:
            return []
        known = ((peer, self._view.get(peer)) for peer in members)
        return [peer for peer, seen in known if seen is not None and seen.version < self._stamp.step]
