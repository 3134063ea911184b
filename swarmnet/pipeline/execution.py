"""The microbatches of one replica: finds the open step that a call belongs to, and answers calls about other steps.

Each open step has its `StepTasks` (`pipeline.tasks`). At version v the steps v .. v + ahead are open: one as a rule,
two where steps overlap. `Execution` is also what these steps share: limits, engine, neighbours, what was counted.
How many microbatches it holds follows from what was measured (`pipeline.depth`), and falls when the device is full.

| the call's step | what it gets |
|---|---|
| applied | refused (`STALE`) |
| open | its `StepTasks` |
| later | waits for that step for a moment, then `Busy` |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

from swarmnet.errors import BadMessage, DeviceFull, Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import (
    Accepted,
    Answer,
    AuditData,
    AuditRequest,
    Busy,
    Fetch,
    Gradient,
    Packed,
    Process,
    Rejected,
    Running,
    Waits,
)
from swarmnet.pipeline.caller import Caller
from swarmnet.pipeline.depth import Depth
from swarmnet.pipeline.host import Claims, PipelineHost
from swarmnet.pipeline.inputs import InputCheck
from swarmnet.pipeline.recovery import Recovery, kept_alive
from swarmnet.pipeline.slots import Slots
from swarmnet.pipeline.tasks import StepTasks
from swarmnet.pipeline.transfers import Transfers
from swarmnet.pipeline.works import ShownWorks, WorkBook, digest, opened
from swarmnet.stage.interfaces import Compute, SavedActivations
from swarmnet.telemetry.spans import SpanBook
from swarmnet.transport import ReadPayload

_HOPELESS = 3
"""So often in a row a microbatch may find the device full where there is one slot."""


@dataclass(slots=True, eq=False)
class Execution:
    """Executes the microbatches of one (peer, stage), and holds what its open steps share."""

    stage: int
    num_stages: int
    microbatches: int
    engine: Compute
    claims: Claims
    host: PipelineHost
    caller: Caller | None
    """Calls the next stage; None: this is the last one."""
    recovery: Recovery
    check: InputCheck
    slots: int
    """Microbatches in flight at most, in a step that is opened now; `depth` changes it."""
    output_cache_bytes: int
    """Of outputs and answers in the output cache, for each open step."""
    depth: Depth | None = None
    """How many slots there are; None: as many as `slots`."""
    spans: SpanBook = field(default_factory=SpanBook)
    """Told how long each thing took."""
    transfers: Transfers | None = None
    """Signs and checks payloads; None: payloads are unsigned."""
    works: WorkBook = field(default_factory=lambda: WorkBook(0))
    """What was counted here in the last steps."""
    shown: ShownWorks = field(default_factory=lambda: ShownWorks(0))
    """What suspects have shown here."""
    steps: dict[int, StepTasks] = field(default_factory=dict)
    """The open steps by number, the oldest first. The step machine tells each what becomes of its indexes."""
    version: int = -1
    """Of the weights; -1: none."""
    leaving: bool = False
    """Nothing new is begun for callers; what is at work here is finished."""
    executions: int = 0
    """Forwards run for training, ever."""
    num_computed: int = 0
    """Microbatches computed to the end, ever."""
    busy_s: float = 0.0
    """The seconds that took."""
    full_in_a_row: int = 0
    evals: Slots = field(default_factory=lambda: Slots(1))
    """One evaluation at a time, in addition to the slots of the steps."""
    sending: Counter[PeerId] = field(default_factory=Counter)
    """Inputs that each caller is uploading."""
    _begun: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: int = 0
    _share: float = 1.0  # the part of the last step that was begun here

    def __post_init__(self) -> None:
        self.measure()

    @property
    def computed(self) -> tuple[int, float]:
        """Microbatches computed to the end, and the seconds of computing that they took, ever."""
        return self.num_computed, self.busy_s

    @property
    def queue(self) -> int:
        """Microbatches in flight."""
        return sum(tasks.queue for tasks in self.steps.values())

    @property
    def waits(self) -> Waits:
        """For whom all that is left of the oldest open step waits."""
        return next((tasks.waits for tasks in self.steps.values()), "")

    @property
    def num_tasks(self) -> int:
        """Microbatches begun and not ended, those that wait for their input included."""
        return sum(len(tasks.by_index) for tasks in self.steps.values())

    def left(self, step: int) -> int:
        """Microbatches of `step` and of older ones that this replica has yet to pass on, as far as it can tell."""
        return sum(tasks.left(self._share) for tasks in self.steps.values() if tasks.step <= step)

    # ------------------------------------------------------------ how much it holds

    def limit(self, slots: int) -> None:
        """So many microbatches in flight at most, in steps that are opened from now on."""
        if self.depth is None:
            self.slots = slots
        else:
            self.depth.most = slots
            self.measure()

    def measure(self) -> None:
        """As many slots as what was measured asks for."""
        if self.depth is not None:
            self.slots = self.depth.slots(self.host.share())

    def full(self, error: DeviceFull) -> None:
        """The device had no memory for a microbatch: one slot less. Raises `error` if one slot is too many.

        Not at the first time: the memory of microbatches that were dropped for it comes back a moment later.
        """
        self.full_in_a_row += 1
        if self.slots == 1 and self.full_in_a_row > _HOPELESS:
            raise error
        most = max(self.slots - 1, 1)
        self.limit(most)
        self.host.device_full(most, str(error))

    def may_send(self, caller: PeerId) -> bool:
        """May this caller upload one more input? Uploads take memory: at most as many at once as slots."""
        return self.sending[caller] < self.slots * (1 + self.engine.delay.most)

    # ------------------------------------------------------------ what the step machine says

    def begin(self, version: int) -> None:
        """The weights are those of `version`: end older steps, and take work for every step now open."""
        if version != self.version and self.depth is not None:
            self.depth.next_step()
            self.measure()
        self.version = version
        for step in [step for step in self.steps if step < version]:
            self.end(step)
        for step in range(version, version + self.engine.delay.ahead(version) + 1):
            if step not in self.steps:
                self.steps[step] = StepTasks(step, self)
                self.works.begin(step)
                self.shown.begin(step)
        self._begun.set()
        self._begun = asyncio.Event()

    def end(self, step: int) -> None:
        """The step is about to be applied: drop its work and memory. The others go on."""
        tasks = self.steps.pop(step)
        tasks.end()
        self._share = min(tasks.begun / self.microbatches, 1.0)
        if not self.steps:
            self.version = -1

    def stop(self) -> None:
        """Drop all work and memory: the weights are about to be replaced."""
        for step in list(self.steps):
            self.end(step)
        if self.transfers is not None:
            self.transfers.replaced()

    # ------------------------------------------------------------ what other peers ask

    async def process(self, caller: PeerId, request: Process, read: ReadPayload) -> AsyncGenerator[Answer, None]:
        """Answer one `Process` call (rule 1). Raises BadMessage for a payload that cannot be this stage's input."""
        away = self.host.may_feed(caller, request)
        if away is not None:
            version = self.version
            yield (
                Busy(self.host.timers.ask_s, version)
                if away.soon
                else Rejected(RejectCode.NOT_A_FEEDER, away.reason, version)
            )
            return
        try:
            self.check.declared(request, read.declared)
        except BadMessage as error:
            self.host.bad_input(caller, request.step, request.index, error)
            raise
        await self._wait_for(request.step)
        tasks = self.steps.get(request.step)
        if tasks is None:
            yield self.wrong_step(request.step)
            return
        answer_it = self._evaluate if request.purpose == "eval" else tasks.process
        async with contextlib.aclosing(answer_it(caller, request, read)) as answers:
            async for answer in answers:
                yield answer

    async def _evaluate(self, caller: PeerId, request: Process, read: ReadPayload) -> AsyncGenerator[Answer, None]:
        """Forward only, here and in all later stages: claims nothing, is not memoised."""
        # Not one of the step's slots, or an evaluation would take them from training.
        if self.leaving or not await self.evals.enter(patience_s=self.host.timers.beat_s):
            yield self.busy()
            return
        try:
            yield Accepted()
            payload = await self.receive(caller, request, read)
            stash = await self.forward_only(request, payload)
            if self.caller is None:
                yield Gradient(stash.loss_sum, stash.num_tokens, stash.compute_s)
                return
            onward = Process(request.step, self.stage + 1, request.index, purpose="eval", avoid=request.avoid)
            work = self.caller.process(onward, stash.output)
            async for answer in kept_alive(work, self.host.timers.beat_s):
                yield answer if isinstance(answer, Running) else replace(answer, compute_s=stash.compute_s, payload=())
        finally:
            self.evals.give()

    async def fetch(self, request: Fetch) -> AsyncGenerator[Answer, None]:
        """Answer one `Fetch` call (rule 6)."""
        tasks, version = self.steps.get(request.step), self.version
        if tasks is not None:
            async with contextlib.aclosing(tasks.fetch(request)) as answers:
                async for answer in answers:
                    yield answer
        elif request.step < version:
            yield self.wrong_step(request.step)
        else:
            yield Rejected(RejectCode.NOT_READY, version=version)

    # ------------------------------------------------------------ what this replica answers for

    def opened(self, request: AuditRequest, data: AuditData) -> tuple[tuple[Packed, ...], tuple[Packed, ...]]:
        """(inputs, gradient) of the microbatch that `request.peer` has shown, for `Compute.recompute`; from now on they
        are shown to verifiers from here, too.

        Raises BadMessage if they are no input of that microbatch in this run, do not match its record, or are unsigned.
        """
        if data.work.index != request.index:
            raise BadMessage(RejectCode.MALFORMED, "the work of another microbatch", index=request.index)
        process = Process(request.step, request.stage, request.index)
        found = opened(data, lambda payload: self.check(process, payload))
        if self.transfers is not None:
            self.transfers.shown(request, data, digest(found[0][:1]))
        self.shown.keep(request, data)
        return found

    def contributed(self, step: int, root: bytes | None) -> None:
        """An aggregate is applied for which this process has pledged works with this root; None: it pledged none."""
        if self.works.contributed(step, root) and self.transfers is not None:
            self.transfers.applied(step)

    async def _wait_for(self, step: int) -> None:
        """Hold a call that is ahead of us for a moment: it takes no slot and its payload is not read (rule 1)."""
        if not self._ahead(step) or self._waiting >= 4 * self.slots:
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(self.host.timers.beat_s):
                while self._ahead(step):
                    await self._begun.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1

    def _ahead(self, step: int) -> bool:
        return step not in self.steps and step >= self.version

    # ------------------------------------------------------------ for the tasks of its steps

    async def receive(self, caller: PeerId, request: Process, read: ReadPayload) -> tuple[Packed, ...]:
        """The caller's input, checked. Raises BadMessage, which names the sender of the input; Refused: it is slow."""
        try:
            payload = await self._read(request, read)
            self.check(request, payload)
            if self.transfers is not None:
                await self.transfers.fed(caller, request, payload)
        except BadMessage as error:
            self.host.bad_input(caller, request.step, request.index, error)
            raise
        return payload

    async def _read(self, request: Process, read: ReadPayload) -> tuple[Packed, ...]:
        # Any peer may ask for an evaluation, and it holds the only slot of its kind.
        limit_s = self.host.timers.lease_s if request.purpose == "eval" else None
        try:
            async with asyncio.timeout(limit_s):
                return await read()
        except TimeoutError:
            # A slow line is no invalid input, so its peer is not logged for one.
            raise Refused(
                RejectCode.TOO_LARGE, f"the input of an evaluation did not come within {limit_s:g} s"
            ) from None

    async def forward_only(self, request: Process | Fetch, inputs: Sequence[Packed]) -> SavedActivations:
        """What is computed and not counted. Raises Refused: the device has no memory for it."""
        try:
            return await self.engine.forward(request.step, request.index, inputs, train=False)
        except DeviceFull as full:
            raise Refused(RejectCode.NOT_READY, str(full)) from None

    def wrong_step(self, step: int) -> Answer:
        """The answer to a call about a step that is not open here."""
        if 0 <= step < self.version:
            return Rejected(RejectCode.STALE, f"step {step} is applied", self.version)
        return self.busy()

    def busy(self) -> Busy:
        """Come back later."""
        if self.leaving:
            return Busy(self.host.timers.settle_s, self.version)  # it may be the last one then, and serve on
        return Busy(0.05 if self.version >= 0 else 0.1, self.version)
