"""One replica's microbatches over emulated compute: who may hold what, and whose fault ends whose call."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from collections.abc import AsyncIterator, Callable

import pytest
from test_caller import NextReplicas

from swarmnet.errors import BadMessage, DeviceFull, Overflow, Refused, RejectCode
from swarmnet.ids import Ballot, Chain, PeerId, RoundId
from swarmnet.manifest.timers import Timers
from swarmnet.messages import (
    Accepted,
    Answer,
    AuditData,
    AuditRequest,
    Busy,
    Commit,
    Fetch,
    Fetched,
    Gradient,
    Packed,
    Process,
    Rejected,
    Running,
    WorkRecord,
)
from swarmnet.pipeline.caller import OF_PAYLOAD, Caller
from swarmnet.pipeline.execution import Execution
from swarmnet.pipeline.inputs import AnswerCheck, InputCheck, TurnedAway
from swarmnet.pipeline.recovery import Recovery, kept_alive
from swarmnet.pipeline.router import Router
from swarmnet.pipeline.works import MOST_ASKS, ShownWorks, WorkBook, digest, show
from swarmnet.pledge import proves, whole_of
from swarmnet.stage.interfaces import SavedActivations
from swarmnet.testing.clock import VirtualLoop
from swarmnet.testing.doubles import FakeTransport, Script
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_device import Device
from swarmnet.testing.virtual_engine import SimulatedEngine, product
from swarmnet.transport import ReadPayload, layout_of

TIMERS = Timers()

pytestmark = pytest.mark.virtual_time

SLOTS = 2
TOKENS = ("int32", (1, 2))
HIDDEN = ("fp32", (1, 1, 1))
STRANGER, LIAR = PeerId("stranger"), PeerId("liar")


def inputs(stage: int, value: float = 1.0) -> tuple[Packed, ...]:
    tokens = Packed("int32", (1, 2), struct.pack("<ii", 3, 4))
    return (tokens, Packed("fp32", (1, 1, 1), struct.pack("<f", value))) if stage else (tokens,)


def payload(stage: int, value: float = 1.0) -> tuple[Packed, ...]:
    return *inputs(stage, value), PROOF


PROOF = Packed("uint8", (1, 1, 32), b"proof".ljust(32))


class OneProof:
    """Implements Windows: all tokens have the same proof."""

    layout = ("uint8", (1, 1, 32))

    def check(self, step: int, index: int, tokens: Packed, proof: Packed) -> None:
        if proof.data != PROOF.data:
            raise BadMessage(RejectCode.MALFORMED, "not proven")


class Scene:
    """Stage `stage` of two. In stage 0, `rest` is what the one replica of stage 1 answers.

    said: what the step machine was told. Every claim is granted at once.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup,
        stage: int,
        rest: Callable[[Process], Script] = lambda request: None,
        poison: frozenset[tuple[int, int, int]] = frozenset(),
    ) -> None:
        self.stage, self.said, self.named, self.timers = stage, [], [], TIMERS
        self.away: TurnedAway | None = None
        self.full: list[tuple[int, str]] = []
        self.transport = transport = FakeTransport(rest=rest)
        check = InputCheck((TOKENS, HIDDEN) if stage else (TOKENS,), 8, OneProof())
        answer_check = AnswerCheck((HIDDEN,), 1)
        caller = Caller(transport, Router(TIMERS), NextReplicas({PeerId("rest"): 0}), answer_check)
        self.engine = SimulatedEngine(stage, Plan(poison=poison), Device(0.02))
        self.spawn = group.create_task
        self.execution = Execution(
            stage,
            2,
            microbatches=8,
            engine=self.engine,
            claims=self,
            host=self,
            caller=None if stage else caller,
            recovery=Recovery(transport, stage, self, check=check, answers=answer_check),
            check=check,
            slots=SLOTS,
            output_cache_bytes=1 << 16,
            works=WorkBook(1 << 16),
            shown=ShownWorks(1 << 16),
        )
        self.execution.begin(0)

    def live(self, stage: int) -> list[PeerId]:
        return [PeerId("rest")] if stage > self.stage else []

    def tokens(self, step: int, index: int) -> tuple[Packed, ...]:
        return payload(0)

    def may_feed(self, caller: PeerId, request: Process) -> TurnedAway | None:
        return self.away

    def may_live(self, peer: PeerId) -> bool:
        return True

    def device_full(self, slots: int, reason: str) -> None:
        self.full.append((slots, reason))

    def claim(self, step: int, index: int) -> None:
        self.said.append(("claim", index))
        asyncio.get_running_loop().call_soon(self.execution.steps[step].granted, index, self.engine.discards(step))

    def withdraw(self, step: int, index: int) -> None:
        self.said.append(("withdraw", index))

    def added(self, stash: SavedActivations) -> None:
        self.said.append(("added", stash.index))

    def non_finite(self, step: int, index: int) -> None:
        self.said.append(("non_finite", index))

    def bad_input(self, peer: PeerId, step: int, index: int, error: BadMessage) -> None:
        self.named.append((peer, step, index, error.code))

    async def ask(
        self,
        index: int,
        sent: tuple[Packed, ...],
        *,
        after_s: float = 0.0,
        step: int = 0,
        purpose: str = "train",
        caller: PeerId = STRANGER,
    ) -> Answer:
        """One call whose payload arrives `after_s` after it was accepted; its last answer, as a transport tells it."""

        async def read() -> tuple[Packed, ...]:
            await asyncio.sleep(after_s)
            return sent

        last: Answer | None = None
        try:
            request, upload = Process(step, self.stage, index, purpose), ReadPayload(layout_of(sent), read)
            async for answer in self.execution.process(caller, request, upload):
                last = answer
        except (BadMessage, Refused) as error:
            return Rejected(error.code, error.reason)
        assert last is not None
        return last


