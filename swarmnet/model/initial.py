"""Weights of version 0, drawn per parameter name from the run's seed: every layout of the model starts equal.

Matrices have standard deviation `init_std`; those that write to the residual stream (`o_proj`, `down_proj`) are scaled
by 1 / sqrt(2 num_layers), as in GPT-2, so that the stream's variance does not grow with depth. Norm scales are 1,
biases 0.

The bell is a sum of four uniforms (Irwin-Hall): within 3.47 standard deviations, and made of exact additions and
products only. A true normal uses logarithms and cosines, which differ in the last bit between processors, and then
two volunteers would start from different weights.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from swarmnet.manifest.schema import Model

RESIDUAL = ("o_proj.weight", "down_proj.weight")


def draw(name: str, shape: torch.Size, model: Model, *, seed: int) -> Tensor:
    """The initial value of parameter `name`: fp32 on the CPU, the same bits everywhere."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    std = model.init_std
    # Each layer adds to the stream twice.
    if name.endswith(RESIDUAL):
        std /= math.sqrt(2 * model.num_layers)
    # by name, not by position: a stage draws what the whole model would
    generator = torch.Generator().manual_seed(_seed(seed, name))
    total = torch.rand(shape, generator=generator)
    # Four terms in all: the first is there already.
    for _ in range(3):
        total += torch.rand(shape, generator=generator)
    return total.sub_(2.0).mul_(std * math.sqrt(3.0))  # four uniforms: mean 2, variance 1/3


def draw_factor(name: str, shape: torch.Size, *, seed: int) -> Tensor:
    """The initial value of a factor of an adapter, as PEFT has it: A is uniform in +-1 / sqrt(inputs), B is 0."""
    if name.endswith("lora_B.weight"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(_seed(seed, name))
    return torch.rand(shape, generator=generator).sub_(0.5).mul_(2.0 / math.sqrt(shape[1]))


def _seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big")  # the Mersenne twister takes 32 bits
