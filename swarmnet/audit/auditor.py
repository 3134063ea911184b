"""One replica's audits (docs/trust.md): the calls and the computing for `audit.cases`.

Checks run one after the other in a task of their own. The payload is fetched from the suspect or from the replica that
reported the case, compared with the commitment, and computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from swarmnet.audit.case import Verify, claimed, index_of, needs_no_recheck, reason_of, suspect_of
from swarmnet.audit.cases import Cases, Check
from swarmnet.audit.evidence import PROOF, Evidence, from_line, to_line
from swarmnet.audit.receipts import Receipt, append
from swarmnet.averaging.exchange import Exchange
from swarmnet.directory import Record
from swarmnet.errors import BadMessage, DeviceFull, Overflow, PeerGone, PeerTimeout, Refused, RejectCode
from swarmnet.ids import PeerId, RunId, Signer
from swarmnet.manifest.schema import StageSpec
from swarmnet.manifest.timers import Timers
from swarmnet.messages import (
    FOR_EVER,
    NONE,
    AuditControl,
    AuditData,
    AuditRequest,
    Ban,
    Case,
    Commit,
    Finished,
    Packed,
    Pledge,
    Rejected,
    Sent,
    Stamp,
    WorkRecord,
    contributors_of,
    first_of,
)
from swarmnet.pipeline.execution import Execution
from swarmnet.pipeline.works import KEPT_STEPS, digest, off_by
from swarmnet.pledge import WHOLE, leaf, proves, vector_seed
from swarmnet.quorum import quorum
from swarmnet.stage.interfaces import Compute, Recomputed
from swarmnet.step.driver import StepDriver
from swarmnet.step.member import Member
from swarmnet.transport import Transport, ask

_IN_TIME = 2
"""Versions after a step in which who shows nothing of it has no excuse (`pipeline.works.KEPT_STEPS`)."""

_BEFORE_END = 4
"""Steps before the end of an exclusion in which its cause is reported again."""

_ASK_S = 20.0
"""The longest that one peer is asked for what went into a microbatch."""

_MADE_S = 120.0
"""The same of what it made of that, which it computes again when it has nothing else to do."""

_MOST_WAITING = 64
"""Checks that wait, and calls for work that are under way."""

_IMPOSSIBLE = bytes(32)
"""What a check finds of work that no correct replica could have contributed: it is not finite, or not an input."""

_LOOKS = 3
"""Times that a replica waits for the record of a peer that has signed what went into a work."""


class AuditLog:
    """Proofs on disk: `receipts-stage-N.txt` in a peer's directory, and a file of `evidence/` for each ban.

    directory: None: nothing is written. failed: called once with the reason why nothing can be written.
    """

    def __init__(self, directory: Path | None = None, failed: Callable[[str], None] = lambda reason: None) -> None:
        self._directory, self._failed, self._silent = directory, failed, False

    def receipt(self, receipt: Receipt, me: PeerId, signer: Signer) -> None:
        """A step is applied."""
        name = f"receipts-stage-{receipt.stamp.stage}.txt"
        self._write(name, lambda path: append(path, to_line(receipt, me, signer.sign)))

    def evidence(self, name: str, evidence: Evidence, me: PeerId, signer: Signer) -> str:
        """A peer is banned. Returns where the evidence is; "": nowhere."""
        return self._write(f"evidence/{name}{PROOF}", lambda path: path.write_text(to_line(evidence, me, signer.sign)))

    def kept(self, verify: Verify) -> Sequence[Evidence]:
        """The evidence that is there. It is checked as if it came from the network."""
        found = []
        for path in sorted((self._directory / "evidence").glob(f"*{PROOF}")) if self._directory is not None else ():
            with contextlib.suppress(OSError, ValueError):
                found.append(from_line(path.read_text(encoding="ascii"), Evidence, verify))
        return found

    def _write(self, name: str, write: Callable[[Path], object]) -> str:
        if self._directory is None:
            return ""
        path = self._directory / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
        except OSError as error:
            if not self._silent:
                self._failed(f"{error.filename or self._directory}: {error.strerror or error}")
            self._silent = True
            return ""
        return str(path)


class AuditedReplica(Protocol):
    """The parts of a replica that its audits look at."""

    stage: int
    member: Member
    exchange: Exchange
    execution: Execution
    compute: Compute
    driver: StepDriver


class AuditHost(Protocol):
    """What a peer does for the audits of its replicas. computes: the numerics class in which it computes, in full."""

    me: PeerId
    run_id: RunId
    signer: Signer
    timers: Timers
    records: dict[PeerId, Record]
    audit_log: AuditLog
    numerics: str
    computes: str

    @property
    def transport(self) -> Transport:
        """To other peers, and to this one."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> object:
        """Start a task that the peer owns."""

    def operator(self, peer: PeerId) -> str:
        """Who runs that peer, as it looks from here."""

    def known(self, stage: int, other: int) -> list[PeerId]:
        """The other replicas of any stage, as far as my replica of `stage` knows them."""

    def on_event(self, stage: int, event: str, fields: dict[str, object]) -> None:
        """Something worth a line, of that stage."""

    def ban(self, peer: PeerId, stamp: Stamp, reason: str, *, at: str) -> None:
        """It is proven that `peer` has done wrong in that step. at: the file of evidence; "": there is none."""

    def taint(self, stamp: Stamp, peer: PeerId, *, applied: bool) -> None:
        """That peer is banned for its work of that step. applied: is it known that its aggregate was applied here?"""