@contextlib.asynccontextmanager
async def scene(stage: int, **options) -> AsyncIterator[Scene]:
    """A replica; everything it started is stopped afterwards."""
    async with asyncio.TaskGroup() as group:
        here = Scene(group, stage, **options)
        yield here
        here.execution.stop()


BAD = {
    "nan": (payload(1, math.nan), RejectCode.NON_FINITE),
    "shape": ((payload(1)[0], Packed("fp32", (1, 1, 2), bytes(8)), PROOF), RejectCode.BAD_SHAPE),
    "codec": ((payload(1)[0], Packed("bf16", (1, 1, 1), bytes(2)), PROOF), RejectCode.BAD_SHAPE),
    "missing": (payload(0), RejectCode.BAD_SHAPE),
    "length": ((payload(1)[0], Packed("fp32", (1, 1, 1), bytes(2)), PROOF), RejectCode.MALFORMED),
    "vocabulary": ((Packed("int32", (1, 2), struct.pack("<ii", 3, 8)), *payload(1)[1:]), RejectCode.MALFORMED),
    "not proven": ((*inputs(1), Packed("uint8", (1, 1, 32), bytes(32))), RejectCode.MALFORMED),
    "no proof": (inputs(1), RejectCode.BAD_SHAPE),
    "a long proof": ((*inputs(1), Packed("uint8", (1, 2, 32), bytes(64))), RejectCode.BAD_SHAPE),
}


@pytest.mark.parametrize(("bad", "code"), BAD.values(), ids=BAD)
async def test_a_bad_upload_is_refused_and_leaves_nothing(bad: tuple[Packed, ...], code: RejectCode) -> None:
    async with scene(1) as here:
        answer = await here.ask(0, bad)
        assert isinstance(answer, Rejected) and answer.code is code
        assert not here.execution.num_tasks and here.execution.queue == 0 and here.execution.executions == 0
        assert ("claim", 0) not in here.said and ("non_finite", 0) not in here.said
        assert here.named == [(STRANGER, 0, 0, code)]
        assert isinstance(await here.ask(0, payload(1)), Gradient)


async def test_an_input_that_is_refused_for_now_leaves_nothing() -> None:
    class Unknown:
        async def fed(self, *_: object) -> None:
            raise Refused(RejectCode.NOT_A_FEEDER, "who signed it is not known yet")

        def replaced(self) -> None:
            """The test is over."""

    async with scene(1) as here:
        here.execution.transfers = Unknown()  # type: ignore[assignment]
        answer = await here.ask(0, payload(1))
        assert isinstance(answer, Rejected) and answer.code is RejectCode.NOT_A_FEEDER
        assert not here.execution.num_tasks and here.execution.queue == 0 and not here.named


