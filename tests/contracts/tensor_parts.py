"""Ranks' slices of a parameter put together: the inverse of `model.sharded.take`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnet.model.sharded import ShardedStage, sum_terms, take, whole_shape
from swarmnet.model.tensor_plan import TensorSplit


def merge(parts: Sequence[Tensor], name: str, split: TensorSplit, *, gradients: bool = False) -> Tensor:
    """Put the ranks' slices of parameter `name` together; one part per rank, in order.

    gradients: parts are gradients as the weight passes left them, so terms are summed (in order of rank). Otherwise
    ranks that hold the same elements are taken to agree: parameters, moments, and gradients after
    `sum_terms`. Raises ValueError if a part does not fit.
    """
    slices = [split.slice_of(name, rank) for rank in range(split.ranks)]
    whole = torch.zeros(whole_shape(parts[0], slices[0]), dtype=parts[0].dtype, device=parts[0].device)
    for part, held in zip(parts, slices, strict=True):
        place = take(whole, held)
        if place.shape != part.shape:
            raise ValueError(f"{name}: a slice of {tuple(part.shape)} where {tuple(place.shape)} belongs")
        if gradients and held.partial:
            place.add_(part)
        elif held.owner:
            place.copy_(part)
    return whole


@torch.no_grad()
def reduce_partial(stage: ShardedStage, gradients: Sequence[Tensor]) -> None:
    """Sum in place, over ranks, what is partial of `gradients`: all of one dtype, one per parameter, in order."""
    names = [name for name, _ in stage.named_parameters()]
    for gradient, summed in zip(gradients, sum_terms(gradients, names, stage.split, stage.comm), strict=True):
        if summed is not gradient:
            gradient.copy_(summed)
