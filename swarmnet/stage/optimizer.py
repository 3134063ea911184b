"""The optimizer step on a finished sum: average, clip, AdamW (arXiv:1711.05101), with lookahead if the manifest says
so.

Another distribution may replace AdamW with an update rule of its own (`UpdateRule`).

With `optimizer.lead` = a the update follows not the first moment m but where it will be in a steps if it goes on as in
the last one, m(t) + a (m(t) - m(t - 1)), both without bias. Nesterov's is about a = beta1. A gradient that is one step
late makes momentum swing; this damps it (arXiv:2505.01099). From the first late step on the first moment also averages
over more steps (`first_moment`).

Equal sums make equal weights on every device. Elements are only multiplied, added, subtracted, divided and rooted, one
operation to a kernel, each rounded once, as IEEE 754 says: no fused multiply-add, no kernel that takes an `alpha`, no
power. Numbers that all elements share are computed in fp64 on the host, by such operations too. So no bit depends on
which other elements share the tensor: a rank that holds a part of a parameter makes of it what one that holds all of it
does. With 8-bit moments that holds for one update, and then moments are rounded in blocks of what the rank holds, so
other parts round otherwise. Weight decay falls on matrices only. Learning rate and gradient scale come from
`stage.canonical`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from swarmnet.config import plug_in
from swarmnet.manifest.schema import NO_DELAY, Delay, Optimizer
from swarmnet.stage.optimizer_8bit import LEAST, PackedMoments
from swarmnet.stage.rounding import FineRounding, Rounding
from swarmnet.stage.same_bits import fp32, power, root
from swarmnet.stage.snapshot import digest
from swarmnet.wire import kernels

MOMENTS = ("exp_avg", "exp_avg_sq")

LATE_LAG = 3.6
"""How many times as many steps the first moment averages over while gradients are late.

With beta1 = 0.9 it becomes 0.97, and with lead = 2.5 an update is then stable up to rate * curvature = 8.3; it is up to
2.6 without, and up to 6.3 before gradients are late. So what the exact steps have settled in stays stable.
"""

_CPU_PIECE, _DEVICE_PIECE = 1 << 16, 1 << 21  # elements of an update at once: all it touches fits a cache


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
        beta1: float,
        beta1_product: float,
        learning_rate: float,
        weight_decay: float,
        table: Optimizer,
    ) -> None:
        """Update `weights`, `firsts` and `seconds` in place, fp32, flat, of the same length for each parameter.

        Elementwise: tensors are parts of parameters, cut anywhere.

        Args:
            gradients: averaged and clipped.
            firsts, seconds: what is remembered of each weight, two numbers; both 0 before the first step.
            step: 1 in the first step.
            beta1: of this step; above `table.beta1` while gradients are late.
            beta1_product: of the `beta1` of all steps up to this one.
            weight_decay: decoupled, 0 for all but matrices.
            table: `[optimizer]` of the manifest.
        """


def first_moment(table: Optimizer, delay: Delay, step: int) -> tuple[float, float]:
    """`beta1` and `beta1_product` of an `UpdateRule`, for step 1, 2, ..."""
    # Without a lead no beta1 makes late steps stable beyond rate * curvature = 1. Other rules mean other things by it.
    if not delay.behind(step - 1) or not table.lead or table.name != "adamw":
        return table.beta1, power(table.beta1, step)
    slower = LATE_LAG * table.beta1
    late = slower / (1 - table.beta1 + slower)
    return late, power(table.beta1, delay.since) * power(late, step - delay.since)


def update_rule_of(table: Optimizer) -> UpdateRule:
    """The run's update rule. Raises: UsageError if no installed distribution brings it."""
    if table.name == "adamw":
        return adamw
    rule: UpdateRule = plug_in.load("optimizer", table.name, field="optimizer.name")[0]
    return rule