async def test_what_is_left_of_a_step_is_what_is_not_passed_on_and_a_share_of_the_indexes_to_come() -> None:
    async with scene(0, rest=lambda request: Gradient(1.0, 1, 0.0, (payload(1)[1],))) as here:
        execution = here.execution
        assert execution.left(0) == 8, "all of them: it knows no other share"
        asked = [asyncio.ensure_future(here.ask(index, payload(0), after_s=1.0)) for index in (2, 3)]
        await asyncio.sleep(0.5)
        assert execution.left(0) == 4 + 2, "indexes above 3, and two whose input is under way"
        await asyncio.sleep(5.0)
        assert execution.left(0) == 4
        for call in asked:
            call.cancel()
        execution.end(0)
        execution.begin(1)
        assert execution.left(1) == 2, "two of eight, as in the step before"


@pytest.mark.parametrize("soon", [False, True])
async def test_who_may_not_feed_is_told_before_its_payload_is_read(soon: bool) -> None:
    async with scene(1) as here:

        async def read() -> tuple[Packed, ...]:
            raise AssertionError("nobody takes this upload")

        here.away = TurnedAway("you are nobody", soon)
        for step, sent in ((0, payload(1)), (1, payload(1)), (7, payload(1)), (0, ())):
            # nor is it held for a step that is not open yet, or looked at
            call = here.execution.process(STRANGER, Process(step, 1, 0), ReadPayload(layout_of(sent), read))
            (answer,) = [answer async for answer in call]
            if soon:
                assert isinstance(answer, Busy) and 0.0 < answer.retry_after_s <= 0.5
            else:
                assert answer == Rejected(RejectCode.NOT_A_FEEDER, "you are nobody", 0)
        assert asyncio.get_running_loop().time() == 0.0 and not here.execution.num_tasks and not here.said
        assert here.named == []
        here.away = None
        assert isinstance(await here.ask(0, payload(1)), Gradient)


@pytest.mark.parametrize("purpose", ["train", "eval"])
@pytest.mark.parametrize("bad", ["shape", "codec", "missing", "proof"])
async def test_what_declares_another_layout_is_refused_unread(bad: str, purpose: str) -> None:
    async with scene(1) as here:

        async def read() -> tuple[Packed, ...]:
            raise AssertionError("nobody takes this upload")

        training = purpose == "train"
        if bad == "proof":  # training needs one, an evaluation has none
            sent = inputs(1) if training else payload(1)
        else:
            sent = BAD[bad][0] if training else BAD[bad][0][:-1]
        upload = ReadPayload(layout_of(sent), read)
        with pytest.raises(BadMessage) as refused:
            async for answer in here.execution.process(STRANGER, Process(0, 1, 0, purpose), upload):
                raise AssertionError(f"it was answered {answer}")
        assert refused.value.code is RejectCode.BAD_SHAPE
        assert here.named == [(STRANGER, 0, 0, RejectCode.BAD_SHAPE)]


async def test_the_proof_travels_on_with_the_tokens() -> None:
    async with scene(0, rest=lambda request: Gradient(1.0, 1, payload=(inputs(1)[1],))) as here:
        assert isinstance(await here.ask(0, payload(0)), Gradient)
        (sent,) = here.transport.payloads
        assert sent[0] == payload(0)[0] and sent[1].shape == (1, 1, 1) and sent[2] is PROOF
        for cached in (True, False):
            request = Fetch(0, 0, 0 if cached else 1, "input", cached=cached)
            fetched = [answer async for answer in here.execution.fetch(request)][-1]
            assert isinstance(fetched, Fetched) and len(fetched.payload) == 3 and fetched.payload[2] is PROOF
        tokens = [answer async for answer in here.execution.fetch(Fetch(0, -1, 0, "input", cached=True))][-1]
        assert isinstance(tokens, Fetched) and tokens.payload == payload(0)


