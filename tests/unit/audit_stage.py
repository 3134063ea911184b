"""A stage of correct and Byzantine members around production `Cases`, for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random

from swarmnet.audit.case import claimed, recheck
from swarmnet.audit.cases import Cases, Check
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.messages import Ban, Case, Finished, Pledge, Recheck, Sent, Stamp, WorkRecord
from swarmnet.pledge import WHOLE, leaf, path_of, root_of, shares_of, whole_of
from swarmnet.quorum import quorum
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


def product_of(outputs: Iterable[bytes]) -> int:
    """Of a contribution made of these."""
    return int.from_bytes(digest_of(list(outputs))[:7], "little")


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
    """One replica: the host of its cases."""

    stage: Stage
    peer: PeerId
    works: dict[Pledge, dict[int, WorkRecord]] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    shown: list[Sent] = field(default_factory=list)
    told: list[Case] = field(default_factory=list)
    bans: dict[PeerId, Case | None] = field(default_factory=dict)
    vouched: frozenset[Ban] = frozenset()
    suspended: list[PeerId] = field(default_factory=list)
    disputed: list[Case] = field(default_factory=list)
    idle: bool = False
    """Computes nothing: a test looks at what it would compute."""

    def __post_init__(self) -> None:
        self.cases = self.stage.cases_of(self.peer, self)

    def check(self, check: Check) -> None:
        self.checks.append(check)
        if not self.idle:
            self.cases.found(*self.stage.computed(check), now=0.0)

    def ask_work(self, sent: Sent, owner: PeerId) -> None:
        self.cases.compared(sent, *self.stage.work_of(owner, sent.index))

    def show(self, sent: Sent) -> None:
        self.shown.append(sent)

    def tell(self, case: Case) -> None:
        self.told.append(case)
        self.stage.tell(self.peer, case)

    def ban(self, peer: PeerId, case: Case) -> None:
        assert peer not in self.bans
        self.bans[peer] = case

    def vouch(self, decided: frozenset[Ban]) -> None:
        self.vouched = decided

    def commit(self, ban: Ban) -> None:
        if ban.peer not in self.bans:
            self.bans[ban.peer] = self.cases.committed(ban)

    def suspend(self, peer: PeerId, why: str) -> None:
        self.suspended.append(peer)

    def undecided(self, case: Case) -> None:
        self.disputed.append(case)


class Stage:
    """Members around a step that all have applied.

    Args:
        byzantine: how many are. false: the share of their works that is false. two_faced: they may sign one recheck for
            one member and another for the next. together: one operator runs them.
    """

    def __init__(
        self,
        size: int,
        byzantine: int,
        seed: int,
        *,
        false: float = 1.0,
        rate: float = 1.0,
        two_faced: bool = True,
        together: bool = False,
    ) -> None:
        self.random = Random(seed)
        names = [PeerId(f"peer{at}") for at in range(size)]
        self.random.shuffle(names)
        self.byzantine, self.correct = frozenset(names[:byzantine]), frozenset(names[byzantine:])
        self.names, self.voters = sorted(names), frozenset(names)
        self.rate, self.two_faced, self.together = rate, two_faced, together
        self.lies: dict[tuple[PeerId, Pledge, int], bytes] = {}
        self.queue: list[tuple[PeerId, PeerId, Case]] = []  # from, to, what
        self.finished = finished_of(STEP, self.names)
        self.members = {peer: Member(self, peer) for peer in self.names}
        for peer in self.names:
            for _ in range(2 if peer in self.byzantine and self.random.random() < 0.2 else 1):
                self.pledge(peer, false if peer in self.byzantine else 0.0)

    def cases_of(self, peer: PeerId, host: Member) -> Cases:
        """Of a replica that has been here since the run began."""
        cases = Cases(
            peer,
            STAGE,
            Notary(peer),
            host,
            microbatches=self.rate,
            contributions=self.rate,
            numerics=lambda peer: "cpu",
            operator=lambda peer: "theirs" if self.together and peer in self.byzantine else peer,
            voters=lambda stage: self.voters,
        )
        cases.applied(stamp_of(0), finished_of(0, self.names), (), LATER, frozenset(self.names))
        return cases

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
            shares_of(self.finished.contributions, self.finished.discarded),
            peer,
            product_of(outputs),
            root_of({index: leaf(work) for index, work in works.items()}),
        )
        pledge = replace(pledge, signature=Notary(peer).sign(statement(pledge)))
        self.members[peer].works[pledge] = works
        return pledge

    @property
    def pledges(self) -> list[Pledge]:
        return [pledge for member in self.members.values() for pledge in member.works]

    def work_of(self, peer: PeerId, index: int, pledge: Pledge | None = None) -> tuple[WorkRecord, bytes]:
        """The work that was pledged, and its path."""
        works = self.members[peer].works[pledge or next(iter(self.members[peer].works))]
        return works[index], path_of({at: leaf(work) for at, work in works.items()}, index)

    def case(self, pledge: Pledge, index: int, sent: Sent | None = None) -> Case:
        work, path = (None, b"") if index == WHOLE else self.work_of(pledge.peer, index, pledge)
        return Case(pledge, work, path, sent, numerics="cpu")

    def computed(self, check: Check) -> tuple[Case, bytes]:
        """The case of a check, and what a correct member finds."""
        pledge, index, sent = check.case.pledge, check.index, check.case.sent
        works, case = self.members[pledge.peer].works[pledge], self.case(pledge, index, sent)
        if index == WHOLE:
            outputs = [right(work).output for work in works.values()]
            return case, whole_of(product_of(outputs))
        return case, right(works[index]).output if sent is not None else leaf(right(works[index]))

    def is_false(self, check: Check) -> bool:
        case, found = self.computed(check)
        return found != claimed(case)

    # ------------------------------------------------------------ what happens

    def begin(self) -> None:
        """Step STEP is applied, and the one after it: works are sampled."""
        for peer in sorted(self.correct):
            cases, pledges, live = self.members[peer].cases, self.pledges, frozenset(self.names)
            self.random.shuffle(pledges)
            cases.applied(stamp_of(STEP - 1), finished_of(STEP - 1, self.names), (), LATER, live)
            cases.applied(stamp_of(STEP), self.finished, pledges, Chain("22" * 32), live)
            cases.applied(stamp_of(STEP + 1), finished_of(STEP + 1, self.names), (), LATER, live)

    def votes(self, ban: Ban) -> int:
        """Of correct members."""
        return sum(ban in self.members[peer].vouched for peer in self.correct)

    def commit(self) -> None:
        """Each correct member leads a step; no Byzantine one votes for a ban."""
        for leader in sorted(self.correct):
            for ban in self.members[leader].cases.to_name():
                if self.votes(ban) >= quorum(self.names):
                    for peer in sorted(self.correct):
                        self.members[peer].commit(ban)

    def tell(self, peer: PeerId, case: Case) -> None:
        self.queue += [(peer, to, case) for to in sorted(self.correct - {peer})]

    def signed(self, peer: PeerId, case: Case, found: bytes) -> Recheck:
        return recheck(case, found, Notary(peer), peer)

    def lie(self) -> None:
        """A Byzantine member tells some others a case with its recheck."""
        if not self.byzantine:
            return
        peer, pledge = self.random.choice(sorted(self.byzantine)), self.random.choice(self.pledges)
        index = self.random.choice([WHOLE, *self.members[pledge.peer].works[pledge]])
        values = 4
        # Half of the time all of them say the same of one correct member.
        if self.random.random() < 0.5:
            pledge = min((p for p in self.pledges if p.peer in self.correct), key=lambda p: p.peer)
            index, values = min(self.members[pledge.peer].works[pledge]), 1
        if pledge.peer == peer:
            return
        case = self.case(pledge, index)
        false = (digest_of("lie"), digest_of("other lie"), claimed(case), self.computed(Check(case, index))[1])
        value = self.random.choice(false[:values])
        if not self.two_faced:
            value = self.lies.setdefault((peer, pledge, index), value)
        said = replace(case, rechecks=(self.signed(peer, case, value),))
        self.queue += [(peer, to, said) for to in sorted(self.correct) if self.random.random() < 0.7]

    def run(self, *, lost: float = 0.0, doubled: float = 0.0, lies: int = 0) -> None:
        """Deliver in any order until nothing is left; what was lost is told again a few times."""
        now = 0.0
        for _ in range(30):
            while self.queue or lies:
                if lies and self.random.random() < 0.3:
                    lies -= 1
                    self.lie()
                if not self.queue:
                    continue
                at = self.random.randrange(len(self.queue))
                teller, to, case = self.queue[at]
                if self.random.random() >= doubled:
                    self.queue.pop(at)
                if self.random.random() >= lost:
                    self.members[to].cases.hear(case, teller)
            self.commit()
            now += 10.0
            if not any(self.members[peer].cases.open_cases for peer in self.correct):
                break
            for peer in sorted(self.correct):
                self.members[peer].cases.tick(now)
