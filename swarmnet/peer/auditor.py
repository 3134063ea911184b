"""One replica's part in audits (docs/trust.md): performs what its court decides. Here are the calls and the computing.

A case is tried in a task of its own, one at a time: what went into it is fetched from the accused, else from who
accuses; it is held against the pledge, computed again, and the court hears what came out.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from swarmnet.audit.court import (
    KEEP_STEPS,
    AskWork,
    Convict,
    Court,
    CourtAction,
    Dispute,
    Recompute,
    SayFinding,
    ShowSent,
    StrikePeer,
    TellVerdict,
    Weigh,
)
from swarmnet.audit.evidence import Evidence
from swarmnet.audit.excuses import Excuses
from swarmnet.audit.pledge import WHOLE, leaf, proves, said, shares_of, vector_seed
from swarmnet.audit.proof import Proof, accused_of, odd, pledge_of, refusal
from swarmnet.audit.receipts import Receipt, append
from swarmnet.bounds import Recent
from swarmnet.errors import BadMessage, DeviceFull, Overflow, PeerGone, PeerTimeout, Refused, RejectCode
from swarmnet.ids import PeerId, Restart
from swarmnet.messages import (
    NONE,
    AuditControl,
    AuditData,
    AuditRequest,
    Case,
    Commit,
    Contributions,
    Finding,
    Finished,
    Indexes,
    Missent,
    Packed,
    Pair,
    Pledge,
    Rejected,
    Sent,
    Stamp,
    Verdict,
    contributors_of,
    first_of,
    roll_of,
)
from swarmnet.peer.showing import made_again, sent_again
from swarmnet.pipeline.works import KEPT_STEPS, MOST_ASKS, off_by
from swarmnet.quorum import quorum
from swarmnet.ranks.host_copies import KEPT_WEIGHTS
from swarmnet.transport import ask

if TYPE_CHECKING:
    from swarmnet.peer.peer import Peer
    from swarmnet.peer.replica import Replica

_IN_TIME = 2
"""Versions after a step in which who shows nothing of it has no excuse (`pipeline.works.KEPT_STEPS`)."""

_ASK_S = 20.0
_MOST_EARLY = 8
"""The longest that one peer is asked for what went into a microbatch."""

_MADE_S = 120.0
"""The same of what it made of that, which it computes again when it has nothing else to do."""

_MOST_WAITING = 64
"""Cases that wait to be tried."""

_REMEMBERED = 64
"""Sums whose contributors are known: cases and verdicts are about the last ones."""

_COMMITTED = 32
"""Steps of which is known what each stage committed: a case is forgotten after half as many."""

_MOST_STRANGERS = 256
"""Verdicts on peers of whom nothing else is heard. Names cost nothing, and with a few of them anybody makes a verdict;
each stays in memory and on disk, and is told to everybody."""

_IMPOSSIBLE = bytes(32)
"""What everybody finds of work that no honest replica could have counted: it is not finite, or not an input."""

_LOOKS = 3
"""Times that one waits for a record of somebody who has signed what went into a work."""

_STRIKE_S = 15.0
"""What somebody costs who does not show what it pledged (`step.strikes`): it sits out for minutes."""


class Papers(Protocol):
    """Where a peer keeps what proves who did what."""

    def receipt(self, receipt: Receipt) -> None:
        """A step is applied."""

    def evidence(self, name: str, evidence: Evidence) -> str:
        """Somebody is convicted. Returns where the evidence is; "": nowhere."""

    def kept(self) -> Sequence[Evidence]:
        """The evidence that is there."""


class _NoPapers:
    def receipt(self, receipt: Receipt) -> None:
        pass

    def evidence(self, name: str, evidence: Evidence) -> str:
        return ""

    def kept(self) -> Sequence[Evidence]:
        return ()


NO_PAPERS: Papers = _NoPapers()


class PaperFiles:
    """Papers in a peer's directory: `receipts-stage-N.jsonl`, and a file of `evidence/` for each proof.

    failed: hears, once, why nothing can be written.
    """

    def __init__(self, directory: Path, failed: Callable[[str], None]) -> None:
        self._directory, self._failed, self._silent = directory, failed, False

    def receipt(self, receipt: Receipt) -> None:
        with self._told():
            append(self._directory / f"receipts-stage-{receipt.stamp.stage}.jsonl", receipt)

    def evidence(self, name: str, evidence: Evidence) -> str:
        path = self._directory / "evidence" / name
        with self._told():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(evidence.to_json(), encoding="utf-8")
            return str(path)
        return ""

    def kept(self) -> Sequence[Evidence]:
        """Of what is no evidence any more, nothing: it is looked at as if it came from the network."""
        found = []
        for path in sorted((self._directory / "evidence").glob("*.json")):
            with contextlib.suppress(OSError, ValueError):
                found.append(Evidence.from_json(path.read_text(encoding="utf-8")))
        return found

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._silent:
                self._failed(f"{error.filename or self._directory}: {error.strerror or error}")
            self._silent = True


class Auditor:
    """The audits of one replica."""

    def __init__(self, replica: Replica, peer: Peer) -> None:
        audit = peer.manifest.audit
        self._replica, self._peer, self.stage = replica, peer, replica.stage
        replica.compute.keep(KEPT_WEIGHTS)
        self._court = Court(
            peer.me,
            replica.stage,
            peer.signer,
            microbatches=audit.microbatches,
            contributions=audit.contributions,
            numerics=self._numerics,
            operator=peer.operator,
        )
        self._waiting: deque[Recompute | Weigh] = deque()
        self.made_for: set[PeerId] = set()  # mates for whom I compute again what I have made
        self._early: deque[Verdict] = deque()  # heard before I could judge them
        self._trying = False
        self._asking = 0
        self._shares: Recent[bytes, tuple[Contributions, Indexes]] = Recent(_REMEMBERED)  # by what stands for them
        self._sums: Recent[Stamp, Finished] = Recent(_REMEMBERED)
        # Invariant: of no step whose cases the court has forgotten.
        self._asked: Recent[Stamp, Counter[tuple[PeerId, PeerId, int]]] = Recent(_REMEMBERED)
        # By restart and step: the digest of each stage's sum, and of its contributors.
        self._committed: Recent[tuple[Restart, int], dict[int, tuple[bytes, bytes]]] = Recent(_COMMITTED)
        self._proofs: list[Proof] = []
        self._tainted: set[Stamp] = set()
        self._told: set[tuple[int, PeerId, int]] = set()
        self._strangers = 0
        self._excuses = Excuses()
        # Works that I asked for. Invariant: of cases that are in time.
        self._bare: Recent[Case, AuditData] = Recent(4 * _REMEMBERED)
        self._kept = peer.papers.kept()

    # ------------------------------------------------------------ events

    def applied(self, stamp: Stamp, finished: Finished, commits: Sequence[Commit]) -> None:
        """The replica has applied that sum: `commits` are of all stages."""
        member = self._replica.member
        self._sums[stamp] = finished
        self._bare.drop(lambda case, data: stamp.step - case.stamp.step > _IN_TIME)
        self._asked.drop(lambda of, asks: stamp.step - of.step >= KEEP_STEPS)
        self._committed[stamp.restart, stamp.step] = {each.stage: (each.digest, each.roll) for each in commits}
        self._shares[shares_of(finished.contributions, finished.voided)] = finished.contributions, finished.voided
        live = frozenset(member.view.live(self.stage, now=self._now()))
        pledges = self._replica.exchange.pledges(stamp)
        me, incarnation = self._peer.me, self._peer.incarnation
        mine = (of for peer, life, of in finished.contributions if (peer, life.incarnation) == (me, incarnation))
        self._replica.execution.contributed(stamp.step, frozenset().union(*mine))
        self._perform(self._court.applied(stamp, finished, pledges, member.chain, live))
        while self._early and not self._court.is_new:
            self._hear_proof(self._early.popleft())
        before = stamp.step - 1
        self._perform(self._court.received(before, self._replica.execution.works.sents(before), member.chain))
        self._spread()
        if pledges:
            self._peer.papers.receipt(self._receipt(stamp, finished, pledges, commits))

    def contradicted(self, one: Pledge, other: Pledge) -> None:
        """One peer has pledged two things for one sum."""
        self._perform(self._court.hear_proof(Pair(one, other)))

    def _receipt(
        self, stamp: Stamp, finished: Finished, pledges: Sequence[Pledge], commits: Sequence[Commit]
    ) -> Receipt:
        """What proves who counted what, and no more of it than that takes."""
        training = self._peer.manifest.training
        counted = [index for _, _, indexes in finished.contributions for index in indexes]
        jury = first_of(contributors_of(finished))
        enough = sorted((pledge for pledge in pledges if pledge.peer in jury), key=lambda pledge: pledge.peer)
        return Receipt(
            self._peer.run_id,
            stamp,
            finished,
            dict.fromkeys(counted, training.microbatch_size * training.sequence_length),
            tuple(enough[: quorum(jury)]),
            tuple(replace(commit, votes=(), seats=NONE, signatures=(), contributors=()) for commit in commits),
        )

    def hear(self, caller: PeerId, message: AuditControl) -> None:
        """What another peer says: of my stage what was found or sent, of any a proof."""
        match message:
            case Finding() if message.case.stamp.stage == self.stage:
                self._perform(self._court.hear(message))
            case Sent() if message.stamp.stage == self.stage:
                self._perform(self._court.hear_sent(message, caller))
            case Verdict() | Pair() | Missent():
                self._hear_proof(message)
            case _:
                pass

    def tick(self) -> None:
        """One heartbeat interval has passed."""
        self._recall()
        self._perform(self._court.tick(self._now()))

    # ------------------------------------------------------------ what the court decides

    def _perform(self, actions: Sequence[CourtAction]) -> None:
        for action in actions:
            match action:
                case Recompute() if len(self._waiting) < _MOST_WAITING:
                    # Others wait for what a juror says; what was drawn is my own affair.
                    (self._waiting.append if action.accuser is None else self._waiting.appendleft)(action)
                    self._begin()
                case Weigh() if len(self._waiting) < _MOST_WAITING:
                    self._waiting.append(action)
                    self._begin()
                case Recompute() | Weigh():
                    pass
                case SayFinding(finding, sent):
                    self._event("finding", finding.case.accused, finding.case.stamp.step, index=finding.case.index)
                    for mate in self._peer.mates(self.stage):
                        for word in (finding,) if sent is None else (sent, finding):
                            self._peer.transport.tell(mate, word)
                case ShowSent(sent):
                    for mate in self._court.shown_to(sent, self._peer.known(self.stage, sent.stamp.stage)):
                        self._peer.transport.tell(mate, sent)
                    if sent.stamp.stage == self.stage:
                        self._perform(self._court.hear_sent(sent, self._peer.me))
                case AskWork() if self._asking < _MOST_WAITING and self._in_time(action.case):
                    self._peer.spawn(self._compare(action))
                case AskWork():
                    pass
                case Convict():
                    self._convict(action)
                case TellVerdict(peer, verdict):
                    self._peer.transport.tell(peer, self._whole(verdict))
                case StrikePeer(accused, _, why):
                    self._replica.driver.strike(accused, why, cost_s=_STRIKE_S)
                case Dispute(case, says):
                    self._event("disputed", case.accused, case.stamp.step, index=case.index, jurors=sorted(says.keys()))

    def _convict(self, action: Convict) -> None:
        proof = action.proof
        pledge = pledge_of(proof)
        stamp, told = pledge.stamp, self._shares.get(pledge.shares)
        whole, at = self._whole(proof) if isinstance(proof, Verdict) else proof, ""
        if told is not None or not isinstance(proof, Verdict):
            evidence = Evidence(self._peer.run_id, *(told or ((), NONE)), proof)
            at = self._peer.papers.evidence(f"stage-{stamp.stage}-step-{stamp.step}-{action.peer}.json", evidence)
        # The last that it hears of me: its operator is to know.
        if action.peer != self._peer.me and action.peer in self._heard():
            self._peer.transport.tell(action.peer, whole)
        self._peer.convict(action.peer, stamp, action.reason, whole, at=at)
        self._proofs.append(whole)
        if isinstance(whole, Verdict):
            self._taint(whole, action.peer)
        self._spread()

    def _taint(self, verdict: Verdict, convict: PeerId) -> None:
        """If it was the convict's own work that was false, its step holds it, here if the sum was applied here."""
        stamp, applied = verdict.pledge.stamp, self._was_applied(verdict)
        # Who accused wrongly has changed no sum.
        if convict == accused_of(verdict):
            self._tainted |= {stamp} if applied else set()
            self._peer.taint(stamp, convict, applied=applied)

    def _was_applied(self, verdict: Verdict) -> bool:
        """Is it about a sum that this replica saw committed? With names of its own anybody makes a verdict."""
        pledge = verdict.pledge
        committed = self._committed.get((pledge.stamp.restart, pledge.stamp.step), {})
        contributors = frozenset(peer for peer, _, indexes in verdict.contributions if indexes)
        roll = roll_of(tuple(sorted(first_of(contributors))))
        return committed.get(pledge.stamp.stage) == (pledge.digest, roll)

    def _hear_proof(self, proof: Proof, *, kept: bool = False) -> None:
        """Who judges, the accused has signed itself: nobody need know the sum to see whether that is so. kept: since an
        earlier life."""
        told = (proof.contributions, proof.voided) if isinstance(proof, Verdict) else None
        if told is not None and shares_of(*told) != pledge_of(proof).shares:
            return
        contributors = frozenset(peer for peer, _, indexes in told[0] if indexes) if told is not None else frozenset()
        stage = pledge_of(proof).stamp.stage
        # Whoever only says that it lives has no voice; who is away has one.
        members = frozenset(self._replica.member.membership.contributors(stage)) or frozenset(
            self._replica.member.view.live(stage, now=self._now())
        )
        if isinstance(proof, Verdict) and self._court.is_new and not kept:
            if len(self._early) < _MOST_EARLY:
                self._early.append(proof)
            return
        # Nobody has signed who judges what it sent: that must be known.
        if isinstance(proof, Verdict) and proof.sent is not None and not self._was_applied(proof):
            return
        wrong = odd(proof, contributors)
        strange = wrong.isdisjoint((self._peer.me, *self._heard()))
        accused = accused_of(proof)
        # Others found false work of it in another step: the court has no more to say of it.
        if (
            isinstance(proof, Verdict)
            and accused in self._court.convicted
            and proof.pledge.stamp not in self._tainted
            and self._was_applied(proof)
            and accused in wrong
            and not refusal(proof, contributors, self._peer.signer.verify)
        ):
            self._taint(proof, accused)
        if strange and not kept and self._strangers >= _MOST_STRANGERS:
            return
        if isinstance(proof, Verdict):
            bare = replace(proof, contributions=(), voided=NONE)
            actions = self._court.hear_verdict(bare, contributors, members, kept=kept)
        else:
            actions = self._court.hear_proof(proof)
        # What proves nothing takes no place of what does.
        if actions:
            self._strangers += strange
        if actions and told is not None:
            self._shares[pledge_of(proof).shares] = told
        self._perform(actions)

    def _whole(self, verdict: Verdict) -> Verdict:
        """A verdict as it is told."""
        contributions, voided = self._shares.get(verdict.pledge.shares, ((), NONE))
        return replace(verdict, contributions=contributions, voided=voided)

    def _recall(self) -> None:
        """Once: whom this peer knew to be convicted before it was started again."""
        kept, self._kept = self._kept, ()
        for evidence in kept:
            proof = evidence.proof
            if isinstance(proof, Verdict):
                proof = replace(proof, contributions=evidence.contributions, voided=evidence.voided)
            if evidence.run == self._peer.run_id:
                self._hear_proof(proof, kept=True)

    def _heard(self) -> Set[PeerId]:
        """Who has spoken to me as a replica of any stage. Names that are only records cost nothing."""
        return frozenset(self._replica.member.view.everyone())

    def _spread(self) -> None:
        """Tell every proof once to everybody whom I hear; and, of stage 0, to trainers: they call a convict in vain."""
        records = self._peer.records
        trainers = {peer for peer, record in records.items() if record.feeds and self.stage == 0}
        heard = (self._heard() | trainers) - self._court.convicted
        known = [(peer, records[peer].incarnation if peer in records else 0) for peer in heard]
        for number, proof in enumerate(self._proofs):
            for peer, incarnation in known:
                if peer != self._peer.me and (number, peer, incarnation) not in self._told:
                    self._told.add((number, peer, incarnation))
                    self._peer.transport.tell(peer, proof)

    def _event(self, event: str, peer: PeerId, step: int, **fields: object) -> None:
        self._peer.on_event(self.stage, event, {"peer": peer, "step": step, **fields})

    # ------------------------------------------------------------ trying a case

    def _begin(self) -> None:
        if not self._trying:
            self._trying = True
            self._peer.spawn(self._try_all())

    async def _try_all(self) -> None:
        try:
            while self._waiting:
                wanted = self._waiting.popleft()
                try:
                    await (self._weigh(wanted) if isinstance(wanted, Weigh) else self._try(wanted))
                except (Refused, DeviceFull) as error:
                    # The weights of that step are gone here, a device is full, or too many cases are about one work.
                    case = wanted.case
                    self._event("untried", case.accused, case.stamp.step, index=case.index, reason=str(error))
        finally:
            self._trying = False

    async def _try(self, wanted: Recompute) -> None:
        case, pledge = wanted.case, wanted.pledge
        if case.accused in self._court.convicted:
            return
        step = case.stamp.step
        indexes = sorted(self._share(case)) if case.index == WHOLE else [case.index]
        shown: list[tuple[AuditData, Sequence[Packed], Sequence[Packed]]] = []
        began, in_time = self._now(), self._in_time(case)
        for index in indexes:
            one = await self._show(wanted, index)
            if one is None:
                return
            shown.append(one)
        shown_s = self._now() - began
        data = shown[0][0] if case.index != WHOLE else None
        work, path = (None, b"") if data is None else (data.work, data.path)
        if not self._court.served(pledge, work, path, wanted.sent):
            return
        try:
            if data is not None:
                again = await self._replica.compute.recompute(step, case.index, *shown[0][1:])
                found = leaf(made_again(data.work, again)) if wanted.sent is None else sent_again(wanted.sent, again)
            else:
                works = [(each.work.index, inputs, gradient) for each, inputs, gradient in shown]
                seed = vector_seed(pledge.stamp, pledge.id, pledge.digest)
                _, found = await self._replica.compute.recompute_share(step, works, seed)
        except (BadMessage, Overflow):
            # Of what was sent that says nothing: whoever counted it has chosen what it is made of.
            if wanted.sent is not None:
                return
            found = _IMPOSSIBLE
        except Refused as error:
            if error.code is not RejectCode.VOID:
                # My weights of that step are gone: because I lagged, or because it took so long to show its work.
                if in_time and shown_s > self._peer.timers.suspect_s:
                    self._withheld(replace(case, accused=pledge.peer), "it was shown too slowly to be computed again")
                raise
            if wanted.sent is not None:
                return
            found = _IMPOSSIBLE
        right = found == said(pledge, work, wanted.sent)
        self._event("audited", case.accused, step, index=case.index, ok=right)
        self._perform(self._court.found(pledge, found, work, path, wanted.sent, now=self._now()))

    async def _weigh(self, wanted: Weigh) -> None:
        """Hold what the accused made against what I make of the same, as far as rounding lets me see."""
        case = wanted.case
        one = await self._show(Recompute(case, wanted.pledge, None), case.index)
        if one is None:
            return
        again = await self._replica.compute.recompute(case.stamp.step, case.index, *one[1:])
        in_time = self._in_time(case)
        request = AuditRequest(case.stamp.step, self.stage, case.index, case.accused, made=True)
        shown, why = await self._ask(case.accused, request, limit_s=_MADE_S)
        off = math.inf if shown is None or shown.work != one[0].work else off_by(shown, again)
        if off < math.inf:
            self._event("weighed", case.accused, case.stamp.step, index=case.index, off=off)
            self._perform(self._court.weighed(case, off))
        elif in_time:
            self._withheld(case, why)

    async def _compare(self, wanted: AskWork) -> None:
        """Ask for the work of who has counted that microbatch, and hold it against what was sent of it."""
        sent, case = wanted.sent, wanted.case
        request = AuditRequest(case.stamp.step, self.stage, sent.index, case.accused, bare=True)
        in_time, why = self._in_time(case), ""
        self._asking += 1
        try:
            if case.accused == self._peer.me:
                answer, why = self._replica.execution.works.bare(case.stamp.step, sent.index), "it is not kept here"
            elif (answer := self._bare.get(case)) is None:
                answer, why = await self._ask(case.accused, request)
        finally:
            self._asking -= 1
        actions = self._court.compared(sent, answer.work, answer.path) if answer is not None else None
        if answer is not None and actions is not None:
            self._bare[case] = answer
        self._perform(actions or [])
        if actions is None and in_time and case.accused != self._peer.me:
            self._withheld(case, why)

    async def _ask(self, peer: PeerId, request: AuditRequest, limit_s: float = _ASK_S) -> tuple[AuditData | None, str]:
        """What that peer shows, and what is wrong with that if it is not what was pledged. Of nothing: why; "": it is
        away, and that is no lie."""
        why = ""
        for _ in range(2):
            asked_at = self._now()
            try:
                answer = await ask(self._peer.transport, peer, request, limit_s=limit_s)
            except PeerGone:
                why = "it ends the call"
            except PeerTimeout:
                # One that lives and does not answer is no better than one that refuses.
                return None, "it does not answer" if self._replica.member.view.in_touch(peer, now=self._now()) else ""
            except (BadMessage, Refused) as error:
                return None, str(error)
            else:
                if isinstance(answer, AuditData):
                    return answer, "it is not what was pledged"
                if not isinstance(answer, Rejected):
                    return None, "it is no answer"
                why = answer.reason
                if answer.code not in (RejectCode.NOT_A_FEEDER, RejectCode.NOT_SERVED):
                    return None, why
            # It or I may have been away, or a line was cut: it is asked again when it is back. Who is here has refused.
            if not await self._comes_back(peer, asked_at):
                return None, ""
        return None, why

    async def _comes_back(self, peer: PeerId, asked_at: float) -> bool:
        """Is it here, at once or after a short silence? After a long one it has lost its place."""
        timers = self._peer.timers
        while (silent_s := self._now() - asked_at) <= timers.long_silence_s:
            await asyncio.sleep(timers.beat_s)
            if silent_s >= timers.beat_s and self._is_here(peer, since=asked_at):
                return True
        return False

    def _is_here(self, peer: PeerId, *, since: float) -> bool:
        """Has it been heard since then, and has it answered on a line of mine?"""
        seen = self._replica.member.view.get(peer)
        return seen is not None and seen.touched_at > since

    def _in_time(self, case: Case) -> bool:
        # It keeps what it shows for some steps: who asks late gets nothing from anybody.
        seen = self._replica.member.view.get(case.accused)
        ahead = seen is not None and seen.version - case.stamp.step >= KEPT_STEPS
        return not ahead and self._replica.member.version - case.stamp.step <= _IN_TIME

    def _withheld(self, case: Case, why: str) -> None:
        """The accused has shown nothing, though it was asked in time."""
        # Nobody answers for what was given up.
        if why and case.stamp.restart == self._replica.member.restart and self._lives_on(case):
            self._event("withheld", case.accused, case.stamp.step, index=case.index, reason=why)
            self._perform(self._court.withheld(case))

    def _share(self, case: Case) -> frozenset[int]:
        """What the accused has contributed to the sum."""
        finished = self._sums.get(case.stamp)
        contributions = finished.contributions if finished is not None else ()
        return frozenset().union(*(indexes for peer, _, indexes in contributions if peer == case.accused))

    def _lives_on(self, case: Case) -> bool:
        """Is the accused the process that has contributed? One that was started again has lost what it could show."""
        finished, member = self._sums.get(case.stamp), self._replica.member
        seen = member.view.get(case.accused)
        of = [life.incarnation for peer, life, _ in finished.contributions if peer == case.accused] if finished else []
        if seen is None or not of:
            return False
        return seen.incarnation in of or not self._excuses.holds(case.accused, of[0], case.stamp.step, member.version)

    async def _show(self, wanted: Recompute, index: int) -> tuple[AuditData, Sequence[Packed], Sequence[Packed]] | None:
        """What went into a microbatch, as it was pledged. None: nobody shows it. Raises Refused(TOO_OFTEN)."""
        pledge = wanted.pledge
        case = replace(wanted.case, accused=pledge.peer)  # who has to show it
        request, reason = AuditRequest(case.stamp.step, self.stage, index, case.accused), ""
        spent, in_time = False, self._in_time(case)
        kept = self._replica.execution.kept(request)
        if kept is not None and proves(kept.path, kept.work, pledge.work_root):
            with contextlib.suppress(BadMessage):
                return kept, *self._replica.execution.opened(request, kept)
        for holder in dict.fromkeys(filter(None, (case.accused, wanted.accuser))):
            if holder == self._peer.me:
                own = self._replica.execution.works.shown(case.stamp.step, index) if holder == case.accused else None
                if own is not None:
                    return own, *self._replica.execution.opened(request, own)
                continue
            asked = self._asked[case.stamp] = self._asked.get(case.stamp, Counter())
            # It would refuse, and be no liar.
            if asked[holder, case.accused, index] >= MOST_ASKS:
                spent = True
                continue
            asked[holder, case.accused, index] += 1
            answer, why = await self._ask(holder, request)
            if answer is not None and proves(answer.path, answer.work, pledge.work_root):
                try:
                    return answer, *await self._opened(request, answer)
                except (BadMessage, PeerGone) as error:
                    why = str(error)
            reason = why if holder == case.accused else reason
        if spent and not reason:
            raise Refused(RejectCode.TOO_OFTEN, "asked for as often as a mate may")
        if in_time:
            self._withheld(replace(case, index=index), reason)
        return None

    async def _opened(self, request: AuditRequest, data: AuditData) -> tuple[Sequence[Packed], Sequence[Packed]]:
        """As `Execution.opened`; the record of somebody who has signed may be on its way."""
        for _ in range(_LOOKS):
            with contextlib.suppress(PeerGone):
                return self._replica.execution.opened(request, data)
            await asyncio.sleep(4 * self._peer.timers.beat_s)
        return self._replica.execution.opened(request, data)

    # ------------------------------------------------------------ what is known of others

    def in_my_class(self, peer: PeerId) -> bool:
        """Does it compute the same bits as I do, as far as I know?"""
        return self._numerics(peer) in ("", self._numerics(self._peer.me))

    def _numerics(self, peer: PeerId) -> str:
        """The numerics class in which a replica of my stage computes, as it says; "": not known."""
        if not self._peer.manifest.numerics.deterministic:
            return peer  # no two are to compute the same bits, so they are compared up to rounding
        if peer == self._peer.me:
            return self._peer.computes or self._peer.numerics
        record = self._peer.records.get(peer)
        if record is not None and record.numerics:
            return record.numerics
        seen = self._replica.member.view.get(peer)
        return seen.numerics if seen is not None else ""

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
