"""Handing a state over: one consistent copy in pieces, checked by its digest, freed when nobody fetches it any more."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from swarmnet.errors import BadMessage, PeerGone, PeerTimeout, Refused, RejectCode
from swarmnet.ids import Ballot, Chain, PeerId, RoundId
from swarmnet.messages import (
    Answer,
    Finished,
    Packed,
    Rejected,
    Request,
    Snapshot,
    SnapshotPiece,
    SnapshotRequest,
)
from swarmnet.simulate.clock import VirtualLoop
from swarmnet.state import handover
from swarmnet.state.cut import Cut
from swarmnet.state.handover import KEEP_S, Donor, fetch_snapshot

DONOR = PeerId("d")
STAGE = 2
FINISHED = Finished(RoundId(Ballot(1, DONOR), 1), bytes(32), 10, 1.0, 1.0, ())
PIECE = 10


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "PIECE_BYTES", PIECE)


def cut_at(version: int) -> Cut:
    return Cut(version, Chain(f"{version:064x}"), Chain("00" * 32))


class State:
    """What a donor hands over: `version` may move while it is copied. Stands for engine and step machine."""

    def __init__(self) -> None:
        self.version: int | None = 5
        self.finished: Finished | None = None
        self.copies = 0
        self.while_copying: Callable[[], None] = lambda: None
        self.donor = Donor(STAGE, self, self.cut, lambda: (self.finished, ()))

    def cut(self) -> Cut | None:
        return None if self.version is None else cut_at(self.version)

    async def snapshot(self) -> bytes:
        self.copies += 1
        data = self.bytes_of(self.version)
        await asyncio.sleep(60.0)
        self.while_copying()
        return data

    @staticmethod
    def bytes_of(version: int | None) -> bytes:
        return bytes((17 * at + (version or 0)) % 256 for at in range(47))


class Line:
    """A transport to one donor; `change` sees every answer, `before` every request."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.slow_s = 0.0
        self.asked: list[SnapshotRequest] = []
        self.before: Callable[[SnapshotRequest], None] = lambda _: None
        self.change: Callable[[SnapshotRequest, Answer], Answer] = lambda _, answer: answer

    def tell(self, peer: PeerId, message: object) -> None:
        raise AssertionError("nothing is told")

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        assert peer == DONOR and isinstance(request, SnapshotRequest)
        self.asked.append(request)
        self.before(request)
        async for answer in self.state.donor.serve(request):
            await asyncio.sleep(self.slow_s)
            yield self.change(request, answer)

    async def fetch(self, max_bytes: int = 1000) -> tuple[Snapshot, bytearray]:
        return await fetch_snapshot(self, DONOR, STAGE, max_bytes=max_bytes)


def play(story: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(story)


def test_a_state_arrives_in_pieces_whatever_its_size_and_however_slow_the_line() -> None:
    line = Line(State())
    line.slow_s = 300.0
    snapshot, data = play(line.fetch())
    assert data == State.bytes_of(5) and snapshot.digest == hashlib.sha256(data).digest()
    assert (snapshot.stage, snapshot.version, snapshot.chain) == (STAGE, 5, cut_at(5).chain)
    pieces = [(piece.start, piece.stop) for piece in line.asked[1:-1]]
    assert pieces == [(0, 10), (10, 20), (20, 30), (30, 40), (40, 47)]
    assert line.state.copies == 1


def test_an_empty_state_has_no_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "bytes_of", staticmethod(lambda version: b""))
    snapshot, data = play(Line(State()).fetch())
    assert snapshot.num_bytes == 0 and data == b""


def test_joiners_share_one_copy() -> None:
    state = State()

    async def story() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(Line(state).fetch())

    play(story())
    assert state.copies == 1


# ---------------------------------------------------------------- what a donor may do wrong


def only_pieces(change: Callable[[SnapshotPiece], Answer]) -> Callable[[SnapshotRequest, Answer], Answer]:
    return lambda _, answer: change(answer) if isinstance(answer, SnapshotPiece) else answer


def one(data: bytes) -> SnapshotPiece:
    return SnapshotPiece((Packed("uint8", (len(data),), data),))


@pytest.mark.parametrize("change", [
    only_pieces(lambda piece: one(bytes(len(piece.payload[0].data)))),
    only_pieces(lambda piece: one(bytes(piece.payload[0].data)[:-1])),
    only_pieces(lambda piece: one(bytes(piece.payload[0].data) + b"!")),
    only_pieces(lambda piece: SnapshotPiece()),
    lambda _, answer: replace(answer, stage=3) if isinstance(answer, Snapshot) else answer,
    lambda _, answer: replace(answer, num_bytes=40) if isinstance(answer, Snapshot) else answer,
    lambda request, answer: replace(answer, version=6) if request.digest and isinstance(answer, Snapshot) else answer,
    lambda request, answer: one(b"") if isinstance(answer, Snapshot) else answer,
], ids=["other bytes", "too short", "too much", "empty", "other stage", "cut off", "other version", "no header"])
def test_what_is_not_the_state_described_is_refused(change: Callable[[SnapshotRequest, Answer], Answer]) -> None:
    line = Line(State())
    line.change = change
    with pytest.raises(BadMessage):
        play(line.fetch())


