"""The weight pass of one microbatch on a device: whole gradients, or chunks of their sum over the data axis.

Gradients are computed into scratch memory whose pieces start on 64-byte boundaries: matrix kernels pick their
summation order by alignment, so a parameter's gradient must not depend on what precedes it in the stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from swarmnet.model.split import Tape
from swarmnet.stage.buckets import Bucket

_ALIGN = 16  # fp32 elements

Places = Mapping[Parameter, int]
"""The number of each parameter in canonical order; of all modules that take turns."""


def aligned(shapes: Sequence[torch.Size], device: torch.device) -> list[Tensor]:
    """One buffer, cut into contiguous fp32 tensors of these shapes, each on a 64-byte boundary."""
    starts = [0, *itertools.accumulate(-(-shape.numel() // _ALIGN) * _ALIGN for shape in shapes)]
    buffer = torch.zeros(starts[-1], dtype=torch.float32, device=device)
    return [buffer[start : start + shape.numel()].view(shape) for start, shape in zip(starts, shapes, strict=False)]


class WholeGradients:
    """Of every parameter as this device has it; no collective. `scratch` is free whenever no weight pass runs."""

    def __init__(self, places: Places, shapes: Sequence[torch.Size], device: torch.device) -> None:
        self._places, self.scratch = places, aligned(shapes, device)

    def of(self, tape: Tape) -> list[Tensor]:
        """Run the weight pass: one fp32 gradient per parameter, valid until the next call."""
        written = tape.weight_pass(lambda parameter: self.scratch[self._places[parameter]])
        _check(len(written), len(self.scratch))
        return self.scratch


class ScatteredGradients:
    """This rank's chunk of every parameter's gradient, summed over the data ranks (ZeRO-2).

    A weight pass goes through the layers from the last to the first, so a layer's gradients are whole, and are
    scattered and forgotten, before the next layer's begin: one reduce-scatter per layer and one for what is beside
    layers, and memory for one layer. Every rank calls it at the same place among its collectives.
    """

    def __init__(
        self, places: Places, shapes: Sequence[torch.Size], buckets: Sequence[Bucket], device: torch.device
    ) -> None:
        self._places, self._shapes, self._buckets, self._device = places, shapes, list(buckets), device
        self._bucket_of = {place: bucket for bucket in buckets for place in bucket.places}

    def of(self, tape: Tape) -> list[Tensor]:
        """Run the weight pass: one fp32 chunk per parameter, ours to keep."""
        pieces: dict[int, Tensor] = {}  # of buckets that are not whole yet
        chunks: dict[int, Tensor] = {}

        def out(parameter: Parameter) -> Tensor:
            place = self._places[parameter]
            bucket = self._bucket_of[place]
            if place not in pieces:
                if place in chunks:
                    raise ValueError("a weight pass came back to a layer")
                for other in self._buckets:
                    if other.is_layer and other is not bucket and other.places[0] in pieces:
                        _scatter(other, pieces, chunks)
                shapes = [self._shapes[own] for own in bucket.places]
                pieces.update(zip(bucket.places, aligned(shapes, self._device), strict=True))
            return pieces[place]

        written = tape.weight_pass(out)
        _check(len(written), len(self._shapes))
        for bucket in self._buckets:
            if bucket.places[0] in pieces:
                _scatter(bucket, pieces, chunks)
        return [chunks[place] for place in range(len(self._shapes))]


def _scatter(bucket: Bucket, pieces: dict[int, Tensor], chunks: dict[int, Tensor]) -> None:
    wholes = [pieces.pop(place) for place in bucket.places]
    chunks.update(zip(bucket.places, bucket.scatter_sum(wholes), strict=True))


def _check(written: int, expected: int) -> None:
    if written != expected:
        raise ValueError(f"a weight pass wrote {written} of {expected} parameters")
