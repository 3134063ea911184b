"""Sums between members that corrupt, stall, refuse and abandon: what is wrong is never held, slow is waited for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.averaging.butterfly import ExchangeContext, check_losses
from swarmnet.averaging.exchange import SILENT_S, Exchange
from swarmnet.averaging.watch import LEAST_S
from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode
from swarmnet.fetch.plan import LEAVE_OUT_S
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.messages import Accepted, Answer, Finished, Packed, Part, PartData, Rejected, Round, Running, Stamp
from swarmnet.testing.doubles import FakeTransport, run_virtual
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_device import Device
from swarmnet.testing.virtual_engine import NUM_ELEMENTS, SimulatedEngine

pytestmark = pytest.mark.virtual_time

A, B = PeerId("a"), PeerId("b")
STAMP = Stamp(3, 0, Chain("00" * 32))
ID = RoundId(Ballot(1, A), 1)
Change = Callable[[Part, Answer], Answer]


class Engine(SimulatedEngine):
    """An engine whose reads can be held up. What it has in the accumulator is given."""

    def __init__(self, accumulator: list[int]) -> None:
        super().__init__(0, Plan(stages=1), Device(0.01))
        self.accumulator(0).total = accumulator
        self.before_read: Callable[[], Awaitable[None]] | None = None

    async def contribution(self, start: int, stop: int, reference: bytes = b"") -> Packed:
        await self._hold()
        return await super().contribution(start, stop, reference)

    async def finished_sum(self, start: int, stop: int) -> Packed:
        await self._hold()
        return await super().finished_sum(start, stop)

    async def _hold(self) -> None:
        if self.before_read is not None:
            await self.before_read()


class Members:
    """Exchanges that call each other directly; `change` sees every answer to a part, `errors` meets calls first.

    silent: who says nothing for so many seconds. promising: who is always about to answer.
    """

    def __init__(self, *accumulators: list[int]) -> None:
        self.engines = {peer: Engine(list(sums)) for peer, sums in zip((A, B), accumulators, strict=False)}
        self.finished: dict[PeerId, Finished | None] = dict.fromkeys(self.engines)
        self.transport = FakeTransport(self.serve)
        self.exchanges = {
            peer: Exchange(ExchangeContext(peer, engine, self.transport, num_tokens=10))
            for peer, engine in self.engines.items()
        }
        self.change: Change = lambda _, answer: answer
        self.errors: list[Exception] = []
        self.slow_s = 0.0
        self.silent: dict[PeerId, float] = {}
        self.promising: set[PeerId] = set()

    @property
    def asked(self) -> list[tuple[PeerId, Part]]:
        return self.transport.requests

    async def serve(self, peer: PeerId, request: Part) -> AsyncGenerator[Answer, None]:
        if self.errors:
            raise self.errors.pop(0)
        await asyncio.sleep(self.silent.get(peer, 0.0))
        while peer in self.promising:
            yield Running()
            await asyncio.sleep(0.5)
        async for answer in self.exchanges[peer].serve(request):
            if isinstance(answer, PartData):
                await asyncio.sleep(self.slow_s)
            yield answer if isinstance(answer, Accepted) else self.change(request, answer)

    async def sum(self, peer: PeerId, current: Round) -> Finished:
        index = {A: 0, B: 1}[peer]
        found = await self.exchanges[peer].sum(current, {index: (1.5 + index, 10)})
        self.finished[peer] = found
        return found

    async def collect(self, current: Round, *holders: PeerId) -> Finished:
        """B fetches what A has finished: from its holders in turn, or from these at once."""
        committed, exchange = self.finished[A], self.exchanges[B]
        assert committed is not None
        if holders:
            return await exchange.collect_from(current, committed.digest, *holders)
        return await exchange.collect(current, committed.digest)

    async def sum_all(self) -> list[Finished]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.sum(peer, BOTH)) for peer in (A, B)]
        return [task.result() for task in tasks]


def a_round(*peers: PeerId, holders: tuple[PeerId, ...] = ()) -> Round:
    shares = tuple((peer, Generation(1, 0), frozenset({at})) for at, peer in enumerate(peers))
    return Round(STAMP, ID, shares, peers, holders)


BOTH, ALONE = a_round(A, B), a_round(A)
ONES, TWOS = [1] * NUM_ELEMENTS, [2] * NUM_ELEMENTS


def flip(answer: Answer) -> Answer:
    """The same with one bit of its payload turned over."""
    assert isinstance(answer, PartData)
    data = bytearray(answer.payload[0].data)
    data[0] ^= 1
    return replace(answer, payload=(replace(answer.payload[0], data=bytes(data)),))


def test_members_end_up_with_the_same_sum() -> None:
    members = Members(ONES, TWOS)
    first, second = run_virtual(members.sum_all())
    assert first == second and first.num_tokens == 20 and first.loss_sum == 4.0
    assert members.engines[A]._buffer == members.engines[B]._buffer == [3] * NUM_ELEMENTS
    assert members.exchanges[A].holds(STAMP, ID) and members.exchanges[B].holds(STAMP, ID)


def test_a_piece_that_takes_minutes_is_asked_for_once() -> None:
    members = Members(ONES, TWOS)
    members.slow_s = 300.0
    first, second = run_virtual(members.sum_all())
    assert first == second
    assert len(set(members.asked)) == len(members.asked) == 4, "a contribution and a reduced part each way"


def test_a_member_that_breaks_off_or_stalls_is_asked_again() -> None:
    members = Members(ONES, TWOS)
    members.errors = [PeerGone("broken"), PeerTimeout("the peer stalls"), Refused(RejectCode.NOT_READY)]
    first, second = run_virtual(members.sum_all())
    assert first == second and members.engines[A]._buffer == [3] * NUM_ELEMENTS


@pytest.mark.parametrize(
    "losses",
    [{}, {0: (1.0, 10), 1: (1.0, 10)}, {2: (1.0, 10)}, {0: (1.0, 10**9), 1: (1.0, 10**9)}, {0: (1.0, 0), 1: (1.0, 0)}],
    ids=["lacking", "another member's", "nobody's", "tokens it did not see", "no tokens"],
)
def test_a_member_speaks_for_the_microbatches_the_round_gives_it_and_no_others(
    losses: dict[int, tuple[float, int]],
) -> None:
    members = Members(ONES, TWOS)
    members.change = lambda request, answer: (
        replace(answer, losses=losses) if isinstance(answer, PartData) and request.kind == "contribution" else answer
    )

    async def story() -> None:
        async with asyncio.timeout(60.0):
            await members.sum_all()

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(story())
    named, others = caught.value.split(Refused)
    assert named is not None and others is None
    assert not members.exchanges[A].holds(STAMP, ID), "nothing of it was installed"


# ---------------------------------------------------------------- collecting a finished sum


async def _collect(members: Members) -> Finished:
    await members.sum(A, ALONE)
    return await members.collect(replace(ALONE, holders=(A,)), A)


def test_a_finished_sum_is_collected() -> None:
    members = Members(ONES, TWOS)
    assert run_virtual(_collect(members)) == members.finished[A]
    assert members.engines[B]._buffer == ONES and members.exchanges[B].holds(STAMP, ID)


@pytest.mark.parametrize(
    "change",
    [
        flip,
        lambda answer: replace(answer, finished=None),
        lambda answer: replace(answer, finished=replace(answer.finished, digest=bytes(32))),
        lambda answer: replace(answer, finished=replace(answer.finished, grad_sq_norm=0.5)),
        lambda answer: replace(answer, finished=replace(answer.finished, id=RoundId(ID.ballot, 2))),
        lambda answer: replace(answer, payload=()),
        lambda answer: replace(answer, payload=(replace(answer.payload[0], shape=(1,)),)),
        lambda answer: Accepted(),
    ],
    ids=["bit", "undescribed", "digest", "norm", "other round", "empty", "shape", "no answer"],
)
def test_a_corrupt_sum_is_never_held(change: Callable[[Answer], Answer]) -> None:
    members = Members(ONES, TWOS)
    members.change = lambda _, answer: change(answer)
    with pytest.raises((BadMessage, PeerGone)):
        run_virtual(_collect(members))
    assert not members.exchanges[B].holds(STAMP, ID)


async def test_a_sum_that_was_held_is_not_once_another_was_written_over_it() -> None:
    members = Members(ONES, TWOS)
    await _collect(members)
    members.change = lambda _, answer: flip(answer)
    with pytest.raises(BadMessage):
        await members.collect(replace(ALONE, holders=(A,)), A)
    assert not members.exchanges[B].holds(STAMP, ID)


async def test_collecting_goes_on_until_a_holder_has_it_whole() -> None:
    members = Members(ONES, TWOS)
    members.errors = [PeerGone("broken"), PeerTimeout("late"), BadMessage(RejectCode.MALFORMED, "garbage")]
    damaged = iter([True, False])
    members.change = lambda _, answer: flip(answer) if next(damaged) else answer
    await members.sum(A, ALONE)
    assert await members.collect(replace(ALONE, holders=(A,))) == members.finished[A]
    assert len(members.asked) == 5 and members.engines[B]._buffer == ONES


C = PeerId("c")


async def test_collecting_ends_with_who_lacks_it_once_all_were_asked() -> None:
    members = Members(ONES, TWOS)
    await members.sum(A, ALONE)
    members.errors = [Refused(RejectCode.NOT_FOUND), PeerTimeout("late")]
    with pytest.raises(Refused) as refused:
        await members.collect(replace(ALONE, holders=(A, C)))
    assert refused.value.facts["lacking"] == (A,) and [peer for peer, _ in members.asked] == [A, C]


async def test_of_many_holders_those_that_sent_something_are_named() -> None:
    members = Members(ONES, TWOS)
    committed = await members.sum(A, ALONE)
    members.change = lambda _, answer: flip(answer)
    exchange = Exchange(ExchangeContext(C, Engine([0] * NUM_ELEMENTS), members.transport, num_tokens=10))
    with pytest.raises(BadMessage, match="digest") as caught:
        await exchange.collect_from(ALONE, committed.digest, B, A)
    assert caught.value.facts["peers"] == [A], "the first one has no sum"
    assert "peer" not in caught.value.facts


async def test_a_holder_that_cannot_be_called_costs_a_second_once_a_minute() -> None:
    members = Members(ONES, TWOS)
    members.silent = {C: 1000.0}

    async def collect() -> float:
        began = asyncio.get_running_loop().time()
        members.exchanges[B].forget()
        assert await members.collect(replace(ALONE, holders=(C, A))) == members.finished[A]
        return asyncio.get_running_loop().time() - began

    await members.sum(A, ALONE)
    found = [await collect(), await collect()]
    await asyncio.sleep(LEAVE_OUT_S)
    assert [round(took_s) for took_s in [*found, await collect()]] == [SILENT_S, 0.0, SILENT_S]
    assert [peer for peer, _ in members.asked] == [C, A, A, C, A]


async def test_a_holder_that_promises_the_aggregate_for_ever_is_passed_over() -> None:
    members = Members(ONES, TWOS)
    members.promising = {C}
    await members.sum(A, ALONE)
    began = asyncio.get_running_loop().time()
    assert await members.collect(replace(ALONE, holders=(C, A))) == members.finished[A]
    assert round(asyncio.get_running_loop().time() - began, 1) == LEAST_S


async def test_of_holders_that_are_asked_at_once_one_that_promises_costs_a_joiner_seconds_once() -> None:
    """It replays one aggregate after the other, and came no further while a Byzantine holder was first in order."""
    members = Members(ONES, TWOS)
    early = PeerId("0")
    members.promising = {early}
    await members.sum(A, ALONE)
    took = []
    for _ in range(3):
        began = asyncio.get_running_loop().time()
        members.exchanges[B].forget()
        assert await members.collect(ALONE, early, A) == members.finished[A]
        took.append(asyncio.get_running_loop().time() - began)
    assert 3.0 < took[0] < 3.5 and max(took[1:]) < 0.1, took


async def test_a_member_that_was_late_in_the_round_is_the_last_to_be_asked_for_its_aggregate() -> None:
    members = Members(ONES, TWOS)
    members.promising = {C}
    await members.sum(A, ALONE)
    watch = members.exchanges[B].watch
    watch.begin(ID, {C: LEAST_S})
    with watch.stream(C, owes=True, now=0.0) as stream:
        stream.wanted(now=0.0)
        assert watch.trouble(now=2 * LEAST_S) is not None
    assert await members.collect(replace(ALONE, holders=(C, A))) == members.finished[A]
    assert [peer for peer, _ in members.asked] == [A]


async def test_the_only_holder_is_waited_for_longer_each_time() -> None:
    members = Members(ONES, TWOS)
    members.silent = {A: 2.5}
    await members.sum(A, ALONE)
    assert await members.collect(replace(ALONE, holders=(A,))) == members.finished[A]
    assert len(members.asked) == 3, "for 1, 2 and 4 seconds"


async def test_a_holder_that_shows_a_sign_of_life_is_waited_for() -> None:
    members = Members(ONES, TWOS)
    members.slow_s = 300.0
    await members.sum(A, ALONE)
    assert await members.collect(replace(ALONE, holders=(A,))) == members.finished[A] and len(members.asked) == 1


# ---------------------------------------------------------------- serving


async def _last(exchange: Exchange, kind: str, stop: int = NUM_ELEMENTS, *, of: RoundId = ID) -> Answer:
    return [answer async for answer in exchange.serve(Part(STAMP, of, kind, 0, stop))][-1]


async def test_a_contribution_read_from_an_abandoned_round_is_not_handed_out() -> None:
    members = Members(ONES)
    exchange, engine = members.exchanges[A], members.engines[A]
    await members.sum(A, ALONE)

    async def abandon() -> None:
        exchange.close()

    engine.before_read = abandon
    assert await _last(exchange, "contribution") == Rejected(RejectCode.NOT_READY, "that round was abandoned")


async def test_a_sum_that_another_one_replaced_while_it_was_read_is_not_handed_out() -> None:
    members = Members(ONES)
    exchange, engine = members.exchanges[A], members.engines[A]
    await members.sum(A, ALONE)
    before = await _last(exchange, "sum")

    async def replace_it() -> None:
        engine.before_read = None
        await exchange.sum(replace(ALONE, id=RoundId(ID.ballot, 2)), {0: (1.0, 10)})

    engine.before_read = replace_it
    whole, gone = [before, await _last(exchange, "sum")]
    assert isinstance(whole, PartData)
    assert gone == Rejected(RejectCode.NOT_FOUND, "that sum is gone")


def test_a_sum_that_was_left_for_another_of_its_step_is_served_and_comes_back() -> None:
    """With a signature under it, it may still become the commit: then somebody must have it."""
    members, again = Members(ONES, TWOS), replace(BOTH, id=RoundId(ID.ballot, 2))

    async def story() -> tuple[Finished, Finished, Answer, Finished]:
        first = await members.sum(A, ALONE)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(members.sum(peer, again)) for peer in (A, B)]
        exchange = members.exchanges[A]
        assert exchange.holds(STAMP, again.id) and not exchange.holds(STAMP, ID)
        served = await _last(exchange, "sum")
        back = await exchange.collect(replace(ALONE, holders=()), first.digest)
        assert exchange.holds(STAMP, ID) and members.engines[A]._buffer == ONES
        return first, tasks[0].result(), served, back

    first, second, served, back = run_virtual(story())
    assert isinstance(served, PartData) and served.finished == first == back != second
    assert not members.asked or all(request.id == again.id for _, request in members.asked), "nobody was asked for it"


def test_a_sum_is_still_here_when_the_round_after_it_is_called_off_before_it_took_the_buffer() -> None:
    """Its vote may have become the commit meanwhile; packing it takes long on a busy machine."""
    members, again = Members(ONES, TWOS), replace(BOTH, id=RoundId(ID.ballot, 2))

    async def story() -> tuple[Finished, Answer, Finished]:
        first, exchange, reading = await members.sum(A, ALONE), members.exchanges[A], asyncio.Event()

        async def for_ever() -> None:
            reading.set()
            await asyncio.Event().wait()

        members.engines[A].before_read = for_ever
        joining = asyncio.ensure_future(exchange.sum(again, {0: (1.5, 10)}))
        await reading.wait()
        joining.cancel()
        await asyncio.wait([joining])
        members.engines[A].before_read = None
        return first, await _last(exchange, "sum"), await exchange.collect(replace(ALONE, holders=()), first.digest)

    first, served, back = run_virtual(story())
    assert isinstance(served, PartData) and served.finished == first == back
    assert members.engines[A]._buffer == ONES


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["sum", "collect"]),
            st.integers(1, 3),
            st.sampled_from([0.0, 0.0005, 0.5, 1.0005, 1.5, 60.0]),
        ),
        max_size=8,
    )
)
def test_whatever_is_begun_and_called_off_each_sum_that_was_signed_comes_back(
    tasks: list[tuple[str, int, float]],
) -> None:
    """A second to read a vector. Each task is (what, of which round, seconds until it is called off)."""
    members, signed = Members(ONES, TWOS), dict[int, Finished]()
    exchange, engine = members.exchanges[A], members.engines[A]
    engine.before_read = lambda: asyncio.sleep(1.0)

    def of(number: int) -> Round:
        share = (A, Generation(1, number), frozenset({0}))
        return replace(ALONE, id=RoundId(ID.ballot, number), contributions=(share,))

    async def story() -> None:
        for what, number, until_s in tasks:
            engine.accumulator(0).total = [number] * NUM_ELEMENTS
            if what == "collect" and number not in signed:
                continue
            work = (
                exchange.sum(of(number), {0: (1.5, 10)})
                if what == "sum"
                else exchange.collect(of(number), signed[number].digest)
            )
            task = asyncio.ensure_future(work)
            await asyncio.wait([task], timeout=until_s)
            task.cancel()
            exchange.close()
            await asyncio.wait([task])
            if not task.cancelled():
                signed[number] = task.result()
        for number, finished in signed.items():
            served = await _last(exchange, "sum", of=of(number).id)
            assert isinstance(served, PartData) and served.finished == finished
            assert await exchange.collect(of(number), finished.digest) == finished
            assert engine._buffer == [number] * NUM_ELEMENTS

    run_virtual(story())


def test_a_sum_set_aside_that_the_stage_has_committed_with_other_bits_is_fetched() -> None:
    members, again = Members(ONES, TWOS), replace(BOTH, id=RoundId(ID.ballot, 2))
    other = replace(ALONE, contributions=BOTH.contributions[1:], receivers=(B,))  # the same id, and other bits

    async def story() -> tuple[Finished, Finished, Answer]:
        exchange = members.exchanges[A]
        mine = await members.sum(A, ALONE)
        async with asyncio.TaskGroup() as group:
            for peer in (A, B):
                group.create_task(members.sum(peer, again))
        committed = await members.sum(B, other)
        members.finished[A] = await exchange.collect(replace(ALONE, holders=(B,)), committed.digest)
        return mine, members.finished[A], await _last(exchange, "sum")

    mine, theirs, served = run_virtual(story())
    assert mine.digest != theirs.digest and theirs == members.finished[B]
    assert members.engines[A]._buffer == TWOS
    assert isinstance(served, PartData) and served.finished == theirs, "nobody is handed the sum that was given up"


async def test_a_sum_set_aside_with_other_bits_than_the_committed_ones_does_not_come_back() -> None:
    members, again = Members(ONES, TWOS), replace(BOTH, id=RoundId(ID.ballot, 2))
    await members.sum(A, ALONE)
    async with asyncio.TaskGroup() as group:
        for peer in (A, B):
            group.create_task(members.sum(peer, again))
    with pytest.raises(Refused, match="no peer has"):
        await members.exchanges[A].collect(ALONE, b"other bits")
    assert members.exchanges[A].holds(STAMP, again.id), "what is in the buffer stays"


async def test_a_holder_of_a_foreign_sum_is_passed_over_before_anything_is_installed() -> None:
    """It serves a sum of the same round id: that it is whole and has its own digest makes it no commit."""
    members = Members(ONES, TWOS)
    foreign = replace(ALONE, contributions=BOTH.contributions[1:], receivers=(B,))
    exchange = Exchange(ExchangeContext(C, Engine([0] * NUM_ELEMENTS), members.transport, num_tokens=10))
    committed = await members.sum(A, ALONE)
    await members.sum(B, foreign)
    with pytest.raises(BadMessage, match="another sum"):
        await exchange.collect_from(ALONE, committed.digest, B)
    assert not exchange.holds(STAMP, ID)
    found = await exchange.collect(replace(ALONE, holders=(B, A)), committed.digest)
    assert [peer for peer, _ in members.asked] == [B, B, A]
    assert found == members.finished[A]


async def test_of_many_holders_one_with_a_foreign_sum_costs_no_more_than_its_answer() -> None:
    members = Members(ONES, TWOS)
    foreign = replace(ALONE, contributions=BOTH.contributions[1:], receivers=(B,))
    exchange = Exchange(ExchangeContext(C, Engine([0] * NUM_ELEMENTS), members.transport, num_tokens=10))
    committed = await members.sum(A, ALONE)
    await members.sum(B, foreign)
    assert await exchange.collect_from(ALONE, committed.digest, B, A) == members.finished[A]


async def test_of_many_holders_a_slow_one_holds_up_nothing() -> None:
    """Sixty pieces: a second each from one holder, a hundred from the other."""
    members = Members(ONES, ONES)
    piece_s = {A: 1.0, B: 100.0}
    padded = Plan(stages=1, padding=60 * 4 - NUM_ELEMENTS)
    committed = await members.sum(A, ALONE)
    engine = Engine([0] * NUM_ELEMENTS)
    engine.plan = padded
    exchange = Exchange(ExchangeContext(C, engine, members.transport, num_tokens=10), piece_elements=4)

    async def ask(holder: PeerId, request: Part, *_: object) -> tuple[Finished, Packed]:
        await asyncio.sleep(piece_s[holder])
        packed = Packed("int64", (4,), (bytes([1]) + bytes(7)) * 4 if not request.start else bytes(32))
        return committed, packed

    exchange._ask = ask  # type: ignore[method-assign]
    began = asyncio.get_running_loop().time()
    assert await exchange.collect_from(ALONE, committed.digest, B, A) == committed
    assert asyncio.get_running_loop().time() - began < 20.0, "fifteen turns of four, and the slow pieces once more"


def test_without_a_holder_a_sum_that_is_not_here_is_refused() -> None:
    with pytest.raises(Refused, match="no peer has"):
        run_virtual(Members(ONES, TWOS).exchanges[A].collect(ALONE, b""))


async def test_who_waits_for_a_piece_of_an_abandoned_round_is_told() -> None:
    members = Members(ONES, TWOS)
    exchange = members.exchanges[A]
    async with asyncio.TaskGroup() as group:
        mine = group.create_task(members.sum(A, BOTH))  # B never takes part: the piece stays unreduced
        await asyncio.sleep(1.0)
        theirs = group.create_task(_last(exchange, "reduced", NUM_ELEMENTS // 2))
        await asyncio.sleep(1.2)  # in the middle of a pause between signs of life
        mine.cancel()
        exchange.close()
    assert theirs.result() == Rejected(RejectCode.NOT_READY, "that round was abandoned")


@pytest.mark.parametrize("loss", [1e30, -1.0, math.nan, math.inf])
def test_a_loss_that_no_microbatch_has_is_refused(loss: float) -> None:
    check_losses({1: (25.0, 10)}, frozenset({1}), 10)
    with pytest.raises(Refused):
        check_losses({1: (loss, 10)}, frozenset({1}), 10)


@pytest.mark.parametrize("num_tokens", [0, 9, 11])
def test_a_loss_of_more_or_fewer_tokens_than_a_microbatch_has_is_refused(num_tokens: int) -> None:
    with pytest.raises(Refused, match="tokens"):
        check_losses({0: (25.0, 10), 1: (25.0, num_tokens)}, frozenset({0, 1}), 10)
