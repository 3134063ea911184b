"""The audits of one replica: which work it samples, and how a case is decided. Pure: events in, calls of `Host` out.

| event | the replica then |
|---|---|
| `applied` | samples works of the step before last, and computes them again |
| `found`: the result differs | signs a recheck, and tells the case to the other replicas of its stage |
| `hear`: another replica tells a case | computes the work again, and tells the case with its own recheck |
| more than half of the stage's voters signed one value | decides to ban each peer that signed another (`decided`) |
| one peer has signed two things that contradict each other | bans it, and tells the case to its stage |
| `committed`: a commit bans a peer | closes the cases about it |
| no value can reach a quorum | reports the case as undecided (always in a stage of two) |

A leader names what it has decided, a voter signs no other ban, and the commit tells all stages. While fewer than half
of the voters are Byzantine no correct peer is banned, and false work that a correct replica has sampled is. A false
recheck bans its own signer by the same count.

A neighbour stage shows what it was sent (`received`) to replicas of the sender's stage. These ask the contributor of
that microbatch for its work (`hear_sent`), and compare the two (`compared`).

Only rechecks of one numerics class count in a case, because other classes round differently.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from swarmnet.audit.case import (
    agreed,
    at_fault,
    ban_of,
    claimed,
    contradict,
    contributors_in,
    index_of,
    is_signed,
    needs_no_recheck,
    recheck,
    refusal,
    results,
    subject_of,
    suspect_of,
    unrelated,
    verifiers,
)
from swarmnet.bounds import MAX_MEMBERS, Recent
from swarmnet.ids import NO_RESTART, Chain, PeerId, Signer
from swarmnet.messages import Ban, Case, Finished, Pledge, Sent, Stamp, WorkRecord, first_of
from swarmnet.pledge import WHOLE, counted_as, made_alike, proves, shares_of
from swarmnet.quorum import quorum
from swarmnet.statement import statement

KEEP_STEPS = 16
"""Versions after which a case is forgotten."""

MAX_OPEN = 64
"""Cases that are open at a time."""

MOST_CASES = 4
"""Cases of one step that one other replica can have opened here at a time."""

AGAIN_S = 5.0
"""An open case is told again this often, because messages are lost."""

_MOST_CHARGES = 2
"""Cases about what one peer sent in a step: one is enough."""

_SPARE_WORDS, _WORDS_OF_AN_INDEX = 32, 2
"""Signed transfers that one peer may report of one step: so many, and so many for each microbatch."""

_MOST_PLEDGES = 4
"""Of one peer for one aggregate: rounds may differ."""

APART = 64
"""Steps between two times that a peer does not show drawn work because it is away or was restarted, at least, if all
contributions are audited. If one of ten is, ten times as many: then ten times as few absences have drawn work."""

KEPT_OUT = 256
"""Steps in which a peer counts as late that has not shown drawn work more often."""

_ONE_ABSENCE, _MOST_ABSENCES = 16, 4
"""Absences within so many steps count as one, if drawn works are not shown; and how many are remembered of a peer."""

_MOST_PEERS = 256
"""Contributors of which the process is remembered."""

SHOWN_TO = 8
"""Replicas of a sender's stage that are shown what it has sent: one correct one is enough."""

TOLERANCE = 0.25
"""How far apart, in lengths of the vector, two classes' activations and gradients may be: far more than rounding in
bf16 makes (`tests/numerics/test_recompute.py`); noise, another sign or another microbatch is 1 and more."""

_SEED = b"swarmnet draw 2\0"
_SECRET = b"swarmnet auditor's secret 1\0"
"""An auditor signs this for itself: no statement that others can have it sign is so short."""


@dataclass(frozen=True, slots=True)
class Check:
    """Work to compute again."""

    case: Case
    """Without its work where that was sampled: the suspect shows it."""
    index: int
    """The microbatch, or WHOLE."""
    rough: bool = False
    """No replica computes in the suspect's numerics class: compare up to rounding."""
    told_by: PeerId | None = None
    """Another replica that has the payload; None: the work was sampled."""


