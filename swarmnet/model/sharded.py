"""One rank's share of a stage: the decoder of `model.decoder`, split over the ranks of a peer (arXiv:1909.08053).

Names, order and number of parameters are the unsharded stage's; shapes are those of `model.slices`. Inputs, outputs
and the loss are whole and the same on every rank, so whoever drives the ranks need not know of the split.

Collectives happen in forward and in the backward of the input gradient (`model.regions`), in the order of the layers,
never in a weight pass: those may run whenever and in whatever order each rank likes. The price is that a rank keeps a
region's whole input for its weight pass even under sequence parallelism. What is then left partial (`Slice.partial`)
takes one all-reduce, `reduce_partial`, for however many microbatches have been summed before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnet.manifest.schema import Model
from swarmnet.model.activations import RunLayer, plainly
from swarmnet.model.comm import Comm
from swarmnet.model.decoder import Layer, StageModule
from swarmnet.model.initial import draw
from swarmnet.model.partial import sum_terms
from swarmnet.model.precision import operand
from swarmnet.model.regions import Regions
from swarmnet.model.sharding import take, whole_shape
from swarmnet.model.slices import Slice, TensorSplit
from swarmnet.model.split import Tape
from swarmnet.model.vocabulary import cross_entropy_sum, look_up


class ShardedLayer(Layer):
    """One decoder layer of which this rank holds some heads and some of the MLP's width: two regions."""

    def __init__(self, local: Model, regions: Regions) -> None:
        super().__init__(local)
        self._regions = regions

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, tape: Tape | None) -> Tensor:
        """x: [B, T, D], or this rank's tokens of it. cos, sin: of all tokens."""
        enter, leave = self._regions.enter, self._regions.leave
        x = x + leave(self.self_attn(enter(operand(self.input_layernorm(x, tape))), cos, sin, tape))
        y: Tensor = x + leave(self.mlp(enter(operand(self.post_attention_layernorm(x, tape))), tape))
        return y


class ShardedStage(StageModule):
    """What `comm.rank` holds of layers `layers`, with its part of the embedding if `first`, of the head if `last`."""

    def __init__(self, split: TensorSplit, layers: range, *, first: bool, last: bool, comm: Comm) -> None:
        if comm.size != split.ranks:
            raise ValueError(f"a split over {split.ranks} ranks in a group of {comm.size}")
        regions = Regions(comm, sequence_parallel=split.sequence_parallel)
        super().__init__(
            split.local(comm.rank), layers, first=first, last=last, layer=lambda local: ShardedLayer(local, regions)
        )
        self._split, self._comm, self._regions = split, comm, regions
        self._rows = split.vocabulary(comm.rank)
        self._names = [name for name, _ in self.named_parameters()]

    def slice_of(self, name: str) -> Slice:
        """What this rank holds of parameter `name`."""
        return self._split.slice_of(name, self._comm.rank)

    @torch.no_grad()
    def reset(self, *, seed: int) -> None:
        """This rank's slices of the weights of version 0. Draws one whole parameter at a time, on the CPU."""
        for name, parameter in self.named_parameters():
            held = self.slice_of(name)
            whole = draw(name, whole_shape(parameter, held), self._split.model, seed=seed)
            parameter.copy_(take(whole, held))

    def forward(self, x: Tensor, tape: Tape | None = None, run: RunLayer = plainly) -> Tensor:
        """x: token ids [B, T] if first, else hidden [B, T, D], the same on every rank.

        Returns hidden [B, T, D], the same on every rank, or if last the logits [B, T, v] of this rank's part of the
        vocabulary, for `loss_sum`. Raises ValueError if ranks cannot share T under sequence parallelism.
        run: how to run each layer (`model.activations`); one that is run again repeats its collectives, on every rank.
        """
        cos, sin = self._rotary_tables(x.shape[1], x.device)
        if self.model.embed_tokens is not None:
            x = self._regions.leave(look_up(x, self.model.embed_tokens, self._rows, tape))
        else:
            x = self._regions.to_shares(x)
        for layer in self.model.layers.values():
            x = run(layer, x, cos, sin, tape)
        if self.model.norm is not None and self.lm_head is not None:
            y: Tensor = self.lm_head(self._regions.enter(operand(self.model.norm(x, tape))), tape)
            return y
        return self._regions.from_shares(x)

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of this rank's logits and labels [B, T], summed over tokens: the same on every rank."""
        return cross_entropy_sum(logits, labels, self._rows, self._comm)

    @torch.no_grad()
    def reduce_partial(self, gradients: Sequence[Tensor]) -> None:
        """Sum in place, over ranks, what is partial of `gradients`: all of one dtype, one per parameter, in order.

        One all-reduce, or none if nothing is partial. Once per sum, whatever it has summed: sums of microbatches
        commute with it. Every rank calls it at the same place among its collectives.
        """
        for gradient, summed in zip(gradients, sum_terms(gradients, self._names, self._split, self._comm), strict=True):
            if summed is not gradient:
                gradient.copy_(summed)
