"""What a leader knows of work under way: which member stands still or executes free indexes, what is not finite.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

from swarmnet.ids import PeerId
from swarmnet.messages import MemberState
from swarmnet.quorum import has_quorum
from swarmnet.step.host import StepHost
from swarmnet.step.ledger import Ledger
from swarmnet.step.view import View

# ---------------------------------------------------------------- idle work
#
# Which member the leader orders to execute a free index (rule 8).
#
# What an evicted owner leaves behind is ordered at once, the rest only when nothing has been claimed for a while.
# Orders go to the member with the least left to do, a few at a time: a step without callers is executed bit by bit.

_ORDERS_PER_MEMBER = 8
"""Orders under way at a time."""


class IdleWork:
    """Work under way in one term, and its orders. idle_s: after so long without a claim it orders free indexes."""

    def __init__(self, view: View, *, idle_s: float, now: float) -> None:
        self._view, self._idle_s = view, idle_s
        self._flow_at = now
        self._until: dict[int, float] = {}  # when an order is given to another member
        self._instead: dict[int, PeerId] = {}
        self._tried: dict[int, set[PeerId]] = {}
        self.at_work: dict[PeerId, int] = {}  # assigned and not accumulated yet, by the last state
        self._moved: dict[
            PeerId, tuple[int, float]
        ] = {}  # a member's count of accumulated gradients, and when it last changed

    def hear(self, peer: PeerId, jobs: int, left: int, *, now: float) -> None:
        """How many gradients a member has accumulated, and has left to accumulate: with none left it need not move.

        An order that it did not take is no work any more.
        """
        self.at_work[peer] = left
        before = self._moved.get(peer)
        if before is None or before[0] != jobs or not left:
            self._moved[peer] = (jobs, now)

    def forget(self, peer: PeerId) -> None:
        """That member is another now: it has the whole time again to show some progress."""
        self._moved.pop(peer, None)

    def blocked(self, num_stages: int, *, now: float) -> bool:
        """Can no member finish the work assigned to it? A gradient comes through all stages, and an adjacent one has no
        replica in touch. Then each member has the whole time again. No heartbeats come here from stages further
        away."""
        adjacent = {self._view.stage - 1, self._view.stage + 1} & {*range(num_stages)}
        blocked = not all(self._view.live(stage, now=now) for stage in adjacent)
        if blocked:
            self._moved.clear()
        return blocked

    def still_s(self, peer: PeerId, *, now: float) -> float:
        """Seconds for which a member's counter has stood still; 0 if it has not reported (rule 12)."""
        moved = self._moved.get(peer)
        return now - moved[1] if moved is not None else 0.0

    def flow(self, *, now: float) -> None:
        """Something was claimed or freed: the step moves by itself."""
        self._flow_at = now

    def claimed(self, index: int, *, now: float) -> None:
        """An order of that index was taken: if the index becomes free again, it is ordered again at once."""
        self._until.pop(index, None)
        self.flow(now=now)

    def instead(self, index: int, members: Sequence[PeerId], *, now: float) -> tuple[PeerId, bool]:
        """The member that executes an index begun by an excluded replica; and is it to be ordered now?"""
        if self._instead.get(index) in members and now <= self._until.get(index, -math.inf):
            return self._instead[index], False
        peer = min(members, key=lambda p: (self._view.leaves(p), self.at_work.get(p, 0), p))
        self._until[index], self._instead[index] = now + self._patience_s(peer), peer
        self.at_work[peer] = self.at_work.get(peer, 0) + 1
        return peer, True

    def _patience_s(self, peer: PeerId) -> float:
        """How long a member has to claim what it is ordered to execute."""
        timers = self._view.timers
        # A member without a vote is tried, and not waited for.
        has_no_vote = bool(self._view.voters) and peer not in self._view.voters and peer != self._view.me
        return timers.settle_s if has_no_vote else max(self._idle_s, timers.suspect_s)

    def stagnant(self, now: float) -> bool:
        """Has nothing been claimed for so long that free indexes are ordered?"""
        return now - self._flow_at > self._idle_s

    def give(
        self, ledger: Ledger, members: Sequence[PeerId], failed: Mapping[int, set[PeerId]], *, now: float
    ) -> list[tuple[PeerId, int]]:
        """Orders that are due: who executes which index.

        failed: who has found an index non-finite, and is asked for it last.
        """
        stagnant = self.stagnant(now)
        if not stagnant and not ledger.freed:
            return []
        orders: list[tuple[PeerId, int]] = []
        # The load is what a member still has to do, not what it has done.
        load = {peer: self.at_work.get(peer, 0) for peer in members}
        free = ledger.free()
        waiting = {index for index in free if now <= self._until.get(index, -math.inf)}
        most = _ORDERS_PER_MEMBER * len(members) - len(waiting)
        for index in free:
            if index in waiting or (index not in ledger.freed and not stagnant):
                continue
            if len(orders) >= most:
                break
            found = failed.get(index, set())
            tried = self._tried.setdefault(index, set())
            if len(tried) >= len(members):
                tried.clear()
            peer = min(
                members, key=lambda p: (self._view.leaves(p), p in found, p in tried, load[p], len(ledger.of(p)), p)
            )
            self._until[index] = now + self._patience_s(peer)
            tried.add(peer)
            load[peer] += 1
            orders.append((peer, index))
        return orders


# ---------------------------------------------------------------- microbatches without a finite gradient
#
# A microbatch is a pure function, so it is left out of the step if more than half of the members found it non-finite.


class NonFinite:
    """Reports of non-finite gradients. found_by: index -> members. halted: more are left out than the run allows."""

    def __init__(self, step: int, host: StepHost, *, max_discarded: int) -> None:
        self._step, self._host, self._max_discarded = step, host, max_discarded
        self.found_by: dict[int, set[PeerId]] = {}
        self.halted = False

    def hear(self, peer: PeerId, report: MemberState) -> bool:
        """What a member has found. Returns True if it is news."""
        fresh = [index for index in report.non_finite if peer not in self.found_by.get(index, ())]
        for index in fresh:
            self.found_by.setdefault(index, set()).add(peer)
        return bool(fresh)

    def alone(self, ledger: Ledger) -> None:
        """Log the members that found an index non-finite that others counted."""
        names = {
            peer for index, found_by in self.found_by.items() if index not in ledger.discarded for peer in found_by
        }
        for peer in sorted(names):
            self._host.log("finds_alone", step=self._step, peer=peer)

    def discard(self, ledger: Ledger, members: Set[PeerId]) -> None:
        """Leave the indexes out of the step that most members found non-finite."""
        for index, found_by in self.found_by.items():
            confirmed = has_quorum(found_by, members)
            if confirmed and index not in ledger.discarded and ledger.discard(index):
                self._host.log("discarded", step=self._step, index=index)
        if len(ledger.discarded) > self._max_discarded and not self.halted:
            self.halted = True
            self._host.log(
                "halted",
                step=self._step,
                reason=f"{len(ledger.discarded)} microbatches of step {self._step} gave no gradient that can "
                f"be counted (not finite, or too large for the grid; training.max_discarded = {self._max_discarded}): "
                "lower the learning rate or numerics.grid_bits and start again",
            )
