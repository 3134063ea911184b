"""Requests, answers and greetings as protobuf, field by field. A payload is declared here and travels as raw chunks.

`Hello` and the signals are said between the two ends of a transport and never reach a peer's own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import Message

from swarmnet.errors import RejectCode
from swarmnet.ids import RunId
from swarmnet.messages import (
    MAX_PIECES,
    Accepted,
    Busy,
    DialBack,
    DialledBack,
    Fetch,
    Fetched,
    Gradient,
    ManifestData,
    ManifestRequest,
    MovedTo,
    Part,
    PartData,
    Process,
    Rejected,
    Running,
    Snapshot,
    SnapshotPiece,
    SnapshotRequest,
    TrailRequest,
    TrailStep,
)
from swarmnet.wire.bounds import STAGES, Bounds
from swarmnet.wire.convert_fields import (
    LENGTH_BYTES,
    TAG_BYTES,
    Blob,
    EnumValue,
    Flag,
    Hex32,
    IndexSet,
    Int,
    Items,
    OneOf,
    Real,
    Reason,
    String,
    malformed,
)
from swarmnet.wire.convert_values import (
    CHAIN,
    COMMIT,
    COUNT,
    FINISHED,
    FINITE,
    INDEX,
    INDEXES,
    MAX_STAGES,
    NOT_NEGATIVE,
    PEER,
    RESTART,
    ROUND_ID,
    SHA256,
    STAGE,
    STAMP,
    STEP,
    VERSION,
    Many,
    Maybe,
    One,
    Value,
)
from swarmnet.wire.pb import calls_pb2 as pb
from swarmnet.wire.pb import values_pb2

MAX_TOML_CHARS = 1 << 18
MAX_INVITATION_CHARS = 512
MAX_TENSORS = 16
"""Tensors in one payload."""
NONCE_BYTES = 8
"""Of a Ping and its Pong."""
MAX_HOPS = 16
"""Hops of a round: more than the most members have in groups of two."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor that follows as raw chunks: `length` bytes hold `shape` under `codec`. Declared, not yet believed."""

    codec: str
    shape: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Who greets: which run, which protocol (major, minor), which numerics class, what its clock shows (Unix, s).

    invitation: the pass that it shows in a run by invitation.
    """

    run: RunId
    major: int
    minor: int
    numerics: str
    clock: float
    invitation: str = ""


@dataclass(frozen=True, slots=True)
class GreetFirst:
    """The callee does not know the caller (any more): say Hello, then repeat the call."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """The callee is alive, its answer is not there yet."""


@dataclass(frozen=True, slots=True)
class Done:
    """That was the last answer, and the payload was not wanted: leave."""


@dataclass(frozen=True, slots=True)
class Pong:
    """The callee's event loop has read the Ping with this nonce."""

    nonce: bytes


Signal = GreetFirst | Pulse | Done | Pong
"""What stands where an answer would, for the caller's transport alone."""


@dataclass(frozen=True, slots=True)
class _Losses:
    """index -> (loss_sum, num_tokens)."""

    indexes: IndexSet

    def write(self, message: Message, name: str, value: Mapping[int, tuple[float, int]]) -> None:
        losses = getattr(message, name)
        losses.SetInParent()
        self.indexes.write(losses, "indexes", frozenset(value))
        for index in sorted(value):
            loss_sum, num_tokens = value[index]
            losses.loss_sum.append(FINITE.put(loss_sum))
            losses.num_tokens.append(COUNT.put(num_tokens))

    def read(self, message: Message, name: str) -> dict[int, tuple[float, int]]:
        losses = getattr(message, name)
        indexes = sorted(self.indexes.read(losses, "indexes"))
        if not len(indexes) == len(losses.loss_sum) == len(losses.num_tokens):
            raise malformed("losses: not one entry per index")
        pairs = zip(map(FINITE.take, losses.loss_sum), map(COUNT.take, losses.num_tokens), strict=True)
        return dict(zip(indexes, pairs, strict=True))

    def within(self, bounds: Bounds) -> _Losses:
        return _Losses(self.indexes.within(bounds))

    def most_bytes(self) -> int:
        an_index = FINITE.most_bytes() + COUNT.most_bytes()
        return TAG_BYTES + LENGTH_BYTES + self.indexes.most_bytes() + self.indexes.below * an_index


def _part_is_a_range(part: Part) -> str | None:
    return None if part.start <= part.stop else "start is after stop"


def _a_piece_is_of_a_copy(request: SnapshotRequest) -> str | None:
    return "a piece of no copy" if request.piece >= 0 and not request.root else None


