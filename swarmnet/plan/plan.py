"""How much memory a stage takes on each rank and in the peer process: a closed form, times a margin. Knows no machine.

What is there always (weights, gradients, sums, moments) is counted to the byte. What a microbatch takes is a number of
bytes for each token and layer, which follows from the operations of `model.decoder` whose operands autograd saves. The
tests compare it with what torch's allocator hands out.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.nn.attention import SDPBackend

from swarmnet.manifest.codec_names import DIFFERENCES
from swarmnet.manifest.schema import Averaging, StageSpec, Wire
from swarmnet.pipeline.works import KEPT_MEMOS, KEPT_STEPS
from swarmnet.plan.budget import HostMemory, Passage, RankMemory, StageBudget
from swarmnet.ranks.host_copies import copied
from swarmnet.ranks.layout import MeshLayout, MeshSplit
from swarmnet.stage.accumulator import sum_dtype
from swarmnet.stage.canonical import Canonical, layers_of
from swarmnet.stage.optimizer_8bit import BLOCK, LEAST
from swarmnet.stage.passes import MemoryPolicy, attention_kernels
from swarmnet.stage.rounding import chunk_elements
from swarmnet.stage.seams import KEPT_WEIGHTS
from swarmnet.sums.reducer import rule_of
from swarmnet.sums.references import TURNS

_FP32, _BF16 = 4, 2
_ALIGN = 64  # bytes: where a scratch piece may begin
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


_Widths = tuple[int, int, int, int]
"""Bytes for each token: per element of the hidden size, of the queries, of the keys and of the MLP's inner size."""

_SAVED: dict[tuple[str, str], _Widths] = {
    ("fp32", "stash"): (24, 8, 8, 16),
    ("fp32", "selective"): (12, 8, 8, 8),
    ("fp32", "recompute_layers"): (4, 0, 0, 0),
    ("bf16", "stash"): (20, 4, 4, 8),
    ("bf16", "selective"): (8, 4, 4, 4),
    ("bf16", "recompute_layers"): (4, 0, 0, 0),
}
"""What a layer keeps on the device for backward, by `numerics.compute` and `memory.activations`; else nothing."""

_TAPE: dict[str, _Widths] = {"fp32": (32, 8, 8, 12), "bf16": (24, 4, 4, 6)}
"""What a layer keeps between backward and weight pass under "stash": the operands of its products."""

_BACKWARD: dict[str, _Widths] = {"fp32": (0, 12, 0, 10), "bf16": (16, 8, 0, 4)}
"""What the backward of one layer takes beyond what is saved."""

_SCORES_SAVED, _SCORES_BACKWARD = 5, 6
"""Bytes of a T x T score, where attention has them in memory: kept for backward, and more in backward."""

_LOGITS_SAVED, _LOGITS_BACKWARD = 4, 8
"""Bytes of a logit: kept for backward, and more in backward."""

_MARGIN = 1.1
"""For norms' statistics, positions and other small tensors, and for the order in which kernels free what they read."""


