"""What the ranks of one peer tell each other: three collectives on tensors. Nothing else crosses between them.

Every rank of a group calls the same collective, with the same shapes, in the same order. A group is made elsewhere:
by torch (`ranks.comm`), by threads of one process (`tests.contracts.thread_comm`), or not at all (`ranks.comm`, shapes
only). Knows no model and no network: the swarm averages by its own protocol, and only ever sees the peer.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

Reduction = Literal["sum", "max"]


class Comm(Protocol):
    """One rank's end of a group. Arguments are never changed; results are new, contiguous and of the argument's dtype.

    Every rank gets the same bits from `all_reduce` and `all_gather`: what is replicated stays equal without a check.
    """

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""

    @property
    def size(self) -> int:
        """How many ranks the group has."""

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        """The elementwise reduction over all ranks."""

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' tensors, concatenated along `dim` in order of rank."""

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of the sum over all ranks. Raises ValueError if `dim` cannot be cut into `size` parts."""


def part_length(x: Tensor, dim: int, size: int) -> int:
    """Length of one of `size` equal parts of `x` along `dim`. Raises ValueError if there are none.

    To be asked before a collective: a mismatch inside one aborts the process (gloo) or never ends (nccl).
    """
    if x.shape[dim] % size:
        raise ValueError(f"{size} ranks cannot share a dimension of {x.shape[dim]} equally (shape {tuple(x.shape)})")
    return x.shape[dim] // size
