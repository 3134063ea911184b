"""The weight pass of one microbatch on a device: one gradient for each parameter.

Gradients are computed into scratch memory whose pieces start on 64-byte boundaries: matrix kernels pick their
summation order by alignment, so a parameter's gradient must not depend on what precedes it in the stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from swarmnet.model.split import Tape

_ALIGN = 16  # fp32 elements

Places = Mapping[Parameter, int]
"""The number of each parameter in canonical order; of all modules that take turns."""


def aligned(shapes: Sequence[torch.Size], device: torch.device) -> list[Tensor]:
    """One buffer, cut into contiguous fp32 tensors of these shapes, each on a 64-byte boundary."""
    # Each start is rounded up to the next boundary; the last one is the length of the buffer.
    starts = [0, *itertools.accumulate(-(-shape.numel() // _ALIGN) * _ALIGN for shape in shapes)]
    buffer = torch.zeros(starts[-1], dtype=torch.float32, device=device)
    return [buffer[start : start + shape.numel()].view(shape) for start, shape in zip(starts, shapes, strict=False)]


class WholeGradients:
    """Gradients of every parameter as this device has it; no collective. `scratch` is free between weight passes."""

    def __init__(
        self, places: Places, shapes: Sequence[torch.Size], device: torch.device, *, scratch: list[Tensor] | None = None
    ) -> None:
        """scratch: of another's, which runs in the same thread."""
        self._places, self.scratch = places, aligned(shapes, device) if scratch is None else scratch

    def of(self, tape: Tape) -> list[Tensor]:
        """Run the weight pass: one fp32 gradient per parameter, valid until the next call."""
        # Written over the last microbatch's: nothing is zeroed in between.
        written = tape.weight_pass(lambda parameter: self.scratch[self._places[parameter]])
        check_all_written(len(written), len(self.scratch))
        return self.scratch


def check_all_written(written: int, expected: int) -> None:
    """Raises ValueError: a parameter without a gradient would keep the last microbatch's."""
    if written != expected:
        raise ValueError(f"a weight pass wrote {written} of {expected} parameters")
