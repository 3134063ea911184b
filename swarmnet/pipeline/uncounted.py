"""What a replica computes or hands out and does not count: work for repairs of other stages (rule 6), evaluations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from swarmnet.errors import DeviceFull, Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Fetch, Fetched, Gradient, Packed, Process, Rejected, Sent
from swarmnet.pipeline.context import PipelineContext
from swarmnet.pipeline.recovery import Keepalive, Memo
from swarmnet.pipeline.slots import Slots
from swarmnet.pipeline.transfers import Signed, StepTransfers
from swarmnet.stage.seams import Stash
from swarmnet.transport import ReadPayload


class UncountedWork:
    """Answers `Fetch`, and `Process` with purpose "eval", for one open step of one (peer, stage)."""

    def __init__(self, context: PipelineContext, memo: Memo, transfers: StepTransfers | None) -> None:
        self._context, self._memo, self._transfers = context, memo, transfers
        self._reserved = Slots(1)

    async def fetch(self, request: Fetch) -> AsyncGenerator[Answer, None]:
        """Hand out what is remembered; recompute a missing input of the next stage unless only a copy is wanted."""
        if request.kind == "gradient":
            answer = self._memo.answer(request.index)
            if answer is None:
                yield Rejected(RejectCode.NOT_FOUND, "not memoised")
            else:
                yield Accepted()  # a sign of life, because the payload may take long on a slow line
                yield Fetched(answer.payload, answer.loss_sum, answer.num_tokens, answer.sents)
            return
        if request.stage == -1:
            tokens = self._context.recovery.own_tokens(request.step, request.index)
            if tokens is None:
                yield Rejected(RejectCode.NOT_FOUND, "no data here")
                return
            yield Accepted()
            yield Fetched(tokens)
            return
        output = self._memo.output(request.index)
        if output is None and request.cached:
            yield Rejected(RejectCode.NOT_FOUND, "not memoised")
            return
        if output is None:
            yield Accepted()
            recomputed: Keepalive[Fetched] = Keepalive(self._context.spawn, self._recompute(request))
            async for sign in recomputed.signs(self._context.limits.running_s):
                yield sign
            yield recomputed.result()
            return
        yield Accepted()
        yield Fetched(output, sents=self._memo.sents(request.index))

    async def evaluate(self, caller: PeerId, request: Process, read: ReadPayload) -> AsyncGenerator[Answer, None]:
        """Forward only, here and in all later stages: claims nothing, is not memoised."""
        yield Accepted()
        payload = await self._context.receive(caller, request, read)
        stash = await self._forward(request, payload)
        if self._context.caller is None:
            yield Gradient(stash.loss_sum, stash.num_tokens, stash.compute_s)
            return
        stage = self._context.stage + 1
        onward = Process(request.step, stage, request.index, purpose="eval", avoid=request.avoid)
        rest: Keepalive[Gradient] = Keepalive(self._context.spawn, self._context.caller.process(onward, stash.output))
        async for sign in rest.signs(self._context.limits.running_s):
            yield sign
        yield replace(rest.result(), compute_s=stash.compute_s, payload=())

    async def _forward(self, request: Process | Fetch, inputs: Sequence[Packed]) -> Stash:
        try:
            return await self._context.engine.forward(request.step, request.index, inputs, train=False)
        except DeviceFull as full:
            raise Refused(RejectCode.NOT_READY, str(full)) from None

    async def _recompute(self, request: Fetch) -> Fetched:
        """Forward only, in a slot of its own so that a full replica can still repair others (rule 7)."""
        await self._reserved.take()
        try:
            found = await self._context.recovery.input(request.step, request.index)
            *inputs, proof = found.payload
            stash = await self._forward(request, inputs)
            output, sents = (*stash.output, proof), tuple[Sent, ...]()
            if self._transfers is not None:
                made_of = Signed(inputs, found.sents)
                sents = await self._transfers.sign(request.index, "output", stash.output, made_of)
            self._memo.keep_output(request.index, output, sents)
            return Fetched(output, sents=sents)
        finally:
            self._reserved.give()
