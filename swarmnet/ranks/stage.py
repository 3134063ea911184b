"""What one rank computes of a stage, and what it holds: `ranks.layout` with tensors, ZeRO (arXiv:1910.02054).

A stage on one device is one rank that is alone (`ranks.device_backend`); of several, each is a process
(`ranks.program`).

All ranks of a peer get the same orders in the same sequence, so none waits in a collective that others do not enter;
and errors are the same on all: what a rank finds in its part of a gradient is agreed on before anything is added.

Terms of a gradient, those of data ranks and what tensor ranks have in part (`Slice.partial`), are summed once per step,
when the sum is written. With ZeRO-2 and 3 those of data ranks are summed for each microbatch, in fp32, before they are
rounded to the grid; with `averaging.codec = "small"` all are. Everything after the sum is elementwise, so ranks of any
mesh make the same weights of the same sum.

With `averaging.sync = "overlap"` step s is computed on the weights of version s - 1: the weights of two versions are in
two modules, and step s uses module s % 2. The update of step s reads the other one, which holds the newest weights, and
writes into the module of s; the weights there are no longer needed. Before steps overlap both hold the same. The
moments exist once.

Outside the ranks there are only whole tensors in canonical order. Knows no pipes, no processes and no protocol. Of one
thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swarmnet.errors import UsageError
from swarmnet.host import cores
from swarmnet.manifest.schema import StageSpec
from swarmnet.model.base_file import BaseLayout
from swarmnet.model.comm import Comm
from swarmnet.model.decoder import StageModule
from swarmnet.model.frozen import Parts
from swarmnet.model.lora import adapt, drawn_base
from swarmnet.model.sharded import ShardedStage, sum_terms
from swarmnet.ranks.chunks import Gradients, gather, own_chunk, scatter_sum, take_block
from swarmnet.ranks.comm import ProcessComm
from swarmnet.ranks.layout import Block, MeshLayout, MeshSplit, What
from swarmnet.stage import snapshot
from swarmnet.stage.accumulator import Accumulator, largest_magnitude, sum_dtype
from swarmnet.stage.canonical import Canonical, layers_of
from swarmnet.stage.optimizer import MOMENTS, StageOptimizer, average
from swarmnet.stage.passes import ForwardPass, MemoryPolicy, Passes
from swarmnet.stage.rounding import Rectangle, Rounding, Roundings, num_scales
from swarmnet.stage.state import PastWeights

if TYPE_CHECKING:
    from swarmnet.ranks.fully_sharded import FullySharded


@dataclass(slots=True, eq=False)
class _Past:
    """What computes microbatches of past steps again. weights: number of those that are in the module."""

    module: StageModule
    passes: Passes
    weights: int = -1


class RankStage:
    """One rank's part of a stage. tensor, data: its groups along either axis.

    memory: how this rank spends its own. scales: memory of `stage.rounding.Roundings`, which others may write; None:
    new memory. Weights are whatever was there until `read_state` or `reset`. Raises UsageError if these ranks cannot
    share the stage.
    """

    def __init__(
        self,
        spec: StageSpec,
        layout: MeshLayout,
        *,
        tensor: Comm,
        data: Comm,
        device: torch.device,
        memory: MemoryPolicy | None = None,
        scales: Tensor | None = None,
        base: Path | None = None,
    ) -> None:
        assert (data.size, tensor.size) == (layout.data, layout.tensor), layout
        memory = memory or MemoryPolicy()
        if layout.shard == "zero3" and memory.activations == "offload":
            raise UsageError("ZeRO-3 gathers weights, and offloaded activations would take them along: recompute them")
        if memory.compile and spec.lora.r:
            raise UsageError("compile = true is not made for adapters (lora.r): leave it out")
        self.spec, self.device, self._tensor, self._data = spec, device, tensor, data
        self._rank = layout.rank(data.rank, tensor.rank)
        self._split = MeshSplit(spec, layout)
        self._delay = spec.averaging.delay
        self._fully = self._fully_sharded()
        self.canonical = Canonical.of(spec)
        self._shapes = self.canonical.shapes
        self._names = list(self._shapes)
        self._frozen = self._frozen_parts(base)
        self._modules = [self._module() for _ in range(1 + self._delay.most)]
        slices = [self._split.along_tensor(name, shape, self._rank) for name, shape in self._shapes.items()]
        shapes = [torch.Size(block.shape) for block in slices]
        self._gradients = Gradients(shapes, device, data=data if self._split.shards("accumulators") else None)
        self._summed = [torch.Size(self._held("accumulators", name).shape) for name in self._names]
        self.sums = [self.new_share() for _ in self._modules]  # one for each open step
        size = len(self._modules), num_scales(spec.averaging, self._shapes)
        self.scales = torch.zeros(size) if scales is None else scales.view(size)
        self._rounded, self._averages = self._roundings("accumulators"), self._roundings("moments")
        self._optimizer = StageOptimizer(
            self._own(0),
            spec.optimizer,
            delay=self._delay,
            offload=memory.offload_optimizer,
            whole=[math.prod(shape) for shape in self._shapes.values()],
        )
        self._memory = memory
        self._passes = self._new_passes()
        self._past: _Past | None = None

    def _new_passes(self) -> Passes:
        return Passes(
            last=self.spec.last,
            device=self.device,
            tapes=self._fully is None,
            reproducible=self.spec.numerics.deterministic,
            memory=self._memory,
            compute=self.spec.numerics.compute,
        )

    def _fully_sharded(self) -> FullySharded | None:
        """What shards modules, with ZeRO-3: backward is fused then."""
        if not self._split.shards("parameters"):
            return None
        if not isinstance(self._data, ProcessComm) or self._data.group is None:
            raise ValueError("ZeRO-3 needs a process group along the data axis")
        from swarmnet.ranks.fully_sharded import FullySharded  # 0.6 s of imports

        return FullySharded(self._data.group, self.device)

    def _module(self) -> StageModule:
        spec, split, layers = self.spec, self._split.tensor, layers_of(self.spec)
        module: StageModule
        # Made where it rests: a stage that fits the device need not fit elsewhere. With ZeRO-3 no rank ever has memory
        # for the whole module: FSDP makes it of chunks.
        with torch.device(self.device if self._fully is None and not spec.lora.r else "meta"):
            if split.ranks > 1:
                module = ShardedStage(split, layers, first=spec.first, last=spec.last, comm=self._tensor)
            else:
                module = StageModule(spec.model, layers, first=spec.first, last=spec.last)
        if spec.lora.r:
            adapt(module, spec.lora, self._frozen.__getitem__, device=self.device)
        if self._fully is not None:
            self._fully.shard(module)
        return module

    def _frozen_parts(self, base: Path | None) -> dict[str, Parts]:
        """What this rank holds of the frozen weights, which all of its modules share. base: their file; None: they are
        drawn."""
        if not self.spec.lora.r:
            return {}
        layout, found = BaseLayout.of(self.spec), dict[str, Parts]()
        whole = layout.mapped(base) if base is not None else drawn_base(self.spec, layout.shapes)
        for name, shape in layout.shapes.items():
            block = self._split.along_tensor(name, shape, self._rank)
            found[name] = {
                part: take_block(tensor, block.of(tensor.shape, shape)).contiguous().to(self.device)
                for part, tensor in whole(name).items()
            }
        return found

    def sum_of(self, step: int) -> Accumulator:
        """The sum of an open step."""
        return self.sums[step % len(self.sums)]

    def new_share(self) -> Accumulator:
        """What this rank adds up of a sum."""
        size = sum(shape.numel() for shape in self._summed)
        return Accumulator(size, dtype=sum_dtype(self.spec.numerics), device=self.device)

    def _roundings(self, what: What) -> Roundings:
        return Roundings(
            self.spec.numerics,
            self.spec.averaging,
            self._shapes,
            terms=self.spec.training.microbatches * self._split.layout.ranks,
            memory=self.scales,
            held=[self._rectangle(what, name) for name in self._names],
        )

    # ------------------------------------------------------------ microbatches

    def forward(
        self, step: int, tokens: Tensor, hidden: Tensor | None, *, train: bool
    ) -> tuple[Tensor, ForwardPass | None]:
        """Run the module of `step` on this data rank's rows (`MeshSplit.rows`): tokens [b, T + 1] int32, hidden
        [b, T, D], None in the first stage; both ours to keep.

        Returns hidden [b, T, D], in the last stage the sum of these rows' losses: both the same on all tensor ranks;
        and, to train, the work done.
        """
        module = self._modules[step % len(self._modules)]
        output, work = self._passes.forward(module, tokens, hidden, train=train)
        return output.detach(), work

    def backward(self, work: ForwardPass, gradient: Tensor | None) -> Tensor | None:
        """The gradient of these rows' input, None in the first stage; once per pass. gradient: of their output, ours to
        keep, None in the last stage. The same on all tensor ranks."""
        own = work.passes.backward(work, gradient)
        # FSDP has no weight pass apart: its backward leaves gradients at the parameters.
        if self._fully is not None:
            work.gradients = [self._fully.take_gradient(parameter) for parameter in work.module.trained().values()]
        return own

    def accumulate(self, work: ForwardPass, *, step: int, index: int, discards: int) -> bool:
        """Add the gradients of what `backward` has run of to the sum (step, discards), and let go of it.

        False if the sum has that index already, or another discard count. Raises BadMessage(NON_FINITE) or Overflow;
        the sum is unchanged then. All of it alike on all ranks.
        """
        return self._add(work, self.sum_of(step), self._rounded.of(step), step=step, index=index, discards=discards)

    def _add(
        self, work: ForwardPass, total: Accumulator, rounding: Rounding, *, step: int, index: int, discards: int
    ) -> bool:
        if not work.went_back or (work.tape is None and work.gradients is None):
            raise ValueError(f"no gradient to add: microbatch {step}/{index}")
        # What the weight pass needs is free as soon as the gradients are added.
        tape, gradients, work.tape, work.gradients = work.tape, work.gradients, None, None
        if tape is not None:
            gradients = self._gradients.of(tape, list(work.module.trained().values()))
        assert gradients is not None
        # A small grid is too coarse for terms: their sum is rounded, once.
        if self.spec.averaging.codec == "small":
            gradients = sum_terms(gradients, self._names, self._split.tensor, self._tensor)
        largest = self._largest(gradients)
        return total.add(gradients, rounding, step=step, index=index, discards=discards, largest=largest)

    def _largest(self, gradients: Sequence[Tensor]) -> float:
        """The largest magnitude that any rank has: infinity if one has NaN."""
        largest = largest_magnitude(gradients)
        # A single rank agrees with itself.
        if self._split.layout.ranks == 1:
            return largest
        # The maximum of NaN and a number may be the number.
        if not math.isfinite(largest):
            largest = math.inf
        agreed = torch.tensor([largest], dtype=torch.float32, device=self.device)
        for comm in (self._tensor, self._data):  # one after the other: then all ranks have the same number
            if comm.size > 1:
                agreed = comm.all_reduce(agreed, "max")
        return agreed.item()

    # ------------------------------------------------------------ sums and versions

    def write_sum(self, step: int, total: Tensor, held: Accumulator | None = None) -> None:
        """Write what this rank speaks for of the sum of `step` to `total`, flat, in canonical order, on the CPU.

        Terms are summed on the way, parameter by parameter; what the sum is made of stays as it is. held: of another
        sum.
        """
        held = held or self.sum_of(step)
        sizes = [shape.numel() for shape in self._summed]
        pieces = zip(torch.split(held.read(step), sizes), self._summed, strict=True)
        for (name, whole), (piece, shape) in zip(self._cut(total).items(), pieces, strict=True):
            part = piece.view(shape)
            if self._data.size > 1 and not self._split.shards(
                "accumulators"
            ):  # else each rank holds its chunk's sum already
                part = scatter_sum(part, self._data)
            if self.spec.averaging.codec != "small":
                [part] = sum_terms([part], [name], self._split.tensor, self._tensor)
            self._write(name, part, whole)

    @torch.no_grad()
    def update(self, version: int, total: Tensor, *, scale: float, rate: float) -> None:
        """From `version` to the next, with the finished sum `total` times `scale`. total: as of `write_sum`."""
        into = version % len(self._modules)
        own = self._own(into)
        if self._delay.most:  # the module of `version`'s step gets the next weights, made from the newest
            _copy(self._own(self._newest(version)), own)
        self._optimizer.set_num_steps(version)
        threads = torch.get_num_threads()
        # In host memory an update takes this rank's share of all cores: no bit of it depends on how many.
        if self._memory.offload_optimizer:
            torch.set_num_threads(max(cores() // self._split.layout.ranks, 1))
        try:
            self._optimizer.step(self._averaged(version, total, scale), learning_rate=rate, parameters=own)
        finally:
            torch.set_num_threads(threads)
        if self._split.shards("moments") and self._fully is None:
            for parameter in self._live(into):  # each rank has updated its chunk only
                gather(parameter, self._data)
        # Steps do not overlap yet, so both modules hold the newest weights.
        if self._delay.most and not self._delay.behind(version + 1):
            _copy(self._live(into), self._live((version + 1) % len(self._modules)))

    def take(self, version: int) -> None:
        """The weights of `version` have changed where they rest: the optimizer goes on from them."""
        for roundings in (self._rounded, self._averages):
            roundings.changed()
        self._optimizer.take(self._own(self._newest(version)))

    @torch.no_grad()
    def reset(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Become version 0 with these whole weights, in canonical order. What was summed is the caller's to discard."""
        modules = [self._live(number) for number in range(len(self._modules))]
        for place, (name, whole) in enumerate(weights):
            for live in modules:
                live[place].copy_(take_block(whole, self._held("parameters", name)))
        self._optimizer.reset()
        self.take(0)

    def _averaged(self, version: int, total: Tensor, scale: float) -> list[Tensor]:
        """The average gradient of what this rank updates."""
        gradients, rounding = self._gradient_buffers(), self._averages.of(version)
        for place, (gradient, (name, whole)) in enumerate(zip(gradients, self._cut(total).items(), strict=True)):
            block = take_block(whole, self._held("moments", name)).reshape(-1)
            average(block.to(gradient.device), gradient.view(-1), scale=scale, rounding=rounding, place=place)
        return gradients

    def _gradient_buffers(self) -> list[Tensor]:
        """Memory for them: the weight pass's, if it is here and large enough."""
        scratch = self._gradients.scratch
        if self._memory.offload_optimizer or not scratch:
            return self._optimizer.gradient_buffers()
        return [own_chunk(piece, self._data) for piece in scratch] if self._split.shards("moments") else scratch

    def write_state(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Write what this rank speaks for of the state of `version` to `tensors`: whole, fp32, on the CPU, by the names
        of `stage.snapshot`."""
        for number, called in self._named(version):
            for name, chunk in zip(self._names, self._chunks(number), strict=True):
                self._write(name, chunk, tensors[called(name)])
        for name, moments in zip(self._names, self._optimizer.moments, strict=True):
            for moment, tensor in zip(MOMENTS, moments.read(), strict=True):
                own = tensor if self._split.shards("moments") else own_chunk(tensor, self._data)
                self._write(name, own, tensors[snapshot.moment_name(moment, name)])

    @torch.no_grad()
    def read_state(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Become version `version`, with the whole state in `tensors` (see `write_state`). The caller discards what was
        summed."""
        for number, called in self._named(version):
            for name, live in zip(self._names, self._live(number), strict=True):
                live.copy_(take_block(tensors[called(name)], self._held("parameters", name)))
        for name, moments in zip(self._names, self._optimizer.moments, strict=True):
            held = self._held("moments", name)
            moments.write(*(take_block(tensors[snapshot.moment_name(moment, name)], held) for moment in MOMENTS))
        self.take(version)

    def weights(self, version: int) -> list[Tensor]:
        """The live weights of `version`, as far as this rank holds them."""
        return self._live(self._newest(version))

    # ------------------------------------------------------------ steps that are over

    def weights_of(self, step: int) -> list[Tensor]:
        """The weights of an open step, as far as this rank holds them."""
        return self._live(step % len(self._modules))

    def recompute(
        self,
        weights: PastWeights,
        index: int,
        tokens: Tensor,
        hidden: Tensor | None,
        gradient: Tensor | None,
        share: Accumulator | None,
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` and `backward` of this rank's rows of microbatch `index`, in one more module. If `share` is given,
        the gradients are added to that share, rounded by the scales of the step.

        Returns output and input gradient.
        """
        if self._past is None:
            self._past = _Past(self._module(), self._new_passes())
        past, size = self._past, self.canonical.num_elements
        if past.weights != weights.number:
            held = self._held_of(past.module)
            for live, (name, whole) in zip(held, self._cut(weights.memory[:size]).items(), strict=True):
                live.copy_(take_block(whole, self._held("parameters", name)))
            past.weights = weights.number
        output, work = past.passes.forward(past.module, tokens, hidden, train=True)
        assert work is not None
        own = self.backward(work, gradient)
        if share is not None:
            rounding = self._rounded.by(weights.step, weights.memory[size:])
            self._add(work, share, rounding, step=weights.step, index=index, discards=share.discards)
        return output.detach(), own

    def end_recomputing(self) -> None:
        """Give the memory of that module back."""
        self._past = None

    # ------------------------------------------------------------ blocks

    def _newest(self, version: int) -> int:
        """Number of the module with the weights of `version`."""
        return (version + self._delay.most) % len(self._modules)

    def _named(self, version: int) -> list[tuple[int, Callable[[str], str]]]:
        """The modules with weights in a state of `version`, and by which names."""
        named: list[tuple[int, Callable[[str], str]]] = [(self._newest(version), str)]
        if self._delay.most:
            named.append((version % len(self._modules), snapshot.previous_name))
        return named

    def _held(self, what: What, name: str) -> Block:
        return self._split.held(what, name, self._shapes[name], self._rank)

    def _rectangle(self, what: What, name: str) -> Rectangle:
        """The same as rounding sees it: a vector is one row."""
        ranges, shape = self._held(what, name).ranges, self._shapes[name]
        return Rectangle(name, shape[-1], ranges[0] if len(shape) > 1 else range(1), ranges[-1])

    def _live(self, number: int) -> list[Tensor]:
        """Module `number`'s parameters as far as this rank holds them."""
        return self._held_of(self._modules[number])

    def _held_of(self, module: StageModule) -> list[Tensor]:
        fully = self._fully
        return [each.detach() if fully is None else fully.chunk(each) for each in module.trained().values()]

    def _chunks(self, number: int) -> list[Tensor]:
        """This rank's chunks of them: what it speaks for, if no other tensor rank does."""
        live = self._live(number)
        return live if self._fully is not None else [own_chunk(tensor, self._data) for tensor in live]

    def _own(self, number: int) -> list[Tensor]:
        """What this rank updates of them, for which it has the moments."""
        return self._chunks(number) if self._split.shards("moments") else self._live(number)

    def _cut(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of all elements in canonical order, by parameter."""
        pieces = self.canonical.pieces(flat)
        return {name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}

    def _write(self, name: str, chunk: Tensor, whole: Tensor) -> None:
        """If it is this rank's to write: a chunk into what is whole."""
        block = self._split.spoken(name, self._shapes[name], self._rank)
        if block is not None:
            take_block(whole, block).copy_(chunk)


def _copy(source: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for tensor, value in zip(into, source, strict=True):
        tensor.copy_(value)
