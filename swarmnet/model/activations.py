"""What a forward keeps of a stage's layers for its backward, and what is computed again instead.

| policy | kept of a layer | done again in backward |
|---|---|---|
| stash | all that backward reads | nothing |
| selective | results of matrix products and of attention | norms, rotation, SwiGLU's product |
| recompute_layers | its input (arXiv:1604.06174) | the layer |
| recompute | nothing: the stage's input is enough | the stage (by `stage.passes`) |
| offload | all that backward reads, in host memory (`model.offload`) | nothing; copies come back |

The same kernels run on the same operands in the same order, collectives included, so every policy gives the same bits.
Knows layers only as functions of tensors, and no weights but to leave them where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from swarmnet.model.split import Tape

Policy = Literal["stash", "recompute", "recompute_layers", "selective", "offload"]

RunLayer = Callable[[Callable[..., Tensor], Tensor, Tensor, Tensor, Tape | None], Tensor]
"""Runs layer(x, cos, sin, tape)."""

_aten = torch.ops.aten
_KEPT = frozenset(
    [
        _aten.mm.default,
        _aten.addmm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    ]
)
"""What costs more to compute than to keep. Not the products inside attention's math kernel: they are T x T."""


def plainly(layer: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor, tape: Tape | None) -> Tensor:
    """Run a layer."""
    return layer(x, cos, sin, tape)


def run_layers(policy: Policy) -> RunLayer:
    """How to run each layer under `policy`. What is done around all of them is not part of it."""
    if policy == "recompute_layers":
        return _again
    return _selectively if policy == "selective" else plainly


def _again(layer: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor, tape: Tape | None) -> Tensor:
    if not torch.is_grad_enabled():
        return layer(x, cos, sin, tape)
    y: Tensor = checkpoint(layer, x, cos, sin, tape, use_reentrant=False, preserve_rng_state=False)
    return y


def _selectively(layer: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor, tape: Tape | None) -> Tensor:
    if not torch.is_grad_enabled():
        return layer(x, cos, sin, tape)
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep)
    y: Tensor = checkpoint(layer, x, cos, sin, tape, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return y


def _keep(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
