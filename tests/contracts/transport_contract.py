"""What every `transport.Transport` must do. Run each of `CHECKS` on a fresh `Pair`, on whatever event loop.

A pair is two connected ends, `a` and `b`, each with a `FakeService`. `kill_b` ends `b` the way a crash would:
nobody listens at its address afterwards. Nothing here sleeps to synchronise; all waits end with an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import pytest

from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode
from swarmnet.ids import Ballot, Chain, PeerId
from swarmnet.messages import (
    Accepted,
    Answer,
    Busy,
    Fetch,
    Fetched,
    Gradient,
    Heartbeat,
    Packed,
    Process,
    Rejected,
    Request,
    Running,
    StagePlan,
    Stamp,
)
from swarmnet.testing.doubles import FakeService
from swarmnet.transport import ReadPayload, Transport

LIMIT_S = 20.0
"""Any wait longer than this is a failure."""


@dataclass
class End:
    """One end of a pair."""

    peer: PeerId
    transport: Transport
    service: FakeService


@dataclass
class Pair:
    """Two ends that can reach each other."""

    a: End
    b: End
    kill_b: Callable[[], Awaitable[None]]

    def call_b(self, request: Request, payload: tuple[Packed, ...] = (), *, limit_s: float = LIMIT_S):
        """A call from a to b."""
        deadline = asyncio.get_running_loop().time() + limit_s
        return self.a.transport.call(self.b.peer, request, payload, deadline=deadline)


HEARTBEAT = Heartbeat(Stamp(1, 0, Chain("0" * 64)), 1, True, None, before=Chain("0" * 64))
PROCESS = Process(step=3, stage=1, index=7)
FETCH = Fetch(step=3, stage=1, index=7, kind="input", cached=True)


def packed(num_bytes: int, fill: int = 0) -> Packed:
    """An opaque tensor whose bytes differ from place to place."""
    pattern = bytes((fill + at) % 251 for at in range(251))
    return Packed("uint8", (num_bytes,), (pattern * (num_bytes // 251 + 1))[:num_bytes])


def same(received: tuple[Packed, ...], sent: tuple[Packed, ...]) -> bool:
    """Whether two payloads are equal byte for byte."""
    return [(x.codec, x.shape, bytes(x.data)) for x in received] == [(x.codec, x.shape, bytes(x.data)) for x in sent]


def execute(index: int, sender: PeerId) -> StagePlan:
    """A one-way message with a number."""
    return StagePlan(Stamp(1, 0, Chain("0" * 64)), Ballot(0, sender), execute=frozenset({index}))


# ---------------------------------------------------------------- the contract


async def tells_arrive_in_order(pair: Pair) -> None:
    for index in range(200):
        pair.a.transport.tell(pair.b.peer, execute(index, pair.a.peer))
    heard = [await pair.b.service.told.get() for _ in range(200)]
    assert [message.execute for _, message in heard] == [{index} for index in range(200)]
    assert {caller for caller, _ in heard} == {pair.a.peer}


async def tells_go_both_ways(pair: Pair) -> None:
    pair.a.transport.tell(pair.b.peer, execute(1, pair.a.peer))
    pair.b.transport.tell(pair.a.peer, execute(2, pair.b.peer))
    assert (await pair.b.service.told.get())[1].execute == {1}
    assert (await pair.a.service.told.get())[1].execute == {2}


async def whoever_answers_a_heartbeat_is_reached(pair: Pair) -> None:
    pair.a.transport.tell(pair.b.peer, HEARTBEAT)
    assert await pair.a.service.reached.get() == pair.b.peer
    await pair.b.service.told.get()
    assert pair.b.service.reached.empty(), "b opened nothing"


async def a_call_carries_payload_and_answers(pair: Pair) -> None:
    up, down = (packed(5_000_000), packed(0), packed(17, 3)), (packed(3_000_001, 9),)
    seen: list[tuple[PeerId, Request, bool]] = []

    async def answering(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
        yield Accepted()
        yield Running()
        seen.append((caller, request, same(await payload(), up)))
        yield Gradient(loss_sum=1.5, num_tokens=4, compute_s=0.25, payload=down)

    pair.b.service.answering = answering
    answers = [answer async for answer in pair.call_b(PROCESS, up)]
    *signs, result = answers
    assert signs[0] == Accepted() and set(signs[1:]) == {Running()}, "a slow payload shows progress"
    assert isinstance(result, Gradient) and (result.loss_sum, result.num_tokens, result.compute_s) == (1.5, 4, 0.25)
    assert same(result.payload, down)
    assert seen == [(pair.a.peer, PROCESS, True)]


async def answers_come_while_the_payload_still_goes_up(pair: Pair) -> None:
    heard = asyncio.Event()

    async def answering(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
        yield Accepted()
        await heard.wait()
        yield Gradient(0.0, sum(tensor.num_bytes for tensor in await payload()))

    pair.b.service.answering = answering
    async for answer in pair.call_b(PROCESS, (packed(12_000_000),)):
        heard.set()
        if isinstance(answer, Gradient):
            assert answer.num_tokens == 12_000_000


async def a_refusal_needs_no_payload(pair: Pair) -> None:
    pair.b.service.answering = lambda *_: Busy(retry_after_s=0.5, version=2)
    tensor = packed(40_000_000)
    for _ in range(5):
        assert [answer async for answer in pair.call_b(PROCESS, (tensor,))] == [Busy(0.5, 2)]


async def raised_refusals_become_answers(pair: Pair) -> None:
    stale = Refused(RejectCode.STALE, "step 3 is applied")
    raised = [Accepted(), BadMessage(RejectCode.NON_FINITE, "a NaN")]
    pair.b.service.answering = lambda caller, request, payload: stale if isinstance(request, Process) else raised
    (refusal,) = [answer async for answer in pair.call_b(PROCESS, (packed(100),))]
    assert isinstance(refusal, Rejected) and (refusal.code, refusal.reason) == (RejectCode.STALE, "step 3 is applied")
    *_, bad = [answer async for answer in pair.call_b(FETCH)]
    assert isinstance(bad, Rejected) and bad.code is RejectCode.NON_FINITE


async def leaving_cancels_the_callee(pair: Pair) -> None:
    cancelled = asyncio.Event()

    async def answering(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
        try:
            yield Accepted()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    pair.b.service.answering = answering
    async with aclosing(pair.call_b(PROCESS)) as answers:
        async for answer in answers:
            assert answer == Accepted()
            break
    await cancelled.wait()


async def a_deadline_is_a_timeout(pair: Pair) -> None:
    pair.b.service.answering = lambda *_: [Accepted(), None]
    heard = []
    with pytest.raises(PeerTimeout):
        async for answer in pair.call_b(PROCESS, limit_s=0.5):
            heard.append(answer)
    assert heard == [Accepted()]


async def calls_do_not_wait_for_each_other(pair: Pair) -> None:
    release = asyncio.Event()

    async def answering(caller: PeerId, request: Request, payload: ReadPayload) -> AsyncIterator[Answer]:
        if isinstance(request, Process):
            await release.wait()
            yield Gradient(0.0, request.index)
        else:
            release.set()
            yield Fetched()

    async def process(index: int) -> list[Answer]:
        return [answer async for answer in pair.call_b(Process(step=0, stage=0, index=index))]

    pair.b.service.answering = answering
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(process(index)) for index in range(8)]
        assert [answer async for answer in pair.call_b(FETCH)] == [Fetched()]
    assert [task.result() for task in waiting] == [[Gradient(0.0, index)] for index in range(8)]


async def death_of_the_callee_is_definite(pair: Pair) -> None:
    pair.b.service.answering = lambda *_: [Accepted(), None]
    with pytest.raises(PeerGone) as caught:
        async for answer in pair.call_b(PROCESS):
            assert answer == Accepted()
            await pair.kill_b()
    assert caught.value.definite
    assert await pair.a.service.gone.get() == (pair.b.peer, True)


async def calling_the_dead_is_definite(pair: Pair) -> None:
    await pair.kill_b()
    with pytest.raises(PeerGone) as caught:
        async for _ in pair.call_b(PROCESS):
            raise AssertionError("the dead answered")
    assert caught.value.definite


async def death_breaks_a_link(pair: Pair) -> None:
    pair.a.transport.tell(pair.b.peer, execute(0, pair.a.peer))
    await pair.b.service.told.get()
    await pair.kill_b()
    assert await pair.a.service.gone.get() == (pair.b.peer, True)


CHECKS: tuple[Callable[[Pair], Awaitable[None]], ...] = tuple(filter(asyncio.iscoroutinefunction, globals().values()))
