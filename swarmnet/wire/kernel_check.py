"""Do kernels give the reference's bits on this machine? Asked once, when they are compiled.

Their results on numbers that are hard to get right have one digest, everywhere. That the reference has the same
results, on these numbers and on others, is tested (`tests/numerics/test_kernels.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from swarmnet.messages import PRIME
from swarmnet.wire.kernels import Kernels, Overflown, Unfit

DIGEST = "846cf6deb9422c0b21fd5010ec3d2d71cf5e4db5ff5e2537502cd730a94714cb"
"""Of all results. It changes with the numbers below alone."""

_SIZES = (0, 1, 63, 64, 65, 255, 256, 257, 5 * 256 + 77, 40_009)
_INT64 = np.iinfo(np.int64)

Array = np.ndarray[Any, Any]


def digest(found: Kernels) -> str:
    """SHA-256 of the results of these kernels."""
    whole = hashlib.sha256()
    for size in _SIZES:
        # Not numpy's generators: their numbers may change with its version.
        bits = np.frombuffer(hashlib.shake_256(b"%d" % size).digest(8 * size), "<i8")
        for x in map(torch.from_numpy, _floats(bits)):
            for result in (
                *_int8(x, found),
                found.largest([x]),
                *_finite(x.nan_to_num(posinf=1.0, neginf=-1.0), found),
            ):
                whole.update(_bytes(result))
        for x in map(torch.from_numpy, _integers(bits)):
            for result in (*_small(x, found), *_short(x, found), *_products(x, found)):
                whole.update(_bytes(result))
    return whole.hexdigest()


def _bytes(result: object) -> bytes:
    if not isinstance(result, torch.Tensor):
        return repr(result).encode()
    # Processors make NaN of different bits.
    return (result.nan_to_num(7.0, torch.inf, -torch.inf) if result.is_floating_point() else result).numpy().tobytes()


def _refused(call: Callable[[], object]) -> object:
    """What it returns, or the name of its refusal."""
    try:
        return call()
    except (Unfit, Overflown) as refusal:
        return type(refusal).__name__


def _int8(x: torch.Tensor, found: Kernels) -> Iterator[object]:
    scales, codes = torch.zeros(-(-x.numel() // 256)), torch.zeros(x.numel(), dtype=torch.int8)
    yield (refused := _refused(lambda: found.int8_encode(x, scales, codes)))
    if refused:
        return
    yield from (scales, codes)
    # As encoded; then under scales, and with a code, that no encoder writes.
    for scale, last in ((1.0, 127), (-1.0, 127), (torch.nan, 127), (torch.inf, 127), (1.0, -128)):
        damaged, coded = scales.clone(), codes.clone()
        damaged[:1] *= scale
        coded[-1:] = last
        out = x.flip(0)
        yield _refused(lambda: found.int8_decode(damaged, coded, out))  # noqa: B023
        yield out


def _finite(x: torch.Tensor, found: Kernels) -> Iterator[object]:
    """Squares, gradients onto both grids and back, and AdamW."""
    near = x.clamp(-(2.0**20), 2.0**20)
    fixed = (near * 2.0**40).to(torch.int64)
    yield from (found.squares(x, 1.0), found.squares(x.double(), 1.0), found.squares(fixed, 2.0**-30))
    random = np.random.RandomState(7)  # its numbers stay, says numpy
    dither = torch.from_numpy(random.random_sample(1 << 16).astype(np.float32))
    fine = torch.zeros_like(fixed)
    for grid_bits in (32, 19):
        found.fine_add(near, fine, bits=grid_bits)
    yield fine
    for columns in sorted({1, 7, max(x.numel(), 1)}):
        rows = x.numel() // columns
        g, total = near[: rows * columns].view(rows, columns), fine[: rows * columns].view(rows, columns).clone()
        scales = dither[:rows].clone(), dither[:columns].clone()
        narrow, values = (total >> 22).to(torch.int32), torch.zeros(rows, columns)
        sums = torch.zeros(rows, dtype=torch.int64), torch.zeros(columns, dtype=torch.int64)
        for each in (total, narrow):
            found.small_add(g, each, *scales, torch.cat([dither, dither]), at=65_530, apart=65_537 % columns, limit=99)
        found.small_values(total, *scales, 0.3, values)
        found.squares_by(total, *sums, shift=20, most=2**20)
        yield from (total, narrow, values, *sums)
    for numbers in (
        (0.1, 0.9, 0.05, 0.95, 0.0, 1.0, 1e-8, 1e-3, 1.0),
        (0.1, 0.9, 0.05, 0.95, 0.3, 0.7, 0.0, 1e-3, 0.9),
    ):
        w, m, v = near.flip(0), near.roll(1), near.roll(2).abs()
        found.adamw(w, near, m, v, numbers)
        yield from (w, m, v)


def _small(x: torch.Tensor, found: Kernels) -> Iterator[object]:
    yield (encoded := found.small_encode(x))
    # The encoding; then other bytes, which may be none.
    for place, value in ((0, 0), (0, 0xFF), (3, 0x80), (3, 0x7F), (encoded.numel() // 2, 0x80), (-1, 0x80)):
        data = encoded.clone()
        data[place : place + 1 or None] ^= value
        for add in (False, True):
            out = x.flip(0)
            yield _refused(lambda: found.small_decode(data, out, add=add))  # noqa: B023
            yield out


def _short(x: torch.Tensor, found: Kernels) -> Iterator[object]:
    """Of numbers that fit, and with the first one after them that does not, at either end."""
    for low, high in ((-(2**15), 2**15 - 1), (-(2**15) - 1, 2**15 - 1), (-(2**15), 2**15), (_INT64.min, _INT64.max)):
        yield found.short(x.clamp(low, high))


def _products(x: torch.Tensor, found: Kernels) -> Iterator[object]:
    """Modulo the prime, wherever in a sum the elements begin."""
    residues = torch.from_numpy(np.resize(np.concatenate([[PRIME - 1] * 8, x.numpy() % PRIME]), x.numel() + 4096))
    for start in (0, 1000, 3 * 1024):
        yield found.linear(x, start, residues[1024:], residues[:1024].clone())


def _floats(bits: Array) -> Iterator[Array]:
    """All magnitudes; halfway between two codes; zeros of both signs and denormals; what is not finite."""
    usual = ((bits >> 40) * 2.0**-20).astype(np.float32)
    every = bits.astype(np.uint32).view(np.float32)
    yield usual
    yield np.where(np.isfinite(every), every, usual)
    halfway = (((bits & 127) % 127 + 0.5) ** 2 * np.sign(bits)).astype(np.float32)
    halfway[::128] = 127**2  # the largest of a block: others are halfway between two neighbouring codes
    yield halfway
    yield np.array([0.0, -0.0, 2.0**-149, -(2.0**-120), 2.0**-110], np.float32)[bits % 5]
    for odd in (np.nan, np.inf, -np.inf):
        spoilt = usual.copy()
        spoilt[bits.size // 2 : bits.size // 2 + 1] = odd
        yield spoilt


def _integers(bits: Array) -> Iterator[Array]:
    """All widths, alone and mixed with small numbers; runs of zeros; and both ends of int64."""
    widths = bits & 63
    yield from (bits >> 62, bits >> 54, bits >> widths, bits >> np.sort(widths), np.where(widths == 9, bits >> 40, 0))
    yield np.array([0, -1, _INT64.min, _INT64.max, 1 << 62, -(1 << 62)])[bits % 6]