@pytest.mark.parametrize("stage", [0, 1])
async def test_an_evaluation_brings_no_proof_and_counts_nothing(stage: int) -> None:
    async with scene(stage, rest=lambda request: Gradient(1.0, 1)) as here:
        assert isinstance(await here.ask(0, inputs(stage), purpose="eval"), Gradient)
        assert here.said == [] and here.execution.executions == 0 and here.named == []
        if not stage:
            assert len(here.transport.payloads[0]) == 2
        answer = await here.ask(0, payload(stage), purpose="eval")
        assert isinstance(answer, Rejected) and answer.code is RejectCode.BAD_SHAPE
        assert here.named == [(STRANGER, 0, 0, RejectCode.BAD_SHAPE)]


async def test_slots_are_free_again_after_many_bad_uploads() -> None:
    async with scene(1) as here:
        for index in range(3 * SLOTS):
            assert isinstance(await here.ask(index, payload(1, math.inf)), Rejected)
        assert here.execution.queue == 0


async def test_who_uploads_as_well_is_served_from_its_own_upload() -> None:
    async with scene(1) as here:
        async with asyncio.TaskGroup() as group:
            liar = group.create_task(here.ask(0, payload(1, math.nan), after_s=0.1, caller=LIAR))
            honest = group.create_task(here.ask(0, payload(1), after_s=0.3))
        answer = liar.result()
        assert isinstance(answer, Rejected) and answer.code is RejectCode.NON_FINITE
        assert isinstance(honest.result(), Gradient)
        await asyncio.sleep(1.0)
        assert here.said == [("claim", 0), ("added", 0)]


async def test_one_caller_at_a_time_uploads_an_index() -> None:
    async with scene(1) as here:
        reads = 0

        async def read() -> tuple[Packed, ...]:
            nonlocal reads
            reads += 1
            await asyncio.sleep(0.5)
            return payload(1)

        async def ask(caller: str) -> Answer:
            upload, last = ReadPayload(layout_of(payload(1)), read), None
            async for answer in here.execution.process(PeerId(caller), Process(0, 1, 0), upload):
                last = answer
            return last

        answers = await asyncio.gather(*map(ask, "abcdefgh"))
        assert reads == 1 and all(isinstance(answer, Gradient) for answer in answers)


async def test_a_slow_upload_is_overtaken_by_another_caller() -> None:
    async with scene(1) as here:
        slow = asyncio.ensure_future(here.ask(0, payload(1), after_s=500.0, caller=LIAR))
        again = asyncio.ensure_future(here.ask(0, payload(1), caller=LIAR))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(2.0):
            assert isinstance(await here.ask(0, payload(1)), Gradient)
        assert isinstance(await again, Gradient)
        slow.cancel()


async def test_who_takes_slots_and_sends_nothing_keeps_nobody_out() -> None:
    async with scene(1) as here:
        hoarding = [asyncio.ensure_future(here.ask(at, payload(1), after_s=500.0, caller=LIAR)) for at in range(20)]
        await asyncio.sleep(0.01)
        assert here.execution.queue == SLOTS
        answers = []
        for index in range(20, 26):
            answer = await here.ask(index, payload(1))
            while isinstance(answer, Busy):
                await asyncio.sleep(answer.retry_after_s)
                answer = await here.ask(index, payload(1))
            answers.append(answer)
        assert all(isinstance(answer, Gradient) for answer in answers)
        assert asyncio.get_running_loop().time() < 10.0
        assert here.execution.num_tasks <= 2 * SLOTS, "nor does it leave tasks behind"
        for each in hoarding:
            each.cancel()


async def test_a_slow_sender_is_served_when_its_input_comes() -> None:
    async with scene(1) as here:
        async with asyncio.TaskGroup() as group:
            slow = [group.create_task(here.ask(index, payload(1), after_s=6.0)) for index in range(SLOTS)]
            await asyncio.sleep(0.01)
            quick = group.create_task(here.ask(9, payload(1), caller=LIAR))
        assert all(isinstance(each.result(), Gradient) for each in (*slow, quick))
        await asyncio.sleep(1.0)
        assert here.execution.queue == 0


