"""What the open steps of one replica have in common: engine, neighbours, limits, and whether anything new is begun."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Busy, Packed, Process, Rejected
from swarmnet.pipeline.caller import Caller
from swarmnet.pipeline.payload import InputCheck, OnBadInput
from swarmnet.pipeline.relay import Spawn
from swarmnet.pipeline.sources import Sources
from swarmnet.pipeline.work import Slots
from swarmnet.stage.engine import Engine, Stash
from swarmnet.transport import ReadPayload

_AFTER_LEAVING_S = 1.0
"""When to ask a replica again that is about to leave: it may be the last one then, and serve on."""


_EVAL_UPLOAD_S = 30.0
"""How long an evaluation's input may take: anybody may ask for one, and it holds the only slot of its kind."""


class Claims(Protocol):
    """What the step machine does for the pipeline."""

    def claim(self, step: int, index: int) -> None:
        """Ask to count (step, index); the word comes back through `Execution.granted` or `Execution.owned`."""
        ...

    def withdraw(self, step: int, index: int) -> None:
        """The work on (step, index) was dropped."""
        ...

    def added(self, stash: Stash) -> None:
        """The weight gradient of this microbatch was added under `stash.voids`."""
        ...

    def non_finite(self, step: int, index: int) -> None:
        """(step, index) gave a non-finite value here or further on, from finite input."""
        ...


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """slots: microbatches in flight, of each open step. running_s: pause between signs of life to callers, and how long
    a call that is ahead of us may wait. wait_s: how long finished work waits for the keeper's word before its stash is
    dropped. memo_bytes: of each open step."""

    slots: int
    running_s: float
    wait_s: float
    memo_bytes: int

    @property
    def door_s(self) -> float:
        """How long a call waits for a slot before it is told to come back: longer, and callers leave a replica that
        is stuck behind a hung neighbour too late."""
        return self.wait_s / 4


@dataclass(slots=True, eq=False)
class PipelineContext:
    """What the open steps of one replica share.

    version: of its weights, -1: none. executions: forwards run for training.
    leaving: nothing new is begun for callers; what is at work here is finished. evals: one evaluation at a time, beside
    the slots of the steps. sending: inputs that each caller is uploading.
    """

    stage: int
    num_stages: int
    engine: Engine
    claims: Claims
    caller: Caller | None
    sources: Sources
    check: InputCheck
    limits: PipelineLimits
    spawn: Spawn
    on_bad_input: OnBadInput
    version: int = -1
    leaving: bool = False
    executions: int = 0
    evals: Slots = field(default_factory=lambda: Slots(1))
    sending: Counter[PeerId] = field(default_factory=Counter)

    def may_send(self, caller: PeerId) -> bool:
        """May this caller upload one more input? As many at once as there are slots: what is received takes memory."""
        return self.sending[caller] < self.limits.slots * (1 + self.engine.delay.most)

    def look(self, caller: PeerId, request: Process, read: ReadPayload) -> None:
        """Raise BadMessage, and name whose input it is, unless what the caller declares can be this stage's input."""
        try:
            self.check.declared(request, read.declared)
        except BadMessage as error:
            self.on_bad_input(caller, request.step, request.index, error)
            raise

    async def receive(self, caller: PeerId, request: Process, read: ReadPayload) -> tuple[Packed, ...]:
        """The caller's input, checked. Raises BadMessage, and names whose input it is."""
        try:
            payload = await self._read(request, read)
            self.check(request, payload)
        except BadMessage as error:
            self.on_bad_input(caller, request.step, request.index, error)
            raise
        return payload

    @staticmethod
    async def _read(request: Process, read: ReadPayload) -> tuple[Packed, ...]:
        try:
            async with asyncio.timeout(_EVAL_UPLOAD_S if request.purpose == "eval" else None):
                return await read()
        except TimeoutError:
            raise BadMessage(
                RejectCode.TOO_LARGE, f"the input of an evaluation did not come within {_EVAL_UPLOAD_S:.0f} s"
            ) from None

    def wrong_step(self, step: int) -> Answer:
        """What a call gets whose step is not open here."""
        if 0 <= step < self.version:
            return Rejected(RejectCode.STALE, f"step {step} is applied", self.version)
        return self.busy()

    def busy(self) -> Busy:
        """Come back later."""
        if self.leaving:
            return Busy(_AFTER_LEAVING_S, self.version)
        return Busy(0.05 if self.version >= 0 else 0.1, self.version)
