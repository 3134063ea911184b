"""The bytes of one instance of every message are what they were: a change of them is a change of the protocol."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from swarmnet.directory import BearerPass, Invitation
from swarmnet.errors import RejectCode
from swarmnet.ids import Ballot, Chain, Generation, PeerId, Restart, RoundId, RunId
from swarmnet.messages import (
    Accepted,
    Answer,
    AuditData,
    AuditRequest,
    Busy,
    Case,
    Commit,
    Committed,
    Content,
    Control,
    DialBack,
    DialledBack,
    Exclusion,
    Fetch,
    Fetched,
    Finished,
    Gradient,
    Heartbeat,
    History,
    HistoryRequest,
    Late,
    LineQuality,
    ManifestData,
    ManifestRequest,
    Measure,
    MemberState,
    MovedTo,
    Packed,
    Part,
    PartData,
    Pledge,
    Process,
    Recheck,
    Rejected,
    Request,
    Round,
    Running,
    Sent,
    Snapshot,
    SnapshotPiece,
    SnapshotRequest,
    StagePlan,
    Stamp,
    StateHeader,
    TrailRequest,
    TrailStep,
    Trouble,
    Vote,
    WorkRecord,
    roll_of,
)
from swarmnet.telemetry.figures import Evaluation, StepFigures
from swarmnet.telemetry.spans import PhaseTime, StepTimes
from swarmnet.wire import convert
from swarmnet.wire.convert import Done, GreetFirst, Hello, Ping, Pong, Pulse, Signal, TensorHeader, Told
from swarmnet.wire.peer_ids import peer_id_from_public_bytes
from swarmnet.wire.signed import sign

GOLDEN = Path(__file__).with_name("wire_golden.json")


def peer(number: int) -> PeerId:
    return peer_id_from_public_bytes(bytes([number]) * 32)


def chain(number: int) -> Chain:
    return Chain(f"{number:02x}" * 32)


BALLOT, GENERATION, RESTART = Ballot(3, peer(1)), Generation((1 << 64) - 2, 5), Restart(2, 40)
ROUND_ID = RoundId(BALLOT, 7)
STAMP = Stamp(41, 2, chain(9), RESTART)
SHARES = ((peer(1), GENERATION, frozenset({0, 9})), (peer(2), Generation(1, 0), frozenset({1, 65_535})))
FINISHED = Finished(ROUND_ID, b"digest", 1 << 40, -2.5, 0.125, SHARES, frozenset({4}))
NAMED = (peer(1), peer(2))
COMMIT = Commit(
    2, 41, chain(9), ROUND_ID, b"digest", 77, -2.5, 0.125, frozenset({4}), roll_of(NAMED), NAMED,
    (Vote(peer(3), b"vote"),), frozenset({1}), (b"signed",), late=(peer(4),),
)  # fmt: skip
ACK = Commit(2, 41, chain(9), ROUND_ID, b"digest", 77, -2.5, 0.125, frozenset({4}), roll_of(NAMED))
FENCED = (STAMP, BALLOT, GENERATION)
TENSOR = Packed("fp32", (2, 3), bytes(24))
PLEDGE = Pledge(
    STAMP, ROUND_ID, b"digest", bytes(range(32)), peer(4), (1 << 61) - 2, bytes(range(1, 33)), b"signed"
)  # fmt: skip
WORK = WorkRecord(6, bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32, bytes([4]) * 32, -1.5, 64, True)
SENT = Sent(STAMP, 6, "answer", bytes([5]) * 32, peer(4), bytes([6]) * 32, bytes([7]) * 32, True, b"signed")
RECHECK = Recheck(peer(5), bytes(range(32)), b"found")

CONTROLS = (
    Heartbeat(STAMP, 1 << 63, True, BALLOT, (COMMIT,), (COMMIT, COMMIT), 12, True, "cpu/1",
              Measure(40, chain(8), b"bits"), chain(7), (peer(3), peer(4)), (peer(5),), wants=b"\x05"),
    StagePlan(*FENCED, frozenset({6, 9}), ((7, peer(2)),), "closed", frozenset({11}),
              Round(STAMP, ROUND_ID, SHARES, (peer(1), peer(2)), (peer(3),), frozenset({4}), (10**6, 10**12), (2,)),
              frozenset({3, 8}), True),
    MemberState(*FENCED, frozenset({1, 2}), frozenset({2}), ACK, COMMIT, 99, frozenset({5}),
           LineQuality(10**9, ((peer(2), 1500), (peer(3), 9)), busy=True),
           Trouble(ROUND_ID, (Late(peer(4), True, 1.5),), (peer(5),)), b"my vote", True, 12, 7,
           frozenset({3, 300}), frozenset({4})),
    Committed(COMMIT, RESTART),
    Case(PLEDGE, WORK, bytes(64), SENT, PLEDGE, "cpu", (RECHECK, RECHECK), SHARES, frozenset({4})),
    SENT,
    Ping(b"four"),
)  # fmt: skip
REQUESTS = (
    Process(41, 2, 6, "eval", True, True, (peer(1), peer(4)), (SENT, SENT)),
    Fetch(41, -1, 6, "gradient", True),
    AuditRequest(41, 2, 6, peer(4), True, True),
    Part(STAMP, ROUND_ID, "reduced", 128, 1 << 40, 1, bytes(range(32))),
    SnapshotRequest(2, 41, bytes(range(32)), 8191),
    TrailRequest(STAMP),
    ManifestRequest(),
    DialBack(),
    HistoryRequest(7),
)
ANSWERS = (
    Accepted(),
    Running(),
    Busy(2.5, 41),
    MovedTo(peer(2)),
    Rejected(RejectCode.NOT_READY, "still füllt", 3),
    Gradient(1.25, 64, 0.5, (TENSOR,), (peer(2), peer(3)), (SENT,)),
    Fetched((TENSOR, TENSOR), 1.25, 64, (SENT,)),
    PartData((TENSOR,), {9: (0.5, 3), 2: (-1.0, 4)}, FINISHED, (PLEDGE,)),
    AuditData(WORK, bytes(32), (TENSOR, TENSOR)),
    Snapshot(
        2,
        StateHeader(41, chain(1), chain(2), chain(3), RESTART, (), (Exclusion(peer(4), 80, 1),)),
        Content(1 << 33, 1 << 21, bytes(64)),
    ),
    SnapshotPiece((TENSOR,)),
    TrailStep(FINISHED, (COMMIT,), (COMMIT, COMMIT)),
    ManifestData('[model]\nname = "é"\n'),
    DialledBack(True, "no way there"),
    Content(5_000_000, 1 << 21, bytes(range(96))),
    History(
        (StepFigures(7, 12.5, 64, 0.75, 1e-3, 2.5), StepFigures(8, 12.25, 64, 0.5, 1e-3, 0.5)),
        (Evaluation(8, 0.25),),
        (StepTimes(2, 8, 0.5, 9.0, PhaseTime(8.5, 9.0, 0.5), PhaseTime(0.0, 2.0, 1.5)),),
    ),
    GreetFirst(),
    Pulse(),
    Done(),
    Pong(b"four"),
    Told(b"an envelope"),
)
LEAST = (  # every optional field empty
    Heartbeat(Stamp(0, 0, chain(0)), 0, False, None, before=chain(0)),
    StagePlan(Stamp(0, 0, chain(0)), BALLOT),
    Committed(Commit(0, 0, chain(0), ROUND_ID, b"digest", 1, 0.0, 0.0)),
    MemberState(*FENCED, frozenset(), frozenset(), None, None, 0),
    Case(PLEDGE),
)
LEAST_ANSWERS = (PartData(()), TrailStep(None, ()), Rejected(RejectCode.STALE))
INVITATION = sign(
    Invitation(RunId(chain(5)), peer(2), ("stage",), True, 3), peer(1), lambda data: bytes(64), not_after=7
)
PASS = sign(BearerPass(peer(3), INVITATION), peer(2), lambda data: bytes(64))
HELLO = Hello(RunId(chain(5)), 1, 4, 1.7e9, PASS)


def all_written() -> dict[str, bytes]:
    """By name: the bytes of every instance above."""
    declared = (TensorHeader("int8", (2, 3), 10),)
    written = {type(message).__name__: convert.write_control(message) for message in CONTROLS}
    written |= {type(answer).__name__: convert.write_answer(answer) for answer in ANSWERS}
    for request in REQUESTS:
        payload = declared if isinstance(request, Process) else ()
        written[type(request).__name__] = convert.write_request(request, payload)
    written |= {f"least {type(message).__name__}": convert.write_control(message) for message in LEAST}
    written |= {f"least {type(answer).__name__}": convert.write_answer(answer) for answer in LEAST_ANSWERS}
    written |= {"Hello": convert.write_hello(HELLO), "reply": convert.write_hello_reply(HELLO)}
    return written | {"refusal": convert.write_hello_reply(Rejected(RejectCode.CLOCK, "late", -1))}


def digests() -> dict[str, str]:
    """Length and SHA-256 of each."""
    return {name: f"{len(data)} {hashlib.sha256(data).hexdigest()}" for name, data in sorted(all_written().items())}


def test_the_bytes_of_every_message_are_what_they_were() -> None:
    assert digests() == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_an_instance_of_every_message_is_kept() -> None:
    known = {type(message) for message in (*CONTROLS, *REQUESTS, *ANSWERS)}
    assert known == {*get_args(Control), *get_args(Request), *get_args(Answer), *get_args(Signal), Ping}


@pytest.mark.parametrize("message", (*CONTROLS, *LEAST), ids=lambda message: type(message).__name__)
def test_what_was_written_is_read_back(message: Any) -> None:
    assert convert.read_control(convert.write_control(message)) == message
