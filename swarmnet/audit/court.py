"""Who did wrong: one replica's part in finding it out. Events and `now` in, actions out; pure.

    drawn        I have drawn a work of the step before last: compute it again                             (`applied`)
    accused      what I find is not what was pledged: my signed finding goes to all mates                  (`found`)
    tried        who hears an accusation computes the case again, and says what it finds                   (`hear`)
    settled      more than half of the jury says one value: who said another is convicted, with the proof
    disputed     no value can get so many voices any more (in a stage of two, always)

The jury is those contributors to the sum whose votes make its commit, and the accused, which speaks by its pledge.
Those who agree must be half of whoever has contributed lately, too; where so few contribute that they could not be, all
of those find out, and speak beside the jury.
While less than half of it lies, no honest peer is convicted: a value that more than half of it says, an honest one
says. And then a false work that an honest auditor has looked at is settled. A false accusation convicts its accuser
by the same count, so each trial costs somebody its place.

What a neighbour stage was sent, whoever has received it shows to the sender's mates (`received`). They ask whoever has
counted that microbatch for its work (`hear_sent`), and hold the two against each other (`compared`). If the sender has
counted it itself, its two signatures convict it. If another has, and of the same input made something else, one of them
lies: both are cases, and the sender is tried by what it has signed.

Only findings of my own numerics class count here: another class rounds otherwise. It is part of what is signed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from swarmnet.audit.draw import is_drawn, own_rate, part_of, seed_of
from swarmnet.audit.pledge import (
    WHOLE,
    case_of,
    counted_as,
    finding_statement,
    jury_of,
    made_alike,
    proves,
    said,
    settled,
    shares_of,
)
from swarmnet.audit.proof import Proof, accused_of, contradict, odd, pledge_of, refusal, says_of
from swarmnet.bounds import Recent
from swarmnet.ids import Chain, PeerId, Signer
from swarmnet.messages import (
    MAX_COUNTING,
    Case,
    Finding,
    Finished,
    Missent,
    Pair,
    Pledge,
    Sent,
    Stamp,
    Verdict,
    WorkRecord,
    contributors_of,
    first_of,
)
from swarmnet.quorum import quorum
from swarmnet.statement import statement

KEEP_STEPS = 16
"""Versions after which a case is forgotten."""

MAX_OPEN = 64
"""Cases that are open at a time."""

MOST_CASES = 4
"""Cases of one accuser in a step that are open at a time, and as many in which it found just what was pledged."""

AGAIN_S = 5.0
"""As long as a case is open, what I found is said again this often: messages are lost."""

_ENOUGH_SUMS = 4
"""Whoever joins has seen so many before it convicts by what others say."""

_MOST_CHARGES = 2
"""Cases of what one peer has sent in a step: one is enough."""

_SPARE_WORDS, _WORDS_OF_AN_INDEX = 32, 2
"""Signed transfers that one peer may report of one step: so many, and so many for each microbatch."""

_MOST_PLEDGES = 4
"""Of one peer for one sum: rounds may differ."""

SHOWN_TO = 8
"""Mates of a sender that are shown what it has sent: one honest one is enough."""

TOLERANCE = 0.25
"""How far apart, in lengths of the vector, two classes' activations and gradients may be: far more than rounding in
bf16 makes (`tests/numerics/test_recompute.py`); noise, another sign or another microbatch is 1 and more."""

_SECRET = b"swarmnet auditor's secret 1\0"
"""What an auditor signs for itself: no statement that others can have it sign is so short."""


# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Recompute:
    """Fetch what went into the case, ask `Court.served` whether it is worth it, compute it, say `Court.found`."""

    case: Case
    pledge: Pledge
    accuser: PeerId | None
    """Who has it, too; None: it was drawn."""
    sent: Sent | None = None
    """What its peer has sent is tried, made of the same as the work of the pledge."""


@dataclass(frozen=True, slots=True)
class Weigh:
    """Nobody of its class looks at that microbatch: compute it again, see whether only rounding is between what its
    peer shows and that, and say `Court.weighed`."""

    case: Case
    pledge: Pledge


@dataclass(frozen=True, slots=True)
class SayFinding:
    """Tell all replicas of my stage: what I found, or who else accused; and before it, what was sent."""

    finding: Finding
    sent: Sent | None = None


@dataclass(frozen=True, slots=True)
class Convict:
    """That peer has done wrong: it counts no more. Tell everybody the proof."""

    peer: PeerId
    proof: Proof
    reason: str


@dataclass(frozen=True, slots=True)
class ShowSent:
    """Tell some of its peer's mates (`Court.shown_to`): they know what it has pledged."""

    sent: Sent


