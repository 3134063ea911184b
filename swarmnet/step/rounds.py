"""How the keeper opens a step's rounds, and what it does about those who hold them up.

`RoundBuilder` says who stands where and what is cut by which bandwidths. Members obey what a round says
(`averaging.grid`), so this is the only place where latencies count. `Stragglers` hears members complain of each other
and says whom to go on without, or that the round is cut again. Pure.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from swarmnet.averaging.grid import Grid, circles, grid_of, rearranged
from swarmnet.ids import Ballot, PeerId, RoundId
from swarmnet.messages import UNMEASURED, Late, LineQuality, Report, Round, Stamp, Trouble
from swarmnet.quorum import has_quorum
from swarmnet.step.ledger import Ledger
from swarmnet.step.lines import BrokenLines
from swarmnet.step.view import View

# ---------------------------------------------------------------- the round builder
#
# A member that is lost between two rounds of a step leaves the others' rows as they are, and what it had counted is
# best executed again in its own row: then no other row's sum changes, and none is made anew.

_SURVEY = 8
"""Every so many steps parts are even: a member with a small part moves little, so its true speed would never show."""


_ANY = 1 << 20
"""Bytes per second of everybody, where nobody has measured anything and some should reduce nothing."""


class RoundBuilder:
    """The rounds of one term of office. group_size: see `averaging.grid`. numbers: for them, see `round_numbers`."""

    def __init__(
        self,
        stamp: Stamp,
        ballot: Ballot,
        group_size: int,
        numbers: Iterator[int],
        notice: Callable[[int], str] = lambda step: "",
    ) -> None:
        self.stamp, self.ballot, self._group_size, self._numbers = stamp, ballot, group_size, numbers
        self._notice = notice
        self._turns = 0
        self._grid: Grid | None = None
        self._lines: dict[PeerId, LineQuality] = {}
        self._home: dict[int, frozenset[PeerId]] = {}

    def measured(self, peer: PeerId, line: LineQuality) -> None:
        """What a member says of its line."""
        self._lines[peer] = line

    def lost(self, peer: PeerId, indexes: Collection[int]) -> None:
        """A member is given up, and what it had counted is to be executed again."""
        if self._grid is not None and len(self._grid.rows) > 1:
            row = next((row for row in self._grid.rows if peer in row), ())
            self._home.update(dict.fromkeys(indexes, frozenset(row)))

    def turn(self) -> None:
        """From the next round on parts are even, and each part is reduced by another member of the row."""
        self._turns += 1

    def spares(self, peer: PeerId, index: int) -> bool:
        """Would no other row's sum change if `peer` executed that index?"""
        home = self._home.get(index)
        return home is None or peer in home

    def spared(self, members: Collection[PeerId], broken: frozenset[PeerId]) -> frozenset[PeerId]:
        """Who should reduce nothing: ends of broken lines, and members that reach mates through a relay alone.

        Members that only contribute exchange nothing with each other, so that nothing of a round crosses a relay. Never
        all: where nobody else is left, relays carry it.
        """
        relayed = frozenset(peer for peer in members if self._lines.get(peer, UNMEASURED).relayed)
        return broken | relayed if set(members) - broken - relayed else broken

    def open(self, members: Collection[PeerId], ledger: Ledger, apart: frozenset[PeerId] = frozenset()) -> Round:
        """The next round, over all that the ledger holds. apart: members (never all) that should reduce nothing."""
        bandwidths = self._bandwidths(members)
        # Rounds that wait for no line would be cut by how busy machines were for a moment.
        waits = any(self._lines.get(peer, UNMEASURED).busy for peer in members)
        if bandwidths and (self._turns or self.stamp.step % _SURVEY == 0 or not waits):
            # Even parts. None would mean that no line is known, and members would wait for a hung one much longer.
            bandwidths = dict.fromkeys(bandwidths, min(bandwidths.values()))
        if apart and not self._turns:  # in a dispute everybody may have to judge
            bandwidths = _without_parts(bandwidths or dict.fromkeys(members, _ANY), apart)
        trips = {
            (peer, other): float(microseconds)
            for peer in members
            for other, microseconds in self._lines.get(peer, UNMEASURED).round_trips
            if other in members
        }
        self._grid = rearranged(self._grid, members, trips, self._group_size, bandwidths)
        rows = [_turned(row, self._turns) for row in self._grid.rows]
        receivers = tuple(peer for row in rows for peer in row)
        opened = Round(
            stamp=self.stamp,
            ballot=self.ballot,
            id=RoundId(self.ballot, next(self._numbers)),
            contributions=ledger.contributions(),
            receivers=receivers,
            holders=(),
            voided=frozenset(ledger.voided),
            bandwidths=tuple(bandwidths[peer] for peer in receivers) if bandwidths else (),
            rows=tuple(len(row) for row in rows) if len(rows) > 1 else (),
            columns=self._grid.columns if len(rows) > 1 else 0,
            notice=self._notice(self.stamp.step),
        )
        return opened

    def circles(self, current: Round, members: Collection[PeerId]) -> list[frozenset[PeerId]]:
        """Who exchanges with whom in a hop of that round, of these members."""
        return [frozenset(group) & frozenset(members) for group in circles(grid_of(current), self._group_size)]

    def _bandwidths(self, members: Collection[PeerId]) -> Mapping[PeerId, int]:
        """What members measured; an unknown one counts as the median. Empty: nobody has measured anything."""
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
    """Why I sum alone although mates are alive; None: I do not, or no mate lives."""
    if set(members) != {view.me}:
        return None
    reasons = []
    for peer, seen in sorted(view.mates()):
        if not view.alive(peer, now=now):
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