class Host(Protocol):
    """What a replica does for its audits."""

    def check(self, check: Check) -> None:
        """Fetch the payload, compute it again, and report by `Cases.found`, or `weighed` if the check is rough."""

    def ask_work(self, sent: Sent, owner: PeerId) -> None:
        """Ask `owner` for its work on that microbatch, and report by `Cases.compared`."""

    def show(self, sent: Sent) -> None:
        """Tell replicas of the sender's stage (`Cases.shown_to`) what it has sent."""

    def tell(self, case: Case) -> None:
        """Tell the case to all other replicas of my stage."""

    def ban(self, peer: PeerId, case: Case) -> None:
        """The case proves a fault of `peer` by signatures alone."""

    def vouch(self, decided: frozenset[Ban]) -> None:
        """Vote for commits that name any of these bans, and for no others."""

    def suspend(self, peer: PeerId, why: str) -> None:
        """I know that `peer` is at fault, and cannot prove it."""

    def undecided(self, case: Case) -> None:
        """Some peer of this case is at fault, and no quorum can say which."""


@dataclass(slots=True)
class Aggregate:
    """A committed aggregate, and what its contributors pledged. owners: of each index.

    compared: transfers of that step that were compared with work, as statements. charges: cases about transfers, by
    sender.
    """

    stamp: Stamp
    finished: Finished
    shares: bytes
    owners: dict[int, PeerId]
    contributors: frozenset[PeerId]
    pledges: dict[PeerId, tuple[Pledge, ...]] = field(default_factory=dict)
    compared: Recent[bytes, None] = field(default_factory=lambda: Recent(1 << 10))
    charges: Counter[PeerId] = field(default_factory=Counter)


@dataclass(slots=True)
class _Open:
    """A case of my stage. disputed: no quorum can decide it; later rechecks of it still count."""

    case: Case
    told_by: PeerId
    told_at: float = 0.0
    checking: bool = False
    disputed: bool = False


