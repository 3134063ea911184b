"""In which precision matrix products and attention take their operands; everything else is fp32.

"bf16" (arXiv:1905.12322): weights, gradients and optimizer state stay fp32, and so do norms, rotation, residuals and
the loss. Every product says itself what it casts (`operand`); torch's autocast state is what carries the choice there,
since a recomputation restores it. Knows no model.
"""

from __future__ import annotations

import contextlib
from typing import Literal

import torch
from torch import Tensor

Compute = Literal["fp32", "bf16"]


def products_in(compute: Compute, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Within it, products on `device` are computed so. Backward needs none: it goes by what forward has done."""
    if compute == "fp32":
        return contextlib.nullcontext()
    # without torch's cache: `split.Casts` keeps casts of weights, from one microbatch to the next
    return torch.autocast(_kind(device), dtype=torch.bfloat16, cache_enabled=False)


def operand_dtype(device: torch.device) -> torch.dtype | None:
    """What products on `device` take; None: whatever they are given."""
    kind = _kind(device)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def operand(x: Tensor) -> Tensor:
    """`x` as products take it. Where several read it, cast once."""
    dtype = operand_dtype(x.device)
    return x if dtype is None else x.to(dtype)


def _kind(device: torch.device) -> str:
    return "cuda" if device.type == "cuda" else "cpu"
