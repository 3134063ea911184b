"""One microbatch through the module of a stage: forward, and the backward of its input. Compute thread only.

Tensors in, tensors out: payloads, versions and what may be counted are the engine's business. A stage that is first
reads token ids, one that is last returns the summed loss. What the weight pass needs stays on the `Pass`' tape.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from swarmnet.model.decoder import StageModule
from swarmnet.model.split import Tape


@dataclass(slots=True, eq=False)
class Pass:
    """What a forward leaves behind. Backward takes `leaf` and `output` and fills `tape`; the weight pass takes that."""

    leaf: Tensor | None
    output: Tensor | None
    tape: Tape | None


class Passes:
    """Forward and backward of one stage on one device.

    reproducible: only kernels whose backward gives the same bits again. tapes: backward leaves weight gradients to a
    weight pass; without, it leaves them where autograd does.
    """

    def __init__(
        self, *, first: bool, last: bool, device: torch.device, reproducible: bool, tapes: bool = True
    ) -> None:
        self._first, self._last, self._device, self._tapes = first, last, device, tapes
        self._math_only = reproducible and device.type == "cuda"     # on the CPU all kernels are reproducible

    def forward(
        self, module: StageModule, tokens: Tensor, hidden: Tensor | None, *, train: bool
    ) -> tuple[Tensor, Pass | None]:
        """Run `module` on tokens [B, T + 1] (the last one of each row is a label only) and hidden [B, T, D], which is
        ours to keep, None in the first stage.

        Returns hidden [B, T, D], in the last stage the loss summed over tokens; and what backward needs, None for an
        evaluation.
        """
        with torch.set_grad_enabled(train), self._kernels():
            tape = Tape() if train and self._tapes else None
            leaf = None if hidden is None else hidden.requires_grad_(train)
            output = module(tokens[:, :-1].to(self._device) if leaf is None else leaf, tape)
            if self._last:
                output = module.loss_sum(output, tokens[:, 1:].to(self._device))
        return output, Pass(leaf, output, tape) if train else None

    def backward(self, saved: Pass, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the input, None in the first stage; once per pass. gradient: of the output, None of a loss.

        Raises ValueError the second time.
        """
        if saved.output is None:
            raise ValueError("backward of this pass has run already")
        output, leaf, saved.output, saved.leaf = saved.output, saved.leaf, None, None
        with self._kernels():
            torch.autograd.backward(output, gradient)
        return None if leaf is None else leaf.grad

    def _kernels(self) -> contextlib.AbstractContextManager[object]:
        """Attention kernels with a reproducible backward."""
        return sdpa_kernel(SDPBackend.MATH) if self._math_only else contextlib.nullcontext()
