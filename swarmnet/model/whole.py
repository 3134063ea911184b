"""The whole model in one process, its weights given stage by stage, and the loss it has on a microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from swarmnet.manifest.schema import Model
from swarmnet.model.decoder import StageModule
from swarmnet.model.precision import Compute, products_in


@torch.no_grad()
def whole(model: Model, stages: Iterable[Mapping[str, Tensor]]) -> StageModule:
    """All layers of `model` on the CPU, with the tensors of `stages`, which may come one by one."""
    module = StageModule(model, range(model.num_layers), first=True, last=True)
    parameters = dict(module.named_parameters())
    for weights in stages:
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)
    return module


@torch.no_grad()
def loss_of(module: StageModule, tokens: Tensor, *, compute: Compute = "fp32") -> float:
    """The loss in nats, summed over the labels, of tokens [B, T + 1]; compute: as in the run's manifest."""
    with products_in(compute, torch.device("cpu")):
        logits = module(tokens[:, :-1])
        return float(module.loss_sum(logits, tokens[:, 1:]).item())