# ---------------------------------------------------------------- stragglers
#
# The members that hold up a round, by the word of the others: the keeper leaves them out, or cuts the round again.
#
# A member names whose stream stands still for too long, and whose chunks it had to refuse (`averaging.watch`).
# Somebody is left out when most of those that exchange with it say so, two at least where there are two; its own word
# is enough. A refusal that not all of them share is tried again first: the round is cut in other parts, so that others
# reduce what the accused sends. Each cut that finds it one more accuser is worth another; when one finds none, those
# who still complain are the odd ones, and the loudest is left out. Who names so many that the rest of its group could
# not outvote them is odd itself: its voice counts for nothing. Reducers that say that they wait for a contribution are
# not counted in this. A wrong verdict costs time: what is left out is executed again, and may take part in the next
# step.


@dataclass(frozen=True, slots=True)
class Leave:
    """Go on without this member in this step. reason: "late" or "refused", or "alone" for who accuses in vain.

    waits_for: if it is alone, and not odd itself, whose streams it said stand still.
    """

    peer: PeerId
    reason: str
    waits_for: frozenset[PeerId] = frozenset()


@dataclass(frozen=True, slots=True)
class CutAgain:
    """Cut the round again, in other parts: those who complain are too few."""


class Stragglers:
    """Complaints of one step. me: the keeper, for whom somebody else's single word against it is not enough.

    patience_s: how long others have to be heard, too: whoever is named may itself be waiting for somebody, and one
    voice may not stay the only one. lines: by which nobody is late before its time, whatever its accusers allow it.
    """

    def __init__(self, me: PeerId, *, patience_s: float, lines: BrokenLines) -> None:
        self._me, self._patience_s, self._lines = me, patience_s, lines
        self._round: RoundId | None = None
        self._began = 0.0
        self._known: set[PeerId] = set()
        self._ready: dict[PeerId, float] = {}
        self._late: dict[PeerId, tuple[Late, ...]] = {}
        self._refused: dict[PeerId, set[PeerId]] = {}  # accused -> accusers, in all rounds of the step
        self._fresh: dict[PeerId, set[PeerId]] = {}  # those of this round
        self._late_since: float | None = None
        self._alone_since: float | None = None
        self._again = False
        self._heard: set[tuple[PeerId, PeerId]] = set()  # (accused, accuser) of refusals, when the round was cut again

    def opened(self, round_id: RoundId, *, now: float) -> None:
        """Another round: who is late in it is yet to be seen."""
        self._round, self._began = round_id, now
        self._late, self._fresh, self._late_since, self._alone_since = {}, {}, None, None

    def hear(self, peer: PeerId, report: Report, *, now: float) -> None:
        """What a member complains of; and whether it still computes: then it owes nobody anything.

        Complaints of those that have never reported themselves are nothing: nobody exchanges with them.
        """
        self._known.add(peer)
        if report.owned <= report.summed:
            self._ready.setdefault(peer, now)
        else:
            self._ready.pop(peer, None)
        trouble: Trouble | None = report.trouble
        if trouble is None or trouble.id != self._round:
            self._late.pop(peer, None)
            return
        self._late[peer] = tuple(late for late in trouble.late if late.peer != peer)
        for accused in self._known.intersection(trouble.refused):
            for found in (self._refused, self._fresh):
                found.setdefault(accused, set()).add(peer)

    def forget(self, peer: PeerId) -> None:
        """That member is gone, and so are its complaints and those about it."""
        self._late.pop(peer, None)
        self._ready.pop(peer, None)
        for found in (self._refused, self._fresh):
            found.pop(peer, None)
            for accusers in found.values():
                accusers.discard(peer)

    def verdict(self, groups: Iterable[frozenset[PeerId]], *, now: float) -> Leave | CutAgain | None:
        """What to do about the open round.

        groups: of members that exchange with each other; each member is in one or more of them.
        """
        circles = [group for group in groups if len(group) > 1]
        members = frozenset[PeerId]().union(*circles)
        late = self._named(members, frozenset(), now)
        odd = self._odd(circles, late)
        # Without the voices of those who accuse nearly everybody.
        if odd:
            late = self._named(members, odd, now)
        for accused in sorted(members & self._refused.keys()):
            if accused in self._refused[accused] or self._is_refused(accused, circles, members, odd):
                return Leave(accused, "refused")
        most = [
            accused
            for accused in sorted(late, key=lambda peer: (peer == self._me, peer))
            if any(_most(late[accused] - odd, circle - {accused}) for circle in _of(accused, circles))
        ]
        # A late member that waits for another late one is excused. If it alone waits for somebody, it is the odd one.
        waits = {accused: self._owing(accused) for accused in late}
        owing = Counter(of for accused in late.keys() - odd for of in waits[accused])
        alone = {
            accused
            for accused in most
            if len(members) > 2
            and accused not in odd
            and waits[accused]
            and all(owing[of] == 1 for of in waits[accused])
        }
        for accused in sorted(most, key=lambda peer: bool(waits[peer].intersection(most)) and peer not in alone):
            return Leave(accused, "alone", waits[accused]) if accused in alone else Leave(accused, "late")
        fresh = [voices & members for accused, voices in self._fresh.items() if accused in members]
        match self._alone([voices for voices in (*fresh, *late.values()) if voices], members, odd, now):
            case Leave(peer, reason) if peer not in odd:
                waits_for = frozenset(accused for accused, voices in late.items() if peer in voices)
                return Leave(peer, reason, waits_for)
            case verdict:
                return verdict

    def _owing(self, peer: PeerId) -> frozenset[PeerId]:
        """The members that, by its word, owe it a chunk that hangs on nobody else."""
        return frozenset(late.peer for late in self._late.get(peer, ()) if late.owes)

    def _is_refused(
        self, accused: PeerId, circles: list[frozenset[PeerId]], members: frozenset[PeerId], odd: frozenset[PeerId]
    ) -> bool:
        """Do all that exchange with it refuse its chunks, or most of them, and again after the round was cut anew?"""
        voices = (self._refused[accused] & members) - odd
        # One word against another: the keeper's counts.
        if len(members) == 2:
            return bool(voices) and accused != self._me
        near = [circle - {accused} for circle in _of(accused, circles)]
        near = [others for others in (*near, frozenset[PeerId]().union(*near)) if len(others) > 1]
        again = self._again and bool(self._fresh.get(accused, set()) - odd)
        return any(_most(voices, others) and (again or others <= voices | odd) for others in near)

    def _odd(self, circles: list[frozenset[PeerId]], late: dict[PeerId, set[PeerId]]) -> frozenset[PeerId]:
        """Members that accuse so many of a circle that the rest could not outvote any of the accused.

        Who reduces nothing has to name all reducers while one member owes them all its contribution: those that say so
        are not counted.
        """
        names: dict[PeerId, set[PeerId]] = {}
        for found in (self._refused, late):
            for accused, accusers in found.items():
                excused = found is late and self._owing(accused)
                for voice in accusers - {accused}:
                    if not excused or accused in self._owing(voice):
                        names.setdefault(voice, set()).add(accused)
        return frozenset(
            voice for voice, named in names.items() if any(has_quorum(named, circle) for circle in _of(voice, circles))
        )

    def _named(self, members: frozenset[PeerId], odd: frozenset[PeerId], now: float) -> dict[PeerId, set[PeerId]]:
        """accused -> accusers, once the accused has had the time that its line needs."""
        if not any(self._late.values()):
            self._late_since = None
        elif self._late_since is None:
            self._late_since = now
        if self._late_since is None or now - self._late_since <= self._patience_s:
            return {}
        found: dict[PeerId, set[PeerId]] = {}
        for peer, names in self._late.items():
            for late in names:
                ready = self._ready.get(late.peer)
                if peer not in members or late.peer not in members or ready is None:
                    continue
                allowed_s = max(late.allowed_s, self._lines.least_s(late.peer))
                if now - max(ready, self._began) <= allowed_s:
                    continue
                found.setdefault(late.peer, set()).add(peer)
        return found

    def _alone(
        self, complaints: list[set[PeerId]], members: frozenset[PeerId], odd: frozenset[PeerId], now: float
    ) -> Leave | CutAgain | None:
        if not complaints:
            self._alone_since = None
            return None
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since <= self._patience_s:
            return None
        pairs = {
            (accused, voice)
            for accused, voices in self._refused.items()
            if accused in members
            for voice in (voices & members) - odd
        }
        known = {accused for accused, _ in self._heard}
        if not self._again or any(accused in known for accused, _ in pairs - self._heard):
            self._again, self._heard = True, pairs
            return CutAgain()
        voices = Counter(voice for accusers in complaints for voice in accusers)
        loudest = min(voices, key=lambda voice: (-voices[voice], voice == self._me, voice))
        return Leave(loudest, "alone")