def adamw(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    *,
    step: int,
    beta1: float,
    beta1_product: float,
    learning_rate: float,
    weight_decay: float,
    table: Optimizer,
) -> None:
    """The update rule `UpdateRule` of "adamw", with `table.lead`. docs/numerics.md has its order of operations."""
    # What is missing of bias: of the first moment, and of the root of the second.
    bias, rooted = 1 - beta1_product, math.sqrt(1 - power(table.beta2, step))
    # Of the first moment before this one only this is left: m(t) - m(t - 1) = k / lead (g - m(t)), without bias. The
    # first step has no step before it to lead on from.
    ahead = table.lead * (1 - beta1) / (beta1 - beta1_product) if step > 1 and table.lead else 0.0
    rate, floor = learning_rate * rooted / bias, table.eps * rooted
    numbers = [1 - beta1, beta1, 1 - table.beta2, table.beta2, ahead * bias, 1 - ahead, floor, rate]
    numbers = [*map(fp32, numbers), fp32(1 - learning_rate * weight_decay) if weight_decay else 1.0]
    for w, g, m, v in zip(weights, gradients, firsts, seconds, strict=True):
        if (native := kernels.of(w, g, m, v)) is not None:
            native.adamw(w, g, m, v, numbers)
            continue
        # Freed memory of this size is used again at once: it stays in the cache.
        x, y = torch.empty_like(w), torch.empty_like(w) if ahead else m
        torch.mul(g, fp32(1 - beta1), out=x)
        m.mul_(fp32(beta1)).add_(x)
        torch.mul(g, g, out=x)
        v.mul_(fp32(table.beta2)).add_(x.mul_(fp32(1 - table.beta2)))
        if ahead:
            torch.mul(g, fp32(ahead * bias), out=x)
            torch.mul(m, fp32(1 - ahead), out=y).add_(x)
        root(v, out=x).add_(fp32(floor))
        torch.div(y, x, out=x).mul_(fp32(rate))
        if weight_decay:
            w.mul_(fp32(1 - learning_rate * weight_decay))
        w.sub_(x)


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

    def piece(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Flat views of elements [start, stop)."""
        return self._first.view(-1)[start:stop], self._second.view(-1)[start:stop]

    def keep(self, start: int, first: Tensor, second: Tensor) -> None:
        """What `piece` gave was changed in place."""


class StageOptimizer:
    """AdamW over a list of parameters, its state laid out from the start so that a snapshot of version 0 is complete.

    One set of moments; the weights may be in several copies by turns (see `step`).

    offload: moments and a copy of the newest weights are in host memory, and updates are computed there (ZeRO-Offload,
    arXiv:2101.06840). Any other change of the weights is followed by `take`.

    delay: how late gradients are.

    whole: the number of elements of each whole parameter, where these are parts. It alone decides which moments are in
    8 bits, so ranks that hold other parts have the same ones in 8 bits.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        table: Optimizer,
        *,
        delay: Delay = NO_DELAY,
        offload: bool = False,
        whole: Sequence[int] | None = None,
    ) -> None:
        self._table, self._delay, self._rule = table, delay, update_rule_of(table)
        self._whole = [p.numel() for p in parameters] if whole is None else list(whole)
        self._host = [torch.empty(p.shape, dtype=p.dtype) for p in parameters] if offload else None
        self._parameters = list(parameters) if self._host is None else self._host
        self.moments: list[WholeMoments | PackedMoments] = []
        """Of each parameter: to `read`, to `write`, and their `num_bytes`."""
        self._seen = 0
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
        self._seen = 0

    @torch.no_grad()
    def take(self, parameters: Sequence[Tensor]) -> None:
        """The newest weights are these now."""
        # Without offload the optimizer reads the weights where they rest.
        for copy, parameter in zip(self._host or [], parameters, strict=self._host is not None):
            copy.copy_(parameter)

    def gradient_buffers(self) -> list[Tensor]:
        """Fresh memory for the gradients of a step."""
        return [torch.empty_like(p, requires_grad=False) for p in self._parameters]

    def set_num_steps(self, steps: int) -> None:
        """How many steps the moments have seen (bias correction)."""
        self._seen = steps

    @torch.no_grad()
    def step(
        self, gradients: Sequence[Tensor], *, learning_rate: float, parameters: Sequence[Tensor] | None = None
    ) -> None:
        """Update every parameter in place. gradients: fp32, averaged and clipped, in the parameters' order, where the
        moments are.

        parameters: the copy of the weights for this step, of the same shapes in the same order. Offloaded, its earlier
        content does not matter.
        """
        weights = self._host or (self._parameters if parameters is None else parameters)
        self._seen += 1
        beta1, beta1_product = first_moment(self._table, self._delay, self._seen)
        for weight, gradient, moments in zip(weights, gradients, self.moments, strict=True):
            # A piece at a time: temporaries stay in a cache, and moments of 8 bits never exist whole in fp32.
            size = _CPU_PIECE * torch.get_num_threads() if weight.device.type == "cpu" else _DEVICE_PIECE
            pieces = zip(*(torch.split(each.view(-1), size) for each in (weight, gradient)), strict=True)
            for number, (part, piece) in enumerate(pieces):
                first, second = moments.piece(number * size, number * size + part.numel())
                self._rule(
                    [part],
                    [piece],
                    [first],
                    [second],
                    step=self._seen,
                    beta1=beta1,
                    beta1_product=beta1_product,
                    learning_rate=learning_rate,
                    # Weight decay falls on matrices only.
                    weight_decay=self._table.weight_decay if weight.ndim >= 2 else 0.0,
                    table=self._table,
                )
                moments.keep(number * size, first, second)
        # The update was computed in host memory: hand the weights back to the device.
        if self._host is not None:
            assert parameters is not None
            for parameter, copy in zip(parameters, self._host, strict=True):
                parameter.copy_(copy)


