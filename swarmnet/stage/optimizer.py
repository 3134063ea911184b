"""The optimizer step on a finished sum: average, clip, AdamW (arXiv:1711.05101).

Everything is elementwise and per parameter, so the bits of an update do not depend on which other parameters share the
stage. Weight decay falls on matrices only. Learning rate and gradient scale come from `stage.schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from swarmnet.manifest.schema import Numerics, Optimizer
from swarmnet.stage.accumulator import chunk_elements

MOMENTS = ("exp_avg", "exp_avg_sq")


class StageOptimizer:
    """AdamW over named parameters, its state laid out from the start so that a snapshot of version 0 is complete.

    Calls torch's function and not its class, whose constructor imports the compiler: a second of CPU per process.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], table: Optimizer) -> None:
        self._parameters, self._table = list(parameters), table
        self._moments: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        self._steps: dict[nn.Parameter, Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Back to version 0: no moments, no steps."""
        for parameter in self._parameters:
            self._moments[parameter] = (
                torch.zeros_like(parameter, requires_grad=False), torch.zeros_like(parameter, requires_grad=False)
            )
            self._steps[parameter] = torch.zeros((), dtype=torch.float32, device=parameter.device)

    def moments(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        """First and second moment of one parameter, the live tensors."""
        return self._moments[parameter]

    def set_num_steps(self, steps: int) -> None:
        """How many steps the moments have seen (bias correction)."""
        for seen in self._steps.values():
            seen.fill_(float(steps))

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], *, learning_rate: float) -> None:
        """Update every parameter in place. gradients: fp32, averaged and clipped, in the parameters' order."""
        pairs = list(zip(self._parameters, gradients, strict=True))
        self._update([pair for pair in pairs if pair[0].ndim >= 2], learning_rate, self._table.weight_decay)
        self._update([pair for pair in pairs if pair[0].ndim < 2], learning_rate, 0.0)

    def _update(self, pairs: Sequence[tuple[nn.Parameter, Tensor]], learning_rate: float, weight_decay: float) -> None:
        parameters = [parameter for parameter, _ in pairs]
        firsts, seconds = ([self._moments[p][number] for p in parameters] for number in (0, 1))
        adamw(
            list(parameters), [gradient for _, gradient in pairs], firsts, seconds, [],
            [self._steps[p] for p in parameters], fused=True, amsgrad=False, maximize=False,
            beta1=self._table.beta1, beta2=self._table.beta2, lr=learning_rate, weight_decay=weight_decay,
            eps=self._table.eps,
        )


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
