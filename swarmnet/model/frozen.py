"""Weights that do not train: how they rest, and the modules that compute with them.

They rest in buffers, so that parameters, and with them gradients, moments, sums, snapshots and checkpoints, are of the
adapters alone. Several modules of one rank share these buffers. A matrix is made whole for each product, forward and
backward, and a product's backward gives the gradient of its input only.

| base | matrices of layers | embedding and head | norms and biases |
|---|---|---|---|
| fp32 | fp32 | fp32 | fp32 |
| bf16 | bf16 | bf16 | fp32 |
| nf4 | 4 bits (`model.nf4`) | bf16 | fp32 |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnet.manifest.schema import NF4_BLOCK, Base
from swarmnet.model import nf4
from swarmnet.model.decoder import Linear
from swarmnet.model.precision import operand_dtype
from swarmnet.model.split import Tape

Parts = Mapping[str, Tensor]
"""A weight at rest: `{"whole": ...}`, or of 4 bits `{"codes": ..., "most": ...}` (`model.nf4`)."""

_OUTSIDE = ("embed_tokens.weight", "lm_head.weight")


def part_shapes(name: str, shape: torch.Size, base: Base) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Type and shape of each part in which the weight of that Hugging Face name rests."""
    if len(shape) == 1 or base == "fp32":
        return {"whole": (torch.float32, shape)}
    if base == "bf16" or name.endswith(_OUTSIDE):
        return {"whole": (torch.bfloat16, shape)}
    rows, columns = shape
    return {
        "codes": (torch.uint8, torch.Size([rows, columns // 2])),
        "most": (torch.float32, torch.Size([rows, columns // NF4_BLOCK])),
    }


def at_rest(name: str, whole: Tensor, base: Base) -> dict[str, Tensor]:
    """The parts of a weight that is whole: fp32, on the CPU."""
    shapes = part_shapes(name, whole.shape, base)
    if "codes" in shapes:
        return dict(zip(shapes, nf4.quantise(whole), strict=True))
    return {"whole": whole.to(shapes["whole"][0])}


class FrozenWeight(nn.Module):
    """A matrix [O, I] at rest."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        for name, part in parts.items():
            self.register_buffer(name, part)

    def get(self, dtype: torch.dtype) -> Tensor:
        """It, in `dtype`. Do not change it."""
        parts = self._buffers
        if (whole := parts.get("whole")) is not None:
            return whole.to(dtype)
        codes, most = parts["codes"], parts["most"]
        assert codes is not None and most is not None
        return nf4.dequantise(codes, most, dtype)


class FrozenLinear(Linear):
    """y = x W^T (+ b), W and b frozen, and with a rank of adapters + scaling (x A^T) B^T (arXiv:2106.09685)."""

    def __init__(self, parts: Parts, bias: Tensor | None, *, lora: tuple[Linear, Linear, float] | None = None) -> None:
        nn.Module.__init__(self)
        self.base = FrozenWeight(parts)
        self.register_buffer("bias", bias)
        self.lora_A: Linear | None = None
        self.lora_B: Linear | None = None
        self.scaling = 0.0
        if lora is not None:
            self.lora_A, self.lora_B, self.scaling = lora

    def forward(self, x: Tensor, tape: Tape | None) -> Tensor:
        dtype = operand_dtype(x.device) or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        y: Tensor = _Product.apply(x.to(dtype), self.base, bias)  # type: ignore[no-untyped-call]
        if self.lora_A is None or self.lora_B is None:
            return y
        added: Tensor = self.lora_B(self.lora_A(x, tape), tape) * self.scaling
        return y + added


class _Product(torch.autograd.Function):
    """x [..., I] times a frozen matrix [O, I] transposed. No weight pass, and the matrix is not kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FrozenWeight, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.get(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        # The first product of a stage that reads token ids has nobody before it.
        if not ctx.needs_input_grad[0]:
            return None, None, None
        grad = grads[0]
        return grad.flatten(0, -2).mm(ctx.weight.get(grad.dtype)).view(*grad.shape[:-1], -1), None, None


def freeze(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter of an embedding or a norm by a buffer."""
    delattr(module, name)
    module.register_buffer(name, value)
