"""The kernels of kernels.cpp, where this process has them: one pass over memory in place of several of torch's.

A kernel's result has the bits of the reference, which is what a codec does without it. `wire.kernel_build` compiles and
checks them; until then, and where there is no compiler, `of` finds none. Python lets go of the interpreter meanwhile,
and what is large enough is cut among `Kernels.threads`. torch is imported on the first tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Family = Literal["int8", "int64", "small", "squares"]
FAMILIES: tuple[Family, ...] = ("int8", "int64", "small", "squares")
"""What is checked, and used, together."""

_FINE, _REFUSED, _OVERFLOWN = range(3)
_WORTH_A_THREAD = 1 << 17
"""Elements that keep a thread busy longer than starting it takes."""


class Unfit(Exception):
    """The bytes are no encoding, or the numbers cannot be encoded: the reference says why."""


class Overflown(Exception):
    """A sum would leave int64."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """A loaded library. families: whose results have been compared with the reference's. threads: at most, in a call.

    Tensors are contiguous and on the CPU.
    """

    library: ctypes.CDLL
    families: frozenset[Family]
    threads: int

    def int8_encode(self, x_N: torch.Tensor, scales_B: torch.Tensor, codes_N: torch.Tensor) -> None:
        """Raises Unfit: an element is not finite."""
        size = x_N.numel()
        _raise(self.library.int8_encode(_at(x_N), _number(size), _at(scales_B), _at(codes_N), self._threads(size)))

    def int8_decode(self, scales_B: torch.Tensor, codes_N: torch.Tensor, out_N: torch.Tensor, *, add: bool) -> None:
        """Raises Unfit; nothing is written then."""
        size = out_N.numel()
        args = _at(scales_B), _at(codes_N), _number(size), _at(out_N), _number(add), self._threads(size)
        _raise(self.library.int8_decode(*args))

    def int64_decode(self, x_N: torch.Tensor, out_N: torch.Tensor, *, add: bool) -> int:
        """Returns the largest magnitude in `x_N`. Raises Overflown; `out_N` is as it was then."""
        extremes, size = (ctypes.c_int64 * 2)(), out_N.numel()
        args = _at(x_N), _number(size), _at(out_N), _number(add), extremes, self._threads(size)
        _raise(self.library.int64_decode(*args))
        return max(extremes[1], -extremes[0]) if size else 0

    def small_encode(self, x_N: torch.Tensor) -> torch.Tensor:
        """uint8, as long as the numbers need."""
        import torch

        size, threads = _number(x_N.numel()), self._threads(x_N.numel())
        scratch = torch.empty(self.library.small_scratch(size), dtype=torch.uint8)
        ends = (ctypes.c_int64 * (4 * threads.value))()
        whole = self.library.small_encode(_at(x_N), size, _at(scratch), ends, threads)
        out = torch.empty(whole, dtype=torch.uint8)
        self.library.small_join(_at(scratch), ends, _at(out), threads)
        return out

    def small_decode(self, data: torch.Tensor, out_N: torch.Tensor, *, add: bool) -> int:
        """Returns the largest magnitude decoded. Raises Unfit, Overflown; `out_N` is as it was then."""
        extremes, size = (ctypes.c_int64 * 2)(), out_N.numel()
        args = _at(data), _number(data.numel()), _number(size), _at(out_N), _number(add), extremes
        _raise(self.library.small_decode(*args, self._threads(size)))
        return max(extremes[1], -extremes[0]) if size else 0

    def squares(self, x_N: torch.Tensor) -> float:
        """The sum of squares in fp64, of fp32 or fp64."""
        found: float = (self.library.squares_of_floats if x_N.element_size() == 4 else self.library.squares_of_doubles)(
            _at(x_N), _number(x_N.numel())
        )
        return found

    def _threads(self, size: int) -> ctypes.c_int64:
        return _number(max(1, min(self.threads, size // _WORTH_A_THREAD)))


def load(path: str, families: frozenset[Family], *, threads: int) -> Kernels:
    """The library in that file. Raises OSError, AttributeError: it is none of ours."""
    library = ctypes.CDLL(path)
    for name in ("int8_encode", "int8_decode", "int64_decode", "small_scratch", "small_encode", "small_decode"):
        getattr(library, name).restype = ctypes.c_int64
    library.small_join.restype = None
    library.squares_of_floats.restype = library.squares_of_doubles.restype = ctypes.c_double
    return Kernels(library, families, threads)


_used: Kernels | None = None
_trial: ContextVar[Kernels | None] = ContextVar("trial")  # of this thread or task alone


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
    token = _trial.set(kernels)
    try:
        yield
    finally:
        _trial.reset(token)


def of(family: Family, *tensors: torch.Tensor) -> Kernels | None:
    """The kernels of that family for these tensors; None: take the reference."""
    found = _trial.get(_used)
    if found is None or family not in found.families:
        return None
    usable = all(each.device.type == "cpu" and each.is_contiguous() for each in tensors)
    return found if usable else None


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _number(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def _raise(status: int) -> None:
    if status == _REFUSED:
        raise Unfit
    if status == _OVERFLOWN:
        raise Overflown
