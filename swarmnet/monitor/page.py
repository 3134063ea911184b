"""What the dashboard shows of a run: a `WatchedRun` in, one JSON object out. Pure.

It has nothing that `swarmnet watch` would not show. A record is its peer's own word, and is shown as that.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from swarmnet.monitor.curve import Curve
from swarmnet.monitor.state import MOST_STAYS, WatchedRun, shown
from swarmnet.peer.swarm_health import ReplicaLine
from swarmnet.telemetry.run_state import StepPoint

T = TypeVar("T")

MOST_POINTS = 1200
"""Of the curve: more than a screen has columns."""

MOST_PEERS, MOST_COMPLAINTS = 500, 32
"""That are shown; how many peers there are is said. Of stall reports those of one peer."""

LONGEST_NAME = 80
"""Characters of the run's name that are shown: a manifest sets it no limit."""


def page(seen: WatchedRun, *, now: float) -> dict[str, Any]:
    """All that the dashboard shows, as JSON. now: Unix seconds."""
    found = seen.found
    replicas = [(line.stage, replica) for line in found.stages for replica in line.replicas]
    drawn = {replica.peer for replica in fairly(line.replicas for line in found.stages)[:MOST_PEERS]}
    counted = {line.stage: sum(replica.counted for replica in line.replicas) for line in found.stages}
    peers: dict[str, dict[str, Any]] = {}
    for stage, replica in replicas:
        if replica.peer in drawn:
            line = _replica(seen, replica, stage, counted[stage])
            peers.setdefault(replica.peer, _peer(replica))["stages"].append(line)
    for each in found.complaints:
        complaint = {"by": each.by, "about": each.of.peer, **shown(each.of, "stage how reason seconds")}
        for peer in {each.by, each.of.peer} & peers.keys():
            if len(peers[peer]["complaints"]) < MOST_COMPLAINTS:
                peers[peer]["complaints"].append(complaint)
    return seen.state() | {
        "name": seen.name[:LONGEST_NAME],
        "time": now,
        "since": seen.since,
        "seen": found.seen,
        "disputed": seen.curve.disputed,
        "admission": None if found.admission is None else asdict(found.admission),
        "stages": [
            {
                "stage": line.stage,
                "synced": sum(replica.ready for replica in line.replicas),
                "replicas": len(line.replicas),
                "peers": [replica.peer for replica in line.replicas if replica.peer in drawn],
            }
            for line in found.stages
        ],
        "trainers": [trainer.peer for trainer in found.trainers][:MOST_PEERS],
        "num_trainers": len(found.trainers),
        "peers": peers,
        "num_stays": len(seen.stays),
        "stays": [asdict(stay) for stay in seen.stays[-MOST_STAYS:]],
        "marks": [shown(each, "step time kind text") for each in seen.history],
        "curve": columns(seen.curve),
        "waterfall": seen.waterfall,
    }


def _replica(seen: WatchedRun, replica: ReplicaLine, stage: int, counted: int) -> dict[str, Any]:
    return {
        "stage": stage,
        "held": replica.queue,
        "per_second": seen.per_second(stage, replica.peer),
        "share": replica.counted / counted if counted else None,
        **shown(replica, "state version slots speed executions counted chain disk drift stray still_s"),
    }


def _peer(replica: ReplicaLine) -> dict[str, Any]:
    """What is of the peer and not of its stage; `stages` and `complaints` are filled by the caller."""
    named = shown(replica, "addresses software region nickname restart")
    # A processor's name is followed by what a layer makes there, which tells a reader nothing.
    device = replica.numerics.device
    device = device.partition("+")[0] if device.startswith("cpu") else device
    return {"stages": [], "complaints": [], "numerics": str(replica.numerics), "device": device, **named}


def fairly(stages: Iterable[Sequence[T]]) -> list[T]:
    """The first of each stage, then the second of each: so that no stage is without."""
    return [each for row in itertools.zip_longest(*stages) for each in row if each is not None]


def columns(curve: Curve, most: int = MOST_POINTS) -> dict[str, list[float | int | None]]:
    """The curve by column: `x` steps or versions, `tokens` and `time` as `_progress` has them, `loss`,
    `tokens_per_second`, `held_out`; None where none is known.

    most: steps, about; of a long curve each stretch shows its first, its least and its greatest loss.
    """
    points = curve.points
    stretch = -(-3 * len(points) // most) if len(points) > most else 1
    kept = {point.step: point for point in points[-1:]}
    for first in range(0, len(points), stretch):
        some = points[first : first + stretch]
        for point in (some[0], min(some, key=lambda each: each.loss), max(some, key=lambda each: each.loss)):
            kept[point.step] = point
    versions: Mapping[int, float] = curve.evaluations
    if len(versions) > most:
        versions = dict(sorted(versions.items())[:: -(-len(versions) // most)])
    x = sorted(kept.keys() | versions.keys())
    tokens, times = _progress(points, x)
    return {
        "x": list(x),
        "tokens": list(tokens),
        "time": list(times),
        "loss": [kept[each].loss if each in kept else None for each in x],
        "tokens_per_second": [curve.tokens_per_second(each) if each in kept else None for each in x],
        "held_out": [versions.get(each) for each in x],
    }


def _progress(points: Sequence[StepPoint], x: Sequence[int]) -> tuple[list[int], list[float]]:
    """Tokens that made each of these versions, and Unix seconds when the last known step up to it was applied.

    Zeros where no step is known. A step that is not known counts as many tokens as the next known one, or the last.
    """
    if not points:
        return [0] * len(x), [0.0] * len(x)
    steps = [point.step for point in points]
    gaps = (step - before for before, step in itertools.pairwise([-1, *steps]))
    totals = list(itertools.accumulate(gap * point.tokens for gap, point in zip(gaps, points, strict=True)))
    tokens, times = [], []
    for version in x:
        later = bisect.bisect_left(steps, version)  # the first known step that is not in that version
        done, total = (steps[later - 1] + 1, totals[later - 1]) if later else (0, 0)
        tokens.append(total + (version - done) * points[min(later, len(points) - 1)].tokens)
        times.append(points[max(bisect.bisect_right(steps, version) - 1, 0)].time)
    return tokens, times
