"""The donor's side: consistent copies, described and signed, held while they are fetched, bounded, and freed."""

from __future__ import annotations

import asyncio

import pytest
from donor_bench import PIECE, SIZE, STAGE, Mate, header_at, state_at

from swarmnet.errors import RejectCode
from swarmnet.fetch.plan import address, check_content
from swarmnet.messages import Accepted, Answer, Busy, Rejected, Snapshot, SnapshotPiece, SnapshotRequest
from swarmnet.state.snapshot_source import KEEP_S, LEASE_S, WAIT_S

pytestmark = pytest.mark.virtual_time

ALL = -(-SIZE // PIECE)


async def answer(mate: Mate, request: SnapshotRequest, *, slow_s: float = 0.0) -> Answer:
    last = None
    async for found in mate.source.serve(request):
        await asyncio.sleep(slow_s)
        last = found
    assert last is not None and not isinstance(last, Accepted)
    return last


async def described(mate: Mate, version: int = -1) -> Snapshot:
    found = await answer(mate, SnapshotRequest(STAGE, version))
    assert isinstance(found, Snapshot), found
    return found


async def piece(mate: Mate, copy: Snapshot, number: int, *, slow_s: float = 0.0) -> Answer:
    return await answer(mate, SnapshotRequest(STAGE, copy.header.version, address(copy.content), number), slow_s=slow_s)


async def test_a_copy_is_described_signed_and_given_out_in_pieces() -> None:
    mate = Mate()
    copy = await described(mate)
    check_content(copy.content, max_bytes=SIZE, holder=mate.peer)
    assert (copy.stage, copy.header, copy.content.num_bytes) == (STAGE, header_at(5), SIZE)
    data = b""
    for number in range(-(-SIZE // PIECE)):
        found = await piece(mate, copy, number)
        assert isinstance(found, SnapshotPiece)
        packed = found.payload[0]
        assert isinstance(packed.data, memoryview), "a piece is not copied"
        assert packed.shape == (len(packed.data),)
        data += bytes(packed.data)
    assert data == state_at(5)


async def test_joiners_of_one_version_share_one_copy() -> None:
    mate = Mate()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(described(mate)) for _ in range(5)]
    assert len({task.result() for task in tasks}) == 1 and mate.copies == 1


# ---------------------------------------------------------------- one consistent cut


async def test_weights_that_moved_while_they_were_copied_are_copied_again() -> None:
    mate = Mate()

    def move_once() -> None:
        mate.version = 6

    mate.while_copying = move_once
    copy = await described(mate)
    assert copy.header.version == 6 and mate.copies == 2
    found = await piece(mate, copy, 0)
    assert isinstance(found, SnapshotPiece) and found.payload[0].data == state_at(6)[:PIECE]


async def test_a_donor_whose_weights_always_move_says_so() -> None:
    mate = Mate()

    def move() -> None:
        assert mate.version is not None
        mate.version += 1

    mate.while_copying = move
    found = await answer(mate, SnapshotRequest(STAGE))
    assert isinstance(found, Rejected) and found.code is RejectCode.NOT_READY and not mate.source._places


@pytest.mark.parametrize("when", ["before", "while copying"])
async def test_a_donor_without_state_says_so(when: str) -> None:
    mate = Mate(version=None if when == "before" else 5)

    def lose() -> None:
        mate.version = None

    mate.while_copying = lose
    found = await answer(mate, SnapshotRequest(STAGE))
    assert isinstance(found, Rejected) and found.code is RejectCode.NOT_READY


async def test_a_donor_that_is_about_to_have_state_is_waited_for() -> None:
    mate = Mate(version=None)
    asyncio.get_running_loop().call_later(0.5, setattr, mate, "version", 6)
    assert (await described(mate)).header.version == 6


# ---------------------------------------------------------------- a version asked for by number


async def test_a_version_that_passes_while_it_is_copied_is_past() -> None:
    mate = Mate()
    mate.while_copying = lambda: setattr(mate, "version", 6)
    assert await answer(mate, SnapshotRequest(STAGE, 5)) == Rejected(RejectCode.NOT_FOUND, "that version is past", 6)
    assert (await described(mate, 6)).header.version == 6


async def test_a_version_that_comes_next_is_waited_for_and_one_that_is_past_is_not() -> None:
    mate = Mate()
    asyncio.get_running_loop().call_later(0.9 * WAIT_S, setattr, mate, "version", 6)
    assert (await described(mate, 6)).header.version == 6
    await asyncio.sleep(1.1 * LEASE_S)
    past = await answer(mate, SnapshotRequest(STAGE, 4))
    assert past == Rejected(RejectCode.NOT_FOUND, "that version is past", 6)
    assert (await described(mate, 6)).header.version == 6 and mate.copies == 1
    far = await answer(Mate(), SnapshotRequest(STAGE, 60))
    assert isinstance(far, Rejected) and far.code is RejectCode.NOT_READY


async def test_a_version_on_disk_is_served_also_by_a_peer_that_has_no_state_yet() -> None:
    mate = Mate(version=None)
    mate.disk[3] = state_at(3)
    live = Mate("live", version=3)
    stored, copied = await described(mate, 3), await described(live, 3)
    assert stored.content == copied.content, "equal states are one copy, wherever they come from"
    found = await piece(mate, stored, 1)
    assert isinstance(found, SnapshotPiece) and found.payload[0].data == state_at(3)[PIECE : 2 * PIECE]
    assert mate.copies == 0


# ---------------------------------------------------------------- memory


async def test_a_snapshot_that_is_fetched_keeps_its_place_while_one_can_go_on_from_it() -> None:
    mate = Mate()
    first = await described(mate)
    mate.version = 6
    await asyncio.sleep(0.9 * LEASE_S)
    assert isinstance(await piece(mate, first, 0), SnapshotPiece)
    await asyncio.sleep(0.9 * LEASE_S)
    assert (await described(mate)).header.version == 5, "another replica fetches it"
    mate.version = 6 + mate.remembers
    assert (await described(mate)).header.version == mate.version, "nobody can go on from 5"
    assert len(mate.source._places) == 1


async def test_there_are_never_more_than_two() -> None:
    mate = Mate()
    mate.disk = {1: state_at(1), 2: state_at(2)}
    await described(mate)
    await described(mate, 1)
    assert len(mate.source._places) == 2
    assert await answer(mate, SnapshotRequest(STAGE, 2)) == Busy(LEASE_S, 2)
    await asyncio.sleep(1.1 * LEASE_S)
    mate.version = 6
    assert (await described(mate, 2)).header.version == 2 and (await described(mate)).header.version == 6
    assert len(mate.source._places) == 2


async def test_who_asks_and_fetches_nothing_keeps_no_copy_in_its_place() -> None:
    mate, copies = Mate(), []
    for version in range(5, 25):
        mate.version = version
        found = await described(mate)
        assert found.header.version == version
        copies = [*copies[-1:], found]
        for _ in range(10):
            await asyncio.sleep(0.3 * LEASE_S)
            for copy in copies:
                await answer(mate, SnapshotRequest(STAGE, copy.header.version))


async def test_who_fetches_for_ever_keeps_out_nobody_who_wants_the_newest() -> None:
    mate = Mate()
    mate.remembers = 3
    pinned = await described(mate)
    mate.version += 1
    pins, asked = [pinned, await described(mate)], 0
    for version in range(7, 100):
        mate.version = version
        await asyncio.sleep(0.1 * LEASE_S)
        found = await described(mate)
        assert version - mate.remembers <= found.header.version <= version, "one can go on from it"
        pins = [*pins[-1:], found] if found not in pins else pins
        for copy in pins:
            asked += isinstance(await piece(mate, copy, 0), SnapshotPiece)
    assert asked > 90 and len(mate.source._places) == 1


async def test_who_fetches_for_ever_keeps_a_copy_in_its_place_for_a_while() -> None:
    mate = Mate()
    mate.disk = {1: state_at(1), 2: state_at(2)}
    pinned, began = await described(mate, 1), asyncio.get_running_loop().time()
    while isinstance(found := await answer(mate, SnapshotRequest(STAGE, 2)), Busy):
        await piece(mate, pinned, 0)
        await described(mate)
        await asyncio.sleep(0.5 * LEASE_S)
    assert isinstance(found, Snapshot) and found.header.version == 2
    longest = KEEP_S + ALL * LEASE_S
    assert longest <= asyncio.get_running_loop().time() - began <= longest + LEASE_S


async def test_a_run_that_went_back_leaves_no_copy_behind() -> None:
    mate = Mate()
    old = await described(mate)
    await asyncio.sleep(1.1 * LEASE_S)
    mate.version, mate.copy_s = 6, 0.4
    async with asyncio.TaskGroup() as group:
        taking = group.create_task(described(mate))
        await asyncio.sleep(0.2)
        mate.source.forget()
        assert not mate.source._places
    assert mate.copies == 3, "what was being taken was taken again"
    assert isinstance(await piece(mate, taking.result(), 0), SnapshotPiece)
    assert await piece(mate, old, 0) == Rejected(RejectCode.NOT_FOUND, "that snapshot is gone")


async def test_a_copy_outlives_a_piece_that_takes_long_to_send() -> None:
    mate = Mate()
    old = await described(mate)
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(piece(mate, old, 0, slow_s=10 * KEEP_S))
        await asyncio.sleep(9 * KEEP_S)
        for version in (6, 7):
            mate.version = version
            await answer(mate, SnapshotRequest(STAGE))
    assert isinstance(sending.result(), SnapshotPiece)
    assert isinstance(await piece(mate, old, 1), SnapshotPiece)
    await asyncio.sleep(2.1 * KEEP_S)
    assert not mate.source._places


async def test_a_copy_is_freed_when_nobody_has_asked_for_a_while() -> None:
    mate = Mate()
    copy = await described(mate)
    await asyncio.sleep(0.9 * KEEP_S)
    await piece(mate, copy, 0)
    await asyncio.sleep(0.9 * KEEP_S)
    assert len(mate.source._places) == 1, "asked for again meanwhile"
    await asyncio.sleep(0.2 * KEEP_S)
    assert not mate.source._places
    assert await piece(mate, copy, 0) == Rejected(RejectCode.NOT_FOUND, "that snapshot is gone")


async def test_who_leaves_while_the_copy_is_taken_leaves_none_behind() -> None:
    mate = Mate()
    mate.copy_s = 100.0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10.0):
            await described(mate)
    await asyncio.sleep(200.0 + 2 * KEEP_S)
    assert not mate.source._places


@pytest.mark.parametrize("number", [15, 1 << 12])
async def test_pieces_that_a_copy_does_not_have_are_refused(number: int) -> None:
    mate = Mate()
    found = await piece(mate, await described(mate), number)
    assert isinstance(found, Rejected) and found.code is RejectCode.BAD_SHAPE
