"""The microbatches of one open step through one stage of this replica: accept, run, pass on, answer, count.

Everything here is keyed by index and forgotten with the step: tasks and their slots, who owns what, the memo, the
losses. Where steps overlap each open one has its own `StepTasks`, so that the newest can never take a slot from a
repair of the oldest. It asks the step machine (through `Claims`) who may count an index and obeys; it never counts by
itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from swarmnet.errors import BadMessage, Overflow, Refused, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Fetch, Gradient, MovedTo, Packed, Process, Running
from swarmnet.pipeline.caller import OF_PAYLOAD
from swarmnet.pipeline.floor import PipelineContext
from swarmnet.pipeline.memo import Memo
from swarmnet.pipeline.uncounted import Uncounted
from swarmnet.pipeline.work import MicrobatchTask, Slots
from swarmnet.stage.engine import Stash
from swarmnet.transport import ReadPayload


class StepTasks:
    """Executes the microbatches of one step. alive(peer): may an owner still answer?"""

    def __init__(self, step: int, context: PipelineContext, *, alive: Callable[[PeerId], bool]) -> None:
        self.step, self._context, self._alive = step, context, alive
        self._engine, self._claims, self._limits = context.engine, context.claims, context.limits
        self.memo = Memo(context.limits.memo_bytes)
        self.by_index: dict[int, MicrobatchTask] = {}
        self.losses: dict[int, tuple[float, int]] = {}
        self.ended = False
        self._running: dict[MicrobatchTask, asyncio.Task[None]] = {}
        self._owners: dict[int, PeerId] = {}
        self._slots = Slots(context.limits.slots)
        self._slow: set[MicrobatchTask] = set()  # gave their slot back, as their input does not come
        self._uncounted = Uncounted(
            context.stage,
            engine=context.engine,
            memo=self.memo,
            caller=context.caller,
            sources=context.sources,
            receive=context.receive,
            spawn=context.spawn,
            running_s=context.limits.running_s,
        )

    def end(self) -> None:
        """The step is about to be applied, or the weights to be replaced: drop all work and memory."""
        self.ended = True
        for running in self._running.values():
            running.cancel()
        for task in self.by_index.values():
            task.finish(Refused(RejectCode.STALE, "the step was applied"))
        self.by_index, self._running, self._owners = {}, {}, {}
        self.memo.clear()

    # ------------------------------------------------------------ what the step machine says

    def granted(self, index: int, voids: int) -> None:
        """This replica counts `index`."""
        self._owners.pop(index, None)
        task = self.by_index.get(index)
        if task is None:
            self._claims.withdraw(self.step, index)
        else:
            task.granted(voids)

    def owned(self, index: int, owner: PeerId) -> None:
        """Another replica counts `index`: before forward its callers are sent there, later it is not accumulated."""
        self._owners[index] = owner
        task = self.by_index.get(index)
        if task is not None:
            task.owned_by(owner)

    def voided(self) -> None:
        """The accumulator is empty again: what has not been added yet claims once more."""
        self.losses = {}
        for task in self.by_index.values():
            if task.voids is not None:
                task.undecided()
                self._claims.claim(self.step, task.index)

    def order(self, index: int) -> None:
        """The keeper wants `index` executed here (rule 8)."""
        task = self.by_index.get(index)
        if task is None:
            self._start(index, patient=True)  # a caller may have brought it to another replica meanwhile
            self._claims.claim(self.step, index)
        elif task.owner is not None:
            self._owners.pop(index, None)  # whoever it was is gone
            task.undecided()
            self._claims.claim(self.step, index)

    @property
    def queue(self) -> int:
        """Microbatches in flight."""
        return self._slots.taken

    # ------------------------------------------------------------ what other peers ask

    async def process(self, caller: PeerId, request: Process, read: ReadPayload) -> AsyncGenerator[Answer, None]:
        """Answer one `Process` call of this step (rule 2)."""
        if request.purpose == "eval":
            # Not of the step's slots: whoever asks for scores would take them from training.
            if self._context.leaving or not await self._context.evals.enter(patience_s=self._limits.running_s):
                yield self._context.busy()
                return
            try:
                async for answer in self._uncounted.evaluate(caller, request, read):
                    yield answer
            finally:
                self._context.evals.give()
            return
        if not self._context.may_send(caller):
            yield self._context.busy()
            return
        # A caller told to come back sends its payload again, so with all slots taken it first waits at the door.
        patience = asyncio.get_running_loop().time() + self._limits.door_s
        while (admitted := await self._admit(request)) is None and asyncio.get_running_loop().time() < patience:
            yield Running()
        if not isinstance(admitted, MicrobatchTask):
            yield admitted or self._context.busy()
            return
        task = admitted
        task.hedged = task.hedged or request.hedge
        yield Accepted()
        async with contextlib.aclosing(self._feed(task, caller, request, read)) as signs:
            async for sign in signs:
                yield sign
        while not task.outcome.done():
            await asyncio.wait([task.outcome], timeout=self._limits.running_s)
            if not task.outcome.done():
                yield Running()
        outcome = task.outcome.result()
        if isinstance(outcome, SwarmError):
            raise outcome
        yield outcome

    def fetch(self, request: Fetch) -> AsyncGenerator[Answer, None]:
        """Answer one `Fetch` call of this step (rule 6)."""
        return self._uncounted.fetch(request)

    # ------------------------------------------------------------ inside

    async def _admit(self, request: Process) -> MicrobatchTask | Answer | None:
        """The task a call attaches to, begun if need be; or its answer right away; None: no slot came free so far."""
        slots = self._slots
        found = self._ready_answer(request) or self.by_index.get(request.index)
        if found is not None:
            return found
        if self._context.leaving or slots.crowded:
            return self._context.busy()
        has_slot = await slots.enter(patience_s=self._limits.running_s)
        found = self._ready_answer(request) or self.by_index.get(request.index)  # the world may have moved on
        if has_slot and found is None and not self._context.leaving:
            return self._start(request.index, patient=request.repair, hedged=request.hedge, has_slot=True, fed=True)
        if has_slot:
            slots.give()
        return found

    def _ready_answer(self, request: Process) -> Answer | None:
        """What a call gets without any task here: the memoised answer, the owner, or that its step is over."""
        if self.ended:
            return self._context.wrong_step(self.step)
        known = self.memo.answer(request.index)
        if known is not None or request.index in self.by_index:
            return known
        owner = self._owners.get(request.index)
        if owner is not None and not request.hedge and self._alive(owner):
            return MovedTo(owner)
        return None

    def _start(
        self, index: int, *, patient: bool = False, hedged: bool = False, has_slot: bool = False, fed: bool = False
    ) -> MicrobatchTask:
        loop = asyncio.get_running_loop()
        task = MicrobatchTask(index, patient, hedged, loop.create_future(), loop.create_future(), has_slot=has_slot)
        if not fed:
            task.starve()
        self.by_index[index] = task
        self._running[task] = self._context.spawn(self._run(task))
        return task

    async def _feed(
        self, task: MicrobatchTask, caller: PeerId, request: Process, read: ReadPayload
    ) -> AsyncGenerator[Running, None]:
        """Take the input from this caller, unless another one sends it and is not slow (callers die while they do)."""
        clock = asyncio.get_running_loop().time
        task.waiting += 1
        try:
            while not task.input.done() and not task.outcome.done():
                free = self._context.may_send(caller)
                if free and task.may_send(caller, now=clock(), slow_s=self._limits.door_s):
                    await self._upload(task, caller, request, read)
                    return
                task.unsent.clear()
                async with asyncio.TaskGroup() as group:
                    failed = group.create_task(task.unsent.wait())
                    ends: list[asyncio.Future[Any]] = [task.input, task.outcome, failed]
                    await asyncio.wait(ends, timeout=self._limits.running_s, return_when=asyncio.FIRST_COMPLETED)
                    failed.cancel()
                yield Running()
        finally:
            task.waiting -= 1
            if not task.waiting and not task.input.done():
                task.starve()

    async def _upload(self, task: MicrobatchTask, caller: PeerId, request: Process, read: ReadPayload) -> None:
        task.sending[caller] = asyncio.get_running_loop().time()
        self._context.sending[caller] += 1
        try:
            task.feed(await self._context.receive(caller, request, read))
        except BadMessage:
            over = task.outcome.done()  # while it came, the step may have ended
            if task.waiting == 1 and not task.input.done() and not task.starved and not over:
                self._drop(task)  # begun for this sender alone
            raise
        finally:
            del task.sending[caller]
            self._context.sending[caller] -= 1
            if not self._context.sending[caller]:
                del self._context.sending[caller]
            task.unsent.set()

    def _drop(self, task: MicrobatchTask) -> None:
        """Forget a task that has no input and no honest caller."""
        self._running.pop(task).cancel()
        self._release(task)  # a task that has not begun will not do it
        self._claims.withdraw(self.step, task.index)
        del self.by_index[task.index]
        task.finish(self._context.busy())  # to others that attached meanwhile

    def _release(self, task: MicrobatchTask) -> None:
        if task.has_slot:
            task.has_slot = False
            self._slots.give()

    async def _obtain_input(self, task: MicrobatchTask) -> tuple[Packed, ...]:
        """Wait for an upload; without one, give the slot back (rule 7) and fetch from the stage before.

        Whatever comes first counts: a caller may still attach and send it.
        """
        while not task.fed_or_starved.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.door_s):
                    await task.fed_or_starved.wait()
            if not task.fed_or_starved.is_set() and task.has_slot and self._slots.wanted:
                # Whoever says it sends and does not keeps nobody out: once the input is here, it is first in line.
                self._release(task)
                self._slow.add(task)
                if len(self._slow) > self._limits.slots:
                    task.finish(self._context.busy())
                    return ()
        self._slow.discard(task)
        if not task.input.done():
            self._release(task)
            fetching = self._context.spawn(self._fetch_input(task))
            try:
                await asyncio.wait([task.input])
            finally:
                fetching.cancel()
        return task.input.result()

    async def _fetch_input(self, task: MicrobatchTask) -> None:
        try:
            task.feed(await self._context.sources.input(self.step, task.index))
        except SwarmError as error:
            if not task.input.done():
                task.input.set_exception(error)

    async def _run(self, task: MicrobatchTask) -> None:
        try:
            await self._run_stages(task)
        except SwarmError as error:
            if isinstance(error, Refused) and error.code is RejectCode.VOID:
                self._claims.non_finite(self.step, task.index)
            self._claims.withdraw(self.step, task.index)
            task.finish(error)
        finally:
            self._release(task)
            self._slow.discard(task)
            self._running.pop(task, None)
            if self.by_index.get(task.index) is task:
                del self.by_index[task.index]

    async def _run_stages(self, task: MicrobatchTask) -> None:
        payload = await self._obtain_input(task)
        if task.outcome.done():
            return
        *inputs, proof = payload
        if not task.decided.is_set():
            self._claims.claim(self.step, task.index)  # only now: what is malformed never claims
        if task.patient and not task.hedged:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.running_s):
                    await task.decided.wait()
        if task.owner is not None and not task.hedged and self._alive(task.owner):
            task.finish(MovedTo(task.owner))
            return
        if not task.has_slot:
            await self._slots.take()
            task.has_slot = True
        task.computing = True
        self._context.executions += 1
        stash = await self._engine.forward(self.step, task.index, inputs, train=True)
        if self._context.stage + 1 < self._context.num_stages:
            output = (*stash.output, proof)
            self.memo.keep_output(task.index, output)
            answer = await self._gradient_of(task, output)
        else:
            answer = Gradient(stash.loss_sum, stash.num_tokens)
        gradient = await self._engine.backward(stash, answer.payload)
        mine = Gradient(answer.loss_sum, answer.num_tokens, stash.compute_s, gradient)
        self.memo.keep_answer(task.index, mine)
        task.finish(mine)
        await self._count(task, stash, answer)

    async def _gradient_of(self, task: MicrobatchTask, output: tuple[Packed, ...]) -> Gradient:
        """The gradient of what this stage sent on: memoised there after a repair's order, else executed there."""
        context = self._context
        assert context.caller is not None
        ordered = not task.waiting and task.starved
        if ordered:
            found = await context.sources.gradient(self.step, task.index)
            if found is not None:
                return Gradient(found.loss_sum, found.num_tokens, 0.0, found.payload)
        again = ordered or task.patient or task.hedged  # somebody began it before: it is likely to be done further on
        request = Process(self.step, context.stage + 1, task.index, repair=again)
        try:
            return await context.caller.process(request, output)
        except Refused as refused:
            if refused.code in OF_PAYLOAD:  # what we sent, not what our callers sent: they may try another
                raise Refused(RejectCode.NOT_READY, f"refused further on: {refused.reason}") from refused
            raise

    async def _count(self, task: MicrobatchTask, stash: Stash, answer: Gradient) -> None:
        """The weight pass, once granted (rule 5). Without the keeper's word the stash is dropped after a while."""
        try:
            async with asyncio.timeout(self._limits.wait_s):
                await task.decided.wait()
        except TimeoutError:
            self._claims.withdraw(self.step, task.index)
            return
        if task.voids is None or task.index in self.losses:
            return  # another's, or counted here before (the memo forgot the answer)
        stash.voids = task.voids
        try:
            added = await self._engine.accumulate(stash)
        except (BadMessage, Overflow):
            # The answer was finite, the weight gradient is not, or does not fit the grid: nobody can count it.
            self._claims.non_finite(self.step, task.index)
            return
        if added and stash.voids == self._engine.voids(stash.step):
            last_stage = self._context.stage + 1 == self._context.num_stages
            self.losses[task.index] = (answer.loss_sum if last_stage else 0.0, answer.num_tokens)
            self._claims.added(stash)
        else:
            self._claims.withdraw(self.step, task.index)