async def test_a_caller_uploads_as_much_at_once_as_there_are_slots() -> None:
    """Also where the leader's orders have begun tasks that hold no slot."""
    async with scene(1) as here:
        for index in range(9):
            here.execution.steps[0].order(index)
        sending = [asyncio.ensure_future(here.ask(index, payload(1), after_s=500.0)) for index in range(SLOTS)]
        await asyncio.sleep(0.01)
        assert isinstance(await here.ask(8, payload(1)), Busy)
        assert isinstance(await here.ask(8, payload(1), caller=LIAR), Gradient)
        for each in sending:
            each.cancel()
        await asyncio.wait(sending)
        assert isinstance(await here.ask(7, payload(1)), Gradient)


async def test_who_was_accepted_when_the_work_ends_is_told_to_come_again() -> None:
    async with scene(1) as here:

        async def read() -> tuple[Packed, ...]:
            raise AssertionError("nobody takes this upload")

        liar = asyncio.ensure_future(here.ask(0, payload(1, math.nan), after_s=0.1))
        await asyncio.sleep(0.05)
        call = here.execution.process(STRANGER, Process(0, 1, 0), ReadPayload(layout_of(payload(1)), read))
        assert isinstance(await anext(call), Accepted)  # and before it sends, the liar's NaN is there
        assert isinstance(await liar, Rejected)
        assert isinstance(await anext(call), Busy)
        assert [answer async for answer in call] == []
        assert isinstance(await here.ask(0, payload(1)), Gradient)


async def test_a_bad_upload_that_comes_when_its_step_is_over_harms_nobody() -> None:
    async with scene(1) as here:
        late = asyncio.ensure_future(here.ask(0, payload(1, math.nan), after_s=0.2))
        await asyncio.sleep(0.1)
        here.execution.begin(1)
        answer = await late
        assert isinstance(answer, Rejected) and answer.code is RejectCode.NON_FINITE
        assert here.named == [(STRANGER, 0, 0, RejectCode.NON_FINITE)]


async def test_our_own_result_is_a_finding_and_nobodys_fault() -> None:
    async with scene(1, poison=frozenset({(1, 0, 0)})) as here:
        answer = await here.ask(0, payload(1))
        assert isinstance(answer, Rejected) and answer.code is RejectCode.OVERFLOWED
        assert ("non_finite", 0) in here.said and not here.execution.num_tasks


async def test_work_that_no_leader_grants_for_long_is_given_back_once_it_is_granted() -> None:
    """Its caller has the answer and brings it to nobody else, so the leader must hear that it was dropped."""
    async with scene(1) as here:
        here.claim = lambda step, index: here.said.append(("claim", index))  # type: ignore[method-assign]
        assert isinstance(await here.ask(0, payload(1)), Gradient)
        await asyncio.sleep(TIMERS.grant_s)
        assert here.said == [("claim", 0)] and not here.execution.num_tasks
        here.execution.steps[0].granted(0, here.engine.discards(0))
        assert here.said[-1] == ("withdraw", 0)


