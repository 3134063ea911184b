"""How the leader opens a step's rounds. Pure.

`RoundBuilder` arranges the members in the group mesh and decides by which bandwidths the vector is cut. Members follow
the round (`averaging.grid`), so this is the only module where latencies count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field

from swarmnet.averaging.grid import arrange, circles, grid_of
from swarmnet.ids import Ballot, PeerId, RoundId
from swarmnet.manifest.extension import Notice
from swarmnet.messages import UNMEASURED, BannedPeers, LatePeers, LineQuality, Round, Stamp
from swarmnet.step.ledger import Ledger
from swarmnet.step.suspects import SuspectGraph
from swarmnet.step.view import View


@dataclass(slots=True)
class Attempt:
    """An open round. apart: members that reduce nothing in it."""

    round: Round
    apart: frozenset[PeerId]
    opened_at: float
    certified_at: float | None = None  # when its certificate was first seen
    is_spoilt: bool = False  # it has lost a member that may still owe something to others
    told_at: dict[PeerId, float] = field(default_factory=dict)  # when a member was last told of it


@dataclass(slots=True)
class Rounds:
    """The rounds of one term: the open one, and what speaks for another."""

    builder: RoundBuilder
    suspects: SuspectGraph
    held_at: float  # when a signature last arrived
    attempt: Attempt | None = None
    gave_back: dict[PeerId, float] = field(default_factory=dict)
    """Members that gave back what an open round named, and when that was opened."""
    cut_for_links: bool = False  # a round of the step was cut again for broken links, which is done once
    held_up_by: Set[PeerId] = frozenset()  # who was left out last for holding up a round

    def open(
        self,
        members: Collection[PeerId],
        ledger: Ledger,
        apart: frozenset[PeerId],
        named: tuple[LatePeers, BannedPeers],
        *,
        now: float,
    ) -> Round:
        """Open the next round. named: the late and banned peers that its commit is to name."""
        opened = self.builder.open(members, ledger, apart, *named)
        self.attempt = Attempt(opened, apart, now)
        self.suspects.opened(opened.id, now=now)
        return opened


_SURVEY = 8
"""Every so many steps parts are even: a member with a small part moves little, so its true speed would never show."""


_ANY = 1 << 20
"""Bytes per second of each member, where no line is measured and some should reduce nothing."""


class RoundBuilder:
    """The rounds of one term of office. group_size: see `averaging.grid`. numbers: for them, see `round_numbers`."""

    def __init__(
        self,
        stamp: Stamp,
        ballot: Ballot,
        group_size: int,
        numbers: Iterator[int],
        notice: Callable[[int], Notice | None] = lambda step: None,
    ) -> None:
        self.stamp, self.ballot, self._group_size, self._numbers = stamp, ballot, group_size, numbers
        self._notice = notice
        self._turns = 0
        self._lines: dict[PeerId, LineQuality] = {}

    def measured(self, peer: PeerId, line: LineQuality) -> None:
        """What a member says of its line."""
        self._lines[peer] = line

    def turn(self) -> None:
        """From the next round on parts are even, and each part is reduced by another member of the row."""
        self._turns += 1

    def spared(
        self, members: Collection[PeerId], broken: frozenset[PeerId], newcomers: frozenset[PeerId] = frozenset()
    ) -> frozenset[PeerId]:
        """Who should reduce nothing: ends of broken lines, members without a vote (the others would wait for what they
        reduce), and members that reach others through a relay alone.

        Members that only contribute exchange nothing with each other, so that nothing of a round crosses a relay. Never
        all: where no other member is left, relays carry it.
        """
        relayed = frozenset(peer for peer in members if self._lines.get(peer, UNMEASURED).relayed)
        found = broken
        for each in (newcomers, relayed):
            if set(members) - found - each:
                found |= each
        return found

    def open(
        self,
        members: Collection[PeerId],
        ledger: Ledger,
        apart: frozenset[PeerId] = frozenset(),
        late: LatePeers = (),
        bans: BannedPeers = (),
    ) -> Round:
        """The next round, over all assigned indexes. apart: members (never all) that should reduce nothing."""
        bandwidths = self._bandwidths(members)
        # Rounds that wait for no line would be cut by how busy machines were for a moment.
        waits = any(self._lines.get(peer, UNMEASURED).busy for peer in members)
        if bandwidths and (self._turns or self.stamp.step % _SURVEY == 0 or not waits):
            # Even parts. None would mean that no line is known, and members would wait for a hung one much longer.
            bandwidths = dict.fromkeys(bandwidths, min(bandwidths.values()))
        if apart and not self._turns:  # in a dispute any member may have to judge
            bandwidths = _without_parts(bandwidths or dict.fromkeys(members, _ANY), apart)
        trips = {
            (peer, other): float(microseconds)
            for peer in members
            for other, microseconds in self._lines.get(peer, UNMEASURED).round_trips
            if other in members
        }
        rows = [_turned(row, self._turns) for row in arrange(members, trips, self._group_size, bandwidths).rows]
        receivers = tuple(peer for row in rows for peer in row)
        return Round(
            stamp=self.stamp,
            id=RoundId(self.ballot, next(self._numbers)),
            contributions=ledger.contributions(),
            receivers=receivers,
            holders=(),
            discarded=frozenset(ledger.discarded),
            bandwidths=tuple(bandwidths[peer] for peer in receivers) if bandwidths else (),
            rows=tuple(len(row) for row in rows) if len(rows) > 1 else (),
            notice=self._notice(self.stamp.step),
            late=late,
            bans=bans,
        )

    def circles(self, current: Round, members: Collection[PeerId]) -> list[frozenset[PeerId]]:
        """Who exchanges with whom in a hop of that round, of these members."""
        return [frozenset(group) & frozenset(members) for group in circles(grid_of(current), self._group_size)]

    def _bandwidths(self, members: Collection[PeerId]) -> Mapping[PeerId, int]:
        """What members measured; an unknown one counts as the median. Empty: no line is measured."""
        measured = {peer: self._lines.get(peer, UNMEASURED).bytes_per_s for peer in members}
        known = [bandwidth for bandwidth in measured.values() if bandwidth]
        if not known:
            return {}
        return {peer: bandwidth or statistics.median_low(known) for peer, bandwidth in measured.items()}


def _without_parts(bandwidths: Mapping[PeerId, int], apart: frozenset[PeerId]) -> dict[PeerId, int]:
    """Bandwidths by which these get no part (`averaging.parts`): the highest, since members wait by them, too."""
    n = len(bandwidths)
    least = min(bandwidth for peer, bandwidth in bandwidths.items() if peer not in apart)
    low = max(least * (n - len(apart)) // (2 * n), 1)
    return {peer: min(low, bandwidth) if peer in apart else bandwidth for peer, bandwidth in bandwidths.items()}


def _turned(row: tuple[PeerId, ...], turns: int) -> tuple[PeerId, ...]:
    turn = turns % len(row)
    return (*row[turn:], *row[:turn])


def left_alone(view: View, stamp: Stamp, members: Collection[PeerId], *, now: float) -> str | None:
    """Why I sum alone although other replicas are in touch; None: I do not, or none is."""
    if set(members) != {view.me}:
        return None
    reasons = []
    for peer, seen in sorted(view.mates()):
        if not view.in_touch(peer, now=now):
            continue
        if not seen.synced:
            reasons.append(f"{peer} has no state yet")
        elif seen.version != stamp.step:
            reasons.append(f"{peer} is at version {seen.version}")
        elif seen.chain != stamp.chain:
            reasons.append(f"{peer} is on another chain")
        else:
            reasons.append(f"{peer} has not reported since it was evicted")
    return "; ".join(reasons) or None


def round_refusal(current: Round, num_microbatches: int, max_discarded: int) -> str | None:
    """Why no member takes part in this round, or None (I2)."""
    if current.rows:
        if sum(current.rows) != len(current.receivers):
            return "a grid with rows that are not the round's receivers"
        if not {peer for peer, _, indexes in current.contributions if indexes} <= set(current.receivers):
            return "a contributor outside the round's grid"
    # A member that came later is no receiver of the round and collects its pieces all the same.
    if not current.receivers or len(set(current.receivers)) != len(current.receivers):
        return "a round with receivers that are no group"
    if not any(indexes for _, _, indexes in current.contributions):
        return "a round without a contribution"
    # Sets are disjoint, as decoded: so these are all microbatches, or a leader would choose which gradients count.
    if sum(len(indexes) for _, _, indexes in current.contributions) + len(current.discarded) != num_microbatches:
        return "a round that leaves microbatches out"
    if len(current.discarded) > max_discarded:
        return "a round that skips more than the run tolerates"
    return None
