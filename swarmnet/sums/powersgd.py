"""Sums of matrices as sums of two thin factors: PowerSGD (arXiv:1905.13727) in two all-reduces.

Replica i holds a matrix M_i, gradient and residual, and everybody holds a thin Q from the step before.

    first    P = sum of M_i Q            and all elements that are not in a large matrix, as they are
    between  O = P orthonormalised
    second   R = sum of M_i^T O
    whole    O R^T, the projection of the sum of M_i on the columns of O; what i has sent of it is O (M_i^T O)^T

Both vectors are plain fp32, summed like any gradient, and linear in M_i: what is sent over all replicas is what comes
out, up to rounding. R, its columns made of unit length, is the next step's Q (warm start).

Replicas must hold equal bits of O and of the whole, so these are made of elementwise IEEE operations and sums in a tree
of fixed shape, not of matrix kernels. M_i Q and M_i^T O may be rounded by any kernel: they are summed before anybody
uses them. Nor need Q be equal everywhere: it only says where to look. A newcomer begins with a random one.

`PowerSGDCodec` is a sum under `powersgd:R`: the two phases, with error feedback. Same shape as `sums.sum_codec`.
Positions run through both phases, and pieces of both are plain fp32. Knows no rounds but their ids and no peers.
Averaging thread only.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.ids import RoundId
from swarmnet.messages import Packed
from swarmnet.sums.feedback import RESIDUAL, Feedback
from swarmnet.sums.sum_buffer import SumBuffer
from swarmnet.sums.sum_codec import EXACT, Parameter, choose
from swarmnet.wire import codecs
from swarmnet.wire.codec import check_finite

_CHUNK = 1 << 17
_NEGLIGIBLE = 1e-6
"""A column is dropped when this share of its length, or less, is its own: fp32 knows no more of it."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Elements [start, start + rows * columns) of the flat gradient. p, q: where its factors begin in the vectors."""

    name: str
    start: int
    rows: int
    columns: int
    p: int
    q: int


class LowRank:
    """The factors of one stage's matrices. sizes: lengths of the two vectors that are summed, one after the other.

    rank: of the factors. parameters: all of the stage's, in canonical order. On the CPU, where sums are made.
    """

    def __init__(self, rank: int, parameters: Sequence[Parameter]) -> None:
        self._rank = rank
        self._matrices, self._exact = _laid_out(rank, parameters)
        self._num_exact = sum(stop - start for start, stop in self._exact)
        self.num_elements = sum(math.prod(shape) for _, shape in parameters)
        self.sizes = vector_sizes(rank, parameters)
        self._directions = [_random(matrix.name, matrix.columns, rank) for matrix in self._matrices]

    @property
    def directions(self) -> Tensor:
        """Q of all matrices, flat: what a peer may save and take over."""
        return torch.cat([direction.reshape(-1) for direction in self._directions] + [torch.empty(0)])

    def take_over(self, directions: Tensor) -> None:
        """Go on from saved `directions`. Raises BadMessage: BAD_SHAPE, NON_FINITE; unchanged then."""
        if directions.shape != (self.sizes[1],) or directions.dtype != torch.float32:
            raise BadMessage(RejectCode.BAD_SHAPE, "not this stage's directions", shape=tuple(directions.shape))
        if not bool(torch.isfinite(directions).all()):
            raise BadMessage(RejectCode.NON_FINITE, "NaN or infinity in directions")
        self._directions = [self._factor(directions, matrix.q, matrix.columns).clone() for matrix in self._matrices]

    # ------------------------------------------------------------ one sum

    def first(self, flat: Tensor) -> Tensor:
        """What to contribute to the first sum: fp32 [sizes[0]]. flat: fp32 [num_elements]."""
        products = [
            (_view(flat, matrix) @ direction).reshape(-1)
            for matrix, direction in zip(self._matrices, self._directions, strict=True)
        ]
        return torch.cat([*(flat[start:stop] for start, stop in self._exact), *products, flat[:0]])

    def basis(self, first_sum: Tensor) -> list[Tensor]:
        """O of each matrix, from the first sum: [rows, rank]. Equal bits everywhere."""
        return [
            orthonormal(self._factor(first_sum, self._num_exact + matrix.p, matrix.rows)) for matrix in self._matrices
        ]

    def second(self, flat: Tensor, basis: Sequence[Tensor]) -> Tensor:
        """What to contribute to the second sum: fp32 [sizes[1]]."""
        products = [
            (_view(flat, matrix).T @ columns).reshape(-1) for matrix, columns in zip(self._matrices, basis, strict=True)
        ]
        return torch.cat([*products, flat[:0]])

    def whole(self, first_sum: Tensor, basis: Sequence[Tensor], second_sum: Tensor, out: Tensor) -> None:
        """Write what the two sums stand for over `out` [num_elements]. Equal bits everywhere."""
        edge = 0
        for start, stop in self._exact:
            out[start:stop] = first_sum[edge : edge + stop - start]
            edge += stop - start
        for matrix, columns in zip(self._matrices, basis, strict=True):
            _outer(columns, self._factor(second_sum, matrix.q, matrix.columns), _view(out, matrix))

    def learn(self, second_sum: Tensor) -> None:
        """That sum was applied: look there next time. A direction without length stays what it was."""
        for place, matrix in enumerate(self._matrices):
            found = self._factor(second_sum, matrix.q, matrix.columns).double()
            length = found.norm(dim=0)
            self._directions[place] = torch.where(
                length > 0, found / torch.where(length > 0, length, 1.0), self._directions[place].double()
            ).float()

    def _factor(self, vector: Tensor, start: int, height: int) -> Tensor:
        return vector[start : start + height * self._rank].view(height, self._rank)


