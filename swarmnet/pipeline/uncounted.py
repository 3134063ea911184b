"""What a replica computes or hands out without counting anything: repairs of other stages, and evaluation.

Rule 6 of docs/protocol.md. The step is the caller's concern: everything here is of one step.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

from swarmnet.errors import RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Fetch, Fetched, Gradient, Packed, Process, Rejected
from swarmnet.pipeline.caller import Caller
from swarmnet.pipeline.memo import Memo
from swarmnet.pipeline.relay import Relay, Spawn
from swarmnet.pipeline.sources import Sources
from swarmnet.pipeline.work import Slots
from swarmnet.stage.engine import Engine
from swarmnet.transport import ReadPayload


class Uncounted:
    """Answers `Fetch`, and `Process` with purpose "eval", for one open step of one (peer, stage)."""

    def __init__(
        self,
        stage: int,
        *,
        engine: Engine,
        memo: Memo,
        caller: Caller | None,
        sources: Sources,
        receive: Callable[[PeerId, Process, ReadPayload], Awaitable[tuple[Packed, ...]]],
        spawn: Spawn,
        running_s: float,
    ) -> None:
        self._stage, self._engine, self._memo = stage, engine, memo
        self._caller, self._sources, self._receive = caller, sources, receive
        self._spawn, self._running_s = spawn, running_s
        self._reserved = Slots(1)

    async def fetch(self, request: Fetch) -> AsyncGenerator[Answer, None]:
        """Hand out what is remembered; recompute a missing input of the next stage unless only a copy is wanted."""
        if request.kind == "gradient":
            answer = self._memo.answer(request.index)
            if answer is None:
                yield Rejected(RejectCode.NOT_FOUND, "not memoised")
            else:
                yield Fetched(answer.payload, answer.loss_sum, answer.num_tokens)
            return
        if request.stage == -1:
            tokens = self._sources.own_tokens(request.step, request.index)
            yield Fetched(tokens) if tokens is not None else Rejected(RejectCode.NOT_FOUND, "no data here")
            return
        output = self._memo.output(request.index)
        if output is None and request.cached:
            yield Rejected(RejectCode.NOT_FOUND, "not memoised")
            return
        if output is None:
            yield Accepted()
            recomputed: Relay[tuple[Packed, ...]] = Relay(self._spawn, self._recompute(request))
            async for sign in recomputed.signs(self._running_s):
                yield sign
            output = recomputed.result()
        yield Fetched(output)

    async def evaluate(self, caller: PeerId, request: Process, read: ReadPayload) -> AsyncGenerator[Answer, None]:
        """Forward only, here and in all later stages: claims nothing, is not memoised."""
        yield Accepted()
        payload = await self._receive(caller, request, read)
        stash = await self._engine.forward(request.step, request.index, payload, train=False)
        if self._caller is None:
            yield Gradient(stash.loss_sum, stash.num_tokens, stash.compute_s)
            return
        onward = Process(request.step, self._stage + 1, request.index, purpose="eval")
        rest: Relay[Gradient] = Relay(self._spawn, self._caller.process(onward, stash.output))
        async for sign in rest.signs(self._running_s):
            yield sign
        yield replace(rest.result(), compute_s=stash.compute_s, payload=())

    async def _recompute(self, request: Fetch) -> tuple[Packed, ...]:
        """Forward only, in a slot of its own so that a full replica can still repair others (rule 7)."""
        await self._reserved.take()
        try:
            *inputs, proof = await self._sources.input(request.step, request.index)
            stash = await self._engine.forward(request.step, request.index, inputs, train=False)
            output = (*stash.output, proof)
            self._memo.keep_output(request.index, output)
            return output
        finally:
            self._reserved.give()
