"""Every message survives the wire; arbitrary bytes become a message or BadMessage; out-of-range fields are refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.bounds import ANY_RUN, MAX_INDEXES, Proto
from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId, RunId
from swarmnet.messages import (
    MAX_COUNTING,
    MAX_VOTES,
    Answer,
    Busy,
    Commit,
    Committed,
    Control,
    Count,
    Finished,
    Gradient,
    MemberState,
    Packed,
    Process,
    Rejected,
    Request,
    Round,
    SnapshotPiece,
    StagePlan,
    Stamp,
    TrailStep,
    Trouble,
    roll_of,
)
from swarmnet.wire import convert
from swarmnet.wire.convert import ANSWERS, CONTROL, REQUESTS, Hello, Ping, Signal, TensorHeader
from swarmnet.wire.fields import MAX_MESSAGE_BYTES, Wrong, struct_of
from swarmnet.wire.index_sets import bitmap_problem, from_bitmap, from_bytes, indexes_problem, to_bitmap, to_bytes
from swarmnet.wire.peer_ids import peer_id_from_public_bytes
from tests.unit.message_strategies import of

index = st.integers(0, MAX_INDEXES - 1)
controls: dict[type, st.SearchStrategy] = {kind.make: of(kind.make) for kind in CONTROL.kinds.values()}
requests: dict[type, st.SearchStrategy] = {kind.make: of(kind.make) for kind in REQUESTS.kinds.values()}
answers: dict[type, st.SearchStrategy] = {kind.make: of(kind.make) for kind in ANSWERS.kinds.values()}
tensors = st.lists(
    st.builds(
        TensorHeader, st.text(max_size=8), st.lists(st.integers(0, 99), max_size=8).map(tuple), st.integers(0, 1 << 47)
    ),
    max_size=4,
).map(tuple)


@dataclasses.dataclass(frozen=True)
class Unbounded:
    peer: PeerId
    number: int


@dataclasses.dataclass(frozen=True)
class SameNumber:
    peer: PeerId
    other: Annotated[PeerId, Proto(1)]


@pytest.mark.parametrize(
    ("kind", "why"), [(Unbounded, "Unbounded.number: no field is derived"), (SameNumber, "number")]
)
def test_a_field_without_bounds_or_number_of_its_own_is_our_bug(kind: type, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        struct_of(kind, ANY_RUN)


def test_tables_name_every_message() -> None:
    assert {kind.make for kind in CONTROL.kinds.values()} == {*get_args(Control), Ping}
    assert {kind.make for kind in REQUESTS.kinds.values()} == {*get_args(Request)}
    assert {kind.make for kind in ANSWERS.kinds.values()} == {*get_args(Answer), *get_args(Signal)}


@given(st.one_of(*controls.values()))
def test_control_survives_the_wire(message: Any) -> None:
    assert convert.read_control(convert.write_control(message)) == message


@given(st.one_of(*requests.values()), tensors)
def test_requests_survive_the_wire(request: Any, payload: tuple[TensorHeader, ...]) -> None:
    if isinstance(request, Process) or not payload:
        assert convert.read_request(convert.write_request(request, payload)) == (request, payload, None)
    else:
        with pytest.raises(BadMessage, match="no payload"):
            convert.read_request(convert.write_request(request, payload))


@given(st.one_of(*answers.values()))
def test_answers_survive_the_wire(answer: Any) -> None:
    assert convert.read_answer(convert.write_answer(answer)) == (answer, (), None)


@given(st.one_of(of(Hello), answers[Rejected]))
def test_greetings_survive_the_wire(reply: Any) -> None:
    assert convert.read_hello_reply(convert.write_hello_reply(reply)) == reply
    if isinstance(reply, Hello):
        assert convert.read_hello(convert.write_hello(reply)) == reply


def test_an_answer_declares_its_payload() -> None:
    tensor = Packed("fp32", (2, 3), b"\0" * 24)
    answer, declared, _ = convert.read_answer(convert.write_answer(Gradient(0.0, 1, payload=(tensor,))))
    assert declared == (TensorHeader("fp32", (2, 3), 24),)
    assert convert.with_payload(answer, (tensor,)) == Gradient(0.0, 1, payload=(tensor,))


READERS = [
    convert.read_control, convert.read_request, convert.read_answer, convert.read_hello, convert.read_hello_reply,
]  # fmt: skip


@given(st.binary(max_size=200), st.sampled_from(READERS))
def test_arbitrary_bytes_are_read_or_refused(data: bytes, read: Any) -> None:
    try:
        read(data)
    except BadMessage as error:
        assert error.code is RejectCode.MALFORMED


@given(st.one_of(*controls.values()).map(convert.write_control), st.data())
def test_damaged_control_is_read_or_refused(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
    try:
        convert.write_control(convert.read_control(bytes(damaged)))  # what is read can be said again
    except BadMessage as error:
        assert error.code in (RejectCode.MALFORMED, RejectCode.TOO_LARGE)  # too large for another kind


@given(st.one_of(*answers.values()).map(convert.write_answer), st.data())
def test_cut_answers_are_read_or_refused(data: bytes, draw: st.DataObject) -> None:
    try:
        convert.read_answer(data[: draw.draw(st.integers(0, len(data)))])
    except BadMessage as error:
        assert error.code is RejectCode.MALFORMED


def test_a_message_that_is_too_long_is_not_parsed() -> None:
    with pytest.raises(BadMessage) as caught:
        convert.read_answer(bytes(MAX_MESSAGE_BYTES + 1))
    assert caught.value.code is RejectCode.TOO_LARGE


@given(st.frozensets(index, max_size=50))
def test_bitmaps_hold_any_set(held: frozenset[int]) -> None:
    assert from_bitmap(to_bitmap(held)) == held
    assert len(to_bitmap(held)) <= MAX_INDEXES // 8


@st.composite
def some_indexes(draw: st.DrawFn) -> tuple[frozenset[int], int]:
    """A set, dense or sparse, with what all are below."""
    below = draw(st.sampled_from([1, 7, 8, 9, 300, MAX_INDEXES]))
    rows = draw(st.lists(st.tuples(st.integers(0, below - 1), st.integers(1, 400)), max_size=20))
    return frozenset(i for first, size in rows for i in range(first, min(first + size, below))), below


@given(some_indexes())
def test_index_sets_are_written_shortly_and_read_back(case: tuple[frozenset[int], int]) -> None:
    held, below = case
    data = to_bytes(held)
    assert not indexes_problem(data, below) and from_bytes(data) == held
    assert len(data) <= 1 + -(-below // 8), "never longer than a bitmap"
    if held:
        assert indexes_problem(data, max(held)), "the bound is checked"


@given(st.binary(max_size=40) | st.binary(max_size=40).map(lambda data: b"\x01" + data))
def test_any_bytes_are_an_index_set_or_refused(data: bytes) -> None:
    if not indexes_problem(data, 300):
        held = from_bytes(data)
        assert all(0 <= index < 300 for index in held) and from_bytes(to_bytes(held)) == held


@pytest.mark.parametrize(
    "data", [b"\x02", b"\x01\x80", b"\x01\x00", b"\x01\x00\xff\xff\xff\xff\xff\x01", b"\x00" + bytes(39)]
)
def test_broken_index_sets_are_refused(data: bytes) -> None:
    assert indexes_problem(data, 300)


def test_more_owners_than_a_byte_holds() -> None:
    parts = tuple(
        (peer_id_from_public_bytes(n.to_bytes(32, "big")), Generation(n, n), frozenset({n, n + 300}))
        for n in range(300)
    )
    finished = Finished(RoundId(Ballot(0, parts[0][0]), 0), b"d", 1, 0.0, 0.0, parts)
    written = convert.write_answer(TrailStep(finished, ()))
    assert convert.read_answer(written)[0] == TrailStep(finished, ())
    assert len(written) < 300 * (32 + 8 + 3) + 9 * 600 // 8 + 200, "a key, a generation, and nine bits for each index"


def hundred(step: int, **fields: Any) -> Commit:
    """A commit of a stage of a hundred replicas."""
    everyone = sorted(peer_id_from_public_bytes(n.to_bytes(32, "big")) for n in range(100))
    named = tuple(everyone[:MAX_COUNTING])
    signed = {"seats": frozenset(range(MAX_VOTES)), "signatures": (bytes(64),) * MAX_VOTES}
    id_ = RoundId(Ballot(3, everyone[-1]), 1 << 40)
    sums = (id_, bytes(32), 10**6, 1e7, 1e3)
    whole = Commit(99, step, Chain("ab" * 32), *sums, roll=roll_of(named), contributors=named, **signed)
    return dataclasses.replace(whole, **fields)


@pytest.mark.parametrize(("fields", "most"), [({}, 2350), ({"contributors": ()}, 1700)], ids=["named", "brief"])
def test_a_certificate_of_a_hundred_replicas_is_short(fields: dict[str, Any], most: int) -> None:
    message = Committed(hundred(1000, **fields))
    written = convert.write_control(message)
    back = convert.read_control(written)
    assert len(written) <= most and isinstance(back, Committed)
    for name in ("contributors", "votes", "seats", "signatures"):
        assert getattr(back.commit, name) == getattr(message.commit, name)


@pytest.mark.parametrize("wrong", [{"roll": bytes(16)}, {"seats": frozenset({0})}], ids=["others", "seats"])
def test_a_commit_that_contradicts_itself_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        convert.read_control(convert.write_control(Committed(dataclasses.replace(hundred(1000), **wrong))))


@given(controls[MemberState], of(Count), st.none() | of(Trouble))
def test_a_report_of_what_has_not_changed_is_short(last: MemberState, progress: int, trouble: Trouble | None) -> None:
    report = last.unchanged(progress=progress, trouble=trouble, round=3)
    written = convert.write_control(report)
    assert convert.read_control(written) == report
    assert trouble is not None or len(written) <= 200
    with pytest.raises(BadMessage, match="not whole"):
        convert.read_control(convert.write_control(dataclasses.replace(report, vote=b"mine")))


def test_a_bitmap_that_is_too_long_is_refused() -> None:
    assert bitmap_problem(bytes(MAX_INDEXES // 8 + 1), MAX_INDEXES)
    assert not bitmap_problem(b"\xff" * (MAX_INDEXES // 8), MAX_INDEXES)
    assert bitmap_problem(b"\x08", 3) and not bitmap_problem(b"\x07", 3)


def _plan(**changes: Any) -> Any:
    peer = peer_id_from_public_bytes(bytes(32))
    message = StagePlan(Stamp(1, 2, "00" * 32), Ballot(3, peer), Generation(4, 5), frozenset({6}))
    envelope = convert.CONTROL.message.FromString(convert.write_control(message))
    for path, value in changes.items():
        *outer, name = path.split("__")
        target = envelope.stage_plan
        for part in outer:
            target = getattr(target, part)
        setattr(target, name, value)
    return envelope


@pytest.mark.parametrize(
    "changes",
    [
        {"assigned": b"\x02"}, {"evicted": "other"}, {"stamp__step": -1}, {"stamp__stage": -1},
        {"stamp__stage": 1 << 20},
        {"stamp__chain": b"short"}, {"ballot__number": -1}, {"ballot__peer": ""}, {"ballot__peer": "QmNotEd25519"},
        {"ballot__peer": "1" * 52}, {"ballot__peer": "12D3KooW" + "l" * 44}, {"generation__number": -1},
    ],
    ids=str,
)  # fmt: skip
def test_fields_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    convert.read_control(_plan().SerializeToString())
    (path,) = changes
    with pytest.raises(BadMessage, match=f"^stage_plan.{path.replace('__', '.')} "):  # says where
        convert.read_control(_plan(**changes).SerializeToString())


def test_a_missing_part_is_refused() -> None:
    envelope = _plan()
    envelope.stage_plan.ClearField("ballot")
    with pytest.raises(BadMessage, match="ballot is missing"):
        convert.read_control(envelope.SerializeToString())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    header = ANSWERS.message(gradient={"loss_sum": value})
    with pytest.raises(BadMessage):
        convert.read_answer(header.SerializeToString())
    with pytest.raises(BadMessage):
        convert.read_answer(ANSWERS.message(busy={"retry_after_s": value}).SerializeToString())


def test_an_index_contributed_twice_is_refused() -> None:
    peer = [PeerId(peer_id_from_public_bytes(bytes([n] * 32))) for n in range(2)]
    part = [(p, Generation(0, 0), frozenset({7})) for p in peer]
    ballot = Ballot(0, peer[0])
    stamp = Stamp(0, 0, "00" * 32)
    none = (*part[0][:2], frozenset[int]())
    for contributions, discarded in [((part[0],), frozenset({7})), ((part[0], none), frozenset[int]())]:
        message = Round(stamp, RoundId(ballot, 0), contributions, (), (), discarded)
        with pytest.raises(BadMessage):
            convert.read_control(convert.write_control(StagePlan(stamp, ballot, attempt=message)))


def test_losses_need_one_entry_per_index() -> None:
    header = ANSWERS.message(part_data={"losses": {"indexes": b"\x00\x03", "loss_sum": [1.0]}})
    with pytest.raises(BadMessage, match="one entry per index"):
        convert.read_answer(header.SerializeToString())


def test_a_refusal_may_hold_any_words() -> None:
    reason = "caf\udce9 " * 1000
    answer, _, _ = convert.read_answer(convert.write_answer(Rejected(RejectCode.STALE, reason)))
    assert isinstance(answer, Rejected) and 0 < len(answer.reason) <= 1000


def test_an_answer_without_payload_cannot_declare_one() -> None:
    header = ANSWERS.message(accepted={})
    header.payload.add(codec="fp32", length=0)
    with pytest.raises(BadMessage):
        convert.read_answer(header.SerializeToString())


def test_our_own_bad_values_are_our_bug() -> None:
    with pytest.raises(Wrong):
        convert.write_request(Process(-1, 0, 0))
    with pytest.raises(AssertionError):
        convert.write_hello(Hello(RunId("nonsense"), 1, 0, 0.0))


def test_a_negative_zero_makes_no_other_commit_of_an_equal_one() -> None:
    """What is signed, and the chain, are of bits, and -0.0 == 0.0."""
    zero = convert.CONTROL.message.FromString(
        convert.write_control(Committed(dataclasses.replace(hundred(1000), loss_sum=0.0, grad_sq_norm=0.0)))
    )
    zero.committed.commit.loss_sum = zero.committed.commit.grad_sq_norm = -0.0
    back = convert.read_control(zero.SerializeToString())
    assert isinstance(back, Committed)
    assert [math.copysign(1.0, each) for each in (back.commit.loss_sum, back.commit.grad_sq_norm)] == [1.0, 1.0]


def test_small_messages_that_are_remembered_keep_what_is_theirs() -> None:
    """A payload travels behind its message and may lie in memory that is written to; 0.0 equals -0.0."""
    piece = SnapshotPiece((Packed("uint8", (4,), memoryview(bytearray(4))),))
    for _ in range(2):
        assert convert.read_answer(convert.write_answer(piece))[0] == SnapshotPiece()
    for seconds in (0.0, -0.0):
        busy, _, _ = convert.read_answer(convert.write_answer(Busy(seconds, 0)))
        assert math.copysign(1.0, busy.retry_after_s) == math.copysign(1.0, seconds)
