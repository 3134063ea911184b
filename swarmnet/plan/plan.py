"""How much memory a stage takes on each rank, found by running the stage's own code on tensors that are only shapes.

`plan.rehearsal` runs it. Layers are equal, so of many some are run and the rest follows: a 70B model takes no longer
than a small one. By formula is only what no single rank's run shows: what FSDP2 gathers (ZeRO-3), what lies in the peer
process, and what is copied between it and a GPU. Knows no machine.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from swarmnet.config.plug_in import split
from swarmnet.manifest import codec_names
from swarmnet.manifest.schema import Averaging, Cut, Data, Initial, Manifest, Protocol
from swarmnet.model.cut import cut_layers
from swarmnet.plan.budget import HostMemory, Passage, RankMemory, StagePlan
from swarmnet.ranks.buckets import layer_of
from swarmnet.ranks.host_state import mirrored
from swarmnet.ranks.layout import MeshLayout, MeshSplit
from swarmnet.stage.accumulator import chunk_elements, sum_dtype
from swarmnet.stage.canonical import Canonical
from swarmnet.stage.passes import MemoryPolicy
from swarmnet.sums.powersgd import vector_sizes
from swarmnet.sums.reducer import rule_of

if TYPE_CHECKING:
    from swarmnet.plan.rehearsal import Rehearsed

_FP32 = 4
_ALIGN = 64  # bytes: where a scratch piece may begin
_SOME, _MANY = 4, 8  # layers: beyond, a layer more adds what a layer adds
_CUDA = torch.device("cuda")
_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
_COARSE = 1.1  # bytes of an element under any other codec, at most
_AGAIN = 24  # bytes of temporary memory per element of one piece, in sums and updates


@dataclass(frozen=True, slots=True)
class Setup:
    """What is planned: a run, and how a peer serves stages of it. slots: microbatches in flight per open step.
    memo_bytes: see the peer config's `caps`."""

    manifest: Manifest
    layout: MeshLayout
    slots: int = 4
    memory: MemoryPolicy = field(default_factory=MemoryPolicy)
    memo_bytes: int = 0


def plan_stage(setup: Setup, stage: int) -> StagePlan:
    """The memory of each rank that serves `stage`, and of its peer process. Raises UsageError if these ranks cannot."""
    manifest, layout = setup.manifest, setup.layout
    mesh = MeshSplit(manifest.model, layout, manifest.training)
    ranges = cut_layers(manifest.model, manifest.cut, manifest.training.sequence_length)
    canonical = Canonical.of(manifest.of_stage(stage))
    shapes = canonical.shapes
    found: dict[object, RankMemory] = {}
    ranks = []
    for rank in range(layout.ranks):
        held = tuple(
            (mesh.along_tensor(name, shape, rank).shape, mesh.held("moments", name, shape, rank).shape)
            for name, shape in shapes.items()
        )
        if held not in found:  # ranks that hold alike compute alike
            found[held] = _rank_memory(setup, mesh, rank, stage, len(ranges[stage]), shapes)
        ranks.append(found[held])
    in_flight = setup.slots * (1 + manifest.averaging.delay.most)
    host = _host_memory(setup, canonical, ranks, in_flight)
    return StagePlan(stage, ranges[stage], tuple(ranks), host, in_flight, on_host=layout.kind == "cpu")


# ------------------------------------------------------------ a rank


