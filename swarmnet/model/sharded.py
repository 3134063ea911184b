"""One rank's share of a stage: the decoder of `model.decoder`, split over the ranks of a peer (arXiv:1909.08053).

Names, order and number of parameters are the unsharded stage's; shapes are those of `model.tensor_plan`. Inputs,
outputs and the loss are whole and the same on every rank, so the driver of the ranks need not know of the split.

A layer's attention and its MLP are each a *region*: a rank enters it with what all ranks agree on, and leaves it with
the sum of what each computed. With sequence parallelism (arXiv:2205.05198) a rank has its share of the tokens
[B, T / ranks, D] outside regions, and all of them inside.

| | forward | backward |
|---|---|---|
| enter | nothing | all-reduce |
| leave | all-reduce | nothing |
| enter, sequence parallel | all-gather | reduce-scatter |
| leave, sequence parallel | reduce-scatter | all-gather |
| to_shares (a stage's input) | nothing | all-gather |
| from_shares (a stage's output) | all-gather | nothing |

Collectives happen in forward and in the backward of the input gradient, in the order of the layers, never in a weight
pass: those may run whenever and in whatever order each rank likes. The price is that a rank keeps a region's whole
input for its weight pass even under sequence parallelism. What is then left partial (`Slice.partial`) takes one
all-reduce, `sum_terms`, for however many microbatches have been summed before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from swarmnet.manifest.schema import Model
from swarmnet.model.activations import RunLayer, plainly
from swarmnet.model.comm import Comm, part_length
from swarmnet.model.decoder import Embedding, Layer, StageModule
from swarmnet.model.initial import draw
from swarmnet.model.precision import operand
from swarmnet.model.split import Tape
from swarmnet.model.tensor_plan import Slice, TensorSplit


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
        self.split, self.comm, self._regions = split, comm, regions
        self._rows = split.part("vocabulary", comm.rank)

    @torch.no_grad()
    def reset(self, *, seed: int) -> None:
        """This rank's slices of the weights of version 0. Draws one whole parameter at a time, on the CPU."""
        for name, parameter in self.named_parameters():
            held = self.split.slice_of(name, self.comm.rank)
            whole = draw(name, whole_shape(parameter, held), self.split.model, seed=seed)
            parameter.copy_(take(whole, held))

    def forward(self, x: Tensor, tape: Tape | None = None, run: RunLayer = plainly) -> Tensor:
        """x: token ids [B, T] if first, else hidden [B, T, D], the same on every rank.

        Returns hidden [B, T, D], the same on every rank, or if last the logits [B, T, v] of this rank's part of the
        vocabulary, for `loss_sum`. Raises ValueError if ranks cannot share T under sequence parallelism.
        run: how to run each layer (`model.activations`); one that is run again repeats its collectives, on every rank.
        """
        cos, sin = self._rotary_tables(x.shape[1], x.device)
        if self.model.embed_tokens is not None:  # each rank has the rows of some ids: a region that all are inside of
            x = self._regions.leave(look_up(x, self.model.embed_tokens, self._rows, tape))
        else:
            x = self._regions.to_shares(x)
        for layer in self.model.layers.values():
            x = run(layer, x, cos, sin, tape)
        # The last stage leaves the logits split: the loss is computed on the parts.
        if self.model.norm is not None and self.lm_head is not None:
            y: Tensor = self.lm_head(self._regions.enter(operand(self.model.norm(x, tape))), tape)
            return y
        return self._regions.from_shares(x)

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of this rank's logits and labels [B, T], summed over tokens: the same on every rank."""
        return cross_entropy_sum(logits, labels, self._rows, self.comm)


# ---------------------------------------------------------------- slices of whole parameters


def whole_shape(part: Tensor, held: Slice) -> torch.Size:
    """Shape of the parameter of which `part` is what a rank holds."""
    # Whole on every rank.
    if held.dim is None:
        return part.shape
    shape = list(part.shape)
    shape[held.dim] = held.length
    return torch.Size(shape)


def take(whole: Tensor, held: Slice) -> Tensor:
    """The view of `whole` that a rank holds."""
    return whole if held.dim is None else whole.narrow(held.dim, held.start, held.stop - held.start)


def sum_terms(parts: Sequence[Tensor], names: Sequence[str], split: TensorSplit, comm: Comm) -> list[Tensor]:
    """`parts`, with partial values replaced by the sum over the ranks that hold the same elements.

    parts: all of one dtype, of parameters `names`, what this rank holds of each or the same rows of that on all ranks.
    One all-reduce, or none if nothing is partial. Every rank calls it at the same position among its collectives.
    """
    summed, spans, size = list(parts), [], 0
    for place, name in enumerate(names):
        if split.slice_of(name, comm.rank).partial and parts[place].numel():
            number, count = _group(name, split, comm.rank)
            spans.append((place, size + number * parts[place].numel()))
            size += count * parts[place].numel()
    if not spans:
        return summed
    # each set of ranks has a range of its own in one flat tensor, zeros in the others': one collective sums all sets
    flat = parts[spans[0][0]].new_zeros(size)
    for place, start in spans:
        flat[start : start + parts[place].numel()] = parts[place].reshape(-1)
    flat = comm.all_reduce(flat)
    for place, start in spans:
        summed[place] = flat[start : start + parts[place].numel()].view(parts[place].shape)
    return summed


