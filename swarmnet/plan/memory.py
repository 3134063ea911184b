"""How much memory a stage takes on a rank and in the peer process: a closed form, times a margin. Knows no machine.

What is there always (weights, gradients, aggregates, moments) is counted to the byte. What a microbatch takes is a
number of bytes for each token and layer, which follows from the operations of `model.decoder` of which autograd
saves the operands. The tests compare it with what torch's allocator hands out.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.nn.attention import SDPBackend

from swarmnet.manifest.codec_names import DIFFERENCES
from swarmnet.manifest.schema import Averaging, StageSpec, Wire
from swarmnet.model.frozen import part_shapes
from swarmnet.model.lora import frozen_shapes, stage_module
from swarmnet.pipeline.works import KEPT_CACHES, KEPT_STEPS
from swarmnet.ranks.host_copies import COPIES, copied
from swarmnet.ranks.layout import MeshLayout, MeshSplit
from swarmnet.stage.accumulator import sum_dtype
from swarmnet.stage.canonical import Canonical, layers_of
from swarmnet.stage.interfaces import KEPT_WEIGHTS
from swarmnet.stage.optimizer_8bit import BLOCK, LEAST
from swarmnet.stage.passes import MemoryPolicy, attention_kernels
from swarmnet.stage.rounding import chunk_elements
from swarmnet.sums.reducer import rule_of
from swarmnet.sums.references import TURNS
from swarmnet.wire import codecs

MIB, GIB = 1 << 20, 1 << 30

_FP32, _BF16 = 4, 2
_ALIGN = 64  # bytes: where a scratch piece may begin
_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
_COARSE = 1.1  # bytes of an element under any other codec, at most
_AGAIN = 24  # bytes of temporary memory per element of one piece, in sums and updates


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What the rank of a stage that holds the most has on its device, in bytes."""

    parameters: int
    """Of all versions that are held, with casts and an outer optimizer's tensors."""
    gradients: int
    """Of one microbatch."""
    sums: int
    """Accumulators of open steps, and the finished aggregate unless it is in the peer process."""
    optimizer: int
    """Moments; 0 if they are in host memory."""
    update: int
    """The most that an optimizer step takes temporarily; 0 if it happens in host memory."""
    held: int
    """By each microbatch in flight: the larger of what is kept after forward and what is kept after backward."""
    microbatch: int
    """The most that one microbatch takes at any time of its three passes. One microbatch runs at a time."""
    offloaded: int
    """Moved to host memory, for each microbatch in flight."""

    @property
    def state(self) -> int:
        """What is there always."""
        return self.parameters + self.gradients + self.sums + self.optimizer

    def lasting(self, in_flight: int) -> int:
        """What is there between jobs."""
        return self.state + in_flight * self.held

    def temporary(self, in_flight: int) -> int:
        """What a job takes in addition, at the worst moment."""
        # The microbatch that runs is one of those in flight.
        return max(in_flight and self.microbatch - self.held, self.update)

    def peak(self, in_flight: int) -> int:
        """The most at any time."""
        return self.lasting(in_flight) + self.temporary(in_flight)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One stage of one peer, on so many ranks.

    host: bytes in the peer process, by what they are for (`_host_memory`). in_flight: microbatches, of all open steps.
    on_host: ranks compute on the CPU, so that everything is in one memory.
    """

    stage: int
    layers: range
    ranks: int
    rank: RankMemory
    host: dict[str, int]
    in_flight: int
    on_host: bool

    @property
    def host_total(self) -> int:
        """Of the peer process."""
        return sum(self.host.values())


def together(plans: Sequence[StageMemory]) -> int:
    """The most that each device of a peer with all these stages has to have; the machine, if ranks are on the CPU."""
    # One rank is one process, which does one job at a time, whichever stage's (`engine.compute_thread`). Several ranks
    # are processes of each stage, and a process keeps what its largest job took.
    first = plans[0]
    count_once: Callable[[Iterable[int]], int] = max if first.ranks == 1 else sum
    device = sum(plan.rank.lasting(plan.in_flight) for plan in plans)
    device += count_once(plan.rank.temporary(plan.in_flight) for plan in plans)
    return first.ranks * device + sum(plan.host_total for plan in plans) if first.on_host else device


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
    output_cache_bytes: int = 0
    """For answers to callers that ask again: `caps.output_cache_bytes` of the peer config."""
    audited: bool = False
    """Are microbatches of this run computed again by other replicas?"""


def plan_stage(setup: Setup, stage: int) -> StageMemory:
    """The memory of a rank that serves `stage`, and of its peer process. Raises UsageError if these ranks cannot."""
    spec, layout = setup.specs[stage], setup.layout
    in_flight = setup.slots * (1 + spec.averaging.delay.most)
    canonical, mesh, rank = _for_any_slots(replace(setup, slots=1), stage)
    host = _host_memory(setup, canonical, rank, mesh, in_flight)
    return StageMemory(stage, layers_of(spec), layout.ranks, rank, host, in_flight, on_host=layout.kind == "cpu")


@functools.lru_cache(128)
def _for_any_slots(setup: Setup, stage: int) -> tuple[Canonical, MeshSplit, RankMemory]:
    """The part of a plan that does not depend on `setup.slots`.

    The search for the most slots plans each stage many times, and this part builds the stage's module for its shapes.
    """
    spec = setup.specs[stage]
    canonical, mesh = Canonical.of(spec), MeshSplit(spec, setup.layout)
    return canonical, mesh, _rank_memory(setup, mesh, spec, len(layers_of(spec)), canonical.shapes)


# ------------------------------------------------------------ a rank


_Widths = tuple[int, int, int, int]
"""Bytes for each token: per element of the hidden size, of the queries, of the keys and of the MLP's inner size."""

