"""What proves to anybody, without the run, that a peer did wrong: signatures alone. Pure.

| proof | says |
|---|---|
| `Verdict` | in a case, more than half of the jury found one value, and somebody signed another |
| `Pair` | one contributor signed two different pledges for one sum in one round |
| `Missent` | one contributor pledged a work, and signed that it sent another one |

Who is convicted by a verdict has itself signed who contributed (`Pledge.shares`; in a finding, the accused's pledge);
but who is for what it sent: of that, the pledge of whoever counted the microbatch says so, and each peer of the run
knows. So nobody else can be convicted by a jury that it did not know. What is left to believe is that more than half of
that jury is honest.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from swarmnet.audit.pledge import case_of, counted_as, finding_statement, jury_of, made_alike, proves, said, settled
from swarmnet.ids import PeerId
from swarmnet.messages import MAX_COUNTING, Missent, Pair, Pledge, Sent, Verdict, WorkRecord
from swarmnet.messages import Proof as Proof
from swarmnet.statement import statement

Verify = Callable[[PeerId, bytes, bytes], bool]
"""(who, what, signature): did they sign it?"""


def pledge_of(proof: Proof) -> Pledge:
    """The one that it is about: of the accused, but in a verdict on what somebody has sent."""
    return proof.first if isinstance(proof, Pair) else proof.pledge


def accused_of(proof: Proof) -> PeerId:
    """Whose work it is about."""
    return proof.sent.peer if isinstance(proof, Verdict) and proof.sent is not None else pledge_of(proof).peer


def says_of(verdict: Verdict) -> dict[PeerId, bytes]:
    """What each says in the case: the accused by its pledge, or by what it has sent."""
    says = {finding.peer: finding.found for finding in verdict.findings}
    return says | {accused_of(verdict): said(verdict.pledge, verdict.work, verdict.sent)}


def odd(proof: Proof, contributors: Set[PeerId]) -> frozenset[PeerId]:
    """Who has done wrong, if `refusal` has nothing against the proof. contributors: to the sum, as in `refusal`."""
    if not isinstance(proof, Verdict):
        return frozenset([pledge_of(proof).peer])
    accused, says = accused_of(proof), says_of(proof)
    truth = settled(says, jury_of(contributors, accused))
    # Whoever else signs something false here is nobody: of such identities there is no end.
    known = contributors | {accused}
    return frozenset(peer for peer in known & says.keys() if truth is not None and says[peer] != truth)


def refusal(proof: Proof, contributors: Set[PeerId], verify: Verify) -> str:
    """Why it proves nothing, in words; "" if it does.

    Args:
        contributors: to the sum of a verdict; those that its commit names are enough.
    """
    if isinstance(proof, Pair):
        return _of_pair(proof, verify)
    if isinstance(proof, Missent):
        return _of_missent(proof, verify)
    pledge, work, sent, accused = proof.pledge, proof.work, proof.sent, accused_of(proof)
    if not proves(proof.path, work, pledge.work_root) if work is not None else proof.path:
        return "the work is not the one that was pledged"
    # A commit names so many at most: a list of another length is whole.
    known = contributors if len(contributors) != MAX_COUNTING else says_of(proof).keys()
    if pledge.peer not in known:
        return "the peer that signed its pledge is not among those who contributed"
    if sent is not None and not (work is not None and _answers(sent, pledge, work)):
        return "what was sent was made of something else than what was counted, so the two may differ"
    case, seen = case_of(pledge, work, sent), {accused}
    for finding in proof.findings:
        # The accused has its say by its pledge.
        if finding.peer in seen:
            return "one peer has two voices in it"
        seen.add(finding.peer)
        if finding.case != case:
            return "a finding is of another case"
    if settled(says_of(proof), jury_of(contributors, accused)) is None:
        return "no more than half of those who judge found the same, so it names nobody"
    wrong = odd(proof, contributors)
    if not wrong:
        return "all who judged found what the accused says, so nobody lied"
    # Signatures cost time. Those come first that nobody can have but from whoever is to be convicted.
    if sent is not None and not verify(accused, statement(sent), sent.signature):
        return "the accused has not signed what it sent"
    if not verify(pledge.peer, statement(pledge), pledge.signature):
        return "its peer has not signed that pledge"
    for finding in sorted(proof.findings, key=lambda finding: finding.peer not in wrong):
        if not verify(finding.peer, finding_statement(finding, pledge, proof.numerics, sent), finding.signature):
            return "a finding is not signed by its peer"
    return ""


def _of_pair(pair: Pair, verify: Verify) -> str:
    first, second = pair.first, pair.second
    if not all(verify(pledge.peer, statement(pledge), pledge.signature) for pledge in (first, second)):
        return "a pledge is not signed by its peer"
    if not contradict(first, second):
        return "an honest peer may have signed both pledges"
    return ""


def _of_missent(missent: Missent, verify: Verify) -> str:
    pledge, work, sent = missent.pledge, missent.work, missent.sent
    if (pledge.peer, pledge.stamp, work.index) != (sent.peer, sent.stamp, sent.index):
        return "its pledge and what was sent are not of one microbatch and one peer"
    # Who computes a microbatch twice, of two inputs, says so.
    if work.resent or sent.again:
        return "an honest peer may have sent something else, too"
    if counted_as(work, sent.kind) == sent.digest:
        return "what was sent is what was counted"
    if not proves(missent.path, work, pledge.work_root):
        return "the work is not the one that was pledged"
    if not verify(pledge.peer, statement(pledge), pledge.signature):
        return "the accused has not signed that pledge"
    if not verify(sent.peer, statement(sent), sent.signature):
        return "the accused has not signed what it sent"
    return ""


def _answers(sent: Sent, pledge: Pledge, work: WorkRecord) -> bool:
    """Is it the same microbatch of the same step and past, made of the same?"""
    return (sent.stamp, sent.index) == (pledge.stamp, work.index) and made_alike(sent, work)


def contradict(first: Pledge, second: Pledge) -> bool:
    """Does an honest process sign one of them at most? Of one sum in one round there is one pledge."""

    def about(pledge: Pledge) -> tuple[object, ...]:
        return pledge.peer, pledge.incarnation, pledge.stamp, pledge.id, pledge.digest

    return about(first) == about(second) and statement(first) != statement(second)
