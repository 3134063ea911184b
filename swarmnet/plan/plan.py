"""How much memory a stage takes on each rank, found by running the stage's own code on tensors that are only shapes.

`plan.rehearsal` runs it. Layers are equal, so of many some are run and the rest follows: a 70B model takes no longer
than a small one. By formula is only what no single rank's run shows: what FSDP2 gathers (ZeRO-3), what lies in the peer
process, and what is copied between it and a GPU. Knows no machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.nn.attention import SDPBackend

from swarmnet.manifest.codec_names import DIFFERENCES
from swarmnet.manifest.schema import Averaging, Cut, StageSpec, Wire
from swarmnet.pipeline.works import KEPT_MEMOS, KEPT_STEPS
from swarmnet.plan.budget import HostMemory, Passage, RankMemory, StageBudget, along
from swarmnet.plan.rehearsal import Rehearsed, RehearsedRank, rehearse
from swarmnet.ranks.host_copies import KEPT_WEIGHTS, copied
from swarmnet.ranks.layout import MeshLayout, MeshSplit
from swarmnet.stage.accumulator import sum_dtype
from swarmnet.stage.canonical import Canonical, layers_of
from swarmnet.stage.passes import MemoryPolicy, attention_kernels
from swarmnet.stage.rounding import chunk_elements
from swarmnet.sums.reducer import rule_of
from swarmnet.sums.references import TURNS

_FP32, _BF16 = 4, 2
_ALIGN = 64  # bytes: where a scratch piece may begin
_SOME, _MANY = 4, 8  # layers: beyond, a layer more adds what a layer adds
_CUDA = torch.device("cuda")
_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
_COARSE = 1.1  # bytes of an element under any other codec, at most
_AGAIN = 24  # bytes of temporary memory per element of one piece, in sums and updates


@dataclass(frozen=True, slots=True)
class Setup:
    """What is planned: a run, and how a peer serves stages of it."""

    specs: tuple[StageSpec, ...]
    """Of every stage of it."""
    wire: Wire
    layout: MeshLayout
    slots: int = 4
    """Microbatches in flight per open step."""
    memory: MemoryPolicy = field(default_factory=MemoryPolicy)
    memo_bytes: int = 0
    """What is kept for who asks again: the peer config's `caps`."""
    audited: bool = False
    """Are members' works computed again in this run?"""


def plan_stage(setup: Setup, stage: int) -> StageBudget:
    """The memory of each rank that serves `stage`, and of its peer process. Raises UsageError if these ranks cannot."""
    spec, layout = setup.specs[stage], setup.layout
    mesh, canonical, layers = MeshSplit.of(spec, layout), Canonical.of(spec), layers_of(spec)
    shapes = canonical.shapes
    found: dict[object, RankMemory] = {}
    ranks = []
    for rank in range(layout.ranks):
        held = tuple(
            (mesh.along_tensor(name, shape, rank).shape, mesh.held("moments", name, shape, rank).shape)
            for name, shape in shapes.items()
        )
        if held not in found:  # ranks that hold alike compute alike
            found[held] = _rank_memory(setup, mesh, rank, spec, len(layers), shapes)
        ranks.append(found[held])
    in_flight = setup.slots * (1 + spec.averaging.delay.most)
    host = _host_memory(setup, canonical, ranks, in_flight)
    return StageBudget(stage, layers, tuple(ranks), host, in_flight, on_host=layout.kind == "cpu")


# ------------------------------------------------------------ a rank


