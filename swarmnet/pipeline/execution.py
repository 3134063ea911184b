"""Microbatches through one stage of this replica: accept, run, pass on, answer, and add what the keeper granted.

Answers `Process` and `Fetch`; runs what the keeper orders. It asks the step machine (through `Claims`) who may count an
index and obeys; it never counts by itself. Everything here is keyed by the current step and forgotten at the next.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from swarmnet.errors import BadMessage, Overflow, Refused, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import (
    Accepted,
    Answer,
    Busy,
    Fetch,
    Gradient,
    MovedTo,
    Packed,
    Process,
    Rejected,
    Running,
)
from swarmnet.net.transport import ReadPayload
from swarmnet.pipeline.caller import OF_PAYLOAD, Caller
from swarmnet.pipeline.memo import Memo
from swarmnet.pipeline.relay import Spawn
from swarmnet.pipeline.sources import Sources
from swarmnet.pipeline.uncounted import Uncounted
from swarmnet.pipeline.work import Slots, Work
from swarmnet.stage.engine import Engine, Stash

_AFTER_LEAVING_S = 1.0
"""When to ask a replica again that is about to leave: it may be the last one then, and serve on."""


class Claims(Protocol):
    """What the step machine does for the pipeline."""

    def claim(self, index: int) -> None:
        """Ask to count `index`; the word comes back through `Execution.granted` or `Execution.owned`."""
        ...

    def withdraw(self, index: int) -> None:
        """The work on `index` was dropped."""
        ...

    def added(self, index: int, stash: Stash) -> None:
        """The weight gradient of `index` was added under `stash.voids`."""
        ...

    def non_finite(self, index: int) -> None:
        """`index` gave a non-finite value here or further on, from finite input."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """slots: microbatches in flight. running_s: pause between signs of life to callers, and how long a call that is
    ahead of us may wait. wait_s: how long finished work waits for the keeper's word before its stash is dropped."""

    slots: int
    running_s: float
    wait_s: float
    memo_bytes: int

    @property
    def door_s(self) -> float:
        """How long a call waits for a slot before it is told to come back: longer, and callers leave a replica that
        is stuck behind a hung neighbour too late."""
        return self.wait_s / 4


