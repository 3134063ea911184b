"""Do kernels give the reference's bits on this machine? Asked once, before they are used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import torch

from swarmnet.errors import BadMessage, Overflow
from swarmnet.messages import PRIME, Packed
from swarmnet.wire import codecs, kernels
from swarmnet.wire.kernels import Family, Kernels

_SIZES = (0, 1, 63, 64, 65, 255, 256, 257, 5 * 256 + 77, 40_009)
_INT64 = np.iinfo(np.int64)


def agrees(family: Family, found: Kernels) -> bool:
    """Are all results of that family equal, refusals too?"""
    numbers = _integers if family in ("small", "short", "linear") else _floats
    agree = _SAME.get(family) or functools.partial(_same_results, family)
    return all(agree(x, found) for size in _SIZES for x in numbers(size))


def _same_results(codec: str, x: torch.Tensor, found: Kernels) -> bool:
    return results(codec, x, found) == results(codec, x, None)


def _same_short(x: torch.Tensor, found: Kernels) -> bool:
    """Of numbers that fit, and with the first one beside them that does not, at either end."""
    told = []
    for low, high in ((-(2**15), 2**15 - 1), (-(2**15) - 1, 2**15 - 1), (-(2**15), 2**15), (_INT64.min, _INT64.max)):
        numbers = x.clamp(low, high)
        expected = numbers.to(torch.int16)
        made = found.short(numbers)
        told.append(
            made is None if bool((expected != numbers).any()) else made is not None and torch.equal(made, expected)
        )
    return all(told)


def _same_squares(x: torch.Tensor, found: Kernels) -> bool:
    integers = x.nan_to_num().clamp(-(2.0**20), 2.0**20).mul(2.0**40).to(torch.int64)
    told = []
    for numbers, unit in ((x, 1.0), (x.double(), 1.0), (integers, 2.0**-30)):
        terms = np.square(numbers.numpy().astype(np.float64) * unit)
        while terms.size > 1:
            half = (terms.size + 1) // 2
            terms[: terms.size - half] += terms[half:]
            terms = terms[:half]
        expected = terms[0] if terms.size else 0.0
        told.append(np.array_equal(found.squares(numbers, unit), expected, equal_nan=True))
    return all(told)


def _same_products(x: torch.Tensor, found: Kernels) -> bool:
    """Modulo the prime, in Python's integers, wherever in a sum the elements begin."""
    random, told = np.random.default_rng(x.numel()), []
    for start in (0, 1000, 3 * 1024):
        places = range(start, start + x.numel())
        rows, columns = (random.integers(0, PRIME, count) for count in (-(-max(len(places) + start, 1) // 1024), 1024))
        columns[:8] = PRIME - 1  # eight of them with the largest numbers fit an accumulator just so
        by_row, by_column = rows.tolist(), columns.tolist()
        terms = zip(x.tolist(), places, strict=True)
        expected = sum(value * by_row[at // 1024] * by_column[at % 1024] for value, at in terms) % PRIME
        told.append(found.linear(x, start, torch.from_numpy(rows), torch.from_numpy(columns)) == expected)
    return all(told)


def _same_grid(x: torch.Tensor, found: Kernels) -> bool:
    """The sums of gradients, and what sums stand for, in numpy's words."""
    magnitudes = np.abs(x.numpy()).view(np.uint32)
    told = [np.array_equal(np.float32(found.largest([x])), magnitudes.max(initial=0).view(np.float32), equal_nan=True)]
    gradient = np.clip(np.nan_to_num(x.numpy()), np.float32(-(2.0**20)), np.float32(2.0**20))
    for columns in {1, 7, max(x.numel(), 1)}:
        rows = x.numel() // columns
        g = np.ascontiguousarray(gradient[: rows * columns].reshape(rows, columns))
        random = np.random.default_rng(columns)
        total = random.integers(-(2**40), 2**40, g.shape)
        a, b, dither = (random.random(n).astype(np.float32) for n in (rows, columns, 1 << 16))
        at, apart = 65_530, 65_537 % columns
        places = (at + np.arange(rows)[:, None] * apart + np.arange(columns)) % len(dither)
        small = np.clip(np.floor(g * a[:, None] * b + dither[places]), np.float32(-99), np.float32(99))
        squares = np.clip(total >> 13, -(2**20), 2**20) ** 2
        expected = [
            total + np.rint(g * np.float32(2.0**32)).astype(np.int64),
            total + small.astype(np.int64),
            (total >> 13).astype(np.int32) + small.astype(np.int32),
            total.astype(np.float32) * a[:, None] * b * np.float32(0.3),
            squares.sum(1),
            squares.sum(0),
        ]
        fine, fixed, narrow, values, by_row, by_column = (
            torch.zeros(each.shape, dtype=torch.int64) for each in expected
        )
        fine += torch.from_numpy(total)
        fixed += fine
        narrow = (fine >> 13).to(torch.int32)
        values, twice = values.float(), torch.from_numpy(np.concatenate([dither, dither]))
        scales = torch.from_numpy(a), torch.from_numpy(b)
        found.fine_add(torch.from_numpy(g), fine, bits=32)
        for each in (fixed, narrow):
            found.small_add(torch.from_numpy(g), each, *scales, twice, at=at, apart=apart, limit=99)
        found.small_values(torch.from_numpy(total), *scales, 0.3, values)
        found.squares_by(torch.from_numpy(total), by_row, by_column, shift=13, most=2**20)
        made = fine, fixed, narrow, values, by_row, by_column
        told += [_bytes(one) == other.tobytes() for one, other in zip(made, expected, strict=True)]
    return all(told)


def _same_update(x: torch.Tensor, found: Kernels) -> bool:
    """AdamW, an operation after the other in numpy."""
    told = []
    for numbers in (
        (0.1, 0.9, 0.05, 0.95, 0.0, 1.0, 1e-8, 1e-3, 1.0),
        (0.1, 0.9, 0.05, 0.95, 0.3, 0.7, 0.0, 1e-3, 0.9),
    ):
        first, kept1, second, kept2, ahead, kept, floor, rate, decay = np.array(numbers, np.float32)
        g = np.nan_to_num(x.numpy(), posinf=1.0, neginf=-1.0)
        w, m, v = np.flip(g).copy(), np.roll(g, 1), np.abs(np.roll(g, 2))
        made = [torch.from_numpy(each.copy()) for each in (w, g, m, v)]
        found.adamw(made[0], made[1], made[2], made[3], numbers)
        with np.errstate(all="ignore"):
            m, v = m * kept1 + g * first, v * kept2 + g * g * second
            led = m * kept + g * ahead if ahead else m
            w = w * decay - led / (np.sqrt(v) + floor) * rate
        pairs = zip(made, (w, g, m, v), strict=True)
        told += [np.array_equal(one.numpy(), other, equal_nan=True) for one, other in pairs]
    return all(told)


_SAME: dict[str, Callable[[torch.Tensor, Kernels], bool]] = {
    "short": _same_short,
    "squares": _same_squares,
    "linear": _same_products,
    "grid": _same_grid,
    "adamw": _same_update,
}


def results(codec: str, x: torch.Tensor, found: Kernels | None) -> list[bytes]:
    """What encoding, decoding, adding and refusing some spoilt bytes give with these kernels, or with the reference."""
    with kernels.tried(found):
        told = [encoded := _outcome(lambda: bytes(codecs.encode(codec, x).data))]
        for data in _spoilt(encoded):
            packed, total = Packed(codec, (x.numel(),), data), x.flip(0)
            told.append(_outcome(functools.partial(_decoded, packed)))
            told.append(_outcome(functools.partial(_added, packed, total)))
            told.append(_bytes(total))  # as it was, if it was refused
    return told


def _decoded(packed: Packed) -> bytes:
    return _bytes(codecs.decode(packed))


def _added(packed: Packed, total: torch.Tensor) -> bytes:
    if total.dtype == torch.int64:
        return str(codecs.decode_integers(total, packed, add=True)).encode()
    codecs.add_decoded(total, packed)
    return b""


def _outcome(call: Callable[[], bytes]) -> bytes:
    try:
        return call()
    except (BadMessage, Overflow) as error:
        return repr(error).encode()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _spoilt(encoded: bytes) -> Iterator[bytes]:
    """The encoding; then other bytes, which may be none."""
    yield encoded
    for place, value in ((0, 0xFF), (3, 0x80), (3, 0x7F), (len(encoded) // 2, 0x80), (len(encoded) - 1, 0x80)):
        if place < len(encoded):
            yield encoded[:place] + bytes([value]) + encoded[place + 1 :]


def _floats(size: int) -> Iterator[torch.Tensor]:
    """All magnitudes; halfway between two codes; zeros of both signs and denormals; what is not finite."""
    random = np.random.default_rng(size)
    normal = random.standard_normal(size)
    yield torch.from_numpy(normal.astype(np.float32))
    yield torch.from_numpy((normal * 2.0 ** random.integers(-149, 120, size)).astype(np.float32))
    halfway = (random.integers(0, 127, size) + 0.5) ** 2 * random.choice([1.0, -1.0], size)
    halfway[::128] = 127**2  # the largest of a block: others are halfway between two codes beside it
    yield torch.from_numpy(halfway.astype(np.float32))
    yield torch.from_numpy(random.choice(np.array([0.0, -0.0, 2.0**-149, -(2.0**-120), 2.0**-110], np.float32), size))
    for odd in (np.nan, np.inf, -np.inf):
        spoilt = normal.astype(np.float32)
        spoilt[size // 2 : size // 2 + 1] = odd
        yield torch.from_numpy(spoilt)


def _integers(size: int) -> Iterator[torch.Tensor]:
    """All widths, alone and beside small numbers; runs of zeros; and both ends of int64."""
    random = np.random.default_rng(size)
    whole = random.integers(_INT64.min, _INT64.max, size, endpoint=True)
    yield torch.from_numpy(np.rint(random.standard_normal(size) * 3).astype(np.int64))
    yield torch.from_numpy(np.rint(random.standard_normal(size) * 900).astype(np.int64))
    yield torch.from_numpy(whole >> random.integers(0, 64, size))
    yield torch.from_numpy(whole >> np.sort(random.integers(0, 64, size)))
    yield torch.from_numpy(np.where(random.random(size) < 0.01, whole >> 40, 0))
    yield torch.from_numpy(random.choice(np.array([0, -1, _INT64.min, _INT64.max, 1 << 62, -(1 << 62)]), size))
