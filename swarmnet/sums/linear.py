"""Products of aggregates with an unpredictable vector: a wrong aggregate has another product than its contributions.

r [N] is drawn once the aggregate is fixed, as an outer product: r[i] = rows[i // WIDTH] * columns[i % WIDTH] modulo the
prime p = 2^61 - 1. An aggregate R of contributions g_j has <r, R> = sum of <r, g_j> modulo p, exactly. If R is anything
else, the difference is a polynomial of degree 2 in what was drawn, which is zero for at most 2^-59 of all draws
(Schwartz, 1980; Zippel, 1979). Two aggregates that differ by a multiple of p in some element have equal products; the
range of their elements excludes that (`stage.rounding.MAX_SUM`).
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmnet.messages import PRIME
from swarmnet.wire import kernels

WIDTH = 1024
"""Columns of the outer product: as many as stay in a core's cache together with the numbers that they weigh."""

_AT_ONCE = 1 << 20
"""Elements that are looked at in one piece, where they are not in this memory, or by the reference."""

Residues = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The vector that a seed draws, for sums of up to `rows` * WIDTH elements. int64, in [0, p)."""

    rows: Tensor
    columns: Tensor

    def product(self, x_N: Tensor, start: int = 0) -> int:
        """<r, x> modulo p, of int64 elements that begin at position `start` of the sum."""
        total = 0
        for at in range(0, x_N.numel(), _AT_ONCE):
            piece = x_N[at : at + _AT_ONCE].cpu().contiguous()
            native = kernels.of(piece)
            found = self._reference(piece, start + at) if native is None else self._native(native, piece, start + at)
            total += found
        return total % PRIME

    def _native(self, native: kernels.Kernels, x_N: Tensor, start: int) -> int:
        return native.linear(x_N, start, self.rows, self.columns)

    def _reference(self, x_N: Tensor, start: int) -> int:
        before = start % WIDTH
        after = -(before + x_N.numel()) % WIDTH
        x_RC = np.pad(x_N.numpy() % PRIME, (before, after)).astype(np.uint64).reshape(-1, WIDTH)
        rows = self.rows.numpy().astype(np.uint64)[start // WIDTH :][: len(x_RC)]
        weighed = times(x_RC, self.columns.numpy().astype(np.uint64))
        # Sums of halves: a sum of 1024 residues leaves 64 bits.
        low, high = (weighed & _HALF).sum(1), (weighed >> _32).sum(1)
        by_row = times(rows, (low + times(high % _P, np.uint64(1 << 32))) % _P)
        return int(sum(map(int, by_row)) % PRIME)


_P, _HALF = np.uint64(PRIME), np.uint64((1 << 32) - 1)
_32, _31, _30, _61 = (np.uint64(bits) for bits in (32, 31, 30, 61))
_LOW31, _LOW30 = np.uint64((1 << 31) - 1), np.uint64((1 << 30) - 1)


def times(a: Residues, b: Residues | np.uint64) -> Residues:
    """a * b modulo p, element by element, of numbers in [0, p): in halves of 31 bits, since 2^62 is 2 modulo p."""
    a1, a0, b1, b0 = a >> _31, a & _LOW31, b >> _31, b & _LOW31
    middle, low = a1 * b0 + a0 * b1, a0 * b0
    whole = (a1 * b1 << np.uint64(1)) + (middle >> _30) + ((middle & _LOW30) << _31) + (low >> _61) + (low & _P)
    found: Residues = whole % _P
    return found


@functools.lru_cache(maxsize=2)
def drawn(seed: bytes, num_elements: int) -> Drawn:
    """The vector of that seed, for sums of so many elements."""
    num_rows = max(-(-num_elements // WIDTH), 1)
    return Drawn(residues(seed + b"rows", num_rows), residues(seed + b"columns", WIDTH))


def residues(seed: bytes, count: int) -> Tensor:
    """int64 [count] in [0, p), of SHAKE-256: 61 of 64 bits each. p itself becomes 0."""
    words = np.frombuffer(hashlib.shake_256(seed).digest(8 * count), "<u8") >> np.uint64(3)
    return torch.from_numpy((words % _P).astype(np.int64))
