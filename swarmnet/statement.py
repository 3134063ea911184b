"""The bytes that a signature under a message is of, derived from the message's fields. Pure.

| part | bytes |
|---|---|
| domain | the name of the message's class: a signature of one class is none of another |
| value | a letter for its type, its length, then itself; a dataclass and a tuple are the values in them, in order |

Equal messages have equal statements, so 0.0 and -0.0 are written alike, as are True and 1.

What travels on its own (records, bans, invitations) is in one envelope, `SignedMessage`, which `wire.signed` writes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

from swarmnet.bounds import AS_KEY, Outside, Size
from swarmnet.ids import Number, PeerId

_DOMAIN = "swarmnet 3 "

SIGNATURE_BYTES = 64
MAX_PAYLOAD_BYTES = 8192
"""Of an envelope: it is an entry of the DHT."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Verify = Callable[[PeerId, bytes, bytes], bool]
"""(key, data, signature): did the holder of that key sign this?"""


@dataclass(frozen=True, slots=True)
class SignedMessage(Generic[T_co]):
    """A message in its envelope: the signature covers the bytes of the message, its kind, the signer and the end."""

    kind: Annotated[str, Size(32, printable=True)]
    """Name of the message's class: a signature of one kind is none of another."""
    payload: Annotated[bytes, Size(MAX_PAYLOAD_BYTES)]
    """The message. Fields that a later version adds are signed too, though this one does not read them."""
    key: Annotated[PeerId, AS_KEY]
    """Who signs."""
    not_after: Number
    """Unix milliseconds; 0: it has no end (`end_s`)."""
    signature: Annotated[bytes, Size(SIGNATURE_BYTES, least=SIGNATURE_BYTES)]
    value: Annotated[T_co, Outside()] = field(compare=False)
    """The message, read from `payload`."""

    @property
    def end_s(self) -> float:
        """Unix seconds; infinite: it has no end."""
        return self.not_after / 1000 or math.inf

    def is_genuine(self, verify: Verify) -> bool:
        """Is the signature right? Costs twice as much as reading a small message."""
        signed = signed_statement(self.kind, self.payload, self.key, self.not_after)
        return verify(self.key, signed, self.signature)


def in_envelope(
    value: T, payload: bytes, key: PeerId, sign: Callable[[bytes], bytes], *, not_after: int = 0
) -> SignedMessage[T]:
    """Sign a message with the bytes `payload` (`wire.signed.sign` makes them)."""
    kind = type(value).__name__
    return SignedMessage(kind, payload, key, not_after, sign(signed_statement(kind, payload, key, not_after)), value)


def signed_statement(kind: str, payload: bytes, key: PeerId, not_after: int) -> bytes:
    return hashlib.sha256(_encoded((f"{_DOMAIN}SignedMessage", kind, payload, key, not_after))).digest()


@functools.lru_cache(maxsize=1 << 10)
def statement(message: Any, *context: Any, without: str | tuple[str, ...] = "signature") -> bytes:
    """32 bytes that stand for a message and its context.

    Args:
        message: a dataclass of numbers, text, bytes, and tuples, sets and dataclasses of these.
        context: what the signer vouches for too, though the message does not carry it.
        without: fields of the message that are not signed.
    """
    left_out = (without,) if isinstance(without, str) else without
    values = _values(message, left_out)
    domain = _DOMAIN + type(message).__name__
    return hashlib.sha256(_encoded((domain, *values, *context))).digest()


def _values(message: Any, left_out: tuple[str, ...] = ()) -> tuple[Any, ...]:
    # Not `dataclasses.fields`, which takes longer: this is on the path of every payload.
    names = type(message).__dataclass_fields__
    return tuple(getattr(message, name) for name in names if name not in left_out)


def _encoded(value: Any) -> bytes:
    kind, body = _typed(value)
    # With its length before it, no value can pass for two others.
    return kind + len(body).to_bytes(4, "little") + body


def _typed(value: Any) -> tuple[bytes, bytes]:
    if isinstance(value, bytes):
        return b"b", value
    if isinstance(value, str):
        return b"s", value.encode()
    if isinstance(value, int):
        return b"i", b"%d" % value
    if isinstance(value, float):
        return b"f", struct.pack("<d", value + 0.0)
    if value is None:
        return b"n", b""
    if isinstance(value, frozenset):
        value = sorted(value)
    elif isinstance(value, SignedMessage):
        value = _values(value, ("value",))  # as its signer wrote it: other versions read other fields of it
    elif dataclasses.is_dataclass(value):
        value = _values(value)
    elif not isinstance(value, tuple):
        raise TypeError(f"{type(value).__name__} has no signed form")
    return b"l", b"".join(map(_encoded, value))
