"""What the open steps of one replica share: its limits, its engine, whom it asks, and what it has seen.

How many microbatches it holds follows from what was measured (`pipeline.depth`), and falls when the device is full.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from swarmnet.errors import BadMessage, DeviceFull, Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Busy, Packed, Process, Rejected
from swarmnet.pipeline.caller import Caller
from swarmnet.pipeline.depth import Depth
from swarmnet.pipeline.inputs import InputCheck, OnBadInput
from swarmnet.pipeline.recovery import Recovery, Spawn
from swarmnet.pipeline.slots import Slots
from swarmnet.pipeline.transfers import Transfers
from swarmnet.pipeline.works import ShownWorks, WorkBook
from swarmnet.stage.seams import Compute, Stash
from swarmnet.telemetry.spans import SpanBook
from swarmnet.transport import ReadPayload

_AFTER_LEAVING_S = 1.0
"""A caller asks a leaving replica again after this time: it may be the last one then, and serve on."""

_HOPELESS = 3
"""So often in a row a microbatch may find the device full where there is one slot."""

_EVAL_UPLOAD_S = 30.0
"""How long an evaluation's input may take: anybody may ask for one, and it holds the only slot of its kind."""


class Claims(Protocol):
    """What the step machine does for the pipeline."""

    def claim(self, step: int, index: int) -> None:
        """Ask to contribute (step, index). `Execution.granted` or `Execution.owned_elsewhere` has the answer."""
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
    """Limits of one replica's pipeline.

    slots: microbatches in flight, for each open step; `PipelineContext.depth` may change it. running_s: pause between
    signs of life to callers, and the wait of a call for a later step. wait_s: how long finished work waits for the
    leader's word before its stash is dropped. memo_bytes: of the memo, for each open step.
    """

    slots: int
    running_s: float
    wait_s: float
    memo_bytes: int

    @property
    def door_s(self) -> float:
        """How long a call waits for a slot before it must come back. With a longer wait, callers would leave a replica
        behind a hung neighbour too late."""
        return self.wait_s / 4


@dataclass(slots=True, eq=False)
class PipelineContext:
    """What the open steps of one replica share.

    version: of its weights, -1: none. executions: forwards run for training. computed, busy_s: microbatches computed to
    the end, and the seconds that took.
    on_full(slots, reason): the device had no memory for a microbatch; so many slots are left.
    depth: how many slots there are; None: as many as `limits` says. share(): of a step's microbatches, about mine.
    leaving: nothing new is begun for callers; what is at work here is finished. evals: one evaluation at a time, beside
    the slots of the steps. sending: inputs that each caller is uploading. spans: told how long each thing took.
    works: what was counted here in the last steps; None: nobody looks into it. transfers: signs and checks payloads;
    None: nobody signs. shown: what others have shown of theirs.
    """

    stage: int
    num_stages: int
    microbatches: int
    engine: Compute
    claims: Claims
    caller: Caller | None
    recovery: Recovery
    check: InputCheck
    limits: PipelineLimits
    spawn: Spawn
    on_bad_input: OnBadInput
    on_full: Callable[[int, str], None]
    depth: Depth | None = None
    share: Callable[[], float] = lambda: math.inf
    version: int = -1
    leaving: bool = False
    executions: int = 0
    computed: int = 0
    busy_s: float = 0.0
    full_in_a_row: int = 0
    evals: Slots = field(default_factory=lambda: Slots(1))
    sending: Counter[PeerId] = field(default_factory=Counter)
    spans: SpanBook = field(default_factory=SpanBook)
    works: WorkBook | None = None
    transfers: Transfers | None = None
    shown: ShownWorks = field(default_factory=lambda: ShownWorks(0))

    def measure(self) -> None:
        """As many slots as what was measured asks for."""
        if self.depth is not None:
            self.limits = replace(self.limits, slots=self.depth.slots(self.share()))

    def full(self, error: DeviceFull) -> None:
        """The device had no memory for a microbatch: one slot less. Raises `error` if one slot is too many.

        Not at the first time: the memory of microbatches that were dropped for it comes back a moment later.
        """
        self.full_in_a_row += 1
        if self.limits.slots == 1 and self.full_in_a_row > _HOPELESS:
            raise error
        most = max(self.limits.slots - 1, 1)
        if self.depth is None:
            self.limits = replace(self.limits, slots=most)
        else:
            self.depth.most = most
            self.measure()
        self.on_full(most, str(error))

    def may_send(self, caller: PeerId) -> bool:
        """May this caller upload one more input? Uploads take memory: at most as many at once as slots."""
        return self.sending[caller] < self.limits.slots * (1 + self.engine.delay.most)

    def look(self, caller: PeerId, request: Process, read: ReadPayload) -> None:
        """Raise BadMessage, and log the caller, unless the declared layout can be this stage's input."""
        try:
            self.check.declared(request, read.declared)
        except BadMessage as error:
            self.on_bad_input(caller, request.step, request.index, error)
            raise

    async def receive(self, caller: PeerId, request: Process, read: ReadPayload) -> tuple[Packed, ...]:
        """The caller's input, checked. Raises BadMessage, and names whose input it is; Refused: an evaluation's is slow."""
        try:
            payload = await self._read(request, read)
            self.check(request, payload)
            if self.transfers is not None:
                await self.transfers.fed(caller, request, payload)
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
            # A slow line is no invalid input, so its peer is not logged for one.
            raise Refused(
                RejectCode.TOO_LARGE, f"the input of an evaluation did not come within {_EVAL_UPLOAD_S:.0f} s"
            ) from None

    def wrong_step(self, step: int) -> Answer:
        """The answer to a call about a step that is not open here."""
        if 0 <= step < self.version:
            return Rejected(RejectCode.STALE, f"step {step} is applied", self.version)
        return self.busy()

    def busy(self) -> Busy:
        """Come back later."""
        if self.leaving:
            return Busy(_AFTER_LEAVING_S, self.version)
        return Busy(0.05 if self.version >= 0 else 0.1, self.version)
