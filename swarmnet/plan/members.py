"""Which machines members have, how stages are given to them, and what a step then asks of each. Pure.

A stage's rate is the sum over its replicas of min(compute, line / bytes), and the slowest stage's is the run's.
Machines are given away from the fastest on, each to the stage with the least rate of those that it fits: the greedy
rule for the largest minimum (of equal stages at least 3/4 of the best, Deuermeyer et al. 1982), and about what
newcomers do (`peer/placement.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet.config.fleet import Members
from swarmnet.manifest.schema import StageSpec
from swarmnet.plan.cost import LINE_SHARE, LayerTimes, Load, Site, Way, crossed_bytes, works

Counts = tuple[tuple[int, ...], ...]
"""Machines of each kind, for each position in the pipeline."""


def given_away(rates: Sequence[Sequence[float]], counts: Sequence[int]) -> Counts | None:
    """How many machines of each kind each position gets, so that the least rate is as large as can be. None: one gets
    none.

    rates: what a machine of each kind brings to each position; 0 if that does not fit it. counts: machines of each
     kind.
    """
    found, sums = [[0] * len(counts) for _ in rates], [0.0] * len(rates)
    kinds = sorted(range(len(counts)), key=lambda kind: -max(rate[kind] for rate in rates))
    for kind in kinds:
        fitting = [place for place, rate in enumerate(rates) if rate[kind] > 0]
        for _ in range(counts[kind] if fitting else 0):
            place = min(fitting, key=lambda place: (sums[place], -rates[place][kind]))
            found[place][kind] += 1
            sums[place] += rates[place][kind]
    return tuple(map(tuple, found)) if all(map(any, found)) else None


@dataclass(frozen=True, slots=True)
class MachineFit:
    """How a machine of one kind holds the stages of one position."""

    slots: int
    """That fit; 0: not even one."""
    need: int = 0
    """Bytes of each device, with so many, or with one."""
    host_need: int = 0
    """Bytes of host memory outside of GPUs."""
    shard: str = "none"
    """How its GPUs share the stages."""
    mesh_bytes: float = 0.0
    """What each of its GPUs sends to the others for a microbatch (`cost.mesh_bytes`)."""


Fits = tuple[tuple[MachineFit, ...], ...]
"""For each position in the pipeline, of each kind of machine; (): memory is unknown."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Members in their places, and what a step asks of those in the slowest."""

    counts: Counts
    load: Load
    site: Site
    place_s: tuple[float, ...]
    """Of a microbatch, for a replica at each position: the harmonic mean."""


def situated(
    spec: StageSpec,
    members: Members,
    way: Way,
    *,
    stages_per_peer: int = 1,
    times: LayerTimes | None = None,
    fits: Fits = (),
    counts: Counts | None = None,
) -> Situation | None:
    """Members given to the stages of a run; None if some stage gets none.

    Args:
        spec: of any stage.
        stages_per_peer: a peer at position p of P serves the stages p, p + P, ...
        times: measured, instead of FLOPs.
        fits: how each kind holds each position; what its GPUs exchange takes time in which they do not compute.
        counts: the machines at each position, if that is known.
    """
    kinds, held = members.machines, stages_per_peer
    work = works(spec, times)
    places = len(work) // held
    flops = [sum(work[stage].flops for stage in range(place, len(work), places)) for place in range(places)]
    training = spec.training
    elements = training.microbatch_size * training.sequence_length * spec.model.hidden_size
    crossing = held * crossed_bytes(len(work), elements, way)[2] / LINE_SHARE

    def rate(place: int, number: int, *, line: bool) -> float:
        kind = kinds[number]
        mesh_s = fits[place][number].mesh_bytes / kind.mesh_bytes_per_s if fits else 0.0
        compute = 1 / (flops[place] / kind.flops_per_s + mesh_s)
        return min(compute, kind.bytes_per_s / crossing) if line and crossing else compute

    if counts is None:
        rates = [
            [rate(place, n, line=True) * (not fits or fits[place][n].slots > 0) for n in range(len(kinds))]
            for place in range(places)
        ]
        counts = given_away(rates, [kind.count for kind in kinds])
    if counts is None:
        return None

    def total(place: int, *, line: bool) -> float:
        return sum(n * rate(place, number, line=line) for number, n in enumerate(counts[place]))

    slowest = min(range(places), key=lambda place: total(place, line=True))
    here = counts[slowest]
    place_s = tuple(sum(counts[place]) / total(place, line=False) for place in range(places))
    replicas, lines = sum(here), [n * kind.bytes_per_s for n, kind in zip(here, kinds, strict=True)]
    # Where fast devices have slow lines, less than both sums comes through.
    joint = min(total(slowest, line=False), sum(lines) / crossing if crossing else float("inf"))
    unhappy = joint / total(slowest, line=True)
    used = [kind for number, kind in enumerate(kinds) if any(place[number] for place in counts)]
    inside = [kind for n, kind in zip(here, kinds, strict=True) if n]
    mean_trip, longest = members.round_trips([sum(place[number] for place in counts) for number in range(len(kinds))])
    site = Site(
        sum(lines) / replicas,
        sum(n * kind.flops_per_s for n, kind in zip(here, kinds, strict=True)) / replicas,
        mean_trip,
        min(kind.bytes_per_s for kind in used),
        longest,
    )
    load = Load(
        stages=len(work),
        replicas=replicas,
        microbatches=training.microbatches,
        microbatch_s=place_s[slowest] * unhappy / held,
        boundary_elements=elements,
        parameters=max(each.parameters for each in work),
        update_s=max(each.update_flops for each in work) / min(kind.flops_per_s for kind in inside),
        mean_s=sum(place_s) / places / held,
        slowest_s=max(1 / rate(slowest, number, line=False) for number, n in enumerate(here) if n) / held,
        stages_per_peer=held,
    )
    return Situation(counts, load, site, place_s)
