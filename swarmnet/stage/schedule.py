"""The two numbers that turn a summed gradient into an update: learning rate and gradient scale. Pure.

Computed in fp64 from the manifest and the commits alone, so that all replicas of all stages find the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarmnet.manifest.schema import Optimizer

CLIP_EPS = 1e-6
"""Keeps the clip factor finite for a zero gradient; the same constant as in torch's `clip_grad_norm_`."""


def learning_rate(optimizer: Optimizer, step: int, *, total_steps: int) -> float:
    """The rate of optimizer step `step`, counted from 0.

    Linear warm-up over `warmup_steps` (the first step already moves, the last of them has the full rate), then
    `constant`; `cosine` down to `min_lr_ratio` at `total_steps`; or `wsd` (warm-up, stable, decay, arXiv:2404.06395):
    constant, then linear over the last `decay_steps` down to `min_lr_ratio`.
    """
    peak, floor = optimizer.learning_rate, optimizer.min_lr_ratio
    if step < optimizer.warmup_steps:
        return peak * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "cosine":
        span = max(total_steps - optimizer.warmup_steps, 1)
        progress = min((step - optimizer.warmup_steps) / span, 1.0)
        return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
    if optimizer.schedule == "wsd" and optimizer.decay_steps:
        progress = min(max((step - (total_steps - optimizer.decay_steps)) / optimizer.decay_steps, 0.0), 1.0)
        return peak * (1 - (1 - floor) * progress)
    return peak


def gradient_scale(grad_sq_norms: Sequence[float], *, num_tokens: int, clip_norm: float) -> float:
    """What to multiply the summed gradient by: the average over tokens, clipped once by the global norm.

    grad_sq_norms: squared norms of each stage's *sum*, in stage order (the order fixes the bits).
    """
    if num_tokens <= 0:
        raise ValueError(f"a step needs tokens, num_tokens = {num_tokens}")
    total = 0.0
    for square in grad_sq_norms:
        total += square
    norm = math.sqrt(total) / num_tokens
    return min(1.0, clip_norm / (norm + CLIP_EPS)) / num_tokens
