"""Who holds up a round, by the word of its members: whom the keeper leaves out, or asks others about. Pure.

A member names whose stream stands still for too long, and whose chunks it had to refuse (`averaging.watch`). Nobody is
left out on one voice where there are three members or more: two must have refused something of it, or most of its
group must wait for it; its own word is enough. One voice alone is a dispute between two, and there is a way to tell:
cut the round again, so that others reduce what the accused sends. If again nobody else complains, it is the accuser
that is left out. A wrong verdict costs time: what is left out is executed again, and may take part in the next step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from swarmnet.ids import PeerId, RoundId
from swarmnet.messages import Late, Report, Trouble


@dataclass(frozen=True, slots=True)
class Leave:
    """Go on without this member in this step. reason: "late" or "refused", or "alone" for who accuses in vain."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Again:
    """Cut the round again, in other parts: one voice is not enough."""


class Dispute:
    """Complaints of one step. me: the keeper, for whom somebody else's single word against it is not enough.

    patience_s: how long others have to be heard, too: whoever is named may itself be waiting for somebody, and one
    voice may not stay the only one.
    """

    def __init__(self, me: PeerId, *, patience_s: float) -> None:
        self._me, self._patience_s = me, patience_s
        self._round: RoundId | None = None
        self._began = 0.0
        self._known: set[PeerId] = set()
        self._ready: dict[PeerId, float] = {}
        self._late: dict[PeerId, tuple[Late, ...]] = {}
        self._refused: dict[PeerId, set[PeerId]] = {}     # accused -> accusers, in all rounds of the step
        self._fresh: dict[PeerId, set[PeerId]] = {}       # those of this round
        self._late_since: float | None = None
        self._alone_since: float | None = None
        self._again = False

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

    def verdict(self, groups: Iterable[frozenset[PeerId]], *, now: float) -> Leave | Again | None:
        """What to do about the open round.

        groups: of members that exchange with each other; each member is in one or more of them.
        """
        circles = [group for group in groups if len(group) > 1]
        members = frozenset[PeerId]().union(*circles)
        for accused in sorted(members & self._refused.keys()):
            voices = self._refused[accused] & members
            if len(voices) >= 2 or accused in voices or (voices and len(members) == 2 and accused != self._me):
                return Leave(accused, "refused")
        late = self._named(members, now)
        for accused in sorted(late, key=lambda peer: (peer == self._me, peer)):
            if any(_most(late[accused] & circle, circle - {accused}) for circle in circles if accused in circle):
                return Leave(accused, "late")
        fresh = [voices & members for accused, voices in self._fresh.items() if accused in members]
        return self._alone([voices for voices in (*fresh, *late.values()) if voices], now)

    def _named(self, members: frozenset[PeerId], now: float) -> dict[PeerId, set[PeerId]]:
        """accused -> who names it, of those that have had their time. A reducer that waits for others is excused."""
        if not any(self._late.values()):
            self._late_since = None
        elif self._late_since is None:
            self._late_since = now
        if self._late_since is None or now - self._late_since <= self._patience_s:
            return {}
        found: dict[PeerId, set[PeerId]] = {}
        owed = {peer for peer, names in self._late.items() if any(late.owes for late in names)}
        for peer, names in self._late.items():
            for late in names:
                ready = self._ready.get(late.peer)
                if peer not in members or late.peer not in members or ready is None:
                    continue
                if now - max(ready, self._began) <= late.allowed_s or (not late.owes and late.peer in owed):
                    continue
                found.setdefault(late.peer, set()).add(peer)
        return found

    def _alone(self, complaints: list[set[PeerId]], now: float) -> Leave | Again | None:
        if not complaints:
            self._alone_since = None
            return None
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since <= self._patience_s:
            return None
        if not self._again:
            self._again = True
            return Again()
        voices = Counter(voice for accusers in complaints for voice in accusers)
        loudest = min(voices, key=lambda voice: (-voices[voice], voice == self._me, voice))
        return Leave(loudest, "alone")


def _most(voices: set[PeerId], others: frozenset[PeerId]) -> bool:
    """Are these most of the others, and two at least where there are two?"""
    return 2 * len(voices) > len(others) and len(voices) >= min(2, len(others))