class Auditor:
    """The audits of one replica: the host of its cases."""

    def __init__(self, replica: AuditedReplica, peer: AuditHost, spec: StageSpec) -> None:
        self._replica, self._peer, self._spec, self.stage = replica, peer, spec, replica.stage
        self.cases = Cases(
            peer.me,
            replica.stage,
            peer.signer,
            self,
            microbatches=spec.audit.microbatches,
            contributions=spec.audit.contributions,
            numerics=self._numerics,
            operator=peer.operator,
            voters=replica.member.membership.voters,
        )
        self._waiting: deque[Check] = deque(maxlen=_MOST_WAITING)
        self.made_for: set[PeerId] = set()  # replicas for which I compute again what I have made
        self._to_name: tuple[Ban, ...] = ()  # as of the last tick
        self._checking = False
        self._asking = 0
        self._kept = peer.audit_log.kept(peer.signer.verify)

    # ------------------------------------------------------------ events

    def applied(self, stamp: Stamp, finished: Finished, commits: Sequence[Commit]) -> None:
        """The replica has applied that aggregate: `commits` are of all stages."""
        member = self._replica.member
        live = frozenset(member.view.live(self.stage, now=self._now()))
        pledges = self._replica.exchange.commitments(stamp)
        self._replica.execution.contributed(stamp.step, self._replica.exchange.pledged_root(stamp, finished))
        self.cases.applied(stamp, finished, pledges, member.chain, live)
        for commit in commits:
            for ban in commit.bans:
                if ban.step >= 0:
                    self._peer.taint(replace(stamp, step=ban.step, stage=commit.stage), ban.peer, applied=True)
                self._shut_out(ban, commit.stage)
        # A replica that joins takes over the table with its state.
        until = {row.peer: row.until_step for row in member.membership.exclusions}
        for peer, step in until.items():
            if step == FOR_EVER and peer not in self.cases.banned:
                self._shut_out(Ban(peer, -1, bytes(32)), self.stage)
        # Named again before an exclusion ends, it contributes nothing in between.
        for peer in self.cases.away_often(member.version):
            if until.get(peer, 0) <= member.version + _BEFORE_END and len(self.cases.voters) > 2:
                self.suspend(peer, "is away or restarted too often before it shows its work")
        self._name(member.bans)
        before = stamp.step - 1
        self.cases.received(before, self._replica.execution.works.sents(before), member.chain)
        if pledges:
            receipt = self._receipt(stamp, finished, pledges, commits)
            self._peer.audit_log.receipt(receipt, self._peer.me, self._peer.signer)

    def contradicted(self, one: Pledge, other: Pledge) -> None:
        """One peer has pledged two things for one aggregate."""
        self.hear(self._peer.me, Case(one, other=other))

    def _receipt(
        self, stamp: Stamp, finished: Finished, pledges: Sequence[Pledge], commits: Sequence[Commit]
    ) -> Receipt:
        """What proves who contributed what, and no more of it than that takes."""
        training = self._spec.training
        counted = [index for _, _, indexes in finished.contributions for index in indexes]
        signers = first_of(contributors_of(finished))
        enough = sorted((pledge for pledge in pledges if pledge.peer in signers), key=lambda pledge: pledge.peer)
        return Receipt(
            self._peer.run_id,
            stamp,
            finished,
            dict.fromkeys(counted, training.microbatch_size * training.sequence_length),
            tuple(enough[: quorum(signers)]),
            tuple(replace(commit, votes=(), seats=NONE, signatures=(), contributors=()) for commit in commits),
        )

    def hear(self, caller: PeerId, message: AuditControl) -> None:
        """Another peer tells a case, or what a replica of my stage has sent."""
        if isinstance(message, Case):
            self.cases.hear(message, caller)
        elif message.stamp.stage == self.stage:
            self.cases.hear_sent(message, caller)

    def tick(self) -> None:
        """One heartbeat interval has passed."""
        # Once: the peers that this peer knew to be banned before it was started again.
        kept, self._kept = self._kept, ()
        for evidence in kept:
            if evidence.run == self._peer.run_id:
                self.cases.learn(evidence.case)
        # Others do not tell a banned peer of the commit.
        for ban in self.cases.to_name():
            if ban.peer == self._peer.me:
                self._shut_out(ban, self.stage)
        self.cases.tick(self._now())
        # By the next tick all voters have been told of what is decided now, if no message is lost.
        self._name(self._to_name)
        self._to_name = self.cases.to_name()

    def _name(self, bans: Sequence[Ban]) -> None:
        """As leader my replica names these bans, but for those that were committed meanwhile."""
        self._replica.member.bans = tuple(ban for ban in self.cases.to_name() if ban in bans)

    # ------------------------------------------------------------ host of the cases

    def check(self, check: Check) -> None:
        """The payload of a check is fetched, and the work computed again; of too many the oldest are dropped."""
        self._waiting.append(check)
        if not self._checking:
            self._checking = True
            self._peer.spawn(self._check_all())

    def ask_work(self, sent: Sent, owner: PeerId) -> None:
        """The contributor of that microbatch is asked for its work."""
        if self._asking < _MOST_WAITING and self._answers_for(sent.stamp, owner) is not None:
            self._peer.spawn(self._compare(sent, owner))

    def show(self, sent: Sent) -> None:
        """Replicas of the sender's stage are told what it has sent."""
        for peer in self.cases.shown_to(sent, self._peer.known(self.stage, sent.stamp.stage)):
            self._peer.transport.tell(peer, sent)
        if sent.stamp.stage == self.stage:
            self.cases.hear_sent(sent, self._peer.me)

    def tell(self, case: Case) -> None:
        """All other replicas of my stage are told the case."""
        self._case_event("rechecked", case)
        for peer in self._peer.known(self.stage, self.stage):
            self._peer.transport.tell(peer, case)

    def ban(self, peer: PeerId, case: Case) -> None:
        """Two signatures prove the fault of the peer, also where there is no quorum."""
        self.tell(case)
        trainers = {other for other, record in self._peer.records.items() if record.feeds and self.stage == 0}
        for trainer in sorted(trainers):
            self._peer.transport.tell(trainer, case)
        self._ban(peer, case, case.pledge.stamp, reason_of(case, peer))

    def vouch(self, decided: frozenset[Ban]) -> None:
        """The replica votes for commits that name these bans."""
        self._replica.member.membership.vouched = decided

    def _shut_out(self, ban: Ban, stage: int) -> None:
        """A stage has decided that ban."""
        member = self._replica.member
        stamp = Stamp(max(ban.step, 0), stage, member.chain, member.restart)
        known, voters = ban.peer in self.cases.banned, self.cases.voters
        case = self.cases.committed(ban)
        what = f"step {ban.step}: false work" if ban.step >= 0 else "a false recheck, or two signatures"
        reason = f"{what}, by votes of stage {stage}" if case is None else reason_of(case, ban.peer, voters)
        if not known:
            self._ban(ban.peer, case, stamp if case is None else case.pledge.stamp, reason)

    def _ban(self, peer: PeerId, case: Case | None, stamp: Stamp, reason: str) -> None:
        """The peer is shut out. What proves that is written to a file, if signatures alone do."""
        at, known = "", self.cases.aggregate(stamp)
        if case is not None and known is not None and not needs_no_recheck(case):
            case = replace(case, contributions=known.finished.contributions, discarded=known.finished.discarded)
        evidence = Evidence(self._peer.run_id, case) if case is not None else None
        if evidence is not None and not evidence.refusal(self._peer.signer.verify):
            name = f"stage-{stamp.stage}-step-{stamp.step}-{peer}"
            at = self._peer.audit_log.evidence(name, evidence, self._peer.me, self._peer.signer)
        self._peer.ban(peer, stamp, reason, at=at)

    def suspend(self, peer: PeerId, why: str) -> None:
        """This replica has observed the peer to be late."""
        self._replica.driver.late(peer, why)

    def undecided(self, case: Case) -> None:
        """The case is shown in status."""
        peers = sorted({suspect_of(case), *(found.peer for found in case.rechecks)})
        self._case_event("disputed", case, peers=peers)

    def _event(self, event: str, peer: PeerId, step: int, **fields: object) -> None:
        self._peer.on_event(self.stage, event, {"peer": peer, "step": step, **fields})

    def _case_event(self, event: str, case: Case, **fields: object) -> None:
        self._event(event, suspect_of(case), case.pledge.stamp.step, index=index_of(case), **fields)

    # ------------------------------------------------------------ one check

    async def _check_all(self) -> None:
        try:
            while self._waiting:
                # Others wait for a recheck. Of samples the newest come first, because the verifiers of a case that is
                # opened late have not got the weights of that step any more.
                check = max(self._waiting, key=lambda each: (each.told_by is not None, each.case.pledge.stamp.step))
                self._waiting.remove(check)
                try:
                    if suspect_of(check.case) not in self.cases.banned:
                        await (self._weigh(check) if check.rough else self._check(check))
                except (Refused, PeerGone, BadMessage, DeviceFull) as error:
                    # The weights of that step are gone here, who signed its input is not known, or a device is full.
                    step = check.case.pledge.stamp.step
                    self._event("untried", suspect_of(check.case), step, index=check.index, reason=str(error))
        finally:
            self._checking = False

    async def _check(self, check: Check) -> None:
        case, pledge = check.case, check.case.pledge
        step, owner, sent = pledge.stamp.step, pledge.peer, check.case.sent
        whole = check.index == WHOLE
        known = self.cases.aggregate(pledge.stamp)
        owners = known.owners if known is not None else {}
        indexes = sorted(at for at in owners if owners[at] == owner) if whole else [check.index]
        shown: list[tuple[AuditData, Sequence[Packed], Sequence[Packed]]] = []
        began, process = self._now(), self._answers_for(pledge.stamp, owner)
        for index in indexes:
            one = await self._show(check, index)
            if one is None:
                return
            shown.append(one)
        if not shown:
            return  # the aggregate is forgotten: what it was made of is not known any more
        shown_s = self._now() - began
        data = shown[0][0]
        if not whole:
            case = replace(case, work=data.work, path=data.path)
        try:
            if not whole:
                (again,), _ = await self._replica.compute.recompute(step, [(check.index, *shown[0][1:])])
                found = leaf(_made_again(data.work, again)) if sent is None else _sent_again(sent, again)
            else:
                works = [(each.work.index, inputs, gradient) for each, inputs, gradient in shown]
                seed = vector_seed(pledge.stamp, pledge.id, pledge.digest)
                _, found = await self._replica.compute.recompute(step, works, seed)
        except (BadMessage, Overflow, Refused) as error:
            if isinstance(error, Refused) and error.code is not RejectCode.OVERFLOWED:
                # My weights of that step are gone: because I lagged, or because it took so long to show its work.
                if shown_s > self._peer.timers.suspect_s:
                    self._withheld(
                        process, pledge.stamp, owner, check.index, "it was shown too slowly to be computed again"
                    )
                raise
            # Of what was sent that proves nothing: its contributor has chosen what it is made of.
            if sent is not None:
                return
            found = _IMPOSSIBLE
        self._case_event("audited", case, ok=found == claimed(case))
        self.cases.found(case, found, now=self._now())

    async def _weigh(self, check: Check) -> None:
        """Compare what the suspect made with what I make of the same, as far as rounding allows."""
        pledge, index = check.case.pledge, check.index
        step, peer = pledge.stamp.step, pledge.peer
        one = await self._show(check, index)
        if one is None:
            return
        (again,), _ = await self._replica.compute.recompute(step, [(index, *one[1:])])
        process = self._answers_for(pledge.stamp, peer)
        request = AuditRequest(step, self.stage, index, peer, made=True)
        shown, why = await self._ask(peer, request, limit_s=_MADE_S)
        off = math.inf if shown is None or shown.work != one[0].work else off_by(shown, again)
        if off < math.inf:
            self._event("weighed", peer, step, index=index, off=off)
            self.cases.weighed(peer, off)
        else:
            self._withheld(process, pledge.stamp, peer, index, why)

    async def _compare(self, sent: Sent, owner: PeerId) -> None:
        """Ask the contributor of that microbatch for its work, and compare it with what was sent."""
        stamp = sent.stamp
        request = AuditRequest(stamp.step, self.stage, sent.index, owner, bare=True)
        process, why = self._answers_for(stamp, owner), ""
        self._asking += 1
        try:
            if owner == self._peer.me:
                answer, why = self._replica.execution.works.bare(stamp.step, sent.index), "it is not kept here"
            else:
                answer, why = await self._ask(owner, request)
        finally:
            self._asking -= 1
        shown = answer is not None and self.cases.compared(sent, answer.work, answer.path)
        if not shown and owner != self._peer.me:
            self._withheld(process, stamp, owner, sent.index, why)

    async def _ask(self, peer: PeerId, request: AuditRequest, limit_s: float = _ASK_S) -> tuple[AuditData | None, str]:
        """The peer's answer, and what is wrong with it if it does not match the commitment. Without an answer: the
        reason; "" if the peer is unreachable, which is no fault."""
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
        """Does it answer, immediately or after a short silence? After a long one it is no longer a member."""
        timers = self._peer.timers
        while (silent_s := self._now() - asked_at) <= timers.long_silence_s:
            await asyncio.sleep(timers.beat_s)
            seen = self._replica.member.view.get(peer)
            if silent_s >= timers.beat_s and seen is not None and seen.touched_at > asked_at:
                return True
        return False

    def _answers_for(self, stamp: Stamp, peer: PeerId) -> int | None:
        """The process in which the peer contributed to that step, if it must still show that work; else None."""
        known, member = self.cases.aggregate(stamp), self._replica.member
        seen = member.view.get(peer)
        # It keeps what it shows for some steps: a late request gets nothing from any peer.
        ahead = seen is not None and seen.version - stamp.step >= KEPT_STEPS
        if known is None or ahead or member.version - stamp.step > _IN_TIME:
            return None
        return next((of.incarnation for name, of, _ in known.finished.contributions if name == peer), None)

    def _withheld(self, process: int | None, stamp: Stamp, peer: PeerId, index: int, why: str) -> None:
        """The peer has shown nothing. process: what `_answers_for` returned when it was asked."""
        member = self._replica.member
        seen = member.view.get(peer)
        # No peer answers for what was given up, nor for work that was lost with a process.
        if process is None or stamp.restart != member.restart:
            return
        if not why or seen is None:
            self.cases.unshown(peer, stamp.step)
            return
        if seen.incarnation == process or not self.cases.is_excused(peer, process, stamp.step, member.version):
            self._event("withheld", peer, stamp.step, index=index, reason=why)
            self.suspend(peer, "does not show work that it pledged")

    async def _show(self, check: Check, index: int) -> tuple[AuditData, Sequence[Packed], Sequence[Packed]] | None:
        """What went into a microbatch, as it was pledged. None: no peer shows it."""
        pledge = check.case.pledge
        peer, execution = pledge.peer, self._replica.execution
        request, reason = AuditRequest(pledge.stamp.step, self.stage, index, peer), ""
        process = self._answers_for(pledge.stamp, peer)
        kept = execution.shown.get(request)
        if kept is not None and proves(kept.path, kept.work, pledge.work_root):
            with contextlib.suppress(BadMessage):
                return kept, *execution.opened(request, kept)
        for holder in dict.fromkeys(filter(None, (peer, check.told_by))):
            if holder == self._peer.me:
                own = execution.works.shown(request.step, index) if holder == peer else None
                if own is not None:
                    return own, *execution.opened(request, own)
                continue
            answer, why = await self._ask(holder, request)
            if answer is not None and proves(answer.path, answer.work, pledge.work_root):
                try:
                    return answer, *await self._opened(request, answer)
                except (BadMessage, PeerGone) as error:
                    why = str(error)
            reason = why if holder == peer else reason
        self._withheld(process, pledge.stamp, peer, index, reason)
        return None

    async def _opened(self, request: AuditRequest, data: AuditData) -> tuple[Sequence[Packed], Sequence[Packed]]:
        """As `Execution.opened`; the record of a peer that has signed may still be on its way."""
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
        if not self._spec.numerics.deterministic:
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


def _sent_again(sent: Sent, again: Recomputed) -> bytes:
    """The digest that it should have."""
    return digest(again.output if sent.kind == "output" else again.answer)


def _made_again(work: WorkRecord, again: Recomputed) -> WorkRecord:
    """The record as it should be."""
    return replace(
        work,
        output=digest(again.output),
        answer=digest(again.answer),
        loss_sum=again.loss_sum,
        num_tokens=again.num_tokens,
    )
