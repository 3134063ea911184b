"""What a line carries is measured by one megabyte each way, and nobody fills a line with it: on real sockets."""

from __future__ import annotations

import asyncio

import pytest
from test_grpc_transport import grpc_pair

from swarmnet.errors import BadMessage, PeerGone
from swarmnet.ids import PeerId
from swarmnet.messages import MAX_LINE_TEST, Answer, Busy, LineTest, LineTested, Packed, Rejected
from swarmnet.net.line_test import TEST_BYTES, LineTests, bytes_per_s, measure
from swarmnet.testing.clock import VirtualLoop
from swarmnet.transport import ReadPayload
from swarmnet.wire.fields import Wrong
from tests.contracts.transport_contract import LIMIT_S, packed


async def last_of(calls) -> Answer:
    return [answer async for answer in calls][-1]


def test_a_line_is_measured_once_a_minute() -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), grpc_pair() as pair:
            pair.b.service.answering = LineTests().serve
            sent, came = pair.a.transport.traffic.up.total, pair.a.transport.traffic.down.total
            first = await measure(pair.a.transport, pair.b.peer)
            assert first.round_trip_s > 0 and first.up_bytes_per_s > 0 and first.down_bytes_per_s > 0
            assert TEST_BYTES < pair.a.transport.traffic.up.total - sent < 1.1 * TEST_BYTES
            assert TEST_BYTES < pair.a.transport.traffic.down.total - came < 1.1 * TEST_BYTES
            again = await measure(pair.a.transport, pair.b.peer)
            assert again.round_trip_s > 0 and again.up_bytes_per_s == again.down_bytes_per_s == 0.0

    asyncio.run(main())


def test_of_many_callers_one_is_served() -> None:
    async def main() -> None:
        tests = LineTests()
        async with asyncio.timeout(LIMIT_S), grpc_pair() as pair, grpc_pair() as other:
            for each in (pair, other):
                each.b.service.answering = tests.serve
            answers = [await last_of(each.call_b(LineTest(100))) for each in (pair, other)]
            assert isinstance(answers[0], LineTested) and isinstance(answers[1], Busy)
            assert answers[1].retry_after_s <= 2.0, "the other caller's turn comes soon"

    asyncio.run(main())


def test_more_than_is_allowed_is_refused_unread() -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), grpc_pair() as pair:
            pair.b.service.answering = LineTests().serve
            answer = await last_of(pair.call_b(LineTest(), (packed(MAX_LINE_TEST + 1),)))
            assert isinstance(answer, Rejected), answer
            try:
                answer = await last_of(pair.call_b(LineTest(MAX_LINE_TEST + 1)))
            except (Wrong, BadMessage):
                return  # our own end does not even write it
            raise AssertionError(answer)

    asyncio.run(main())


def test_a_caller_that_sends_or_reads_too_slowly_gives_way() -> None:
    async def never() -> tuple[Packed, ...]:
        await asyncio.Event().wait()
        return ()

    async def at_once() -> tuple[Packed, ...]:
        return ()

    async def main() -> None:
        tests, clock = LineTests(), asyncio.get_running_loop().time
        for caller, read in (("a", never), ("b", at_once)):
            began = clock()
            slow = tests.serve(PeerId(caller), LineTest(100), ReadPayload((), read))
            answer = await anext(slow)
            # Meanwhile nobody else has a turn, and is told to come again soon.
            busy = await last_of(tests.serve(PeerId("c"), LineTest(100), ReadPayload((), at_once)))
            assert isinstance(busy, Busy) and busy.retry_after_s <= 2.0
            if read is never:
                with pytest.raises(PeerGone):
                    await anext(slow)
            else:  # it never reads what is sent
                while not isinstance(answer, LineTested):
                    answer = await anext(slow)
                await asyncio.sleep(20.0)
            assert clock() - began <= 20.0
        assert isinstance(await last_of(tests.serve(PeerId("c"), LineTest(100), ReadPayload((), at_once))), LineTested)
        await slow.aclose()
        busy = await last_of(tests.serve(PeerId("d"), LineTest(100), ReadPayload((), at_once)))
        assert isinstance(busy, Busy), "its end changes nothing for the others"

    loop = VirtualLoop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_a_line_is_not_taken_for_endless_because_a_round_trip_took_as_long_as_the_test() -> None:
    assert bytes_per_s(0.125, 0.025) == TEST_BYTES / 0.1
    assert bytes_per_s(0.04, 0.05) == TEST_BYTES / 0.01
