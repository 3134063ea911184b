"""What a microbatch's gradient is rounded to before it is summed, and what a sum stands for.

| numerics.mode, averaging.codec | a sum holds | grid |
|---|---|---|
| fp32, any | the gradients' own sum, fp32 | `NoRounding` |
| deterministic, int64 | multiples of 2^-grid_bits, int64 | `FineRounding` |
| deterministic, small | small integers, int64 | `FineRounding` in step 0, then `SmallRounding` |

Sums of integers depend on no order and no grouping. The step of a small grid follows what earlier steps have summed, by
rows and columns of each matrix (as Adafactor factors second moments, arXiv:1804.04235): the gradient of one microbatch
is about `FINENESS` grid steps long, root mean square. It is a function of earlier commits alone, so all replicas have
the same grid (with one scale for all of it: IntSGD, arXiv:2102.08374). An element g in row i and column j:

    n = clamp(floor(g * (1 / a_i) * (1 / b_j) + u), -LIMIT, LIMIT)        T = n_total * a_i * b_j

with u in [0, 1), see "dither" below. S is a step's total in integers, m the number of its microbatches; means over a
row, a column, and all of a matrix:

    r_i = mean_j S^2 / (m FINENESS^2)     k_j = mean_i S^2 / (m FINENESS^2)     t = mean S^2 / (m FINENESS^2)
    a_i^2 <- (a_i^2 + r_i a'_i^2) / 2          b_j^2 <- (b_j^2 + k_j / t b'_j^2) / 2

a' and b' are those of the step that was summed; where steps overlap they are not the newest. A sum that clipping has
shortened more than `MOST_CLIPPED` times counts as if it had been so much shorter. None of the squares is less than 2^-8
of their mean: rows without a gradient (unused tokens) get one later. A vector has one a, and no b. Sums of squares are
of integers, and so exact; what follows is fp64 on the host, every operation rounded as IEEE says: equal bits on every
machine.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmnet.errors import BadMessage, Overflow, RejectCode
from swarmnet.manifest.schema import Averaging, Numerics
from swarmnet.stage.same_bits import fp32, squares
from swarmnet.wire import kernels

MAX_SUM = 1 << 59
"""No fixed-point sum of a whole step exceeds this in absolute value, in any order or grouping. So two of them never
differ by a multiple of the prime 2^61 - 1, which the check of reducers would not see (`sums.linear`)."""

MAX_MAGNITUDE = 2.0**96
"""No gradient has an element near this. Below it no float sum of a step overflows, and nothing in `sums.reducer`."""

LIMIT = 2047
"""A microbatch adds no more than that to an element of a small sum; what is beyond is cut off. So of any step's
microbatches, at most 2^17 (`bounds.MAX_INDEXES`), the sum fits int32."""

FINENESS = 2.0
MOST_CLIPPED = 16.0

_FLOOR, _SMALLEST = 2.0**-8, 2.0**-100
_CLAMP = 1 << 20  # of totals that are squared: their squares fit int64, and so do sums of 2^22 of them
_TABLE = 1 << 16
_GOLDEN = 10368890  # (sqrt(5) - 1) / 2, in 24 bits
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 24

Scales = Sequence[Tensor]
"""a and b of every parameter, in turn: fp32 [R] and [C]. An a of 0: nothing is known of that gradient yet."""


def chunk_elements(device: torch.device) -> int:
    """How many elements to treat at once where temporaries arise: what fits a core's cache, or a launch's worth."""
    return _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The elements of one parameter [rows, columns] that a grid is asked about: a rectangle. A vector is one row."""

    name: str
    num_columns: int
    """Of the whole parameter."""
    rows: range
    columns: range

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Rectangle:
        """All of a parameter."""
        num_rows, num_columns = matrix_of(shape)
        return cls(name, num_columns, range(num_rows), range(num_columns))


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a parameter: a vector is one row."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (1, math.prod(shape))


