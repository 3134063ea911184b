"""What this replica signs of payloads that it hands to neighbour stages, and how it checks what they have signed.

In a run with audits every training payload between stages comes with a `Sent`: under its sender's name its digest, and
those of what it was made of; then, with it, what others have signed of those, down to the tokens, which the manifest
proves. So nothing false comes in without a peer's signature that this was made of something true, whichever replica
counts it. The receiver keeps all of them together with what it makes of it, and may present each later (`audit.cases`)
as a proof against what another replica of its peer's stage has counted.

An honest replica may compute a microbatch twice, and differently: of inputs of two senders, or on a state that was
replaced in between. Then it says so, on both sides: in the work, if what it counts is not all that it has sent
(`WorkRecord.resent`); in what it sends, if that is not what it has counted (`Sent.again`). So none of its works
contradicts anything that it has sent. A process that cannot know what was sent before it took its state over says both
of everything, until a sum that holds work of its own is applied, and in the step after that: no later one has a
work of its former process.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from swarmnet.bounds import LARGE_BYTES, Recent
from swarmnet.errors import BadMessage, PeerGone, Refused, RejectCode
from swarmnet.ids import PeerId, Signer
from swarmnet.messages import (
    AuditData,
    AuditRequest,
    Fetch,
    Fetched,
    Gradient,
    Packed,
    Process,
    Sent,
    Stamp,
    WorkRecord,
)
from swarmnet.pipeline.works import KEPT_STEPS, digest
from swarmnet.pledge import counted_as
from swarmnet.statement import statement

Kind = Literal["output", "answer"]

_KINDS: tuple[Kind, Kind] = "output", "answer"

NOTHING = digest(())
"""What an output has for a gradient, and the last stage's answer."""


class StagesKnown(Protocol):
    """What a replica knows of its own stage and of others."""

    def stamp(self, step: int) -> Stamp:
        """Of an open step, as in its commitment."""

    def allows(self, stamp: Stamp) -> bool:
        """May a replica of that stage compute that step with this header?"""

    def known(self, stage: int, peer: PeerId) -> bool:
        """May that peer serve that stage? If not, its record is read soon."""

    async def looked(self) -> None:
        """Return once records have been read again, or `settle_s` later."""