_SAVED: dict[tuple[str, str], _Widths] = {
    ("fp32", "save"): (24, 8, 8, 16),
    ("fp32", "selective"): (12, 8, 8, 8),
    ("fp32", "recompute_layers"): (4, 0, 0, 0),
    ("bf16", "save"): (20, 4, 4, 8),
    ("bf16", "selective"): (8, 4, 4, 4),
    ("bf16", "recompute_layers"): (4, 0, 0, 0),
}
"""What a layer keeps on the device for backward, by `numerics.compute` and `memory.activations`; else nothing."""

_TAPE: dict[str, _Widths] = {"fp32": (32, 8, 8, 12), "bf16": (24, 4, 4, 6)}
"""What a layer keeps between backward and weight-gradient pass under "save": the operands of its products."""

_BACKWARD: dict[str, _Widths] = {"fp32": (0, 12, 0, 10), "bf16": (16, 8, 0, 4)}
"""What the backward of one layer takes beyond what is saved."""

_SCORES_SAVED, _SCORES_BACKWARD = 5, 6
"""Bytes of a T x T score, where attention has them in memory: kept for backward, and more in backward."""

_LOGITS_SAVED, _LOGITS_BACKWARD = 4, 8
"""Bytes of a logit: kept for backward, and more in backward."""

_MARGIN = 1.1
"""For norms' statistics, positions and other small tensors, and for the order in which kernels free what they read."""


