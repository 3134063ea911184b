"""Memory that the peer process and its ranks have in common: how tensors cross between them.

Anonymous: a memfd. It has no entry in /dev/shm or anywhere else, so nothing is left to clean up, however the processes
end. The peer process makes it and sends the descriptor to each rank (`ranks.channel`), which maps it again. Knows
nothing of what is in it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swarmnet import telemetry

log = telemetry.get(__name__)

Place = tuple[Sequence[int], str]
"""Shape of a tensor and torch's name of its dtype: JSON."""


class SharedMemory:
    """Named places of zeros in one file, seen by the peer process and all its ranks. Pages take memory once written.

    Args:
        places: the tensor in each. The same in every process that maps the file.
        descriptor: of the file, ours to close; None: a new one.
    """

    def __init__(self, places: Mapping[str, Place], descriptor: int | None = None) -> None:
        """Raises ValueError for a tensor without a byte, OSError if the system gives no memory."""
        sizes = [math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in places.values()]
        if min(sizes, default=1) < 1:
            raise ValueError(f"shared memory of {dict(places)}")
        # CUDA pins whole pages.
        pages = (-(-num_bytes // mmap.PAGESIZE) for num_bytes in sizes)
        ends = [mmap.PAGESIZE * end for end in itertools.accumulate(pages)]
        num_bytes = max(ends, default=mmap.PAGESIZE)  # no mapping is empty
        self.descriptor = anonymous_file("swarmnet", num_bytes) if descriptor is None else descriptor
        try:
            whole = torch.frombuffer(mmap.mmap(self.descriptor, num_bytes), dtype=torch.uint8)
        except BaseException:
            self.close()
            raise
        starts = zip(places.items(), sizes, [0, *ends], strict=False)
        self.places = {
            name: whole[start : start + size].view(getattr(torch, dtype)).view(*shape)
            for (name, (shape, dtype)), size, start in starts
        }
        """The tensor in each, on the CPU."""

    def close(self) -> None:
        """Close the file. The memory is freed once no tensor over it is left and no rank lives."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self.places = {}


def anonymous_file(name: str, num_bytes: int = 0) -> int:
    """A new descriptor of a file in memory that no directory knows. Raises OSError."""
    descriptor = os.memfd_create(name)
    try:
        os.ftruncate(descriptor, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def pin(memory: Tensor) -> bool:
    """Make the copies between a CUDA device and `memory` direct, for this process: exactly these bytes, where they are.

    False, and a line in the log, if CUDA refuses, as where a limit is set on locked memory: copies are slower then.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    except RuntimeError as error:
        _forget_error()
        log.warning("not_pinned", num_bytes=memory.nbytes, reason=str(error), then="copies to the GPU take longer")
        return False
    return True


def host_memory(size: int, dtype: torch.dtype, *, device: torch.device, owner: object) -> Tensor:
    """Zeros [size] on the CPU, pinned for copies to `device` if that is a GPU, until `owner` is gone."""
    memory = torch.zeros(size, dtype=dtype)
    # Not by torch, which takes the next power of two.
    if device.type == "cuda":
        with torch.cuda.device(device):
            pinned = pin(memory)
        if pinned:
            weakref.finalize(owner, unpin, memory).atexit = False
    return memory


def unpin(memory: Tensor) -> None:
    """Undo `pin`: before the memory is freed."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(memory.data_ptr())


def _forget_error() -> None:
    """CUDA remembers its last error for the next kernel to report, which is this one."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
