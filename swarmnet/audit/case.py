"""Which peers a case shows to be at fault. Pure.

| a case holds | a peer is at fault if |
|---|---|
| rechecks | more than half of the verifiers found one value, and the peer signed another |
| `other` | one peer signed two different commitments to one aggregate in one round |
| `sent`, by the peer that committed to the work | the peer signed one result and sent another |

In the run the verifiers are the stage's voters and the suspect. In a file they are the contributors to the aggregate
and the suspect: the peer that signed the commitment also signed the list of contributors (`Pledge.shares`), so a reader
can check it without the run. Only in a case about `sent` another peer has signed that list.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

from swarmnet.ids import PeerId, Restart, Signer
from swarmnet.messages import MAX_COUNTING, Ban, Case, Pledge, Recheck, first_of
from swarmnet.pledge import WHOLE, counted_as, leaf, made_alike, proves, shares_of, whole_of
from swarmnet.quorum import quorum
from swarmnet.statement import statement

Verify = Callable[[PeerId, bytes, bytes], bool]
"""(peer, data, signature): did the peer sign the data?"""


def suspect_of(case: Case) -> PeerId:
    """The peer that did the disputed work."""
    # In a case of two commitments their signer alone is the suspect, whatever else a reporter puts into the case.
    return case.pledge.peer if case.sent is None or case.other is not None else case.sent.peer


def index_of(case: Case) -> int:
    """The microbatch, or WHOLE."""
    return WHOLE if case.work is None else case.work.index


def subject_of(case: Case) -> bytes:
    """32 bytes that stand for what the rechecks of a case are about."""
    return statement(case, without=("path", "rechecks", "contributions", "discarded"))


def claimed(case: Case) -> bytes:
    """The value that the suspect itself has signed: a correct recheck of correct work is equal to it."""
    if case.sent is not None:
        return case.sent.digest
    return whole_of(case.pledge.product) if case.work is None else leaf(case.work)


def recheck(case: Case, found: bytes, signer: Signer, me: PeerId) -> Recheck:
    """My signed recheck of a case."""
    mine = Recheck(me, found)
    return replace(mine, signature=signer.sign(statement(mine, subject_of(case))))


def is_signed(found: Recheck, case: Case, verify: Verify) -> bool:
    """Did its peer sign that recheck of that case?"""
    return verify(found.peer, statement(found, subject_of(case)), found.signature)


def needs_no_recheck(case: Case) -> bool:
    """Do two signatures of one peer decide the case?"""
    sent, work = case.sent, case.work
    if case.other is not None or sent is None or work is None:
        return case.other is not None
    # A replica that computes a microbatch twice, of two inputs, signs that it does: its signatures prove nothing then.
    return sent.peer == case.pledge.peer and not sent.again and not work.resent


def results(case: Case) -> dict[PeerId, bytes]:
    """The value that each peer has signed."""
    return {found.peer: found.found for found in case.rechecks} | {suspect_of(case): claimed(case)}


def ban_of(case: Case, peer: PeerId, restart: Restart) -> Ban:
    """The ban of a peer by a case."""
    # Which two signatures a replica has seen differs; each of such pairs proves the same.
    if needs_no_recheck(case):
        return Ban(peer, -1, bytes(32))
    # Of an earlier restart no aggregate is left in the weights.
    applied = peer == suspect_of(case) and case.pledge.stamp.restart == restart
    return Ban(peer, case.pledge.stamp.step if applied else -1, subject_of(case))


def contributors_in(case: Case) -> frozenset[PeerId]:
    """The contributors that the case names."""
    return frozenset(peer for peer, _, indexes in case.contributions if indexes)


def verifiers(case: Case, known: Set[PeerId]) -> frozenset[PeerId]:
    """The peers that decide the case. known: the stage's voters, or the contributors to the aggregate."""
    return first_of(known) | {suspect_of(case)}


def agreed(case: Case, known: Set[PeerId]) -> bytes | None:
    """The value that more than half of the verifiers have signed, or None.

    While fewer than half are Byzantine, one of those that agree is correct. Of two verifiers none can be at fault.
    """
    judges, values = verifiers(case, known), results(case)
    found = [values[peer] for peer in judges & values.keys()]
    if len(judges) < 3:
        return None
    return next((value for value in found if found.count(value) >= quorum(judges)), None)


def at_fault(case: Case, known: Set[PeerId]) -> frozenset[PeerId]:
    """The peers that the case proves at fault, if `refusal` has nothing against it. known: as of `verifiers`."""
    if needs_no_recheck(case):
        return frozenset([suspect_of(case)])
    truth, values = agreed(case, known), results(case)
    # Identities that took no part cost nothing: they are not named.
    judges = known | {suspect_of(case)}
    return frozenset(peer for peer in judges & values.keys() if truth is not None and values[peer] != truth)


