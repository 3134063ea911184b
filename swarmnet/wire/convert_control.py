"""The one-way messages of the step protocol as protobuf, field by field."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from swarmnet.ids import PeerId
from swarmnet.messages import (
    MAX_MATES,
    MAX_SITTING,
    Claim,
    Committed,
    Evicted,
    Execute,
    Granted,
    Heartbeat,
    Late,
    LinkQuality,
    Measure,
    Moved,
    Prepare,
    Release,
    Report,
    Round,
    Trouble,
)
from swarmnet.wire.bounds import MAX_MEMBERS, MEMBERS, STAGES, Bounds
from swarmnet.wire.convert_calls import NONCE_BYTES
from swarmnet.wire.convert_fields import LENGTH_BYTES, TAG_BYTES, Blob, Flag, Int, Items, Real, String, malformed
from swarmnet.wire.convert_values import (
    BALLOT,
    CHAIN,
    COMMIT,
    CONTRIBUTIONS,
    COUNT,
    FINISHED,
    GENERATION,
    INDEX,
    INDEXES,
    PEER,
    RESTART,
    ROUND_ID,
    STAMP,
    STEP,
    Many,
    Maybe,
    One,
    Value,
    void_but_contributed,
)
from swarmnet.wire.pb import control_pb2 as pb

MAX_NUMERICS = 256
"""Characters of a numerics class, at most."""

_MEASURE = Value(Measure, pb.Measure, {"version": STEP, "chain": CHAIN, "digest": Blob(0, 32)})

MAX_BYTES_PER_S = 10**12
MAX_ALLOWED_S = 1e6
_MICROSECONDS = Int(1, 3600 * 10**6)
_KEPT = {"stamp": One(STAMP), "ballot": One(BALLOT)}
_FENCED = {**_KEPT, "generation": One(GENERATION)}


@dataclass(frozen=True, slots=True)
class _RoundTrips:
    """A tuple of (peer, microseconds), every peer once."""

    def write(self, message: Message, name: str, value: tuple[tuple[PeerId, int], ...]) -> None:
        assert len(value) <= MAX_MATES, f"{name} has {len(value)} entries, at most {MAX_MATES}"
        for peer, microseconds in value:
            entry = getattr(message, name).add()
            PEER.write(entry, "peer", peer)
            _MICROSECONDS.write(entry, "microseconds", microseconds)

    def read(self, message: Message, name: str) -> tuple[tuple[PeerId, int], ...]:
        raw = getattr(message, name)
        if len(raw) > MAX_MATES:
            raise malformed(f"{name}: too many entries", entries=len(raw))
        found = tuple((PEER.read(entry, "peer"), _MICROSECONDS.read(entry, "microseconds")) for entry in raw)
        if len({peer for peer, _ in found}) != len(found):
            raise malformed(f"{name}: a peer is measured twice")
        return found

    def within(self, bounds: Bounds) -> _RoundTrips:
        return self

    def most_bytes(self) -> int:
        return MAX_MATES * (TAG_BYTES + LENGTH_BYTES + PEER.most_bytes() + _MICROSECONDS.most_bytes())


def _contradiction(current: Round) -> str | None:
    if current.bandwidths and len(current.bandwidths) != len(current.receivers):
        return "bandwidths of others than the receivers"
    return void_but_contributed(current)


def _named_twice(trouble: Trouble) -> str | None:
    names = [[late.peer for late in trouble.late], trouble.refused]
    return "a peer is named twice" if any(len(set(each)) != len(each) for each in names) else None


LATE = Value(Late, pb.Trouble.Late, {"peer": PEER, "owes": Flag(), "allowed_s": Real(0.0, MAX_ALLOWED_S)})
TROUBLE = Value(
    Trouble,
    pb.Trouble,
    {"id": One(ROUND_ID), "late": Many(LATE, MAX_MATES), "refused": Items(PEER, MAX_MATES)},
    _named_twice,
)
LINE = Value(LinkQuality, pb.Line, {"bytes_per_s": Int(0, MAX_BYTES_PER_S), "round_trips": _RoundTrips()})


@dataclass(frozen=True, slots=True)
class Ping:
    """Said on a link between the two ends of a transport: answer with this nonce (`convert_calls.Pong`)."""

    nonce: bytes


CONTROL: dict[str, Value] = {
    "heartbeat": Value(
        Heartbeat,
        pb.Heartbeat,
        {
            "stamp": One(STAMP),
            "incarnation": Int(0, (1 << 64) - 1),
            "synced": Flag(),
            "keeper": Maybe(BALLOT),
            "commits": Many(COMMIT, STAGES),
            "last_commits": Many(COMMIT, STAGES),
            "queue": COUNT,
            "draining": Flag(),
            "before": CHAIN,
            "numerics": String(MAX_NUMERICS),
            "measure": Maybe(_MEASURE),
            "sitting": Items(PEER, MAX_SITTING),
        },
    ),
    "prepare": Value(Prepare, pb.Prepare, {**_KEPT, "given": INDEXES}),
    "claim": Value(Claim, pb.Claim, {**_FENCED, "index": INDEX}),
    "granted": Value(Granted, pb.Granted, {**_FENCED, "index": INDEX}),
    "moved": Value(Moved, pb.Moved, {**_FENCED, "index": INDEX, "owner": PEER}),
    "report": Value(
        Report,
        pb.Report,
        {
            **_FENCED,
            "owned": INDEXES,
            "summed": INDEXES,
            "finished": Maybe(FINISHED),
            "commit": Maybe(COMMIT),
            "progress": COUNT,
            "non_finite": INDEXES,
            "line": One(LINE),
            "trouble": Maybe(TROUBLE),
            "vote": Blob(0, 64),
        },
    ),
    "evicted": Value(Evicted, pb.Evicted, {**_FENCED, "void": Flag()}),
    "release": Value(Release, pb.Release, {**_FENCED, "indexes": INDEXES}),
    "round": Value(
        Round,
        pb.Round,
        {
            **_KEPT,
            "id": One(ROUND_ID),
            "contributions": CONTRIBUTIONS,
            "receivers": Items(PEER, MEMBERS),
            "holders": Items(PEER, MEMBERS),
            "voided": INDEXES,
            "bandwidths": Items(Int(1, MAX_BYTES_PER_S), MEMBERS),
            "rows": Items(Int(1, MAX_MEMBERS), MEMBERS),
            "columns": Int(0, MAX_MEMBERS),
        },
        _contradiction,
    ),
    "committed": Value(Committed, pb.Committed, {"commit": One(COMMIT), "restart": One(RESTART)}),
    "execute": Value(Execute, pb.Execute, {**_KEPT, "index": INDEX}),
    "ping": Value(Ping, pb.Ping, {"nonce": Blob(NONCE_BYTES, NONCE_BYTES)}),
}
"""Field of `Envelope` -> how its message converts."""
