"""The joiner's side: a copy from many donors, of whom some are slow, some break, some lie and some come late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import pytest
from donor_bench import PIECE, SIZE, STAGE, Line, Mate, header_at, state_at

from swarmnet.errors import BadMessage, NoReplica, PeerGone, PeerTimeout, Refused, RejectCode, SwarmError
from swarmnet.fetch.driver import MOST_S, HolderCalls
from swarmnet.fetch.plan import num_pieces, piece_size, span
from swarmnet.ids import PeerId
from swarmnet.messages import (
    MAX_PIECES,
    Answer,
    Busy,
    Content,
    Packed,
    Rejected,
    Snapshot,
    SnapshotPiece,
    SnapshotRequest,
    StateHeader,
    TrailStep,
)
from swarmnet.state.snapshot_fetch import Named, SnapshotFetch, WitnessRule
from swarmnet.state.snapshot_source import KEEP_S, LEASE_S
from swarmnet.testing.doubles import run_virtual

pytestmark = pytest.mark.virtual_time

ALL = -(-SIZE // PIECE)


class Joiner:
    def __init__(self, line: Line, *, max_bytes: int = SIZE, witnesses: WitnessRule | None = None) -> None:
        self.line = line
        self.errors: list[tuple[PeerId, SwarmError]] = []
        self.progress: list[tuple[int, float]] = []
        self.fetcher = SnapshotFetch(
            line,
            STAGE,
            max_bytes=max_bytes,
            failed=lambda peer, error: self.errors.append((peer, error)),
            progress=lambda snapshot, done, sources, rate: self.progress.append((done, rate)),
            unfit=self.unfit,
            witnesses=witnesses,
        )
        self.newest = 1 << 40

    async def fetch(self, version: int = -1) -> tuple[Snapshot, bytes]:
        snapshot, data = await self.fetcher.fetch(lambda: sorted(self.line.mates), version=version)
        return snapshot, bytes(data)

    def unfit(self, snapshot: Snapshot, version: int) -> Refused | None:
        return Refused(RejectCode.STALE, "given up") if snapshot.header.version > self.newest else None

    @property
    def refused(self) -> set[PeerId]:
        return {peer for peer, error in self.errors if isinstance(error, BadMessage)}


def test_a_donor_whose_state_moves_on_while_it_is_copied_is_asked_again() -> None:
    mate = Mate("a")
    mate.while_copying = lambda: setattr(mate, "version", 6)
    joiner = Joiner(Line(mate))
    with pytest.raises(NoReplica):
        run_virtual(joiner.fetch(5))
    snapshot, data = run_virtual(joiner.fetch())
    assert (snapshot.header.version, data) == (6, state_at(6)) and not joiner.refused


def test_a_copy_arrives_in_pieces_from_everybody_who_has_it() -> None:
    line = Line(Mate("a"), Mate("b"), Mate("c"))
    line.slow_s = dict.fromkeys(line.mates, 1.0)
    joiner = Joiner(line)
    snapshot, data = run_virtual(joiner.fetch())
    assert data == state_at(5) and snapshot.header == header_at(5)
    assert sorted(line.pieces()) == list(range(ALL)), "each piece once"
    assert all(len(line.pieces(peer)) >= ALL // 4 for peer in line.mates) and not joiner.errors


def test_a_state_arrives_however_slow_the_line() -> None:
    line = Line(Mate("a"))
    line.slow_s = {PeerId("a"): 300.0}
    assert run_virtual(Joiner(line).fetch())[1] == state_at(5)


async def test_a_witness_that_only_promises_to_describe_a_state_holds_up_no_fetch() -> None:
    """Those who had described it were a quorum, and it was waited for until the honest copies were gone."""
    line = Line(Mate("a"), Mate("b"), Mate("c"))
    line.slow_s = {PeerId("a"): 5_000.0}
    _, data = await Joiner(line, witnesses=Rule({5: "abc"})).fetch()
    assert data == state_at(5) and asyncio.get_running_loop().time() < 5.0


async def test_a_witness_that_only_promises_holds_up_no_fetch_from_two_that_are_a_step_apart() -> None:
    """Neither of their versions has most witnesses: only the third one could decide, and it never answers."""
    ahead, behind = Mate("a", 6), Mate("b", 5)
    line = Line(ahead, behind, Mate("c"))
    line.slow_s = {PeerId("c"): 5_000.0}
    asyncio.get_running_loop().call_later(2.0, setattr, behind, "version", 6)
    snapshot, data = await Joiner(line, witnesses=Rule({5: "abc", 6: "abc"})).fetch()
    assert snapshot.header.version == 6 and data == state_at(6)
    assert asyncio.get_running_loop().time() < 20.0


async def test_a_witness_that_only_promises_cannot_keep_the_only_other_one_from_being_believed_later() -> None:
    """One of two is no quorum. By the next version a third one has contributed."""
    honest = Mate("a", 5), Mate("b", 5)
    line = Line(*honest, Mate("c"))
    line.slow_s = {PeerId("c"): 5_000.0}
    for mate in honest:
        asyncio.get_running_loop().call_later(2.0, setattr, mate, "version", 6)
    joiner = Joiner(line, witnesses=Rule({5: "ac", 6: "abc"}))
    with pytest.raises(NoReplica):
        await joiner.fetch()
    snapshot, data = await joiner.fetch()
    assert snapshot.header.version == 6 and data == state_at(6)
    assert asyncio.get_running_loop().time() < 20.0 and {peer for peer, _ in joiner.errors} == {"c"}


async def test_of_several_sources_that_only_promise_one_learns_so_in_minutes() -> None:
    line = Line(Mate("a"), Mate("b"))
    line.slow_s = {PeerId("a"): 5_000.0, PeerId("b"): 5_000.0}
    with pytest.raises(NoReplica):
        await Joiner(line).fetch()
    assert asyncio.get_running_loop().time() < 1.5 * MOST_S


def test_an_empty_state_has_no_pieces() -> None:
    line = Line(Mate("a", size=0))
    snapshot, data = run_virtual(Joiner(line).fetch())
    assert data == b"" and snapshot.content.num_bytes == 0 and not line.pieces()


async def test_what_most_donors_have_is_fetched_and_who_is_a_step_behind_joins_in() -> None:
    size = 10 * SIZE
    behind, line = Mate("a", 4, size=size), Line(Mate("b", size=size), Mate("c", size=size))
    line.mates[behind.peer] = behind
    line.slow_s = dict.fromkeys(line.mates, 0.4)
    asyncio.get_running_loop().call_later(4.0, setattr, behind, "version", 5)
    snapshot, data = await Joiner(line, max_bytes=size).fetch()
    assert snapshot.header.version == 5 and data == state_at(5, size)
    assert line.pieces(behind.peer), "its copy of version 5 was taken when it got there"


def test_a_version_asked_for_by_number_comes_from_a_disk() -> None:
    old, line = Mate("a", None), Line(Mate("b"))
    old.disk[3] = state_at(3)
    line.mates[old.peer] = old
    snapshot, data = run_virtual(Joiner(line).fetch(version=3))
    assert (snapshot.header.version, data) == (3, state_at(3))


# ---------------------------------------------------------------- donors that fail


def test_a_donor_that_dies_in_the_middle_loses_its_pieces_to_the_others() -> None:
    line = Line(Mate("a"), Mate("b"))
    line.slow_s = dict.fromkeys(line.mates, 1.0)

    def die(peer: PeerId, request: SnapshotRequest) -> None:
        if len(line.pieces()) > ALL // 2:
            line.mates.pop(PeerId("b"), None)

    line.before = die
    assert run_virtual(Joiner(line).fetch())[1] == state_at(5)
    assert len(line.pieces()) <= ALL + 4, "only what it had in flight is fetched again"


async def test_pieces_survive_the_death_of_all_donors() -> None:
    line = Line(Mate("a"))
    line.slow_s = dict.fromkeys((PeerId("a"), PeerId("b")), 1.0)

    def die(peer: PeerId, request: SnapshotRequest) -> None:
        if len(line.pieces()) > 8:
            line.mates.pop(PeerId("a"), None)

    line.before = die
    joiner = Joiner(line)
    with pytest.raises(NoReplica):
        await joiner.fetch()
    had = len(line.pieces())
    other = line.mates[PeerId("b")] = Mate("b", 9)
    other.disk[5] = state_at(5)
    line.before = lambda peer, request: None
    _, data = await joiner.fetch()
    assert had + len(line.pieces(other.peer)) <= ALL + 4
    assert data == state_at(5)


async def test_without_anybody_who_has_the_rest_a_new_copy_is_begun() -> None:
    line = Line(Mate("a"), Mate("b", 9))

    def die(peer: PeerId, request: SnapshotRequest) -> None:
        if request.piece >= 5:
            line.mates.pop(PeerId("a"), None)

    line.before = die
    line.mates[PeerId("b")].version = None
    asyncio.get_running_loop().call_later(3.0, setattr, line.mates[PeerId("b")], "version", 9)
    snapshot, data = await Joiner(line).fetch()
    assert (snapshot.header.version, data) == (9, state_at(9))


async def test_a_slow_donor_does_not_hold_up_the_end() -> None:
    line = Line(Mate("a"), Mate("b"))
    line.slow_s = {PeerId("a"): 0.5, PeerId("b"): 1000.0}
    for mate in line.mates.values():
        async for _ in mate.source.serve(SnapshotRequest(STAGE)):
            pass
    began = asyncio.get_running_loop().time()
    await Joiner(line).fetch()
    assert (asyncio.get_running_loop().time() - began) < 60.0


@pytest.mark.parametrize("error", [PeerGone("broken"), PeerTimeout("the peer stalls")])
def test_a_donor_that_only_describes_is_given_up(error: Exception) -> None:
    line = Line(Mate("a"))

    def fail(peer: PeerId, request: SnapshotRequest) -> None:
        if request.piece >= 0:
            raise error

    line.before = fail

    async def story() -> None:
        async with asyncio.timeout(100.0):
            await Joiner(line).fetch()

    with pytest.raises((NoReplica, TimeoutError)):
        run_virtual(story())


def test_nobody_to_ask_is_an_error_in_words() -> None:
    with pytest.raises(NoReplica, match="no peer hands over"):
        run_virtual(Joiner(Line()).fetch())


def test_a_busy_donor_is_asked_again_when_it_said() -> None:
    mate = Mate("a")
    line = Line(mate)

    async def story() -> tuple[Snapshot, bytes]:
        mate.disk = {3: state_at(3), 4: state_at(4)}
        async for _ in mate.source.serve(SnapshotRequest(STAGE, 3)):
            pass
        return await Joiner(line).fetch(version=4)

    snapshot, _ = run_virtual(story())
    assert snapshot.header.version == 4 and len([r for _, r in line.requests if r.piece < 0]) == 2 and LEASE_S < KEEP_S


async def test_a_donor_that_is_always_busy_is_given_up_and_not_believed_how_long() -> None:
    line = Line(Mate("a"))
    line.intercept = lambda peer, request, answer: Busy(3600.0, 5) if isinstance(answer, Snapshot) else answer
    with pytest.raises(NoReplica, match="no peer hands over"):
        await Joiner(line).fetch()
    assert 60.0 <= asyncio.get_running_loop().time() <= 90.0 and 6 <= len(line.asked) <= 10


async def test_half_a_copy_that_is_of_no_use_any_more_is_not_completed() -> None:
    """The run went back: whoever still offers the old copy is refused, and what was kept of it is thrown away."""
    old, new = Mate("a", 9), Mate("b", 5)
    line, joiner = Line(old), None
    joiner = Joiner(line)
    line.slow_s[old.peer] = 1.0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5.5):
            await joiner.fetch()
    assert joiner.fetcher._partial is not None and joiner.fetcher._partial[1].done
    joiner.newest = 5
    line.mates[new.peer] = new
    snapshot, data = await joiner.fetch()
    assert snapshot.header.version == 5 and data == state_at(5)
    assert joiner is not None and {peer for peer, _ in joiner.errors} == {old.peer} and not joiner.refused


def test_a_copy_that_became_of_no_use_while_it_travelled_is_not_handed_out() -> None:
    old, new = Mate("a", 9), Mate("b", 5)
    line = Line(old)
    joiner = Joiner(line)

    def goes_back(peer: PeerId, request: SnapshotRequest) -> None:
        if request.piece == ALL - 1:
            joiner.newest = 5
            line.mates[new.peer] = new

    line.before = goes_back
    snapshot, data = run_virtual(joiner.fetch())
    assert snapshot.header.version == 5 and data == state_at(5)


# ---------------------------------------------------------------- donors that lie


def one(data: bytes) -> SnapshotPiece:
    return SnapshotPiece((Packed("uint8", (len(data),), data),))


Change = Callable[[SnapshotRequest, Answer], Answer]


def pieces_become(change: Callable[[SnapshotPiece], Answer]) -> Change:
    return lambda _, answer: change(answer) if isinstance(answer, SnapshotPiece) else answer


def described_with(**fields: object) -> Change:
    def change(_: SnapshotRequest, answer: Answer) -> Answer:
        if not isinstance(answer, Snapshot):
            return answer
        for part in (answer, answer.content):
            fitting = {name: value for name, value in fields.items() if hasattr(part, name)}
            if fitting:
                changed = replace(part, **fitting)
                return changed if part is answer else replace(answer, content=changed)
        raise AssertionError(fields)

    return change


LIES = {
    "other bytes": pieces_become(lambda piece: one(bytes(len(piece.payload[0].data)))),
    "too short": pieces_become(lambda piece: one(bytes(piece.payload[0].data)[:-1])),
    "too much": pieces_become(lambda piece: one(bytes(piece.payload[0].data) + b"!")),
    "no bytes": pieces_become(lambda piece: SnapshotPiece()),
    "a description for a piece": lambda request, answer: one(b"") if isinstance(answer, Snapshot) else answer,
    "another stage": described_with(stage=3),
    "cut off": described_with(num_bytes=40),
    "larger than the stage": described_with(num_bytes=1 << 47),
    "one huge piece": described_with(piece_bytes=1 << 47, digests=bytes(32)),
    "too many pieces": described_with(piece_bytes=1),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lying_donor_is_named_and_the_others_finish(lie: Change) -> None:
    line = Line(Mate("a"), Mate("b"), Mate("liar"))
    line.intercept = lambda peer, request, answer: lie(request, answer) if peer == "liar" else answer
    line.slow_s = dict.fromkeys(line.mates, 0.1)
    joiner = Joiner(line)
    assert run_virtual(joiner.fetch())[1] == state_at(5)
    assert joiner.refused == {PeerId("liar")}
    assert len(line.pieces(PeerId("liar"))) <= 4, "it is asked for nothing more"


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_nothing_is_taken_from_a_liar_alone(lie: Change) -> None:
    line = Line(Mate("liar"))
    line.intercept = lambda peer, request, answer: lie(request, answer)
    joiner = Joiner(line)
    with pytest.raises(NoReplica):
        run_virtual(joiner.fetch())
    assert joiner.refused == {PeerId("liar")}


def test_a_state_that_claims_to_be_larger_than_the_stage_costs_no_memory() -> None:
    joiner = Joiner(Line(Mate("a")), max_bytes=SIZE - 1)
    with pytest.raises(NoReplica):
        run_virtual(joiner.fetch())
    [(_, error)] = joiner.errors
    assert isinstance(error, BadMessage) and error.code is RejectCode.TOO_LARGE and not joiner.line.pieces()


async def test_who_vouched_for_a_copy_that_is_no_state_is_asked_no_more() -> None:
    line = Line(Mate("a"), Mate("b"), Mate("c", 4))
    joiner = Joiner(line)
    first, _ = await joiner.fetch()
    assert first.header.version == 5
    joiner.fetcher.useless(BadMessage(RejectCode.NON_FINITE, "NaN in a snapshot"))
    assert (await joiner.fetch())[0].header.version == 4 and joiner.refused == {PeerId("a"), PeerId("b")}


# ---------------------------------------------------------------- who is believed


class Rule:
    """Of each version its witnesses. classes: of weights, by peer."""

    def __init__(self, witnesses: dict[int, str], classes: dict[str, str] | None = None) -> None:
        self.witnesses, self.classes = witnesses, classes or {}

    async def told(self, calls: HolderCalls, described: Mapping[PeerId, StateHeader]) -> dict[PeerId, TrailStep]:
        return {}

    def of(self, header: StateHeader, steps: Collection[TrailStep]) -> Named | None:
        return Named(frozenset(map(PeerId, self.witnesses.get(header.version, ""))), self.classes.get("usual", ""))

    def class_of(self, peer: PeerId) -> str:
        return self.classes.get(peer, "")


def forged(*names: str, version: int = 5) -> list[Mate]:
    """They describe another state of that version."""
    return [Mate(name, version, size=SIZE - 1) for name in names]


def fetched(joiner: Joiner) -> bytes | None:
    """None: it gives up."""
    try:
        return run_virtual(joiner.fetch())[1]
    except NoReplica:
        return None


def test_two_witnesses_of_three_are_believed_and_not_three_strangers_who_are_named() -> None:
    joiner = Joiner(Line(Mate("a"), Mate("b"), *forged("x", "y", "z")), witnesses=Rule({5: "abc"}))
    assert fetched(joiner) == state_at(5)
    assert {peer for peer, _ in joiner.errors} == {"x", "y", "z"}


def test_one_witness_alone_is_believed_unless_another_source_contradicts_it() -> None:
    assert fetched(Joiner(Line(Mate("a")), witnesses=Rule({5: "a"}))) == state_at(5)
    assert fetched(Joiner(Line(Mate("a"), *forged("x")), witnesses=Rule({5: "a"}))) is None


def test_a_source_whose_weights_round_differently_contradicts_nobody() -> None:
    rule = Rule({5: "a"}, {"usual": "one", "a": "one", "b": "two"})
    joiner = Joiner(Line(Mate("a"), *forged("b")), witnesses=rule)
    assert fetched(joiner) == state_at(5) and not joiner.errors


def test_where_no_witness_is_a_source_the_state_is_taken_all_the_same() -> None:
    """All who contributed have been lost since; or the only one is the peer that joins, started again."""
    assert fetched(Joiner(Line(Mate("a")), witnesses=Rule({5: "k"}))) == state_at(5)


def test_of_two_pasts_with_equally_many_witnesses_none_is_taken() -> None:
    line = Line(Mate("a"), Mate("b"), *forged("x", "y", version=7))
    assert fetched(Joiner(line, witnesses=Rule({5: "ab", 7: "xy"}))) is None
    line = Line(Mate("a"), Mate("b"), Mate("c"), *forged("x", "y", version=7))
    assert fetched(Joiner(line, witnesses=Rule({5: "abc", 7: "xy"}))) == state_at(5)


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_witnesses_that_refuse_leave_no_forger_alone_to_decide(names: str) -> None:
    """A correct replica refuses while it applies a step, and a version that is past: a refusal is an answer, too."""
    line = Line(*forged("a"), *map(Mate, names[1:]))

    def answer(peer: PeerId, request: SnapshotRequest, said: Answer) -> Answer:
        return said if peer == "a" or not isinstance(said, Snapshot) else Rejected(RejectCode.NOT_READY, "no state")

    line.intercept = answer
    assert fetched(Joiner(line, witnesses=Rule({5: names}))) is None


async def test_busy_witnesses_are_waited_for() -> None:
    line = Line(Mate("a"), Mate("b"), Mate("c"))
    free_at = asyncio.get_running_loop().time() + 20.0

    def answer(peer: PeerId, request: SnapshotRequest, said: Answer) -> Answer:
        busy = peer != "a" and asyncio.get_running_loop().time() < free_at
        return Busy(5.0, 5) if busy and isinstance(said, Snapshot) else said

    line.intercept = answer
    assert (await Joiner(line, witnesses=Rule({5: "abc"})).fetch())[1] == state_at(5)
    assert asyncio.get_running_loop().time() >= free_at


# ---------------------------------------------------------------- progress, and the arithmetic of pieces


def test_progress_is_told_at_most_every_second_and_ends_whole() -> None:
    line = Line(Mate("a"))
    line.slow_s = {PeerId("a"): 2.5}
    joiner = Joiner(line)
    run_virtual(joiner.fetch())
    done = [done for done, _ in joiner.progress]
    assert done == sorted(done) and done[-1] == SIZE
    assert 5 <= len(done) <= 15
    left = [(SIZE - done) / rate for done, rate in joiner.progress if rate]
    assert left and left[-1] == 0.0 and left[0] > 1.0


@pytest.mark.parametrize("num_bytes", [0, 1, 2 << 20, (2 << 20) + 1, 1 << 34, 12 << 40])
def test_pieces_of_any_state_fit_a_description(num_bytes: int) -> None:
    size = piece_size(num_bytes)
    copy = Content(num_bytes, size, b"")
    assert num_pieces(copy) <= MAX_PIECES
    if num_bytes:
        assert span(copy, num_pieces(copy) - 1)[1] == num_bytes and span(copy, num_pieces(copy) - 1)[0] < num_bytes
