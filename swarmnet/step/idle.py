"""Whom a keeper has execute what nobody else does (rule 8). Pure.

What an evicted owner leaves behind is ordered at once, the rest only when nothing has been claimed for a while. Orders
go to who has least left to do, a few at a time: a step that nobody feeds is executed bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from swarmnet.ids import Ballot, PeerId
from swarmnet.messages import Execute, Report, Stamp
from swarmnet.step.actions import Action, Note, Send
from swarmnet.step.ledger import Ledger
from swarmnet.step.view import View

_ORDERS_PER_MEMBER = 8
"""Orders under way at a time."""


class Orders:
    """Those of one keeper. idle_s: how long nothing may be claimed before what is free is ordered."""

    def __init__(self, stamp: Stamp, ballot: Ballot, view: View, *, idle_s: float, now: float) -> None:
        self._stamp, self._ballot, self._view, self._idle_s = stamp, ballot, view, idle_s
        self._flow_at = now
        self._ordered: dict[int, float] = {}
        self._instead: dict[int, PeerId] = {}
        self._tried: dict[int, set[PeerId]] = {}
        self.at_work: dict[PeerId, int] = {}  # owned and not summed yet, by the last report

    def flow(self, *, now: float) -> None:
        """Something was claimed or freed: the step moves by itself."""
        self._flow_at = now

    def hear(self, peer: PeerId, report: Report) -> None:
        """How much a member still has to do."""
        self.at_work[peer] = len(report.owned - report.summed)

    def instead(self, index: int, members: Sequence[PeerId], *, now: float) -> tuple[PeerId, list[Action]]:
        """Who executes what somebody has begun that may not count it; ordered, unless it was lately."""
        for_s = max(self._idle_s, self._view.timers.suspect_s)
        if index in self._instead and now - self._ordered.get(index, -1e9) <= for_s and self._instead[index] in members:
            return self._instead[index], []
        peer = min(members, key=lambda p: (self._view.leaves(p), self.at_work.get(p, 0), p))
        self._ordered[index], self._instead[index] = now, peer
        self.at_work[peer] = self.at_work.get(peer, 0) + 1
        return peer, [Send(peer, Execute(self._stamp, self._ballot, index))]

    def give(
        self,
        ledger: Ledger,
        members: Sequence[PeerId],
        failed: Mapping[int, set[PeerId]],
        spares: Callable[[PeerId, int], bool],
        *,
        now: float,
    ) -> list[Action]:
        """Orders that are due.

        failed: who has found an index non-finite, and is asked for it last. spares: see `step.opening`.
        """
        stagnant = now - self._flow_at > self._idle_s
        if not stagnant and not ledger.freed:
            return []
        actions: list[Action] = []
        # Who has summed much has time: what counts is what a member still has to do.
        load = {peer: self.at_work.get(peer, 0) for peer in members}
        patience_s = max(self._idle_s, self._view.timers.suspect_s)
        free = ledger.free()
        waiting = {index for index in free if now - self._ordered.get(index, -1e9) <= patience_s}
        room = _ORDERS_PER_MEMBER * len(members) - len(waiting)
        for index in free:
            if index in waiting or (index not in ledger.freed and not stagnant):
                continue
            if len(actions) >= 2 * room:  # an order and its note
                break
            first = index not in self._ordered
            self._ordered[index] = now
            found = failed.get(index, set())
            tried = self._tried.setdefault(index, set())
            if len(tried) >= len(members):
                tried.clear()
            peer = min(
                members,
                key=lambda p: (
                    self._view.leaves(p),
                    p in found,
                    p in tried,
                    not spares(p, index),
                    load[p],
                    len(ledger.of(p)),
                    p,
                ),
            )
            tried.add(peer)
            load[peer] += 1
            actions.append(Send(peer, Execute(self._stamp, self._ballot, index)))
            actions.append(
                Note("ordered" if first else "ordered_again", {"index": index, "peer": peer, "step": self._stamp.step})
            )
        return actions