TENSOR = Value(
    TensorHeader,
    values_pb2.Tensor,
    {"codec": String(32), "shape": Items(Int(0, 1 << 48), 8), "length": Int(0, 1 << 48)},
)
HELLO = Value(
    Hello,
    pb.Hello,
    {
        "run": Hex32(),
        "major": Int(0, (1 << 32) - 1),
        "minor": Int(0, (1 << 32) - 1),
        "numerics": String(128),
        "clock": Real(0.0, 1e12),
        "invitation": String(MAX_INVITATION_CHARS),
    },
)
REJECTED = Value(Rejected, pb.Rejected, {"code": EnumValue(RejectCode), "reason": Reason(1000), "version": VERSION})

REQUESTS: dict[str, Value] = {
    "process": Value(
        Process,
        pb.Process,
        {
            "step": STEP,
            "stage": STAGE,
            "index": INDEX,
            "purpose": OneOf(("train", "eval")),
            "hedge": Flag(),
            "repair": Flag(),
        },
    ),
    "fetch": Value(
        Fetch,
        pb.Fetch,
        {
            "step": STEP,
            "stage": Int(-1, MAX_STAGES - 1),
            "index": INDEX,
            "kind": OneOf(("input", "gradient")),
            "cached": Flag(),
        },
    ),
    "part": Value(
        Part,
        pb.Part,
        {
            "stamp": One(STAMP),
            "id": One(ROUND_ID),
            "kind": OneOf(("contribution", "reduced", "sum")),
            "start": Int(0, 1 << 48),
            "stop": Int(0, 1 << 48),
            "hop": Int(0, MAX_HOPS - 1),
        },
        _part_is_a_range,
    ),
    "snapshot": Value(
        SnapshotRequest,
        pb.SnapshotRequest,
        {"stage": STAGE, "version": VERSION, "root": Blob(0, 32), "piece": Int(-1, MAX_PIECES - 1)},
        _a_piece_is_of_a_copy,
    ),
    "trail": Value(TrailRequest, pb.TrailRequest, {"stamp": One(STAMP)}),
    "manifest": Value(ManifestRequest, pb.ManifestRequest, {}),
    "dial_back": Value(DialBack, pb.DialBack, {}),
}
"""Field of `CallHeader` -> how its message converts."""

ANSWERS: dict[str, Value] = {
    "accepted": Value(Accepted, pb.Accepted, {}),
    "running": Value(Running, pb.Running, {}),
    "busy": Value(Busy, pb.Busy, {"retry_after_s": Real(0.0, 3600.0), "version": VERSION}),
    "moved_to": Value(MovedTo, pb.MovedTo, {"owner": PEER}),
    "rejected": REJECTED,
    "gradient": Value(Gradient, pb.Gradient, {"loss_sum": FINITE, "num_tokens": COUNT, "compute_s": NOT_NEGATIVE}),
    "fetched": Value(Fetched, pb.Fetched, {"loss_sum": FINITE, "num_tokens": COUNT}),
    "part": Value(
        lambda losses, finished: PartData(payload=(), losses=losses, finished=finished),
        pb.PartData,
        {"losses": _Losses(INDEXES), "finished": Maybe(FINISHED)},
    ),
    "snapshot": Value(
        Snapshot,
        pb.Snapshot,
        {
            "stage": STAGE,
            "version": STEP,
            "chain": CHAIN,
            "before": CHAIN,
            "term_chain": CHAIN,
            "restart": One(RESTART),
            "num_bytes": Int(0, 1 << 48),
            "piece_bytes": Int(1, 1 << 48),
            "digests": Blob(0, 32 * MAX_PIECES),
            "root": SHA256,
            "signature": Blob(0, 128),
        },
    ),
    "snapshot_piece": Value(SnapshotPiece, pb.SnapshotPiece, {}),
    "trail": Value(
        TrailStep,
        pb.TrailStep,
        {"finished": Maybe(FINISHED), "commits": Many(COMMIT, STAGES), "last_commits": Many(COMMIT, STAGES)},
    ),
    "manifest": Value(ManifestData, pb.ManifestData, {"toml": String(MAX_TOML_CHARS)}),
    "dialled_back": Value(DialledBack, pb.DialledBack, {"reached": Flag(), "reason": Reason(1000)}),
    "done": Value(Done, pb.Done, {}),
    "greet_first": Value(GreetFirst, pb.GreetFirst, {}),
    "pulse": Value(Pulse, pb.Pulse, {}),
    "pong": Value(Pong, pb.Pong, {"nonce": Blob(NONCE_BYTES, NONCE_BYTES)}),
}
"""Field of `AnswerHeader` -> how its message converts."""

PAYLOAD_ANSWERS = (Gradient, Fetched, PartData, SnapshotPiece)
"""The answers that carry tensors, in `payload`."""