class Transfers:
    """The payloads of one replica.

    Args:
        known_stages: what this replica knows of stages.
        num_stages: of the run.
    """

    def __init__(self, me: PeerId, signer: Signer, known_stages: StagesKnown, num_stages: int) -> None:
        self.me, self.signer = me, signer
        self._known_stages, self._last = known_stages, num_stages - 1
        self._fresh_until = math.inf
        self._open: dict[int, StepTransfers] = {}
        # By statement and signature, the step. Invariant: of no step that is KEPT_STEPS or more before the newest one.
        self._verified: Recent[tuple[bytes, bytes], int] = Recent(1 << 13)

    # ------------------------------------------------------------ what I send

    def open(self, step: int) -> StepTransfers:
        """The step is open from now on."""
        self._open = {other: of for other, of in self._open.items() if not of.ended}
        # Payloads of an older step are neither received nor audited.
        self._verified.drop(lambda said, at: at <= step - KEPT_STEPS)
        self._open[step] = StepTransfers(self, self._known_stages.stamp(step))
        return self._open[step]

    def replaced(self) -> None:
        """The state is about to be replaced."""
        self._fresh_until = math.inf

    def applied(self, step: int) -> None:
        """An aggregate is applied that holds works of this process."""
        self._fresh_until = min(self._fresh_until, step + 1)

    def is_fresh(self, step: int) -> bool:
        """May this identity have sent something in that step that this process does not know?"""
        return step <= self._fresh_until

    # ------------------------------------------------------------ what others have sent

    async def fed(self, caller: PeerId, request: Process, payload: tuple[Packed, ...]) -> None:
        """Raise BadMessage(MALFORMED) unless the caller has signed that input, and others all that it was made of; of
        the first stage none is needed."""
        if request.stage > 0 and request.purpose == "train":
            try:
                await self._check_output(caller, request.stage - 1, request, payload, request.sents)
            except PeerGone as unknown:
                raise Refused(RejectCode.NOT_A_FEEDER, str(unknown)) from unknown

    async def answered(self, peer: PeerId, request: Process | Fetch, answer: Gradient | Fetched) -> None:
        """The same of an answer; tokens and evaluations are unsigned."""
        if isinstance(request, Fetch) and request.kind == "input":
            if request.stage >= 0:
                await self._check_output(peer, request.stage, request, answer.payload, answer.sents)
        elif isinstance(request, Fetch) or request.purpose == "train":
            step = self._open.get(request.step)
            tokens = None if step is None else step.tokens.get(request.index)
            found = _Expected(peer, request.stage, request.step, request.index, "answer")
            await self._check_once_known(found, await digested(answer.payload), tokens, answer.sents)

    def shown(self, request: AuditRequest, data: AuditData, tokens: bytes) -> None:
        """Raise BadMessage(MALFORMED) unless others have signed what that work was made of. tokens: their digest."""
        work = data.work
        for kind, where, own in _made_of(request.stage, work.input, work.gradient):
            first = next((s for s in data.sents if (s.kind, s.stamp.stage, s.digest) == (kind, where, own)), None)
            about = _Expected(first.peer if first is not None else request.peer, where, request.step, work.index, kind)
            sents = needed((first, *data.sents)) if first is not None else []
            self._check(about, own, tokens, sents)

    async def _check_output(
        self, peer: PeerId, stage: int, of: Process | Fetch, payload: tuple[Packed, ...], sents: Sequence[Sent]
    ) -> None:
        found = _Expected(peer, stage, of.step, of.index, "output")
        await self._check_once_known(found, await digested(payload[:-1]), digest(payload[:1]), sents)

    async def _check_once_known(
        self, found: _Expected, own: bytes, tokens: bytes | None, sents: Sequence[Sent]
    ) -> None:
        """`_check`, once more after a look if a signer is not known here.

        Mostly it serves since a moment ago. To refuse would have the microbatch computed again elsewhere.
        """
        try:
            self._check(found, own, tokens, sents)
        except PeerGone:
            await self._known_stages.looked()
            self._check(found, own, tokens, sents)

    def _check(self, found: _Expected, own: bytes, tokens: bytes | None, sents: Sequence[Sent]) -> None:
        """Raise unless the first of these is of that payload, and the others of what that was made of.

        tokens: their digest; None: not known here.
        """
        if not sents or _about(sents[0]) != found:
            raise _refused("its sender has not signed it", found)
        if sents[0].digest != own:
            raise _refused("its sender has signed another one", found)
        # Views differ for a moment: no peer is at fault yet. One look is for all signers that are not known.
        if [sent for sent in sents if not self._known_stages.known(sent.stamp.stage, sent.peer)]:
            raise PeerGone("it has a signature of a peer that is not known here", peer=found.peer)
        for sent in sents:
            stage = sent.stamp.stage
            of_another = (sent.stamp.step, sent.index) != (found.step, found.microbatch)
            if of_another or not self._known_stages.allows(sent.stamp):
                raise _refused("what it was made of is of another step or past", found)
            if stage == 0 and tokens not in (None, sent.input):
                raise _refused("it was made of other tokens", found)
            if (sent.kind == "answer" and stage < self._last) == (sent.gradient == NOTHING):
                raise _refused("it was made of something else", found)
            said = statement(sent), sent.signature
            if said not in self._verified:
                if not self.signer.verify(sent.peer, *said):
                    raise _refused("a signature is false", found)
                self._verified[said] = found.step
        # No more than that either: it is kept, and told to others.
        if needed(sents) != [*sents]:
            raise _refused("the signatures of its inputs are missing", found)


def needed(sents: Sequence[Sent]) -> list[Sent]:
    """The first, and those of the others that it was made of; fewer if a signature is missing."""
    known = {(sent.kind, sent.stamp.stage, sent.digest): sent for sent in reversed(sents)}
    found = [sents[0]]
    for sent in found:
        of = _made_of(sent.stamp.stage, sent.input, sent.gradient)
        if any(each not in known for each in of):
            return []
        found += [known[each] for each in of if known[each] not in found]
    return found


