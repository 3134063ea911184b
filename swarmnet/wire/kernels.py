"""The kernels of kernels.cpp, where this process has them: one pass over memory instead of several of torch's.

A kernel's result has the bits of the reference, which is what a codec does without it. `wire.kernel_build` compiles and
checks them; until then, and where there is no compiler, `of` finds none. Python lets go of the interpreter meanwhile,
and what is large enough is cut among `Kernels.threads`. torch is imported on the first tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PROTOTYPES = {
    "int8_encode": "i:pippi",
    "int8_decode": "i:ppipi",
    "small_encode": "i:pipi",
    "small_join": ":ppi",
    "small_decode": "i:piipipi",
    "shorten": "i:pip",
    "squares_of_floats": "d:pid",
    "squares_of_doubles": "d:pid",
    "squares_of_integers": "d:pid",
    "linear": "i:piippi",
    "largest": "u:pi",
    "fine_add": ":pifpi",
    "small_add": ":piipppiifpi",
    "small_add_narrow": ":piipppiifpi",
    "small_values": ":piippfp",
    "squares_by": ":piiiipp",
    "adamw": ":ppppipi",
}
"""Of kernels.cpp: result, then arguments."""

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "u": ctypes.c_uint32, "f": ctypes.c_float, "d": ctypes.c_double}

_FINE, _REFUSED, _OVERFLOWN = range(3)
_WORTH_A_THREAD = 1 << 17
"""Elements that keep a thread busy longer than starting it takes."""


class Unfit(Exception):
    """The bytes are no encoding, or the numbers cannot be encoded: the reference says why."""


class Overflown(Exception):
    """A sum would leave int64."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """A loaded library. threads: at most, in a call other than an update's.

    Tensors are contiguous and on the CPU.
    """

    library: ctypes.CDLL
    threads: int

    def int8_encode(self, x_N: torch.Tensor, scales_B: torch.Tensor, codes_N: torch.Tensor) -> None:
        """Raises Unfit: an element is not finite."""
        size = x_N.numel()
        _raise(self.library.int8_encode(_at(x_N), size, _at(scales_B), _at(codes_N), self._threads(size)))

    def int8_decode(self, scales_B: torch.Tensor, codes_N: torch.Tensor, out_N: torch.Tensor) -> None:
        """Raises Unfit; nothing is written then."""
        size = out_N.numel()
        _raise(self.library.int8_decode(_at(scales_B), _at(codes_N), size, _at(out_N), self._threads(size)))

    def small_encode(self, x_N: torch.Tensor) -> torch.Tensor:
        """uint8, as long as the numbers need."""
        import torch

        threads = self._threads(x_N.numel())
        ends = (ctypes.c_int64 * (4 * threads))()
        whole = self.library.small_encode(_at(x_N), x_N.numel(), ends, threads)
        out = torch.empty(whole, dtype=torch.uint8)
        self.library.small_join(ends, _at(out), threads)
        return out

    def small_decode(self, data: torch.Tensor, out_N: torch.Tensor, *, add: bool) -> int:
        """Returns the largest magnitude decoded. Raises Unfit, Overflown; `out_N` is as it was then."""
        extremes, size = (ctypes.c_int64 * 2)(), out_N.numel()
        args = _at(data), data.numel(), size, _at(out_N), add, extremes
        _raise(self.library.small_decode(*args, self._threads(size)))
        return max(extremes[1], -extremes[0]) if size else 0

    def short(self, x_N: torch.Tensor) -> torch.Tensor | None:
        """int64 as int16; None: some do not fit."""
        import torch

        out = torch.empty(x_N.numel(), dtype=torch.int16)
        return None if self.library.shorten(_at(x_N), x_N.numel(), _at(out)) else out

    def squares(self, x_N: torch.Tensor, unit: float) -> float:
        """The sum of squares in fp64, of fp32, fp64 or int64 in that unit."""
        kind = {"torch.float32": "floats", "torch.float64": "doubles", "torch.int64": "integers"}[str(x_N.dtype)]
        found: float = getattr(self.library, f"squares_of_{kind}")(_at(x_N), x_N.numel(), unit)
        return found

    def linear(self, x_N: torch.Tensor, start: int, rows: torch.Tensor, columns: torch.Tensor) -> int:
        """The product of int64 elements from position `start` on with a vector of `sums.linear`, modulo 2^61 - 1."""
        size = x_N.numel()
        found: int = self.library.linear(_at(x_N), size, start, _at(rows), _at(columns), self._threads(size))
        return found

    def largest(self, tensors: Sequence[torch.Tensor]) -> float:
        """The largest magnitude of some of fp32; NaN if there is one; 0 of nothing."""
        bits = max((self.library.largest(_at(each), each.numel()) for each in tensors), default=0)
        return float(struct.unpack("<f", struct.pack("<I", bits))[0])

    def fine_add(self, x_N: torch.Tensor, total_N: torch.Tensor, *, bits: int) -> None:
        """Add multiples of 2^-bits."""
        size = x_N.numel()
        self.library.fine_add(_at(x_N), size, 2.0**bits, _at(total_N), self._threads(size))

    def small_add(
        self,
        x_RC: torch.Tensor,
        total_RC: torch.Tensor,
        per_row_R: torch.Tensor,
        per_column_C: torch.Tensor,
        dither: torch.Tensor,
        *,
        at: int,
        apart: int,
        limit: int,
    ) -> None:
        """Add multiples of the small grid to int64 or int32. dither: a row's begins at entry `at`, and the next row's
        `apart` further."""
        rows, columns = per_row_R.numel(), per_column_C.numel()
        scales = _at(per_row_R), _at(per_column_C), _at(dither)
        add = self.library.small_add if total_RC.element_size() == 8 else self.library.small_add_narrow
        add(_at(x_RC), rows, columns, *scales, at, apart, limit, _at(total_RC), self._threads(rows * columns))

    def small_values(
        self, total_RC: torch.Tensor, by_row_R: torch.Tensor, by_column_C: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        """What a small sum stands for, times `scale`."""
        shape = by_row_R.numel(), by_column_C.numel()
        self.library.small_values(_at(total_RC), *shape, _at(by_row_R), _at(by_column_C), scale, _at(out))

    def squares_by(
        self, total_RC: torch.Tensor, by_row_R: torch.Tensor, by_column_C: torch.Tensor, *, shift: int, most: int
    ) -> None:
        """Sums of squares of `total` >> shift, cut to +-most: over rows, and over columns, which are added to."""
        shape = by_row_R.numel(), by_column_C.numel()
        self.library.squares_by(_at(total_RC), *shape, shift, most, _at(by_row_R), _at(by_column_C))

    def adamw(
        self, w_N: torch.Tensor, g_N: torch.Tensor, m_N: torch.Tensor, v_N: torch.Tensor, numbers: Sequence[float]
    ) -> None:
        """One update, by as many threads as torch has here. numbers: the fields of `Update`."""
        size = w_N.numel()
        import torch

        by = (ctypes.c_float * 9)(*numbers)
        torch.autograd.graph.increment_version([w_N, m_N, v_N])  # who keeps a cast of the weights asks for it
        # Updates in host memory have more of them than all else (`ranks.stage`).
        threads = self._threads(size, most=torch.get_num_threads())
        self.library.adamw(_at(w_N), _at(g_N), _at(m_N), _at(v_N), size, by, threads)

    def _threads(self, size: int, *, most: int = 0) -> int:
        return max(1, min(most or self.threads, size // _WORTH_A_THREAD))


def load(path: str, *, threads: int) -> Kernels:
    """The library in that file. Raises OSError, AttributeError: it is none of ours."""
    library = ctypes.CDLL(path)
    for name, prototype in _PROTOTYPES.items():
        result, arguments = prototype.split(":")
        function = getattr(library, name)
        function.restype, function.argtypes = _TYPES.get(result), [_TYPES[each] for each in arguments]
    return Kernels(library, threads)


_used: Kernels | None = None
_override: ContextVar[Kernels | None] = ContextVar("override")  # of this thread or task alone


def use(kernels: Kernels | None) -> None:
    """From now on, in the whole process."""
    global _used
    _used = kernels


def used() -> Kernels | None:
    """What this process uses; None: the reference."""
    return _used


@contextlib.contextmanager
def tried(kernels: Kernels | None) -> Iterator[None]:
    """Use these, or with None the reference, in this thread alone: for comparing the two."""
    token = _override.set(kernels)
    try:
        yield
    finally:
        _override.reset(token)


def of(*tensors: torch.Tensor) -> Kernels | None:
    """The kernels for these tensors; None: take the reference."""
    usable = all(each.device.type == "cpu" and each.is_contiguous() for each in tensors)
    return _override.get(_used) if usable else None


def _at(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _raise(status: int) -> None:
    if status == _REFUSED:
        raise Unfit
    if status == _OVERFLOWN:
        raise Overflown