@pytest.mark.parametrize("where", ["forward", "backward"])
async def test_a_full_device_is_busy_and_has_a_slot_less(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(1) as here:
        computed = getattr(here.engine, where)

        async def full(*_: object, **__: object) -> None:
            raise DeviceFull("out of memory")

        monkeypatch.setattr(here.engine, where, full)
        assert isinstance(await here.ask(0, payload(1)), Busy)
        assert here.full == [(1, "out of memory")] and here.execution.slots == 1
        assert here.said[-1] == ("withdraw", 0) and not here.execution.num_tasks
        monkeypatch.setattr(here.engine, where, computed)
        async with asyncio.TaskGroup() as group:
            callers = enumerate((STRANGER, LIAR))
            calls = [group.create_task(here.ask(index, payload(1), caller=caller)) for index, caller in callers]
            await asyncio.sleep(0.01)
            assert here.execution.queue == 1, "the open step has a slot less, too"
        assert [type(call.result()) for call in calls] == [Gradient] * 2


async def test_a_device_that_is_full_with_one_slot_ends_the_peer() -> None:
    asked: list[int] = []

    async def act(here: Scene) -> None:
        forward = here.engine.forward

        async def full(step: int, index: int, *inputs: object, train: bool) -> SavedActivations:
            asked.append(index)
            if len(asked) == 3:  # what is computed in between shows that one at a time fits
                return await forward(step, index, *inputs, train=train)
            raise DeviceFull("out of memory")

        here.engine.forward = full  # type: ignore[method-assign]
        for index in range(6):
            assert isinstance(await here.ask(index, payload(1)), Gradient if index == 2 else Busy)
        await here.ask(6, payload(1))

    with pytest.raises(BaseExceptionGroup) as ended:
        async with scene(1) as here:
            await act(here)
    assert ended.group_contains(DeviceFull) and asked == [*range(7)]


async def test_an_evaluation_that_finds_the_device_full_may_come_again() -> None:
    async with scene(1) as here:

        async def full(*_: object, **__: object) -> None:
            raise DeviceFull("out of memory")

        here.engine.forward = full  # type: ignore[method-assign]
        answer = await here.ask(0, inputs(1), purpose="eval")
        assert isinstance(answer, Rejected) and answer.code is RejectCode.NOT_READY
        assert not here.full and here.execution.slots == SLOTS


async def test_a_gradient_that_does_not_fit_the_grid_is_a_finding() -> None:
    async with scene(1) as here:

        async def too_large(stash: object) -> bool:
            raise Overflow("a gradient does not fit the grid")

        here.engine.accumulate = too_large  # type: ignore[method-assign]
        assert isinstance(await here.ask(0, payload(1)), Gradient)  # what goes back to the caller is fine
        await asyncio.sleep(1.0)
        assert ("non_finite", 0) in here.said and ("added", 0) not in here.said


async def test_what_was_computed_further_on_is_a_finding_too() -> None:
    async with scene(0, rest=lambda request: Rejected(RejectCode.OVERFLOWED)) as here:
        answer = await here.ask(0, payload(0))
        assert isinstance(answer, Rejected) and answer.code is RejectCode.OVERFLOWED
        assert ("non_finite", 0) in here.said


@pytest.mark.parametrize("code", sorted(OF_PAYLOAD, key=str))
async def test_a_refusal_further_on_proves_nothing_and_blames_no_caller(code: RejectCode) -> None:
    async with scene(0, rest=lambda request: Rejected(code)) as here:
        answer = await here.ask(0, payload(0))
        assert isinstance(answer, Rejected) and answer.code is RejectCode.NOT_READY
        assert ("non_finite", 0) not in here.said and ("withdraw", 0) in here.said


async def test_a_full_replica_still_recomputes_for_others() -> None:
    async with scene(0) as here:
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(here.ask(index, payload(0))) for index in range(SLOTS)]
            await asyncio.sleep(1.0)
            assert here.execution.queue == SLOTS  # both wait for the next stage, which is silent
            request = Fetch(0, 0, 7, "input", cached=False)
            async with asyncio.timeout(1.0):
                answers = [answer async for answer in here.execution.fetch(request)]
            assert isinstance(answers[-1], Fetched)
            for call in calls:
                call.cancel()


async def test_evaluations_take_no_slot_from_training() -> None:
    async with scene(1) as here:
        evals = [asyncio.ensure_future(here.ask(0, inputs(1), after_s=60.0, purpose="eval")) for _ in range(9)]
        await asyncio.sleep(0.1)
        assert here.execution.queue == 0
        answers = await asyncio.gather(*(here.ask(index, payload(1)) for index in range(SLOTS)))
        assert all(isinstance(answer, Gradient) for answer in answers)
        done, pending = await asyncio.wait(evals, timeout=1.0)
        assert len(pending) == 1 and all(isinstance(each.result(), Busy) for each in done), "one holds the one slot"
        for each in pending:
            each.cancel()
        await asyncio.wait(pending)
        assert isinstance(await here.ask(0, inputs(1), purpose="eval"), Gradient), "and gives it back"


async def test_an_evaluation_whose_input_does_not_come_gives_the_slot_back() -> None:
    async with scene(1) as here:
        answer = await here.ask(0, inputs(1), after_s=3600.0, purpose="eval")
        assert isinstance(answer, Rejected) and "30 s" in answer.reason
        assert 30.0 <= asyncio.get_running_loop().time() < 40.0
        assert answer.code is RejectCode.TOO_LARGE and not here.named, "a slow line is no bad input"
        assert isinstance(await here.ask(0, inputs(1), purpose="eval"), Gradient)