def _made_of(stage: int, given: bytes, gradient: bytes) -> list[tuple[Kind, int, bytes]]:
    """What others must have signed of that input, but of tokens, and of that gradient: kind, stage and digest."""
    of: list[tuple[Kind, int, bytes]] = [("output", stage - 1, given)] if stage else []
    return of + ([("answer", stage + 1, gradient)] if gradient != NOTHING else [])


@dataclass(frozen=True, slots=True)
class Signed:
    """A payload, and what was signed of it, if it was."""

    payload: Sequence[Packed]
    sents: tuple[Sent, ...] = ()

    async def digest(self) -> bytes:
        """As in a `WorkRecord`. What was signed has it already."""
        return self.sents[0].digest if self.sents else await digested(self.payload)


class StepTransfers:
    """What is sent of one open step, on one state. ended: the step is over, or the state replaced. tokens: their
    digests, by index, of what was sent."""

    def __init__(self, of: Transfers, stamp: Stamp) -> None:
        self._of, self._stamp, self.ended = of, stamp, False
        self.tokens: dict[int, bytes] = {}
        self._sent: dict[tuple[Kind, int], set[bytes]] = {}
        self._counted: dict[tuple[Kind, int], set[bytes]] = {}  # in works that do not say `resent`

    async def sign(
        self, index: int, kind: Kind, payload: Sequence[Packed], made_of: Signed, gradient: Signed | None = None
    ) -> tuple[Sent, ...]:
        """My word for it: from now on I stand for having sent it. After it those for what it was made of.

        Raises Refused(STALE) if the step has ended.
        """
        input_digest, before = await made_of.digest(), made_of.sents
        over = NOTHING if gradient is None else await gradient.digest()
        sent = self.signed(index, kind, await digested(payload), input_digest, over)
        if kind == "output":
            self.tokens[index] = next((each.input for each in before if each.stamp.stage == 0), input_digest)
        return tuple(needed((sent, *before, *(gradient.sents if gradient is not None else ()))))

    def signed(self, index: int, kind: Kind, found: bytes, made_of: bytes, gradient: bytes) -> Sent:
        """The same of its digest, and of those of input and gradient; my word alone."""
        if self.ended:
            raise Refused(RejectCode.STALE, "the step was applied")
        self._sent.setdefault((kind, index), set()).add(found)
        again = self._of.is_fresh(self._stamp.step) or bool(self._counted.get((kind, index), set()) - {found})
        sent = Sent(self._stamp, index, kind, found, self._of.me, made_of, gradient, again)
        return replace(sent, signature=self._of.signer.sign(statement(sent)))

    def counted(self, record: WorkRecord) -> WorkRecord:
        """The record as it is pledged: it is counted now."""
        made: list[tuple[Kind, bytes]] = [(kind, counted_as(record, kind)) for kind in _KINDS]
        others = any(self._sent.get((kind, record.index), set()) - {found} for kind, found in made)
        if others or self._of.is_fresh(self._stamp.step):
            return replace(record, resent=True)
        for kind, found in made:
            self._counted.setdefault((kind, record.index), set()).add(found)
        return record


class _Expected(NamedTuple):
    """The expected signer, and the subject of the signature."""

    peer: PeerId
    stage: int
    step: int
    microbatch: int
    kind: Kind


def _about(sent: Sent) -> _Expected:
    return _Expected(sent.peer, sent.stamp.stage, sent.stamp.step, sent.index, sent.kind)


def _refused(why: str, found: _Expected) -> BadMessage:
    return BadMessage(RejectCode.MALFORMED, why, peer=found.peer, index=found.microbatch)


async def digested(payload: Sequence[Packed]) -> bytes:
    """Its digest, made in a thread if that takes long."""
    large = sum(packed.num_bytes for packed in payload) > LARGE_BYTES
    return await asyncio.to_thread(digest, payload) if large else digest(payload)
