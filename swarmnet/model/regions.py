"""Where activations change hands between ranks: autograd functions in pairs, one collective each way at most.

A layer's attention and its MLP are each a *region*: `enter` it with what all ranks agree on, `leave` it with the sum
of what each computed (arXiv:1909.08053). With sequence parallelism (arXiv:2205.05198) a rank has its share of the
tokens [B, T / ranks, D] outside regions, and all of them inside.

| | forward | backward |
|---|---|---|
| enter | nothing | all-reduce |
| leave | all-reduce | nothing |
| enter, sequence parallel | all-gather | reduce-scatter |
| leave, sequence parallel | reduce-scatter | all-gather |
| to_shares (a stage's input) | nothing | all-gather |
| from_shares (a stage's output) | all-gather | nothing |

Backward is the input gradient's; none of these is called by a weight pass. Knows no model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swarmnet.mesh.comm import Comm, part_length

_TOKENS = 1          # the dimension of [B, T, D] that sequence parallelism cuts


class Regions:
    """Enter and leave the regions of one stage."""

    def __init__(self, comm: Comm, *, sequence_parallel: bool) -> None:
        self._comm, self._by_tokens = comm, sequence_parallel

    def enter(self, x: Tensor) -> Tensor:
        """x, or all ranks' shares of it."""
        return _apply(_Gather if self._by_tokens else _Copy, x, self._comm)

    def leave(self, x: Tensor) -> Tensor:
        """The sum over ranks of x, or this rank's share of the sum."""
        return _apply(_ReduceScatter if self._by_tokens else _Reduce, x, self._comm)

    def to_shares(self, x: Tensor) -> Tensor:
        """This rank's share of an x that all ranks have. Raises ValueError if the ranks cannot share its tokens."""
        return _apply(_Split, x, self._comm) if self._by_tokens else x

    def from_shares(self, x: Tensor) -> Tensor:
        """All ranks' shares, for consumers that compute the same on every rank."""
        return _apply(_Join, x, self._comm) if self._by_tokens else x


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_reduce(grads[0]), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        return comm.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return comm.all_gather(x, _TOKENS)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.reduce_scatter(grads[0], _TOKENS), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return comm.reduce_scatter(x, _TOKENS)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_gather(grads[0], _TOKENS), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return _share(x, comm)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_gather(grads[0], _TOKENS), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return comm.all_gather(x, _TOKENS)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _share(grads[0], ctx.comm), None


def _share(x: Tensor, comm: Comm) -> Tensor:
    length = part_length(x, _TOKENS, comm.size)
    return x.narrow(_TOKENS, comm.rank * length, length).contiguous()


def _apply(function: type[torch.autograd.Function], x: Tensor, comm: Comm) -> Tensor:
    y: Tensor = function.apply(x, comm)  # type: ignore[no-untyped-call]
    return y
