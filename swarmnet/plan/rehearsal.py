"""One microbatch and one update on one rank, with tensors that are only shapes: what would be allocated, and when.

Makes what a peer makes, `ranks.device_backend` or `ranks.stage`, and calls it as the engine does. Only FSDP2 (ZeRO-3)
cannot go without its group: there the rank computes on whole layers, and what is whole but for a while is forgotten at
once; `plan.plan` adds what is gathered. CUDA is rehearsed on the CPU, with the kind of attention kernel it would take.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from swarmnet.ids import Ballot, Chain, PeerId, RoundId
from swarmnet.manifest.schema import Manifest
from swarmnet.messages import Commit
from swarmnet.model.cut import cut_layers
from swarmnet.model.decoder import StageModule
from swarmnet.model.sharded import ShardedStage
from swarmnet.plan.budget import Passage, along, highest
from swarmnet.plan.metering import LiveBytes, imagined
from swarmnet.ranks.comm import FakeComm
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.ranks.layout import MeshLayout, MeshSplit
from swarmnet.ranks.stage import RankStage
from swarmnet.stage.accumulator import Accumulator, sum_dtype
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.optimizer import StageOptimizer, average
from swarmnet.stage.passes import ForwardPass, MemoryPolicy, Passes

_CPU = torch.device("cpu")
_ROUND = RoundId(Ballot(0, PeerId("")), 0)


@dataclass(frozen=True, slots=True)
class RehearsedRank:
    """What is rehearsed. stage: of `manifest`, as `rank` of `layout` serves it. scores: attention has its T x T scores
    in memory."""

    manifest: Manifest
    stage: int
    layout: MeshLayout
    rank: int
    memory: MemoryPolicy
    scores: bool


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """In bytes. state: what is there always, the finished sum included if it rests on the device. shared: what the
    first microbatch leaves to the others. passing, beside: a microbatch on the device, and in host memory beside it.
    update: the most that an optimizer step takes."""

    state: int
    finished_sum: int
    shared: int
    passing: Passage
    beside: Passage
    update: int

    def along(self, other: Rehearsed, share: float) -> Rehearsed:
        """Each figure on the line from here to `other`."""
        return Rehearsed(
            along(self.state, other.state, share),
            along(self.finished_sum, other.finished_sum, share),
            along(self.shared, other.shared, share),
            along(self.passing, other.passing, share),
            along(self.beside, other.beside, share),
            along(self.update, other.update, share),
        )


def rehearse(part: RehearsedRank) -> Rehearsed:
    """Run through it: a microbatch, before it another that leaves its casts where there are any, and an update."""
    kernels = sdpa_kernel(SDPBackend.MATH) if part.scores else contextlib.nullcontext()
    with imagined() as live, kernels:
        rank = _rank(part, live)
        state = sum(live.take()[0])
        here = rank.hold_sum()
        finished_sum = here * sum(live.take()[0])
        order = (rank.forward, rank.backward, rank.accumulate)
        for each in order if part.manifest.numerics.compute == "bf16" else ():
            each()
        shared = sum(live.take()[0]) * (1 + part.manifest.averaging.delay.most)
        passes = []
        for each in order:
            each()
            passes.append(live.take())
        rank.update()
        device, host = zip(*passes, strict=True)
        return Rehearsed(
            state + finished_sum, finished_sum, shared, Passage.of(*device), Passage.of(*host), highest(live.take()[0])
        )


class _Rank(Protocol):
    """The steps, in this order; each lets go of what is no longer needed. hold_sum: make room for a finished sum; is it
    on the device?"""

    def hold_sum(self) -> bool: ...
    def forward(self) -> None: ...
    def backward(self) -> None: ...
    def accumulate(self) -> None: ...
    def update(self) -> None: ...


def _rank(part: RehearsedRank, live: LiveBytes) -> _Rank:
    if part.layout.ranks == 1:
        return _Own(part)
    return _FullySharded(part, live) if part.layout.shard == "zero3" else _OfMesh(part)


class _Inputs:
    """Of one microbatch, as a rank with so many rows gets them."""

    def __init__(self, part: RehearsedRank) -> None:
        manifest, stages = part.manifest, part.manifest.cut.stages
        self._rows = len(MeshSplit(manifest.model, part.layout, manifest.training).rows(part.rank))
        self._length, self._width = manifest.training.sequence_length, manifest.model.hidden_size
        self.first, self.last = part.stage == 0, part.stage == stages - 1

    def tokens(self) -> Tensor:
        return torch.zeros(self._rows, self._length + 1, dtype=torch.int32)

    def hidden(self) -> Tensor | None:
        return None if self.first else torch.zeros(self._rows, self._length, self._width)

    def gradient(self) -> Tensor | None:
        return None if self.last else torch.zeros(self._rows, self._length, self._width)


class _Own:
    """`DeviceBackend`."""

    def __init__(self, part: RehearsedRank) -> None:
        self._manifest, self._inputs = part.manifest, _Inputs(part)
        self._body = DeviceBackend(part.manifest.of_stage(part.stage), device=_CPU, memory=part.memory)
        self._work: object | None = None

    def hold_sum(self) -> bool:
        local = self._manifest.averaging.sync == "local"  # then it steps with what it has accumulated itself
        self._total = self._body.sums[0].read(0) if local else self._body.sum_memory()
        return True

    def forward(self) -> None:
        _, self._work = self._body.forward(0, self._inputs.tokens(), self._inputs.hidden(), train=True)

    def backward(self) -> None:
        assert self._work is not None
        self._body.backward(self._work, self._inputs.gradient())

    def accumulate(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        self._body.accumulate(work, step=0, index=0, voids=0)

    def update(self) -> None:
        commits = [
            Commit(stage, 0, Chain(""), _ROUND, b"", num_tokens=1, loss_sum=0.0, grad_sq_norm=1.0)
            for stage in range(self._manifest.cut.stages)
        ]
        self._body.state.apply(self._total, commits)


class _OfMesh:
    """`RankStage` in groups of which it is alone."""

    def __init__(self, part: RehearsedRank) -> None:
        self._manifest, self._inputs = part.manifest, _Inputs(part)
        d, t = part.layout.coordinates(part.rank)
        self._stage = RankStage(
            part.manifest.of_stage(part.stage),
            part.layout,
            part.rank,
            tensor=FakeComm(t, part.layout.tensor),
            data=FakeComm(d, part.layout.data),
            device=_CPU,
            memory=part.memory,
        )
        self._work: ForwardPass | None = None
        self._num_elements = Canonical.of(part.manifest.of_stage(part.stage)).num_elements

    def hold_sum(self) -> bool:
        self._total = torch.zeros(self._num_elements, dtype=sum_dtype(self._manifest.numerics))
        return False  # it is in the peer process

    def forward(self) -> None:
        _, self._work = self._stage.forward(0, self._inputs.tokens(), self._inputs.hidden(), train=True)

    def backward(self) -> None:
        assert self._work is not None
        self._stage.backward(self._work, self._inputs.gradient())

    def accumulate(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        self._stage.accumulate(work, step=0, index=0, voids=0)

    def update(self) -> None:
        self._stage.update(0, self._total, scale=1.0, rate=1.0)


class _FullySharded:
    """ZeRO-3 as far as it goes without FSDP2: chunks of state; whole layers, which are not counted; and gradients that
    are chunks as soon as they are there."""

    def __init__(self, part: RehearsedRank, live: LiveBytes) -> None:
        manifest, layout, self._inputs = part.manifest, part.layout, _Inputs(part)
        mesh, shapes = (
            MeshSplit(manifest.model, layout, manifest.training),
            Canonical.of(manifest.of_stage(part.stage)).shapes,
        )
        ranges = cut_layers(manifest.model, manifest.cut, manifest.training.sequence_length)
        layers, first, last = ranges[part.stage], self._inputs.first, self._inputs.last
        _, t = layout.coordinates(part.rank)
        self._module = (
            StageModule(manifest.model, layers, first=first, last=last)
            if layout.tensor == 1
            else ShardedStage(mesh.tensor, layers, first=first, last=last, comm=FakeComm(t, layout.tensor))
        )
        live.take()
        self._passes = Passes(
            first=first,
            last=last,
            device=_CPU,
            tapes=False,
            memory=part.memory,
            reproducible=manifest.numerics.mode == "deterministic",
            compute=manifest.numerics.compute,
        )
        held = [mesh.held("moments", name, shape, part.rank) for name, shape in shapes.items()]
        self._chunks = [torch.Size(block.shape) for block in held]
        self._numerics = manifest.numerics
        for parameter in self._module.parameters():
            parameter.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
        versions = range(1 + manifest.averaging.delay.most)
        self._weights = [[torch.empty(chunk) for chunk in self._chunks] for _ in versions]
        size = sum(chunk.numel() for chunk in self._chunks)
        self._sums = [Accumulator(size, manifest.numerics, max_microbatches=1, device=_CPU) for _ in versions]
        self._optimizer = StageOptimizer(
            self._weights[0], manifest.optimizer, whole=[math.prod(shape) for shape in shapes.values()]
        )
        self._gradients: list[Tensor] = []
        self._work: ForwardPass | None = None

    def hold_sum(self) -> bool:
        return False

    def forward(self) -> None:
        tokens, hidden = self._inputs.tokens(), self._inputs.hidden()
        _, self._work = self._passes.forward(self._module, tokens, hidden, train=True)

    def backward(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        self._passes.backward(work, self._inputs.gradient())
        self._gradients = [torch.empty(chunk) for chunk in self._chunks]

    def accumulate(self) -> None:
        gradients, self._gradients = self._gradients, []
        self._sums[0].add(gradients, step=0, index=0, voids=0)

    def update(self) -> None:
        gradients = [torch.empty(chunk) for chunk in self._chunks]
        for gradient in gradients:
            total = torch.empty(gradient.numel(), dtype=sum_dtype(self._numerics))
            average(total, gradient.view(-1), scale=1.0, numerics=self._numerics)
        self._optimizer.step(gradients, learning_rate=1.0)


def _forget(parameter: Tensor) -> None:
    parameter.grad = None