async def test_training_takes_no_slot_from_evaluations() -> None:
    async with scene(1) as here:
        calls = [asyncio.ensure_future(here.ask(index, payload(1), after_s=60.0)) for index in range(SLOTS)]
        await asyncio.sleep(0.1)
        assert here.execution.queue == SLOTS
        assert isinstance(await here.ask(0, inputs(1), purpose="eval"), Gradient)
        for call in calls:
            call.cancel()


async def test_recomputing_takes_one_slot_of_its_own() -> None:
    async with scene(0) as here:
        running = most = 0
        forward = here.engine.forward

        async def counted(*args, **options):
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await forward(*args, **options)
            finally:
                running -= 1

        here.engine.forward = counted  # type: ignore[method-assign]

        async def fetched(index: int) -> Answer:
            return [answer async for answer in here.execution.fetch(Fetch(0, 0, index, "input", cached=False))][-1]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(fetched(index)) for index in range(5)]
        assert all(isinstance(task.result(), Fetched) for task in tasks)
        assert most == 1 and here.execution.queue == 0


async def test_calls_ahead_of_us_are_held_only_so_many() -> None:
    async with scene(1) as here:
        clock = asyncio.get_running_loop().time
        began = clock()

        async def waited(index: int) -> tuple[Answer, float]:
            answer = await here.ask(index, payload(1), step=1)
            return answer, clock() - began

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(waited(index)) for index in range(4 * SLOTS + 3)]
        results = [task.result() for task in tasks]
        assert all(isinstance(answer, Busy) for answer, _ in results)
        assert sum(seconds >= 0.5 for _, seconds in results) == 4 * SLOTS  # the others at once
        assert sum(seconds == 0.0 for _, seconds in results) == 3


async def test_a_held_call_goes_on_when_its_step_begins() -> None:
    async with scene(1) as here:
        early = asyncio.ensure_future(here.ask(0, payload(1), step=1))
        await asyncio.sleep(0.2)
        here.engine.version = 1
        here.execution.begin(1)
        assert isinstance(await early, Gradient)


async def test_the_end_of_a_step_ends_its_calls() -> None:
    async with scene(0) as here:

        async def read() -> tuple[Packed, ...]:
            return payload(0)

        call = here.execution.process(STRANGER, Process(0, 0, 0), ReadPayload(layout_of(payload(0)), read))
        assert isinstance(await anext(call), Accepted)
        assert isinstance(await anext(call), Running)
        here.execution.begin(1)
        with pytest.raises(Refused) as refused:
            await anext(call)
        assert refused.value.code is RejectCode.STALE


def test_a_caller_sees_signs_of_life_until_the_work_is_done() -> None:
    async def act() -> None:
        kept = kept_alive(asyncio.sleep(1.0, Gradient(1.0, 2)), 0.3)
        assert [answer async for answer in kept] == [Running()] * 3 + [Gradient(1.0, 2)]

    VirtualLoop().run_until_complete(act())


# ---------------------------------------------------------------- what it answers for


ME, MATE = PeerId("me"), PeerId("mate")


def shown(here: Scene, index: int, *, step: int = 0, peer: PeerId = ME, mate: PeerId = MATE) -> AuditData:
    works, shown = here.execution.works, here.execution.shown
    return show(works, shown, mate, AuditRequest(step, here.stage, index, peer), me=ME)