def vector_sizes(rank: int, parameters: Sequence[Parameter]) -> tuple[int, int]:
    """Lengths of the two vectors that are summed."""
    matrices, exact = _laid_out(rank, parameters)
    as_they_are = sum(stop - start for start, stop in exact)
    return as_they_are + rank * sum(each.rows for each in matrices), rank * sum(each.columns for each in matrices)


def _laid_out(rank: int, parameters: Sequence[Parameter]) -> tuple[list[_Matrix], list[tuple[int, int]]]:
    """The matrices that travel as factors, and the ranges of the flat gradient that travel as they are."""
    matrices: list[_Matrix] = []
    exact: list[tuple[int, int]] = []
    edge = p = q = 0
    for name, shape in parameters:
        start, edge = edge, edge + math.prod(shape)
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (edge - start, 1)
        # Factors travel if they take half of the matrix's bytes at most.
        if choose(name, shape, matrices="factors") != EXACT and 2 * rank * (rows + columns) <= rows * columns:
            matrices.append(_Matrix(name, start, rows, columns, p, q))
            p, q = p + rows * rank, q + columns * rank
        else:
            exact.append((start, edge))
    return matrices, exact


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns that span those of fp32 `columns`, in order; zeros for one that adds nothing. Fixed bits.

    Gram-Schmidt in fp64, each column against those before it, twice.
    """
    found: list[Tensor] = []
    for column in columns.double().unbind(1):
        length = _length(column)
        rest = column
        # Twice: rounding leaves a rest after one pass.
        for _, other in itertools.product(range(2), found):
            rest = rest - other * _tree_sum(rest * other)
        left = _length(rest)
        keep = left > length * _NEGLIGIBLE
        found.append(torch.where(keep, rest / torch.where(keep, left, 1.0), 0.0))
    return torch.stack(found, dim=1).float()


def _length(x: Tensor) -> Tensor:
    return torch.sqrt(_tree_sum(x * x))


def _tree_sum(x: Tensor) -> Tensor:
    """The sum of a vector, by halves: the shape of the tree is that of the length, on every machine. A scalar."""
    size = 1 << max(x.numel() - 1, 0).bit_length()
    x = torch.nn.functional.pad(x, (0, size - x.numel()))
    while x.numel() > 1:
        half = x.numel() // 2
        x = x[:half] + x[half:]
    return x.sum() if x.numel() == 0 else x[0]


def _outer(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right.T, [rows, columns], one rank after the other: products and additions, never fused."""
    step = max(_CHUNK // max(out.shape[1], 1), 1)
    for start in range(0, out.shape[0], step):
        here = out[start : start + step]
        torch.mul(left[start : start + step, :1], right[:, 0], out=here)
        for number in range(1, left.shape[1]):
            here.add_(left[start : start + step, number : number + 1] * right[:, number])


def _view(flat: Tensor, matrix: _Matrix) -> Tensor:
    return flat[matrix.start : matrix.start + matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)


def _random(name: str, columns: int, rank: int) -> Tensor:
    """The first Q: the same for all newcomers."""
    return torch.randn(columns, rank, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


DIRECTIONS = "averaging.directions"
"""Name of PowerSGD's Q where a replica saves it."""


class PowerSGDCodec:
    """`phases`: lengths of the vectors that a round sums, one after the other."""

    contributed = reduced = usual = "fp32"
    block = 1

    def __init__(self, rank: int, parameters: Sequence[Parameter], *, device: torch.device) -> None:
        self.low_rank, self._device = LowRank(rank, parameters), device
        self.phases = tuple(size for size in self.low_rank.sizes if size)  # without large matrices there is one
        self.feedback = Feedback(self.low_rank.num_elements, device=device)
        self._sums = SumBuffer(sum(self.phases), dtype=torch.float32, device=torch.device("cpu"))
        self._corrected: Tensor | None = None  # what I want to send; None: nobody has asked for it
        self._mine: list[Tensor] = []  # my vector of each phase so far
        self._basis: list[Tensor] = []
        self._finished: RoundId | None = None
        self._round: RoundId | None = None

    def begin(
        self, round_id: RoundId, *, voids: int, resent: bool = False, kept: Collection[tuple[int, int, int]] = ()
    ) -> None:
        """A round begins, at its first phase. Nothing of the last round is taken over: with two phases it depends on
        the whole first sum, and with one this codec loses nothing."""
        self.feedback.begin(round_id, voids=voids)
        self._round, self._finished = round_id, None
        self._corrected, self._mine, self._basis = None, [], []

    def contribution(self, total: Tensor, start: int, stop: int, *, voids: int) -> Packed:
        """Positions [start, stop) of what I send of the accumulator `total` and of what is still owed."""
        # Once in a round: all pieces must be of one product.
        if self._corrected is None:
            self.feedback.at(voids)
            self._corrected = self.feedback.corrected(total.to(self._device), 0)
            self._mine = [self.low_rank.first(self._corrected.cpu())]
        edge = self.phases[0]
        vector, shift = (self._mine[0], 0) if start < edge or not self._basis else (self._mine[1], edge)
        return codecs.encode("fp32", vector[start - shift : stop - shift].clone())

    def sum(self, total: Tensor, start: int, *, voids: int, hop: int = 0) -> Packed:
        """A reduced piece. Raises NON_FINITE."""
        return codecs.encode("fp32", total)

    def again(self, piece: Tensor, start: int) -> None:
        """A finished sum is a product: it was never reduced piece by piece."""

    def buffer(self, whole: SumBuffer) -> SumBuffer:
        """Where reduced pieces are put: not into the sum itself, which they are not yet."""
        return self._sums

    def next_phase(self, *, voids: int) -> None:
        """The first sum is whole: it gives the basis, and with it what I send and what I still owe."""
        first = self._sums.flat[: self.phases[0]]
        self._basis = self.low_rank.basis(first)
        # Nobody asked for my contribution, so nothing of mine was sent.
        if self._corrected is None:
            return
        corrected = self._corrected.cpu()
        self._mine.append(self.low_rank.second(corrected, self._basis))
        sent = torch.empty_like(corrected)
        self.low_rank.whole(self._mine[0], self._basis, self._mine[1], sent)
        self.feedback.at(voids)
        self.feedback.contributed(self._corrected, sent.to(self._corrected.device), 0)

    def finish(self, whole: SumBuffer) -> None:
        """Both sums are whole: write what they stand for. Raises NON_FINITE."""
        self._sums.seal()
        first, second = self._sums.flat[: self.phases[0]], self._sums.flat[self.phases[0] :]
        out = torch.empty(self.low_rank.num_elements)
        self.low_rank.whole(first, self._basis, second, out)
        check_finite(out)
        whole.open()
        whole.place(0, out.numel()).copy_(out)
        whole.written(0, out.numel())
        self._finished = self._round

    @property
    def memory(self) -> dict[str, Tensor]:
        """What the codec remembers from step to step, by name."""
        return {RESIDUAL: self.feedback.residual, DIRECTIONS: self.low_rank.directions}

    def recall(self, memory: Mapping[str, Tensor], *, voids: int) -> None:
        """Go on from a saved `memory`. Raises BadMessage; the residual is then as it was."""
        self.low_rank.take_over(memory[DIRECTIONS])
        self.feedback.take_over(memory[RESIDUAL], voids=voids)

    def applied(self, round_id: RoundId | None, *, voids: int) -> None:
        """The sum of that round has been applied, made here or fetched; None: the step has ended without one."""
        self.feedback.at(voids)
        self.feedback.applied(round_id)
        # A sum that was fetched whole has no factors to learn from.
        if round_id is not None and round_id == self._finished:
            self.low_rank.learn(self._sums.flat[self.phases[0] :])
        self._corrected, self._mine, self._basis, self._finished = None, [], [], None
