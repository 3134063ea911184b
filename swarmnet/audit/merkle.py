"""One hash for all works that a member counted in a step, and short proofs that one of them is among those.

A binary tree with a place for every index below 2^depth, depth as small as it can be; places of indexes that were not
counted are empty. A path has one hash a level, from the leaf up; bit k of the index says on which side of it level k
joins. So a path proves the index, too.

    leaf = H(0, work)    place = H(1, index, leaf)    node = H(2, left, right)    root = H(3, depth, top)

H is SHA-256 of one byte that says what is hashed, then fields of fixed length: nothing of one kind can be taken for
another (second preimages). A node over nothing is 32 zero bytes, of which nobody knows a preimage.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping

from swarmnet.messages import MAX_PATH, WorkRecord

_EMPTY = bytes(32)


def leaf(work: WorkRecord) -> bytes:
    """The digest of all fields of a work."""
    digests = work.input, work.output, work.gradient, work.answer
    return _hash(0, struct.pack(">q", work.index), *digests, struct.pack(">dQ", work.loss_sum, work.num_tokens))


def root(leaves: Mapping[int, bytes]) -> bytes:
    """The root over leaves by index. Raises ValueError for an index below 0 or beyond 2^`MAX_PATH`."""
    levels = _levels(leaves)
    return _top(len(levels) - 1, levels[-1].get(0, _EMPTY))


def path(leaves: Mapping[int, bytes], index: int) -> bytes:
    """What leads from leaf `index` to the root: at most `MAX_PATH` hashes, one after the other."""
    levels = _levels(leaves)
    return b"".join(level.get(index >> height ^ 1, _EMPTY) for height, level in enumerate(levels[:-1]))


def verify_path(leaf: bytes, index: int, path: bytes, root: bytes) -> bool:
    """Does that path lead from that leaf, as the work of that index, to that root?"""
    depth = len(path) // 32
    if len(path) % 32 or depth > MAX_PATH or len(leaf) != 32 or not 0 <= index < 1 << depth:
        return False
    node = _place(index, leaf)
    for height in range(depth):
        beside = path[32 * height : 32 * (height + 1)]
        node = _node(beside, node) if index >> height & 1 else _node(node, beside)
    return _top(depth, node) == root


def _levels(leaves: Mapping[int, bytes]) -> list[dict[int, bytes]]:
    """The nodes over something, by number, from the leaves to the top."""
    depth = max(leaves, default=0).bit_length()
    if depth > MAX_PATH or min(leaves, default=0) < 0:
        raise ValueError("no such index")
    levels = [{index: _place(index, leaf) for index, leaf in leaves.items()}]
    for _ in range(depth):
        below = levels[-1]
        parents = {number >> 1 for number in below}
        levels.append({at: _node(below.get(2 * at, _EMPTY), below.get(2 * at + 1, _EMPTY)) for at in parents})
    return levels


def _place(index: int, leaf: bytes) -> bytes:
    return _hash(1, struct.pack(">q", index), leaf)


def _node(left: bytes, right: bytes) -> bytes:
    return _hash(2, left, right)


def _top(depth: int, node: bytes) -> bytes:
    return _hash(3, bytes([depth]), node)


def _hash(kind: int, *parts: bytes) -> bytes:
    return hashlib.sha256(b"".join((bytes([kind]), *parts))).digest()
