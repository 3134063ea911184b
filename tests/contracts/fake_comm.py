"""`model.comm.Comm` of one rank without any others: results have the right shapes, and no values."""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnet.model.comm import Reduction, part_length


class FakeComm:
    """Rank `rank` of `size`."""

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is none of {size}")
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        """A tensor like `x`."""
        return torch.empty_like(x, memory_format=torch.contiguous_format, requires_grad=False)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """A tensor `size` times as long as `x` along `dim`."""
        return self._resized(x, dim, x.shape[dim] * self.size)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """A tensor of one `size`-th of `x` along `dim`."""
        return self._resized(x, dim, part_length(x, dim, self.size))

    @staticmethod
    def _resized(x: Tensor, dim: int, length: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = length
        return x.new_empty(shape)