def _group(name: str, split: TensorSplit, rank: int) -> tuple[int, int]:
    """Of the sets of ranks that hold the same elements: the number of `rank`'s, and how many there are."""
    starts = sorted({split.slice_of(name, other).start for other in range(split.ranks)})
    return starts.index(split.slice_of(name, rank).start), len(starts)


# ---------------------------------------------------------------- where activations change hands


_TOKENS = 1  # the dimension of [B, T, D] that sequence parallelism cuts

Change = Callable[[Tensor], Tensor]


class Regions:
    """Enter and leave the regions of one stage."""

    def __init__(self, comm: Comm, *, sequence_parallel: bool) -> None:
        self._comm, self._by_tokens = comm, sequence_parallel

    def enter(self, x: Tensor) -> Tensor:
        """x, or all ranks' shares of it."""
        if self._by_tokens:
            return _change(x, self._gather, self._reduce_scatter)
        return _change(x, _same, self._comm.all_reduce)

    def leave(self, x: Tensor) -> Tensor:
        """The sum over ranks of x, or this rank's share of the sum."""
        if self._by_tokens:
            return _change(x, self._reduce_scatter, self._gather)
        return _change(x, self._comm.all_reduce, _same)

    def to_shares(self, x: Tensor) -> Tensor:
        """This rank's share of an x that all ranks have. Raises ValueError if the ranks cannot share its tokens."""
        return _change(x, self._share, self._gather) if self._by_tokens else x

    def from_shares(self, x: Tensor) -> Tensor:
        """All ranks' shares, for consumers that compute the same on every rank."""
        return _change(x, self._gather, self._share) if self._by_tokens else x

    def _gather(self, x: Tensor) -> Tensor:
        return self._comm.all_gather(x, _TOKENS)

    def _reduce_scatter(self, x: Tensor) -> Tensor:
        return self._comm.reduce_scatter(x, _TOKENS)

    def _share(self, x: Tensor) -> Tensor:
        length = part_length(x, _TOKENS, self._comm.size)
        return x.narrow(_TOKENS, self._comm.rank * length, length).contiguous()


class _Change(torch.autograd.Function):
    """One function there, another back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Change, back: Change) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _change(x: Tensor, there: Change, back: Change) -> Tensor:
    y: Tensor = _Change.apply(x, there, back)  # type: ignore[no-untyped-call]
    return y


# ---------------------------------------------------------------- a vocabulary with rows split over ranks


def look_up(ids_BT: Tensor, table: Embedding, rows: range, tape: Tape | None) -> Tensor:
    """This rank's term [B, T, D] of the embedding: rows of `table`, which holds the ids of `rows`; 0 for other ids."""
    own = ids_BT - rows.start
    # Ids of other ranks look up row 0, and are masked: shapes stay the same on all ranks.
    elsewhere = (own < 0) | (own >= len(rows))
    x_BTD: Tensor = table(own.masked_fill(elsewhere, 0), tape)
    return x_BTD.masked_fill(elsewhere.unsqueeze(-1), 0)


def cross_entropy_sum(logits_BTV: Tensor, labels_BT: Tensor, rows: range, comm: Comm) -> Tensor:
    """Cross entropy in nats, summed over tokens, the same on every rank; at least fp32.

    logits_BTV: of the ids of `rows` only; together the ranks' cover the vocabulary. Every label counts. Two
    all-reduces; backward has none, and works in the memory of the probabilities, so it runs once.
    """
    logits_NV = logits_BTV.flatten(0, 1)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_NV, labels_BT.flatten().long() - rows.start, comm
    )
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, own_N: Tensor, comm: Comm) -> Tensor:
        elsewhere_N = (own_N < 0) | (own_N >= logits_NV.shape[1])
        column_N1 = own_N.masked_fill(elsewhere_N, 0).unsqueeze(1)
        # the largest logit of all ranks first: exponentials of what is left are at most 1
        largest_N = comm.all_reduce(logits_NV.amax(-1), "max")
        shifted_NV = logits_NV - largest_N.unsqueeze(1)
        label_N = shifted_NV.gather(1, column_N1).squeeze(1).masked_fill(elsewhere_N, 0)
        exponentials_NV = shifted_NV.exp_()  # in place: a batch of logits is the largest tensor there is
        total_N, label_N = comm.all_reduce(torch.stack((exponentials_NV.sum(-1), label_N))).unbind()
        ctx.save_for_backward(exponentials_NV.div_(total_N.unsqueeze(1)), column_N1, elsewhere_N)
        return (total_N.log() - label_N).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        probabilities_NV, column_N1, elsewhere_N = ctx.saved_tensors
        here_N1 = (~elsewhere_N).unsqueeze(1).to(probabilities_NV.dtype)
        return probabilities_NV.scatter_add_(1, column_N1, -here_N1).mul_(grads[0]), None, None
