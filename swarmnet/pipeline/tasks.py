"""The microbatches of one open step through one stage of this replica: accept, run, pass on, answer, count.

Everything here is keyed by index and forgotten with the step: tasks and their slots, the assignees, the output cache,
the losses. Where steps overlap each open one has its own `StepTasks`, so that the newest can never take a slot from a
repair of the oldest. It asks the step machine (through `Claims`) who may count an index and obeys; it never counts by
itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from swarmnet.clock import loop_time, set_within
from swarmnet.errors import BadMessage, DeviceFull, Overflow, Refused, RejectCode, SwarmError
from swarmnet.ids import PeerId
from swarmnet.messages import (
    Accepted,
    Answer,
    Busy,
    Fetch,
    Fetched,
    Gradient,
    MovedTo,
    Packed,
    Process,
    Rejected,
    Running,
    Sent,
    Waits,
    WorkRecord,
)
from swarmnet.pipeline.caller import OF_PAYLOAD
from swarmnet.pipeline.recovery import OutputCache, kept_alive, signs_until
from swarmnet.pipeline.slots import Slots
from swarmnet.pipeline.transfers import Signed
from swarmnet.stage.interfaces import SavedActivations
from swarmnet.telemetry.spans import SpanKind
from swarmnet.transport import ReadPayload

if TYPE_CHECKING:
    from swarmnet.pipeline.execution import Execution

# ---------------------------------------------------------------- one microbatch
#
# One microbatch at work in one stage of this replica: what has arrived, who may count it, how it ended.

Outcome = Gradient | MovedTo | Busy | SwarmError


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class MicrobatchTask:
    """One microbatch at work. input and outcome are set once; discards and owner follow the leader's decision.

    discards: the discard counter of the grant, if this replica counts it. owner: the replica that counts it, if another
    does.
    patient: ask for its assignee before computing (a retry's call). hedged: compute it in any case, because a caller
    found the owner hung. waiting: callers attached while the input is missing, the sender among them. sending: caller
    -> when its upload began; unsent: done once that has failed. starved: no caller uploads the input, so it is fetched.
    slow: it gave its slot back, as its input does not come. passed_on: the next stage was asked. slot_at: when it was
    begun with a slot, answered_s: how long it then took to its answer; None: it had none. received, passed: what was
    signed of its input and output.
    """

    index: int
    patient: bool
    hedged: bool
    running: asyncio.Task[None] = field(init=False)
    input: asyncio.Future[tuple[Packed, ...]] = field(default_factory=_future)
    outcome: asyncio.Future[Outcome] = field(default_factory=_future)
    received: tuple[Sent, ...] = ()
    passed: tuple[Sent, ...] = ()
    waiting: int = 0
    sending: dict[PeerId, float] = field(default_factory=dict)
    unsent: asyncio.Future[None] = field(default_factory=_future)
    has_slot: bool = False
    slow: bool = False
    slot_at: float | None = None
    answered_s: float | None = None
    computing: bool = False
    passed_on: bool = False
    discards: int | None = None
    owner: PeerId | None = None
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    starved: bool = False
    fed_or_starved: asyncio.Event = field(default_factory=asyncio.Event)

    def decide(self, *, discards: int | None = None, owner: PeerId | None = None) -> None:
        """This replica counts it, under discard counter `discards`; or `owner` does; or the claim is open again."""
        self.discards, self.owner = discards, owner
        if discards is None and owner is None:
            self.decided.clear()
        else:
            self.decided.set()

    def may_send(self, caller: PeerId, *, now: float, slow_s: float) -> bool:
        """One caller at a time sends the input; another one only if the last to begin takes longer than `slow_s`."""
        return caller not in self.sending and all(now - began >= slow_s for began in self.sending.values())

    def feed(self, payload: tuple[Packed, ...], sents: tuple[Sent, ...]) -> None:
        """The input has arrived; the first one counts. sents: what was signed of it."""
        if not self.input.done():
            self.input.set_result(payload)
            self.received = sents
            self.fed_or_starved.set()

    def starve(self) -> None:
        """No caller is sending the input."""
        self.starved = True
        self.fed_or_starved.set()

    def finish(self, outcome: Outcome) -> None:
        """Tell all attached callers how it ended."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


# ---------------------------------------------------------------- the tasks of one step


class StepTasks:
    """Executes the microbatches of one step."""

    def __init__(self, step: int, execution: Execution) -> None:
        self.step, self._execution, self._host = step, execution, execution.host
        self._engine, self._claims, self._timers = execution.engine, execution.claims, execution.host.timers
        self.cache = OutputCache(execution.output_cache_bytes)
        self.by_index: dict[int, MicrobatchTask] = {}
        self.losses: dict[int, tuple[float, int]] = {}
        self.ended = False
        self._owners: dict[int, PeerId] = {}
        self._slots = Slots(execution.slots)
        self._transfers = execution.transfers.open(step) if execution.transfers is not None else None
        self._reserved = asyncio.Lock()  # for what is computed again for others, and not counted
        self._seen = 0  # indexes below it were brought, here or to other replicas: callers begin with the lowest
        self.begun = 0  # tasks

    def left(self, share: float) -> int:
        """Microbatches that I have yet to pass on, if `share` of those to come will be mine."""
        coming = share * (self._execution.microbatches - self._seen)
        return sum(not task.passed_on for task in self.by_index.values()) + round(coming)

    def end(self) -> None:
        """The step is about to be applied, or the weights to be replaced: drop all work and memory."""
        self.ended = True
        if self._transfers is not None:
            self._transfers.ended = True
        for task in self.by_index.values():
            task.running.cancel()
            task.finish(Refused(RejectCode.STALE, "the step was applied"))
        self.by_index, self._owners = {}, {}
        self.cache.clear()

    # ------------------------------------------------------------ what the step machine says

    def granted(self, index: int, discards: int) -> None:
        """This replica counts `index`."""
        self._owners.pop(index, None)
        task = self.by_index.get(index)
        if task is None:
            self._claims.withdraw(self.step, index)
        else:
            task.decide(discards=discards)

    def owned_elsewhere(self, index: int, owner: PeerId) -> None:
        """Another replica counts `index`: before forward its callers are sent there, later it is not accumulated."""
        self._owners[index] = owner
        task = self.by_index.get(index)
        if task is not None:
            task.decide(owner=owner)

    def discarded(self) -> None:
        """The accumulator is empty again: what has not been added yet claims once more."""
        self.losses = {}
        self._execution.works.discard(self.step)
        for task in self.by_index.values():
            if task.discards is not None:
                task.decide()
                self._claims.claim(self.step, task.index)

    def order(self, index: int) -> None:
        """The leader wants `index` executed here (rule 8)."""
        task = self.by_index.get(index)
        if task is None:
            self._start(index, patient=True)  # a caller may have brought it to another replica meanwhile
            self._claims.claim(self.step, index)
        # The leader's order is newer than the owner that I know of.
        elif task.owner is not None:
            self._owners.pop(index, None)  # that owner is gone
            task.decide()
            self._claims.claim(self.step, index)

    @property
    def waits(self) -> Waits:
        """For whom all that is here waits, so that nothing is left to do."""
        tasks = self.by_index.values()
        if counted := [task for task in tasks if task.discards is not None]:
            return "stage" if all(task.passed_on and not task.outcome.done() for task in counted) else ""
        return "leader" if tasks and all(task.outcome.done() and not task.decided.is_set() for task in tasks) else ""

    @property
    def queue(self) -> int:
        """Microbatches in flight."""
        return self._slots.taken

    # ------------------------------------------------------------ what other peers ask

    async def process(self, caller: PeerId, request: Process, read: ReadPayload) -> AsyncGenerator[Answer, None]:
        """Answer one `Process` call of this step (rule 2)."""
        # Before the payload is read: what a caller uploads takes memory.
        if not self._execution.may_send(caller):
            yield self._execution.busy()
            return
        # A caller told to come back sends its payload again, so with all slots taken it first waits in the queue.
        arrived = loop_time()
        while (admitted := await self._admit(request, arrived)) is None and loop_time() < arrived + self._timers.slot_s:
            yield Running()
        if not isinstance(admitted, MicrobatchTask):
            yield admitted or self._execution.busy()
            return
        task = admitted
        task.hedged = task.hedged or request.hedge
        yield Accepted()
        async with contextlib.aclosing(self._feed(task, caller, request, read)) as signs:
            async for sign in signs:
                yield sign
        async for sign in signs_until(task.outcome, self._timers.beat_s):
            yield sign
        outcome = task.outcome.result()
        if isinstance(outcome, SwarmError):
            raise outcome
        ready = loop_time()
        yield outcome
        # The transport comes back for more once it has written all of it.
        self._span("send", request.index, ready)

    async def fetch(self, request: Fetch) -> AsyncGenerator[Answer, None]:
        """Answer one `Fetch` call of this step (rule 6): hand out what is remembered; recompute a missing input of the
        next stage unless only a copy is wanted."""
        kept, recompute = self._kept(request), request.kind == "input" and request.stage >= 0 and not request.cached
        if kept is None and not recompute:
            yield Rejected(RejectCode.NOT_FOUND, "no data here" if request.stage == -1 else "not memoised")
            return
        yield Accepted()  # a sign of life, because the payload may take long on a slow line
        if kept is not None:
            yield kept
            return
        async for answer in kept_alive(self._recompute(request), self._timers.beat_s):
            yield answer

    def _kept(self, request: Fetch) -> Fetched | None:
        if request.kind == "gradient":
            answer = self.cache.answer(request.index)
            if answer is None:
                return None
            return Fetched(answer.payload, answer.loss_sum, answer.num_tokens, answer.sents)
        if request.stage == -1:
            tokens = self._host.tokens(request.step, request.index)
            return None if tokens is None else Fetched(tokens)
        return self.cache.output(request.index)

    async def _recompute(self, request: Fetch) -> Fetched:
        """Forward only, in a slot of its own so that a full replica can still repair others (rule 7)."""
        async with self._reserved:
            given = await self._execution.recovery.input(request.step, request.index)
            *inputs, proof = given.payload
            stash = await self._execution.forward_only(request, inputs)
            sents: tuple[Sent, ...] = ()
            if self._transfers is not None:
                sents = await self._transfers.sign(request.index, "output", stash.output, Signed(inputs, given.sents))
            output = Fetched((*stash.output, proof), sents=sents)
            self.cache.keep(request.index, output)
            return output

    # ------------------------------------------------------------ inside

    def _span(self, kind: SpanKind, index: int, began: float, ended: float | None = None) -> None:
        """It is over now, if not before."""
        ended = loop_time() if ended is None else ended
        self._execution.spans.add(kind, self._execution.stage, self.step, index, began, ended)

    async def _admit(self, request: Process, arrived: float) -> MicrobatchTask | Answer | None:
        """The task that the call attaches to, begun if need be; or its answer at once; None: no slot is free yet."""
        slots = self._slots
        found = self._ready_answer(request) or self.by_index.get(request.index)
        if found is not None:
            return found
        if self._execution.leaving or slots.crowded:
            return self._execution.busy()
        has_slot = await slots.enter(patience_s=self._timers.beat_s)
        found = self._ready_answer(request) or self.by_index.get(request.index)  # the world may have moved on
        if has_slot and found is None and not self._execution.leaving:
            self._span("slot", request.index, arrived)
            return self._start(request.index, patient=request.repair, hedged=request.hedge, has_slot=True, fed=True)
        if has_slot:
            slots.give()
        return found

    def _ready_answer(self, request: Process) -> Answer | None:
        """An answer that needs no task: the memoised one, the owner, or that the step is over. Else None."""
        if self.ended:
            return self._execution.wrong_step(self.step)
        known = self.cache.answer(request.index)
        if known is not None or request.index in self.by_index:
            return known
        owner = self._owners.get(request.index)
        # It is assigned to another live replica: the caller fetches the gradient there.
        if owner is not None and not request.hedge and self._host.may_live(owner):
            return MovedTo(owner)
        return None

    def _start(
        self, index: int, *, patient: bool = False, hedged: bool = False, has_slot: bool = False, fed: bool = False
    ) -> MicrobatchTask:
        task = MicrobatchTask(index, patient, hedged, has_slot=has_slot, slot_at=loop_time() if has_slot else None)
        if not fed:
            task.starve()
        self.by_index[index] = task
        self._seen, self.begun = max(self._seen, index + 1), self.begun + 1
        task.running = self._host.spawn(self._run(task))
        return task

    async def _feed(
        self, task: MicrobatchTask, caller: PeerId, request: Process, read: ReadPayload
    ) -> AsyncGenerator[Running, None]:
        """Take the input from this caller, unless another is sending it and is not slow: callers die meanwhile."""
        task.waiting += 1
        try:
            while not task.input.done() and not task.outcome.done():
                free = self._execution.may_send(caller)
                if free and task.may_send(caller, now=loop_time(), slow_s=self._timers.slot_s):
                    await self._upload(task, caller, request, read)
                    return
                ends: list[asyncio.Future[Any]] = [task.input, task.outcome, task.unsent]
                await asyncio.wait(ends, timeout=self._timers.beat_s, return_when=asyncio.FIRST_COMPLETED)
                yield Running()
        finally:
            task.waiting -= 1
            if not task.waiting and not task.input.done():
                task.starve()

    async def _upload(self, task: MicrobatchTask, caller: PeerId, request: Process, read: ReadPayload) -> None:
        task.sending[caller] = began = loop_time()
        self._execution.sending[caller] += 1
        try:
            task.feed(await self._execution.receive(caller, request, read), request.sents)
            self._span("receive", task.index, began)
        except (BadMessage, Refused):
            over = task.outcome.done()  # while it came, the step may have ended
            if task.waiting == 1 and not task.input.done() and not task.starved and not over:
                self._drop(task)  # begun for this sender alone
            raise
        finally:
            del task.sending[caller]
            self._execution.sending[caller] -= 1
            if not self._execution.sending[caller]:
                del self._execution.sending[caller]
            task.unsent.set_result(None)
            task.unsent = _future()

    def _drop(self, task: MicrobatchTask) -> None:
        """Forget a task that has no input and no honest caller."""
        task.running.cancel()
        self._release(task)  # a task that has not begun will not do it
        self._claims.withdraw(self.step, task.index)
        del self.by_index[task.index]
        task.finish(self._execution.busy())  # to others that attached meanwhile

    def _release(self, task: MicrobatchTask) -> None:
        if task.has_slot:
            task.has_slot = False
            self._slots.give()

    async def _obtain_input(self, task: MicrobatchTask) -> tuple[Packed, ...]:
        """Wait for an upload; without one, give the slot back (rule 7) and fetch from the stage before.

        Whatever comes first counts: a caller may still attach and send it.
        """
        while not await set_within(task.fed_or_starved, self._timers.slot_s):
            if task.has_slot and self._slots.wanted:
                # A caller that announces an input and does not send it must not block others: the slot goes back,
                # and this task gets the next free one when its input is here.
                self._release(task)
                task.slow = True
                if sum(each.slow for each in self.by_index.values()) > self._slots.size:
                    task.finish(self._execution.busy())
                    return ()
        task.slow = False
        if not task.input.done():
            self._release(task)
            fetching = self._host.spawn(self._fetch_input(task))
            try:
                await asyncio.wait([task.input])
            finally:
                fetching.cancel()
        return task.input.result()

    async def _fetch_input(self, task: MicrobatchTask) -> None:
        try:
            found = await self._execution.recovery.input(self.step, task.index)
            task.feed(found.payload, found.sents)
        except SwarmError as error:
            if not task.input.done():
                task.input.set_exception(error)

    async def _run(self, task: MicrobatchTask) -> None:
        try:
            await self._run_stages(task)
        except DeviceFull as error:
            self._execution.full(error)
            self._slots.resize(min(self._slots.size, self._execution.slots))
            self._claims.withdraw(self.step, task.index)
            task.finish(self._execution.busy())
        except SwarmError as error:
            if isinstance(error, Refused) and error.code is RejectCode.OVERFLOWED:
                self._claims.non_finite(self.step, task.index)
            self._claims.withdraw(self.step, task.index)
            task.finish(error)
        finally:
            self._release(task)
            if self.by_index.get(task.index) is task:
                del self.by_index[task.index]

    async def _run_stages(self, task: MicrobatchTask) -> None:
        payload = await self._obtain_input(task)
        if task.outcome.done():
            return
        *inputs, proof = payload
        fed = Signed(inputs, task.received)
        if not task.decided.is_set():
            self._claims.claim(self.step, task.index)  # only now: what is malformed never claims
        if task.patient and not task.hedged:
            await set_within(task.decided, self._timers.beat_s)
        # Nothing is lost yet: forward has not begun.
        if task.owner is not None and not task.hedged and self._host.may_live(task.owner):
            task.finish(MovedTo(task.owner))
            return
        # The slot was given back while the input did not come (rule 7).
        if not task.has_slot:
            await self._slots.take()
            task.has_slot = True
        task.computing = True
        self._execution.executions += 1
        stash = await self._engine.forward(self.step, task.index, inputs, train=True)
        self._computed("forward", stash)
        if self._execution.stage + 1 < self._execution.num_stages:
            output = (*stash.output, proof)
            if self._transfers is not None:
                task.passed = await self._transfers.sign(task.index, "output", stash.output, fed)
            self.cache.keep(task.index, Fetched(output, sents=task.passed))
            asked = loop_time()
            answer = await self._gradient_of(task, output)
            self._span("call", task.index, asked)
        else:
            answer = Gradient(stash.loss_sum, stash.num_tokens)
        gradient = await self._engine.backward(stash, answer.payload)
        self._computed("backward", stash)
        mine = Gradient(answer.loss_sum, answer.num_tokens, stash.compute_s, gradient)
        if self._transfers is not None and gradient:
            answered = Signed(answer.payload, answer.sents)
            sents = await self._transfers.sign(task.index, "answer", gradient, fed, answered)
            mine = replace(mine, sents=sents)
        self.cache.keep(task.index, mine)
        task.finish(mine)
        if task.slot_at is not None and task.has_slot:
            task.answered_s = loop_time() - task.slot_at
        await self._count(task, stash, answer, mine)

    async def _gradient_of(self, task: MicrobatchTask, output: tuple[Packed, ...]) -> Gradient:
        """The gradient of this stage's output: for ordered work a memoised one, if there is; else by a call."""
        assert self._execution.caller is not None
        # No caller uploaded or waited for it: the leader ordered it (or every caller left), so the rest may be done
        # already.
        ordered = not task.waiting and task.starved
        if ordered:
            found = await self._execution.recovery.gradient(self.step, task.index)
            if found is not None:
                return Gradient(found.loss_sum, found.num_tokens, 0.0, found.payload, sents=found.sents)
        again = ordered or task.patient or task.hedged  # begun before, so later stages may have finished it
        request = Process(self.step, self._execution.stage + 1, task.index, repair=again, sents=task.passed)
        task.passed_on = True
        try:
            return await self._execution.caller.process(request, output)
        except Refused as refused:
            if refused.code in OF_PAYLOAD:  # what we sent, not what our callers sent: they may try another
                raise Refused(RejectCode.NOT_READY, f"refused further on: {refused.reason}") from refused
            raise

    async def _count(self, task: MicrobatchTask, stash: SavedActivations, answer: Gradient, mine: Gradient) -> None:
        """The weight pass, once granted (rule 5). Without a grant the saved activations are dropped after a while.

        The claim stands, because the caller has its answer and brings the microbatch to no other replica: if the leader
        grants it later, `granted` finds no task and gives the index back, and the leader orders it at once.
        """
        answered_compute_s, answered = stash.compute_s, loop_time()
        await set_within(task.decided, self._timers.grant_s)
        if task.discards is None or task.index in self.losses:
            return  # undecided, another's, or counted here before (the cache dropped the answer)
        self._span("grant", task.index, answered)
        stash.discards = task.discards
        record = await self._record(task, stash, answer, mine)
        try:
            added = await self._engine.accumulate(stash)
        except (BadMessage, Overflow):
            # The answer was finite, the weight gradient is not, or does not fit the grid: no replica can count it.
            self._claims.non_finite(self.step, task.index)
            return
        self._execution.num_computed += 1
        self._execution.full_in_a_row = 0
        self._execution.busy_s += stash.compute_s
        # How long it waited for its weight pass, which goes last, is no part of the way.
        if task.answered_s is not None:
            self._learn(task.answered_s + stash.compute_s - answered_compute_s, stash.compute_s)
        if added and stash.discards == self._engine.discards(stash.step):
            self._computed("weights", stash)
            last_stage = self._execution.stage + 1 == self._execution.num_stages
            self.losses[task.index] = (answer.loss_sum if last_stage else 0.0, answer.num_tokens)
            # With the loss, so that the works are always those that the sum holds.
            if record is not None:
                record = record if self._transfers is None else self._transfers.counted(record)
                sents, made = tuple(dict.fromkeys((*task.received, *answer.sents))), (*stash.output, *mine.payload)
                self._execution.works.add(self.step, record, (*task.input.result(), *answer.payload), sents, made=made)
            self._claims.added(stash)
        else:
            self._claims.withdraw(self.step, task.index)

    async def _record(
        self, task: MicrobatchTask, stash: SavedActivations, answer: Gradient, mine: Gradient
    ) -> WorkRecord | None:
        """Digests of a microbatch as it travelled. None: no audit will ask for them."""
        if not self._execution.works.cap_bytes:
            return None
        inputs, last = task.input.result()[:-1], self._execution.stage + 1 == self._execution.num_stages
        found = [
            await Signed(payload, sents).digest()
            for payload, sents in (
                (inputs, task.received),
                (stash.output, task.passed),
                (answer.payload, answer.sents),
                (mine.payload, mine.sents),
            )
        ]
        loss = (answer.loss_sum, answer.num_tokens) if last else (0.0, 0)
        return WorkRecord(task.index, found[0], found[1], found[2], found[3], *loss)

    def _computed(self, kind: SpanKind, stash: SavedActivations) -> None:
        """A pass of it is over."""
        asked, began, ended = stash.ran
        self._span("queue", stash.index, asked, began)
        self._span(kind, stash.index, began, ended)

    def _learn(self, held: float, compute_s: float) -> None:
        """A microbatch came through: the first ones say how far the way is."""
        if self._execution.depth is not None and self._execution.depth.counted(held, compute_s):
            self._execution.measure()
            self._slots.resize(max(self._slots.size, self._execution.slots))
