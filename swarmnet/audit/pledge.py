"""What a contributor to a sum stands for: the bytes that it signs, and what its fields are hashes of. Pure."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterable

from swarmnet.ids import Generation, PeerId, RoundId
from swarmnet.messages import Indexes, Pledge, Stamp

_DOMAIN = b"swarmnet pledge 1\0"
_SHARES, _PIECES, _VECTOR = b"swarmnet shares 1\0", b"swarmnet pieces 1\0", b"swarmnet vector 1\0"

SUM_PIECE = 1 << 16
"""Elements of a contribution that have one digest of their own, BLAKE3 of them as int64, lowest byte first."""


def _hash(domain: bytes, *fields: bytes) -> bytes:
    """SHA-256 of fields of any length: which bytes belong to which is hashed, too."""
    of = hashlib.sha256(domain)
    for each in fields:
        of.update(struct.pack("<q", len(each)))
        of.update(each)
    return of.digest()


def _of_round(stamp: Stamp, round_id: RoundId) -> tuple[bytes, ...]:
    numbers = struct.pack(
        "<qqqqqq",
        stamp.step,
        stamp.stage,
        stamp.restart.number,
        stamp.restart.version,
        round_id.ballot.number,
        round_id.number,
    )
    return numbers, stamp.chain.encode(), round_id.ballot.peer.encode()


@functools.lru_cache(maxsize=1024)
def statement(pledge: Pledge) -> bytes:
    """What a pledge signs: all of it but the signature. The chain stands for run, stage and past."""
    return _hash(
        _DOMAIN,
        *_of_round(pledge.stamp, pledge.id),
        pledge.digest,
        pledge.shares,
        pledge.peer.encode(),
        struct.pack("<q", pledge.product),
        pledge.sum_root,
        pledge.work_root,
    )


def shares_of(contributions: Iterable[tuple[PeerId, Generation, Indexes]], voided: Indexes) -> bytes:
    """32 bytes: who contributed which indexes to a sum, and which are in nobody's. Generations are left out."""
    said = sorted((peer, sorted(indexes)) for peer, _, indexes in contributions if indexes)
    return _hash(
        _SHARES,
        *(field for peer, indexes in said for field in (peer.encode(), _numbers(indexes))),
        _numbers(sorted(voided)),
    )


def sum_root(pieces: Iterable[bytes]) -> bytes:
    """32 bytes: of the digests of a contribution's pieces of SUM_PIECE elements, in order."""
    return _hash(_PIECES, *pieces)


def vector_seed(stamp: Stamp, round_id: RoundId, digest: bytes) -> bytes:
    """What draws the vector that products are taken with: nobody knows it before the whole sum is fixed."""
    return _hash(_VECTOR, *_of_round(stamp, round_id), digest)


def _numbers(indexes: Iterable[int]) -> bytes:
    return ",".join(map(str, indexes)).encode()
