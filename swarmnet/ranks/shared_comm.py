"""`model.comm.Comm` through memory that ranks on one machine share: for tensors on the CPU.

Each rank has a buffer there. In a collective it writes a piece of its tensor to its buffer, wakes the others, waits for
their pieces and reads what it needs of them; before it writes the next piece, all must have read this one. A sum is
taken in order of rank, on every rank: all have the same bits, whoever came first. There is no deadline: a rank whose
partner is gone waits until the peer process, which has noticed, ends it (`ranks.supervisor`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from swarmnet.model.comm import Reduction, part_length

BUFFER_BYTES = 1 << 20
"""Of a rank: how much it writes at once. It stays in the cache until the others have read it."""

SPINS = 100
"""How often a rank that waits looks again, under a microsecond each, before it sleeps: being woken takes longer."""

_CALLS = ("sum", "max", "gather", "scatter")

_LINE_BYTES = 64
"""Of a cache line: ranks that write side by side should not share one. A semaphore (`sem_t`) has 32 bytes."""

_libc = ctypes.CDLL(None, use_errno=True)
_look = ctypes.PyDLL(None).sem_trywait  # keeps the GIL: giving it up takes longer than the call


class SharedBuffers:
    """Rank `rank`'s view of the memory of `ranks` ranks: [num_bytes(ranks)] uint8, whatever is in it.

    Its semaphores are good once all ranks have made theirs. A collective needs two for each ordered pair of its ranks:
    one says that a piece is there to be read, one that it has been read. Any groups of these ranks may use the same
    buffers in turns, since two ranks that share several groups call their collectives in the same order.
    """

    def __init__(self, memory: Tensor, rank: int, ranks: int) -> None:
        assert memory.numel() == self.num_bytes(ranks), memory.numel()
        self.rank = rank
        self._rows = [memory[at * BUFFER_BYTES : (at + 1) * BUFFER_BYTES] for at in range(ranks)]
        address = memory.data_ptr() + ranks * BUFFER_BYTES
        self._calls = [ctypes.c_int64.from_address(address + at * _LINE_BYTES) for at in range(ranks)]
        address += ranks * _LINE_BYTES

        def semaphores(kind: int, own: bool) -> list[ctypes.c_void_p]:
            pairs = [(rank, other) if own else (other, rank) for other in range(ranks)]
            return [ctypes.c_void_p(address + ((kind * ranks + to) * ranks + of) * _LINE_BYTES) for to, of in pairs]

        self._written_by, self._read_by = semaphores(0, own=True), semaphores(1, own=True)
        self._tell_written, self._tell_read = semaphores(0, own=False), semaphores(1, own=False)
        for own in (*self._written_by, *self._read_by):
            if _libc.sem_init(own, 1, 0) != 0:
                raise OSError(ctypes.get_errno(), "sem_init")
        self._readers: list[int] = []  # who has not told us yet that our last piece was read

    @staticmethod
    def num_bytes(ranks: int) -> int:
        """How much memory that takes."""
        return ranks * BUFFER_BYTES + ranks * _LINE_BYTES + 2 * ranks * ranks * _LINE_BYTES

    def exchange(self, piece: Tensor, ranks: Sequence[int], call: int) -> list[Tensor]:
        """The pieces of all `ranks`, like `piece`, to be read before `done`.

        call: of what collective it is a piece. Raises RuntimeError if another rank is in another one.
        """
        for reader in self._readers:
            _wait(self._read_by[reader])
        pieces = [self._rows[rank][: piece.nbytes].view(piece.dtype).view(piece.shape) for rank in ranks]
        pieces[ranks.index(self.rank)].copy_(piece)
        self._calls[self.rank].value = call
        self._readers = [rank for rank in ranks if rank != self.rank]
        for reader in self._readers:
            _libc.sem_post(self._tell_written[reader])
        for writer in self._readers:
            _wait(self._written_by[writer])
            if self._calls[writer].value != call:  # its buffer would be read as what it is not
                raise RuntimeError(f"ranks {self.rank} and {writer} called different collectives")
        return pieces

    def done(self) -> None:
        """The pieces have been read."""
        for writer in self._readers:
            _libc.sem_post(self._tell_read[writer])


def _wait(semaphore: ctypes.c_void_p) -> None:
    for _ in range(SPINS):
        if _look(semaphore) == 0:
            return
        os.sched_yield()  # where ranks outnumber cores, the one waited for may need this core
    while _libc.sem_wait(semaphore) != 0:  # a signal has come
        pass


class SharedComm:
    """The end of the group of `ranks` that has `buffers`. group: torch's of the same ranks, for what needs one."""

    def __init__(self, buffers: SharedBuffers, ranks: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
        self._buffers, self._ranks, self.group = buffers, list(ranks), group
        self.rank, self.size = self._ranks.index(buffers.rank), len(self._ranks)

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        """The elementwise reduction over all ranks."""
        y = torch.empty_like(x, memory_format=torch.contiguous_format, requires_grad=False)
        flat = y.view(-1)
        for columns, pieces in self._pieces(x.detach().reshape(1, -1), op):
            _reduce([piece[0] for piece in pieces], op, flat[columns])
        return y

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' tensors, concatenated along `dim` in order of rank."""
        front = x.detach().movedim(dim, 0)
        y = front.new_empty((self.size, *front.shape))
        for columns, pieces in self._pieces(front.reshape(1, -1), "gather"):
            torch.cat(pieces, out=y.view(self.size, -1)[:, columns])
        return y.flatten(0, 1).movedim(0, dim).contiguous()

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of the sum over all ranks."""
        length = part_length(x, dim, self.size)
        front = x.detach().movedim(dim, 0)
        y = front.new_empty((length, *front.shape[1:]))
        flat = y.view(-1)
        for columns, pieces in self._pieces(front.reshape(self.size, -1), "scatter"):
            _reduce([piece[self.rank] for piece in pieces], "sum", flat[columns])
        return y.movedim(0, dim).contiguous()

    def _pieces(self, x: Tensor, what: str) -> Iterator[tuple[slice, list[Tensor]]]:
        """x: [rows, n]. Some columns at a time, and every rank's x[:, columns], by rank."""
        rows, length = x.shape
        width = BUFFER_BYTES // (rows * x.itemsize)
        call = hash((_CALLS.index(what), x.itemsize, rows, length))
        for start in range(0, length, width):
            columns = slice(start, min(start + width, length))
            yield columns, self._buffers.exchange(x[:, columns], self._ranks, call)
            self._buffers.done()


def _reduce(terms: Sequence[Tensor], op: Reduction, out: Tensor) -> None:
    """Write the reduction of `terms`, from the first to the last, to `out`."""
    combine = torch.add if op == "sum" else torch.maximum
    out.copy_(terms[0])
    for term in terms[1:]:
        combine(out, term, out=out)
