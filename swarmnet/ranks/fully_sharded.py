"""ZeRO-3: a stage with parameters that are whole only while a layer computes (FSDP2, arXiv:2304.11277).

`fully_shard` cuts each parameter along its first dimension as `ranks.layout.chunk` does. Each layer is gathered for its
forward and again for its backward, what is outside layers for the whole of either; gradients are reduce-scattered as
backward goes. There is no weight pass apart: autograd runs once. Gradients are sums, never means.

Forwards and backwards of several microbatches may come in any order, the same on every rank.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from swarmnet.model.decoder import StageModule


class FullySharded:
    """ZeRO-3 over the ranks of `group`, each with its chunks on `device`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._mesh, self._device = DeviceMesh.from_group(group, device.type), device

    def shard(self, module: StageModule) -> None:
        """Shard `module`, on the meta device so far; this rank then has memory for its chunks only."""
        embedding, head = module.model.embed_tokens, module.lm_head
        tied = embedding is not None and head is not None and head.weight is embedding.weight
        layers = list(module.model.layers.values())
        for part in (*layers, module):
            fully_shard(part, mesh=self._mesh, reshard_after_forward=True)
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)  # sums travel with their counts: the division comes once, at the step
            part.set_force_sum_reduction_for_comms(True)  # else gloo is asked for a scaled sum: it has none
        _fetch_ahead(module, layers)
        module.to_empty(device=self._device)
        if embedding is not None and head is not None and tied:
            head.weight = embedding.weight  # memory was made twice for what is one parameter

    def chunk(self, parameter: Parameter) -> Tensor:
        """This rank's chunk, live."""
        assert isinstance(parameter, DTensor)
        return parameter.to_local().detach()

    def take_gradient(self, parameter: Parameter) -> Tensor:
        """This rank's chunk of the gradient that backward has left, which is no longer there then."""
        gradient, parameter.grad = parameter.grad, None
        assert isinstance(gradient, DTensor) and not any(placement.is_partial() for placement in gradient.placements)
        return gradient.to_local()


def _fetch_ahead(module: StageModule, layers: list[torch.nn.Module]) -> None:
    """In backward a layer is gathered while the one after it computes. Left to itself FSDP goes by the order in which
    forwards came, which is another's when several microbatches are in flight."""
    for after, before in itertools.pairwise([module, *reversed(layers), module]):  # at the end: it is whole already
        assert isinstance(after, FSDPModule) and isinstance(before, FSDPModule)
        after.set_modules_to_backward_prefetch([before])
