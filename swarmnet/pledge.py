"""What a contributor to a sum signs. Pure.

The works of a contributor are the leaves of a Merkle tree that has a leaf for every index of any run: leaf i is the
work of index i, an empty one where it counted none. So a root and an index mean one work: a peer cannot show one work
to one auditor, and another work to the next.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping

from swarmnet.bounds import MAX_INDEXES
from swarmnet.ids import Generation, PeerId, RoundId
from swarmnet.messages import Indexes, Sent, Stamp, WorkRecord

_SHARES = b"swarmnet shares 1\0"
_VECTOR, _CONTRIBUTION = b"swarmnet vector 1\0", b"swarmnet contribution 2\0"
_WORK, _NODE = b"swarmnet work 2\0", b"swarmnet works 1\0"

DEPTH = (MAX_INDEXES - 1).bit_length()
"""Hashes on the way from any work to its root."""

WHOLE = -1
"""The index of a case of a whole contribution."""


def shares_of(contributions: Iterable[tuple[PeerId, Generation, Indexes]], discarded: Indexes) -> bytes:
    """32 bytes that stand for who contributed which indexes to a sum, and which are in none."""
    each = sorted((peer, indexes) for peer, _, indexes in contributions if indexes)
    return _hash(
        _SHARES, _bits(discarded), *(part for peer, indexes in each for part in (peer.encode(), _bits(indexes)))
    )


def whole_of(product: int) -> bytes:
    """32 bytes that stand for a contribution: of its product with the aggregate's vector."""
    return _hash(_CONTRIBUTION, _packed(product))


def vector_seed(stamp: Stamp, round_id: RoundId, digest: bytes) -> bytes:
    """What draws the vector that products are taken with: no peer knows it before the whole sum is fixed."""
    return _hash(
        _VECTOR,
        *_stamped(stamp),
        _packed(round_id.ballot.number, round_id.number),
        round_id.ballot.peer.encode(),
        digest,
    )


# ---------------------------------------------------------------- works


def leaf(work: WorkRecord) -> bytes:
    """32 bytes that stand for a work."""
    return _hash(
        _WORK,
        struct.pack("<qqd?", work.index, work.num_tokens, work.loss_sum + 0.0, work.resent),  # 0.0 is also -0.0
        work.input,
        work.output,
        work.gradient,
        work.answer,
    )


def counted_as(work: WorkRecord, kind: str) -> bytes:
    """The digest of what its peer says that it has made: "output" or "answer"."""
    return work.output if kind == "output" else work.answer


def made_alike(sent: Sent, work: WorkRecord) -> bool:
    """Was it made of what the work was made of? Then an honest peer has sent what an honest one counts."""
    return sent.input == work.input and (sent.kind == "output" or sent.gradient == work.gradient)


def root_of(leaves: Mapping[int, bytes]) -> bytes:
    """The root over the leaves of these indexes."""
    return _levels(leaves)[DEPTH].get(0, _EMPTY[DEPTH])


def path_of(leaves: Mapping[int, bytes], index: int) -> bytes:
    """What `proves` needs in addition to the work of `index`: `DEPTH` hashes of 32 bytes, from the leaf upwards."""
    levels = _levels(leaves)
    return b"".join(levels[at].get((index >> at) ^ 1, _EMPTY[at]) for at in range(DEPTH))


def proves(path: bytes, work: WorkRecord, root: bytes) -> bool:
    """Is it the work that `root` has at its index?"""
    if len(path) != 32 * DEPTH:
        return False
    node = leaf(work)
    for at in range(DEPTH):
        other = path[32 * at : 32 * at + 32]
        node = _node(other, node) if work.index >> at & 1 else _node(node, other)
    return node == root


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_NODE + left + right).digest()


def _levels(leaves: Mapping[int, bytes]) -> list[dict[int, bytes]]:
    levels = [dict(leaves)]
    for at in range(DEPTH):
        below, places = levels[-1], {place >> 1 for place in levels[-1]}
        empty = _EMPTY[at]
        levels.append({n: _node(below.get(2 * n, empty), below.get(2 * n + 1, empty)) for n in places})
    return levels


def _empty() -> list[bytes]:
    nodes = [bytes(32)]
    for _ in range(DEPTH):
        nodes.append(_node(nodes[-1], nodes[-1]))
    return nodes


_EMPTY = _empty()
"""Of each depth: a node without a work below it."""


# ---------------------------------------------------------------- bytes


def _stamped(stamp: Stamp) -> tuple[bytes, bytes]:
    return _packed(stamp.step, stamp.stage, stamp.restart.number, stamp.restart.version), stamp.chain.encode()


def _packed(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _hash(domain: bytes, *parts: bytes) -> bytes:
    # With its length before it, no part can pass for two others.
    of = hashlib.sha256(domain)
    for part in parts:
        of.update(len(part).to_bytes(4, "little") + part)
    return of.digest()


def _bits(indexes: Indexes) -> bytes:
    bits = bytearray(max(indexes, default=-1) // 8 + 1)
    for index in indexes:
        bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)
