"""A stage of honest members and liars around production courts, for tests: who signs, who computes, who hears what."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random

from swarmnet.audit.court import (
    AskWork,
    Convict,
    Court,
    CourtAction,
    Dispute,
    Recompute,
    SayFinding,
    StrikePeer,
    TellVerdict,
)
from swarmnet.audit.pledge import WHOLE, finding_statement, leaf, path_of, root_of, said, shares_of, whole_of
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.messages import Case, Finding, Finished, Pledge, Sent, Stamp, Verdict, WorkRecord
from swarmnet.statement import statement

STEP, STAGE, PER_MEMBER = 5, 1, 2
LATER = Chain("33" * 32)


def digest_of(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


class Notary:
    """Signs for one peer. Nobody in a test can make another's signature but through it."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer

    def sign(self, data: bytes) -> bytes:
        return digest_of("signed", self.peer, data)

    @staticmethod
    def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
        return signature == digest_of("signed", peer, data)


def right(work: WorkRecord) -> WorkRecord:
    """The work with that input, as it should be."""
    return replace(work, output=digest_of("output", work.input))


def stamp_of(step: int) -> Stamp:
    return Stamp(step, STAGE, Chain(digest_of("chain", step).hex()))


def finished_of(step: int, members: Iterable[PeerId]) -> Finished:
    """A sum to which each has contributed PER_MEMBER microbatches."""
    shares = tuple(
        (peer, Generation(1, 0), frozenset(range(PER_MEMBER * at, PER_MEMBER * (at + 1))))
        for at, peer in enumerate(members)
    )
    round_id = RoundId(Ballot(1, shares[0][0]), step)
    return Finished(round_id, digest_of("sum", step)[:32], 100, 1.0, 1.0, shares)


@dataclass
class Member:
    """What one replica has said, and its court."""

    peer: PeerId
    court: Court
    works: dict[Pledge, dict[int, WorkRecord]] = field(default_factory=dict)


