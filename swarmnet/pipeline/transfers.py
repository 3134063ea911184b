"""What this replica signs of payloads that it hands to neighbour stages, and how it checks what they have signed.

In a run with audits every training payload between stages comes with a `Sent`: its digest, under its sender's name. The
receiver keeps that beside what it makes of it, and may show it later (`audit.court`): then it is held against what the
sender has pledged to have counted.

An honest replica may compute a microbatch twice, and differently: of inputs of two senders, or on a state that was
replaced in between. Then it says so, on both sides: in the work, if what it counts is not all that it has sent
(`WorkRecord.resent`); in what it sends, if that is not what it has counted (`Sent.again`). So none of its works
contradicts anything that it has sent. A process that cannot know what was sent before it took its state over says both
of everything, until a sum that holds work of its own is applied, and in the step after that: whoever it was before is
in no later one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Literal

from swarmnet.audit.pledge import counted_as, sent_statement
from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.ids import PeerId, Signer
from swarmnet.messages import Fetch, Fetched, Gradient, Packed, Process, Sent, Stamp, WorkRecord
from swarmnet.pipeline.works import LARGE, WorkBook, digest

Kind = Literal["output", "answer"]

_KINDS: tuple[Kind, Kind] = "output", "answer"


class Transfers:
    """The payloads of one replica. stamp(step): of an open step, as in what it pledges; works: what it counted."""

    def __init__(self, me: PeerId, signer: Signer, stamp: Callable[[int], Stamp], works: WorkBook) -> None:
        self.me, self.signer, self.works = me, signer, works
        self._stamp = stamp
        self._fresh_until = math.inf

    # ------------------------------------------------------------ what I send

    def open(self, step: int) -> StepTransfers:
        """The step is open from now on."""
        return StepTransfers(self, self._stamp(step))

    def replaced(self) -> None:
        """The state is about to be replaced."""
        self._fresh_until = math.inf

    def applied(self, step: int, mine: Set[int]) -> None:
        """A sum is applied that holds these indexes of mine."""
        # What another process of this identity has counted is not among my works.
        if mine and mine == self.works.records(step).keys():
            self._fresh_until = min(self._fresh_until, step + 1)

    def is_fresh(self, step: int) -> bool:
        """May this identity have sent something in that step that this process does not know?"""
        return step <= self._fresh_until

    # ------------------------------------------------------------ what others have sent

    async def fed(self, caller: PeerId, request: Process, payload: tuple[Packed, ...]) -> None:
        """Raise BadMessage(MALFORMED) unless the caller has signed that input; of the first stage nobody need."""
        if request.stage > 0 and request.purpose == "train":
            await self._check(caller, request.stage - 1, request, "output", payload[:-1], request.sent)

    async def answered(self, peer: PeerId, request: Process, answer: Gradient) -> None:
        """The same of an answer."""
        if request.purpose == "train":
            await self._check(peer, request.stage, request, "answer", answer.payload, answer.sent)

    async def fetched(self, peer: PeerId, request: Fetch, answer: Fetched) -> None:
        """The same of what was fetched."""
        if request.kind == "gradient":
            await self._check(peer, request.stage, request, "answer", answer.payload, answer.sent)
        elif request.stage >= 0:
            await self._check(peer, request.stage, request, "output", answer.payload[:-1], answer.sent)

    async def _check(
        self,
        peer: PeerId,
        stage: int,
        request: Process | Fetch,
        kind: Kind,
        payload: tuple[Packed, ...],
        sent: Sent | None,
    ) -> None:
        about = peer, stage, request.step, request.index, kind
        if sent is None or (sent.peer, sent.stamp.stage, sent.stamp.step, sent.index, sent.kind) != about:
            raise BadMessage(RejectCode.MALFORMED, "its sender has not signed it", peer=peer, index=request.index)
        if sent.digest != await digested(payload):
            raise BadMessage(RejectCode.MALFORMED, "its sender has signed another one", peer=peer, index=request.index)
        if not self.signer.verify(peer, sent_statement(sent), sent.signature):
            raise BadMessage(RejectCode.MALFORMED, "its sender's signature is false", peer=peer, index=request.index)


class StepTransfers:
    """What is sent of one open step, on one state. ended: the step is over, or the state replaced."""

    def __init__(self, of: Transfers, stamp: Stamp) -> None:
        self._of, self._stamp, self.ended = of, stamp, False
        self._sent: dict[tuple[Kind, int], set[bytes]] = {}
        self._counted: dict[tuple[Kind, int], set[bytes]] = {}  # in works that do not say `resent`

    async def sign(self, index: int, kind: Kind, payload: tuple[Packed, ...]) -> Sent:
        """My word for it: from now on I stand for having sent it. Raises Refused(STALE) if the step has ended."""
        return self.signed(index, kind, await digested(payload))

    def signed(self, index: int, kind: Kind, found: bytes) -> Sent:
        """The same of its digest."""
        if self.ended:
            raise Refused(RejectCode.STALE, "the step was applied")
        self._sent.setdefault((kind, index), set()).add(found)
        again = self._of.is_fresh(self._stamp.step) or bool(self._counted.get((kind, index), set()) - {found})
        sent = Sent(self._stamp, index, kind, found, self._of.me, again)
        return replace(sent, signature=self._of.signer.sign(sent_statement(sent)))

    def counted(self, record: WorkRecord) -> WorkRecord:
        """The record as it is pledged: it is counted now."""
        made: list[tuple[Kind, bytes]] = [(kind, counted_as(record, kind)) for kind in _KINDS]
        others = any(self._sent.get((kind, record.index), set()) - {found} for kind, found in made)
        if others or self._of.is_fresh(self._stamp.step):
            return replace(record, resent=True)
        for kind, found in made:
            self._counted.setdefault((kind, record.index), set()).add(found)
        return record


async def digested(payload: Sequence[Packed]) -> bytes:
    """Its digest, made in a thread if that takes long."""
    large = sum(packed.num_bytes for packed in payload) >= LARGE
    return await asyncio.to_thread(digest, payload) if large else digest(payload)
