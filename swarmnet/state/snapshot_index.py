"""What a donor says of a copy of its state, and how a joiner tells whether it may believe it.

A copy is cut into pieces. Its description lists the SHA-256 of every piece; the *root* is the hash of that list, and
the donor's identity key signs the root together with run, stage, version and chain. So a piece can be refused the
moment it arrives, whoever sent it, and a donor that lied has signed the lie. Equal states give equal bytes
(`stage.snapshot`), so donors whose roots are equal are sources of one copy. Knows neither network nor disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from dataclasses import dataclass, replace

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import PeerId, RunId, Signer
from swarmnet.messages import MAX_PIECES, Snapshot
from swarmnet.state.header import StateHeader

PIECE_BYTES = 2 << 20
"""Of an ordinary copy. Larger ones have larger pieces, so that a description never has more than MAX_PIECES."""

LARGEST_PIECE_BYTES = 256 << 20

LARGE = 1 << 20
"""More bytes than this are not hashed on the event loop."""

_DOMAIN = b"swarmnet copy 1\0"
_DIGEST_BYTES = 32


def piece_size(num_bytes: int, smallest: int = PIECE_BYTES) -> int:
    """Bytes of every piece but the last: `smallest`, doubled until the copy has at most MAX_PIECES."""
    size = smallest
    # A description lists each piece, and has a bound.
    while size * MAX_PIECES < num_bytes:
        size *= 2
    return size


def num_pieces(snapshot: Snapshot) -> int:
    """How many pieces a described copy has; an empty one has none."""
    return -(-snapshot.num_bytes // snapshot.piece_bytes)


def span(snapshot: Snapshot, piece: int) -> tuple[int, int]:
    """First byte of a piece, and the one after its last."""
    start = piece * snapshot.piece_bytes
    return start, min(start + snapshot.piece_bytes, snapshot.num_bytes)


def digest_of(snapshot: Snapshot, piece: int) -> bytes:
    """The SHA-256 that piece must have."""
    return snapshot.digests[piece * _DIGEST_BYTES : (piece + 1) * _DIGEST_BYTES]


def root_of(num_bytes: int, piece_bytes: int, digests: bytes) -> bytes:
    """The hash that stands for the whole copy."""
    return hashlib.sha256(_DOMAIN + struct.pack("<qq", num_bytes, piece_bytes) + digests).digest()


async def sha256(data: bytes | bytearray | memoryview) -> bytes:
    """SHA-256; beside the event loop when it would hold it up."""
    # Handing a small piece to a thread costs more than hashing it.
    if len(data) <= LARGE:
        return hashlib.sha256(data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())


def piece_digests(data: bytes | bytearray | memoryview, piece_bytes: int) -> bytes:
    """The SHA-256 of every piece, one after the other."""
    view = memoryview(data)
    return b"".join(
        hashlib.sha256(view[start : start + piece_bytes]).digest() for start in range(0, len(view), piece_bytes)
    )


@dataclass(frozen=True, slots=True)
class Seal:
    """Signs descriptions of one run's copies, and checks those of others."""

    run: RunId
    signer: Signer

    def describe(
        self, header: StateHeader, stage: int, *, num_bytes: int, piece_bytes: int, digests: bytes
    ) -> Snapshot:
        """My signed description of a copy."""
        root = root_of(num_bytes, piece_bytes, digests)
        unsigned = Snapshot(
            stage=stage,
            version=header.version,
            chain=header.chain,
            before=header.before,
            term_chain=header.term_chain,
            restart=header.restart,
            num_bytes=num_bytes,
            piece_bytes=piece_bytes,
            digests=digests,
            root=root,
            signature=b"",
            notices=tuple(each.text for each in header.extensions),
        )
        return replace(unsigned, signature=self.signer.sign(self._statement(unsigned)))

    def check(self, snapshot: Snapshot, *, donor: PeerId, stage: int, max_bytes: int) -> None:
        """Is this a description that may be fetched by? Takes no memory. Raises BadMessage, naming the donor."""
        if snapshot.stage != stage:
            raise BadMessage(RejectCode.MALFORMED, "a copy of another stage", stage=snapshot.stage, peer=donor)
        # Before any memory is taken for it.
        if snapshot.num_bytes > max_bytes:
            raise BadMessage(
                RejectCode.TOO_LARGE,
                "a copy larger than this stage",
                num_bytes=snapshot.num_bytes,
                max_bytes=max_bytes,
                peer=donor,
            )
        fits = 0 < snapshot.piece_bytes <= LARGEST_PIECE_BYTES and (
            len(snapshot.digests) == _DIGEST_BYTES * num_pieces(snapshot) <= _DIGEST_BYTES * MAX_PIECES
        )
        if not fits:
            raise BadMessage(RejectCode.MALFORMED, "a copy whose pieces do not make it up", peer=donor)
        # The donor has signed the root alone: it must stand for these digests.
        if snapshot.root != root_of(snapshot.num_bytes, snapshot.piece_bytes, snapshot.digests):
            raise BadMessage(RejectCode.MALFORMED, "a copy whose root is not that of its digests", peer=donor)
        if not self.signer.verify(donor, self._statement(snapshot), snapshot.signature):
            raise BadMessage(RejectCode.UNKNOWN_IDENTITY, "a copy its donor has not signed", peer=donor)

    def _statement(self, copy: Snapshot) -> bytes:
        numbers = struct.pack(
            "<iqqqqq",
            copy.stage,
            copy.version,
            copy.restart.number,
            copy.restart.version,
            copy.num_bytes,
            copy.piece_bytes,
        )
        return b"".join(
            (
                _DOMAIN,
                self.run.encode(),
                b"\0",
                numbers,
                copy.chain.encode(),
                b"\0",
                copy.before.encode(),
                b"\0",
                copy.term_chain.encode(),
                b"\0",
                copy.root,
                "\n".join(copy.notices).encode(),
            )
        )


def same_copy(one: Snapshot, other: Snapshot) -> bool:
    """Do two donors offer the same bytes of the same version? Only the signatures may differ."""
    return replace(one, signature=b"") == replace(other, signature=b"")
