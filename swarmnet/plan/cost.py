"""What a step of a run costs: seconds, bytes on each member's line, and the slots that keep its device busy. Pure.

One formula per term, below. A run goes at the pace of its slowest stage, and a stage at that of all its replicas
together: microbatches go to a free replica. Payloads cross a link in both directions simultaneously, so a link is one
number. The simulator runs the real machines at these speeds and agrees within 15 % (`benchmarks/plan_accuracy.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarmnet.config.plug_in import split
from swarmnet.manifest.schema import StageSpec
from swarmnet.model.cut import balance, cut_layers, head_flops, layer_flops
from swarmnet.pipeline.depth import slots_enough

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.016, "bnb8": 1.016, "nf4": 0.563, "int64": 4.0}
"""Of an element, by codec (docs/averaging.md). int64: of the fine grid, written as `small` is."""

CODING_NS = {
    "fp32": (0.15, 0.2),
    "fp16": (0.5, 0.4),
    "int8": (1.25, 0.5),
    "nf4": (3.6, 0.5),
    "int64": (1.0, 1.7),
    "small": (0.5, 0.5),
    "sparse": (60.0, 12.0),
}
"""Codecs of sums: nanoseconds an element to encode, and to decode and add, on one core (`benchmarks/codecs.py`)."""

HASHING_NS = 3.5
"""A core's time per element in an aggregation round without codecs: digest, norm, copies."""

LINE_SHARE = 0.75
"""The share of a link that payloads use where the link is the bottleneck: each needs the sender's and the receiver's
simultaneously."""

ROUND_TRIPS = 4
"""Of a step, in addition to payloads: reports, the round, acknowledgements, the commits of other stages."""


@dataclass(frozen=True, slots=True)
class Site:
    """A member's machine, and its line."""

    bytes_per_s: float
    """Each way: the narrower direction of its line."""
    flops_per_s: float
    """Reached in training, not promised by a data sheet."""
    round_trip_s: float = 0.05
    narrowest_bytes_per_s: float = 0.0
    """Of the members of a round, the one with the slowest line; 0: all are as fast."""
    farthest_s: float = 0.0
    """The longest round trip between members, which a barrier waits for; 0: all are as far."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a step asks of a member of the heaviest stage."""

    stages: int
    replicas: int
    microbatches: int
    """Of a step, over all replicas of a stage."""
    microbatch_s: float
    """Forward, backward and weight pass of one, in the slowest stage. Of unequal replicas the harmonic mean: so long
    one takes each of them if they share the work as they are fast."""
    boundary_elements: int
    """What crosses a boundary for one microbatch, once each way."""
    parameters: int
    update_s: float = 0.0
    """The optimizer's step."""
    mean_s: float = 0.0
    """As `microbatch_s`, on the average over all stages; 0: they are equal."""
    slowest_s: float = 0.0
    """As `microbatch_s`, of the slowest replica; 0: they are equal."""
    stages_per_peer: int = 1
    crowd: float = 0.0
    """Peers to a core, where one machine's cores are all peers'; 0: each has its own."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a run may spend its lines: fields of its manifest, and of its peers' configs."""

    activations: str
    gradients: str
    codec: str
    sync: str
    slots: int
    inner_steps: int = 1


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a step, in steady state: seconds, which add up to `step_s`, and bytes that a member sends, and receives as
    many."""

    step_s: float
    compute_s: float
    """A device's work, which nothing can shorten."""
    bubble_s: float
    """Devices wait for microbatches: the pipeline fills and drains, slots are few, replicas end one after the other."""
    boundary_s: float
    """They wait for what crosses a boundary on a line that is slower than they."""
    averaging_s: float
    """They wait for the aggregate of all replicas."""
    barrier_s: float
    """They wait for messages between the aggregate and the next step."""
    boundary_bytes: float
    averaging_bytes: float
    slots: int
    """In flight, so that neither lines nor later stages leave the first stage idle."""

    @property
    def utilisation(self) -> float:
        """The share of a step in which a device computes."""
        return self.compute_s / self.step_s

    @property
    def waits(self) -> dict[str, float]:
        """Seconds of each kind of waiting."""
        return {name: getattr(self, f"{name}_s") for name in ("bubble", "boundary", "averaging", "barrier")}


