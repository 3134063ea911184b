"""Which member the leader continues without when a round does not end. Pure.

Members report the peers with a stream that stalls for too long, and the peers that sent chunks which they refuse
(`averaging.watch`). A report is an edge between two members: one of them is at fault, or the link between them is.

| the reports of a round | the leader |
|---|---|
| a member refuses its own contribution | leaves it out |
| all others, two at least, refuse what a member sends | leaves it out immediately |
| edges, for the length of the patience | leaves out the member of most edges |
| two members tie, and one of the edges is a refusal | cuts the round in other parts first, while that adds an edge |

A tie falls on the member of most earlier ties, then on the one that most members wait for, never on the leader if it
can fall on another. Of members with one edge each it falls on one that reports: so no member but the leader alone has
another one left out, and a member that sends nothing to one member at a time loses the second tie. The work of a member
that is left out is executed again. A member is late if a round is cut again for its refusal of one sender, and soon for
its refusal of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from swarmnet.ids import PeerId, RoundId
from swarmnet.messages import Trouble
from swarmnet.step.lines import BrokenLines


@dataclass(frozen=True, slots=True)
class Leave:
    """Go on without this member in this step. reason: "late" or "refused", or "alone" if it has one edge only.

    others: if it is alone, the other ends of its edges.
    """

    peer: PeerId
    reason: str
    others: frozenset[PeerId] = frozenset()


@dataclass(frozen=True, slots=True)
class CutAgain:
    """Cut the round in other parts: other members then reduce what the suspects send.

    refused: if no member has more than one edge, who refuses what whom has sent.
    """

    refused: tuple[tuple[PeerId, PeerId], ...] = ()


class SuspectGraph:
    """Suspect reports of one step.

    me: the leader. patience_s: with a member. links: of the stage; they remember earlier ties.
    """

    def __init__(self, me: PeerId, *, patience_s: Callable[[PeerId], float], links: BrokenLines) -> None:
        self._me, self._patience_s, self._links = me, patience_s, links
        self._round: RoundId | None = None
        self._began = 0.0
        self._since: float | None = None  # there are edges in this round
        self._ready: dict[PeerId, float] = {}  # since when a member has summed all that it owns
        self._reports: dict[PeerId, Trouble] = {}  # of this round
        self._refusals: set[frozenset[PeerId]] = set()  # edges of all rounds of the step, between members
        self._cut_for: set[frozenset[PeerId]] = set()  # the edges when the round was last cut again

    def opened(self, round_id: RoundId, *, now: float) -> None:
        """Another round begins, and with it the time that its members have."""
        self._round, self._began, self._since = round_id, now, None
        self._reports = {}

    def hear(self, peer: PeerId, trouble: Trouble | None, left: int, *, now: float) -> None:
        """A member's report. While it has something left to accumulate, nothing that it sends is overdue."""
        if not left:
            self._ready.setdefault(peer, now)
        else:
            self._ready.pop(peer, None)
        if trouble is not None and trouble.id == self._round:
            self._reports[peer] = trouble
        else:
            self._reports.pop(peer, None)

    def forget(self, peer: PeerId) -> None:
        """That member is gone, and with it its edges."""
        self._reports.pop(peer, None)
        self._ready.pop(peer, None)
        self._refusals = {edge for edge in self._refusals if peer not in edge}

    def decide(self, groups: Collection[frozenset[PeerId]], *, step: int, now: float) -> Leave | CutAgain | None:
        """What to do about the open round. groups: the members that exchange with each other."""
        members = frozenset[PeerId]().union(*(group for group in groups if len(group) > 1))
        reports = {peer: report for peer, report in self._reports.items() if peer in members}
        if own := sorted(peer for peer, report in reports.items() if peer in report.refused):
            return Leave(own[0], "refused")  # no other member knows its contribution better
        # Others wait for the member that owes its own contribution, too.
        owes = any(late.owes for report in reports.values() for late in report.late)
        waits = [
            (peer, each)
            for peer, report in reports.items()
            for each in report.late
            if self._is_late(each.peer, each.allowed_s, now)
        ]
        late = [(peer, each.peer) for peer, each in waits if each.owes or not owes]
        refused = [(peer, other) for peer, report in reports.items() for other in report.refused]
        named = [(peer, other) for peer, other in (*late, *refused) if other in members and other != peer]
        if not named:
            self._since = None
            return None
        self._refusals |= {frozenset(pair) for pair in refused if members.issuperset(pair)}
        edges = {frozenset(pair) for pair in named} | {edge for edge in self._refusals if edge <= members}
        self._since = now if self._since is None else self._since
        reported = Counter(other for _, other in named)
        refused_by = {other: {peer for peer, each in refused if each == other} for _, other in refused}
        pairs = ((peer, group) for group in groups if len(group) > 2 for peer in group & refused_by.keys())
        sure = any(group <= refused_by[peer] | {peer} for peer, group in pairs)
        degree = Counter(peer for edge in edges for peer in edge)
        most = max(degree.values())
        tied = [peer for peer in degree if degree[peer] == most]
        ties = self._links.ends(step)
        # Of three or more, no member but its reporter has anything against a suspect of one edge.
        alone = most == 1 and len(members) > 2
        by = -1 if alone else 1
        # Two Byzantine members that report waiting for others would silence all that wait for the two.
        all_edges = {frozenset((peer, each.peer)) for peer, each in waits} if not alone else set()
        waited_for = Counter(peer for edge in all_edges for peer in edge)
        spared = self._me if alone else None  # what the leader waits for it knows, and needs no other word for
        worst = max(sorted(tied), key=lambda p: (ties[p], waited_for[p], p != spared, by * reported[p], p != self._me))
        if now - self._since <= self._patience_s(worst) and not sure:
            return None
        # Which end is at fault shows once other members reduce what both send.
        if len(tied) > 1 and len(members) > 2 and self._refusals and self._cut_for != edges:
            self._cut_for = edges
            return CutAgain(tuple(pair for pair in refused if members.issuperset(pair)) if alone else ())
        if alone:
            return Leave(worst, "alone", frozenset(peer for edge in edges if worst in edge for peer in edge - {worst}))
        return Leave(worst, "refused" if worst in refused_by else "late")

    def _is_late(self, peer: PeerId, allowed_s: float, now: float) -> bool:
        """Has a member had the time that its link needs, by its reporter and by what the leader has measured?"""
        ready = self._ready.get(peer)
        return ready is not None and now - max(ready, self._began) > max(allowed_s, self._links.least_s(peer))