def _rank_memory(
    setup: Setup, mesh: MeshSplit, spec: StageSpec, layers: int, shapes: Mapping[str, torch.Size]
) -> RankMemory:
    """Of rank 0: every axis gives its first rank the largest chunk."""
    layout, wide, versions = setup.layout, sum_dtype(spec.numerics).itemsize, 1 + spec.averaging.delay.most
    alone, local, cuda = layout.ranks == 1, spec.averaging.sync == "local", layout.kind == "cuda"
    own = {name: mesh.along_tensor(name, shape, 0).num_elements for name, shape in shapes.items()}
    held, accumulated = (mesh.num_elements(what, shapes, 0) for what in ("parameters", "accumulators"))
    largest = max(own.values())
    gradient = sum(-(-_FP32 * size // _ALIGN) * _ALIGN for size in own.values())
    scattered = mesh.shards("accumulators")
    fully = mesh.shards("parameters")
    # Matrices alone are cast, and no table of embeddings, of which rows are read.
    casts = _BF16 * sum(own[name] for name, shape in shapes.items() if len(shape) > 1 and "embed_tokens" not in name)
    weights = _FP32 * held + casts * (spec.numerics.compute == "bf16")
    outer = 2 * _FP32 * held * (alone and local)
    finished = alone and not (local or cuda)  # else it is in the peer process
    # A rank with a full device is lost, and all others with it: what computes past microbatches has to fit, too. A
    # peer of one rank only skips that audit.
    audited = setup.audited and not alone
    piece = _AGAIN * min(largest, chunk_elements(torch.device(layout.kind)))
    kept, most, offloaded = _microbatch(setup, spec, layers, gradient // (layout.data if fully else 1))
    # An outer step's vector is on the device on its way to host memory.
    most = max(most, kept + max(piece, cuda * outer // 2))
    # A layer's chunks of gradients have no memory of their own under ZeRO-2 and 3.
    update = _FP32 * (largest + scattered * mesh.num_elements("moments", shapes, 0)) + piece
    update += cuda * wide * largest  # a parameter's sum on its way to the device
    if fully:
        most += _gathered(own, layers)
    elif scattered:  # a parameter's gradient, packed to be scattered, and what is scattered already
        most = max(most, kept + 3 * _FP32 * largest + _FP32 * accumulated)
    if mesh.shards("moments"):
        update += 2 * _FP32 * largest  # updated weights are gathered, a parameter at a time
    frozen, matrix = _frozen(spec, mesh)
    most += matrix
    on_device = not setup.memory.offload_optimizer
    return RankMemory(
        parameters=(versions + audited) * weights + outer + frozen,
        gradients=0 if scattered else gradient,
        sums=(versions + finished + audited) * wide * accumulated,
        optimizer=on_device * _moments(spec, mesh, shapes),
        update=on_device * update,
        held=kept,
        microbatch=most,
        offloaded=offloaded,
    )


def _frozen(spec: StageSpec, mesh: MeshSplit) -> tuple[int, int]:
    """Bytes of the frozen weights at rest, which all versions share, and of the largest one that a product makes
    whole."""
    if not spec.lora.r:
        return 0, 0
    total = largest = 0
    for name, shape in frozen_shapes(stage_module(spec)).items():
        own = mesh.along_tensor(name, shape, 0)
        parts = part_shapes(name, torch.Size(own.shape), spec.lora.base)
        total += sum(dtype.itemsize * math.prod(held) for dtype, held in parts.values())
        if parts.keys() != {"whole"} or parts["whole"][0] != torch.float32:
            largest = max(largest, (_BF16 if spec.numerics.compute == "bf16" else _FP32) * own.num_elements)
    return total, largest


def _moments(spec: StageSpec, mesh: MeshSplit, shapes: Mapping[str, torch.Size]) -> int:
    total = 0
    for name, shape in shapes.items():
        held = mesh.held("moments", name, shape, 0).num_elements
        packed = spec.optimizer.state == "8bit" and shape.numel() >= LEAST
        total += 2 * (held + _FP32 * -(-held // BLOCK)) if packed else 2 * _FP32 * held
    return total


def _microbatch(setup: Setup, spec: StageSpec, layers: int, gradient: int) -> tuple[int, int, int]:
    """(held between its passes, the most in a pass, moved to host memory meanwhile). gradient: bytes of a whole one."""
    model, training, compute, policy = spec.model, spec.training, spec.numerics.compute, setup.memory.activations
    tensor, tokens = setup.layout.tensor, training.microbatch_size // setup.layout.data * training.sequence_length
    # Sequence parallelism splits what is between the regions that tensor ranks share: half of what is saved.
    hidden = model.hidden_size * ((1 + 1 / tensor) / 2 if setup.layout.sequence_parallel else 1.0)
    queries, inner = model.num_heads * model.head_dim / tensor, model.intermediate_size / tensor
    keys = max(model.num_kv_heads / tensor, 1) * model.head_dim
    if model.qk_norm:
        queries, keys = 2 * queries, 2 * keys
    row = training.sequence_length if setup.layout.kind == "cuda" and keeps_scores(spec) else 0
    scores = model.num_heads / tensor * row

    def of(widths: _Widths, per_score: int = 0) -> int:
        """Of one layer."""
        per_token: float = sum(map(operator.mul, widths, (hidden, queries, keys, inner)))
        return round(tokens * (per_token + per_score * scores))

    logits = tokens * spec.last * -(-model.vocab_size // tensor)
    ends = tokens * model.hidden_size * (_FP32 + 12 * spec.last)  # the stage's input; norm and head
    everything = of(_SAVED[compute, "save"], _SCORES_SAVED)
    kept = everything if policy == "save" else of(_SAVED.get((compute, policy), (0, 0, 0, 0)))
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
    return round(_MARGIN * held), round(_MARGIN * peak), moved


def _gathered(own: Mapping[str, int], layers: int) -> int:
    """What FSDP2 makes whole: what is outside layers, and two layers, the next one being fetched; each comes packed and
    is unpacked. In backward a layer's gradients are whole, and packed to be scattered."""
    inside = _FP32 * sum(size for name, size in own.items() if ".layers." in name)
    outside = _FP32 * sum(own.values()) - inside
    return max(outside + 5 * inside // max(layers, 1), 4 * outside)


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


def _host_memory(
    setup: Setup, canonical: Canonical, rank: RankMemory, mesh: MeshSplit, in_flight: int
) -> dict[str, int]:
    spec, ranks, elements = canonical.spec, setup.layout.ranks, canonical.num_elements
    # On the CPU the finished aggregate is the rank's own.
    aggregates = 2 if ranks > 1 else int(setup.layout.kind == "cuda" and spec.averaging.sync != "local")
    moments = 0
    if setup.memory.offload_optimizer:  # with a copy of the weights, and of their gradient
        moments = ranks * _moments(spec, mesh, canonical.shapes) + 2 * _FP32 * elements
    boundary = spec.training.microbatch_size * spec.training.sequence_length * spec.model.hidden_size
    there, back = (_BYTES.get(codec, _COARSE) for codec in (setup.wire.activations, setup.wire.gradients))
    payload = (there + back) * boundary * ((not spec.first) + (not spec.last))
    return {
        # Whole copies of the state that ranks can be started from again.
        "mirrors": len(COPIES) * copied(canonical).num_bytes * (ranks > 1),
        "sums": aggregates * sum_dtype(spec.numerics).itemsize * elements,
        # What codec and kind of averaging hold in addition.
        "rounds": _of_rounds(spec.averaging, canonical, ranks),
        "snapshots": _SNAPSHOTS * canonical.layout.num_bytes,
        "payloads": round(in_flight * payload) + (ranks > 1) * (2 + 2 * setup.audited) * _FP32 * boundary,
        # Answers that are kept for callers that ask again.
        "memo": setup.output_cache_bytes,
        "moments": moments,
        "offloaded": in_flight * rank.offloaded * ranks,
        "audits": audit_bytes(setup, canonical),
    }


def audit_bytes(setup: Setup, canonical: Canonical) -> int:
    """Host memory of what audits keep of one stage, at most: weights of the last steps; what went into microbatches of
    as many, as if this replica had contributed all, and what came out if kernels are free; and what other replicas have
    shown of theirs, as if they had shown all."""
    if not setup.audited:
        return 0
    spec, training = canonical.spec, canonical.spec.training
    sequences, length = training.microbatch_size, training.sequence_length
    there, back = (_BYTES.get(codec, _COARSE) for codec in (setup.wire.activations, setup.wire.gradients))
    crossing = (there * (not spec.first) + back * (not spec.last)) * sequences * length * spec.model.hidden_size
    payload = round(crossing) + sequences * (_FP32 * (length + 1) + _PROOF_BYTES)
    steps, made = KEPT_STEPS * training.microbatches * payload, 1 + (not spec.numerics.deterministic)
    works, shown = made * min(KEPT_CACHES * setup.output_cache_bytes, steps), min(setup.output_cache_bytes, steps)
    return works + shown + KEPT_WEIGHTS * _FP32 * canonical.num_elements


def _of_rounds(averaging: Averaging, canonical: Canonical, ranks: int) -> int:
    """What local sync holds in the round of the run's last step: its outer step is of all elements. An aggregate of
    integers takes nothing beyond the finished one."""
    if averaging.sync != "local":
        return 0
    rule = rule_of(averaging)
    # Gossip partners send differences instead.
    feedback = not averaging.gossip and codecs.use(averaging.codec).feedback
    vectors = (
        (rule is not None and rule.needs_center)  # the last mean
        + 2  # what this replica gives, and what comes back
        + 2 * (ranks > 1)  # the outer optimizer's; one rank has them itself
        + 5 * feedback  # residuals: of earlier steps, this round, the one before; twice of what was reduced here
        + 1  # for a moment: a mean
    )
    references = 0
    if averaging.gossip and averaging.codec in DIFFERENCES:
        # One of each turn; and, for fragments with turn 0 before the end of the first cycle, the first weights.
        references = (TURNS + (averaging.fragments > 1)) * _BF16 * canonical.num_elements
    return _FP32 * vectors * canonical.num_elements + references


# ------------------------------------------------------------ sizes as text


def shown(num_bytes: float) -> str:
    """12.3 GiB, 456 MiB, 7.8 KiB: three digits and a unit."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        # From here on it rounds to a whole one of the larger unit.
        if abs(num_bytes) >= 0.9995 * size:
            value = num_bytes / size
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"
    return f"{num_bytes:.0f} B"


_SIZE = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?) *(?:([KMGT]?)(I?)B|([KMGT]))", re.ASCII | re.IGNORECASE)


def read_size(text: str) -> int:
    """Bytes of "24GiB", "24 GB", "80g" or "1073741824B". Raises ValueError, in words, also without a unit."""
    # A number without a unit is refused: it could be meant in any.
    if (found := _SIZE.fullmatch(text.strip())) is None:
        raise ValueError("write a size with its unit, such as 24GiB")
    number, prefix, binary, letter = found.groups()
    power = " KMGT".index((prefix or letter or " ").upper())
    value = float(number) * (1024 if binary or letter else 1000) ** power
    if not 1 <= value < 1 << 60:
        raise ValueError("must be at least a byte, and less than 1048576 TiB")
    return int(value)
