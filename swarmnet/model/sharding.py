"""Parameters cut into ranks' slices and put together again: the tensor side of `model.slices`.

The whole ("canonical") tensor is what snapshots, averaging and checkpoints hold, whatever mesh a replica has. Works on
parameters, gradients and optimizer moments alike, of any dtype. Knows no group: the caller has the slices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnet.model.slices import Slice, TensorSplit


def whole_shape(part: Tensor, held: Slice) -> torch.Size:
    """Shape of the parameter of which `part` is what a rank holds."""
    if held.dim is None:
        return part.shape
    shape = list(part.shape)
    shape[held.dim] = held.length
    return torch.Size(shape)


def take(whole: Tensor, held: Slice) -> Tensor:
    """The view of `whole` that a rank holds."""
    return whole if held.dim is None else whole.narrow(held.dim, held.start, held.stop - held.start)


def merge(parts: Sequence[Tensor], name: str, split: TensorSplit, *, gradients: bool = False) -> Tensor:
    """Put the ranks' slices of parameter `name` together; one part per rank, in order.

    gradients: parts are gradients as the weight passes left them, so terms are summed (in order of rank). Otherwise
    ranks that hold the same elements are taken to agree: parameters, moments, and gradients after
    `ShardedStage.reduce_partial`. Raises ValueError if a part does not fit.
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
