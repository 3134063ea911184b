"""The records of a bulk connection: their keys, their order, and how they are sealed and opened (docs/data-plane.md).

    record = kind (1 byte)  length (3 bytes, big endian)  ciphertext (length bytes)  tag (16 bytes)

AES-128-GCM; kind and length are authenticated with the content. The nonce is the number of the record in its direction,
so that one that is missing, repeated or moved does not open. Each direction of each connection has a secret of its own;
its key is replaced after `REKEY_AFTER` records, and the secret with it, so that what was sent before stays closed.

Pure: bytes in, bytes out; sealed into and opened into buffers of the caller's.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.wire.convert import SECRET_BYTES

RECORD_BYTES = 1 << 18
"""Plain bytes of the longest record. AES-GCM has its full speed from here on."""

HEAD_BYTES, TAG_BYTES = 4, 16
AROUND = HEAD_BYTES + TAG_BYTES

REKEY_AFTER = 1 << 20
"""Records under one key: 2^34 blocks of AES, as many as TLS 1.3 allows (RFC 8446, 5.5)."""

_KEY_BYTES, _NONCE_BYTES = 16, 12
_CALL = struct.Struct(">Q")


class Kind(enum.IntEnum):
    """What a record is."""

    HELLO = 1
    """The first one in each direction, empty: who sent it has the keys."""
    START = 2
    """A payload begins; 8 bytes: the number of the call to which it belongs."""
    DATA = 3
    """Bytes of the payload."""
    LAST = 4
    """The last bytes of the payload."""
    STOP = 5
    """The payload ends here, before it is whole. Empty."""


_LENGTHS = {Kind.HELLO: 0, Kind.START: _CALL.size, Kind.STOP: 0}
"""Of kinds that have one; the others have from 1 to `RECORD_BYTES` plain bytes."""


@dataclass(frozen=True, slots=True)
class BulkKeys:
    """What two peers have agreed on over mutual TLS: from it follow the keys of all bulk connections that one opens."""

    run: str
    caller: str
    """Peer id of who opens the connections."""
    callee: str
    id: bytes
    """Names the session in the clear; 16 bytes."""
    secret: bytes
    """The caller's random bytes and the callee's, 32 each."""

    def secrets(self, connection: int) -> tuple[bytes, bytes]:
        """Of the two directions of a connection: of what the caller sends, and of what the callee sends."""
        bound = (self.run.encode(), self.caller.encode(), self.callee.encode(), self.id, connection.to_bytes(8, "big"))
        # Each with its length: no two sessions are written alike.
        info = b"swarmnet bulk 1" + b"".join(len(part).to_bytes(2, "big") + part for part in bound)
        derived = HKDF(SHA256(), 2 * SECRET_BYTES, salt=b"swarmnet bulk", info=info).derive(self.secret)
        return derived[:SECRET_BYTES], derived[SECRET_BYTES:]


class _Keys:
    """The key and the nonce of each record of one direction, in order."""

    def __init__(self, secret: bytes, *, rekey_after: int = REKEY_AFTER) -> None:
        self._secret, self._rekey_after = secret, rekey_after
        self._records = 0
        self._cipher = AESGCM(_expand(secret, b"key", _KEY_BYTES))

    def next(self) -> tuple[AESGCM, bytes]:
        """Of the record that comes now. No pair is given out twice."""
        if self._records and self._records % self._rekey_after == 0:
            self._secret = _expand(self._secret, b"next", SECRET_BYTES)
            self._cipher = AESGCM(_expand(self._secret, b"key", _KEY_BYTES))
        nonce = self._records.to_bytes(_NONCE_BYTES, "big")
        self._records += 1
        return self._cipher, nonce


def _expand(secret: bytes, label: bytes, length: int) -> bytes:
    return HKDFExpand(SHA256(), length, info=b"swarmnet bulk 1 " + label).derive(secret)


class Sealer(_Keys):
    """Seals the records of one direction."""

    def seal(self, kind: Kind, plain: bytes | memoryview, into: memoryview) -> int:
        """Write the next record to the beginning of `into`. Returns its length, `AROUND` bytes more than `plain`."""
        cipher, nonce = self.next()
        head = (kind << 24 | len(plain)).to_bytes(HEAD_BYTES, "big")
        into[:HEAD_BYTES] = head
        cipher.encrypt_into(nonce, plain, head, into[HEAD_BYTES : AROUND + len(plain)])
        return AROUND + len(plain)

    def record(self, kind: Kind, plain: bytes = b"") -> bytes:
        """A short record of its own."""
        made = bytearray(AROUND + len(plain))
        self.seal(kind, plain, memoryview(made))
        return bytes(made)

    def start(self, call: int) -> bytes:
        """The record with which a payload of this call begins."""
        return self.record(Kind.START, _CALL.pack(call))


def read_head(head: bytes | memoryview) -> tuple[Kind, int]:
    """Kind and plain bytes of the record that begins so; not authenticated yet. Raises BadMessage."""
    number = int.from_bytes(head[:HEAD_BYTES], "big")
    length = number & 0xFFFFFF
    try:
        kind = Kind(number >> 24)
    except ValueError:
        raise BadMessage(RejectCode.MALFORMED, "no such record", kind=number >> 24) from None
    # Check the head alone: a false length must not make the receiver wait for bytes that no record has.
    if not _LENGTHS.get(kind, 1) <= length <= _LENGTHS.get(kind, RECORD_BYTES):
        raise BadMessage(RejectCode.MALFORMED, "no such length of a record", kind=kind.name, length=length)
    return kind, length


def read_call(plain: bytes | memoryview) -> int:
    """The number that `Sealer.start` was given."""
    return int(_CALL.unpack(plain)[0])


class Opener(_Keys):
    """Opens the records of one direction, in the order in which they were sealed."""

    def open(self, record: memoryview, into: memoryview) -> None:
        """Open a whole record into `into`, which is as long as its plain bytes.

        Raises BadMessage if it is not the next one that the other end sealed. `into` then holds nothing to be used, and
        neither does anything that comes after.
        """
        cipher, nonce = self.next()
        try:
            cipher.decrypt_into(nonce, record[HEAD_BYTES:], record[:HEAD_BYTES], into)
        except InvalidTag:
            raise BadMessage(RejectCode.MALFORMED, "a record with a wrong seal") from None
