"""Weight passes of a rank, and chunks along the data axis of a mesh, exchanged a bucket at a time.

A bucket is the parameters of a layer, or those outside layers.

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
from swarmnet.stage.passes import aligned


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


class Gradients:
    """The weight pass of one microbatch: fp32, one gradient for each parameter.

    Whole, they are written over the last microbatch's, in `scratch`, which is free between weight passes. Scattered
    (ZeRO-2), each is this rank's chunk of the sum over the data ranks, and there is no scratch: a weight pass goes
    through the layers from the last to the first, so a layer's gradients are whole, and are scattered and forgotten,
    before the next layer's begin. That is one reduce-scatter per layer and one for what is outside layers, and memory
    for one layer. Every rank calls it at the same place among its collectives.

    shapes: of what a data rank has whole, in canonical order.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], buckets: Sequence[Bucket], device: torch.device, *, scattered: bool
    ) -> None:
        self._shapes, self._device, self._scattered = shapes, device, scattered
        self._buckets = list(buckets) if scattered else []
        self._bucket_of = {place: bucket for bucket in self._buckets for place in bucket.places}
        self.scratch = [] if scattered else aligned(shapes, device)

    def of(self, tape: Tape, parameters: Sequence[Parameter]) -> list[Tensor]:
        """Run the weight pass of a module with these parameters. Whole gradients are valid until the next call.

        Raises ValueError if a parameter gets none: it would keep the last microbatch's.
        """
        places = {parameter: place for place, parameter in enumerate(parameters)}
        wholes, chunks = dict(enumerate(self.scratch)), dict[int, Tensor]()

        def scatter(bucket: Bucket) -> None:
            pieces = [wholes.pop(place) for place in bucket.places]
            chunks.update(zip(bucket.places, bucket.scatter_sum(pieces), strict=True))

        def out(parameter: Parameter) -> Tensor:
            place = places[parameter]
            if place in chunks:  # this rank would wait in another collective than the others
                raise ValueError("a weight pass came back to a layer")
            if place not in wholes:
                # A layer begins, so the one before is whole; what is outside layers is whole only at the end.
                for before in self._buckets:
                    if before.is_layer and before.places[0] in wholes:
                        scatter(before)
                own = self._bucket_of[place].places
                wholes.update(zip(own, aligned([self._shapes[each] for each in own], self._device), strict=True))
            return wholes[place]

        if (written := len(tape.weight_pass(out))) != len(places):
            raise ValueError(f"a weight pass wrote {written} of {len(places)} parameters")
        for bucket in self._buckets:
            if bucket.places[0] in wholes:
                scatter(bucket)
        found = chunks if self._scattered else wholes
        return [found[place] for place in range(len(places))]