class Rounding:
    """The grid of one step. place: the number of a parameter. Tensors of a parameter are flat, and of its block.

    fits_int32: no sum of a step's gradients leaves int32.
    """

    fits_int32 = False

    def check(self, largest: float, index: int) -> None:
        """May a gradient with that largest magnitude be summed? Raises BadMessage(NON_FINITE), Overflow."""
        if not math.isfinite(largest):
            raise BadMessage(RejectCode.NON_FINITE, "the gradient of a microbatch is not finite", index=index)

    def add(self, total: Tensor, gradient: Tensor, place: int, *, index: int) -> None:
        """Add the gradient, fp32, of microbatch `index` to the sum."""
        raise NotImplementedError

    def values(self, total: Tensor, place: int, *, scale: float = 1.0) -> Iterator[Tensor]:
        """What a sum stands for, times `scale`: floats, piece by piece, fresh memory."""
        raise NotImplementedError

    def squares(self, total: Tensor, place: int) -> Iterator[float]:
        """Of what a sum stands for, the squares' sum, piece by piece."""
        return map(squares, self.values(total, place))

    def most(self, num_microbatches: int) -> int:
        """The largest magnitude of an integer sum of so many microbatches, anywhere."""
        return MAX_SUM


class NoRounding(Rounding):
    """Floats as they are."""

    def check(self, largest: float, index: int) -> None:
        super().check(largest, index)
        # A float sum with such a term could overflow.
        if largest > MAX_MAGNITUDE:
            raise BadMessage(RejectCode.NON_FINITE, "a gradient too large to be summed", index=index)

    def add(self, total: Tensor, gradient: Tensor, place: int, *, index: int) -> None:
        total.add_(gradient)

    def values(self, total: Tensor, place: int, *, scale: float = 1.0) -> Iterator[Tensor]:
        for piece in torch.split(total, chunk_elements(total.device)):
            yield piece * scale


