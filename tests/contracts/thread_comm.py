"""`model.comm.Comm` among threads of one process: a group without processes.

A collective is two waits at one barrier: all have put their tensor down; all have read the others'. Sums go in order
of rank, so every rank has the same bits. Checks what real groups leave undefined: that all ranks called the same
collective with the same shapes. A rank that raises breaks the barrier, and the others end too.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from swarmnet.model.comm import Comm, Reduction, part_length

T = TypeVar("T")

_Call = tuple[str, tuple[int, ...], torch.dtype]


class _Table:
    """Where the ranks lay down what the others read."""

    def __init__(self, size: int, *, patience_s: float) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=patience_s)
        self._laid: list[tuple[_Call, Tensor] | None] = [None] * size

    def exchange(self, rank: int, call: _Call, x: Tensor, answer: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Lay `x` down, wait for all, and make of all ranks' tensors what `answer` says."""
        self._laid[rank] = (call, x.detach())
        self.barrier.wait()
        laid = [entry for entry in self._laid if entry is not None]
        calls = {entry[0] for entry in laid}
        if len(calls) > 1:
            raise ValueError(f"ranks called different collectives: {sorted(map(str, calls))}")
        y = answer([entry[1] for entry in laid])
        self.barrier.wait()
        return y


class ThreadComm:
    """One thread's end. Made by `run_ranks`."""

    def __init__(self, table: _Table, rank: int) -> None:
        self._table, self.rank, self.size = table, rank, table.size

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        """The elementwise reduction over all ranks."""
        return self._exchange(f"all_reduce {op}", x, lambda xs: _reduce(xs, op))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' tensors, concatenated along `dim` in order of rank."""
        return self._exchange(f"all_gather {dim}", x, lambda xs: torch.cat(xs, dim))

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of the sum over all ranks."""
        length = part_length(x, dim, self.size)
        start = self.rank * length
        return self._exchange(
            f"reduce_scatter {dim}", x, lambda xs: _reduce([each.narrow(dim, start, length) for each in xs], "sum")
        )

    def _exchange(self, name: str, x: Tensor, answer: Callable[[list[Tensor]], Tensor]) -> Tensor:
        return self._table.exchange(self.rank, (name, tuple(x.shape), x.dtype), x, answer)


def run_ranks(size: int, body: Callable[[ThreadComm], T], *, patience_s: float = 60.0) -> list[T]:
    """Run `body` on `size` threads, each with its end of one group; answers in order of rank.

    Raises what a rank raised. A rank that waits `patience_s` for the others gives up (threading.BrokenBarrierError).
    """
    return run_mesh(1, size, lambda _, comm: body(comm), patience_s=patience_s)


def run_mesh(
    data: int, tensor: int, body: Callable[[ThreadComm, ThreadComm], T], *, patience_s: float = 60.0
) -> list[T]:
    """`run_ranks` for data x tensor ranks: rank d * tensor + t gets its ends of group t along `data` and of group d
    along `tensor`."""
    along_data = [_Table(data, patience_s=patience_s) for _ in range(tensor)]
    along_tensor = [_Table(tensor, patience_s=patience_s) for _ in range(data)]

    def guarded(rank: int) -> T:
        d, t = divmod(rank, tensor)
        try:
            return body(ThreadComm(along_data[t], d), ThreadComm(along_tensor[d], t))
        except BaseException:
            for table in (*along_data, *along_tensor):
                table.barrier.abort()
            raise

    size = data * tensor
    with ThreadPoolExecutor(size, thread_name_prefix="rank") as threads:
        futures = [threads.submit(guarded, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error  # the cause first; a broken barrier is only its consequence
    return [future.result() for future in futures]


def _reduce(xs: list[Tensor], op: Reduction) -> Tensor:
    y = xs[0].clone(memory_format=torch.contiguous_format)
    for x in xs[1:]:
        (torch.add if op == "sum" else torch.maximum)(y, x, out=y)
    return y


class Counted:
    """Another `Comm`, and how often each collective was called on this rank: `counts["all_reduce"]`."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.counts: Counter[str] = Counter()

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self._comm.size

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        """The elementwise reduction over all ranks."""
        self.counts["all_reduce"] += 1
        return self._comm.all_reduce(x, op)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' tensors, concatenated along `dim` in order of rank."""
        self.counts["all_gather"] += 1
        return self._comm.all_gather(x, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of the sum over all ranks."""
        self.counts["reduce_scatter"] += 1
        return self._comm.reduce_scatter(x, dim)