def test_a_piece_that_is_too_long_is_the_last_one_asked_for() -> None:
    line = Line(State())
    line.change = only_pieces(lambda piece: one(bytes(1000)))
    with pytest.raises(BadMessage, match="not the piece"):
        play(line.fetch())
    assert len(line.asked) == 2


def test_a_state_that_claims_to_be_larger_than_the_stage_costs_no_memory() -> None:
    line = Line(State())
    line.change = lambda _, answer: replace(answer, num_bytes=1 << 47) if isinstance(answer, Snapshot) else answer
    with pytest.raises(BadMessage) as caught:
        play(line.fetch())
    assert caught.value.code is RejectCode.TOO_LARGE and len(line.asked) == 1
    line = Line(State())
    play(line.fetch(max_bytes=47))
    with pytest.raises(BadMessage):
        play(Line(State()).fetch(max_bytes=46))


@pytest.mark.parametrize("error", [PeerGone("broken"), PeerTimeout("the peer stalls")])
def test_a_donor_that_breaks_off_or_stalls_is_given_up(error: Exception) -> None:
    line = Line(State())

    def fail(request: SnapshotRequest) -> None:
        if request.start:
            raise error

    line.before = fail
    with pytest.raises(type(error)):
        play(line.fetch())


# ---------------------------------------------------------------- one consistent cut


def test_weights_that_moved_while_they_were_copied_are_copied_again() -> None:
    line = Line(State())

    def move_once() -> None:
        line.state.version = 6

    line.state.while_copying = move_once
    snapshot, data = play(line.fetch())
    assert snapshot.version == 6 and data == State.bytes_of(6) and line.state.copies == 2


def test_a_donor_whose_weights_always_move_says_so() -> None:
    line = Line(State())

    def move() -> None:
        assert line.state.version is not None
        line.state.version += 1

    line.state.while_copying = move
    with pytest.raises(Refused) as caught:
        play(line.fetch())
    assert caught.value.code is RejectCode.NOT_READY and not line.state.donor.keeps_copy


@pytest.mark.parametrize("when", ["before", "while copying"])
def test_a_donor_without_state_says_so(when: str) -> None:
    line = Line(State())

    def lose() -> None:
        line.state.version = None

    if when == "before":
        lose()
    line.state.while_copying = lose
    with pytest.raises(Refused) as caught:
        play(line.fetch())
    assert caught.value.code is RejectCode.NOT_READY


def test_a_sum_finished_while_the_state_travels_comes_with_it() -> None:
    line = Line(State())

    def finish(request: SnapshotRequest) -> None:
        if request.start:
            line.state.finished = FINISHED

    line.before = finish
    assert play(line.fetch())[0].finished == FINISHED


def test_a_sum_of_another_version_does_not() -> None:
    line = Line(State())

    def step(request: SnapshotRequest) -> None:
        if request.start:
            line.state.version, line.state.finished = 6, FINISHED

    line.before = step
    snapshot, data = play(line.fetch())
    assert snapshot.version == 5 and snapshot.finished is None and data == State.bytes_of(5)


def test_a_newer_copy_replaces_an_older_one() -> None:
    line = Line(State())

    async def story() -> Answer:
        old, _ = await line.fetch()
        line.state.version = 6
        await line.fetch()
        [answer] = [answer async for answer in line.state.donor.serve(SnapshotRequest(STAGE, old.digest, 0, 10))]
        return answer

    assert play(story()) == Rejected(RejectCode.NOT_FOUND, "that copy is gone")


@pytest.mark.parametrize(("start", "stop"), [(40, 48), (47, 50), (20, 10), (-1, 10)])
def test_bytes_that_a_copy_does_not_have_are_refused(start: int, stop: int) -> None:
    line = Line(State())

    async def story() -> Answer:
        found, _ = await line.fetch()
        request = SnapshotRequest(STAGE, found.digest, start, stop)
        [answer] = [answer async for answer in line.state.donor.serve(request)]
        return answer

    answer = play(story())
    assert isinstance(answer, Rejected) and answer.code is RejectCode.BAD_SHAPE


# ---------------------------------------------------------------- memory


def test_a_copy_is_freed_when_nobody_has_asked_for_a_while() -> None:
    line = Line(State())

    async def story() -> None:
        await line.fetch()
        await asyncio.sleep(0.9 * KEEP_S)
        assert line.state.donor.keeps_copy
        await line.fetch()
        await asyncio.sleep(0.9 * KEEP_S)
        assert line.state.donor.keeps_copy, "asked for again meanwhile"
        await asyncio.sleep(0.2 * KEEP_S)
        assert not line.state.donor.keeps_copy
        await line.fetch()

    play(story())
    assert line.state.copies == 2


def test_a_copy_outlives_a_piece_that_takes_long_to_send() -> None:
    line = Line(State())
    line.slow_s = 10 * KEEP_S

    async def story() -> None:
        await line.fetch()
        await asyncio.sleep(1.1 * KEEP_S)
        assert not line.state.donor.keeps_copy

    play(story())
    assert line.state.copies == 1


def test_who_leaves_in_the_middle_leaves_no_copy_behind() -> None:
    line = Line(State())
    line.slow_s = 5.0

    async def story() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(80.0):
                await line.fetch()
        assert line.state.donor.keeps_copy
        await asyncio.sleep(1.1 * KEEP_S)
        assert not line.state.donor.keeps_copy

    play(story())
    assert line.state.copies == 1
