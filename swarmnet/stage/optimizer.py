"""The optimizer step on a finished sum: average, clip, AdamW (arXiv:1711.05101), led on if the manifest says so.

Another distribution may bring an update rule of its own in AdamW's place (`UpdateRule`).

With `optimizer.lead` = a the update follows not the first moment m but where it will be in a steps if it goes on as in
the last one, m(t) + a (m(t) - m(t - 1)), both without bias. Nesterov's is about a = beta1. A gradient that is one step
late makes momentum swing; this damps it (arXiv:2505.01099).

With fp32 moments everything is elementwise, and no bit of an update depends on which other elements share the tensor: a
rank that holds a part of a parameter makes of it what one that holds all of it does. With 8-bit moments that holds for
one update, and then moments are rounded in blocks of what the rank holds, so other parts round otherwise. Weight decay
falls on matrices only. Learning rate and gradient scale come from `stage.canonical`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import functional
from torch.optim.adamw import adamw

from swarmnet.config import plug_in
from swarmnet.manifest.schema import Numerics, Optimizer
from swarmnet.stage.accumulator import chunk_elements
from swarmnet.stage.optimizer_8bit import LEAST, PackedMoments

MOMENTS = ("exp_avg", "exp_avg_sq")

_VECTOR = 64  # elements: a multiple of what any processor takes at once


class UpdateRule(Protocol):
    """What an optimizer does to one list of tensors: the arithmetic alone. State, snapshots and ranks are ours."""

    def __call__(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        firsts: Sequence[Tensor],
        seconds: Sequence[Tensor],
        *,
        step: int,
        learning_rate: float,
        weight_decay: float,
        table: Optimizer,
    ) -> None:
        """Update `weights`, `firsts` and `seconds` in place, fp32, place by place of the same shapes.

        Elementwise: tensors are parts of parameters, cut anywhere, and some end in padding.

        Args:
            gradients: averaged and clipped. May be overwritten.
            firsts, seconds: what is remembered of each weight, two numbers; both 0 before the first step.
            step: 1 in the first step.
            weight_decay: decoupled, 0 for all but matrices.
            table: `[optimizer]` of the manifest.
        """


def update_rule_of(table: Optimizer) -> UpdateRule | None:
    """The run's update rule; None for AdamW.

    Raises: UsageError if no installed distribution brings it.
    """
    if table.name == "adamw":
        return None
    rule: UpdateRule = plug_in.load("optimizer", table.name, field="optimizer.name")[0]
    return rule


class WholeMoments:
    """Both moments of one parameter in fp32."""

    def __init__(self, like: Tensor) -> None:
        self._first, self._second = (torch.zeros_like(like, requires_grad=False) for _ in range(2))

    @property
    def num_bytes(self) -> int:
        """Memory."""
        return self._first.nbytes + self._second.nbytes

    def read(self) -> tuple[Tensor, Tensor]:
        """The live tensors."""
        return self._first, self._second

    def write(self, first: Tensor, second: Tensor) -> None:
        """Keep these."""
        self._first.copy_(first)
        self._second.copy_(second)


class StageOptimizer:
    """AdamW over a list of parameters, its state laid out from the start so that a snapshot of version 0 is complete.

    One set of moments; the weights may rest in several places by turns (see `step`).

    offload: moments and a copy of the newest weights are in host memory, and updates are computed there (ZeRO-Offload,
    arXiv:2101.06840). Whoever changes the weights otherwise says so by `take`.

    whole: the number of elements of each whole parameter, where these are parts. It alone says whose moments are in 8
    bits, so ranks that hold other parts keep the same ones so.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        table: Optimizer,
        *,
        offload: bool = False,
        whole: Sequence[int] | None = None,
    ) -> None:
        self._table, self._rule = table, update_rule_of(table)
        self._whole = [p.numel() for p in parameters] if whole is None else list(whole)
        self._host = [torch.empty(p.shape, dtype=p.dtype) for p in parameters] if offload else None
        self._parameters = list(parameters) if self._host is None else self._host
        self.moments: list[WholeMoments | PackedMoments] = []
        """Of each parameter: to `read`, to `write`, and their `num_bytes`."""
        self._steps: list[Tensor] = []
        self.reset()
        self.take(parameters)

    def reset(self) -> None:
        """Back to version 0: no moments, no steps."""
        # Small parameters keep fp32 moments: they take few bytes.
        packed = self._table.state == "8bit"
        self.moments = [
            PackedMoments(p) if packed and size >= LEAST else WholeMoments(p)
            for p, size in zip(self._parameters, self._whole, strict=True)
        ]
        self._steps = [torch.zeros((), dtype=torch.float32, device=p.device) for p in self._parameters]

    @torch.no_grad()
    def take(self, parameters: Sequence[Tensor]) -> None:
        """The newest weights are these now."""
        # Without offload the optimizer reads the weights where they rest.
        for copy, parameter in zip(self._host or [], parameters, strict=self._host is not None):
            copy.copy_(parameter)

    def room(self) -> list[Tensor]:
        """Fresh memory for the gradients of a step."""
        return [torch.empty_like(p, requires_grad=False) for p in self._parameters]

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
        whole = [place for place, moments in enumerate(self.moments) if isinstance(moments, WholeMoments)]
        # Weight decay falls on matrices only.
        matrices = [place for place in whole if weights[place].ndim >= 2]
        vectors = [place for place in whole if weights[place].ndim < 2]
        self._update(pairs, matrices, learning_rate, self._table.weight_decay)
        self._update(pairs, vectors, learning_rate, 0.0)
        # After the update, which has brought the moments up to date.
        for place in whole if self._table.lead else ():
            self._lead(*pairs[place], *self.moments[place].read(), self._steps[place], learning_rate)
        for (weight, gradient), moments, steps in zip(pairs, self.moments, self._steps, strict=True):
            if isinstance(moments, PackedMoments):
                self._update_packed(weight, gradient, moments, steps, learning_rate)
        # The update was computed in host memory: hand the weights back to the device.
        if self._host is not None:
            assert parameters is not None
            for parameter, copy in zip(parameters, self._host, strict=True):
                parameter.copy_(copy)
        increment_version(weights)  # the fused kernel does not: who computes on stale weights must notice

    def _update(
        self, pairs: Sequence[tuple[Tensor, Tensor]], places: Sequence[int], learning_rate: float, weight_decay: float
    ) -> None:
        columns = [
            [pairs[place][0] for place in places],
            [pairs[place][1] for place in places],
            *([self.moments[place].read()[number] for place in places] for number in (0, 1)),
        ]
        self._apply(columns, [self._steps[place] for place in places], learning_rate, weight_decay)

    def _update_packed(
        self, weight: Tensor, gradient: Tensor, moments: PackedMoments, steps: Tensor, learning_rate: float
    ) -> None:
        """A piece at a time, so that moments in fp32 never exist whole."""
        size = chunk_elements(weight.device)
        decay = self._table.weight_decay if weight.ndim >= 2 else 0.0
        parts, pieces = torch.split(weight.view(-1), size), torch.split(gradient.view(-1), size)
        for start, part, piece in zip(itertools.count(0, size), parts, pieces, strict=False):
            first, second = moments.piece(start, start + part.numel())
            # All pieces are of one step, which is counted up once, below.
            seen = steps.clone()
            self._apply([[part], [piece], [first], [second]], [seen], learning_rate, decay)
            if self._table.lead:
                self._lead(part, piece, first, second, seen, learning_rate)
            moments.keep(start, first, second)
        steps += 1

    def _apply(
        self, columns: Sequence[Sequence[Tensor]], counts: Sequence[Tensor], learning_rate: float, weight_decay: float
    ) -> None:
        """columns: weights, gradients, first and second moments. counts: steps seen by each, counted up here."""
        with _whole_vectors(columns, counts) as ((weights, gradients, firsts, seconds), steps):
            # A plugged-in rule does not count steps, AdamW does.
            if self._rule is not None and steps:
                for step in steps:
                    step += 1
                self._rule(
                    weights,
                    gradients,
                    firsts,
                    seconds,
                    step=int(steps[0].item()),
                    learning_rate=learning_rate,
                    weight_decay=weight_decay,
                    table=self._table,
                )
                return
            # The function and not the class, whose constructor imports the compiler: a second of CPU per process.
            adamw(
                weights,
                gradients,
                firsts,
                seconds,
                [],
                steps,
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=self._table.beta1,
                beta2=self._table.beta2,
                lr=learning_rate,
                weight_decay=weight_decay,
                eps=self._table.eps,
            )

    def _lead(
        self, weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, seen: Tensor, learning_rate: float
    ) -> None:
        """Add what is missing to the update of one weight. Of the first moment before it only this is left: with g the
        gradient, m(t) - m(t - 1) = (1 - beta1) / (beta1 - beta1^t) (g - m(t)), without bias."""
        steps = int(seen.item())
        # The first step has no step before it to lead on from.
        if steps < 2:
            return
        beta1, size = self._table.beta1, chunk_elements(weight.device)
        factor = -learning_rate * self._table.lead * (1 - beta1) / (beta1 - beta1**steps)
        flat = (each.view(-1) for each in (weight, gradient, first, second))
        for part, piece, m, v in zip(*(torch.split(tensor, size) for tensor in flat), strict=True):
            scale = (v / (1 - self._table.beta2**steps)).sqrt_().add_(self._table.eps)
            part.addcdiv_(piece - m / (1 - beta1**steps), scale, value=factor)


