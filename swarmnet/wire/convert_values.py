"""Frozen values as protobuf messages, by table: which dataclass mirrors which message, and the kind of every field.

`Value` converts one dataclass; values nest (`One`, `Maybe`, `Many`). The tables below cover what messages are made of,
`convert_control` and `convert_calls` the messages themselves. Nothing here is trusted or repaired: a value whose parts
contradict each other is refused as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message

from swarmnet.ids import Ballot, Generation, PeerId, Restart, RoundId
from swarmnet.messages import MAX_VOTES, Commit, Finished, Indexes, Stamp, Vote
from swarmnet.wire.bounds import MEMBERS, Bounds, Limit, most, within
from swarmnet.wire.convert_fields import (
    LENGTH_BYTES,
    TAG_BYTES,
    Blob,
    FieldKind,
    Hex32,
    IndexSet,
    Int,
    Items,
    PeerIdValue,
    Real,
    check_bitmap,
    malformed,
)
from swarmnet.wire.pb import values_pb2 as pb

MAX_STAGES = 1 << 16

COUNT = Int(0)
STEP = Int(0, 1 << 53)
STAGE = Int(0, MAX_STAGES - 1)
INDEX = Int(0, (1 << 16) - 1)
VERSION = Int(-1, 1 << 53)
NUMBER = Int(0, 1 << 53)
FINITE = Real()
NOT_NEGATIVE = Real(low=0.0)
CHAIN = Hex32()
DIGEST = Blob(1, 64)
SHA256 = Blob(32, 32)
PEER = PeerIdValue()
INDEXES = IndexSet()


@dataclass(frozen=True)
class Value:
    """How one dataclass mirrors one message: every field by name and kind, and a check across fields."""

    make: Callable[..., Any]
    mirror: type[Message]
    fields: dict[str, FieldKind]
    check: Callable[[Any], str | None] | None = None

    def to_message(self, value: Any, into: Message | None = None) -> Message:
        """Write `value` into a new message, or into `into`."""
        message = self.mirror() if into is None else into
        message.SetInParent()
        for name, kind in self.fields.items():
            kind.write(message, name, getattr(value, name))
        return message

    def from_message(self, message: Message) -> Any:
        """Read and check every field. Raises BadMessage."""
        value = self.make(**{name: kind.read(message, name) for name, kind in self.fields.items()})
        if self.check is not None and (complaint := self.check(value)) is not None:
            raise malformed(complaint)
        return value

    def within(self, bounds: Bounds) -> Value:
        """The same in a run of these numbers."""
        return replace(self, fields={name: kind.within(bounds) for name, kind in self.fields.items()})

    def most_bytes(self) -> int:
        """No valid message takes more, its length and the number of the field it is in included."""
        return TAG_BYTES + LENGTH_BYTES + sum(kind.most_bytes() for kind in self.fields.values())


@dataclass(frozen=True, slots=True)
class One:
    """A nested value that must be there."""

    value: Value

    def write(self, message: Message, name: str, value: Any) -> None:
        self.value.to_message(value, getattr(message, name))

    def read(self, message: Message, name: str) -> Any:
        if not message.HasField(name):
            raise malformed(f"{name} is missing")
        return self.value.from_message(getattr(message, name))

    def within(self, bounds: Bounds) -> One:
        return One(self.value.within(bounds))

    def most_bytes(self) -> int:
        return self.value.most_bytes()


@dataclass(frozen=True, slots=True)
class Maybe:
    """A nested value or None."""

    value: Value

    def write(self, message: Message, name: str, value: Any) -> None:
        if value is not None:
            self.value.to_message(value, getattr(message, name))

    def read(self, message: Message, name: str) -> Any:
        return self.value.from_message(getattr(message, name)) if message.HasField(name) else None

    def within(self, bounds: Bounds) -> Maybe:
        return Maybe(self.value.within(bounds))

    def most_bytes(self) -> int:
        return self.value.most_bytes()


@dataclass(frozen=True, slots=True)
class Many:
    """A tuple of at most `limit` nested values."""

    value: Value
    limit: Limit

    def write(self, message: Message, name: str, value: tuple[Any, ...]) -> None:
        assert len(value) <= most(self.limit), f"{name} has {len(value)} entries, at most {most(self.limit)}"
        for entry in value:
            self.value.to_message(entry, getattr(message, name).add())

    def read(self, message: Message, name: str) -> tuple[Any, ...]:
        raw = getattr(message, name)
        if len(raw) > most(self.limit):
            raise malformed(f"{name}: too many entries", entries=len(raw))
        return tuple(map(self.value.from_message, raw))

    def within(self, bounds: Bounds) -> Many:
        return Many(self.value.within(bounds), within(self.limit, bounds))

    def most_bytes(self) -> int:
        return most(self.limit) * self.value.most_bytes()


@dataclass(frozen=True, slots=True)
class _Contributions:
    """A tuple of (peer, generation, indexes): disjoint index sets, every peer once."""

    indexes: IndexSet
    limit: Limit = MEMBERS

    def write(self, message: Message, name: str, value: tuple[tuple[PeerId, Generation, Indexes], ...]) -> None:
        assert len(value) <= most(self.limit), f"{name} has {len(value)} entries, at most {most(self.limit)}"
        for peer, generation, indexes in value:
            entry = getattr(message, name).add()
            PEER.write(entry, "peer", peer)
            One(GENERATION).write(entry, "generation", generation)
            self.indexes.write(entry, "indexes", indexes)

    def read(self, message: Message, name: str) -> tuple[tuple[PeerId, Generation, Indexes], ...]:
        raw = getattr(message, name)
        if len(raw) > most(self.limit):
            raise malformed(f"{name}: too many entries", entries=len(raw))
        if len({entry.peer for entry in raw}) != len(raw):
            raise malformed(f"{name}: a peer contributes twice")
        # As whole numbers, before a set is made: a thousand full bitmaps would be millions of indexes.
        taken = 0
        for entry in raw:
            check_bitmap(entry.indexes, self.indexes.below)
            mine = int.from_bytes(entry.indexes, "little")
            if taken & mine:
                raise malformed(f"{name}: an index is contributed twice")
            taken |= mine
        return tuple(
            (PEER.read(entry, "peer"), One(GENERATION).read(entry, "generation"), self.indexes.read(entry, "indexes"))
            for entry in raw
        )

    def within(self, bounds: Bounds) -> _Contributions:
        return _Contributions(self.indexes.within(bounds), within(self.limit, bounds))

    def most_bytes(self) -> int:
        entry = TAG_BYTES + LENGTH_BYTES + PEER.most_bytes() + GENERATION.most_bytes()
        with_indexes = min(most(self.limit), self.indexes.below)  # the sets are disjoint
        return most(self.limit) * entry + with_indexes * self.indexes.most_bytes()


def void_but_contributed(value: Any) -> str | None:
    """An index is voided or contributed, never both (`Finished`, `Round`)."""
    if any(indexes & value.voided for _, _, indexes in value.contributions):
        return "a voided index is contributed"
    return None


CONTRIBUTIONS = _Contributions(INDEXES)
BALLOT = Value(Ballot, pb.Ballot, {"number": NUMBER, "peer": PEER})
ROUND_ID = Value(RoundId, pb.RoundId, {"ballot": One(BALLOT), "number": NUMBER})
GENERATION = Value(Generation, pb.Generation, {"incarnation": Int(0, (1 << 64) - 1), "number": NUMBER})
RESTART = Value(Restart, pb.Restart, {"number": NUMBER, "version": STEP})
STAMP = Value(Stamp, pb.Stamp, {"step": STEP, "stage": STAGE, "chain": CHAIN, "restart": One(RESTART)})
FINISHED = Value(
    Finished,
    pb.Finished,
    {
        "id": One(ROUND_ID),
        "digest": DIGEST,
        "num_tokens": COUNT,
        "loss_sum": FINITE,
        "grad_sq_norm": NOT_NEGATIVE,
        "contributions": CONTRIBUTIONS,
        "voided": INDEXES,
    },
    void_but_contributed,
)
VOTE = Value(Vote, pb.Vote, {"peer": PEER, "signature": Blob(1, 64)})

COMMIT = Value(
    Commit,
    pb.Commit,
    {
        "stage": STAGE,
        "step": STEP,
        "chain": CHAIN,
        "id": One(ROUND_ID),
        "digest": DIGEST,
        "num_tokens": COUNT,
        "loss_sum": FINITE,
        "grad_sq_norm": NOT_NEGATIVE,
        "voided": INDEXES,
        "contributors": Items(PEER, MEMBERS),
        "votes": Many(VOTE, MAX_VOTES),
    },
)