def refusal(case: Case, contributors: Set[PeerId], verify: Verify) -> str:
    """Why the case proves no fault, in words; "" if it does."""
    pledge, work, sent = case.pledge, case.work, case.sent
    if case.other is not None:
        more = work or sent or case.path or case.rechecks
        return "it holds more than two commitments" if more else _of_two_commitments(pledge, case.other, verify)
    if reason := unrelated(case, verify):
        return reason
    if not needs_no_recheck(case):
        reason = _of_rechecks(case, contributors, verify)
    elif sent is not None and work is not None and counted_as(work, sent.kind) == sent.digest:
        reason = "the peer sent the result that it pledged"
    if not reason and not verify(pledge.peer, statement(pledge), pledge.signature):
        reason = "a commitment is not signed by its peer"
    return reason


def unrelated(case: Case, verify: Verify) -> str:
    """Why the work and the transfer of a case have nothing to do with its commitment, in words; "" if they have."""
    pledge, work, sent = case.pledge, case.work, case.sent
    if not proves(case.path, work, pledge.work_root) if work is not None else case.path:
        return "the work is not the one that was pledged"
    if sent is None:
        return ""
    same = work is not None and (sent.stamp, sent.index) == (pledge.stamp, work.index)
    if work is None or not same or not (needs_no_recheck(case) or made_alike(sent, work)):
        return "what was sent was made of something else than what was pledged"
    return "" if verify(sent.peer, statement(sent), sent.signature) else "the suspect has not signed what it sent"


def _of_rechecks(case: Case, contributors: Set[PeerId], verify: Verify) -> str:
    if case.contributions and shares_of(case.contributions, case.discarded) != case.pledge.shares:
        return "its list of contributors is not the one that the commitment was signed for"
    # A commit names so many at most: a list of another length is complete.
    known = contributors if len(contributors) != MAX_COUNTING else results(case).keys()
    if case.pledge.peer not in known:
        return "the peer that signed its commitment is not among the contributors"
    if len({found.peer for found in case.rechecks} - {suspect_of(case)}) < len(case.rechecks):
        return "one peer has two values in it"
    if agreed(case, contributors) is None:
        return "no more than half of the verifiers found the same value"
    wrong = at_fault(case, contributors)
    if not wrong:
        return "the verifiers found what the suspect has signed"
    # Signatures cost time: those of the peers at fault come first, since no one else can make them.
    ordered = sorted(case.rechecks, key=lambda found: found.peer not in wrong)
    return "" if all(is_signed(found, case, verify) for found in ordered) else "a recheck is not signed by its peer"


def _of_two_commitments(first: Pledge, second: Pledge, verify: Verify) -> str:
    if not all(verify(pledge.peer, statement(pledge), pledge.signature) for pledge in (first, second)):
        return "a commitment is not signed by its peer"
    return "" if contradict(first, second) else "a correct peer may have signed both commitments"


def contradict(first: Pledge, second: Pledge) -> bool:
    """Does a correct process sign at most one of these? It signs one commitment to one aggregate in one round."""

    def about(pledge: Pledge) -> tuple[object, ...]:
        return pledge.peer, pledge.incarnation, pledge.stamp, pledge.id, pledge.digest

    return about(first) == about(second) and statement(first) != statement(second)


def reason_of(case: Case, peer: PeerId, known: Set[PeerId] = frozenset()) -> str:
    """What `peer` did, in words."""
    step, suspect = f"step {case.pledge.stamp.step}", suspect_of(case)
    if case.other is not None:
        return f"{step}: signed two different commitments to one aggregate"
    if case.sent is not None and needs_no_recheck(case):
        return f"{step}: counted the {case.sent.kind} of microbatch {case.sent.index}, and sent another"
    if peer != suspect:
        what = f"work of ...{suspect[-8:]}"
    elif case.sent is not None:
        what = f"the {case.sent.kind} that it sent"
    else:
        what = "its contribution" if case.work is None else f"microbatch {case.work.index}"
    agree, number = count_of(case, known)
    return f"{step}: false result for {what}: {agree} of {number} verifiers found otherwise"


def count_of(case: Case, known: Set[PeerId]) -> tuple[int, int]:
    """How many verifiers agree, and how many there are."""
    judges, values, truth = verifiers(case, known), results(case), agreed(case, known)
    return sum(values.get(peer) == truth for peer in judges if truth is not None), len(judges)