def _held(spec: StageSpec, mesh: MeshSplit, rank: int, shapes: Mapping[str, torch.Size]) -> tuple[int, int, int]:
    """Bytes of weights, gradients and the sums of open steps."""
    versions, wide = 1 + spec.averaging.delay.most, sum_dtype(spec.numerics).itemsize
    own = [mesh.along_tensor(name, shape, rank).num_elements for name, shape in shapes.items()]
    scattered = mesh.layout.data > 1 and mesh.shards("accumulators")
    gradients = 0 if scattered else sum(-(-_FP32 * size // _ALIGN) * _ALIGN for size in own)
    return (
        _FP32 * versions * mesh.num_elements("parameters", shapes, rank),
        gradients,
        wide * versions * mesh.num_elements("accumulators", shapes, rank),
    )


def _rank_memory(
    setup: Setup, mesh: MeshSplit, rank: int, spec: StageSpec, layers: int, shapes: Mapping[str, torch.Size]
) -> RankMemory:
    layout, wide = setup.layout, sum_dtype(spec.numerics).itemsize
    seen = _traced(spec, layout, rank, replace(setup.memory, offload_optimizer=False), layers)
    parameters, gradients, open_sums = _held(spec, mesh, rank, shapes)
    sums = open_sums + seen.finished_sum
    outer = 2 * parameters * (layout.ranks == 1 and spec.averaging.sync == "local")
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
    again = added = 0
    # A rank whose device is full is lost, and all others with it: what computes past microbatches has to fit, too. A
    # peer of one rank only skips that audit.
    if setup.audited and layout.ranks > 1:
        # The weights of a past version, and their casts if products are in bf16.
        again = _FP32 * mesh.num_elements("parameters", shapes, rank)
        again += seen.shared // (1 + spec.averaging.delay.most)
        added = wide * mesh.num_elements("accumulators", shapes, rank)
    return RankMemory(
        parameters + again + outer + seen.shared,
        gradients,
        sums + added,
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
        _, part, number, *_ = [*name.split("."), ""]
        layer = number if part == "layers" else ""
        layers[layer] = layers.get(layer, 0) + _FP32 * mesh.along_tensor(name, shape, rank).num_elements
    beside, most = layers.pop("", 0), max(layers.values(), default=0)
    gathered = max(beside + 5 * most, 4 * beside)
    return passing.more(gathered)


def _traced(spec: StageSpec, layout: MeshLayout, rank: int, memory: MemoryPolicy, layers: int) -> Rehearsed:
    """Of a stage of any size, from small ones."""
    like = replace(layout, devices=("cpu",) * layout.ranks)
    scores = layout.kind == "cuda" and keeps_scores(spec)

    def of(count: int) -> Rehearsed:
        return rehearse(RehearsedRank(alone(spec, count, first=spec.first, last=spec.last), like, rank, memory, scores))

    if layers <= _MANY:
        return of(layers)
    return along(of(_SOME), of(_MANY), (layers - _SOME) / (_MANY - _SOME))


def alone(spec: StageSpec, layers: int, *, first: bool, last: bool) -> StageSpec:
    """A stage with so many layers, of a run like that of `spec` without other layers."""
    model = spec.model.model_copy(update={"num_layers": max(layers, 1)})
    cut = (*[0] * (not first), layers, *[0] * (not last))
    update = {"stage": int(not first), "model": model, "cut": Cut.model_construct(stages=len(cut), layers=cut)}
    return spec.model_copy(update=update)


def keeps_scores(spec: StageSpec) -> bool:
    """Does CUDA compute attention with its T x T scores in memory? Only in fp32: where it must be reproducible, and
    with fewer key heads than query heads, for which there is no fused kernel. GPUs are taken to be Ampere's or later.
    """
    numerics, grouped = spec.numerics, spec.model.num_kv_heads < spec.model.num_heads
    kernels = attention_kernels(numerics.compute, reproducible=numerics.deterministic, capability=(8, 0))
    return kernels == [SDPBackend.MATH] or (numerics.compute == "fp32" and grouped)


# ------------------------------------------------------------ the peer process

_PROOF_BYTES = 32 * 40  # of the tokens of one sequence, at most: a tree of 2^40 windows
_SNAPSHOTS = 2  # one being written, and one that is handed on


def _host_memory(setup: Setup, canonical: Canonical, ranks: list[RankMemory], in_flight: int) -> HostMemory:
    spec, layout, training = canonical.spec, setup.layout, canonical.spec.training
    wide, local = sum_dtype(spec.numerics).itemsize, spec.averaging.sync == "local"
    flat_sums = 2 if layout.ranks > 1 else int(layout.kind == "cuda" and not local)  # on the CPU it is the rank's own
    offloaded = 0
    if setup.memory.offload_optimizer:  # with a copy of the weights, and of their gradient
        offloaded = sum(rank.optimizer for rank in ranks) + 2 * _FP32 * canonical.num_elements
    boundary = training.microbatch_size * training.sequence_length * spec.model.hidden_size
    there, back = (_BYTES.get(codec, _COARSE) for codec in (setup.wire.activations, setup.wire.gradients))
    payload = (there + back) * boundary * ((not spec.first) + (not spec.last))
    beside = max((rank.beside.several(in_flight) for rank in ranks), default=0) * layout.ranks
    return HostMemory(
        mirrors=2 * copied(canonical).num_bytes * (layout.ranks > 1),
        sums=flat_sums * wide * canonical.num_elements,
        rounds=_of_rounds(spec.averaging, canonical, layout.ranks),
        snapshots=_SNAPSHOTS * canonical.layout.num_bytes,
        payloads=round(in_flight * payload) + (layout.ranks > 1) * (2 + 2 * setup.audited) * _FP32 * boundary,
        memo=setup.memo_bytes,
        moments=offloaded,
        stashes=beside,
        audits=audit_bytes(setup, canonical),
    )


def audit_bytes(setup: Setup, canonical: Canonical) -> int:
    """Host memory of what audits keep of one stage, at most: weights of the last steps; what went into works of as
    many, as if this replica had counted them all, and what came out if kernels are free; and what others have shown of
    theirs, as if they had shown all."""
    if not setup.audited:
        return 0
    spec, training = canonical.spec, canonical.spec.training
    sequences, length = training.microbatch_size, training.sequence_length
    there, back = (_BYTES.get(codec, _COARSE) for codec in (setup.wire.activations, setup.wire.gradients))
    crossing = (there * (not spec.first) + back * (not spec.last)) * sequences * length * spec.model.hidden_size
    payload = round(crossing) + sequences * (_FP32 * (length + 1) + _PROOF_BYTES)
    steps, made = KEPT_STEPS * training.microbatches * payload, 1 + (not spec.numerics.deterministic)
    works, shown = made * min(KEPT_MEMOS * setup.memo_bytes, steps), min(setup.memo_bytes, steps)
    return works + shown + KEPT_WEIGHTS * _FP32 * canonical.num_elements


def _of_rounds(averaging: Averaging, canonical: Canonical, ranks: int) -> int:
    """What local sync holds in the round of the run's last step, whose outer step is of all elements; an aggregate of
    integers takes nothing beyond the finished one. Of a plug-in codec the most it may take."""
    if averaging.sync != "local":
        return 0
    rule = rule_of(averaging)
    # Of what other codecs round away a replica sends the rest later; gossip partners send differences instead, and
    # what a sparse codec drops stays in the weights.
    feedback = not (averaging.gossip or averaging.sparse or averaging.codec in ("fp32", "fp16", "int8"))
    vectors = (
        (rule is not None and rule.needs_center)  # the last mean
        + 2  # what this replica gives, and what comes back
        + 2 * (ranks > 1)  # the outer optimizer's; one rank has them itself
        + 3 * feedback  # from earlier steps; in this round, and the one before
        + 2 * feedback  # of what was reduced here: all, if no other replica helps
        + 1  # for a moment: a mean
    )
    references = 0
    if averaging.gossip and averaging.codec in DIFFERENCES:
        # One of each turn; and of fragments whose turn 0 comes before the first cycle ends, the first weights.
        references = (TURNS + (averaging.fragments > 1)) * _BF16 * canonical.num_elements
    return _FP32 * vectors * canonical.num_elements + references
