"""What a replica keeps for those on the way: only while somebody is, the newest steps, within a cap, whole or not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from swarmnet.averaging.butterfly import ExchangeContext
from swarmnet.averaging.exchange import Exchange, pieces
from swarmnet.averaging.replay_log import KEEP_S, ReplayLog
from swarmnet.errors import RejectCode
from swarmnet.ids import Ballot, Chain, PeerId, Restart, RoundId
from swarmnet.messages import Commit, Finished, Packed, Part, Rejected, Stamp, TrailRequest, TrailStep

pytestmark = pytest.mark.virtual_time

ME = PeerId("me")
CUT = [(0, 4), (4, 8), (8, 10)]


class Buffer:
    """An engine whose sum buffer holds the number of the step."""

    num_elements, phases, private_phases = 10, (10,), 0

    def __init__(self) -> None:
        self.step, self.copied = 0, 0

    async def finished_sum(self, start: int, stop: int) -> Packed:
        self.copied += 1
        await asyncio.sleep(0.1)
        return Packed("int64", (stop - start,), bytes([self.step]) * (8 * (stop - start)))


def stamp(step: int) -> Stamp:
    return Stamp(step, 1, Chain(f"{step:064x}"))


def finished(step: int) -> Finished:
    return Finished(RoundId(Ballot(0, ME), 0), bytes([step]) * 32, 4, 0.0, 1.0, ())


def commits(step: int) -> tuple[Commit, ...]:
    done = finished(step)
    return tuple(Commit(stage, step, stamp(step).chain, done.id, done.digest, 4, 0.0, 1.0) for stage in range(2))


async def play_steps(trail: ReplayLog, buffer: Buffer, first: int, last: int) -> None:
    """Steps first .. last are applied; before each next sum comes into the buffer, the old one leaves it."""
    for step in range(first, last + 1):
        await trail.leave(stamp(step))
        buffer.step = step
        trail.hold(stamp(step), finished(step), CUT)
        trail.applied(commits(step))


def part(step: int, start: int, stop: int) -> Part:
    return Part(stamp(step), finished(step).id, "sum", start, stop)


async def test_nothing_is_copied_while_nobody_is_on_the_way() -> None:
    buffer = Buffer()
    trail = ReplayLog(buffer)
    await play_steps(trail, buffer, 0, 9)
    assert buffer.copied == 0 and trail.step(stamp(8)) is None
    assert trail.step(stamp(9)) == TrailStep(finished(9), commits(9)), "the last one is in the buffer anyway"
    assert trail.piece(part(9, 0, 4)) is None, "from where it is served"


async def test_steps_since_somebody_came_are_kept_with_their_sums() -> None:
    buffer = Buffer()
    trail = ReplayLog(buffer)
    await play_steps(trail, buffer, 0, 2)
    trail.wanted()
    await play_steps(trail, buffer, 3, 6)
    for step in range(2, 6):
        assert trail.step(stamp(step)) == TrailStep(finished(step), commits(step))
        for start, stop in CUT:
            found = trail.piece(part(step, start, stop))
            assert found is not None and found.finished == finished(step)
            assert found.payload[0].data == bytes([step]) * (8 * (stop - start))
    assert trail.step(stamp(1)) is None
    assert trail.piece(part(5, 0, 10)) is None, "pieces are cut in one way"


async def test_the_last_sum_is_packed_while_the_next_step_is_computed() -> None:
    buffer = Buffer()
    trail = ReplayLog(buffer)
    trail.wanted()
    await play_steps(trail, buffer, 0, 0)
    await asyncio.sleep(0.15)
    assert trail.piece(part(0, 0, 4)) is not None and trail.piece(part(0, 8, 10)) is None, "piece by piece"
    await asyncio.sleep(1.0)
    assert buffer.copied == len(CUT)
    began = asyncio.get_running_loop().time()
    await trail.leave(stamp(1))
    assert asyncio.get_running_loop().time() == began, "the next round waits for nothing"


async def test_who_gives_up_waiting_for_the_packing_finds_it_done_later() -> None:
    buffer = Buffer()
    trail = ReplayLog(buffer)
    trail.wanted()
    await play_steps(trail, buffer, 0, 0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.15):
            await trail.leave(stamp(1))
    await trail.leave(stamp(1))
    assert buffer.copied == len(CUT) and trail.piece(part(0, 8, 10)) is not None


async def test_a_sum_that_took_the_place_of_an_applied_one_is_not_mistaken_for_it() -> None:
    buffer = Buffer()
    trail = ReplayLog(buffer)
    trail.wanted()
    await play_steps(trail, buffer, 0, 3)
    await trail.leave(stamp(7))
    buffer.step = 77  # collected while catching up elsewhere, after this replica had fallen behind
    trail.hold(stamp(7), finished(7), CUT)
    await trail.leave(stamp(8))
    assert trail.held(stamp(7), finished(7).id) is None and trail.step(stamp(7)) is None
    assert trail.piece(part(7, 0, 4)) is None
    kept = trail.piece(part(3, 0, 4))
    assert kept is not None and kept.payload[0].data == bytes([3]) * 32


async def test_they_are_forgotten_when_nobody_has_asked_for_a_while() -> None:
    buffer = Buffer()
    trail = ReplayLog(buffer)
    trail.wanted()
    await play_steps(trail, buffer, 0, 5)
    await asyncio.sleep(1.1 * KEEP_S)
    await play_steps(trail, buffer, 6, 7)
    assert trail.step(stamp(3)) is None and trail.step(stamp(7)) is not None


async def test_steps_and_bytes_are_bounded_and_the_newest_stay() -> None:
    buffer = Buffer()
    for trail in (ReplayLog(buffer, most_steps=3), ReplayLog(buffer, most_bytes=3 * 80)):
        trail.wanted()
        await play_steps(trail, buffer, 0, 9)
        kept = [step for step in range(10) if trail.step(stamp(step)) is not None]
        assert kept == [6, 7, 8, 9]


async def test_sums_set_aside_stay_until_their_step_is_over_the_newest_within_the_cap() -> None:
    buffer, step = Buffer(), stamp(5)
    trail = ReplayLog(buffer, most_bytes=3 * 80)
    left = [replace(finished(5), id=RoundId(Ballot(0, ME), number)) for number in range(5)]
    for number, each in enumerate(left):
        buffer.step = number
        trail.hold(step, each, CUT)
        await trail.leave(step)
    assert [trail.aside(step, each.id) is not None for each in left] == [False, False, True, True, True]
    found = trail.aside(step, left[4].id)
    assert found is not None and found[0] == left[4]
    assert b"".join(packed.data for packed in found[1]) == bytes([4]) * 80
    piece = trail.piece(Part(step, left[3].id, "sum", 4, 8))
    assert piece is not None and piece.finished == left[3] and piece.payload[0].data == bytes([3]) * 32
    assert trail.aside(stamp(6), left[4].id) is None, "round ids repeat from step to step"
    trail.hold(step, left[4], CUT)
    trail.applied(commits(5))
    assert not any(trail.aside(step, each.id) for each in left)


async def test_two_sums_set_aside_stay_whatever_the_cap_one_that_is_taken_back_among_them() -> None:
    buffer, step = Buffer(), stamp(5)
    trail = ReplayLog(buffer, most_bytes=1)
    left = [replace(finished(5), id=RoundId(Ballot(0, ME), number)) for number in range(3)]
    for each in left[:2]:
        trail.hold(step, each, CUT)
        await trail.leave(step)
    assert trail.aside(step, left[0].id) is not None  # it goes back into the buffer, and this one leaves it:
    trail.hold(step, left[2], CUT)
    await trail.leave(step)
    assert [trail.aside(step, each.id) is not None for each in left] == [True, False, True]


async def test_where_a_donor_stands_decides_what_it_tells() -> None:
    exchange = Exchange(ExchangeContext(ME, Buffer(), None, num_tokens=1))  # type: ignore[arg-type]
    exchange.replay_log.hold(stamp(4), finished(4), CUT)
    exchange.applied(commits(4))
    opened = TrailStep(None, commits(5)[:1])

    def ask(step: int) -> object:
        return exchange.follow(TrailRequest(stamp(step)), stamp(5), opened)

    assert ask(4) == TrailStep(finished(4), commits(4)) and ask(5) == opened
    ahead, elsewhere = (
        ask(6),
        exchange.follow(TrailRequest(replace(stamp(5), restart=Restart(1, 5))), stamp(5), opened),
    )
    for answer in (ahead, elsewhere):
        assert isinstance(answer, Rejected) and answer.code is RejectCode.NOT_READY, "I cannot say what came next"
    past, forked = ask(3), exchange.follow(TrailRequest(Stamp(5, 1, Chain("ff" * 32))), stamp(5), opened)
    for answer in (past, forked):
        assert isinstance(answer, Rejected) and answer.code is RejectCode.NOT_FOUND
    nowhere = exchange.follow(TrailRequest(stamp(5)), None, opened)
    assert isinstance(nowhere, Rejected) and nowhere.code is RejectCode.NOT_READY


async def test_a_run_that_went_back_leaves_nothing_behind() -> None:
    buffer = Buffer()
    exchange = Exchange(ExchangeContext(ME, buffer, None, num_tokens=1))  # type: ignore[arg-type]
    trail = exchange.replay_log
    trail.wanted()
    await play_steps(trail, buffer, 0, 3)
    async with asyncio.TaskGroup() as group:
        saving = group.create_task(trail.leave(stamp(4)))
        await asyncio.sleep(0.05)
        exchange.forget()
    assert saving.done() and all(trail.step(stamp(step)) is None for step in range(4))
    trail.hold(stamp(1), finished(1), CUT)
    trail.applied(commits(1))
    assert trail.step(stamp(1)) is not None


def test_pieces_of_a_sum_cover_it() -> None:
    assert pieces(0, 10, 4) == CUT
