"""The kinds of field a message has: how each is written into protobuf, and what is believed when it is read.

A `FieldKind` is total: what it reads is in range, finite and of the right syntax, or it raises BadMessage. What we
write obeys the same rules by assertion: a message one peer can send is one every other peer can read. It also says how
many bytes it takes at most, and what it is in a run of known numbers (`wire.bounds`). Knows no message.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol, Self

import base58
from google.protobuf.message import Message

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import PeerId
from swarmnet.wire.bounds import MAX_INDEXES, Bounds, Limit, most, within

TAG_BYTES, VARINT_BYTES, LENGTH_BYTES = 2, 10, 4
"""What protobuf adds at most: a field's number (below 2048), a number, the length of what follows."""

_PEER_ID_PREFIX = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))
"""Identity multihash of 36 bytes: protobuf PublicKey { Ed25519, 32 bytes }."""
_PEER_ID_CHARS = 52
_HEX_32 = re.compile(r"[0-9a-f]{64}")


# ---------------------------------------------------------------- peer ids


def peer_id_from_public_bytes(raw: bytes) -> PeerId:
    """The libp2p peer id that embeds a 32-byte Ed25519 public key."""
    assert len(raw) == 32, "an Ed25519 public key has 32 bytes"
    return PeerId(base58.b58encode(_PEER_ID_PREFIX + raw).decode("ascii"))


@functools.lru_cache(maxsize=4096)
def public_bytes_of(peer: PeerId) -> bytes:
    """The 32 bytes of the Ed25519 public key a peer id embeds. Raises ValueError."""
    if len(peer) != _PEER_ID_CHARS or not peer.isascii():
        raise ValueError("not an Ed25519 peer id")
    raw = base58.b58decode(peer)
    if len(raw) != len(_PEER_ID_PREFIX) + 32 or not raw.startswith(_PEER_ID_PREFIX):
        raise ValueError("not an Ed25519 peer id")
    return raw[len(_PEER_ID_PREFIX) :]


def is_peer_id(text: str) -> bool:
    """Whether `text` is the base58 peer id of an Ed25519 key."""
    try:
        public_bytes_of(PeerId(text))
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------- index sets


def to_bitmap(indexes: frozenset[int]) -> bytes:
    """Bit i of byte i // 8, least significant first, stands for index i."""
    if not indexes:
        return b""
    top = max(indexes)
    assert min(indexes) >= 0 and top < MAX_INDEXES, f"an index is outside 0..{MAX_INDEXES - 1}"
    bits = bytearray(top // 8 + 1)
    for index in indexes:
        bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)


