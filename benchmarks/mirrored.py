"""What it gains that a peer serves two stages from opposite ends of the pipeline (Chimera), in exact mode.

    python benchmarks/mirrored.py [--json FILE] [--quick]

Whole swarms on virtual time (`swarmnet/simulate`), equal peers, two replicas of everything. The same layers on the same
machines are cut three ways, so a peer holds as many layers, and as much optimizer state, in each:

    one        K stages; a peer serves one
    mirrored   2 K stages, half as long; a peer serves {s, 2 K - 1 - s} (Chimera, arXiv:2107.06925)
    looped     2 K stages, half as long; a peer serves {s, s + K} (Megatron's interleaving, arXiv:2104.04473)

Few microbatches a step are where filling and draining the pipeline costs; latency is one way. of ideal: what whole
machines would take with nothing but compute, over the seconds of a step. gain: steps per second over those of `one`.
Activations: both of the others send twice as many boundaries' bytes, which cost nothing here but the latency.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

from swarmnet.testing.links import Links
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

REPLICAS = 2
LONG_FORWARD_S = 0.1
"""Of the layers that a peer holds; backward and weight pass take as long each."""
SHAPES = tuple((k, m, ms) for k in (2, 4) for ms in (1, 25, 100) for m in (4, 8, 32))
"""K, microbatches, latency in ms."""
QUICK = ((2, 8, 25),)
STEPS, WARMUP = 10, 3


def placements(k: int) -> dict[str, tuple[int, tuple[tuple[int, ...], ...]]]:
    """By name: the number of stages, and the stages of each peer."""
    return {
        "one": (k, tuple((stage,) for stage in range(k)) * REPLICAS),
        "mirrored": (2 * k, tuple((stage, 2 * k - 1 - stage) for stage in range(k)) * REPLICAS),
        "looped": (2 * k, tuple((stage, stage + k) for stage in range(k)) * REPLICAS),
    }


def step_seconds(stages: int, served: tuple[tuple[int, ...], ...], microbatches: int, latency_s: float) -> float:
    """Virtual seconds of a step, over those after the warm-up."""
    plan = Plan(
        stages=stages,
        served=served,
        microbatches=microbatches,
        steps=STEPS,
        slots=2 * stages + 2,
        forward_s=LONG_FORWARD_S * len(served) / (REPLICAS * stages),
        links=Links(latency_s=latency_s),
    )
    swarm = VirtualSwarm(plan, seed=1)
    swarm.run(until_s=3600.0)
    ends: dict[int, float] = {}
    for at, _, event, fields in swarm.events:
        if event == "committed":
            ends[fields["step"]] = max(at, ends.get(fields["step"], 0.0))
    return (ends[STEPS - 1] - ends[WARMUP - 1]) / (STEPS - WARMUP)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one shape")
    parser.add_argument("--json", type=Path, help="write the rows and the gains' geometric means there")
    options = parser.parse_args()
    print("K  peers  microbatches  ms   of ideal: one  mirrored  looped   gain: mirrored  looped")
    rows: list[dict[str, float]] = []
    for k, microbatches, ms in QUICK if options.quick else SHAPES:
        ideal_s = 3 * LONG_FORWARD_S * math.ceil(microbatches / REPLICAS)
        took = {name: step_seconds(*cut, microbatches, ms / 1000) for name, cut in placements(k).items()}
        rows.append(
            {"k": k, "microbatches": microbatches, "ms": ms}
            | {f"{name}_of_ideal": ideal_s / seconds for name, seconds in took.items()}
            | {name: took["one"] / took[name] for name in ("mirrored", "looped")}
        )
        share = "  ".join(f"{ideal_s / seconds:8.3f}" for seconds in took.values())
        print(
            f"{k}  {k * REPLICAS:5}  {microbatches:12}  {ms:3}       {share}        "
            f"{rows[-1]['mirrored']:8.3f}  {rows[-1]['looped']:7.3f}",
            flush=True,
        )
    means = {name: statistics.geometric_mean(row[name] for row in rows) for name in ("mirrored", "looped")}
    print(f"mean of the gains: mirrored {means['mirrored']:.3f}, looped {means['looped']:.3f}")
    if options.json:
        options.json.write_text(json.dumps(means | {"rows": rows}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