def sum_bytes(codec: str, microbatches: int, replicas: int) -> tuple[float, float]:
    """Of an element: (a contribution, the sum). Raises KeyError for a codec with a size that depends on more.

    `small`: the numbers of one microbatch have an rms of 2 grid steps, those of n of 2 sqrt(n), and a number of rms s
    has log2(s sqrt(2 pi e)) bits; as measured, a quarter of a bit is lost. Of few microbatches
    some members have none, and send nothing. `sparse`: as if replicas chose their elements independently.
    """
    family, parameter = split(codec)
    if family == "sparse":
        kept = float(parameter or 1)
        return sparse_bytes(kept), sparse_bytes(1 - (1 - kept) ** replicas)
    if codec != "small":
        return BYTES[codec], BYTES[codec]

    def size(count: float) -> float:
        return (math.log2(2 * math.sqrt(2 * math.pi * math.e * count)) + 0.25) / 8

    share = microbatches / replicas
    return min(share, 1.0) * size(max(share, 1.0)), size(microbatches)


def sparse_bytes(share: float) -> float:
    """Of an element under `sparse`, where this share of the elements is sent independently (`wire.codec_sparse`)."""

    def gaps(width: int) -> float:
        skip = (1 << width) - 1
        again = (1 - share) ** skip
        return width / 8 * share / (1 - again) if again < 1 else 0.0

    return share / 2 + min(map(gaps, (8, 4, 2, 1))) + 4 / 4096


def crossed_bytes(stages: int, elements: int, way: Way) -> tuple[float, float, float]:
    """(an activation, its gradient, what one stage sends of both). A stage in the middle sends both, one at an end one
    of them."""
    there, back = elements * BYTES[way.activations], elements * BYTES[way.gradients]
    return there, back, there + back if stages > 2 else max(there, back) if stages == 2 else 0.0


def _pace(*limits_s: float, power: int = 3) -> float:
    """What several limits make together: the largest, and more if another one is near."""
    return float(sum(each**power for each in limits_s) ** (1 / power))


def averaging_round(load: Load, site: Site, way: Way) -> tuple[float, float]:
    """(bytes that a member sends, seconds) of a round that aggregates gradients, whether or not a step waits for it."""
    others, parameters = (load.replicas - 1) / load.replicas, load.stages_per_peer * load.parameters
    up, down = sum_bytes(way.codec, load.microbatches, load.replicas)
    sent = others * (up + down) * parameters
    # Parts are cut by bandwidth; but a member without a part, too, sends its gradients and receives the aggregate.
    narrow_s = others * max(up, down) * parameters / (site.narrowest_bytes_per_s or site.bytes_per_s)
    encode, add = CODING_NS[split(way.codec)[0]]
    coding_s = (HASHING_NS + encode * (1 + 1 / load.replicas) + 2 * add) * 1e-9 * load.parameters * max(load.crowd, 1.0)
    return sent, max(sent / site.bytes_per_s, narrow_s, coding_s) if others else 0.0