class Cases:
    """The audits and cases of one replica.

    Args:
        microbatches, contributions: shares that are sampled, as in the manifest.
        numerics: the numerics class that a peer claims; "": not known.
        operator: who runs a peer, as far as is known here.
        voters: the recent contributors of a stage, by its commits.
    """

    def __init__(
        self,
        me: PeerId,
        stage: int,
        signer: Signer,
        host: Host,
        *,
        microbatches: float,
        contributions: float,
        numerics: Callable[[PeerId], str],
        operator: Callable[[PeerId], str],
        voters: Callable[[int], Set[PeerId]],
    ) -> None:
        self.me, self.stage, self._signer, self._host = me, stage, signer, host
        self._microbatches, self._contributions = microbatches, contributions
        self._numerics, self._operator, self._voters_of = numerics, operator, voters
        self._secret = signer.sign(_SECRET)  # no other peer can make it, and it is told to none
        self._sums: dict[int, Aggregate] = {}
        self._live: frozenset[PeerId] = frozenset()
        self._restart = NO_RESTART
        self._open: dict[bytes, _Open] = {}  # Invariant: of no step before `_forget`'s oldest one
        self._told_by: Counter[PeerId] = Counter()  # transfers, since the last step
        self._classes: dict[PeerId, tuple[str, int]] = {}  # and the step in which a peer was first seen in it
        self._apart = APART / max(microbatches, contributions, 1e-9)
        self._ended: Recent[tuple[PeerId, int], int] = Recent(_MOST_PEERS)  # (peer, incarnation) -> at which version
        self._unshown: Recent[PeerId, tuple[int, ...]] = Recent(MAX_MEMBERS)  # the last steps whose drawn work was not
        self._decided: set[Ban] = set()  # Invariant: of peers that no commit has banned yet
        self.banned: dict[PeerId, Case | None] = {}
        """Banned peers, each with its case, if that is known here."""

    # ------------------------------------------------------------ sampling

    def applied(
        self, stamp: Stamp, finished: Finished, pledges: Iterable[Pledge], later: Chain, live: Set[PeerId]
    ) -> None:
        """That aggregate is applied. Samples the works of the step before.

        Args:
            stamp: of the applied step.
            pledges: of its contributors; others may follow by `add_commitment`.
            later: the chain of the version that the step has made.
            live: replicas of my stage that may audit.
        """
        self._told_by.clear()
        if stamp.restart != self._restart:
            # The run went back: commitments to steps that were rolled back bind no peer.
            self._restart = stamp.restart
            self._sums.clear()
            self._open.clear()
            self._unshown.clear()
            self._ended.clear()
            # The state that the run goes back to does not know of these bans.
            self._decided = {Ban(peer, -1, bytes(32)) for peer in (*self.banned, *(ban.peer for ban in self._decided))}
            self._host.vouch(frozenset(self._decided))
        owners = {index: peer for peer, _, indexes in finished.contributions for index in indexes}
        shares = shares_of(finished.contributions, finished.discarded)
        self._sums[stamp.step] = Aggregate(stamp, finished, shares, owners, frozenset(owners.values()))
        for pledge in pledges:
            self.add_commitment(pledge)
        self._forget(stamp.step + 1 - KEEP_STEPS)
        self._live = frozenset(live)
        for peer in self._live:
            if self._classes.get(peer, ("", 0))[0] != self._numerics(peer):
                self._classes[peer] = self._numerics(peer), stamp.step
        if (before := self._sums.get(stamp.step - 1)) is not None:
            self._sample(before, later)

    def add_commitment(self, pledge: Pledge) -> None:
        """A contributor to an aggregate of my stage has pledged that."""
        if not self._signer.verify(pledge.peer, statement(pledge), pledge.signature):
            return
        known = self.aggregate(pledge.stamp)
        if known is None or pledge.peer not in known.contributors:
            return
        pledges = known.pledges.get(pledge.peer, ())
        if (first := next((each for each in pledges if contradict(each, pledge)), None)) is not None:
            self.hear(Case(first, other=pledge), self.me)
        elif (pledge.digest, pledge.shares) == (known.finished.digest, known.shares) and pledge not in pledges:
            known.pledges[pledge.peer] = (*pledges, pledge)[:_MOST_PLEDGES]

    def _sample(self, known: Aggregate, later: Chain) -> None:
        seed = seed_of(known.stamp.step, self.stage, later, self._secret)
        # A Byzantine peer that leaves others no work would be alone: then replicas that contributed nothing audit.
        able = (self._live | {self.me}) - self.banned.keys()
        if len(known.contributors) > 2:
            able &= known.contributors
        if self.me not in able:
            return
        done = Counter(known.owners.values())
        runs = {peer: self._operator(peer) for peer in able | known.contributors}
        classes = {peer: self._numerics(peer) for peer in able | known.contributors}
        for peer in sorted(known.pledges.keys() - self.banned.keys() - {self.me}):
            # A slow member that checked all that a fast one has computed would hold up the steps of both.
            weights = {other: 1 + done[other] for other in able if other != peer}
            alike = {other: weight for other, weight in weights.items() if classes[other] == classes[peer] != ""}
            # All others check a replica that is alone in its class, as far as rounding allows.
            rough = not alike
            if rough:
                part = part_of(self.me, weights, frozenset())
            elif self.me in alike:
                part = part_of(self.me, alike, {other for other in alike if runs[other] == runs[peer]})
            else:
                continue
            works = [(index, self._microbatches) for index, owner in known.owners.items() if owner == peer]
            for index, rate in works if rough else [(WHOLE, self._contributions), *works]:
                if is_drawn(seed, peer, index, own_rate(rate, part)):
                    self._host.check(Check(Case(known.pledges[peer][0]), index, rough=rough))

    # ------------------------------------------------------------ transfers between stages

    def received(self, step: int, sents: Iterable[Sent], later: Chain) -> None:
        """My work of that step, two versions ago, was made of these transfers: samples some. later: as of `applied`."""
        for sent in sents:
            if sent.peer != self.me and sent.peer not in self.banned:
                seed = seed_of(step, sent.stamp.stage, later, self._secret)
                if is_drawn(seed, sent.peer, sent.index, self._microbatches):
                    self._host.show(sent)

    def shown_to(self, sent: Sent, others: Iterable[PeerId]) -> list[PeerId]:
        """Replicas of the sender's stage that get it as a proof; unpredictable, so the sender cannot choose allies."""

        def rank(peer: PeerId) -> bytes:
            return hashlib.sha256(self._secret + sent.signature + peer.encode()).digest()

        return sorted({*others} - {sent.peer, self.me}, key=rank)[:SHOWN_TO]

    def hear_sent(self, sent: Sent, teller: PeerId) -> None:
        """A neighbour stage has received that from a replica of my stage, as `teller` says."""
        known, transfer = self.aggregate(sent.stamp), statement(sent)
        owner = known.owners.get(sent.index) if known is not None else None
        if known is None or owner is None or owner not in known.pledges or sent.stamp.stage != self.stage:
            return
        # Identities cost nothing.
        others = (self._live | known.contributors) - self.banned.keys() - {self.me}
        if sent.peer not in others or transfer in known.compared:
            return
        # Each costs a signature and a call: a contributor of a whole step has no more to tell.
        self._told_by[teller] += teller != self.me
        if self._told_by[teller] > _SPARE_WORDS + _WORDS_OF_AN_INDEX * len(known.owners):
            return
        if self._signer.verify(sent.peer, transfer, sent.signature):
            known.compared[transfer] = None
            self._host.ask_work(sent, owner)

    def compared(self, sent: Sent, work: WorkRecord, path: bytes) -> bool:
        """The contributor shows that work. False: it is not the work that it pledged."""
        known = self.aggregate(sent.stamp)
        if known is None or sent.index not in known.owners or work.index != sent.index:
            return False
        pledges = known.pledges.get(known.owners[sent.index], ())
        pledge = next((pledge for pledge in pledges if proves(path, work, pledge.work_root)), None)
        if pledge is None:
            return False
        if counted_as(work, sent.kind) == sent.digest:
            return True
        case = Case(pledge, work, path, sent)
        if needs_no_recheck(case):
            self.hear(case, self.me)
            return True
        # If it was made of something else, those that signed that are checked instead. Before the sender was of my
        # class, other bits were right.
        _, since = self._classes.get(sent.peer, ("", sent.stamp.step))
        if not made_alike(sent, work) or not self._same_class(self.me, sent.peer) or since >= sent.stamp.step:
            return True
        if known.charges[sent.peer] < _MOST_CHARGES:
            known.charges[sent.peer] += 1
            self._host.check(Check(case, work.index))
            if pledge.peer not in (sent.peer, self.me):
                self._host.check(Check(Case(pledge, work, path), work.index))
        return True

    # ------------------------------------------------------------ cases

    def found(self, case: Case, value: bytes, *, now: float) -> None:
        """I have computed the work of that case again, and found that value (`audit.case.claimed`)."""
        suspect = suspect_of(case)
        if not self._is_pledged(case.pledge) or not self._same_class(self.me, suspect):
            return
        case, right = replace(case, numerics=self._numerics(self.me), rechecks=()), value == claimed(case)
        opened = self._open.get(subject_of(case))
        if not right and len(verifiers(case, self.voters)) < 3:
            self._host.suspend(suspect, "its work computed again is another")
        if self.me not in self.voters or (right and opened is None):
            return
        if opened is None:
            opened = self._open[subject_of(case)] = _Open(case, self.me)
        if self.me not in results(opened.case):
            mine = recheck(case, value, self._signer, self.me)
            opened.case = replace(opened.case, rechecks=(*opened.case.rechecks, mine))
            opened.told_at = now
            self._host.tell(opened.case)
            self._settle(opened)

    def weighed(self, suspect: PeerId, off: float) -> None:
        """The work of `suspect` is that far from what I made of the same (`pipeline.works.off_by`)."""
        if not off <= TOLERANCE:
            self._host.suspend(suspect, f"is off by {off:.2g} of what others make of the same, more than rounding")

    def hear(self, case: Case, teller: PeerId) -> None:
        """A peer tells a case of my stage: two signatures of one peer decide it here, else it is to be rechecked.

        Identities cost nothing, and cases neither: the suspect and the teller must be voters, or myself.
        """
        suspect, known = suspect_of(case), self.voters | {self.me}
        if case.pledge.stamp.stage != self.stage or suspect in self.banned:
            return
        if not needs_no_recheck(case):
            if teller in known:
                self._join(case, teller)
        elif suspect in known and not refusal(case, frozenset(), self._signer.verify):
            self._ban([suspect], case)

    def learn(self, case: Case) -> None:
        """This peer has accepted that proof in an earlier process."""
        contributors = contributors_in(case)
        if not refusal(case, contributors, self._signer.verify):
            self._ban(sorted(at_fault(case, contributors)), case)

    def committed(self, ban: Ban) -> Case | None:
        """The stage has committed that ban. Returns the case, if it is known here."""
        opened = self._open.get(ban.case)
        self.banned.setdefault(ban.peer, opened.case if opened is not None else None)
        self._decided = {each for each in self._decided if each.peer != ban.peer}
        return self.banned[ban.peer]

    def _join(self, case: Case, teller: PeerId) -> None:
        """Take in the rechecks of a case; one that is new here is computed again, if I can.

        Replicas that cannot, as those of another class, also must know which bans are decided: see `Election`.
        """
        self.add_commitment(case.pledge)
        opened, voters = self._open.get(subject_of(case)), self.voters
        has = results(opened.case) if opened is not None else {suspect_of(case): claimed(case)}
        news = [each for each in case.rechecks if each.peer in voters - has.keys() - {self.me}]
        if not news or not all(is_signed(each, case, self._signer.verify) for each in news):
            return
        if opened is None:
            # A case in which no recheck differs could ban no peer, so it would cost its teller nothing.
            decides = agreed(replace(case, rechecks=tuple(news)), voters) is not None
            if all(each.found == claimed(case) for each in news) or not (decides or self._may_open(case, teller)):
                return
            opened = self._open[subject_of(case)] = _Open(replace(case, rechecks=()), teller)
        opened.case = replace(opened.case, rechecks=(*opened.case.rechecks, *news))
        # Other classes find other bits.
        alike = case.numerics == self._numerics(self.me) and self._same_class(self.me, suspect_of(case))
        if alike and self._is_pledged(case.pledge) and not opened.checking and self.me in voters - has.keys():
            opened.checking = True
            self._host.check(Check(opened.case, index_of(case), told_by=teller))
        self._settle(opened)

    def _is_pledged(self, pledge: Pledge) -> bool:
        """Is it a contributor's to an aggregate that I applied?"""
        known = self.aggregate(pledge.stamp)
        return known is not None and pledge in known.pledges.get(pledge.peer, ())

    def _may_open(self, case: Case, teller: PeerId) -> bool:
        if not self._is_pledged(case.pledge) or unrelated(case, self._signer.verify):
            return False
        stamps = [opened.case.pledge.stamp for opened in self.open_cases if opened.told_by == teller]
        return len(self.open_cases) < MAX_OPEN and stamps.count(case.pledge.stamp) < MOST_CASES

    def tick(self, now: float) -> None:
        """Tell open cases again: a replica may not have received them."""
        for opened in self.open_cases:
            if self.me in results(opened.case) and now - opened.told_at >= AGAIN_S:
                opened.told_at = now
                self._host.tell(opened.case)

    @property
    def open_cases(self) -> list[_Open]:
        """Cases that are not decided yet."""
        return [opened for opened in self._open.values() if not self._is_closed(opened)]

    def _is_closed(self, opened: _Open) -> bool:
        """Is it disputed, or about banned peers alone?"""
        own, rechecks = claimed(opened.case), opened.case.rechecks
        differ = any(each.found != own and each.peer not in self.banned for each in rechecks)
        return opened.disputed or suspect_of(opened.case) in self.banned or not differ

    def unshown(self, peer: PeerId, step: int) -> None:
        """The peer has not shown drawn work of that step: it is away, or the process that made it has ended."""
        known = self._unshown.get(peer, ())
        if all(abs(step - other) >= _ONE_ABSENCE for other in known):
            self._unshown[peer] = tuple(sorted((*known, step))[-_MOST_ABSENCES:])

    def away_often(self, version: int) -> list[PeerId]:
        """The peers that are away or restarted so often that too much of their drawn work is never shown."""
        return sorted(
            peer
            for peer, steps in self._unshown.items()
            if any(b - a < self._apart and version < b + KEPT_OUT for a, b in pairwise(steps))
        )

    def is_excused(self, peer: PeerId, incarnation: int, step: int, version: int) -> bool:
        """May `peer` not show its work of `step`? It says that the process that contributed has ended.

        version: mine now. A process that has ended contributes to no later step.
        """
        self.unshown(peer, step)
        return step <= self._ended.setdefault((peer, incarnation), version)

    # ------------------------------------------------------------ inside

    def aggregate(self, stamp: Stamp) -> Aggregate | None:
        """The aggregate with that header, if I applied it lately."""
        known = self._sums.get(stamp.step)
        return known if known is not None and known.stamp == stamp else None

    def _same_class(self, one: PeerId, other: PeerId) -> bool:
        return self._numerics(one) == self._numerics(other) != ""

    @property
    def voters(self) -> frozenset[PeerId]:
        """The peers that decide by their rechecks."""
        # Also voters that are away: else the replicas that are left when one is killed would be a quorum.
        return first_of(self._voters_of(self.stage) - self.banned.keys())

    def _settle(self, opened: _Open) -> None:
        """News of a case: is it decided, or can it be decided no more?"""
        case, judges = opened.case, verifiers(opened.case, self.voters)
        values = results(case)
        most = max([values[peer] for peer in judges & values.keys()].count(value) for value in values.values())
        if not self._is_closed(opened) and most + len(judges - values.keys()) < quorum(judges):
            opened.disputed = True
            self._host.undecided(case)
        self._decide(case, at_fault(case, self.voters) - self.banned.keys())

    def _decide(self, case: Case, peers: Iterable[PeerId]) -> None:
        self._decided |= {ban_of(case, peer, self._restart) for peer in peers}
        self._host.vouch(frozenset(self._decided))

    def to_name(self) -> tuple[Ban, ...]:
        """The bans that a commit of my stage should name: of several aggregates with a peer's false work the first."""
        first = sorted(self._decided, key=lambda ban: (ban.step < 0, ban.step, ban.case), reverse=True)
        return tuple(sorted({ban.peer: ban for ban in first}.values(), key=lambda ban: ban.peer))

    def _ban(self, peers: Iterable[PeerId], case: Case) -> None:
        new = [peer for peer in peers if peer not in self.banned]
        self.banned |= dict.fromkeys(new, case)
        self._decide(case, new)
        for peer in new:
            self._host.ban(peer, case)

    def _forget(self, oldest: int) -> None:
        """Drop what is older. An open case that is dropped is undecided."""
        for step in [step for step in self._sums if step < oldest]:
            del self._sums[step]
        for subject in [subject for subject, opened in self._open.items() if opened.case.pledge.stamp.step < oldest]:
            opened = self._open.pop(subject)
            if not self._is_closed(opened):
                self._host.undecided(opened.case)