def check_bitmap(bits: bytes, below: int) -> None:
    """Raise BadMessage unless all that `bits` stands for is below `below`; trailing zeros are harmless."""
    if len(bits) > -(-below // 8) or (len(bits) == below // 8 + 1 and bits[-1] >> below % 8):
        raise malformed("index set is too large", num_bytes=len(bits), indexes=below)


def from_bitmap(bits: bytes, below: int = MAX_INDEXES) -> frozenset[int]:
    """The inverse of `to_bitmap`. Raises BadMessage unless all indexes are below `below`."""
    check_bitmap(bits, below)
    return frozenset(8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1)


# ---------------------------------------------------------------- kinds


def malformed(reason: str, **facts: object) -> BadMessage:
    """What every refused field raises."""
    return BadMessage(RejectCode.MALFORMED, reason, **facts)


class FieldKind(Protocol):
    """One kind of field: write a value into `message.name`, or read and check it."""

    def write(self, message: Message, name: str, value: Any) -> None:
        """Write a valid value."""
        ...

    def read(self, message: Message, name: str) -> Any:
        """Read and check. Raises BadMessage."""
        ...

    def within(self, bounds: Bounds) -> Self:
        """The same kind in a run of these numbers."""
        ...

    def most_bytes(self) -> int:
        """No valid field of this kind takes more."""
        ...


class Item(Protocol):
    """A kind that may also stand in a repeated field."""

    def put(self, value: Any) -> Any:
        """A protobuf scalar."""
        ...

    def take(self, raw: Any) -> Any:
        """The checked value. Raises BadMessage."""
        ...

    def most_bytes(self) -> int:
        """No valid entry takes more, its field number included."""
        ...


class _Scalar:
    """A singular protobuf scalar; subclasses say how one value converts."""

    def put(self, value: Any) -> Any:
        return value

    def take(self, raw: Any) -> Any:
        return raw

    def write(self, message: Message, name: str, value: Any) -> None:
        setattr(message, name, self.put(value))

    def read(self, message: Message, name: str) -> Any:
        try:
            return self.take(getattr(message, name))
        except BadMessage as error:
            raise malformed(f"{name}: {error.reason}") from error

    def within(self, bounds: Bounds) -> Self:
        return self

    def most_bytes(self) -> int:
        return TAG_BYTES + VARINT_BYTES


class Flag(_Scalar):
    """A bool: nothing to check."""


@dataclass(frozen=True, slots=True)
class Int(_Scalar):
    """An integer in [low, high]."""

    low: int = 0
    high: int = (1 << 63) - 1

    def put(self, value: int) -> int:
        assert self.low <= value <= self.high, f"{value} is outside {self.low}..{self.high}"
        return value

    def take(self, raw: int) -> int:
        if not self.low <= raw <= self.high:
            raise malformed("out of range", value=raw)
        return raw


@dataclass(frozen=True, slots=True)
class Real(_Scalar):
    """A finite double in [low, high]."""

    low: float = -math.inf
    high: float = math.inf

    def put(self, value: float) -> float:
        assert self._good(value), f"{value} is not finite or outside {self.low}..{self.high}"
        return value

    def take(self, raw: float) -> float:
        if not self._good(raw):
            raise malformed("not finite or out of range", value=raw)
        return raw

    def _good(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class OneOf(_Scalar):
    """One of a few words."""

    words: tuple[str, ...]

    def put(self, value: str) -> str:
        assert value in self.words, f"{value!r} is none of {self.words}"
        return value

    def take(self, raw: str) -> str:
        if raw not in self.words:
            raise malformed("unknown word", value=raw[:32])
        return raw

    def most_bytes(self) -> int:
        return TAG_BYTES + LENGTH_BYTES + max(map(len, self.words))


@dataclass(frozen=True, slots=True)
class EnumValue(_Scalar):
    """A member of an enum of strings, by value."""

    enum: type[Enum]

    def put(self, value: Enum) -> str:
        word: str = value.value
        return word

    def take(self, raw: str) -> Enum:
        try:
            return self.enum(raw)
        except ValueError:
            raise malformed("unknown word", value=raw[:32]) from None

    def most_bytes(self) -> int:
        return TAG_BYTES + LENGTH_BYTES + max(len(member.value) for member in self.enum)


@dataclass(frozen=True, slots=True)
class String(_Scalar):
    """At most `limit` characters."""

    limit: int

    def put(self, value: str) -> str:
        assert len(value) <= self.limit, f"text of {len(value)} characters, at most {self.limit}"
        return value

    def take(self, raw: str) -> str:
        if len(raw) > self.limit:
            raise malformed("text is too long", characters=len(raw))
        return raw

    def most_bytes(self) -> int:
        return TAG_BYTES + LENGTH_BYTES + 4 * self.limit


class Reason(String):
    """Words for a person: cut to fit when written, whatever they hold."""

    def put(self, value: str) -> str:
        return value[: self.limit].encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True, slots=True)
class Blob(_Scalar):
    """Between `low` and `high` bytes."""

    low: int
    high: int

    def put(self, value: bytes) -> bytes:
        assert self.low <= len(value) <= self.high, f"{len(value)} bytes, not {self.low}..{self.high}"
        return bytes(value)

    def take(self, raw: bytes) -> bytes:
        if not self.low <= len(raw) <= self.high:
            raise malformed("wrong number of bytes", num_bytes=len(raw))
        return raw

    def most_bytes(self) -> int:
        return TAG_BYTES + LENGTH_BYTES + self.high


class Hex32(_Scalar):
    """A SHA-256 in 64 hex digits here, 32 bytes on the wire (chains, run ids)."""

    def put(self, value: str) -> bytes:
        assert _HEX_32.fullmatch(value), f"{value!r} is not 64 hex digits"
        return bytes.fromhex(value)

    def take(self, raw: bytes) -> str:
        if len(raw) != 32:
            raise malformed("not a SHA-256", num_bytes=len(raw))
        return raw.hex()

    def most_bytes(self) -> int:
        return TAG_BYTES + LENGTH_BYTES + 32


class PeerIdValue(_Scalar):
    """A peer id."""

    def put(self, value: PeerId) -> str:
        assert is_peer_id(value), f"{value!r} is not a peer id"
        return value

    def take(self, raw: str) -> PeerId:
        if not is_peer_id(raw):
            raise malformed("not a peer id", value=raw[:64])
        return PeerId(raw)

    def most_bytes(self) -> int:
        return TAG_BYTES + LENGTH_BYTES + _PEER_ID_CHARS


@dataclass(frozen=True, slots=True)
class IndexSet(_Scalar):
    """A set of microbatch indexes below `below`."""

    below: int = MAX_INDEXES

    def put(self, value: frozenset[int]) -> bytes:
        return to_bitmap(value)

    def take(self, raw: bytes) -> frozenset[int]:
        return from_bitmap(raw, self.below)

    def within(self, bounds: Bounds) -> IndexSet:
        return IndexSet(min(self.below, bounds.microbatches))

    def most_bytes(self) -> int:
        return TAG_BYTES + LENGTH_BYTES + -(-self.below // 8)


@dataclass(frozen=True, slots=True)
class Items:
    """A tuple of at most `limit` scalars."""

    item: Item
    limit: Limit

    def write(self, message: Message, name: str, value: tuple[Any, ...]) -> None:
        assert len(value) <= most(self.limit), f"{name} has {len(value)} entries, at most {most(self.limit)}"
        getattr(message, name).extend(map(self.item.put, value))

    def read(self, message: Message, name: str) -> tuple[Any, ...]:
        raw = getattr(message, name)
        if len(raw) > most(self.limit):
            raise malformed(f"{name}: too many entries", entries=len(raw))
        try:
            return tuple(map(self.item.take, raw))
        except BadMessage as error:
            raise malformed(f"{name}: {error.reason}") from error

    def within(self, bounds: Bounds) -> Items:
        return replace(self, limit=within(self.limit, bounds))

    def most_bytes(self) -> int:
        return TAG_BYTES + LENGTH_BYTES + most(self.limit) * self.item.most_bytes()