def cost(load: Load, site: Site, way: Way) -> Cost:
    """Of a step under `way`: the one formula of `plan`, `init` and the search. Raises KeyError for a codec of unknown
    size."""
    stages, others, rtt = load.stages, load.replicas - 1, site.round_trip_s
    held, mean_s = load.stages_per_peer, load.mean_s or load.microbatch_s
    part = mean_s / 3  # a forward, a backward and a weight pass take as long
    there, back, crossing = crossed_bytes(stages, load.boundary_elements, way)
    boundary = held * crossing
    there_s, back_s, boundary_s = (each / site.bytes_per_s for each in (there, back, boundary))
    # The way of one microbatch: a call is announced, then its payload comes, and the answer comes by itself.
    fill_s = rtt + (stages - 1) * (part + rtt + there_s)
    drain_s = rtt / 2 + (stages - 1) * (part + rtt / 2 + back_s)
    held_s = fill_s + drain_s + 3 * part  # by a slot of the first stage
    share, device_s = load.microbatches / load.replicas, held * load.microbatch_s
    # Replicas of equal speed do not end together.
    most = share + 0.5 * bool(others)
    # And the slowest one later still, unless others can do its last microbatch sooner.
    tail_s = min(max(load.slowest_s - load.microbatch_s, 0.0) / 2, load.microbatch_s)
    # Between two stages what is in flight at the beginning all goes there first, and then all comes back.
    line_s = (boundary_s + (stages == 2) * held * min(there_s, back_s) * min(way.slots / most, 1.0)) / LINE_SHARE
    # Cores that all peers share go at the pace of all their work.
    busy_s = max(device_s, load.crowd * held * mean_s)
    narrowest_s = max(busy_s, line_s)
    slots = slots_enough(held_s, narrowest_s, share, onward=stages)
    flying = min(way.slots, most)
    # Device, line and slots each set a pace, and who is near two of them waits for either at times.
    on_way_s = (stages - 1) * (there_s + back_s)
    pace_s = _pace(busy_s, held_s / flying, line_s)
    unhindered_s = _pace(busy_s, (held_s - on_way_s) / flying)
    fed_s = held_s + (most - 1) * pace_s + tail_s
    slow_s = on_way_s + (most - 1) * (pace_s - unhindered_s)
    sent, round_s = averaging_round(load, site, way)
    averaging_s = round_s / way.inner_steps
    update_s = held * load.update_s * max(load.crowd, 1.0)
    compute_s, barrier_s = share * device_s + update_s, ROUND_TRIPS * (site.farthest_s or rtt)
    step_s = alone_s = fed_s + update_s + barrier_s + averaging_s
    # An aggregate has until the end of the next step, and shares the line with that step's payloads.
    if way.sync == "overlap":
        on_line_s = share * boundary_s + averaging_s + barrier_s
        step_s = _pace(alone_s / 2, most * busy_s + update_s + tail_s, on_line_s, power=4)
    # The next step's compute covers as much of each wait.
    left = (step_s - compute_s) / (alone_s - compute_s)
    return Cost(
        step_s,
        compute_s,
        bubble_s=left * (fed_s - slow_s - share * device_s),
        boundary_s=left * slow_s,
        averaging_s=left * averaging_s,
        barrier_s=left * barrier_s,
        boundary_bytes=share * boundary,
        averaging_bytes=sent / way.inner_steps,
        slots=slots,
    )


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Measured: seconds of a microbatch, forward, backward and weight pass together, with one rank."""

    tokens: int
    layer_s: float
    embedding_s: float
    head_s: float
    call_s: float
    """In addition to layers, in every stage: adding a checked gradient to the aggregate, and the calls themselves."""
    update_s: float
    """The optimizer's step, for a parameter."""
    flops_per_s: float
    """Reached in a layer; other machines go in proportion."""

    def stages_s(self, cut: Sequence[int]) -> list[float]:
        """Of each stage of a cut."""
        found = [self.call_s + layers * self.layer_s for layers in cut]
        found[0] += self.embedding_s
        found[-1] += self.head_s
        return found

    def cut(self, layers: int, stages: int) -> tuple[int, ...]:
        """Layers of each stage, so that the slowest is as fast as can be."""
        costs = [round(1e9 * self.layer_s)] * layers
        costs[0] += round(1e9 * self.embedding_s)
        costs[-1] += round(1e9 * self.head_s)
        return tuple(map(len, balance(costs, stages)))


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a stage asks of a device: of a microbatch, and of an update; and what it trains."""

    flops: float
    update_flops: float
    parameters: int


def works(spec: StageSpec, times: LayerTimes | None = None) -> tuple[StageWork, ...]:
    """Of every stage of the run of `spec`, by FLOPs, or by what was measured."""
    model, training = spec.model, spec.training
    tokens = training.microbatch_size * training.sequence_length
    ends = model.vocab_size * model.hidden_size
    layer = (model.num_parameters - ends * (1 if model.tie_embeddings else 2)) // model.num_layers
    cut = [len(layers) for layers in cut_layers(model, spec.cut, training.sequence_length)]
    held = [count * layer for count in cut]
    held[0] += ends
    held[-1] += ends * (not model.tie_embeddings)
    # Backward and weight pass are a forward's products each; frozen weights have no weight pass.
    passes = 3.0
    if spec.lora.r:
        passes, held = 2.0, [count * spec.lora.num_parameters(model) // model.num_layers for count in cut]
    flops, update = [passes * tokens * count * layer_flops(model, training.sequence_length) for count in cut], 0.0
    flops[-1] += passes * tokens * head_flops(model)
    if times is not None:
        flops = [seconds * tokens / times.tokens * times.flops_per_s for seconds in times.stages_s(cut)]
        update = times.update_s * times.flops_per_s
    return tuple(StageWork(each, update * n, n) for each, n in zip(flops, held, strict=True))


def limits(load: Load, site: Site, way: Way) -> dict[str, float]:
    """Seconds of a step with twice of one thing: of the "line", of the "devices", or of what a round trip allows
    ("latency"); and with as much "memory" as slots that keep devices busy take."""

    def at(load: Load, site: Site, *, enough_memory: bool) -> float:
        enough = cost(load, site, way).slots
        return cost(load, site, replace(way, slots=max(way.slots, enough)) if enough_memory else way).step_s

    # Slots that are fewer than enough are as many as fit.
    fits = way.slots >= cost(load, site, way).slots
    lines = {name: 2 * getattr(site, name) for name in ("bytes_per_s", "narrowest_bytes_per_s")}
    trips = {name: getattr(site, name) / 2 for name in ("round_trip_s", "farthest_s")}
    works = {name: getattr(load, name) / 2 for name in ("microbatch_s", "update_s", "mean_s", "slowest_s")}
    return {
        "line": at(load, replace(site, **lines), enough_memory=fits),
        "devices": at(replace(load, **works), site, enough_memory=fits),
        "latency": at(load, replace(site, **trips), enough_memory=fits),
        "memory": at(load, site, enough_memory=True),
    }


def mesh_bytes(shard: str, *, tensor: int, data: int, parameters: int, layers: int, boundary_elements: int) -> float:
    """What a device of a mesh sends to the others for a microbatch; taken not to overlap with compute.

    tensor, data: the mesh. The rest is of the stages that it holds. ZeRO-2 scatters the gradient along `data`, ZeRO-3
    gathers the weights twice as well; along `tensor` each layer sums four activations (docs/mesh.md).
    """
    vectors = {"zero2": 1, "zero3": 3}.get(shard, 0)
    along_data = (data - 1) / data * vectors * parameters / tensor
    along_tensor = (tensor - 1) / tensor * 8 * layers * boundary_elements / data
    return 4.0 * (along_data + along_tensor)


def hiding_bytes_per_s(load: Load, way: Way) -> float:
    """The line, each way, on which what crosses boundaries takes as long as the slowest stage computes; on a faster one
    it hides behind compute.

    Compute grows with the square of the width, what crosses a boundary with the width alone: the larger a stage's
    layers, the slower a line they need (the square-cube rule, arXiv:2301.11913).
    """
    return crossed_bytes(load.stages, load.boundary_elements, way)[2] / LINE_SHARE / load.microbatch_s


def rule_bubble(stages: int, share: float, stages_per_peer: int = 1) -> float:
    """The share of a step for which a pipeline waits where forwards and backwards alone fill it: (P - 1)/(vM + P - 1)
    for P peers, M microbatches and v stages of each (arXiv:2104.04473)."""
    peers = -(-stages // stages_per_peer)
    return (peers - 1) / (stages_per_peer * share + peers - 1)


def volumes(load: Load, layers: int, inner_steps: int) -> dict[str, float]:
    """Bytes that each of a stage's n replicas would send in a step, if they shared the work by one technique alone.

    layers: of the stage. Numbers of 4 bytes, none rounded: what codecs save comes on top. A ring's all-reduce is
    2 (n - 1)/n of a vector, its gather and its scatter half of that. ZeRO-1 and -2 (arXiv:1910.02054) scatter gradients
    and gather weights; ZeRO-3 gathers the weights twice and scatters the gradients, for each microbatch. Tensor
    parallelism (arXiv:1909.08053) sums four activations a layer and microbatch; with sequence parallelism
    (arXiv:2205.05198) each sum is a scatter and a gather. A pipeline sends activations and their gradients.
    """
    n, each, fp32 = load.replicas, load.microbatches / load.replicas, 4.0
    half = (n - 1) / n * fp32 * load.parameters
    sums = 4 * layers * load.microbatches * 2 * (n - 1) / n * fp32 * load.boundary_elements
    return {
        "data parallel": 2 * half,
        "ZeRO-1": 2 * half,
        "ZeRO-2": 2 * half,
        "ZeRO-3": 3 * half * each,
        "tensor parallel": sums,
        "sequence parallel": sums,
        "pipeline": 2 * each * fp32 * load.boundary_elements,
        "local": 2 * half / inner_steps,
        "local, pairs": (n > 1) * fp32 * load.parameters / inner_steps,
    }
