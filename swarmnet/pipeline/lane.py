"""The microbatches of one open step through one stage of this replica: accept, run, pass on, answer, count.

Everything here is keyed by index and forgotten with the step: works and their slots, who owns what, the memo, the
losses. Where steps overlap there is a lane for each open one, so that the newest can never take a slot from a repair of
the oldest. It asks the step machine (through `Claims`) who may count an index and obeys; it never counts by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from swarmnet.errors import BadMessage, Overflow, Refused, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Fetch, Gradient, MovedTo, Packed, Process, Running
from swarmnet.net.transport import ReadPayload
from swarmnet.pipeline.caller import OF_PAYLOAD
from swarmnet.pipeline.floor import Floor
from swarmnet.pipeline.memo import Memo
from swarmnet.pipeline.uncounted import Uncounted
from swarmnet.pipeline.work import Slots, Work
from swarmnet.stage.engine import Stash


class Lane:
    """Executes the microbatches of one step. alive(peer): may an owner still answer?"""

    def __init__(self, step: int, floor: Floor, *, alive: Callable[[PeerId], bool]) -> None:
        self.step, self._floor, self._alive = step, floor, alive
        self._engine, self._claims, self._limits = floor.engine, floor.claims, floor.limits
        self.memo = Memo(floor.limits.memo_bytes)
        self.works: dict[int, Work] = {}
        self.losses: dict[int, tuple[float, int]] = {}
        self.ended = False
        self._tasks: dict[Work, asyncio.Task[None]] = {}
        self._owners: dict[int, PeerId] = {}
        self._slots = Slots(floor.limits.slots)
        self._slow: set[Work] = set()  # gave their slot back, as their input does not come
        self._uncounted = Uncounted(
            floor.stage,
            engine=floor.engine,
            memo=self.memo,
            caller=floor.caller,
            sources=floor.sources,
            receive=floor.receive,
            spawn=floor.spawn,
            running_s=floor.limits.running_s,
        )

    def end(self) -> None:
        """The step is about to be applied, or the weights to be replaced: drop all work and memory."""
        self.ended = True
        for task in self._tasks.values():
            task.cancel()
        for work in self.works.values():
            work.finish(Refused(RejectCode.STALE, "the step was applied"))
        self.works, self._tasks, self._owners = {}, {}, {}
        self.memo.clear()

    # ------------------------------------------------------------ what the step machine says

    def granted(self, index: int, voids: int) -> None:
        """This replica counts `index`."""
        self._owners.pop(index, None)
        work = self.works.get(index)
        if work is None:
            self._claims.withdraw(self.step, index)
        else:
            work.granted(voids)

    def owned(self, index: int, owner: PeerId) -> None:
        """Another replica counts `index`: before forward its callers are sent there, later it is not accumulated."""
        self._owners[index] = owner
        work = self.works.get(index)
        if work is not None:
            work.owned_by(owner)

    def voided(self) -> None:
        """The accumulator is empty again: what has not been added yet claims once more."""
        self.losses = {}
        for work in self.works.values():
            if work.voids is not None:
                work.undecided()
                self._claims.claim(self.step, work.index)

    def order(self, index: int) -> None:
        """The keeper wants `index` executed here (rule 8)."""
        work = self.works.get(index)
        if work is None:
            self._start(index, patient=True)  # a caller may have brought it to another replica meanwhile
            self._claims.claim(self.step, index)
        elif work.owner is not None:
            self._owners.pop(index, None)  # whoever it was is gone
            work.undecided()
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
            if self._floor.leaving or not await self._floor.evals.enter(patience_s=self._limits.running_s):
                yield self._floor.busy()
                return
            try:
                async for answer in self._uncounted.evaluate(caller, request, read):
                    yield answer
            finally:
                self._floor.evals.give()
            return
        if not self._floor.may_send(caller):
            yield self._floor.busy()
            return
        # A caller told to come back sends its payload again, so with all slots taken it first waits at the door.
        patience = asyncio.get_running_loop().time() + self._limits.door_s
        while (admitted := await self._admit(request)) is None and asyncio.get_running_loop().time() < patience:
            yield Running()
        if not isinstance(admitted, Work):
            yield admitted or self._floor.busy()
            return
        work = admitted
        work.hedged = work.hedged or request.hedge
        yield Accepted()
        async with contextlib.aclosing(self._feed(work, caller, request, read)) as signs:
            async for sign in signs:
                yield sign
        while not work.outcome.done():
            await asyncio.wait([work.outcome], timeout=self._limits.running_s)
            if not work.outcome.done():
                yield Running()
        outcome = work.outcome.result()
        if isinstance(outcome, SwarmError):
            raise outcome
        yield outcome

    def fetch(self, request: Fetch) -> AsyncGenerator[Answer, None]:
        """Answer one `Fetch` call of this step (rule 6)."""
        return self._uncounted.fetch(request)

    # ------------------------------------------------------------ inside

    async def _admit(self, request: Process) -> Work | Answer | None:
        """The work a call attaches to, begun if need be; or its answer right away; None: no slot came free so far."""
        slots = self._slots
        found = self._ready_answer(request) or self.works.get(request.index)
        if found is not None:
            return found
        if self._floor.leaving or slots.crowded:
            return self._floor.busy()
        has_slot = await slots.enter(patience_s=self._limits.running_s)
        found = self._ready_answer(request) or self.works.get(request.index)  # the world may have moved on
        if has_slot and found is None and not self._floor.leaving:
            return self._start(request.index, patient=request.repair, hedged=request.hedge, has_slot=True, fed=True)
        if has_slot:
            slots.give()
        return found

    def _ready_answer(self, request: Process) -> Answer | None:
        """What a call gets without any work here: the memoised answer, the owner, or that its step is over."""
        if self.ended:
            return self._floor.wrong_step(self.step)
        known = self.memo.answer(request.index)
        if known is not None or request.index in self.works:
            return known
        owner = self._owners.get(request.index)
        if owner is not None and not request.hedge and self._alive(owner):
            return MovedTo(owner)
        return None

    def _start(
        self, index: int, *, patient: bool = False, hedged: bool = False, has_slot: bool = False, fed: bool = False
    ) -> Work:
        loop = asyncio.get_running_loop()
        work = Work(index, patient, hedged, loop.create_future(), loop.create_future(), has_slot=has_slot)
        if not fed:
            work.starve()
        self.works[index] = work
        self._tasks[work] = self._floor.spawn(self._run(work))
        return work

    async def _feed(
        self, work: Work, caller: PeerId, request: Process, read: ReadPayload
    ) -> AsyncGenerator[Running, None]:
        """Take the input from this caller, unless another one sends it and is not slow (callers die while they do)."""
        clock = asyncio.get_running_loop().time
        work.waiting += 1
        try:
            while not work.input.done() and not work.outcome.done():
                free = self._floor.may_send(caller)
                if free and work.may_send(caller, now=clock(), slow_s=self._limits.door_s):
                    await self._upload(work, caller, request, read)
                    return
                work.unsent.clear()
                async with asyncio.TaskGroup() as group:
                    failed = group.create_task(work.unsent.wait())
                    ends: list[asyncio.Future[Any]] = [work.input, work.outcome, failed]
                    await asyncio.wait(ends, timeout=self._limits.running_s, return_when=asyncio.FIRST_COMPLETED)
                    failed.cancel()
                yield Running()
        finally:
            work.waiting -= 1
            if not work.waiting and not work.input.done():
                work.starve()

    async def _upload(self, work: Work, caller: PeerId, request: Process, read: ReadPayload) -> None:
        work.sending[caller] = asyncio.get_running_loop().time()
        self._floor.sending[caller] += 1
        try:
            work.feed(await self._floor.receive(caller, request, read))
        except BadMessage:
            over = work.outcome.done()  # while it came, the step may have ended
            if work.waiting == 1 and not work.input.done() and not work.starved and not over:
                self._drop(work)  # begun for this sender alone
            raise
        finally:
            del work.sending[caller]
            self._floor.sending[caller] -= 1
            if not self._floor.sending[caller]:
                del self._floor.sending[caller]
            work.unsent.set()

    def _drop(self, work: Work) -> None:
        """Forget a work that has no input and no honest caller."""
        self._tasks.pop(work).cancel()
        self._release(work)  # a task that has not begun will not do it
        self._claims.withdraw(self.step, work.index)
        del self.works[work.index]
        work.finish(self._floor.busy())  # to others that attached meanwhile

    def _release(self, work: Work) -> None:
        if work.has_slot:
            work.has_slot = False
            self._slots.give()

    async def _obtain_input(self, work: Work) -> tuple[Packed, ...]:
        """Wait for an upload; without one, give the slot back (rule 7) and fetch from the stage before.

        Whatever comes first counts: a caller may still attach and send it.
        """
        while not work.fed_or_starved.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.door_s):
                    await work.fed_or_starved.wait()
            if not work.fed_or_starved.is_set() and work.has_slot and self._slots.wanted:
                # Whoever says it sends and does not keeps nobody out: once the input is here, it is first in line.
                self._release(work)
                self._slow.add(work)
                if len(self._slow) > self._limits.slots:
                    work.finish(self._floor.busy())
                    return ()
        self._slow.discard(work)
        if not work.input.done():
            self._release(work)
            fetching = self._floor.spawn(self._fetch_input(work))
            try:
                await asyncio.wait([work.input])
            finally:
                fetching.cancel()
        return work.input.result()

    async def _fetch_input(self, work: Work) -> None:
        try:
            work.feed(await self._floor.sources.input(self.step, work.index))
        except SwarmError as error:
            if not work.input.done():
                work.input.set_exception(error)

    async def _run(self, work: Work) -> None:
        try:
            await self._run_stages(work)
        except SwarmError as error:
            if isinstance(error, Refused) and error.code is RejectCode.VOID:
                self._claims.non_finite(self.step, work.index)
            self._claims.withdraw(self.step, work.index)
            work.finish(error)
        finally:
            self._release(work)
            self._slow.discard(work)
            self._tasks.pop(work, None)
            if self.works.get(work.index) is work:
                del self.works[work.index]

    async def _run_stages(self, work: Work) -> None:
        payload = await self._obtain_input(work)
        if work.outcome.done():
            return
        *inputs, proof = payload
        if not work.decided.is_set():
            self._claims.claim(self.step, work.index)  # only now: what is malformed never claims
        if work.patient and not work.hedged:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.running_s):
                    await work.decided.wait()
        if work.owner is not None and not work.hedged and self._alive(work.owner):
            work.finish(MovedTo(work.owner))
            return
        if not work.has_slot:
            await self._slots.take()
            work.has_slot = True
        work.computing = True
        self._floor.executions += 1
        stash = await self._engine.forward(self.step, work.index, inputs, train=True)
        if self._floor.stage + 1 < self._floor.num_stages:
            output = (*stash.output, proof)
            self.memo.keep_output(work.index, output)
            answer = await self._gradient_of(work, output)
        else:
            answer = Gradient(stash.loss_sum, stash.num_tokens)
        gradient = await self._engine.backward(stash, answer.payload)
        mine = Gradient(answer.loss_sum, answer.num_tokens, stash.compute_s, gradient)
        self.memo.keep_answer(work.index, mine)
        work.finish(mine)
        await self._count(work, stash, answer)

    async def _gradient_of(self, work: Work, output: tuple[Packed, ...]) -> Gradient:
        """The gradient of what this stage sent on: memoised there after a repair's order, else executed there."""
        floor = self._floor
        assert floor.caller is not None
        ordered = not work.waiting and work.starved
        if ordered:
            found = await floor.sources.gradient(self.step, work.index)
            if found is not None:
                return Gradient(found.loss_sum, found.num_tokens, 0.0, found.payload)
        again = ordered or work.patient or work.hedged  # somebody began it before: it is likely to be done further on
        request = Process(self.step, floor.stage + 1, work.index, repair=again)
        try:
            return await floor.caller.process(request, output)
        except Refused as refused:
            if refused.code in OF_PAYLOAD:  # what we sent, not what our callers sent: they may try another
                raise Refused(RejectCode.NOT_READY, f"refused further on: {refused.reason}") from refused
            raise

    async def _count(self, work: Work, stash: Stash, answer: Gradient) -> None:
        """The weight pass, once granted (rule 5). Without the keeper's word the stash is dropped after a while."""
        try:
            async with asyncio.timeout(self._limits.wait_s):
                await work.decided.wait()
        except TimeoutError:
            self._claims.withdraw(self.step, work.index)
            return
        if work.voids is None or work.index in self.losses:
            return  # another's, or counted here before (the memo forgot the answer)
        stash.voids = work.voids
        try:
            added = await self._engine.accumulate(stash)
        except (BadMessage, Overflow):
            # The answer was finite, the weight gradient is not, or does not fit the grid: nobody can count it.
            self._claims.non_finite(self.step, work.index)
            return
        if added and stash.voids == self._engine.voids(stash.step):
            last_stage = self._floor.stage + 1 == self._floor.num_stages
            self.losses[work.index] = (answer.loss_sum if last_stage else 0.0, answer.num_tokens)
            self._claims.added(stash)
        else:
            self._claims.withdraw(self.step, work.index)
