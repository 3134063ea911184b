"""What a step of a run costs: seconds, bytes on each member's line, and the slots that keep its device busy. Pure.

One formula per term, below. Every stage is taken to be as slow as the heaviest one, and every member to be `Site`:
a run goes at the pace of its slowest. Payloads cross a line in both directions at once, so a line is one number. The
simulator runs the real machines at these speeds and agrees within 15 % (`benchmarks/plan_accuracy.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from swarmnet.manifest.schema import StageSpec
from swarmnet.model.cut import cut_layers, head_flops, layer_flops

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.016, "bnb8": 1.016, "nf4": 0.563, "int64": 8.0}
"""Of an element, by codec (docs/codecs.md)."""

CODING_NS = {
    "fp32": (0.15, 0.2),
    "bf16": (0.15, 0.2),
    "fp16": (0.5, 0.4),
    "int8": (1.25, 0.5),
    "bnb8": (3.3, 0.85),
    "nf4": (3.6, 0.5),
    "int64": (0.1, 1.2),
    "small": (7.5, 6.5),
}
"""Codecs of sums: nanoseconds an element to encode, and to decode and add, on one core (docs/codecs.md)."""

HASHING_NS = 3.5
"""What a round takes of a core beside codecs, an element: digest, norm, copies."""

LINE_SHARE = 0.75
"""Of a line that is the narrowest place, what payloads use: each needs the sender's and the receiver's at once."""

ROUND_TRIPS = 4
"""Of a step, beside payloads: reports, the round, acknowledgements, the commits of other stages."""


@dataclass(frozen=True, slots=True)
class Site:
    """A member's machine, and its line."""

    bytes_per_s: float
    """Each way: the narrower direction of its line."""
    flops_per_s: float
    """Reached in training, not promised by a data sheet."""
    round_trip_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Load:
    """What a step asks of a member of the heaviest stage."""

    stages: int
    replicas: int
    microbatches: int
    """Of a step, over all replicas of a stage."""
    microbatch_s: float
    """Forward, backward and weight pass of one, in this stage."""
    boundary_elements: int
    """What crosses a boundary for one microbatch, once each way."""
    parameters: int
    update_s: float = 0.0
    """The optimizer's step."""


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
    """Of a step, in steady state. Seconds; bytes that a member sends, and receives as many."""

    step_s: float
    compute_s: float
    """A device's work, which nothing can shorten."""
    bubble_s: float
    """Devices wait for microbatches: the pipeline fills and drains, slots are few, replicas end one after the other."""
    boundary_s: float
    """They wait for what crosses a boundary on a line that is slower than they."""
    averaging_s: float
    """Of a round that brings sums together, whether or not a step waits for it."""
    barrier_s: float
    """Messages between the sum and the next step."""
    hidden_s: float
    """What of all this the next steps' compute covers."""
    boundary_bytes: float
    averaging_bytes: float
    """Of such a round."""
    slots: int
    """In flight, so that neither lines nor later stages leave the first stage idle."""

    @property
    def utilisation(self) -> float:
        """The share of a step in which a device computes."""
        return self.compute_s / self.step_s


def sum_bytes(codec: str, microbatches: int, replicas: int) -> tuple[float, float]:
    """Of an element: (a contribution, the sum). Raises KeyError for a codec whose size depends on more.

    `small`: the numbers of one microbatch have an rms of 2 grid steps, those of n of 2 sqrt(n), and a number of rms s
    has log2(s sqrt(2 pi e)) bits; as measured, a quarter of a bit is lost (docs/performance.md). Of few microbatches
    some members have none, and send nothing.
    """
    if codec != "small":
        return BYTES[codec], BYTES[codec]

    def size(count: float) -> float:
        return (math.log2(2 * math.sqrt(2 * math.pi * math.e * count)) + 0.25) / 8

    share = microbatches / replicas
    return min(share, 1.0) * size(max(share, 1.0)), size(microbatches)


def _pace(*limits_s: float) -> float:
    return float(sum(each**3 for each in limits_s) ** (1 / 3))