class Stage:
    """Members around a step that everybody has applied. liars: so many of their works are false as `false` says; if
    `two_faced`, they may find one thing for one mate and another for the next; `kin`: one operator runs them."""

    def __init__(
        self,
        size: int,
        liars: int,
        seed: int,
        *,
        false: float = 1.0,
        rate: float = 1.0,
        two_faced: bool = True,
        kin: bool = False,
    ) -> None:
        self.random = Random(seed)
        names = [PeerId(f"peer{at}") for at in range(size)]
        self.random.shuffle(names)
        self.liars = frozenset(names[:liars])
        self.honest = frozenset(names[liars:])
        self.names = sorted(names)
        self.rate, self.two_faced, self.kin = rate, two_faced, kin
        self.lies: dict[tuple[PeerId, Pledge, int], bytes] = {}
        self.members = {peer: Member(peer, self._court(peer)) for peer in self.names}
        self.finished = finished_of(STEP, self.names)
        self.queue: list[tuple[PeerId, PeerId, Finding | Verdict | Sent]] = []  # from, to, what
        self.said: list[tuple[Finding, Pledge]] = []
        self.actions: dict[PeerId, list[CourtAction]] = {peer: [] for peer in self.names}
        for peer in self.names:
            for _ in range(2 if peer in self.liars and self.random.random() < 0.2 else 1):
                self.pledge(peer, false if peer in self.liars else 0.0)

    def _court(self, peer: PeerId) -> Court:
        """Of one that has been here since the run began."""
        court = Court(
            peer,
            STAGE,
            Notary(peer),
            microbatches=self.rate,
            contributions=self.rate,
            numerics=lambda peer: "cpu",
            operator=lambda peer: "liars'" if self.kin and peer in self.liars else peer,
        )
        court.applied(stamp_of(0), finished_of(0, self.names), (), LATER, frozenset(self.names))
        return court

    # ------------------------------------------------------------ pledges

    def pledge(self, peer: PeerId, false: float, number: int = 0) -> Pledge:
        indexes = next(found for name, _, found in self.finished.contributions if name == peer)
        works = {}
        for index in sorted(indexes):
            inputs = digest_of("input", peer, index, number)
            work = right(WorkRecord(index, inputs, bytes(32), bytes(32), bytes(32), 1.0, 10))
            if self.random.random() < false:
                work = replace(work, output=digest_of("false", self.random.random()))
            works[index] = work
        outputs = [work.output for work in works.values()]
        pledge = Pledge(
            stamp_of(STEP),
            replace(self.finished.id, number=self.finished.id.number + number),
            self.finished.digest,
            shares_of(self.finished.contributions, self.finished.voided),
            peer,
            0,
            digest_of("pieces", outputs),
            root_of({index: leaf(work) for index, work in works.items()}),
        )
        pledge = replace(pledge, signature=Notary(peer).sign(statement(pledge)))
        self.members[peer].works[pledge] = works
        return pledge

    def found(self, pledge: Pledge, index: int, sent: Sent | None = None) -> bytes:
        """What an honest member finds."""
        works = self.members[pledge.peer].works[pledge]
        if sent is not None:
            return sent.digest if sent.digest == right(works[index]).output else right(works[index]).output
        if index == WHOLE:
            return whole_of(digest_of("pieces", [right(work).output for work in works.values()]), pledge.product)
        return leaf(right(works[index]))

    def is_false(self, pledge: Pledge, index: int) -> bool:
        works = self.members[pledge.peer].works[pledge]
        return self.found(pledge, index) != said(pledge, None if index == WHOLE else works[index])

    @property
    def pledges(self) -> list[Pledge]:
        return [pledge for member in self.members.values() for pledge in member.works]

    # ------------------------------------------------------------ what happens

    def begin(self) -> None:
        """Step STEP is applied, and the one after it: works are drawn."""
        for peer in sorted(self.honest):
            court, pledges = self.members[peer].court, self.pledges
            self.random.shuffle(pledges)
            live = frozenset(self.names)
            self.perform(peer, court.applied(stamp_of(STEP - 1), finished_of(STEP - 1, self.names), (), LATER, live))
            self.perform(peer, court.applied(stamp_of(STEP), self.finished, pledges, Chain("22" * 32), live))
            following = finished_of(STEP + 1, self.names)
            self.perform(peer, court.applied(stamp_of(STEP + 1), following, (), LATER, live))

    def perform(self, peer: PeerId, actions: list[CourtAction]) -> None:
        """What an honest member does."""
        court = self.members[peer].court
        for action in actions:
            self.actions[peer].append(action)
            match action:
                case Recompute(case, pledge, _, sent):
                    works = self.members[pledge.peer].works[pledge]
                    work = None if case.index == WHOLE else works[case.index]
                    leaves = {index: leaf(work) for index, work in works.items()}
                    path = b"" if work is None else path_of(leaves, case.index)
                    if court.served(pledge, work, path, sent):
                        found = self.found(pledge, case.index, sent)
                        self.perform(peer, court.found(pledge, found, work, path, sent, now=0.0))
                case TellVerdict(to, verdict):
                    if to in self.honest:
                        self.queue.append((peer, to, verdict))
                case SayFinding(finding, Sent() as sent):
                    self.tell(peer, sent)
                    self.tell(peer, finding)
                case SayFinding(finding):
                    meant = [
                        pledge
                        for pledge in self.pledges
                        if Notary.verify(finding.peer, finding_statement(finding, pledge, "cpu"), finding.signature)
                    ]
                    self.said.append((finding, meant[0]))
                    self.tell(peer, finding)
                case Convict(_, Verdict() as verdict):
                    self.tell(peer, verdict)
                case AskWork(sent, case):
                    pledge, works = next(iter(self.members[case.accused].works.items()))
                    path = path_of({index: leaf(work) for index, work in works.items()}, case.index)
                    self.perform(peer, court.compared(sent, works[case.index], path) or [])
                case Convict() | StrikePeer() | Dispute():
                    pass

    def tell(self, peer: PeerId, what: Finding | Verdict | Sent) -> None:
        self.queue += [(peer, to, what) for to in sorted(self.honest - {peer})]

    def lie(self) -> None:
        """A liar says something about somebody, to some."""
        if not self.liars:
            return
        peer, pledge = self.random.choice(sorted(self.liars)), self.random.choice(self.pledges)
        index = self.random.choice([WHOLE, *self.members[pledge.peer].works[pledge]])
        values = 4
        # Half of the time all liars say the same of one honest member.
        if self.random.random() < 0.5:
            pledge = min((p for p in self.pledges if p.peer in self.honest), key=lambda p: p.peer)
            index, values = min(self.members[pledge.peer].works[pledge]), 1
        if pledge.peer == peer:
            return
        works = self.members[pledge.peer].works[pledge]
        own = said(pledge, None if index == WHOLE else works[index])
        told = (digest_of("lie"), digest_of("other lie"), own, self.found(pledge, index))[:values]
        value = self.random.choice(told)
        if not self.two_faced:
            value = self.lies.setdefault((peer, pledge, index), value)
        finding = Finding(Case(pledge.stamp, pledge.peer, index), value, peer)
        finding = replace(finding, signature=Notary(peer).sign(finding_statement(finding, pledge, "cpu")))
        self.said.append((finding, pledge))
        for to in sorted(self.honest):
            if self.random.random() < 0.7:
                self.queue.append((peer, to, finding))

    def forge(self) -> Verdict:
        """A verdict of whatever was ever signed, that convicts somebody if its reader lets it."""
        pledge = self.random.choice(self.pledges)
        works = self.members[pledge.peer].works[pledge]
        index = self.random.choice([WHOLE, *works])
        work = None if index == WHOLE else works[index]
        leaves = {index: leaf(work) for index, work in works.items()}
        path = b"" if work is None else path_of(leaves, index)
        findings = [finding for finding, _ in self.said]
        self.random.shuffle(findings)
        same = [f for f in findings if (f.case.accused, f.case.index) == (pledge.peer, index)]
        each = {finding.peer: finding for finding in (same if self.random.random() < 0.8 else findings)}
        return Verdict(pledge, work, path, tuple(each.values())[:31], "cpu")

    def run(self, *, lost: float, doubled: float, lies: int) -> None:
        """Deliver in any order until nothing is left; what was lost is said again a few times."""
        now = 0.0
        for _ in range(30):
            while self.queue or lies:
                if lies and self.random.random() < 0.3:
                    lies -= 1
                    self.lie()
                    if self.said and self.honest:
                        court = self.members[self.random.choice(sorted(self.honest))].court
                        self.perform(court.me, court.hear_verdict(self.forge(), frozenset(self.names)))
                if not self.queue:
                    continue
                at = self.random.randrange(len(self.queue))
                _, to, what = self.queue[at]
                if self.random.random() >= doubled:
                    self.queue.pop(at)
                if self.random.random() < lost:
                    continue
                court = self.members[to].court
                if isinstance(what, Finding):
                    self.perform(to, court.hear(what))
                elif isinstance(what, Sent):
                    self.perform(to, court.hear_sent(what, PeerId("who received it")))
                else:
                    self.perform(to, court.hear_verdict(what, frozenset(self.names)))
            now += 10.0
            if not any(self.members[peer].court.open_cases for peer in self.honest):
                break
            for peer in sorted(self.honest):
                self.perform(peer, self.members[peer].court.tick(now))