# ---------------------------------------------------------------- which works are sampled
#
# Each member draws for itself, from the stage's chain two versions later and a secret of its own. The chain hashes the
# aggregates of the audited step and of the one after it, so no peer that can still change its commitment knows the
# draw, and no other peer knows it before the auditor asks.


def seed_of(step: int, stage: int, later: Chain, secret: bytes) -> bytes:
    """The seed of one member's draws among the works of a step. later: the stage's chain at version step + 2."""
    return hashlib.sha256(_SEED + struct.pack("<qq", step, stage) + later.encode() + secret).digest()


def part_of(me: PeerId, weights: Mapping[PeerId, int], kin: Set[PeerId]) -> float:
    """This member's part of the rechecks of one member's works. The parts of the members with other operators add up to
    1: members of the same operator may cover for it.

    All other members count the same, as if each had its own operator. A peer chooses its address and what it announces
    of it to whom, and so could choose which peers do not recheck it: whatever this member accepts, its part is never
    smaller than that. Nor is it more than twice that, lest one independent peer recheck all work of a large operator;
    twice is enough if others do half of the work.

    Args:
        weights: what each member that may recheck has computed, without the audited member: a member that computes a
        tenth
            of another's work rechecks a tenth of what the other does.
        kin: the members of the same operator.
    """
    usual = weights[me] / sum(weights.values())
    if me in kin:
        return usual
    return min(weights[me] / sum(weight for peer, weight in weights.items() if peer not in kin), 2 * usual)


def own_rate(rate: float, part: float) -> float:
    """The share that one member draws, so that the members with a total part of 1 together draw the share `rate`."""
    unseen: float = (1.0 - rate) ** part
    return 1.0 - unseen


def is_drawn(seed: bytes, peer: PeerId, index: int, rate: float) -> bool:
    """Is that work of that peer looked at again? index: -1 of its whole contribution."""
    return _number(seed, struct.pack("<q", index) + peer.encode()) < rate


def _number(seed: bytes, about: bytes) -> float:
    """In [0, 1)."""
    return int.from_bytes(hashlib.sha256(seed + about).digest()[:6]) / 2.0**48