def cost(load: Load, site: Site, way: Way) -> Cost:
    """Of a step under `way`. Raises KeyError for a codec of unknown size."""
    stages, others, rtt = load.stages, load.replicas - 1, site.round_trip_s
    part = load.microbatch_s / 3  # a forward, a backward and a weight pass take as long
    there, back = (load.boundary_elements * BYTES[codec] for codec in (way.activations, way.gradients))
    # A stage in the middle sends both, one at the end sends one of them.
    boundary = there + back if stages > 2 else max(there, back) if stages == 2 else 0.0
    there_s, back_s, boundary_s = (each / site.bytes_per_s for each in (there, back, boundary))
    # The way of one microbatch: a call is announced, then its payload comes, and the answer comes by itself.
    fill_s = rtt + (stages - 1) * (part + rtt + there_s)
    drain_s = rtt / 2 + (stages - 1) * (part + rtt / 2 + back_s)
    held_s = fill_s + drain_s + 3 * part  # by a slot of the first stage
    share = load.microbatches / load.replicas
    # Replicas of equal speed do not end together.
    most = share + 0.5 * bool(others)
    line_s = boundary_s / LINE_SHARE
    narrowest_s = max(load.microbatch_s, line_s)
    # One more than fits exactly, since microbatches come unevenly; and no more than come at all.
    slots = min(math.ceil(held_s / narrowest_s), math.ceil(share)) + 1
    flying = min(way.slots, most)
    # Device, line and slots each set a pace, and who is near two of them waits for either at times.
    on_way_s = (stages - 1) * (there_s + back_s)
    pace_s = _pace(load.microbatch_s, held_s / flying, line_s)
    unhindered_s = _pace(load.microbatch_s, (held_s - on_way_s) / flying)
    fed_s = held_s + (most - 1) * pace_s
    slow_s = on_way_s + (most - 1) * (pace_s - unhindered_s)
    up, down = sum_bytes(way.codec, load.microbatches, load.replicas)
    averaging = others / load.replicas * (up + down) * load.parameters
    encode, add = CODING_NS[way.codec]
    coding_s = (HASHING_NS + encode * (1 + 1 / load.replicas) + 2 * add) * 1e-9 * load.parameters
    averaging_s = max(averaging / site.bytes_per_s, coding_s) if others else 0.0
    compute_s, barrier_s = share * load.microbatch_s + load.update_s, ROUND_TRIPS * rtt
    after_another_s = fed_s + barrier_s + load.update_s + averaging_s / way.inner_steps
    step_s = after_another_s
    # A sum has until the end of the next step, and shares the line with that step's payloads.
    if way.sync == "overlap":
        on_line_s = share * boundary_s + averaging_s + barrier_s
        step_s = max(after_another_s / 2, most * load.microbatch_s, on_line_s)
    return Cost(
        step_s,
        compute_s,
        fed_s - slow_s - share * load.microbatch_s,
        slow_s,
        averaging_s,
        barrier_s,
        after_another_s - step_s,
        share * boundary,
        averaging,
        slots,
    )


def load_of(spec: StageSpec, site: Site, *, replicas: int) -> Load:
    """What a step of this run asks of a member, with so many of them in each stage. spec: of any stage."""
    model, training = spec.model, spec.training
    tokens = training.microbatch_size * training.sequence_length
    flops, parameters = [], []
    ends = model.vocab_size * model.hidden_size
    layer = (model.num_parameters - ends * (1 if model.tie_embeddings else 2)) // model.num_layers
    cut = cut_layers(model, spec.cut, training.sequence_length)
    for stage, layers in enumerate(cut):
        first, last = stage == 0, stage == len(cut) - 1
        flops.append(len(layers) * layer_flops(model, training.sequence_length) + last * head_flops(model))
        parameters.append(len(layers) * layer + (first + last) * ends)
    return Load(
        stages=len(cut),
        replicas=replicas,
        microbatches=training.microbatches,
        # Backward and weight pass are a forward's products each.
        microbatch_s=3 * max(flops) * tokens / site.flops_per_s,
        boundary_elements=tokens * model.hidden_size,
        parameters=max(parameters),
    )


def limits(load: Load, site: Site, way: Way) -> dict[str, float]:
    """Seconds of a step with twice of one thing: of the "line", of the "devices", or of what a round trip allows
    ("latency"); slots as many as are enough then."""

    def at(**twice: float) -> float:
        other, faster = replace(site, **twice), load
        if "flops_per_s" in twice:
            faster = replace(load, microbatch_s=load.microbatch_s / 2, update_s=load.update_s / 2)
        return cost(faster, other, replace(way, slots=max(way.slots, cost(faster, other, way).slots))).step_s

    return {
        "line": at(bytes_per_s=2 * site.bytes_per_s),
        "devices": at(flops_per_s=2 * site.flops_per_s),
        "latency": at(round_trip_s=site.round_trip_s / 2),
    }


ENOUGH = 0.9
"""Of what devices do on an endless line, what they do on one that is enough."""


def needed_bytes_per_s(load: Load, site: Site, way: Way) -> float:
    """The line, each way, on which devices do 0.9 of what they would do on an endless one.

    Compute grows with the square of the width, what crosses a boundary with the width alone: the larger a stage's
    layers, the slower a line they need (the square-cube rule, arXiv:2301.11913).
    """

    def utilisation(bytes_per_s: float) -> float:
        on = replace(site, bytes_per_s=bytes_per_s)
        return cost(load, on, replace(way, slots=max(way.slots, cost(load, on, way).slots))).utilisation

    low, high = 1.0, 1e15
    wanted = ENOUGH * utilisation(high)
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if utilisation(middle) >= wanted else (middle, high)
    return high


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
