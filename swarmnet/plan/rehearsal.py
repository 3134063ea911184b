"""One microbatch and one update on one rank, with tensors that are only shapes: what would be allocated, and when.

Makes what a peer makes, `ranks.stage`, and calls it as the engine does. Only FSDP2 (ZeRO-3) cannot go without its
group: there the rank computes on whole layers, and what is whole but for a while is forgotten at once; `plan.plan` adds
what is gathered. CUDA is rehearsed on the CPU, with the kind of attention kernel it would take.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from swarmnet.manifest.schema import StageSpec
from swarmnet.model.decoder import StageModule
from swarmnet.model.sharded import ShardedStage
from swarmnet.plan.budget import Passage, highest
from swarmnet.plan.metering import LiveBytes, imagined
from swarmnet.ranks.comm import FakeComm
from swarmnet.ranks.layout import MeshLayout, MeshSplit
from swarmnet.ranks.stage import RankStage
from swarmnet.stage.accumulator import Accumulator, sum_dtype
from swarmnet.stage.canonical import Canonical, layers_of
from swarmnet.stage.optimizer import StageOptimizer, average
from swarmnet.stage.outer import Outer
from swarmnet.stage.passes import ForwardPass, MemoryPolicy, Passes
from swarmnet.stage.rounding import FineRounding, NoRounding

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class RehearsedRank:
    """What is rehearsed: a stage, as `rank` of `layout` serves it."""

    spec: StageSpec
    layout: MeshLayout
    rank: int
    memory: MemoryPolicy
    scores: bool
    """Attention has its T x T scores in memory."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """In bytes."""

    state: int
    """What is there always, the finished sum included if it rests on the device."""
    finished_sum: int
    shared: int
    """What the first microbatch leaves to the others."""
    passing: Passage
    """A microbatch on the device."""
    beside: Passage
    """What of it is in host memory meanwhile."""
    update: int
    """The most that an optimizer step takes."""


@functools.lru_cache(maxsize=512)
def rehearse(part: RehearsedRank) -> Rehearsed:
    """Run through it: a microbatch, before it another that leaves its casts where there are any, and an update.

    Each step lets go of what is no longer needed.
    """
    kernels = sdpa_kernel(SDPBackend.MATH) if part.scores else contextlib.nullcontext()
    with imagined() as live, kernels:
        fully = part.layout.shard == "zero3" and part.layout.ranks > 1
        rank = _FullySharded(part, live) if fully else _Whole(part)
        state = sum(live.take()[0])
        here = rank.hold_sum()
        finished_sum = here * sum(live.take()[0])
        order = (rank.forward, rank.backward, rank.accumulate)
        for each in order if part.spec.numerics.compute == "bf16" else ():
            each()
        shared = sum(live.take()[0]) * (1 + part.spec.averaging.delay.most)
        passes = []
        for each in order:
            each()
            passes.append(live.take())
        rank.update()
        device, host = (Passage.of(*deltas) for deltas in zip(*passes, strict=True))
        return Rehearsed(state + finished_sum, finished_sum, shared, device, host, highest(live.take()[0]))


class _Inputs:
    """Of one microbatch, as a rank gets its rows of them."""

    def __init__(self, part: RehearsedRank) -> None:
        spec, training = part.spec, part.spec.training
        self._first, self._last = spec.first, spec.last
        rows = len(MeshSplit.of(spec, part.layout).rows(part.rank))
        self._shape = (rows, training.sequence_length, spec.model.hidden_size)

    def tokens(self) -> Tensor:
        return torch.zeros(self._shape[0], self._shape[1] + 1, dtype=torch.int32)

    def hidden(self) -> Tensor | None:
        return None if self._first else torch.zeros(self._shape)

    def gradient(self) -> Tensor | None:
        return None if self._last else torch.zeros(self._shape)


class _Whole:
    """`RankStage`, in groups of which it is alone; a peer of one rank also has the outer optimizer and the sum."""

    def __init__(self, part: RehearsedRank) -> None:
        spec, layout, self._inputs = part.spec, part.layout, _Inputs(part)
        d, t = layout.coordinates(part.rank)
        tensor, data = FakeComm(t, layout.tensor), FakeComm(d, layout.data)
        self._rank = RankStage(spec, layout, part.rank, tensor=tensor, data=data, device=_CPU, memory=part.memory)
        self._alone = layout.ranks == 1
        self._outer = Outer.of(spec.averaging, self._rank.weights(0)) if self._alone else None
        self._work: ForwardPass | None = None

    def hold_sum(self) -> bool:
        """Make room for a finished sum: is it on the device?"""
        if self._outer is not None:
            # It steps with what it has accumulated itself.
            self._total = self._rank.sums[0].read(0)
        else:
            numerics, size = self._rank.spec.numerics, self._rank.canonical.num_elements
            self._total = torch.zeros(size, dtype=sum_dtype(numerics))
        return self._alone  # else it is in the peer process

    def forward(self) -> None:
        _, self._work = self._rank.forward(0, self._inputs.tokens(), self._inputs.hidden(), train=True)

    def backward(self) -> None:
        assert self._work is not None
        self._rank.backward(self._work, self._inputs.gradient())

    def accumulate(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        self._rank.accumulate(work, step=0, index=0, voids=0)

    def update(self) -> None:
        if self._outer is not None:
            self._rank.take(0)
        self._rank.update(0, self._total, scale=1.0, rate=1.0)


class _FullySharded:
    """ZeRO-3 as far as it goes without FSDP2: chunks of state; whole layers, which are not counted; and gradients that
    are chunks as soon as they are there."""

    def __init__(self, part: RehearsedRank, live: LiveBytes) -> None:
        spec, layout, self._inputs = part.spec, part.layout, _Inputs(part)
        mesh, shapes, layers = MeshSplit.of(spec, layout), Canonical.of(spec).shapes, layers_of(spec)
        _, t = layout.coordinates(part.rank)
        self._module = (
            StageModule(spec.model, layers, first=spec.first, last=spec.last)
            if layout.tensor == 1
            else ShardedStage(mesh.tensor, layers, first=spec.first, last=spec.last, comm=FakeComm(t, layout.tensor))
        )
        live.take()
        self._passes = Passes(
            last=spec.last,
            device=_CPU,
            tapes=False,
            memory=part.memory,
            reproducible=spec.numerics.deterministic,
            compute=spec.numerics.compute,
        )
        held = [mesh.held("moments", name, shape, part.rank) for name, shape in shapes.items()]
        self._chunks = [torch.Size(block.shape) for block in held]
        self._dtype = sum_dtype(spec.numerics)
        integers = spec.numerics.integers
        self._rounding = FineRounding(spec.numerics.grid_bits, 1) if integers else NoRounding()
        for parameter in self._module.trained().values():
            parameter.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
        versions = range(1 + spec.averaging.delay.most)
        self._weights = [self._empty() for _ in versions]
        size = sum(chunk.numel() for chunk in self._chunks)
        self._sums = [Accumulator(size, dtype=self._dtype, device=_CPU) for _ in versions]
        whole = [math.prod(shape) for shape in shapes.values()]
        self._optimizer = StageOptimizer(self._weights[0], spec.optimizer, whole=whole)
        self._gradients: list[Tensor] = []
        self._work: ForwardPass | None = None

    def _empty(self) -> list[Tensor]:
        return [torch.empty(chunk) for chunk in self._chunks]

    def hold_sum(self) -> bool:
        return False

    def forward(self) -> None:
        tokens, hidden = self._inputs.tokens(), self._inputs.hidden()
        _, self._work = self._passes.forward(self._module, tokens, hidden, train=True)

    def backward(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        self._passes.backward(work, self._inputs.gradient())
        self._gradients = self._empty()

    def accumulate(self) -> None:
        gradients, self._gradients = self._gradients, []
        self._sums[0].add(gradients, self._rounding, step=0, index=0, voids=0)

    def update(self) -> None:
        gradients = self._empty()
        for place, gradient in enumerate(gradients):
            total = torch.empty(gradient.numel(), dtype=self._dtype)
            average(total, gradient.view(-1), scale=1.0, rounding=self._rounding, place=place)
        self._optimizer.step(gradients, learning_rate=1.0)


def _forget(parameter: Tensor) -> None:
    parameter.grad = None