def _rank_memory(
    setup: Setup, mesh: MeshSplit, rank: int, spec: StageSpec, layers: int, shapes: Mapping[str, torch.Size]
) -> RankMemory:
    layout, wide, versions = setup.layout, sum_dtype(spec.numerics).itemsize, 1 + spec.averaging.delay.most
    alone, local, cuda = layout.ranks == 1, spec.averaging.sync == "local", layout.kind == "cuda"
    own = {name: mesh.along_tensor(name, shape, rank).num_elements for name, shape in shapes.items()}
    held, largest = mesh.num_elements("parameters", shapes, rank), max(own.values())
    gradient = sum(-(-_FP32 * size // _ALIGN) * _ALIGN for size in own.values())
    scattered = layout.data > 1 and mesh.shards("accumulators")
    fully = layout.data > 1 and layout.shard == "zero3"
    # Matrices alone are cast, and no table of embeddings, of which rows are read.
    casts = _BF16 * sum(own[name] for name, shape in shapes.items() if len(shape) > 1 and "embed_tokens" not in name)
    casts *= spec.numerics.compute == "bf16"
    accumulator = wide * mesh.num_elements("accumulators", shapes, rank)
    outer = 2 * _FP32 * held * (alone and local)
    finished = alone and not (local or cuda)  # else it is in the peer process
    piece = _AGAIN * min(largest, chunk_elements(torch.device(layout.kind)))
    passing, beside = _microbatch(setup, spec, layers, gradient // (layout.data if fully else 1))
    # An outer step's vector is on the device on its way to host memory.
    passing = replace(passing, peak=max(passing.peak, passing.held + max(piece, cuda * outer // 2)))
    # A layer's chunks of gradients lie in no memory of their own under ZeRO-2 and 3.
    update = _FP32 * (largest + scattered * mesh.num_elements("moments", shapes, rank)) + piece
    update += cuda * wide * largest  # a parameter's sum on its way to the device
    if fully:
        passing = replace(passing, peak=passing.peak + _gathered(own))
    elif scattered:  # a parameter's gradient, packed to be scattered, and what is scattered already
        scattering = 3 * _FP32 * largest + _FP32 * mesh.num_elements("accumulators", shapes, rank)
        passing = replace(passing, peak=max(passing.peak, passing.held + scattering))
    if layout.data > 1 and mesh.shards("moments"):
        update += 2 * _FP32 * largest  # updated weights are gathered, a parameter at a time
    # A rank whose device is full is lost, and all others with it: what computes past microbatches has to fit, too. A
    # peer of one rank only skips that audit.
    audited = setup.audited and not alone
    return RankMemory(
        parameters=versions * (_FP32 * held + casts) + outer + audited * (_FP32 * held + casts),
        gradients=0 if scattered else gradient,
        sums=(versions + finished + audited) * accumulator,
        optimizer=sum(
            _moments(spec, shape.numel(), mesh.held("moments", name, shape, rank).num_elements)
            for name, shape in shapes.items()
        ),
        passing=passing,
        beside=beside,
        update=update,
        offloaded=setup.memory.offload_optimizer,
    )


def _moments(spec: StageSpec, whole: int, held: int) -> int:
    """Of a parameter of `whole` elements, of which a rank holds `held`."""
    packed = spec.optimizer.state == "8bit" and whole >= LEAST
    return 2 * (held + _FP32 * -(-held // BLOCK)) if packed else 2 * _FP32 * held


def _microbatch(setup: Setup, spec: StageSpec, layers: int, gradient: int) -> tuple[Passage, Passage]:
    """(of a microbatch on a rank's device, what of it is in host memory meanwhile). gradient: bytes of a whole one."""
    model, training, compute, policy = spec.model, spec.training, spec.numerics.compute, setup.memory.activations
    tensor, tokens = setup.layout.tensor, training.microbatch_size // setup.layout.data * training.sequence_length
    # Sequence parallelism splits what lies between the regions that tensor ranks share: half of what is saved.
    hidden = model.hidden_size * ((1 + 1 / tensor) / 2 if setup.layout.sequence_parallel else 1.0)
    queries, inner = model.num_heads * model.head_dim / tensor, model.intermediate_size / tensor
    keys = max(model.num_kv_heads / tensor, 1) * model.head_dim
    if model.qk_norm:
        queries, keys = 2 * queries, 2 * keys
    scores = model.num_heads / tensor * _score_row(setup, spec)

    def of(widths: _Widths, per_score: int = 0) -> int:
        """Of one layer."""
        per_token: float = sum(map(operator.mul, widths, (hidden, queries, keys, inner)))
        return round(tokens * (per_token + per_score * scores))

    logits = tokens * spec.last * -(-model.vocab_size // tensor)
    ends = tokens * model.hidden_size * (_FP32 + 12 * spec.last)  # the stage's input; norm and head
    everything = of(_SAVED[compute, "stash"], _SCORES_SAVED)
    kept = everything if policy == "stash" else of(_SAVED.get((compute, policy), (0, 0, 0, 0)))
    writes = setup.memory.writes_at_once or setup.layout.shard == "zero3"
    head = _LOGITS_SAVED * logits
    owed = gradient if writes else ends + layers * of(_TAPE[compute]) + head
    held = max(ends + layers * kept + head * (policy not in ("recompute", "offload")), owed)
    # Under "recompute" the forward that is done again keeps all layers, elsewhere one at a time.
    again, one = (layers * everything, 0) if policy == "recompute" else (layers * kept, everything - kept)
    layer, loss = one + of(_BACKWARD[compute], _SCORES_BACKWARD), head + _LOGITS_BACKWARD * logits
    # The loss goes back before layers do. Between them a tape still has the logits' gradient.
    peak = ends + again + (gradient + max(layer, loss) if writes else max(layer + head, loss))
    peak = max(peak, 0 if writes else owed + layer)
    moved = ends + layers * everything + head if policy == "offload" else 0
    return Passage(round(_MARGIN * held), round(_MARGIN * peak)), Passage(moved, moved)


def _score_row(setup: Setup, spec: StageSpec) -> int:
    """The length of a row of scores that attention has in memory: 0 if none."""
    return spec.training.sequence_length if setup.layout.kind == "cuda" and keeps_scores(spec) else 0


def _gathered(own: Mapping[str, int]) -> int:
    """What FSDP2 makes whole: what is outside layers, and two layers, the next one being fetched; each comes packed and
    is unpacked. In backward a layer's gradients are whole, and packed to be scattered."""
    layers = {"": 0}
    for name, size in own.items():
        _, part, number, *_ = [*name.split("."), ""]
        layer = number if part == "layers" else ""
        layers[layer] = layers.get(layer, 0) + _FP32 * size
    outside, most = layers.pop(""), max(layers.values(), default=0)
    return max(outside + 5 * most, 4 * outside)


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