@dataclass(frozen=True, slots=True)
class AskWork:
    """Ask whoever has counted that microbatch, the case's accused, for its work, and say `Court.compared`."""

    sent: Sent
    case: Case


@dataclass(frozen=True, slots=True)
class TellVerdict:
    """That mate has not heard how a case ended."""

    peer: PeerId
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class StrikePeer:
    """I have seen for myself that it does wrong; of this nobody else need believe me."""

    peer: PeerId
    case: Case
    why: str


@dataclass(frozen=True, slots=True)
class Dispute:
    """Somebody lies, and nobody can be named: for the log and status."""

    case: Case
    says: dict[PeerId, bytes]
    """What each said; the accused by its pledge."""


CourtAction = Recompute | Weigh | SayFinding | ShowSent | AskWork | Convict | TellVerdict | StrikePeer | Dispute


# ---------------------------------------------------------------- the court


@dataclass(slots=True)
class CountedSum:
    """A step's committed sum, and what its contributors pledged."""

    stamp: Stamp
    digest: bytes
    shares: bytes
    owners: dict[int, PeerId]
    contributors: frozenset[PeerId]
    pledges: dict[PeerId, list[Pledge]] = field(default_factory=dict)


@dataclass(slots=True)
class Trial:
    """An open case, or one that has ended: late findings in it may convict others."""

    pledge: Pledge
    accuser: PeerId | None
    sent: Sent | None = None
    work: WorkRecord | None = None
    path: bytes = b""
    served: bool = False
    findings: dict[PeerId, Finding] = field(default_factory=dict)
    ended: str = ""
    """"named", "disputed", or "idle": whoever spoke found what was pledged."""
    verdict: Verdict | None = None
    said_at: float = 0.0


