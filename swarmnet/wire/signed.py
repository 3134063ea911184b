"""Signed messages as bytes and as text: records, bans, extensions, invitations. One envelope, one reader.

The content of an envelope is a message of `signed.proto`. `statement.SignedMessage` says what the signature is of.
Reading checks every bound and no signature: the caller checks what is cheap first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from swarmnet.bounds import ANY_RUN
from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import PeerId
from swarmnet.statement import MAX_PAYLOAD_BYTES, SignedMessage, signed_statement
from swarmnet.wire.codec import malformed
from swarmnet.wire.fields import Struct, Wrong, signed_struct, struct_of
from swarmnet.wire.pb import signed_pb2

T = TypeVar("T")

MAX_SIGNED_BYTES = MAX_PAYLOAD_BYTES + 256
"""Of an envelope."""


def sign(value: T, key: PeerId, signer: Callable[[bytes], bytes], *, not_after: int = 0) -> SignedMessage[T]:
    """Put a message into an envelope. signer: signs by the private half of `key`."""
    make: type = type(value)
    kind = make.__name__
    message = getattr(signed_pb2, kind)()
    struct_of(make, message.DESCRIPTOR, ANY_RUN).fill(message, value)
    payload = message.SerializeToString()
    return SignedMessage(kind, payload, key, not_after, signer(signed_statement(kind, payload, key, not_after)), value)


def to_bytes(signed: SignedMessage[Any]) -> bytes:
    """The envelope and what is in it."""
    message = signed_pb2.SignedMessage()
    _reader(()).fill(message, signed)
    return message.SerializeToString()


def from_bytes(data: bytes, *kinds: type) -> SignedMessage[Any]:
    """The inverse, of messages of these kinds. The signature is not checked. Raises BadMessage."""
    # By its length alone: a parser would already have taken memory for all of it.
    if len(data) > MAX_SIGNED_BYTES:
        raise BadMessage(RejectCode.TOO_LARGE, "signed message is too long", num_bytes=len(data))
    try:
        signed: SignedMessage[Any] = _reader(kinds).take(signed_pb2.SignedMessage.FromString(data))
    except DecodeError as error:
        raise malformed("not a protobuf message") from error
    except Wrong as wrong:
        raise malformed(f"signed.{wrong}") from None
    return signed


def _reader(kinds: tuple[type, ...]) -> Struct:
    return signed_struct(kinds, signed_pb2.SignedMessage.DESCRIPTOR, ANY_RUN)
