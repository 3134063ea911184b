"""Signed messages as bytes and as text: records, bans, extensions, invitations, receipts, proofs. One reader.

`statement.SignedMessage` says what the signature is of. Reading checks every bound and no signature: the caller checks
what is cheap first.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, TypeVar

from swarmnet.bounds import ANY_RUN
from swarmnet.errors import BadMessage
from swarmnet.ids import PeerId
from swarmnet.statement import MAX_PAYLOAD_BYTES, SignedMessage, in_envelope
from swarmnet.wire.codec import malformed
from swarmnet.wire.fields import signed_struct, struct_of

T = TypeVar("T")

_AROUND_BYTES = 256
MAX_SIGNED_BYTES = MAX_PAYLOAD_BYTES + _AROUND_BYTES
"""Of an envelope."""


def sign(value: T, key: PeerId, signer: Callable[[bytes], bytes], *, not_after: int = 0) -> SignedMessage[T]:
    """Put a message into an envelope. signer: signs by the private half of `key`."""
    make: type = type(value)
    payload = struct_of(make, ANY_RUN).written(value)
    return in_envelope(value, payload, key, signer, not_after=not_after)


def to_bytes(signed: SignedMessage[Any], *, most: int = MAX_PAYLOAD_BYTES) -> bytes:
    """The envelope and what is in it. most: bytes of that."""
    return signed_struct((), ANY_RUN, most).written(signed)


def from_bytes(data: bytes, *kinds: type, most: int = MAX_PAYLOAD_BYTES) -> SignedMessage[Any]:
    """The inverse, of messages of these kinds. The signature is not checked. Raises BadMessage."""
    signed: SignedMessage[Any] = signed_struct(kinds, ANY_RUN, most).parsed(data, most + _AROUND_BYTES)
    # One spelling only: what is not signed must not make a genuine record longer, or look like another one.
    if to_bytes(signed, most=most) != data:
        raise malformed("signed message has more in its envelope than is signed")
    return signed


def to_text(signed: SignedMessage[Any], *, most: int = MAX_PAYLOAD_BYTES) -> str:
    """One word, as it is in files: the kind, then the envelope in base64."""
    return f"{signed.kind.lower()}:{base64.urlsafe_b64encode(to_bytes(signed, most=most)).decode().rstrip('=')}"


def from_text(text: str, *kinds: type, most: int = MAX_PAYLOAD_BYTES) -> SignedMessage[Any]:
    """The inverse. The signature is not checked. Raises ValueError, in words."""
    names = [kind.__name__.lower() for kind in kinds]
    name, _, encoded = text.strip().partition(":")
    longest = 2 * (most + _AROUND_BYTES)
    # Earlier versions wrote the fields of what they signed one after the other.
    if ":" in encoded and name in (*names, *_EARLIER):
        raise ValueError("signed for an earlier version, and only that reads it: the run's owner can sign it again")
    if name not in names or len(encoded) > longest:
        raise ValueError(f"does not begin with {' or '.join(f'{each}:' for each in names)}")
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        signed = from_bytes(data, *kinds, most=most)
    except (BadMessage, ValueError):
        raise ValueError(f"a damaged {name}: copy all of it") from None
    return signed


_EARLIER = ("peer", "bearer")
"""How invitations of earlier versions began."""
