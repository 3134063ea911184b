"""Memory that the peer process and its ranks have in common: how tensors cross between them.

Anonymous: a memfd. It has no entry in /dev/shm or anywhere else, so nothing is left to clean up, however the processes
end. The peer process makes it and sends the descriptor to each rank (`ranks.line`), which maps it again. Knows nothing
of what is in it.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch
from torch import Tensor


class SharedMemory:
    """`num_bytes` bytes of zeros, seen by the peer process and all its ranks. Pages take memory once written."""

    def __init__(self, number: int, num_bytes: int) -> None:
        """Raises ValueError without a byte, OSError if the system gives none."""
        if num_bytes < 1:
            raise ValueError(f"shared memory of {num_bytes} bytes")
        self.id, self.num_bytes = number, num_bytes
        self.descriptor = anonymous_file("swarmnet", num_bytes)
        try:
            self.bytes = mapped(self.descriptor)
        except BaseException:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        """Let go of it. The memory goes back once no tensor over `bytes` is left and no rank lives."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            del self.bytes


def anonymous_file(name: str, num_bytes: int = 0) -> int:
    """A new descriptor of a file in memory that no directory knows. Raises OSError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        # A file cut short under a mapping would end whoever reads there.
        if num_bytes:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def mapped(descriptor: int) -> Tensor:
    """All of an open file as [num_bytes] uint8 on the CPU, shared with whoever else maps it. Raises OSError."""
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)


def pin(memory: Tensor) -> None:
    """Make the copies between a CUDA device and `memory` direct and asynchronous, for this process.

    Raises RuntimeError with CUDA's words, such as a limit on locked memory.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
