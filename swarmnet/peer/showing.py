"""What a replica shows of its work to those who look into it, and what it should be by what they compute again."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING

from swarmnet.errors import Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, AuditData, AuditRequest, Sent, WorkRecord
from swarmnet.pipeline.recovery import Keepalive
from swarmnet.pipeline.works import digest, opened
from swarmnet.stage.seams import Recomputed

if TYPE_CHECKING:
    from swarmnet.peer.peer import Peer
    from swarmnet.peer.replica import Replica


async def answered(peer: Peer, replica: Replica, caller: PeerId, request: AuditRequest) -> AsyncGenerator[Answer, None]:
    """Answer a mate who looks into work of this stage. Raises Refused."""
    # Whoever is no mate has no weights to compute it again with.
    if not replica.is_live(caller, replica.stage):
        raise Refused(RejectCode.NOT_A_FEEDER, "you are not known here as a replica of this stage")
    try:
        shown = replica.execution.audit(caller, request, me=peer.me)
        if not request.made:
            yield shown
            return
        again = Keepalive(peer.spawn, _made(replica, request, shown))
        async for sign in again.signs(peer.timers.heartbeat_s):
            yield sign
        yield again.result()
    except Refused as refused:
        if refused.code is RejectCode.TOO_OFTEN:
            replica.name_once("asks_too_often", caller, {"step": request.step, "index": request.index})
        raise


async def _made(replica: Replica, request: AuditRequest, shown: AuditData) -> AuditData:
    """What this replica made then. Raises Refused(NOT_FOUND) if it makes another thing now."""
    inputs, gradient = opened(shown, lambda payload: None)
    again = await replica.compute.recompute(request.step, request.index, inputs, gradient)
    output = next((made for made in again.outputs if digest(made) == shown.work.output), None)
    answer = next((made for made in again.answers if digest(made) == shown.work.answer), None)
    if output is None or answer is None:
        raise Refused(RejectCode.NOT_FOUND, "it was made otherwise", step=request.step, index=request.index)
    return replace(shown, payload=(*output, *answer))


def sent_again(sent: Sent, again: Recomputed) -> bytes:
    """Its digest as it should be, likewise."""
    found = list(map(digest, again.outputs if sent.kind == "output" else again.answers))
    return sent.digest if sent.digest in found else found[0]


def made_again(work: WorkRecord, again: Recomputed) -> WorkRecord:
    """The record as it should be: where a run has codecs to choose from, in the one that was chosen, if one fits."""
    outputs, answers = list(map(digest, again.outputs)), list(map(digest, again.answers))
    return replace(
        work,
        output=work.output if work.output in outputs else outputs[0],
        answer=work.answer if work.answer in answers else answers[0],
        loss_sum=again.loss_sum,
        num_tokens=again.num_tokens,
    )