class Court:
    """What one replica knows of cases of its stage.

    Args:
        microbatches, contributions: shares that are drawn, as in the manifest.
        numerics: a peer's numerics class, as it says; "": not known.
        operator: who runs a peer, as it looks from here.
    """

    def __init__(
        self,
        me: PeerId,
        stage: int,
        signer: Signer,
        *,
        microbatches: float,
        contributions: float,
        numerics: Callable[[PeerId], str],
        operator: Callable[[PeerId], str],
    ) -> None:
        self.me, self.stage, self._signer = me, stage, signer
        self._microbatches, self._contributions = microbatches, contributions
        self._numerics, self._operator = numerics, operator
        self._secret = signer.sign(_SECRET)  # nobody else can make it, and it is told to nobody
        self._sums: dict[int, CountedSum] = {}
        self._live: frozenset[PeerId] = frozenset()
        self._seen: list[int] = []  # steps of the first sums that I have seen, in all
        # Invariant: these and what follows hold nothing of a step before `_forget`'s oldest one.
        self._pledged: Recent[tuple[PeerId, Stamp, object, bytes], Pledge] = Recent(1 << 12)
        self._trials: dict[tuple[Case, bytes], Trial] = {}
        self._told_by: Counter[PeerId] = Counter()  # of what was sent, since the last step
        self._compared: Recent[bytes, int] = Recent(1 << 10)  # by what a peer has signed of what it sent, the step
        self._charges: Counter[tuple[PeerId, int]] = Counter()  # cases of what a peer has sent, by step
        self._classes: dict[PeerId, str] = {}
        self._changed: dict[PeerId, int] = {}  # the step in which a peer was first seen in its class
        self.proofs: dict[PeerId, Proof] = {}
        """Of each who is convicted."""

    # ------------------------------------------------------------ steps

    def applied(
        self, stamp: Stamp, finished: Finished, pledges: Iterable[Pledge], later: Chain, live: Set[PeerId]
    ) -> list[CourtAction]:
        """That sum is applied. Draws among the works of the step before.

        Args:
            stamp: of the applied step.
            pledges: of its contributors; others may follow by `hear_pledge`.
            later: the chain of the version that the step has made.
            live: replicas of my stage that may audit.
        """
        self._told_by.clear()
        if len(self._seen) < _ENOUGH_SUMS:
            self._seen.append(stamp.step)
        if any(known.stamp.restart != stamp.restart for known in self._sums.values()):
            # The run went back: what was pledged for given-up steps binds nobody.
            self._sums.clear()
            self._trials.clear()
        owners = {index: peer for peer, _, indexes in finished.contributions for index in indexes}
        shares = shares_of(finished.contributions, finished.voided)
        contributors = contributors_of(finished)
        self._sums[stamp.step] = CountedSum(stamp, finished.digest, shares, owners, contributors)
        actions = [action for pledge in pledges for action in self.hear_pledge(pledge)]
        actions += self._forget(stamp.step + 1 - KEEP_STEPS)
        self._live = frozenset(live)
        for peer in self._live:
            now = self._numerics(peer)
            if self._classes.get(peer) != now:
                self._classes[peer], self._changed[peer] = now, stamp.step
        before = self._sums.get(stamp.step - 1)
        return actions if before is None else actions + self._draw(before, later, live)

    def hear_pledge(self, pledge: Pledge) -> list[CourtAction]:
        """A contributor to a sum of my stage has pledged that."""
        if not self._signer.verify(pledge.peer, statement(pledge), pledge.signature):
            return []
        of = pledge.peer, pledge.stamp, pledge.id, pledge.digest
        first = self._pledged.get(of)
        if first is None:
            first = self._pledged[of] = pledge
        if contradict(first, pledge):
            return self._convict([pledge.peer], Pair(first, pledge))
        counted = self._counted(pledge.stamp)
        if counted is not None and (pledge.digest, pledge.shares) == (counted.digest, counted.shares):
            known = counted.pledges.setdefault(pledge.peer, [])
            if pledge.peer in counted.contributors and pledge not in known and len(known) < _MOST_PLEDGES:
                known.append(pledge)
        return []

    def _draw(self, counted: CountedSum, later: Chain, live: Set[PeerId]) -> list[CourtAction]:
        seed = seed_of(counted.stamp.step, self.stage, later, self._secret)
        # A liar that leaves others nothing to do would be alone: then those who have contributed nothing look, too.
        able = (live | {self.me}) - self.convicted
        if _can_name(counted):
            able &= counted.contributors
        if self.me not in able:
            return []
        works = [(peer, index, self._microbatches) for index, peer in counted.owners.items()]
        works += [(peer, WHOLE, self._contributions) for peer in counted.contributors]
        shares = Counter(counted.owners.values())
        # A slow member that looked at all that a fast one has done would hold up the steps of both.
        mates = {peer: 1 + shares[peer] for peer in able if self._alike(peer, self.me)}
        runs = {peer: self._operator(peer) for peer in mates.keys() | counted.contributors}
        parts = {
            peer: part_of(
                self.me,
                {mate: weight for mate, weight in mates.items() if mate != peer},
                {mate for mate in mates if runs[mate] == runs[peer]},
            )
            for peer in counted.contributors - {self.me}
            if self._alike(self.me, peer)
        }
        drawn: list[CourtAction] = [
            Recompute(Case(counted.stamp, peer, index), counted.pledges[peer][0], None)
            for peer, index, rate in sorted(works, key=lambda of: (of[1], of[0]))
            if peer in counted.pledges and peer in parts and peer not in self.convicted
            if is_drawn(seed, peer, index, own_rate(rate, parts[peer]))
        ]
        # Whoever is alone in its class is looked at by all others, as far as rounding lets them see.
        alone = {peer for peer in counted.pledges.keys() - parts.keys() - {self.me} if not self._has_like(peer, able)}
        for index, peer in sorted(counted.owners.items()):
            if peer in alone - self.convicted:
                part = (1 + shares[self.me]) / sum(1 + shares[other] for other in able - {peer})
                if is_drawn(seed, peer, index, own_rate(self._microbatches, part)):
                    drawn.append(Weigh(Case(counted.stamp, peer, index), counted.pledges[peer][0]))
        return drawn

    def _has_like(self, peer: PeerId, able: Set[PeerId]) -> bool:
        """Can anybody else compute what that peer does, to the bit?"""
        return any(self._alike(other, peer) for other in able - {peer})

    # ------------------------------------------------------------ what was sent

    def received(self, step: int, sents: Iterable[Sent], later: Chain) -> list[CourtAction]:
        """What I counted in that step, two versions ago, was made of what these peers have sent: draws some.

        later: as of `applied`.
        """
        return [
            ShowSent(sent)
            for sent in sents
            if sent.peer != self.me and sent.peer not in self.convicted
            if is_drawn(seed_of(step, sent.stamp.stage, later, self._secret), sent.peer, sent.index, self._microbatches)
        ]

    def shown_to(self, sent: Sent, mates: Iterable[PeerId]) -> list[PeerId]:
        """Those of its peer's mates that I show it to; whoever could foresee that would choose its friends."""

        def place(mate: PeerId) -> bytes:
            return hashlib.sha256(self._secret + sent.signature + mate.encode()).digest()

        return sorted({*mates} - {sent.peer, self.me}, key=place)[:SHOWN_TO]

    def hear_sent(self, sent: Sent, teller: PeerId) -> list[CourtAction]:
        """A neighbour stage has received that from a mate of mine, as `teller` says."""
        counted, word = self._counted(sent.stamp), statement(sent)
        owner = counted.owners.get(sent.index) if counted is not None else None
        if counted is None or owner is None or owner not in counted.pledges:
            return []
        known = sent.peer == self.me or sent.peer in self.convicted or word in self._compared
        # Names cost nothing.
        known |= sent.peer not in self._live | counted.contributors | self._recent()
        if known or sent.stamp.stage != self.stage:
            return []
        # Each costs a signature, and a call: who has counted a whole step has no more to tell.
        self._told_by[teller] += teller != self.me
        if self._told_by[teller] > _SPARE_WORDS + _WORDS_OF_AN_INDEX * len(counted.owners):
            return []
        if not self._signer.verify(sent.peer, word, sent.signature):
            return []
        self._compared[word] = sent.stamp.step
        return [AskWork(sent, Case(counted.stamp, owner, sent.index))]

    def compared(self, sent: Sent, work: WorkRecord, path: bytes) -> list[CourtAction] | None:
        """That is the work of who has counted it, as that peer shows it. None: it is not the one that was pledged."""
        counted = self._counted(sent.stamp)
        owner = counted.owners.get(sent.index) if counted is not None else None
        pledges = counted.pledges.get(owner, ()) if counted is not None and owner is not None else ()
        pledge = next((pledge for pledge in pledges if proves(path, work, pledge.work_root)), None)
        if pledge is None or work.index != sent.index:
            return None
        if counted_as(work, sent.kind) == sent.digest:
            return []
        # An honest peer may have sent something else: its state was replaced, or the stage before it was of two minds.
        if pledge.peer == sent.peer and not sent.again and not work.resent:
            return self.hear_proof(Missent(pledge, work, path, sent))
        # If it was made of something else, that is what those lied about who have signed it. Before its peer was of my
        # class, others bits were right.
        of = sent.peer, sent.stamp.step
        if (
            not made_alike(sent, work)
            or not self._alike(self.me, sent.peer)
            or self._changed.get(of[0], of[1]) >= of[1]
        ):
            return []
        if self._charges[of] >= _MOST_CHARGES:
            return []
        self._charges[of] += 1
        return [
            Recompute(case_of(pledge, work, sent), pledge, None, sent),
            *([Recompute(case_of(pledge, work), pledge, None)] if pledge.peer not in (sent.peer, self.me) else []),
        ]

    # ------------------------------------------------------------ cases

    def served(self, pledge: Pledge, work: WorkRecord | None, path: bytes, sent: Sent | None = None) -> bool:
        """That is the work as it was handed out (None: of the whole contribution); is it worth computing?

        False: it is not the one that was pledged, or who accused has found just what was pledged.
        """
        if work is not None and not proves(path, work, pledge.work_root):
            return False
        trial = self._trials.get(_key(pledge, work, sent))
        if trial is None:
            return True
        trial.work, trial.path, trial.served = work, path, True
        # Somebody was faster.
        if trial.ended == "named":
            return False
        # Nobody says otherwise, so nobody would be odd: a trial that costs its accuser nothing costs us no compute.
        if accusers := self._accusers(trial):
            trial.accuser = accusers[0]
        else:
            trial.ended = "idle"
        return bool(accusers)

    def withheld(self, case: Case) -> list[CourtAction]:
        """The accused answers, and does not hand that work out, or another one than it pledged."""
        return [StrikePeer(case.accused, case, "does not show work that it pledged")]

    def weighed(self, case: Case, off: float) -> list[CourtAction]:
        """Its peer's work is that far from what I made of the same (`pipeline.works.off_by`)."""
        why = f"is off by {off:.2g} of what others make of the same, more than rounding"
        return [StrikePeer(case.accused, case, why)] if not off <= TOLERANCE else []

    def found(
        self,
        pledge: Pledge,
        found: bytes,
        work: WorkRecord | None = None,
        path: bytes = b"",
        sent: Sent | None = None,
        *,
        now: float,
    ) -> list[CourtAction]:
        """I have computed a case again.

        Args:
            found: as it should be: `pledge.leaf` of the work, `pledge.whole_of` of the contribution, or the digest of
                what was sent.
            work, path: as it was pledged; None: a whole contribution.
        """
        case, counted = case_of(pledge, work, sent), self._counted(pledge.stamp)
        known = () if counted is None else counted.pledges.get(pledge.peer, ())
        if counted is None or pledge not in known or not self._alike(self.me, case.accused):
            return []
        trial, right = self._trials.get(_key(pledge, work, sent)), found == said(pledge, work, sent)
        # Too few have a say to name anybody, and I know all the same.
        private: list[CourtAction] = []
        if not right and not _can_name(counted):
            private.append(StrikePeer(case.accused, case, "its work computed again is another"))
        if not self._has_a_say(self.me, counted):
            return private
        if trial is None:
            if right:
                return []
            # While mates are busy with another case of mine they do not hear of this one: `tick` says it again.
            trial = self._trials[_key(pledge, work, sent)] = Trial(pledge, self.me, sent)
        if self.me in trial.findings:
            return []
        trial.work, trial.path, trial.served, trial.said_at = work, path, True, now
        mine = Finding(case, found, self.me)
        signature = self._signer.sign(finding_statement(mine, pledge, self._numerics(self.me), sent))
        trial.findings[self.me] = replace(mine, signature=signature)
        return [*self._say(trial), *self._settle(trial, counted), *private]

    def hear(self, finding: Finding) -> list[CourtAction]:
        """A mate says what it has found: the first in a case accuses."""
        case, peer = finding.case, finding.peer
        counted = self._counted(case.stamp)
        if counted is None or peer in (case.accused, self.me) or not self._has_a_say(peer, counted):
            return []
        # I am no judge of myself: I hear how it ends.
        if case.accused == self.me:
            return []
        # What was sent, those tell who have found it false; then I have looked at it myself.
        trial = self._sent_trial(finding)
        pledge = self._meant(finding, counted) if trial is None else trial.pledge
        if pledge is None:
            return []
        trial = trial or self._trials.get((case, statement(pledge)))
        news = trial is None
        if trial is None:
            harmless = case.index == WHOLE and finding.found == said(pledge, None)
            proof = self.proofs.get(case.accused)
            # It would not say so if it knew.
            if isinstance(proof, Verdict) and peer not in self.convicted:
                return [TellVerdict(peer, proof)]
            if harmless or peer in self.convicted or proof is not None:
                return []
            trial = self._open(pledge, (case, statement(pledge)), peer)
        if trial is None:
            return []
        if peer in trial.findings:
            # It would not say so again if it knew.
            return [] if trial.verdict is None else [TellVerdict(peer, trial.verdict)]
        trial.findings[peer] = finding
        trial.served |= case.index == WHOLE
        if trial.ended == "idle" and finding.found != said(pledge, trial.work, trial.sent):
            trial.ended, trial.accuser, news = "", peer, True
        # Another class finds other bits.
        judges = news and self._has_a_say(self.me, counted) and self._alike(self.me, case.accused)
        asked: list[CourtAction] = [Recompute(case, pledge, peer, trial.sent)] if judges else []
        return [*asked, *self._settle(trial, counted)]

    def hear_verdict(
        self, verdict: Verdict, contributors: Set[PeerId], members: Set[PeerId] = frozenset(), *, kept: bool = False
    ) -> list[CourtAction]:
        """Somebody has proof against a peer of any stage.

        Args:
            contributors: whom the commit of that stage and step names; () where I know none: then it is ignored.
            members: who has contributed to that stage's sums lately; those whom I hear, if I know of nobody.
            kept: I have believed it in an earlier life.
        """
        known = members | (self._lately() if verdict.pledge.stamp.stage == self.stage else frozenset())
        says = says_of(verdict)
        truth = settled(says, jury_of(contributors, accused_of(verdict)))
        if truth is None or (self.is_new and not kept) or not self._enough(truth, says, contributors, known):
            return []
        trial = self._trials.get(_key(verdict.pledge, verdict.work, verdict.sent))
        news = bool(odd(verdict, contributors) - self.convicted) or (trial is not None and not trial.ended)
        # Signatures cost time, and endings there is nothing to learn.
        if not contributors or not news or refusal(verdict, contributors, self._signer.verify):
            return []
        if trial is not None:
            trial.ended, trial.verdict = "named", verdict
        return self._convict(sorted(odd(verdict, contributors)), verdict, contributors)

    def hear_proof(self, proof: Pair | Missent) -> list[CourtAction]:
        """Somebody shows two things that one peer of any stage has signed, and that contradict each other."""
        peer = accused_of(proof)
        if peer in self.convicted or refusal(proof, frozenset(), self._signer.verify):
            return []
        return self._convict([peer], proof)

    def tick(self, now: float) -> list[CourtAction]:
        """Say again what I found, where it may not have been heard."""
        actions: list[CourtAction] = []
        for trial in self._trials.values():
            if not trial.ended and self.me in trial.findings and now - trial.said_at >= AGAIN_S:
                trial.said_at = now
                actions += self._say(trial)
        return actions

    @property
    def convicted(self) -> Set[PeerId]:
        """Who has done wrong."""
        return self.proofs.keys()

    @property
    def open_cases(self) -> int:
        """Cases that are not settled yet."""
        return sum(not trial.ended for trial in self._trials.values())

    # ------------------------------------------------------------ inside

    def _counted(self, stamp: Stamp) -> CountedSum | None:
        counted = self._sums.get(stamp.step)
        return counted if counted is not None and counted.stamp == stamp else None

    def _alike(self, one: PeerId, other: PeerId) -> bool:
        return self._numerics(one) == self._numerics(other) != ""

    def _meant(self, finding: Finding, counted: CountedSum) -> Pledge | None:
        """The pledge that its signature is of, in my class."""
        for pledge in counted.pledges.get(finding.case.accused, ()):
            word = finding_statement(finding, pledge, self._numerics(self.me))
            if self._signer.verify(finding.peer, word, finding.signature):
                return pledge
        return None

    def _sent_trial(self, finding: Finding) -> Trial | None:
        """The one about something sent that its signature is of."""
        for (case, _), trial in self._trials.items():
            if case == finding.case and trial.sent is not None:
                word = finding_statement(finding, trial.pledge, self._numerics(self.me), trial.sent)
                if self._signer.verify(finding.peer, word, finding.signature):
                    return trial
        return None

    def _open(self, pledge: Pledge, key: tuple[Case, bytes], accuser: PeerId) -> Trial | None:
        # Who accuses has one case of a step at a time. Where it led to nothing, it has had its chance; what only looked
        # like an accusation cost a fetch. If it tells each mate of another case, the lowest one goes first everywhere.
        its = {of: trial for of, trial in self._trials.items() if trial.accuser == accuser}
        ends = {of: trial.ended for of, trial in its.items() if trial.pledge.stamp == pledge.stamp}
        endings = list(ends.values())
        first = all(_rank(key) < _rank(of) for of, ended in ends.items() if not ended)
        if not first or "disputed" in endings or max(endings.count("idle"), endings.count("")) >= MOST_CASES:
            return None
        if self.open_cases >= MAX_OPEN:
            # One whose work nobody hands out may never be settled.
            unserved = next((of for of, trial in self._trials.items() if not trial.ended and not trial.served), None)
            if unserved is None:
                return None
            del self._trials[unserved]
        trial = self._trials[key] = Trial(pledge, accuser)
        return trial

    def _say(self, trial: Trial) -> list[CourtAction]:
        # Who accuses may have told me alone: all are to judge the same case, and to know who opened it.
        accuser = trial.accuser if trial.accuser in trial.findings else self.me
        said = dict.fromkeys((accuser, self.me))
        return [SayFinding(trial.findings[peer], trial.sent) for peer in said if peer is not None]

    def _accusers(self, trial: Trial) -> list[PeerId]:
        """Who says otherwise than the accused, or may, and still counts."""
        own = said(trial.pledge, trial.work, trial.sent)
        return [
            peer
            for peer, finding in trial.findings.items()
            if peer not in self.convicted and (finding.found != own or not trial.served)
        ]

    def _settle(self, trial: Trial, counted: CountedSum) -> list[CourtAction]:
        # Until the work is here I do not know what the accused says.
        if not trial.served:
            return []
        whole = self._verdict(trial, tuple(trial.findings.values()))
        jury = jury_of(counted.contributors, accused_of(whole))
        says = says_of(whole)
        truth = settled(says, jury)
        if truth is not None and not self.is_new and self._enough(truth, says, counted.contributors, self._lately()):
            wrong = odd(whole, counted.contributors)
            # Enough of those who agree, and room for those who do not.
            agree = [f for f in trial.findings.values() if f.found == truth]
            right = [f for f in agree if f.peer in jury][: quorum(jury)]
            others = [f for f in trial.findings.values() if f.peer in wrong]
            witnesses = [f for f in agree if f not in right]
            verdict = self._verdict(trial, (*right, *others, *witnesses)[:MAX_COUNTING])
            if wrong:
                trial.ended, trial.verdict = "named", trial.verdict or verdict
            return self._convict(sorted(odd(verdict, counted.contributors)), verdict, counted.contributors)
        unsaid = len(jury - says.keys())
        most = max([says[peer] for peer in jury & says.keys()].count(value) for value in says.values())
        if trial.ended or most + unsaid >= quorum(jury):
            return []
        trial.ended = "disputed"
        return [Dispute(case_of(trial.pledge, trial.work, trial.sent), says)]

    @property
    def is_new(self) -> bool:
        """Have I seen too few sums to know who contributes? Then two who agree would be half of those I know."""
        return not self._seen or (self._seen[0] > 0 and len(self._seen) < _ENOUGH_SUMS)

    def _lately(self) -> Set[PeerId]:
        """Who has contributed lately, also if it is away: else whoever is left when one is killed would be half."""
        return frozenset[PeerId]().union(*(counted.contributors for counted in self._sums.values()))

    def _recent(self) -> Set[PeerId]:
        """Who has contributed lately, and is here."""
        return self._lately() & (self._live | {self.me})

    def _has_a_say(self, peer: PeerId, counted: CountedSum) -> bool:
        """Is it of the jury, or, where that is too few of who contributes, one of those who are asked beside it?"""
        recent = self._recent()
        few = _can_name(counted) and len(counted.contributors) <= quorum(first_of(self._lately() - self.convicted))
        return peer in counted.contributors or (few and peer in recent)

    def _enough(
        self, truth: bytes, says: Mapping[PeerId, bytes], contributors: Set[PeerId], members: Set[PeerId]
    ) -> bool:
        """Do more than half of the members, too, say what the jury does? Of few contributors to one sum most may lie,
        and of all the liars are less."""
        voices = sum(found == truth and peer in members | contributors for peer, found in says.items())
        return voices >= quorum(first_of(members - self.convicted))

    def _verdict(self, trial: Trial, findings: tuple[Finding, ...]) -> Verdict:
        return Verdict(trial.pledge, trial.work, trial.path, findings, self._numerics(self.me), sent=trial.sent)

    def _convict(
        self, peers: Iterable[PeerId], proof: Proof, contributors: Set[PeerId] = frozenset()
    ) -> list[CourtAction]:
        new = [peer for peer in peers if peer not in self.convicted]
        self.proofs |= dict.fromkeys(new, proof)
        for (case, _), trial in self._trials.items():
            if case.accused in new:
                trial.ended = "named"
            elif not trial.ended and not self._accusers(trial):
                trial.ended = "idle"
        return [Convict(peer, proof, reason(proof, peer, contributors)) for peer in new]

    def _forget(self, oldest: int) -> list[CourtAction]:
        """Drop what is older; an open case that is dropped is a dispute."""
        for step in [step for step in self._sums if step < oldest]:
            del self._sums[step]
        for of in [of for of in self._charges if of[1] < oldest]:
            del self._charges[of]
        self._pledged.drop(lambda of, pledge: pledge.stamp.step < oldest)
        self._compared.drop(lambda word, step: step < oldest)
        gone = [key for key in self._trials if key[0].stamp.step < oldest]
        trials = [(case, self._trials.pop((case, of))) for case, of in gone]
        return [
            Dispute(case, says_of(self._verdict(trial, tuple(trial.findings.values()))))
            for case, trial in trials
            if not trial.ended and trial.served
        ]


