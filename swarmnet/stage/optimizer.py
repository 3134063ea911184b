"""The optimizer step on a finished sum: average, clip, AdamW (arXiv:1711.05101).

Everything is elementwise and per parameter, so the bits of an update do not depend on which other parameters share the
stage. Weight decay falls on matrices only. Learning rate and gradient scale come from `stage.schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from swarmnet.manifest.schema import Numerics, Optimizer
from swarmnet.stage.accumulator import chunk_elements

MOMENTS = ("exp_avg", "exp_avg_sq")


class StageOptimizer:
    """AdamW over named parameters, its state laid out from the start so that a snapshot of version 0 is complete."""

    def __init__(self, parameters: Sequence[nn.Parameter], table: Optimizer) -> None:
        self._parameters = list(parameters)
        groups = [
            {"params": [p for p in self._parameters if p.ndim >= 2], "weight_decay": table.weight_decay},
            {"params": [p for p in self._parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._adamw = (
            torch.optim.AdamW(
                groups, lr=table.learning_rate, betas=(table.beta1, table.beta2), eps=table.eps, fused=True
            )
            if groups
            else None
        )
        self.reset()

    def reset(self) -> None:
        """Back to version 0: no moments, no steps."""
        if self._adamw is None:
            return
        for parameter in self._parameters:
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS},
            }

    def moments(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        """First and second moment of one parameter, the live tensors."""
        assert self._adamw is not None
        state = self._adamw.state[parameter]
        return state["exp_avg"], state["exp_avg_sq"]

    def set_num_steps(self, steps: int) -> None:
        """How many steps the moments have seen (bias correction)."""
        for parameter in self._parameters:
            assert self._adamw is not None
            self._adamw.state[parameter]["step"].fill_(float(steps))

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], *, learning_rate: float) -> None:
        """Update every parameter in place. gradients: fp32, averaged and clipped, in the parameters' order."""
        if self._adamw is None:
            return
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._adamw.step()
        for parameter in self._parameters:
            parameter.grad = None


def average(total: Tensor, out: Tensor, *, scale: float, numerics: Numerics) -> None:
    """Write `total` (a flat piece of a sum) times `scale` to `out` (fp32): the one division by tokens.

    A fixed-point sum passes through fp64, rounded to fp32 once at the end.
    """
    if numerics.mode == "fp32":
        torch.mul(total, scale, out=out)
        return
    unit = scale * 2.0**-numerics.grid_bits
    size = chunk_elements(total.device)
    for piece, part in zip(torch.split(total, size), torch.split(out, size), strict=True):
        part.copy_(piece.to(torch.float64) * unit)


def square_norm(total: Tensor, *, numerics: Numerics) -> float:
    """Squared L2 norm, fp64, of one parameter's piece of a sum, in the gradient's own unit."""
    unit = 2.0**-numerics.grid_bits if numerics.mode == "deterministic" else 1.0
    squares = 0.0
    for piece in torch.split(total, chunk_elements(total.device)):
        squares += (piece.to(torch.float64) * unit).square_().sum().item()
    return squares
