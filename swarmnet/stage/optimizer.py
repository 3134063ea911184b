"""The optimizer step on a finished sum: average, clip, AdamW (arXiv:1711.05101), led on if the manifest says so.

With `optimizer.lead` = a the update follows not the first moment m but where it will be in a steps if it goes on as in
the last one, m(t) + a (m(t) - m(t - 1)), both without bias. Nesterov's is about a = beta1. A gradient that is one step
late makes momentum swing; this damps it (arXiv:2505.01099).

Everything is elementwise, and no bit of an update depends on which other elements share the tensor: a rank that holds a
part of a parameter makes of it what one that holds all of it does. Weight decay falls on matrices only. Learning rate
and gradient scale come from `stage.schedule`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import functional
from torch.optim.adamw import adamw

from swarmnet.manifest.schema import Numerics, Optimizer
from swarmnet.stage.accumulator import chunk_elements

MOMENTS = ("exp_avg", "exp_avg_sq")

_VECTOR = 64         # elements: a multiple of what any processor takes at once


class StageOptimizer:
    """AdamW over a list of parameters, its state laid out from the start so that a snapshot of version 0 is complete.

    One set of moments; the weights may rest in several places by turns (see `step`).

    offload: moments and a copy of the newest weights are in host memory, and updates are computed there (ZeRO-Offload,
    arXiv:2101.06840). Whoever changes the weights otherwise says so by `take`.

    Calls torch's function and not its class, whose constructor imports the compiler: a second of CPU per process.
    """

    def __init__(self, parameters: Sequence[Tensor], table: Optimizer, *, offload: bool = False) -> None:
        self._table = table
        self._host = [torch.empty(p.shape, dtype=p.dtype) for p in parameters] if offload else None
        self._parameters = list(parameters) if self._host is None else self._host
        self._moments: list[tuple[Tensor, Tensor]] = []
        self._steps: list[Tensor] = []
        self.reset()
        self.take(parameters)

    def reset(self) -> None:
        """Back to version 0: no moments, no steps."""
        self._moments = [
            (torch.zeros_like(p, requires_grad=False), torch.zeros_like(p, requires_grad=False))
            for p in self._parameters
        ]
        self._steps = [torch.zeros((), dtype=torch.float32, device=p.device) for p in self._parameters]

    @torch.no_grad()
    def take(self, parameters: Sequence[Tensor]) -> None:
        """The newest weights are these now."""
        for copy, parameter in zip(self._host or [], parameters, strict=self._host is not None):
            copy.copy_(parameter)

    def room(self) -> list[Tensor]:
        """Fresh memory for the gradients of a step."""
        return [torch.empty_like(p, requires_grad=False) for p in self._parameters]

    @property
    def moments(self) -> list[tuple[Tensor, Tensor]]:
        """First and second moment of each parameter, the live tensors."""
        return self._moments

    def set_num_steps(self, steps: int) -> None:
        """How many steps the moments have seen (bias correction)."""
        for seen in self._steps:
            seen.fill_(float(steps))

    @torch.no_grad()
    def step(
        self, gradients: Sequence[Tensor], *, learning_rate: float, parameters: Sequence[Tensor] | None = None
    ) -> None:
        """Update every parameter in place. gradients: fp32, averaged and clipped, in the parameters' order, where the
        moments are.

        parameters: where the weights rest this time, of the same shapes in the same order. Offloaded, what they are
        before does not matter.
        """
        weights = self._host or (self._parameters if parameters is None else parameters)
        pairs = list(zip(weights, gradients, strict=True))
        matrices = [place for place, weight in enumerate(weights) if weight.ndim >= 2]
        vectors = [place for place, weight in enumerate(weights) if weight.ndim < 2]
        self._update(pairs, matrices, learning_rate, self._table.weight_decay)
        self._update(pairs, vectors, learning_rate, 0.0)
        if self._table.lead:
            self._lead(pairs, learning_rate)
        if self._host is not None:
            assert parameters is not None
            for parameter, copy in zip(parameters, self._host, strict=True):
                parameter.copy_(copy)
        increment_version(weights)           # the fused kernel does not: who computes on stale weights must notice

    def _update(
        self, pairs: Sequence[tuple[Tensor, Tensor]], places: Sequence[int], learning_rate: float,
        weight_decay: float,
    ) -> None:
        columns = [
            [pairs[place][0] for place in places], [pairs[place][1] for place in places],
            [self._moments[place][0] for place in places], [self._moments[place][1] for place in places],
        ]
        with _whole_vectors(columns, [self._steps[place] for place in places]) as (
            (weights, gradients, firsts, seconds), steps
        ):
            adamw(
                weights, gradients, firsts, seconds, [], steps, fused=True, amsgrad=False, maximize=False,
                beta1=self._table.beta1, beta2=self._table.beta2, lr=learning_rate, weight_decay=weight_decay,
                eps=self._table.eps,
            )

    def _lead(self, pairs: Sequence[tuple[Tensor, Tensor]], learning_rate: float) -> None:
        """Add what is missing to `_update`. Of the first moment before it only this is left: with g the gradient,
        m(t) - m(t - 1) = (1 - beta1) / (beta1 - beta1^t) (g - m(t)), without bias."""
        for place, (weight, gradient) in enumerate(pairs):
            steps = int(self._steps[place].item())
            if steps < 2:
                return
            beta1, size = self._table.beta1, chunk_elements(weight.device)
            factor = -learning_rate * self._table.lead * (1 - beta1) / (beta1 - beta1**steps)
            flat = (weight.view(-1), gradient.view(-1), *(moment.view(-1) for moment in self._moments[place]))
            for part, piece, first, second in zip(*(torch.split(tensor, size) for tensor in flat), strict=True):
                scale = (second / (1 - self._table.beta2**steps)).sqrt_().add_(self._table.eps)
                part.addcdiv_(piece - first / (1 - beta1**steps), scale, value=factor)


@contextlib.contextmanager
def _whole_vectors(
    columns: Sequence[Sequence[Tensor]], steps: Sequence[Tensor]
) -> Iterator[tuple[list[list[Tensor]], list[Tensor]]]:
    """`columns` of tensors, each of a length that is a multiple of `_VECTOR`, in place of `columns` and `steps`.

    torch's kernel for CPUs treats what remains at the end of a tensor by other code, which rounds in another order. So
    ends are padded and written back: how an element is rounded does not depend on where its tensor was cut.
    """
    if not steps or steps[0].device.type != "cpu":
        yield [list(column) for column in columns], list(steps)
        return
    rows: list[list[Tensor]] = []
    counts, ends = [], []
    for own, count in zip(zip(*columns, strict=True), steps, strict=True):
        flat = [tensor.view(-1) for tensor in own]
        size = flat[0].numel()
        even = size - size % _VECTOR
        if not size:
            count += 1
        if even:
            rows.append([tensor[:even] for tensor in flat])
            counts.append(count)
        if even < size:
            end = [tensor[even:] for tensor in flat]
            padded = [functional.pad(tensor, (0, _VECTOR - tensor.numel())) for tensor in end]
            rows.append(padded)
            counts.append(count.clone() if even else count)      # each is counted up once
            ends.append((end, padded))
    yield [list(column) for column in zip(*rows, strict=True)] or [[] for _ in columns], counts
    for end, padded in ends:
        for tensor, new in zip(end, padded, strict=True):
            tensor.copy_(new[: tensor.numel()])


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
        wide = piece.to(torch.float64)
        squares += (wide if unit == 1.0 else wide.mul_(unit)).square_().sum().item()
    return squares