def _of(peer: PeerId, circles: Iterable[frozenset[PeerId]]) -> list[frozenset[PeerId]]:
    return [circle for circle in circles if peer in circle]


def _most(voices: set[PeerId], others: frozenset[PeerId]) -> bool:
    """Are so many of these most of the others, and two at least where there are two?"""
    return has_quorum(voices, others) and len(voices & others) >= min(2, len(others))


def round_refusal(current: Round, num_microbatches: int, max_void: int) -> str | None:
    """Why nobody takes part in this round, or None (I2)."""
    if current.rows:
        if sum(current.rows) != len(current.receivers):
            return "a grid whose rows are not the round's receivers"
        if not 1 <= current.columns < 2 * min(current.rows):  # a row down to half is arranged anew (averaging.grid)
            return "a grid whose rows have no parts, or two for each member"
        if not {peer for peer, _, indexes in current.contributions if indexes} <= set(current.receivers):
            return "a contributor outside the round's grid"
    # A member that came later is no receiver of the round and collects its pieces all the same.
    if not current.receivers or len(set(current.receivers)) != len(current.receivers):
        return "a round whose receivers are no group"
    if not any(indexes for _, _, indexes in current.contributions):
        return "a round to which nobody contributes"
    # Sets are disjoint, as decoded: so these are all microbatches, or a keeper would choose whose gradients count.
    if sum(len(indexes) for _, _, indexes in current.contributions) + len(current.voided) != num_microbatches:
        return "a round that leaves microbatches out"
    if len(current.voided) > max_void:
        return "a round that voids more than the run tolerates"
    return None
