"""Codecs that are a dtype's own memory: fp32, bf16, and the exact integers.

fp32                  exact
bf16                  round to nearest even: |x' - x| <= 2^-8 |x| + 2^-134; beyond its range its largest value
int64, int32, uint8   exact
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from swarmnet.wire.codec import check_finite, is_finite, non_finite

if TYPE_CHECKING:
    import torch

_BF16_EXPONENT = 0x7F80


@dataclass(frozen=True, slots=True)
class Cast:
    """stored: the torch dtype on the wire. width: its bytes."""

    name: str
    dtype: str
    stored: str
    width: int
    feedback: bool = False
    block: int = 1

    @property
    def reduced(self) -> str:
        """Sums travel alike."""
        return self.name

    def sizes(self, num_elements: int) -> tuple[int, int]:
        """Always the same."""
        return self.width * num_elements, self.width * num_elements

    def check(self, data: np.ndarray[Any, Any], num_elements: int) -> None:
        """NON_FINITE for floats; any integer is one."""
        if self.name == "fp32":
            finite = np.isfinite(data.view("<f4"))
        elif self.name == "bf16":
            finite = (data.view("<u2") & _BF16_EXPONENT) != _BF16_EXPONENT
        else:
            return
        if not bool(finite.all()):
            raise non_finite((num_elements,))

    def encode(self, x_N: torch.Tensor) -> torch.Tensor:
        """The tensor's own memory where it is of the dtype already."""
        import torch

        stored: torch.dtype = getattr(torch, self.stored)
        encoded = x_N.to(stored).contiguous()
        # Rounding to bf16 may carry a finite number beyond its range: that becomes the largest one.
        if stored.is_floating_point and not is_finite(encoded):
            check_finite(x_N)
            largest = torch.finfo(stored).max
            encoded = x_N.clamp(-largest, largest).to(stored).contiguous()
        return encoded

    def decode(self, data: torch.Tensor, out_N: torch.Tensor) -> None:
        """bf16 widens inside the copy."""
        import torch

        out_N.copy_(data.view(getattr(torch, self.stored)))
        if out_N.is_floating_point():
            check_finite(out_N)

    def bound(self, x_N: torch.Tensor) -> torch.Tensor:
        """The error bound that the module's docstring states."""
        size = x_N.double().abs()
        return size * 2**-8 + 2**-134 if self.name == "bf16" else size * 0


CASTS = (
    Cast("fp32", "float32", "float32", 4),
    Cast("bf16", "float32", "bfloat16", 2),
    Cast("int64", "int64", "int64", 8),
    Cast("int32", "int32", "int32", 4),
    Cast("uint8", "uint8", "uint8", 1),
)
