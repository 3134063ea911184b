"""Weight passes of a rank, and chunks along the data axis of a mesh, exchanged one parameter at a time.

A parameter's chunks are those of `ranks.layout.chunk`. In a collective all have the length of the first, so the last
ones are padded. It takes temporary memory for one parameter and not for the stage. Knows no optimizer and no
accumulator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

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


def scatter_sum(whole: Tensor, comm: Comm) -> Tensor:
    """This rank's chunk of the sum of `whole` over the data ranks. One reduce-scatter."""
    longest = len(chunk(whole.shape[0], 0, comm.size))
    summed = comm.reduce_scatter(_padded(whole, comm.size * longest), 0)
    return summed[: len(chunk(whole.shape[0], comm.rank, comm.size))]


@torch.no_grad()
def gather(whole: Tensor, comm: Comm) -> None:
    """Write every rank's chunk over `whole`, of which this rank's chunk is right. One all-gather."""
    longest = len(chunk(whole.shape[0], 0, comm.size))
    whole.copy_(comm.all_gather(_padded(own_chunk(whole, comm), longest), 0)[: len(whole)])


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """With zeros up to so many rows."""
    missing = rows - len(tensor)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


class Gradients:
    """The weight pass of one microbatch: fp32, one gradient for each parameter.

    Whole, they are written over the last microbatch's, in `scratch`, which is free between weight passes. Scattered
    over `data` (ZeRO-2), each is this rank's chunk of the sum over the data ranks, and there is no scratch: each
    gradient is scattered and freed once it is whole. That is one reduce-scatter per parameter, and memory for the
    parameters that are not whole yet. Every rank calls it at the same point in its sequence of collectives.

    shapes: of what a data rank has whole, in canonical order.
    """

    def __init__(self, shapes: Sequence[torch.Size], device: torch.device, *, data: Comm | None) -> None:
        self._shapes, self._device, self._data = shapes, device, data
        self.scratch = aligned(shapes, device) if data is None else []

    def of(self, tape: Tape, parameters: Sequence[Parameter]) -> list[Tensor]:
        """Run the weight pass of a module with these parameters. Whole gradients are valid until the next call.

        Raises ValueError if a parameter gets none: it would keep the last microbatch's.
        """
        data, shapes = self._data, dict(zip(parameters, self._shapes, strict=True))
        found, wholes = dict(zip(parameters, self.scratch, strict=data is None)), dict[Parameter, Tensor]()

        def out(parameter: Parameter) -> Tensor:
            if parameter not in wholes:
                wholes[parameter] = aligned([shapes[parameter]], self._device)[0]
            return wholes[parameter]

        def scatter(parameter: Parameter) -> None:
            assert data is not None
            found[parameter] = scatter_sum(wholes.pop(parameter), data)

        written = tape.weight_pass(found.__getitem__) if data is None else tape.weight_pass(out, scatter)
        if len(written) != len(parameters):
            raise ValueError(f"a weight pass wrote {len(written)} of {len(parameters)} parameters")
        return [found[parameter] for parameter in parameters]
