"""What every `model.comm.Comm` that has real ranks must do. Run each of `CHECKS` on all ranks of a group at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swarmnet.model.comm import Comm


def of_rank(rank: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """[2, 24, 3], other values on every rank; small integers, whose sums are exact."""
    return (torch.arange(144).view(2, 24, 3) * (rank + 1) % 17 - 5).to(dtype)


def everybodys(comm: Comm, *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [of_rank(rank, dtype=dtype) for rank in range(comm.size)]


def ranks_are_numbered_from_zero(comm: Comm) -> None:
    assert 0 <= comm.rank < comm.size
    numbers = comm.all_gather(torch.tensor([comm.rank]), 0)
    assert numbers.tolist() == list(range(comm.size))


def sums_and_maxima_of_every_dtype(comm: Comm) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        stacked = torch.stack(everybodys(comm, dtype=dtype))
        own = of_rank(comm.rank, dtype=dtype)
        assert torch.equal(comm.all_reduce(own), stacked.sum(0).to(dtype))
        assert torch.equal(comm.all_reduce(own, "max"), stacked.amax(0))


def gathers_along_any_dimension(comm: Comm) -> None:
    for dim in (0, 1, 2, -1):
        gathered = comm.all_gather(of_rank(comm.rank), dim)
        assert gathered.is_contiguous() and torch.equal(gathered, torch.cat(everybodys(comm), dim))


def scatters_sums_along_any_dimension(comm: Comm) -> None:
    total = torch.stack(everybodys(comm)).sum(0)
    for dim in (1, -2):
        part = comm.reduce_scatter(of_rank(comm.rank), dim)
        assert part.is_contiguous() and torch.equal(part, total.chunk(comm.size, dim)[comm.rank])
    turned = comm.reduce_scatter(of_rank(comm.rank).transpose(0, 1), 0)
    assert torch.equal(turned, total.transpose(0, 1).chunk(comm.size)[comm.rank])


def arguments_stay_and_results_are_new(comm: Comm) -> None:
    own = of_rank(comm.rank)
    for call in (lambda: comm.all_reduce(own), lambda: comm.all_gather(own, 1), lambda: comm.reduce_scatter(own, 1)):
        call().fill_(7)
        assert torch.equal(own, of_rank(comm.rank))


def what_requires_a_gradient_gives_none(comm: Comm) -> None:
    own = of_rank(comm.rank).requires_grad_()
    for result in (comm.all_reduce(own), comm.all_gather(own, 1), comm.reduce_scatter(own, 1)):
        assert not result.requires_grad


def what_cannot_be_shared_is_refused_before_anything_is_sent(comm: Comm) -> None:
    if comm.size > 1:
        with pytest.raises(ValueError, match=f"{comm.size} ranks cannot share a dimension of {comm.size + 1}"):
            comm.reduce_scatter(torch.zeros(2, comm.size + 1), 1)
    assert comm.all_reduce(torch.ones(1)).item() == comm.size, "the group goes on"


CHECKS: tuple[Callable[[Comm], None], ...] = (
    ranks_are_numbered_from_zero,
    sums_and_maxima_of_every_dtype,
    gathers_along_any_dimension,
    scatters_sums_along_any_dimension,
    arguments_stay_and_results_are_new,
    what_requires_a_gradient_gives_none,
    what_cannot_be_shared_is_refused_before_anything_is_sent,
)
