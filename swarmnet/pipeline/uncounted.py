"""What a replica computes or hands out and does not count: work for repairs of other stages (rule 6), evaluations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swarmnet.errors import DeviceFull, Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Fetch, Fetched, Gradient, Packed, Process, Rejected, Running, Sent
from swarmnet.pipeline.recovery import Memo, Message, kept_alive
from swarmnet.pipeline.transfers import Signed, StepTransfers
from swarmnet.stage.seams import Stash
from swarmnet.transport import ReadPayload

if TYPE_CHECKING:
    from swarmnet.pipeline.execution import Execution


class UncountedWork:
    """Answers `Fetch`, and `Process` with purpose "eval", for one open step of one (peer, stage)."""

    def __init__(self, execution: Execution, memo: Memo, transfers: StepTransfers | None) -> None:
        self._execution, self._memo, self._transfers = execution, memo, transfers
        self._reserved = asyncio.Lock()

    async def fetch(self, request: Fetch) -> AsyncGenerator[Answer, None]:
        """Hand out what is remembered; recompute a missing input of the next stage unless only a copy is wanted."""
        kept, recompute = self._kept(request), request.kind == "input" and request.stage >= 0 and not request.cached
        if kept is None and not recompute:
            yield Rejected(RejectCode.NOT_FOUND, "no data here" if request.stage == -1 else "not memoised")
            return
        yield Accepted()  # a sign of life, because the payload may take long on a slow line
        if kept is not None:
            yield kept
            return
        async for answer in self._keep_alive(self._recompute(request)):
            yield answer

    def _kept(self, request: Fetch) -> Fetched | None:
        if request.kind == "gradient":
            if (answer := self._memo.answer(request.index)) is None:
                return None
            return Fetched(answer.payload, answer.loss_sum, answer.num_tokens, answer.sents)
        if request.stage == -1:
            tokens = self._execution.host.tokens(request.step, request.index)
            return None if tokens is None else Fetched(tokens)
        return self._memo.output(request.index)

    async def evaluate(self, caller: PeerId, request: Process, read: ReadPayload) -> AsyncGenerator[Answer, None]:
        """Forward only, here and in all later stages: claims nothing, is not memoised."""
        yield Accepted()
        payload = await self._execution.receive(caller, request, read)
        stash = await self._forward(request, payload)
        if self._execution.caller is None:
            yield Gradient(stash.loss_sum, stash.num_tokens, stash.compute_s)
            return
        stage = self._execution.stage + 1
        onward = Process(request.step, stage, request.index, purpose="eval", avoid=request.avoid)
        async for answer in self._keep_alive(self._execution.caller.process(onward, stash.output)):
            yield answer if isinstance(answer, Running) else replace(answer, compute_s=stash.compute_s, payload=())

    def _keep_alive(self, work: Coroutine[Any, Any, Message]) -> AsyncGenerator[Running | Message, None]:
        return kept_alive(self._execution.host.spawn, work, self._execution.host.timers.beat_s)

    async def _forward(self, request: Process | Fetch, inputs: Sequence[Packed]) -> Stash:
        try:
            return await self._execution.engine.forward(request.step, request.index, inputs, train=False)
        except DeviceFull as full:
            raise Refused(RejectCode.NOT_READY, str(full)) from None

    async def _recompute(self, request: Fetch) -> Fetched:
        """Forward only, in a slot of its own so that a full replica can still repair others (rule 7)."""
        async with self._reserved:
            given = await self._execution.recovery.input(request.step, request.index)
            *inputs, proof = given.payload
            stash = await self._forward(request, inputs)
            sents: tuple[Sent, ...] = ()
            if self._transfers is not None:
                made_of = Signed(inputs, given.sents)
                sents = await self._transfers.sign(request.index, "output", stash.output, made_of)
            output = Fetched((*stash.output, proof), sents=sents)
            self._memo.keep(request.index, output)
            return output