@contextlib.contextmanager
def _whole_vectors(
    columns: Sequence[Sequence[Tensor]], steps: Sequence[Tensor]
) -> Iterator[tuple[list[list[Tensor]], list[Tensor]]]:
    """`columns` of tensors, each of a length that is a multiple of `_VECTOR`, in place of `columns` and `steps`.

    torch's kernel for CPUs treats what remains at the end of a tensor by other code, which rounds in another order. So
    ends are padded and written back: how an element is rounded does not depend on where its tensor was cut.
    """
    # Only the kernel for CPUs treats the end of a tensor by other code.
    if not steps or steps[0].device.type != "cpu":
        yield [list(column) for column in columns], list(steps)
        return
    rows: list[list[Tensor]] = []
    counts, ends = [], []
    for own, count in zip(zip(*columns, strict=True), steps, strict=True):
        flat = [tensor.view(-1) for tensor in own]
        size = flat[0].numel()
        even = size - size % _VECTOR
        # An empty tensor makes no row, so no kernel counts its step.
        if not size:
            count += 1
        if even:
            rows.append([tensor[:even] for tensor in flat])
            counts.append(count)
        if even < size:
            end = [tensor[even:] for tensor in flat]
            padded = [functional.pad(tensor, (0, _VECTOR - tensor.numel())) for tensor in end]
            rows.append(padded)
            counts.append(count.clone() if even else count)  # each is counted up once
            ends.append((end, padded))
    yield [list(column) for column in zip(*rows, strict=True)] or [[] for _ in columns], counts
    # The padded ends are copies: write the results back.
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
    # In fp64, because an int64 sum has more digits than fp32 can hold.
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