def _held(manifest: Manifest, mesh: MeshSplit, rank: int, shapes: Mapping[str, torch.Size]) -> tuple[int, int, int]:
    """Bytes of weights, gradients and the sums of open steps."""
    versions, wide = 1 + manifest.averaging.delay.most, sum_dtype(manifest.numerics).itemsize
    gradients = (
        0
        if mesh.layout.data > 1 and mesh.shards("accumulators")
        else sum(
            -(-_FP32 * mesh.along_tensor(name, shape, rank).num_elements // _ALIGN) * _ALIGN
            for name, shape in shapes.items()
        )
    )
    return (
        _FP32 * versions * mesh.num_elements("parameters", shapes, rank),
        gradients,
        wide * versions * mesh.num_elements("accumulators", shapes, rank),
    )


def _rank_memory(
    setup: Setup, mesh: MeshSplit, rank: int, stage: int, layers: int, shapes: Mapping[str, torch.Size]
) -> RankMemory:
    manifest, layout = setup.manifest, setup.layout
    wide = sum_dtype(manifest.numerics).itemsize
    ends = Ends(layers, stage == 0, stage == manifest.cut.stages - 1)
    seen = _traced(manifest, layout, rank, replace(setup.memory, offload_optimizer=False), ends)
    parameters, gradients, open_sums = _held(manifest, mesh, rank, shapes)
    sums = open_sums + seen.finished_sum
    outer = 2 * parameters * (layout.ranks == 1 and manifest.averaging.sync == "local")
    optimizer = seen.state - parameters - outer - sums - gradients
    if layout.kind == "cuda":
        sums -= seen.finished_sum  # it is in host memory there
    passing, update = seen.passing, seen.update
    if layout.data > 1 and layout.shard == "zero3":
        passing = _gathering(passing, mesh, shapes, rank)
    if layout.kind == "cuda":
        largest = max(mesh.along_tensor(name, shape, rank).num_elements for name, shape in shapes.items())
        piece = _AGAIN * min(largest, chunk_elements(_CUDA))  # the rehearsal's were as small as a core's cache
        given = outer // 2  # to an outer step, on its way to host memory
        passing = replace(passing, weights=max(passing.weights, passing.owed + max(piece, given)))
        update += piece + wide * largest  # a parameter's sum on its way to the device
    return RankMemory(
        parameters + outer + seen.shared,
        gradients,
        sums,
        optimizer,
        passing,
        seen.beside,
        update,
        offloaded=setup.memory.offload_optimizer,
    )


def _gathering(passing: Passage, mesh: MeshSplit, shapes: Mapping[str, torch.Size], rank: int) -> Passage:
    """With what FSDP2 makes whole: what is beside layers, and two layers, the next one being fetched; each comes packed
    and is unpacked. In backward a layer's gradients are whole, and packed to be scattered."""
    layers: dict[str, int] = {}
    for name, shape in shapes.items():
        of = layer_of(name)
        layers[of] = layers.get(of, 0) + _FP32 * mesh.along_tensor(name, shape, rank).num_elements
    beside, layer = layers.pop("", 0), max(layers.values(), default=0)
    gathered = max(beside + 5 * layer, 4 * beside)
    return passing.more(gathered)


@dataclass(frozen=True, slots=True)
class Ends:
    """A stage, as far as its memory depends on it."""

    layers: int
    first: bool
    last: bool

    def alone(self, manifest: Manifest) -> tuple[Manifest, int]:
        """A run with such a stage and no other layers, and the stage's number in it."""
        layers = (*[0] * (not self.first), self.layers, *[0] * (not self.last))
        model = manifest.model.model_copy(update={"num_layers": max(self.layers, 1)})
        cut = Cut.model_construct(stages=len(layers), layers=layers)
        plain = {"name": "", "data": Data(), "initial": Initial(), "protocol": Protocol()}
        return manifest.model_copy(update={**plain, "model": model, "cut": cut}), int(not self.first)


def _traced(manifest: Manifest, layout: MeshLayout, rank: int, memory: MemoryPolicy, ends: Ends) -> Rehearsed:
    """Of a stage of any size, from small ones."""
    like = replace(layout, devices=("cpu",) * layout.ranks)
    scores = layout.kind == "cuda" and keeps_scores(manifest)

    def of(layers: int) -> Rehearsed:
        alone, stage = replace(ends, layers=layers).alone(manifest)
        return _rehearsed((alone, stage, like, rank, memory, scores))

    if ends.layers <= _MANY:
        return of(ends.layers)
    return of(_SOME).along(of(_MANY), (ends.layers - _SOME) / (_MANY - _SOME))


@functools.lru_cache(maxsize=512)
def _rehearsed(part: tuple[Manifest, int, MeshLayout, int, MemoryPolicy, bool]) -> Rehearsed:
    from swarmnet.plan.rehearsal import RehearsedRank, rehearse  # seconds of imports, of those who plan

    return rehearse(RehearsedRank(*part))


def keeps_scores(manifest: Manifest) -> bool:
    """Does CUDA compute attention with its T x T scores in memory? Where it must be reproducible, and in fp32 with
    fewer key heads than query heads, for which there is no fused kernel."""
    model = manifest.model
    return manifest.numerics.mode == "deterministic" or (
        manifest.numerics.compute == "fp32" and model.num_kv_heads < model.num_heads
    )


# ------------------------------------------------------------ the peer process

_SNAPSHOTS = 2  # one being written, and one that is handed on


def _host_memory(setup: Setup, canonical: Canonical, ranks: list[RankMemory], in_flight: int) -> HostMemory:
    manifest, layout, training = setup.manifest, setup.layout, setup.manifest.training
    wide = sum_dtype(manifest.numerics).itemsize
    local = manifest.averaging.sync == "local"
    flat_sums = 2 if layout.ranks > 1 else int(layout.kind == "cuda" and not local)  # on the CPU it is the rank's own
    offloaded = 0
    if setup.memory.offload_optimizer:  # with a copy of the weights, and of their gradient
        offloaded = sum(rank.optimizer for rank in ranks) + 2 * _FP32 * canonical.num_elements
    boundary = training.microbatch_size * training.sequence_length * manifest.model.hidden_size
    there, back = (_BYTES.get(codec, _COARSE) for codec in (manifest.wire.activations, manifest.wire.gradients))
    last = canonical.stage == manifest.cut.stages - 1
    payload = (there + back) * boundary * ((canonical.stage > 0) + (not last))
    beside = max((rank.beside.several(in_flight) for rank in ranks), default=0) * layout.ranks
    return HostMemory(
        mirrors=2 * mirrored(canonical).num_bytes * (layout.ranks > 1),
        sums=flat_sums * wide * canonical.num_elements,
        rounds=_of_rounds(manifest.averaging, canonical, layout.ranks),
        snapshots=_SNAPSHOTS * canonical.layout.num_bytes,
        payloads=round(in_flight * payload) + (layout.ranks > 1) * 2 * _FP32 * boundary,
        memo=setup.memo_bytes,
        moments=offloaded,
        stashes=beside,
    )


def _of_rounds(averaging: Averaging, canonical: Canonical, ranks: int) -> int:
    """What averaging holds beside the finished sum, in the round that takes most: a second one of the same step, and
    with `sync = "local"` that of the run's last step, whose outer step is of all elements. Of a plug-in codec the most
    it may."""
    local, (family, parameter) = averaging.sync == "local", split(averaging.codec)
    rule = rule_of(averaging)
    factors, owes = family == "powersgd", codec_names.may_owe(averaging.codec)
    twice = owes and not factors and family != "topk"  # sums are encoded with a loss, too
    vectors = (
        (rule is not None and rule.needs_center)  # the last mean
        + 2 * local  # what this replica gives, and what comes back
        + 2 * (local and ranks > 1)  # the outer optimizer's; one rank has them itself
        + 3 * owes  # from earlier steps; in this round, and the one before
        + 2 * twice  # of what was reduced here: all, if nobody helps
        + factors  # what is to be sent
        + (local or factors)  # for a moment: a mean, or what factors stand for
    )
    thin = 0
    if factors:
        first, second = vector_sizes(codec_names.rank(parameter), canonical.parameter_shapes)
        thin = 2 * (first + second) + second  # mine, their sums, and where to look next time
    return _FP32 * (vectors * canonical.num_elements + thin)