@dataclass(frozen=True)
class FineRounding(Rounding):
    """Multiples of 2^-bits. terms: the most gradients that a step adds anywhere; with ranks, each may add one for each
    microbatch. A gradient may have MAX_SUM / terms at most, in grid steps, so replicas with equal meshes agree on
    whether it overflows, whatever else is in the sum; more ranks have a lower limit."""

    bits: int
    terms: int

    def check(self, largest: float, index: int) -> None:
        super().check(largest, index)
        # With so large a term from every microbatch the sum would leave int64.
        if largest * 2.0**self.bits > float(MAX_SUM // self.terms):
            raise Overflow(
                "a gradient does not fit the grid: lower numerics.grid_bits or the learning rate",
                index=index,
                largest=largest,
            )

    def add(self, total: Tensor, gradient: Tensor, place: int, *, index: int) -> None:
        if (native := kernels.of(total, gradient)) is not None:
            native.fine_add(gradient, total, bits=self.bits)
            return
        # In chunks: the product and its rounding are temporaries.
        size = chunk_elements(total.device)
        for part, piece in zip(torch.split(total, size), torch.split(gradient, size), strict=True):
            part.add_((piece * 2.0**self.bits).round_().to(torch.int64))  # the product is exact: a power of two

    def values(self, total: Tensor, place: int, *, scale: float = 1.0) -> Iterator[Tensor]:
        for piece in torch.split(total, chunk_elements(total.device)):
            # In fp64, because an int64 sum has more digits than fp32 can hold.
            yield piece.to(torch.float64) * (scale * 2.0**-self.bits)

    def squares(self, total: Tensor, place: int) -> Iterator[float]:
        for piece in torch.split(total, chunk_elements(total.device)):
            yield squares(piece, 2.0**-self.bits)


class SmallRounding(Rounding):
    """The small grid of step `step`. scales: a and b of each whole parameter, in turn: fp32 [R] and [C], on the CPU."""

    fits_int32 = True

    def __init__(self, blocks: Sequence[Rectangle], scales: Scales, *, step: int) -> None:
        self._blocks, self._scales, self._step = blocks, scales, step
        self._there: dict[tuple[int, torch.device], tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def add(self, total: Tensor, gradient: Tensor, place: int, *, index: int) -> None:
        block, (inverse_rows, inverse_columns, _, _) = self._blocks[place], self._scales_of(place, total.device)
        table, offset = _dither(index, total.device), _offset(self._step, block.name)
        if (native := kernels.of(total, gradient)) is not None:
            begin = offset + block.rows.start * block.num_columns + block.columns.start
            native.small_add(
                gradient, total, inverse_rows, inverse_columns, table, at=begin, apart=block.num_columns, limit=LIMIT
            )
            return
        for rows, part, piece in self._chunks(place, total, gradient):
            steps = (piece.view(-1, len(block.columns)) * inverse_rows[rows, None]).mul_(inverse_columns)
            first = block.rows.start + rows.start
            if len(block.columns) == block.num_columns:
                _add_run(steps.view(-1), table, offset + first * block.num_columns)
            else:
                at = torch.arange(first, first + len(steps), device=total.device) * block.num_columns + offset
                columns = torch.arange(block.columns.start, block.columns.stop, device=total.device)
                steps += table[(at[:, None] + columns) % _TABLE]
            part.add_(steps.view(-1).floor_().clamp_(-LIMIT, LIMIT).to(part.dtype))

    def values(self, total: Tensor, place: int, *, scale: float = 1.0) -> Iterator[Tensor]:
        block, (_, _, by_row, by_column) = self._blocks[place], self._scales_of(place, total.device)
        native = kernels.of(total)
        for rows, part, _ in self._chunks(place, total, total):
            if native is not None:
                found = torch.empty(part.numel())
                native.small_values(part, by_row[rows], by_column, fp32(scale), found)
                yield found
                continue
            whole = part.to(torch.float32).view(-1, len(block.columns))
            yield whole.mul_(by_row[rows, None]).mul_(by_column).view(-1).mul_(scale)

    def most(self, num_microbatches: int) -> int:
        return LIMIT * num_microbatches

    def _chunks(self, place: int, total: Tensor, other: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(rows of the block, piece of `total`, piece of `other`), as many rows at a time as fit a cache."""
        num_rows, num_columns = len(self._blocks[place].rows), len(self._blocks[place].columns)
        each = max(chunk_elements(total.device) // max(num_columns, 1), 1)
        # A rank may hold nothing of a short parameter.
        for first in range(0, num_rows if num_columns else 0, each):
            last = min(first + each, num_rows)
            piece = slice(first * num_columns, last * num_columns)
            yield slice(first, last), total[piece], other[piece]

    def _scales_of(self, place: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(1 / a, 1 / b, a, b) of that block, there."""
        if (place, device) not in self._there:
            block = self._blocks[place]
            a = self._scales[2 * place][block.rows.start : block.rows.stop].numpy()
            b = self._scales[2 * place + 1][block.columns.start : block.columns.stop].numpy()
            inverse = [(1.0 / scale.astype(np.float64)).astype(np.float32) for scale in (a, b)]
            found = [torch.from_numpy(scale.copy()).to(device) for scale in (*inverse, a, b)]
            self._there[place, device] = found[0], found[1], found[2], found[3]
        return self._there[place, device]


# ---------------------------------------------------------------- from step to step


class Roundings:
    """The grids of a stage's open steps. shapes: of whole parameters, in canonical order. held: what of them
    tensors have here; None: all.

    memory: fp32 [1 + delay.most, `num_scales`], with the scales of step s in row s % (1 + delay.most); shared with
    other processes that round by them, which call `changed` when another process has written there. Rows are zeros
    before version 0 has ended.
    """

    def __init__(
        self,
        numerics: Numerics,
        averaging: Averaging,
        shapes: Mapping[str, Sequence[int]],
        *,
        terms: int,
        memory: Tensor | None = None,
        held: Sequence[Rectangle] | None = None,
    ) -> None:
        self._shapes, self._delay, self._bits = dict(shapes), averaging.delay, numerics.grid_bits
        self._held = held or [Rectangle.whole(name, shape) for name, shape in shapes.items()]
        self.small = averaging.codec == "small"
        self._plain: Rounding = FineRounding(numerics.grid_bits, terms) if numerics.integers else NoRounding()
        size = num_scales(averaging, shapes)
        self._memory = torch.zeros(1 + self._delay.most, size) if memory is None else memory.view(-1, size)
        self._made: dict[int, tuple[int, Rounding]] = {}  # by row of the memory: of which step it is

    def of(self, step: int) -> Rounding:
        """The grid of an open step."""
        if not self.small:
            return self._plain
        row = step % len(self._memory)
        made_for, made = self._made.get(row, (-1, self._plain))
        # The step that had this row before is over, but ranks get no message of that.
        if made_for != step:
            made = self.by(step, self._memory[row])
            self._made[row] = step, made
        return made

    def by(self, step: int, scales: Tensor) -> Rounding:
        """The grid of any step with these scales: fp32 [`num_scales`], as they are in the memory."""
        if not self.small:
            return self._plain
        pieces = self._pieces(scales)
        is_set = bool(pieces[0].numel()) and bool((pieces[0] > 0).all())
        return SmallRounding(self._held, pieces, step=step) if is_set else self._plain

    def applied(self, step: int, totals: Sequence[Tensor], *, counted: int, clipped: float) -> None:
        """Step `step`, of `counted` microbatches, is over. totals: its sum, flat, one per parameter. clipped: what
        clipping has left of its length."""
        if not self.small:
            return
        used, shapes = self._scales(step), list(self._shapes.values())
        newest = self._scales(self._newest(step))
        if isinstance(self.of(step), SmallRounding):
            found = next_scales(totals, shapes, used, newest, counted=counted, clipped=clipped)
        elif isinstance(self.of(self._newest(step)), SmallRounding):
            found = list(newest)  # where steps overlap, two are computed on the weights of version 0
        elif self._begins_as_nothing(totals):
            return
        else:
            found = first_scales(totals, shapes, counted=counted, bits=self._bits, clipped=clipped)
        self._follow(step, torch.cat(found))

    def _begins_as_nothing(self, totals: Sequence[Tensor]) -> bool:
        """Is the first factor of an adapter without any gradient, since the other one is still 0? The grid stays fine
        until it has one: a small one would be far too fine for its first gradients, and cut them off."""
        named = zip(self._shapes, totals, strict=True)
        return any(name.endswith(".lora_A.weight") and not bool(total.any()) for name, total in named)

    def _newest(self, version: int) -> int:
        """The step that has the scales of `version`: the latest that is open."""
        return version + self._delay.behind(version + 1)

    def _follow(self, step: int, newest: Tensor) -> None:
        """The version after `step` has these scales."""
        opened = [step + 1 + late for late in range(1 + self._delay.most)]
        for other in opened:
            # Where steps overlap, the next step was open before, and has its own.
            if other - self._delay.behind(other) == step + 1:
                self._memory[other % len(self._memory)] = newest
        self.changed()

    def changed(self) -> None:
        """The memory has changed."""
        self._made.clear()

    def tensors(self, version: int) -> dict[str, Tensor]:
        """The scales of the open steps at `version`, live, by names in a snapshot."""
        found: dict[str, Tensor] = {}
        if self.small:
            for late in range(len(self._memory)):
                row = self._memory[(version + late) % len(self._memory)]
                pieces = torch.split(row, [sum(matrix_of(shape)) for shape in self._shapes.values()])
                found |= {scales_name(name, late): piece for name, piece in zip(self._shapes, pieces, strict=True)}
        return found

    def reset(self) -> None:
        """Back to version 0."""
        self._memory.zero_()
        self.changed()

    def _scales(self, step: int) -> Scales:
        return self._pieces(self._memory[step % len(self._memory)])

    def _pieces(self, scales: Tensor) -> Scales:
        return torch.split(scales, [size for shape in self._shapes.values() for size in matrix_of(shape)])


def num_scales(averaging: Averaging, shapes: Mapping[str, Sequence[int]]) -> int:
    """How many numbers the scales of one step are; at least one, so that there is a memory of them."""
    return sum(sum(matrix_of(shape)) for shape in shapes.values()) if averaging.codec == "small" else 1


def scales_name(parameter: str, late: int) -> str:
    """Name in a snapshot of version v of the scales of `parameter` in step v + late."""
    return f"grid.{late}.{parameter}"


def first_scales(
    totals: Sequence[Tensor], shapes: Sequence[Sequence[int]], *, counted: int, bits: int, clipped: float = 1.0
) -> list[Tensor]:
    """After a step on the fine grid. totals: int64, flat, of each parameter; counted: microbatches in them."""
    unit, found = _unit(counted, clipped), list[Tensor]()
    for total, shape in zip(totals, shapes, strict=True):
        largest = max(int(total.max()), -int(total.min())) if total.numel() else 0
        shift = max(largest.bit_length() - _CLAMP.bit_length() + 1, 0)
        r, k, t = _means(total, shape, shift=shift, unit=unit * 4.0 ** (bits - shift))
        # No gradient at all: the fine grid's step, until there is one.
        found.append(_root(r) if t else torch.full((len(r),), 2.0**-bits))
        found.append(_root(k / t) if t else torch.ones(len(k)))
    return found


def next_scales(
    totals: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    used: Scales,
    newest: Scales,
    *,
    counted: int,
    clipped: float = 1.0,
) -> list[Tensor]:
    """After a step on the small grid `used`, which is `newest` unless steps overlap."""
    unit, found = _unit(counted, clipped), list[Tensor]()
    places = zip(totals, shapes, used[::2], used[1::2], newest[::2], newest[1::2], strict=True)
    for total, shape, a_used, b_used, a_newest, b_newest in places:
        r, k, t = _means(total, shape, shift=0, unit=unit)
        found.append(_root((_square(a_newest) + r * _square(a_used)) / 2))
        found.append(_root((_square(b_newest) + k / t * _square(b_used)) / 2) if t else b_newest)
    return found


def _unit(counted: int, clipped: float) -> float:
    """The unit of the squares. A sum that is clipped more than `MOST_CLIPPED` times moves scales as if it had been that
    much shorter: else a false one would make the grid too coarse for all others."""
    return counted * FINENESS**2 / min(1.0, MOST_CLIPPED * clipped) ** 2


def _means(
    total: Tensor, shape: Sequence[int], *, shift: int, unit: float
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], float]:
    """Means of squares of `total` / 2^shift in `unit`s, over rows, columns and all. A vector's columns count as one."""
    num_rows, num_columns = matrix_of(shape)
    by_row = torch.empty(num_rows, dtype=torch.int64, device=total.device)
    by_column = torch.zeros(num_columns, dtype=torch.int64, device=total.device)
    if (native := kernels.of(total)) is not None:
        native.squares_by(total, by_row, by_column, shift=shift, most=_CLAMP)
    else:
        each = max(chunk_elements(total.device) // num_columns, 1)
        for first, rows in zip(
            range(0, num_rows, each), torch.split(total.view(num_rows, num_columns), each), strict=True
        ):
            squares = (rows >> shift).clamp_(-_CLAMP, _CLAMP).square_()
            by_row[first : first + each] = squares.sum(1)
            by_column += squares.sum(0)
    r, k = (sums.cpu().numpy().astype(np.float64) / unit for sums in (by_row, by_column))
    t = math.fsum(r) / (num_rows * num_columns)
    return r / num_columns, (k / num_rows if len(shape) > 1 else np.full(num_columns, t)), t


def _square(scale: Tensor) -> np.ndarray[Any, Any]:
    return np.square(scale.numpy().astype(np.float64))


def _root(squares: np.ndarray[Any, Any]) -> Tensor:
    """fp32 scales. None is far below the mean, or what comes next would be cut off."""
    least = max(_FLOOR * math.fsum(squares) / len(squares), _SMALLEST)
    return torch.from_numpy(np.sqrt(np.maximum(squares, least)).astype(np.float32))


# ---------------------------------------------------------------- dither
#
# Rounding to nearest would lose what is always smaller than half a step. An offset that is uniform over steps and
# elements keeps the mean; and from microbatch to microbatch of a step it moves by the golden ratio, so that what is
# rounded up in one is rounded down in the next. The offset of element e of a parameter is a multiple of 2^-24 in
# [0, 1): entry (e + `_offset`) mod 2^16 of a table of 24-bit numbers, plus index + 1 golden ratios, modulo 1.


@functools.lru_cache(maxsize=4)
def _dither(index: int, device: torch.device) -> Tensor:
    """The table as microbatch `index` has it, twice, so that a run of elements is one piece of it."""
    moved = (_table() + (index + 1) * _GOLDEN) & 0xFFFFFF
    once = torch.from_numpy(moved.astype(np.float32) * np.float32(2.0**-24))
    return torch.cat([once, once]).to(device)


def _add_run(steps: Tensor, table: Tensor, start: int) -> None:
    """Add the table's entries from `start` on."""
    for first in range(0, steps.numel(), _TABLE):
        part = steps[first : first + _TABLE]
        at = (start + first) % _TABLE
        part.add_(table[at : at + part.numel()])


def _offset(step: int, name: str) -> int:
    return _mixed(zlib.crc32(name.encode()) + step) % _TABLE


@functools.cache
def _table() -> np.ndarray[Any, Any]:
    return np.array([_mixed(number) & 0xFFFFFF for number in range(_TABLE)], np.int64)


def _mixed(number: int) -> int:
    """32 bits that look random: the finaliser of MurmurHash3."""
    x = number & 0xFFFFFFFF
    x = ((x ^ x >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ x >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ x >> 16
