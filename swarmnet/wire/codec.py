"""What a codec is: flat tensors to bytes and back, with a stated error. And how large a tensor may be at all.

Everything here works without torch, which is imported on the first tensor. A codec knows neither shapes nor peers;
`wire.codecs` finds it by name and gives it flat tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from swarmnet.errors import BadMessage, RejectCode

if TYPE_CHECKING:
    import torch

MAX_RANK = 8
MAX_BLOCK = 1 << 16
MAX_ELEMENTS = 1 << 40
"""More than any tensor we know how to send; framing applies the run's own, far lower limit in bytes."""


class Codec(Protocol):
    """One way to write a flat tensor of N elements.

    name: as the manifest and `Packed.codec` spell it, with its parameter.
    dtype: "float32" (takes any float dtype, gives fp32), or exactly "int64", "int32", "uint8".
    reduced: name of the codec in which a sum of tensors under this one travels; mostly its own.
    feedback: what it loses is too much to forget; send it later (`sums.sum_codec`).
    block: elements that share a scale or the like, a power of two and at most `MAX_BLOCK`: pieces that begin at its
    multiples decode to what the whole would. 1 where every element is by itself.
    """

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def reduced(self) -> str: ...
    @property
    def feedback(self) -> bool: ...
    @property
    def block(self) -> int: ...

    def sizes(self, num_elements: int) -> tuple[int, int]:
        """Shortest and longest encoding in bytes: equal for most codecs. Arithmetic only, no torch."""
        ...

    def check(self, data: np.ndarray[Any, Any], num_elements: int) -> None:
        """Raise BadMessage (MALFORMED, NON_FINITE) unless these bytes, uint8 and of an allowed length, decode.

        Looks at the encoded bytes only; no torch.
        """
        ...

    def encode(self, x_N: torch.Tensor) -> torch.Tensor:
        """Contiguous memory of the encoding, of any dtype, maybe x_N's own. Raises BadMessage(NON_FINITE)."""
        ...

    def decode(self, data: torch.Tensor, out_N: torch.Tensor) -> None:
        """Decode over `out_N` (its `dtype`): data uint8 [bytes], on the CPU, aligned to 8 bytes.

        Raises what `check` raises. Every operation an elementwise IEEE one, so that all machines decode the same bits.
        """
        ...

    def bound(self, x_N: torch.Tensor) -> torch.Tensor:
        """The largest |decoded - x| the codec may leave in each element of fp32 `x_N`: fp64 [N]."""
        ...


def num_elements(shape: Sequence[int]) -> int:
    """Elements of `shape`. Raises BadMessage: BAD_SHAPE (rank, negative, not an integer), TOO_LARGE."""
    # Shapes come from peers: bounded before anything is computed of them.
    if len(shape) > MAX_RANK:
        raise BadMessage(RejectCode.BAD_SHAPE, "too many dimensions", rank=len(shape), max_rank=MAX_RANK)
    extent = 1
    for size in shape:
        # A bool is an int to Python, and numpy's integers overflow.
        if type(size) is not int or size < 0:
            raise BadMessage(RejectCode.BAD_SHAPE, "dimensions must be integers >= 0", shape=tuple(shape))
        extent *= max(size, 1)  # (0, 2^60) holds nothing, yet its strides overflow
        if extent > MAX_ELEMENTS:
            raise BadMessage(RejectCode.TOO_LARGE, "too many elements", max_elements=MAX_ELEMENTS)
    return math.prod(shape)


def is_finite(tensor: torch.Tensor) -> bool:
    """True if no element is NaN or infinite. One reading pass: a sum is finite only if all its terms are."""
    import torch

    if math.isfinite(tensor.sum().item()):
        return True
    return bool(torch.isfinite(tensor).all())  # or finite terms overflowed


def check_finite(tensor: torch.Tensor) -> None:
    """Raise BadMessage(NON_FINITE) if any element is NaN or infinite."""
    if not is_finite(tensor):
        raise non_finite(tuple(tensor.shape))


def non_finite(shape: Sequence[int] = ()) -> BadMessage:
    """The refusal of a NaN or an infinity."""
    return BadMessage(RejectCode.NON_FINITE, "NaN or infinity in a tensor", shape=tuple(shape))


def malformed(reason: str, **facts: object) -> BadMessage:
    """The refusal of bytes no encoder writes."""
    return BadMessage(RejectCode.MALFORMED, reason, **facts)


def fp32(x_N: torch.Tensor) -> torch.Tensor:
    """Any float tensor as contiguous fp32, copied only where it must be."""
    import torch

    return x_N.to(torch.float32).contiguous()


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: uint8, on the CPU. Copies only from a device."""
    import torch

    return tensor.cpu().as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # stride 1 also for 0 or 1 elements
