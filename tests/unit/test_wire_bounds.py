"""What a run of known numbers can need fits its bounds; what it cannot is refused, most of it unparsed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_wire_messages import controls

from swarmnet.bounds import MAX_INDEXES, MAX_MEMBERS, Bounds
from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import Ballot, Generation, PeerId, RoundId
from swarmnet.messages import Commit, Finished, Heartbeat, MemberState, Part, Round, StagePlan, Stamp, TrailStep
from swarmnet.wire import convert
from swarmnet.wire.peer_ids import peer_id_from_public_bytes

CHAIN = "00" * 32
RUN = convert.Reader(Bounds(num_stages=3, microbatches=8))


def peer(number: int) -> PeerId:
    return peer_id_from_public_bytes(number.to_bytes(32, "big"))


STAMP, BALLOT = Stamp(1, 0, CHAIN), Ballot(0, peer(0))
ID = RoundId(BALLOT, 0)
COMMIT = Commit(0, 1, CHAIN, ID, b"d", 1, 0.0, 0.0)


def heartbeat(**fields: Any) -> Heartbeat:
    return Heartbeat(STAMP, 1, True, None, before=CHAIN, **fields)


def round_of(contributions: dict[int, frozenset[int]]) -> StagePlan:
    parts = tuple((peer(at), Generation(1, 1), held) for at, held in contributions.items())
    return StagePlan(STAMP, BALLOT, attempt=Round(STAMP, ID, parts, (peer(0),), (peer(0),)))


def refusal(data: bytes, reader: convert.Reader = RUN) -> RejectCode:
    with pytest.raises(BadMessage) as caught:
        reader.control(data)
    return caught.value.code


@given(st.one_of(*controls.values()))
def test_no_message_of_a_run_is_longer_than_its_bound(message: Any) -> None:
    assert len(convert.write_control(message)) <= convert.Reader(Bounds(3, 301, 8)).most_bytes(type(message))


def test_a_round_of_the_largest_stage_is_a_message() -> None:
    peers = tuple(peer(number) for number in range(MAX_MEMBERS))
    parts = tuple(
        (each, Generation((1 << 64) - 1, 1 << 20), frozenset(range(at, MAX_INDEXES, MAX_MEMBERS)))
        for at, each in enumerate(peers)
    )
    attempt = Round(STAMP, ID, parts, peers, (), bandwidths=(10**8,) * MAX_MEMBERS)
    message = StagePlan(STAMP, BALLOT, attempt=attempt)
    assert convert.read_control(convert.write_control(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        heartbeat(commits=(COMMIT,) * 3, last_commits=(COMMIT,) * 3),
        StagePlan(STAMP, BALLOT, given=frozenset(range(8))),
        round_of({at: frozenset({at}) for at in range(8)} | {at: frozenset() for at in range(8, 300)}),
    ],
    ids=["commits", "indexes", "contributions"],
)
def test_what_a_run_needs_is_read(message: Any) -> None:
    assert RUN.control(convert.write_control(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        heartbeat(commits=(COMMIT,) * 4),
        heartbeat(commits=(Commit(0, 1, CHAIN, ID, b"d", 1, 0.0, 0.0, discarded=frozenset({8})),)),
        StagePlan(STAMP, BALLOT, given=frozenset({8})),
        round_of({1: frozenset({8})}),
        round_of({at: frozenset() for at in range(9)}),
    ],
    ids=["commits", "discarded", "indexes", "contributed", "contributors"],
)
def test_what_a_run_cannot_need_is_refused(message: Any) -> None:
    data = convert.write_control(message)
    assert refusal(data, convert.Reader(Bounds(3, 8, members=8))) is RejectCode.MALFORMED
    assert convert.read_control(data) == message  # another run may need it


def test_a_message_is_refused_by_its_length_alone() -> None:
    """The body is not even protobuf; a longer bound finds that out."""
    reader = convert.Reader(Bounds(num_stages=3, microbatches=8, members=100))
    body = b"\xff" * reader.most_bytes(StagePlan)
    field = convert.CONTROL.numbers["stage_plan"]
    length = bytes((len(body) & 0x7F | 0x80, len(body) >> 7 & 0x7F | 0x80, len(body) >> 14))
    data = bytes((field << 3 | 2,)) + length + body
    assert refusal(data, reader) is RejectCode.TOO_LARGE
    assert refusal(data, convert.IN_ANY_RUN) is RejectCode.MALFORMED


def test_a_message_cannot_hide_behind_a_shorter_one() -> None:
    """Protobuf takes the last of several fields of one choice; the first would have decided on the length."""
    first, last = heartbeat(commits=(COMMIT,) * 3), StagePlan(STAMP, BALLOT)
    assert refusal(convert.write_control(last) + convert.write_control(first)) is RejectCode.MALFORMED
    assert refusal(b"") is RejectCode.MALFORMED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("owners", bytes(2 * (MAX_INDEXES // 8 + 1))),
        ("owners", b"\1\0\1"),
        ("owners", b"\1\1"),
        ("peers", bytes(33)),
        ("peers", bytes(64)),
        ("incarnations", [1, 2, 3]),
        ("numbers", [-1, 0]),
    ],
)
def test_contributions_that_cannot_be_are_refused(field: str, value: Any) -> None:
    envelope = convert.CONTROL.message.FromString(
        convert.write_control(round_of({1: frozenset({0}), 2: frozenset({1})}))
    )
    table = envelope.stage_plan.attempt.contributions
    table.ClearField(field)
    if isinstance(value, bytes):
        setattr(table, field, value)
    else:
        getattr(table, field).extend(value)
    assert refusal(envelope.SerializeToString(), convert.IN_ANY_RUN) is RejectCode.MALFORMED


def test_reports_and_answers_are_bounded_too() -> None:
    parts = ((peer(1), Generation(1, 1), frozenset({9})),)
    finished = Finished(ID, b"d", 1, 0.0, 0.0, parts)
    ack = replace(COMMIT, discarded=frozenset({9}))
    report = MemberState(STAMP, BALLOT, Generation(1, 1), frozenset(), frozenset(), ack, None, 0)
    assert refusal(convert.write_control(report)) is RejectCode.MALFORMED
    for answer in (TrailStep(finished, ()), TrailStep(None, (COMMIT,) * 4)):
        with pytest.raises(BadMessage):
            RUN.answer(convert.write_answer(answer))
        assert convert.read_answer(convert.write_answer(answer)) == (answer, (), None)


def test_a_part_that_runs_backwards_is_refused() -> None:
    """It would have a negative length."""
    data = convert.write_request(Part(STAMP, ID, "sum", 2, 1))
    with pytest.raises(BadMessage, match="starts after its stop"):
        convert.read_request(data)


def test_the_header_of_a_call_is_short() -> None:
    with pytest.raises(BadMessage) as caught:
        RUN.request(b"\xff" * 20_000)
    assert caught.value.code is RejectCode.TOO_LARGE
