"""Groups of ranks that are threads, or not there at all."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from swarmnet.model.comm import Comm
from tests.contracts.comm_contract import CHECKS
from tests.contracts.fake_comm import FakeComm
from tests.contracts.thread_comm import Counted, ThreadComm, run_ranks


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_threads_keep_the_contract(check: Callable[[Comm], None], size: int) -> None:
    run_ranks(size, check)


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.all_reduce(torch.zeros(2 + comm.rank)),
        lambda comm: comm.all_reduce(torch.zeros(2), "max" if comm.rank else "sum"),
        lambda comm: comm.all_gather(torch.zeros(2, 2), comm.rank),
        lambda comm: comm.all_reduce(torch.zeros(2, dtype=torch.float64 if comm.rank else torch.float32)),
    ],
    ids=["shape", "operation", "dimension", "dtype"],
)
def test_ranks_that_call_different_things_are_told(call: Callable[[ThreadComm], object]) -> None:
    with pytest.raises(ValueError, match="ranks called different collectives"):
        run_ranks(2, call)


@pytest.mark.timeout(60, method="thread")
def test_a_rank_that_raises_ends_the_others() -> None:
    ended: list[int] = []

    def body(comm: ThreadComm) -> None:
        if comm.rank == 1:
            raise RuntimeError("rank 1 has died")
        try:
            comm.all_reduce(torch.zeros(1))
        except threading.BrokenBarrierError:
            ended.append(comm.rank)
            raise

    with pytest.raises(RuntimeError, match="rank 1 has died"):
        run_ranks(3, body, patience_s=3600)
    assert sorted(ended) == [0, 2]


def test_a_rank_that_leaves_early_is_not_waited_for_for_ever() -> None:
    with pytest.raises(threading.BrokenBarrierError):
        run_ranks(2, lambda comm: comm.rank or comm.all_reduce(torch.zeros(1)), patience_s=0.05)


def test_every_rank_has_the_same_bits() -> None:
    def body(comm: ThreadComm) -> torch.Tensor:
        generator = torch.Generator().manual_seed(comm.rank)
        return comm.all_reduce(torch.randn(1000, generator=generator))

    first, *others = run_ranks(4, body)
    assert all(torch.equal(first, other) for other in others)


def test_calls_are_counted() -> None:
    def body(comm: Comm) -> dict[str, int]:
        counted = Counted(comm)
        counted.all_reduce(counted.all_gather(torch.zeros(2, 2), 1), "max")
        counted.all_reduce(counted.reduce_scatter(torch.zeros(2, 2), 0))
        assert (counted.rank, counted.size) == (comm.rank, comm.size)
        return dict(counted.counts)

    assert run_ranks(2, body) == [{"all_gather": 1, "all_reduce": 2, "reduce_scatter": 1}] * 2


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_fake_group_gives_the_shapes_of_a_real_one(device: str) -> None:
    comm = FakeComm(3, 4)
    assert (comm.rank, comm.size) == (3, 4)
    x = torch.empty(2, 8, 3, dtype=torch.bfloat16, device=device, requires_grad=True)
    for found, shape in (
        (comm.all_reduce(x, "max"), (2, 8, 3)),
        (comm.all_gather(x, 1), (2, 32, 3)),
        (comm.all_gather(x, -1), (2, 8, 12)),
        (comm.reduce_scatter(x, 1), (2, 2, 3)),
    ):
        assert (found.shape, found.dtype, found.device.type, found.requires_grad) == (shape, x.dtype, device, False)
    with pytest.raises(ValueError, match="cannot share"):
        comm.reduce_scatter(x, 0)
    with pytest.raises(ValueError, match="rank 4 is none of 4"):
        FakeComm(4, 4)
