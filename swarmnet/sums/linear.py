"""The digests by which a contribution to a sum of integers is known."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 1 << 16
"""Elements of a piece, the last one apart."""


def pieces_of(flat: Tensor) -> list[bytes]:
    """The BLAKE3 of each piece of a flat int64 tensor, as little-endian bytes."""
    data = flat.cpu().contiguous().numpy().view("u1").data
    return [blake3(data[start : start + 8 * PIECE]).digest() for start in range(0, len(data), 8 * PIECE)]


def sum_root(digests: Sequence[bytes]) -> bytes:
    """The digest of them all, in order."""
    return hashlib.sha256(b"".join(digests)).digest()
