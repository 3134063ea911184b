"""The training windows of a token stream as leaves of a Merkle tree, and the proof that some tokens are one of them.

Leaf i is window i of the stream, `T + 1` tokens from `i * T` on as little-endian int32, whatever the seed: the sampler
permutes afterwards. With H = SHA-256 over bytes, and a first byte that keeps leaf, node and root apart:

    leaf  = H(00, window)      node = H(01, left, right)      root = H(02, windows as u64, T + 1 as u64, top)

A node without a neighbour moves up as it is, it is never doubled (CVE-2012-2459): that is the tree of RFC 6962. The
root binds how many windows there are. A path holds 32 bytes for each tree node, zeros where a node moves up; so all
paths of a run are equally long, and a window has one only.

What is kept for evaluation is not covered. Knows no microbatches and no peers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from swarmnet.data.sampler import Sampler
from swarmnet.data.tokens import Tokens
from swarmnet.manifest.schema import Data, Training

HASH_BYTES = 32

_LEAF, _NODE, _ROOT = b"\0", b"\1", b"\2"
_NO_SIBLING = bytes(HASH_BYTES)
_CHUNK_BYTES = 1 << 20

Progress = Callable[[int, int], None]
"""Called now and then with how many windows are hashed, of how many."""


@dataclass(frozen=True, slots=True)
class WindowRoot:
    """What every peer knows of the tree. num_windows: at least one. sequence_length: T."""

    root: bytes
    num_windows: int
    sequence_length: int

    @property
    def depth(self) -> int:
        """Hashes in a path."""
        return (self.num_windows - 1).bit_length()

    def proves(self, number: int, window: bytes, path: bytes) -> bool:
        """Does `path` prove that `window` (int32, little endian) is window `number` of the stream?"""
        # All of it comes from a peer: lengths before anything is hashed.
        if not 0 <= number < self.num_windows or len(path) != self.depth * HASH_BYTES:
            return False
        if len(window) != 4 * (self.sequence_length + 1):
            return False
        node, place, size = _leaf(window), number, self.num_windows
        for level in range(self.depth):
            sibling = path[level * HASH_BYTES : (level + 1) * HASH_BYTES]
            # There is a neighbour; the left one is hashed first.
            if place ^ 1 < size:
                node = sha256(_NODE + sibling + node if place & 1 else _NODE + node + sibling).digest()
            # A node that moves up has one path only.
            elif sibling != _NO_SIBLING:
                return False
            place, size = place >> 1, (size + 1) >> 1
        return _bound(node, self.num_windows, self.sequence_length) == self.root


class WindowTree:
    """The tree over the first `num_windows` windows of `tokens`, built at once. It keeps 32 bytes a window: all nodes
    but the leaves, which are hashed again when a path needs one."""

    def __init__(
        self, tokens: Tokens, sequence_length: int, num_windows: int, *, progress: Progress = lambda done, total: None
    ) -> None:
        assert 0 < num_windows <= (tokens.num_tokens - 1) // sequence_length
        self._ids = tokens.ids
        level = self._hash_pairs(sequence_length, num_windows, progress)
        self._levels = [level]  # from the parents of leaves to the top
        while len(level) > HASH_BYTES:
            level = _parents(level)
            self._levels.append(level)
        self.proven = WindowRoot(_bound(level, num_windows, sequence_length), num_windows, sequence_length)

    @property
    def root(self) -> str:
        """As the manifest has it."""
        return self.proven.root.hex()

    def path(self, number: int) -> bytes:
        """What proves window `number`."""
        assert 0 <= number < self.proven.num_windows
        found = []
        for level in range(self.proven.depth):
            sibling = (number >> level) ^ 1
            if level:
                node = self._levels[level - 1][sibling * HASH_BYTES : (sibling + 1) * HASH_BYTES]
            else:
                node = self._leaf(sibling) if sibling < self.proven.num_windows else b""
            found.append(node or _NO_SIBLING)
        return b"".join(found)

    def _leaf(self, number: int) -> bytes:
        start = number * self.proven.sequence_length
        return _leaf(self._ids[start : start + self.proven.sequence_length + 1].astype("<i4").tobytes())

    def _hash_pairs(self, length: int, num_windows: int, progress: Progress) -> bytes:
        """The parents of all leaves, chunk by chunk, so that the leaves are never all there."""
        rows = max(_CHUNK_BYTES // (4 * length + 5) & ~1, 2)  # even: pairs are within a chunk
        found = bytearray()
        for first in range(0, num_windows, rows):
            stop = min(first + rows, num_windows)
            span = self._ids[first * length : stop * length + 1].astype("<i4")
            # Windows overlap by a token, so rows are views that overlap.
            windows = np.lib.stride_tricks.as_strided(span, (stop - first, length + 1), (4 * length, 4))
            found += _parents(_hash_rows(_LEAF, np.ascontiguousarray(windows).view(np.uint8)))
            progress(stop, num_windows)
        return bytes(found)


def with_digests(
    data: Data, tokens: Tokens, training: Training, *, progress: Progress = lambda done, total: None
) -> Data:
    """`data` with what a manifest says of `tokens`: length, digests, and the root of the windows that a run trains on.

    Raises UsageError if they are too few for one microbatch.
    """
    sampler = Sampler(training.seed, tokens.num_tokens, training.sequence_length, training.microbatch_size)
    tree = WindowTree(tokens, sampler.sequence_length, sampler.num_windows, progress=progress)
    found = {
        "num_tokens": tokens.num_tokens,
        "tokens_sha256": tokens.sha256,
        "tokens_root": tree.root,
        "tokenizer_sha256": tokens.tokenizer_sha256,
    }
    return data.model_copy(update=found)


def _leaf(window: bytes) -> bytes:
    return sha256(_LEAF + window).digest()


def _bound(top: bytes, num_windows: int, sequence_length: int) -> bytes:
    """The root over a top node."""
    counts = num_windows.to_bytes(8, "little") + (sequence_length + 1).to_bytes(8, "little")
    return sha256(_ROOT + counts + top).digest()


def _parents(level: bytes) -> bytes:
    """The nodes above: that of each pair, and an odd last one as it is."""
    whole = len(level) // (2 * HASH_BYTES) * (2 * HASH_BYTES)
    pairs = np.frombuffer(level, np.uint8, whole).reshape(-1, 2 * HASH_BYTES)
    return _hash_rows(_NODE, pairs) + level[whole:]


def _hash_rows(first: bytes, rows: np.ndarray) -> bytes:
    """The hash of each row of uint8 [N, W] behind the byte `first`, one after the other. The calls are what it costs,
    so rows and their first bytes are laid out together before."""
    count, width = rows.shape
    laid = np.empty((count, width + 1), np.uint8)
    # One copy for all rows, instead of a concatenation for each.
    laid[:, 0], laid[:, 1:] = first[0], rows
    return b"".join([sha256(row).digest() for (row,) in struct.iter_unpack(f"{width + 1}s", laid.data)])
