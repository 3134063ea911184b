"""Chunks along the data axis of a mesh, exchanged a bucket at a time: a layer's parameters, or what is outside layers.

A parameter's chunks are those of `ranks.layout.chunk`. In a collective all have the length of the first, so the last
ones are padded; a bucket's parameters lie one after the other, hence one collective per bucket. It takes temporary
memory for a layer and not for the stage. Knows no optimizer and no accumulator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from swarmnet.model.comm import Comm
from swarmnet.model.split import Tape
from swarmnet.ranks.layout import Block, chunk
from swarmnet.stage.gradients import Places, aligned, check_all_written


def take_block(whole: Tensor, block: Block) -> Tensor:
    """The view of `whole` that is `block`."""
    for dim, places in enumerate(block.ranges):
        whole = whole.narrow(dim, places.start, len(places))
    return whole


def own_chunk(whole: Tensor, comm: Comm) -> Tensor:
    """The view of `whole` that is this rank's chunk."""
    rows = chunk(whole.shape[0], comm.rank, comm.size)
    return whole.narrow(0, rows.start, len(rows))


class Bucket:
    """Parameters number `places` of a stage, of which a data rank has `shapes` whole. is_layer: they are a layer's."""

    def __init__(self, places: Sequence[int], shapes: Sequence[torch.Size], comm: Comm, *, is_layer: bool) -> None:
        self.places, self.is_layer = list(places), is_layer
        self._shapes, self._comm = list(shapes), comm
        self._sizes = [len(chunk(shape[0], 0, comm.size)) * shape[1:].numel() for shape in shapes]

    def scatter_sum(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """This rank's chunk of each parameter's sum over the data ranks. One reduce-scatter."""
        ranks, pairs = self._comm.size, zip(wholes, self._sizes, strict=True)
        # One row per rank: its chunks of all parameters, one after the other.
        packed = torch.cat([_padded(whole, ranks * size).view(ranks, size) for whole, size in pairs], 1)
        summed = self._comm.reduce_scatter(packed, 0).view(-1)
        chunks = []
        for shape, piece in zip(self._shapes, torch.split(summed, self._sizes), strict=True):
            rows = len(chunk(shape[0], self._comm.rank, ranks))
            chunks.append(piece[: rows * shape[1:].numel()].view(rows, *shape[1:]))
        return chunks

    @torch.no_grad()
    def gather(self, wholes: Sequence[Tensor]) -> None:
        """Write every rank's chunk over `wholes`, of which this rank's chunks are right. One all-gather."""
        pairs = zip(wholes, self._sizes, strict=True)
        packed = torch.cat([_padded(own_chunk(whole, self._comm), size) for whole, size in pairs])
        gathered = self._comm.all_gather(packed.unsqueeze(0), 0)
        for whole, pieces in zip(wholes, torch.split(gathered, self._sizes, 1), strict=True):
            whole.view(-1).copy_(pieces.reshape(-1)[: whole.numel()])


def _padded(tensor: Tensor, size: int) -> Tensor:
    """Flat, with zeros up to `size` elements."""
    flat = tensor.reshape(-1)
    return flat if flat.numel() == size else functional.pad(flat, (0, size - flat.numel()))


def buckets_of(names: Sequence[str], shapes: Sequence[torch.Size], comm: Comm) -> list[Bucket]:
    """What is outside layers first, then layer by layer. shapes: what a data rank has whole, in the order of names."""
    places: dict[str, list[int]] = {"": []}
    for place, name in enumerate(names):
        places.setdefault(layer_of(name), []).append(place)
    return [
        Bucket(own, [shapes[place] for place in own], comm, is_layer=bool(layer))
        for layer, own in places.items()
        if own
    ]


def layer_of(name: str) -> str:
    """The index of the layer that the parameter of that Hugging Face name is in; empty if it is outside layers."""
    parts = name.split(".")
    return parts[2] if parts[1] == "layers" else ""


class ScatteredGradients:
    """This rank's chunk of every parameter's gradient, summed over the data ranks (ZeRO-2).

    A weight pass goes through the layers from the last to the first, so a layer's gradients are whole, and are
    scattered and forgotten, before the next layer's begin: one reduce-scatter per layer and one for what is outside
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
                if (
                    place in chunks
                ):  # its bucket is sent, and this rank would wait in another collective than the others
                    raise ValueError("a weight pass came back to a layer")
                # a new layer begins, so the one before is whole; what is outside layers is whole only at the end
                for other in self._buckets:
                    if other.is_layer and other is not bucket and other.places[0] in pieces:
                        _scatter(other, pieces, chunks)
                shapes = [self._shapes[own] for own in bucket.places]
                pieces.update(zip(bucket.places, aligned(shapes, self._device), strict=True))
            return pieces[place]

        written = tape.weight_pass(out)
        check_all_written(len(written), len(self._shapes))
        for bucket in self._buckets:
            if bucket.places[0] in pieces:
                _scatter(bucket, pieces, chunks)
        return [chunks[place] for place in range(len(self._shapes))]


def _scatter(bucket: Bucket, pieces: dict[int, Tensor], chunks: dict[int, Tensor]) -> None:
    wholes = [pieces.pop(place) for place in bucket.places]
    chunks.update(zip(bucket.places, bucket.scatter_sum(wholes), strict=True))
