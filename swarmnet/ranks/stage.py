"""What one rank of a mesh computes of a stage, and what it holds: `ranks.layout` with tensors, ZeRO (arXiv:1910.02054).

All ranks of a peer get the same orders in the same sequence, so none waits in a collective that others do not enter;
and errors are the same on all: what a rank finds in its part of a gradient is agreed on before anything is added.

Terms of a gradient, those of data ranks and what tensor ranks have in part (`Slice.partial`), are summed once per step,
when the sum is written; with ZeRO-2 and 3 those of data ranks for each microbatch, in fp32, before they are rounded to
the grid. Everything after the sum is elementwise, so ranks of any mesh make the same weights of the same sum.

Outside the ranks there are only whole tensors in canonical order. Knows no pipes, no processes and no protocol. Rank's
thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Manifest
from swarmnet.model.comm import Comm
from swarmnet.model.cut import cut_layers
from swarmnet.model.decoder import StageModule
from swarmnet.model.sharded import ShardedStage, sum_terms
from swarmnet.ranks.buckets import ScatteredGradients, buckets_of, own_chunk, take_block
from swarmnet.ranks.comm import ProcessComm
from swarmnet.ranks.layout import Block, MeshLayout, MeshSplit, What
from swarmnet.stage import snapshot
from swarmnet.stage.accumulator import Accumulator, largest_magnitude
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.gradients import WholeGradients
from swarmnet.stage.optimizer import MOMENTS, StageOptimizer, average
from swarmnet.stage.passes import ForwardPass, MemoryPolicy, Passes

if TYPE_CHECKING:
    from swarmnet.ranks.fully_sharded import FullySharded


@dataclass(slots=True, eq=False)
class _Stash:
    """One microbatch in flight. changes: how often the module it was computed on had got other weights. gradients:
    chunks that a fused backward has left."""

    step: int
    changes: int
    work: ForwardPass
    gradients: list[Tensor] | None = None


class RankStage:
    """Rank `rank`'s part of stage `stage`. tensor, data: its groups along either axis.

    memory: how this rank spends its own. Weights are whatever was there until `read_state`. Raises UsageError if these
    ranks cannot share the stage.
    """

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        layout: MeshLayout,
        rank: int,
        *,
        tensor: Comm,
        data: Comm,
        device: torch.device,
        memory: MemoryPolicy | None = None,
    ) -> None:
        if (data.rank, tensor.rank) != layout.coordinates(rank) or (data.size, tensor.size) != (
            layout.data,
            layout.tensor,
        ):
            raise ValueError(f"rank {rank} of {layout.label} in groups of {data.size} and {tensor.size}")
        if layout.shard == "zero3" and memory is not None and memory.activations == "offload":
            raise UsageError("ZeRO-3 gathers weights, and offloaded activations would take them along: recompute them")
        self._manifest, self._device, self._rank = manifest, device, rank
        self._split, self._tensor, self._data = (
            MeshSplit(manifest.model, layout, manifest.training.microbatch_size, manifest.training.sequence_length),
            tensor,
            data,
        )
        self._delay = manifest.averaging.delay
        ranges = cut_layers(manifest.model, manifest.cut, manifest.training.sequence_length)
        self._layers, self._first, self._last = ranges[stage], stage == 0, stage == len(ranges) - 1
        self._fully = self._fully_sharded()
        self._scatters = self._split.shards("accumulators") and layout.data > 1
        self._canonical = Canonical.of(manifest, stage)
        self._shapes = self._canonical.shapes
        self._names = list(self._shapes)
        self._modules = [self._module() for _ in range(1 + self._delay.most)]
        self._parameters = [list(module.parameters()) for module in self._modules]
        self._make_sums()
        self._offload = memory is not None and memory.offload_optimizer
        self._optimizer = StageOptimizer(
            self._own(0),
            manifest.optimizer,
            offload=self._offload,
            whole=[math.prod(shape) for shape in self._shapes.values()],
        )
        self._passes = Passes(
            first=self._first,
            last=self._last,
            device=device,
            tapes=self._fully is None,
            reproducible=manifest.numerics.mode == "deterministic",
            memory=memory,
            compute=manifest.numerics.compute,
        )
        self._changes = [0] * len(self._modules)
        self._stashes: dict[int, _Stash] = {}

    def _fully_sharded(self) -> FullySharded | None:
        """What shards modules, with ZeRO-3: backward is fused then."""
        if not self._split.shards("parameters") or self._data.size == 1:
            return None
        if not isinstance(self._data, ProcessComm):
            raise ValueError("ZeRO-3 needs a process group along the data axis")
        from swarmnet.ranks.fully_sharded import FullySharded  # 0.6 s of imports

        return FullySharded(self._data.group, self._device)

    def _module(self) -> StageModule:
        split, layers, first, last = self._split.tensor, self._layers, self._first, self._last
        module: StageModule
        # with ZeRO-3 no rank ever has memory for the whole module: FSDP makes it of chunks
        with torch.device(self._device if self._fully is None else "meta"):
            if split.ranks > 1:
                module = ShardedStage(split, layers, first=first, last=last, comm=self._tensor)
            else:
                module = StageModule(self._manifest.model, layers, first=first, last=last)
        if self._fully is not None:
            self._fully.shard(module)
        return module

    def _make_sums(self) -> None:
        """Scratch for the weight pass, and the accumulators."""
        shapes = [torch.Size(self._slice(name).shape) for name in self._names]
        places = {parameter: place for parameters in self._parameters for place, parameter in enumerate(parameters)}
        self._buckets = buckets_of(self._names, shapes, self._data)
        self._gradients: WholeGradients | ScatteredGradients | None = None
        if self._fully is None and self._scatters:
            self._gradients = ScatteredGradients(places, shapes, self._buckets, self._device)
        elif self._fully is None:
            self._gradients = WholeGradients(places, shapes, self._device)
        blocks = [self._held("accumulators", name) for name in self._names]
        self._summed = [torch.Size(block.shape) for block in blocks]
        self._sums = [
            Accumulator(
                sum(block.num_elements for block in blocks),
                self._manifest.numerics,
                device=self._device,
                max_microbatches=self._manifest.training.microbatches * self._split.layout.ranks,
            )
            for _ in self._modules
        ]

    # ------------------------------------------------------------ microbatches

    def forward(self, key: int, step: int, tokens: Tensor, hidden: Tensor | None, *, train: bool) -> Tensor:
        """Run the module of `step` on this data rank's rows (`MeshSplit.rows`): tokens [b, T + 1] int32, hidden
        [b, T, D], None in the first stage; both stay the caller's. `key` is what to call it by until it is dropped.

        Returns hidden [b, T, D], in the last stage the sum of these rows' losses: both the same on all tensor ranks.
        """
        if key in self._stashes:
            raise ValueError(f"two microbatches called {key}")
        output, work = self._passes.forward(
            self._modules[step % len(self._modules)],
            tokens.to(self._device, copy=True),
            self._copy(hidden),
            train=train,
        )
        if work is not None:
            self._stashes[key] = _Stash(step, self._changes[step % len(self._modules)], work)
        return output.detach()

    def backward(self, key: int, gradient: Tensor | None) -> Tensor | None:
        """The gradient of these rows' input, None in the first stage; once per key. gradient: of their output, None in
        the last stage. The same on all tensor ranks."""
        stash = self._stashes[key]
        self._check(key, stash)
        own = self._passes.backward(stash.work, self._copy(gradient))
        if self._fully is not None:
            parameters = self._parameters[stash.step % len(self._modules)]
            stash.gradients = [self._fully.take_gradient(parameter) for parameter in parameters]
        return own

    def accumulate(self, key: int, *, step: int, index: int, voids: int) -> bool:
        """Add the gradients of what `backward` has run of to the sum (step, voids), and forget it.

        False if the sum has that index already. Raises BadMessage(NON_FINITE) or Overflow; the sum is unchanged then.
        All of it alike on all ranks.
        """
        stash = self._stashes.pop(key)
        work, tape = stash.work, stash.work.tape
        self._check(key, stash)
        if not work.went_back or stash.step != step:
            raise ValueError(f"no gradient of step {step} to add: microbatch {key} of {stash.step}")
        if self._gradients is not None:
            assert tape is not None
            gradients = self._gradients.of(tape)
        else:
            assert stash.gradients is not None
            gradients = stash.gradients
        total = self._sums[step % len(self._sums)]
        total.follow(voids)
        return total.add(gradients, step=step, index=index, voids=voids, largest=self._largest(gradients))

    def drop(self, keys: Iterable[int]) -> None:
        """Forget these microbatches, whether known or not."""
        for key in keys:
            self._stashes.pop(key, None)

    def drop_all(self) -> None:
        """Forget every microbatch."""
        self._stashes.clear()

    def _copy(self, rows: Tensor | None) -> Tensor | None:
        """Ours to keep: what it is a copy of may be written over before the weight pass."""
        return None if rows is None else rows.to(self._device, copy=True)

    def _check(self, key: int, stash: _Stash) -> None:
        if stash.changes != self._changes[stash.step % len(self._modules)]:
            raise ValueError(f"the weights that microbatch {key} was computed on are gone")

    def _largest(self, gradients: Sequence[Tensor]) -> float:
        """The largest magnitude that any rank has: infinity if one has NaN."""
        largest = largest_magnitude(gradients)
        if not math.isfinite(largest):
            largest = math.inf  # a maximum need not be NaN where one of two is
        agreed = torch.tensor([largest], dtype=torch.float32, device=self._device)
        for comm in (self._tensor, self._data):  # one after the other: then all ranks have the same number
            if comm.size > 1:
                agreed = comm.all_reduce(agreed, "max")
        return agreed.item()

    # ------------------------------------------------------------ sums and versions

    def write_sum(self, step: int, voids: int, total: Tensor) -> None:
        """Write what this rank speaks for of the sum (step, voids) to `total`, flat, in canonical order, on the CPU.

        Terms are summed on the way, a layer at a time; what the sum is made of stays as it is.
        """
        held = self._sums[step % len(self._sums)]
        held.follow(voids)
        sizes = [shape.numel() for shape in self._summed]
        pieces = [
            piece.view(shape) for piece, shape in zip(torch.split(held.read(step), sizes), self._summed, strict=True)
        ]
        wholes = self._cut(total)
        for bucket in self._buckets:
            parts = [pieces[place] for place in bucket.places]
            if self._data.size > 1 and not self._scatters:  # else each rank holds its chunk's sum already
                parts = bucket.scatter_sum(parts)
            names = [self._names[place] for place in bucket.places]
            for name, part in zip(names, sum_terms(parts, names, self._split.tensor, self._tensor), strict=True):
                self._write(name, part, wholes[name])

    @torch.no_grad()
    def update(self, version: int, total: Tensor, *, scale: float, rate: float) -> None:
        """From `version` to the next, with the finished sum `total` times `scale`. total: as of `write_sum`."""
        into = version % len(self._modules)
        own = self._own(into)
        if self._delay.most:  # the module of `version`'s step gets the next weights, made from the newest
            _copy(self._own(self._newest(version)), own)
        self._optimizer.set_num_steps(version)
        self._optimizer.step(self._averaged(total, scale), learning_rate=rate, parameters=own)
        if self._data.size > 1 and self._split.shards("moments") and self._fully is None:
            for bucket in self._buckets:  # each rank has updated its chunk only
                bucket.gather([self._parameters[into][place].detach() for place in bucket.places])
        self._changes[into] += 1
        if self._delay.most and not self._delay.behind(version + 1):
            other = (version + 1) % len(self._modules)
            _copy(self._live(into), self._live(other))
            self._changes[other] += 1

    def _averaged(self, total: Tensor, scale: float) -> list[Tensor]:
        """The average gradient of what this rank updates."""
        gradients = self._room()
        for (name, whole), gradient in zip(self._cut(total).items(), gradients, strict=True):
            block = take_block(whole, self._held("moments", name)).reshape(-1)
            average(block.to(gradient.device), gradient.view(-1), scale=scale, numerics=self._manifest.numerics)
        return gradients

    def _room(self) -> list[Tensor]:
        """Memory for them: the weight pass's, if it is here and large enough."""
        if self._offload or not isinstance(self._gradients, WholeGradients):
            return self._optimizer.room()
        room = self._gradients.scratch
        return [own_chunk(piece, self._data) for piece in room] if self._split.shards("moments") else room

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
        """Become version `version`, whose whole state is in `tensors` (see `write_state`). Stashes are gone then, and
        what was summed is the caller's to void."""
        self.drop_all()
        for number, called in self._named(version):
            for name, live in zip(self._names, self._live(number), strict=True):
                live.copy_(take_block(tensors[called(name)], self._held("parameters", name)))
            self._changes[number] += 1
        for name, moments in zip(self._names, self._optimizer.moments, strict=True):
            held = self._held("moments", name)
            moments.write(*(take_block(tensors[snapshot.moment_name(moment, name)], held) for moment in MOMENTS))
        self._optimizer.take(self._own(self._newest(version)))
        self._optimizer.set_num_steps(version)

    def held_bytes(self) -> dict[What, int]:
        """Memory of what this rank holds between orders."""
        fully, modules = self._fully, self._modules
        return {
            "parameters": sum(
                fully.held_bytes(module) if fully is not None else sum(each.nbytes for each in module.parameters())
                for module in modules
            ),
            "accumulators": sum(total.num_bytes for total in self._sums),
            "moments": sum(moments.num_bytes for moments in self._optimizer.moments),
        }

    # ------------------------------------------------------------ blocks

    def _newest(self, version: int) -> int:
        """Number of the module with the weights of `version`."""
        return (version + self._delay.most) % len(self._modules)

    def _named(self, version: int) -> list[tuple[int, Callable[[str], str]]]:
        """The modules whose weights are in a state of `version`, and by which names."""
        named: list[tuple[int, Callable[[str], str]]] = [(self._newest(version), str)]
        if self._delay.most:
            named.append((version % len(self._modules), snapshot.previous_name))
        return named

    def _slice(self, name: str) -> Block:
        """What this rank would hold if the data axis cut nothing."""
        return self._split.along_tensor(name, self._shapes[name], self._rank)

    def _held(self, what: What, name: str) -> Block:
        return self._split.held(what, name, self._shapes[name], self._rank)

    def _live(self, number: int) -> list[Tensor]:
        """Module `number`'s parameters as far as this rank holds them."""
        fully = self._fully
        return [each.detach() if fully is None else fully.chunk(each) for each in self._parameters[number]]

    def _chunks(self, number: int) -> list[Tensor]:
        """This rank's chunks of them: what it speaks for, if no other tensor rank does."""
        live = self._live(number)
        return live if self._fully is not None else [own_chunk(tensor, self._data) for tensor in live]

    def _own(self, number: int) -> list[Tensor]:
        """What this rank updates of them, for which it has the moments."""
        return self._chunks(number) if self._split.shards("moments") else self._live(number)

    def _cut(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of all elements in canonical order, by parameter."""
        pieces = self._canonical.pieces(flat)
        return {name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}

    def _write(self, name: str, chunk: Tensor, whole: Tensor) -> None:
        """If it is this rank's to write: a chunk into what is whole."""
        block = self._split.spoken(name, self._shapes[name], self._rank)
        if block is not None:
            take_block(whole, block).copy_(chunk)


def _copy(source: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for tensor, value in zip(into, source, strict=True):
        tensor.copy_(value)
