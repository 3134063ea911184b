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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from swarmnet.model.comm import Comm, part_length

_TOKENS = 1  # the dimension of [B, T, D] that sequence parallelism cuts


Change = Callable[[Tensor], Tensor]


class Regions:
    """Enter and leave the regions of one stage."""

    def __init__(self, comm: Comm, *, sequence_parallel: bool) -> None:
        self._comm, self._by_tokens = comm, sequence_parallel

    def enter(self, x: Tensor) -> Tensor:
        """x, or all ranks' shares of it."""
        if self._by_tokens:
            return _change(x, self._gather, self._reduce_scatter)
        return _change(x, _same, self._comm.all_reduce)

    def leave(self, x: Tensor) -> Tensor:
        """The sum over ranks of x, or this rank's share of the sum."""
        if self._by_tokens:
            return _change(x, self._reduce_scatter, self._gather)
        return _change(x, self._comm.all_reduce, _same)

    def to_shares(self, x: Tensor) -> Tensor:
        """This rank's share of an x that all ranks have. Raises ValueError if the ranks cannot share its tokens."""
        return _change(x, self._share, self._gather) if self._by_tokens else x

    def from_shares(self, x: Tensor) -> Tensor:
        """All ranks' shares, for consumers that compute the same on every rank."""
        return _change(x, self._gather, self._share) if self._by_tokens else x

    def _gather(self, x: Tensor) -> Tensor:
        return self._comm.all_gather(x, _TOKENS)

    def _reduce_scatter(self, x: Tensor) -> Tensor:
        return self._comm.reduce_scatter(x, _TOKENS)

    def _share(self, x: Tensor) -> Tensor:
        length = part_length(x, _TOKENS, self._comm.size)
        return x.narrow(_TOKENS, self._comm.rank * length, length).contiguous()


class _Change(torch.autograd.Function):
    """One function there, another back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Change, back: Change) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _change(x: Tensor, there: Change, back: Change) -> Tensor:
    y: Tensor = _Change.apply(x, there, back)  # type: ignore[no-untyped-call]
    return y