@pytest.mark.parametrize("stage", [0, 1])
async def test_who_counted_a_microbatch_shows_it_and_a_mate_finds_the_same(stage: int) -> None:
    async with scene(stage, rest=lambda request: Gradient(1.0, 1, payload=(inputs(1, 0.5)[1],))) as here:
        engine, execution = here.engine, here.execution
        engine.kept_steps = 2
        answers = {index: await here.ask(index, payload(stage, 1.0 + index)) for index in (5, 2)}
        await asyncio.sleep(1.0)
        root = execution.works.root(0)
        contribution = list(engine.accumulator(0).total)
        for index, answer in answers.items():
            data = shown(here, index)
            assert proves(data.path, data.work, root)
            assert isinstance(answer, Gradient) and len(data.payload) == 3
        commits = [Commit(k, 0, Chain(""), RoundId(Ballot(0, ME), 0), b"digest", 1, 0.0, 0.0) for k in (0, 1)]
        for step in range(2):
            execution.end(step)
            await engine.apply(commits)
            execution.begin(step + 1)
        works = []
        for index in answers:
            data = shown(here, index)
            given, gradient = execution.opened(AuditRequest(0, stage, index, ME), data)
            (again,), _ = await engine.recompute(0, [(index, given, gradient)])
            payloads = given, again.output, gradient, again.answer
            found = WorkRecord(index, *map(digest, payloads), again.loss_sum, again.num_tokens)
            assert found == data.work
            works.append((index, given, gradient))
        both, whole = await engine.recompute(0, works, b"seed")
        assert len(both) == 2
        _, half = await engine.recompute(0, works[:1], b"seed")
        assert whole == whole_of(product(b"seed", contribution, 0)) != half
        await engine.apply(commits)
        with pytest.raises(Refused) as gone:
            await engine.recompute(0, [(5, *works[0][1:])])
        assert gone.value.code is RejectCode.NOT_READY


async def test_what_was_discarded_is_answered_for_until_the_contribution_is_known() -> None:
    async with scene(1) as here:
        empty = here.execution.works.root(0)
        await here.ask(3, payload(1))
        await asyncio.sleep(1.0)
        assert here.execution.works.root(0) != empty
        here.engine.discard(0)
        here.execution.steps[0].discarded()
        assert here.execution.works.root(0) == empty
        assert shown(here, 3).work.index == 3, "its shards may have been sent"
        here.execution.contributed(0, empty)
        with pytest.raises(Refused) as refused:
            shown(here, 3)
        assert refused.value.code is RejectCode.NOT_FOUND


async def test_what_a_mate_has_shown_is_shown_to_verifiers() -> None:
    async with scene(1) as here:
        await here.ask(3, payload(1))
        await asyncio.sleep(1.0)
        data = shown(here, 3)
        with pytest.raises(Refused):
            shown(here, 3, peer=LIAR)
        assert here.execution.opened(AuditRequest(0, 1, 3, LIAR), data) == (inputs(1), ())
        assert shown(here, 3, peer=LIAR) == data
        with pytest.raises(BadMessage):
            here.execution.opened(AuditRequest(0, 1, 4, LIAR), data)


@pytest.mark.parametrize("peer", [ME, LIAR])
async def test_a_mate_that_asks_again_and_again_is_shown_no_more(peer: PeerId) -> None:
    async with scene(1) as here:
        for index in (3, 4):
            await here.ask(index, payload(1))
        await asyncio.sleep(1.0)
        data = shown(here, 3, mate=PeerId("before"))
        for _ in range(2):
            here.execution.opened(AuditRequest(0, 1, 3, LIAR), data)
        for _ in range(MOST_ASKS):
            assert shown(here, 3, peer=peer) == data
            # What is not there is asked for in vain, and costs nothing that is counted.
            with pytest.raises(Refused):
                shown(here, 9, peer=peer)
        here.execution.opened(AuditRequest(0, 1, 3, LIAR), data)
        with pytest.raises(Refused) as refused:
            shown(here, 3, peer=peer)
        assert refused.value.code is RejectCode.TOO_OFTEN
        assert shown(here, 3, peer=peer, mate=PeerId("other")) == data and shown(here, 4)


async def test_who_shows_other_tokens_than_the_runs_is_refused_though_its_record_fits() -> None:
    async with scene(1) as here:
        sent = (*inputs(1), Packed("uint8", (1, 1, 32), bytes(32)))
        data = AuditData(WorkRecord(3, *map(digest, (inputs(1), (), (), inputs(1)[1:])), 1.0, 1), b"", sent)
        with pytest.raises(BadMessage, match="not proven"):
            here.execution.opened(AuditRequest(0, 1, 3, LIAR), data)
        with pytest.raises(Refused):
            shown(here, 3, peer=LIAR)
