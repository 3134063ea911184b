"""`model.comm.Comm` over a torch process group: nccl on CUDA, gloo on the CPU.

The caller owns the group: it makes it, gives it a deadline and destroys it. Torch's collectives join along the
first dimension, so others are moved to the front and back; at one sequence per microbatch that moves no memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from swarmnet.model.comm import Reduction, part_length

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class ProcessComm:
    """This process's end of `group`; None is the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = dist.group.WORLD if group is None else group
        """What it speaks through, for what needs torch's own."""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        """The elementwise reduction over all ranks."""
        y = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, op=_OPS[op], group=self.group)
        return y

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' tensors, concatenated along `dim` in order of rank."""
        return self._along(dim, x, x.shape[dim] * self.size, dist.all_gather_single)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of the sum over all ranks."""
        return self._along(dim, x, part_length(x, dim, self.size), dist.reduce_scatter_single)

    def _along(self, dim: int, x: Tensor, length: int, collective: Callable[..., object]) -> Tensor:
        front = x.detach().movedim(dim, 0).contiguous()
        y = front.new_empty((length, *front.shape[1:]))
        collective(y, front, group=self.group)
        return y.movedim(0, dim).contiguous()


class OneRank:
    """The group of a rank that is alone: every result is its own tensor."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        """A copy."""
        return x.detach().clone(memory_format=torch.contiguous_format)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """A copy."""
        return self.all_reduce(x)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """A copy."""
        return self.all_reduce(x)