class Execution:
    """Executes the microbatches of one (peer, stage)."""

    def __init__(
        self,
        stage: int,
        num_stages: int,
        *,
        engine: Engine,
        claims: Claims,
        caller: Caller | None,
        sources: Sources,
        check: Callable[[tuple[Packed, ...]], None],
        limits: Limits,
        spawn: Spawn,
    ) -> None:
        self.stage, self.num_stages = stage, num_stages
        self.engine, self._claims, self._caller, self._sources = engine, claims, caller, sources
        self._check, self._limits, self._spawn = check, limits, spawn
        self.version = -1
        self.memo = Memo(limits.memo_bytes)
        self.works: dict[int, Work] = {}
        self.executions = 0
        self.losses: dict[int, tuple[float, int]] = {}
        self._tasks: dict[Work, asyncio.Task[None]] = {}
        self._owners: dict[int, PeerId] = {}
        self._alive: Callable[[PeerId], bool] = lambda peer: True
        self._slots = Slots(limits.slots)
        self._uncounted = Uncounted(
            stage, engine=engine, memo=self.memo, caller=caller, sources=sources, check=check, spawn=spawn,
            running_s=limits.running_s,
        )
        self._begun = asyncio.Event()
        self._waiting = 0
        self.leaving = False  # nothing new is begun for callers; what is at work here is finished

    # ------------------------------------------------------------ what the step machine says

    def begin(self, version: int, *, alive: Callable[[PeerId], bool]) -> None:
        """The weights are those of `version`; everything older is void. Work is taken from now on."""
        self.stop()
        self.version, self._alive = version, alive
        self._begun.set()
        self._begun = asyncio.Event()

    def stop(self) -> None:
        """Drop all work and memory: the weights are about to change."""
        self.version = -1
        for task in self._tasks.values():
            task.cancel()
        for work in self.works.values():
            work.finish(Refused(RejectCode.STALE, "the step was applied"))
        self.works, self._tasks, self._owners, self.losses = {}, {}, {}, {}
        self.memo.clear()
        # Slots die with their step: tasks of the old one give back to the old object.
        self._slots = Slots(self._limits.slots)
        self._uncounted.begin()

    def granted(self, index: int, voids: int) -> None:
        """This replica counts `index`."""
        self._owners.pop(index, None)
        work = self.works.get(index)
        if work is None:
            self._claims.withdraw(index)
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
                self._claims.claim(work.index)

    def order(self, index: int) -> None:
        """The keeper wants `index` executed here (rule 8)."""
        work = self.works.get(index)
        if work is None:
            self._start(index, patient=True)  # a caller may have brought it to another replica meanwhile
            self._claims.claim(index)
        elif work.owner is not None:
            self._owners.pop(index, None)  # whoever it was is gone
            work.undecided()
            self._claims.claim(index)

    @property
    def queue(self) -> int:
        """Microbatches in flight."""
        return self._slots.taken

    # ------------------------------------------------------------ what other peers ask

    async def process(self, caller: PeerId, request: Process, read: ReadPayload) -> AsyncGenerator[Answer, None]:
        """Answer one `Process` call (rules 1 and 2)."""
        if request.step > self.version:
            await self._wait_for(request.step)
        if request.step != self.version:
            yield self._wrong_step(request.step)
            return
        if request.purpose == "eval":
            if self.leaving or not self._slots.try_take():
                yield Busy(self._retry_after(), self.version)
                return
            slots = self._slots
            try:
                async for answer in self._uncounted.evaluate(request, read):
                    yield answer
            finally:
                slots.give()
            return
        # A caller told to come back sends its payload again, so with all slots taken it first waits at the door.
        patience = asyncio.get_running_loop().time() + self._limits.door_s
        while (admitted := await self._admit(request)) is None and asyncio.get_running_loop().time() < patience:
            yield Running()
        if not isinstance(admitted, Work):
            yield admitted or Busy(self._retry_after(), self.version)
            return
        work = admitted
        work.hedged = work.hedged or request.hedge
        yield Accepted()
        if not work.input.done() and not work.outcome.done():   # while the caller was told, it may have ended
            await self._upload(work, read)
        while not work.outcome.done():
            await asyncio.wait([work.outcome], timeout=self._limits.running_s)
            if not work.outcome.done():
                yield Running()
        outcome = work.outcome.result()
        if isinstance(outcome, SwarmError):
            raise outcome
        yield outcome

    async def fetch(self, request: Fetch) -> AsyncGenerator[Answer, None]:
        """Answer one `Fetch` call (rule 6)."""
        if request.step < self.version:
            yield self._wrong_step(request.step)
        elif request.step > self.version:
            yield Rejected(RejectCode.NOT_READY, version=self.version)
        else:
            async for answer in self._uncounted.fetch(request):
                yield answer

    # ------------------------------------------------------------ inside

    async def _admit(self, request: Process) -> Work | Answer | None:
        """The work a call attaches to, begun if need be; or its answer right away; None: no slot came free so far."""
        slots = self._slots
        found = self._ready_answer(request) or self.works.get(request.index)
        if found is not None:
            return found
        if self.leaving or slots.crowded:
            return Busy(self._retry_after(), self.version)
        has_slot = await slots.enter(patience_s=self._limits.running_s)
        found = self._ready_answer(request) or self.works.get(request.index)     # the world may have moved on
        if has_slot and found is None and slots is self._slots and not self.leaving:
            return self._start(
                request.index, patient=request.repair, hedged=request.hedge, has_slot=True, fed=True
            )
        if has_slot:
            slots.give()
        return found

    def _ready_answer(self, request: Process) -> Answer | None:
        """What a call gets without any work here: the memoised answer, the owner, or that its step is over."""
        if request.step != self.version:
            return self._wrong_step(request.step)
        known = self.memo.answer(request.index)
        if known is not None or request.index in self.works:
            return known
        owner = self._owners.get(request.index)
        if owner is not None and not request.hedge and self._alive(owner):
            return MovedTo(owner)
        return None

    def _wrong_step(self, step: int) -> Answer:
        if 0 <= step < self.version:
            return Rejected(RejectCode.STALE, f"step {step} is applied", self.version)
        return Busy(self._retry_after(), self.version)

    def _retry_after(self) -> float:
        if self.leaving:
            return _AFTER_LEAVING_S
        return 0.05 if self.version >= 0 else 0.1

    async def _wait_for(self, step: int) -> None:
        """Hold a call that is ahead of us for a moment: it takes no slot and its payload is not read (rule 1)."""
        if self._waiting >= 4 * self._limits.slots:
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(self._limits.running_s):
                while self.version < step:
                    await self._begun.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1

    def _start(
        self, index: int, *, patient: bool = False, hedged: bool = False, has_slot: bool = False, fed: bool = False
    ) -> Work:
        loop = asyncio.get_running_loop()
        work = Work(index, patient, hedged, loop.create_future(), loop.create_future(), has_slot=has_slot)
        if not fed:
            work.starve()
        self.works[index] = work
        self._tasks[work] = self._spawn(self._run(work, self.version, self._slots))
        return work

    async def _upload(self, work: Work, read: ReadPayload) -> None:
        """Take the input from this caller, unless another one is faster (H11: callers die while uploading)."""
        work.uploads += 1
        try:
            payload = await read()
            self._check(payload)
            work.feed(payload)
        except BadMessage:
            if work.uploads == 1 and not work.input.done() and not work.starved:
                self._drop(work)  # begun for this sender alone
            raise
        finally:
            work.uploads -= 1
            if work.uploads == 0 and not work.input.done():
                work.starve()

    def _drop(self, work: Work) -> None:
        """Forget a work that has no input and no honest caller."""
        self._tasks.pop(work).cancel()
        self._release(work, self._slots)      # a task that has not begun will not do it
        self._claims.withdraw(work.index)
        del self.works[work.index]
        work.finish(Busy(self._retry_after(), self.version))      # to others that attached meanwhile

    @staticmethod
    def _release(work: Work, slots: Slots) -> None:
        if work.has_slot:
            work.has_slot = False
            slots.give()

    async def _obtain_input(self, work: Work, step: int, slots: Slots) -> tuple[Packed, ...]:
        """Wait for an upload; without one, give the slot back (rule 7) and fetch from the stage before.

        Whatever comes first counts: a caller may still attach and send it.
        """
        await work.fed_or_starved.wait()
        if not work.input.done():
            self._release(work, slots)
            fetching = self._spawn(self._fetch_input(work, step))
            try:
                await asyncio.wait([work.input])
            finally:
                fetching.cancel()
        return work.input.result()

    async def _fetch_input(self, work: Work, step: int) -> None:
        try:
            work.feed(await self._sources.input(step, work.index))
        except SwarmError as error:
            if not work.input.done():
                work.input.set_exception(error)

    async def _run(self, work: Work, step: int, slots: Slots) -> None:
        try:
            await self._run_stages(work, step, slots)
        except SwarmError as error:
            if isinstance(error, Refused) and error.code is RejectCode.VOID:
                self._claims.non_finite(work.index)
            self._claims.withdraw(work.index)
            work.finish(error)
        finally:
            self._release(work, slots)
            self._tasks.pop(work, None)
            if self.works.get(work.index) is work:
                del self.works[work.index]

    async def _run_stages(self, work: Work, step: int, slots: Slots) -> None:
        payload = await self._obtain_input(work, step, slots)
        if not work.decided.is_set():
            self._claims.claim(work.index)  # only now: what is malformed never claims
        if work.patient and not work.hedged:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.running_s):
                    await work.decided.wait()
        if work.owner is not None and not work.hedged and self._alive(work.owner):
            work.finish(MovedTo(work.owner))
            return
        if not work.has_slot:
            await slots.take()
            work.has_slot = True
        work.computing = True
        self.executions += 1
        stash = await self.engine.forward(step, work.index, payload, train=True)
        if self.stage + 1 < self.num_stages:
            self.memo.keep_output(work.index, stash.output)
            answer = await self._gradient_of(work, step, stash.output)
        else:
            answer = Gradient(stash.loss_sum, stash.num_tokens)
        gradient = await self.engine.backward(stash, answer.payload)
        mine = Gradient(answer.loss_sum, answer.num_tokens, stash.compute_s, gradient)
        self.memo.keep_answer(work.index, mine)
        work.finish(mine)
        await self._count(work, stash, answer)

    async def _gradient_of(self, work: Work, step: int, output: tuple[Packed, ...]) -> Gradient:
        """The gradient of what this stage sent on: memoised there after a repair's order, else executed there."""
        assert self._caller is not None
        ordered = work.uploads == 0 and work.starved
        if ordered:
            found = await self._sources.gradient(step, work.index)
            if found is not None:
                return Gradient(found.loss_sum, found.num_tokens, 0.0, found.payload)
        again = ordered or work.patient or work.hedged  # somebody began it before: it is likely to be done further on
        request = Process(step, self.stage + 1, work.index, repair=again)
        try:
            return await self._caller.process(request, output)
        except Refused as refused:
            if refused.code in OF_PAYLOAD:      # what we sent, not what our callers sent: they may try another
                raise Refused(RejectCode.NOT_READY, f"refused further on: {refused.reason}") from refused
            raise

    async def _count(self, work: Work, stash: Stash, answer: Gradient) -> None:
        """The weight pass, once granted (rule 5). Without the keeper's word the stash is dropped after a while."""
        try:
            async with asyncio.timeout(self._limits.wait_s):
                await work.decided.wait()
        except TimeoutError:
            self._claims.withdraw(work.index)
            return
        if work.voids is None or work.index in self.losses:
            return  # another's, or counted here before (the memo forgot the answer)
        stash.voids = work.voids
        try:
            added = await self.engine.accumulate(stash)
        except (BadMessage, Overflow):
            # The answer was finite, the weight gradient is not, or does not fit the grid: nobody can count it.
            self._claims.non_finite(work.index)
            return
        if added and stash.voids == self.engine.voids(stash.step):
            last_stage = self.stage + 1 == self.num_stages
            self.losses[work.index] = (answer.loss_sum if last_stage else 0.0, answer.num_tokens)
            self._claims.added(work.index, stash)
        else:
            self._claims.withdraw(work.index)
