"""The microbatches of one replica: finds the open step that a call belongs to, and answers calls about other steps.

Each open step has its `StepTasks` (`pipeline.tasks`). At version v the steps v .. v + ahead are open: one as a rule,
two where steps overlap.

| the call's step | what it gets |
|---|---|
| applied | refused (`STALE`) |
| open | its `StepTasks` |
| later | waits for that step for a moment, then `Busy` |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, AuditData, AuditRequest, Busy, Fetch, Packed, Process, Rejected
from swarmnet.pipeline.context import PipelineContext
from swarmnet.pipeline.inputs import TurnedAway
from swarmnet.pipeline.tasks import StepTasks
from swarmnet.pipeline.works import ShownWorks, WorkBook, digest, opened
from swarmnet.transport import ReadPayload

_UNSURE_S = 0.25
"""A known caller that was not heard for a while may try again after this time."""


class Execution:
    """Executes the microbatches of one (peer, stage).

    steps: the open steps by number, the oldest first. may_feed(caller, request): why the caller may not feed, or None.
    """

    def __init__(self, context: PipelineContext, *, may_feed: Callable[[PeerId, Process], TurnedAway | None]) -> None:
        self._context, self._may_feed = context, may_feed
        self.steps: dict[int, StepTasks] = {}
        self._begun = asyncio.Event()
        self._waiting = 0
        self._share = 1.0  # the part of the last step that was begun here

    @property
    def executions(self) -> int:
        """Forwards run for training, ever."""
        return self._context.executions

    @property
    def computed(self) -> tuple[int, float]:
        """Microbatches computed to the end, and the seconds of computing that they took, ever."""
        return self._context.computed, self._context.busy_s

    @property
    def queue(self) -> int:
        """Microbatches in flight."""
        return sum(tasks.queue for tasks in self.steps.values())

    @property
    def num_tasks(self) -> int:
        """Microbatches begun and not ended, those that wait for their input included."""
        return sum(len(tasks.by_index) for tasks in self.steps.values())

    @property
    def leaving(self) -> bool:
        """Nothing new is begun for callers; what is at work here is finished."""
        return self._context.leaving

    @leaving.setter
    def leaving(self, leaving: bool) -> None:
        self._context.leaving = leaving

    def left(self, step: int) -> int:
        """Microbatches of `step` and of older ones that this replica has yet to pass on, as far as it can tell."""
        return sum(tasks.left(self._share) for tasks in self.steps.values() if tasks.step <= step)

    @property
    def slots(self) -> int:
        """Microbatches in flight at most, in a step that is opened now."""
        return self._context.limits.slots

    def limit(self, slots: int) -> None:
        """So many microbatches in flight at most, in steps that are opened from now on."""
        if self._context.depth is None:
            self._context.limits = replace(self._context.limits, slots=slots)
        else:
            self._context.depth.most = slots
            self._context.measure()

    # ------------------------------------------------------------ what the step machine says

    def begin(self, version: int, *, alive: Callable[[PeerId], bool]) -> None:
        """The weights are those of `version`: end older steps, and take work for every step now open."""
        if version != self._context.version and self._context.depth is not None:
            self._context.depth.next_step()
            self._context.measure()
        self._context.version = version
        for step in [step for step in self.steps if step < version]:
            self.end(step)
        for step in range(version, version + self._context.engine.delay.ahead(version) + 1):
            if step not in self.steps:
                self.steps[step] = StepTasks(step, self._context, alive=alive)
                if self._context.works is not None:
                    self._context.works.begin(step)
                    self._context.shown.begin(step)
        self._begun.set()
        self._begun = asyncio.Event()

    def end(self, step: int) -> None:
        """The step is about to be applied: drop its work and memory. The others go on."""
        tasks = self.steps.pop(step)
        tasks.end()
        self._share = min(tasks.begun / self._context.microbatches, 1.0)
        if not self.steps:
            self._context.version = -1

    def stop(self) -> None:
        """Drop all work and memory: the weights are about to be replaced."""
        for step in list(self.steps):
            self.end(step)
        if self._context.transfers is not None:
            self._context.transfers.replaced()

    def granted(self, step: int, index: int, voids: int) -> None:
        """This replica counts (step, index)."""
        if step in self.steps:
            self.steps[step].granted(index, voids)

    def owned_elsewhere(self, step: int, index: int, owner: PeerId) -> None:
        """Another replica counts (step, index): before forward its callers are sent there, later it is not summed."""
        if step in self.steps:
            self.steps[step].owned_elsewhere(index, owner)

    def voided(self, step: int) -> None:
        """The step's accumulator is empty again: what has not been added yet claims once more."""
        if step in self.steps:
            self.steps[step].voided()

    def order(self, step: int, index: int) -> None:
        """The leader wants (step, index) executed here (rule 8)."""
        if step in self.steps:
            self.steps[step].order(index)

    def losses(self, step: int) -> Mapping[int, tuple[float, int]]:
        """index -> (loss_sum, num_tokens) of what is in the step's accumulator."""
        return self.steps[step].losses

    # ------------------------------------------------------------ what other peers ask

    async def process(self, caller: PeerId, request: Process, read: ReadPayload) -> AsyncGenerator[Answer, None]:
        """Answer one `Process` call (rule 1). Raises BadMessage for a payload that cannot be this stage's input."""
        away = self._may_feed(caller, request)
        if away is not None:
            version = self._context.version
            yield Busy(_UNSURE_S, version) if away.soon else Rejected(RejectCode.NOT_A_FEEDER, away.reason, version)
            return
        self._context.look(caller, request, read)
        await self._wait_for(request.step)
        tasks = self.steps.get(request.step)
        if tasks is None:
            yield self._context.wrong_step(request.step)
            return
        async with contextlib.aclosing(tasks.process(caller, request, read)) as answers:
            async for answer in answers:
                yield answer

    async def fetch(self, request: Fetch) -> AsyncGenerator[Answer, None]:
        """Answer one `Fetch` call (rule 6)."""
        tasks, version = self.steps.get(request.step), self._context.version
        if tasks is not None:
            async with contextlib.aclosing(tasks.fetch(request)) as answers:
                async for answer in answers:
                    yield answer
        elif request.step < version:
            yield self._context.wrong_step(request.step)
        else:
            yield Rejected(RejectCode.NOT_READY, version=version)

    # ------------------------------------------------------------ what this replica answers for

    def work_root(self, step: int) -> bytes:
        """The Merkle root over the works that are in the sum of `step`; of none where nobody looks into them. Asked
        once all that this replica owns is summed, and of the last steps."""
        return self.works.root(step)

    @property
    def shown(self) -> ShownWorks:
        """What suspects have shown here."""
        return self._context.shown

    def opened(self, request: AuditRequest, data: AuditData) -> tuple[tuple[Packed, ...], tuple[Packed, ...]]:
        """(inputs, gradient) of the microbatch that `request.peer` has shown, for `Compute.recompute`; from now on they
        are shown to verifiers from here, too.

        Raises BadMessage if they are no input of that microbatch in this run, or not what its record says, or if nobody
        has signed them.
        """
        if data.work.index != request.index:
            raise BadMessage(RejectCode.MALFORMED, "the work of another microbatch", index=request.index)
        process = Process(request.step, request.stage, request.index)
        found = opened(data, lambda payload: self._context.check(process, payload))
        if self._context.transfers is not None:
            self._context.transfers.shown(request, data, digest(found[0][:1]))
        self._context.shown.keep(request, data)
        return found

    def contributed(self, step: int, root: bytes | None) -> None:
        """An aggregate is applied for which this process has pledged works with this root; None: it pledged none."""
        if self.works.contributed(step, root) and self._context.transfers is not None:
            self._context.transfers.applied(step)

    @property
    def works(self) -> WorkBook:
        """What was counted here in the last steps."""
        return self._context.works or WorkBook(0)

    async def _wait_for(self, step: int) -> None:
        """Hold a call that is ahead of us for a moment: it takes no slot and its payload is not read (rule 1)."""
        if not self._ahead(step) or self._waiting >= 4 * self._context.limits.slots:
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(self._context.limits.running_s):
                while self._ahead(step):
                    await self._begun.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1

    def _ahead(self, step: int) -> bool:
        return step not in self.steps and step >= self._context.version
