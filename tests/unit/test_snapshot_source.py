"""The donor's side: consistent copies, described and signed, held while they are fetched, bounded, and freed."""

from __future__ import annotations

import asyncio

import pytest
from donor_bench import CALLER, PIECE, SIZE, STAGE, Mate, header_at, play, state_at

from swarmnet.errors import RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Accepted, Answer, Busy, Rejected, Snapshot, SnapshotPiece, SnapshotRequest
from swarmnet.state.snapshot_source import KEEP_S, LEASE_S, MOST_COPIES, WAIT_S

ALL = -(-SIZE // PIECE)


async def answer(mate: Mate, request: SnapshotRequest, *, slow_s: float = 0.0, caller: PeerId = CALLER) -> Answer:
    last = None
    async for found in mate.donor.serve(caller, request):
        await asyncio.sleep(slow_s)
        last = found
    assert last is not None and not isinstance(last, Accepted)
    return last


async def described(mate: Mate, version: int = -1) -> Snapshot:
    found = await answer(mate, SnapshotRequest(STAGE, version))
    assert isinstance(found, Snapshot), found
    return found


async def piece(mate: Mate, copy: Snapshot, number: int, *, slow_s: float = 0.0) -> Answer:
    return await answer(mate, SnapshotRequest(STAGE, copy.version, copy.root, number), slow_s=slow_s)


def test_a_copy_is_described_signed_and_given_out_in_pieces() -> None:
    async def story() -> None:
        mate = Mate()
        copy = await described(mate)
        mate.seal.check(copy, donor=mate.peer, stage=STAGE, max_bytes=SIZE)
        assert (copy.version, copy.chain, copy.num_bytes) == (5, header_at(5).chain, SIZE)
        data = b""
        for number in range(-(-SIZE // PIECE)):
            found = await piece(mate, copy, number)
            assert isinstance(found, SnapshotPiece)
            assert isinstance(found.payload[0].data, memoryview), "a piece is not copied"
            data += bytes(found.payload[0].data)
        assert data == state_at(5)

    play(story())


def test_joiners_of_one_version_share_one_copy() -> None:
    async def story() -> None:
        mate = Mate()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(described(mate)) for _ in range(5)]
        assert len({task.result() for task in tasks}) == 1 and mate.copies == 1

    play(story())


# ---------------------------------------------------------------- one consistent cut


def test_weights_that_moved_while_they_were_copied_are_copied_again() -> None:
    async def story() -> None:
        mate = Mate()

        def move_once() -> None:
            mate.version = 6

        mate.while_copying = move_once
        copy = await described(mate)
        assert copy.version == 6 and mate.copies == 2
        found = await piece(mate, copy, 0)
        assert isinstance(found, SnapshotPiece) and found.payload[0].data == state_at(6)[:PIECE]

    play(story())


def test_a_donor_whose_weights_always_move_says_so() -> None:
    async def story() -> None:
        mate = Mate()

        def move() -> None:
            assert mate.version is not None
            mate.version += 1

        mate.while_copying = move
        found = await answer(mate, SnapshotRequest(STAGE))
        assert isinstance(found, Rejected) and found.code is RejectCode.NOT_READY and mate.donor.num_copies == 0

    play(story())


@pytest.mark.parametrize("when", ["before", "while copying"])
def test_a_donor_without_state_says_so(when: str) -> None:
    async def story() -> None:
        mate = Mate(version=None if when == "before" else 5)

        def lose() -> None:
            mate.version = None

        mate.while_copying = lose
        found = await answer(mate, SnapshotRequest(STAGE))
        assert isinstance(found, Rejected) and found.code is RejectCode.NOT_READY

    play(story())


def test_a_donor_that_is_about_to_have_state_is_waited_for() -> None:
    async def story() -> None:
        mate = Mate(version=None)
        asyncio.get_running_loop().call_later(0.5, setattr, mate, "version", 6)
        assert (await described(mate)).version == 6

    play(story())


# ---------------------------------------------------------------- a version asked for by number


def test_a_version_that_comes_next_is_waited_for_and_one_that_is_past_is_not() -> None:
    async def story() -> None:
        mate = Mate()
        asyncio.get_running_loop().call_later(0.9 * WAIT_S, setattr, mate, "version", 6)
        assert (await described(mate, 6)).version == 6
        past = await answer(mate, SnapshotRequest(STAGE, 4))
        assert past == Rejected(RejectCode.NOT_FOUND, "that version is past", 6)
        far = await answer(mate, SnapshotRequest(STAGE, 60))
        assert isinstance(far, Rejected) and far.code is RejectCode.NOT_READY
        assert (await described(mate, 6)).version == 6 and mate.copies == 1

    play(story())


def test_a_version_on_disk_is_served_also_by_a_peer_that_has_no_state_yet() -> None:
    async def story() -> None:
        mate = Mate(version=None)
        mate.disk[3] = state_at(3)
        live = Mate("live", version=3)
        stored, copied = await described(mate, 3), await described(live, 3)
        assert stored.root == copied.root, "equal states are one copy, wherever they come from"
        found = await piece(mate, stored, 1)
        assert isinstance(found, SnapshotPiece) and found.payload[0].data == state_at(3)[PIECE : 2 * PIECE]
        assert mate.copies == 0

    play(story())


# ---------------------------------------------------------------- memory


def test_a_newer_copy_does_not_take_the_place_of_one_that_is_fetched() -> None:
    async def story() -> None:
        mate = Mate()
        old = await described(mate)
        mate.version = 6
        await described(mate)
        assert isinstance(await piece(mate, old, 0), SnapshotPiece)

    play(story())


def test_there_are_never_more_than_two_and_who_needs_a_third_is_told_when() -> None:
    async def story() -> None:
        mate = Mate()
        first = await described(mate)
        for version in (6, 7):
            mate.version = version
            found = await answer(mate, SnapshotRequest(STAGE), caller=PeerId("another"))
            assert mate.donor.num_copies <= MOST_COPIES
        assert found == Busy(LEASE_S, 7)
        mate.disk[1] = state_at(1)
        third = await answer(mate, SnapshotRequest(STAGE, 1), caller=PeerId("a third"))
        assert isinstance(third, Busy), "one from disk is no exception"
        await asyncio.sleep(0.5 * LEASE_S)
        await piece(mate, first, 0)
        await asyncio.sleep(0.6 * LEASE_S)
        newest = await answer(mate, SnapshotRequest(STAGE), caller=PeerId("another"))
        assert isinstance(newest, Snapshot) and newest.version == 7, "6 has been idle for a lease, 5 has not"
        assert isinstance(await piece(mate, first, 1), SnapshotPiece)

    play(story())


def test_a_stranger_keeps_one_copy_in_its_place_and_not_for_ever() -> None:
    async def story() -> None:
        mate, stranger, copies = Mate(), PeerId("stranger"), []

        async def newer(*, is_there: bool) -> None:
            mate.version += 1
            found = await answer(mate, SnapshotRequest(STAGE))
            assert isinstance(found, Snapshot if is_there else Busy), found
            if isinstance(found, Snapshot):
                copies.append(found)
                del copies[:-2]

        async def touch() -> None:
            while True:
                for copy in copies:
                    await answer(mate, SnapshotRequest(STAGE, copy.version, copy.root), caller=stranger)
                await asyncio.sleep(0.5 * LEASE_S)

        async with asyncio.TaskGroup() as group:
            touching = group.create_task(touch())
            for _ in range(10):
                await newer(is_there=True)  # the one it touches keeps its place, the other does not
                await asyncio.sleep(1.1 * LEASE_S)
            await asyncio.sleep((SIZE // PIECE + 8) * LEASE_S)
            for copy in copies:
                await answer(mate, SnapshotRequest(STAGE, copy.version, copy.root), caller=PeerId(f"of {copy.version}"))
            await newer(is_there=False)  # two that are fetched in earnest
            await asyncio.sleep(1.1 * LEASE_S)
            await newer(is_there=True)
            touching.cancel()

    play(story())


def test_who_asks_for_one_copy_for_ever_does_not_keep_it_in_its_place() -> None:
    async def story() -> None:
        mate = Mate()
        first = await described(mate)
        ends = asyncio.get_running_loop().time() + 10 * ALL * LEASE_S
        mate.version = 6
        while asyncio.get_running_loop().time() < ends:
            second = await answer(mate, SnapshotRequest(STAGE), caller=PeerId("another"))
            await answer(mate, SnapshotRequest(STAGE, 5, first.root), caller=PeerId("stranger"))
            await asyncio.sleep(0.5 * LEASE_S)
        assert isinstance(second, Snapshot) and mate.donor.num_copies == MOST_COPIES
        mate.version = 7
        assert isinstance(await answer(mate, SnapshotRequest(STAGE)), Snapshot)

    play(story())


def test_a_run_that_went_back_leaves_no_copy_behind() -> None:
    async def story() -> None:
        mate = Mate()
        old = await described(mate)
        mate.version, mate.copy_s = 6, 0.4
        async with asyncio.TaskGroup() as group:
            taking = group.create_task(described(mate))
            await asyncio.sleep(0.2)
            mate.donor.forget()
            assert mate.donor.num_copies == 0
        assert mate.copies == 3, "what was being taken was taken again"
        assert isinstance(await piece(mate, taking.result(), 0), SnapshotPiece)
        assert await piece(mate, old, 0) == Rejected(RejectCode.NOT_FOUND, "that copy is gone")

    play(story())


def test_a_copy_outlives_a_piece_that_takes_long_to_send() -> None:
    async def story() -> None:
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
        assert mate.donor.num_copies == 0

    play(story())


def test_a_copy_is_freed_when_nobody_has_asked_for_a_while() -> None:
    async def story() -> None:
        mate = Mate()
        copy = await described(mate)
        await asyncio.sleep(0.9 * KEEP_S)
        await piece(mate, copy, 0)
        await asyncio.sleep(0.9 * KEEP_S)
        assert mate.donor.num_copies == 1, "asked for again meanwhile"
        await asyncio.sleep(0.2 * KEEP_S)
        assert mate.donor.num_copies == 0
        assert await piece(mate, copy, 0) == Rejected(RejectCode.NOT_FOUND, "that copy is gone")

    play(story())


def test_who_leaves_while_the_copy_is_taken_leaves_none_behind() -> None:
    async def story() -> None:
        mate = Mate()
        mate.copy_s = 100.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10.0):
                await described(mate)
        await asyncio.sleep(200.0 + 2 * KEEP_S)
        assert mate.donor.num_copies == 0

    play(story())


@pytest.mark.parametrize("number", [15, 1 << 12])
def test_pieces_that_a_copy_does_not_have_are_refused(number: int) -> None:
    async def story() -> Answer:
        mate = Mate()
        return await piece(mate, await described(mate), number)

    found = play(story())
    assert isinstance(found, Rejected) and found.code is RejectCode.BAD_SHAPE