def average(total: Tensor, out: Tensor, *, scale: float, rounding: Rounding, place: int) -> None:
    """Write what `total` (a flat piece of a sum, of parameter number `place`) stands for, times `scale`, to `out`
    (fp32): the one division by tokens. A sum on the fine grid passes through fp64, and is rounded once at the end."""
    start = 0
    for piece in rounding.values(total, place, scale=scale):
        out[start : start + piece.numel()] = piece
        start += piece.numel()


def square_norm(total: Tensor, *, rounding: Rounding, place: int) -> float:
    """Squared L2 norm, fp64, of one parameter's piece of a sum, in the gradient's own unit."""
    found = 0.0
    for square in rounding.squares(total, place):
        found += square
    return found


def probe(table: Optimizer, device: torch.device) -> str:
    """Eight hexadecimal digits of the results of three updates here on numbers of all sizes, and of a sum's values.
    Devices with equal digits make equal weights of equal sums; others flush small numbers, or round roots or divisions
    differently."""
    size, rounding = 2 * LEAST + 75, FineRounding(32, 1)
    counted = np.arange(1, 4 * size + 1, dtype=np.uint32).reshape(4, size) * np.uint32(2654435761)
    mixed = (counted ^ counted >> 15) * np.uint32(2246822519)
    # By element an exponent from 2^-149, where numbers lose digits, up to what can be squared.
    exponents = np.arange(size, dtype=np.uint32) % 181 + (mixed >> 5) % 8
    numbers = torch.from_numpy((mixed & 0x807FFFFF | exponents << 23).view(np.float32)).to(device)
    weight, *gradients = numbers.view(4, -1, 7).unbind()
    optimizer = StageOptimizer([weight], table)
    for number, gradient in enumerate(gradients):
        optimizer.step([gradient], learning_rate=1e-2 / (number + 1))
    total, mean = torch.from_numpy(mixed[0].astype(np.int64) << mixed[0] % 31), torch.empty(size, device=device)
    average(total.to(device), mean, scale=1 / 3, rounding=rounding, place=0)
    norm = torch.tensor(square_norm(total, rounding=rounding, place=0), dtype=torch.float64)
    return digest([weight, *optimizer.moments[0].read(), mean, norm])[:4].hex()
