"""Who holds up a round, by the word of its members: whom the keeper leaves out, or asks others about. Pure.

A member names whose stream stands still for too long, and whose chunks it had to refuse (`averaging.watch`). Somebody
is left out when most of those that exchange with it say so, two at least where there are two; its own word is enough. A
refusal that not all of them share is tried again first: the round is cut in other parts, so that others reduce what the
accused sends. Each cut that finds it one more accuser is worth another; when one finds none, those who still complain
are the odd ones, and the loudest is left out. Who names so many that the rest of its group could not outvote them is
odd itself: its voice counts for nothing. A wrong verdict costs time: what is left out is executed again, and may take
part in the next step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from swarmnet.ids import PeerId, RoundId
from swarmnet.messages import Late, Report, Trouble
from swarmnet.step.lines import BrokenLinks


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


class Dispute:
    """Complaints of one step. me: the keeper, for whom somebody else's single word against it is not enough.

    patience_s: how long others have to be heard, too: whoever is named may itself be waiting for somebody, and one
    voice may not stay the only one. lines: by which nobody is late before its time, whatever its accusers allow it.
    """

    def __init__(self, me: PeerId, *, patience_s: float, lines: BrokenLinks) -> None:
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
        # Whoever waits itself for one that most wait for is excused; for one that owes it alone, it is alone with that.
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
        """Who owes it something without conditions, by its word."""
        return frozenset(late.peer for late in self._late.get(peer, ()) if late.owes)

    def _is_refused(
        self, accused: PeerId, circles: list[frozenset[PeerId]], members: frozenset[PeerId], odd: frozenset[PeerId]
    ) -> bool:
        """Do most of those that exchange with it refuse what it sends, and all of them, or again after another cut?"""
        voices = (self._refused[accused] & members) - odd
        if len(members) == 2:
            return bool(voices) and accused != self._me
        near = [circle - {accused} for circle in _of(accused, circles)]
        near = [others for others in (*near, frozenset[PeerId]().union(*near)) if len(others) > 1]
        again = self._again and bool(self._fresh.get(accused, set()) - odd)
        return any(_most(voices, others) and (again or others <= voices | odd) for others in near)

    def _odd(self, circles: list[frozenset[PeerId]], late: dict[PeerId, set[PeerId]]) -> frozenset[PeerId]:
        """Who names so many of a circle that the others would be no majority against any of them."""
        names: dict[PeerId, set[PeerId]] = {}
        for found in (self._refused, late):
            for accused, accusers in found.items():
                for voice in accusers - {accused}:
                    names.setdefault(voice, set()).add(accused)
        return frozenset(
            voice
            for voice, named in names.items()
            if any(2 * len(named & circle) > len(circle) for circle in _of(voice, circles))
        )

    def _named(self, members: frozenset[PeerId], odd: frozenset[PeerId], now: float) -> dict[PeerId, set[PeerId]]:
        """accused -> who names it, of those that have had their time."""
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
    said = len(voices & others)
    return 2 * said > len(others) and said >= min(2, len(others))