def _can_name(counted: CountedSum) -> bool:
    """Have enough contributed for more than half of them to be more than one?"""
    return len(counted.contributors) > 2


def _key(pledge: Pledge, work: WorkRecord | None, sent: Sent | None = None) -> tuple[Case, bytes]:
    word = statement(pledge) if sent is None else statement(pledge) + statement(sent)
    return case_of(pledge, work, sent), word


def _rank(key: tuple[Case, bytes]) -> tuple[int, PeerId, bytes]:
    return key[0].index, key[0].accused, key[1]


def reason(proof: Proof, peer: PeerId, contributors: Set[PeerId] = frozenset()) -> str:
    """What `peer` did, in at most MAX_REASON characters. contributors: to the sum that a verdict is about."""
    step = f"step {pledge_of(proof).stamp.step}"
    if isinstance(proof, Pair):
        return f"{step}: signed two different pledges for one sum"
    if isinstance(proof, Missent):
        return f"{step}: counted the {proof.sent.kind} of microbatch {proof.sent.index}, and sent another"
    accused = accused_of(proof)
    if peer != accused:
        what = f"work of ...{accused[-8:]}"
    elif proof.sent is not None:
        what = f"the {proof.sent.kind} that it sent"
    else:
        what = "its contribution" if proof.work is None else f"microbatch {proof.work.index}"
    jury, says = jury_of(contributors, accused), says_of(proof)
    agree = Counter(says[each] for each in jury & says.keys())
    return f"{step}: lied about {what}: {max(agree.values(), default=0)} of a jury of {len(jury)} found otherwise"
