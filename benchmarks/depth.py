"""Slots that follow depth and latency, beside fixed numbers of them, on virtual time.

    python benchmarks/depth.py [--json FILE] [--quick]

Whole swarms (`swarmnet/simulate`) of S stages with one replica each, 16 microbatches a step and two more for each
stage, 0.3 s of compute a microbatch, no bytes. Per S and round trip: the share of time in which devices compute, from
the second version on, with as many slots as each replica finds enough (`pipeline/depth.py`), and with every one of
several fixed numbers. `ratio` is the first over the best of the others; `--json` writes `rows` and the `worst`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from timeline import Timeline

from swarmnet.testing.links import Links
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

STAGES, ROUND_TRIPS_S = (2, 4, 8, 16, 32), (0.0, 0.05, 0.2)
MICROBATCH_S, STEPS, FIRST = 0.3, 3, 1


def microbatches_of(stages: int) -> int:
    """Of a step."""
    return 16 + 2 * stages


def fixed_of(stages: int) -> tuple[int, ...]:
    """Fixed numbers of slots to compare with: four, as was the default, and some that suit depth and latency."""
    most = microbatches_of(stages)
    return tuple(sorted({4, stages, min(2 * stages, most), most}))


def utilisation(stages: int, round_trip_s: float, slots: int, *, microbatches: int = 0) -> tuple[float, list[int]]:
    """The share of time in which devices compute, and the slots of each stage at the end. slots: 0 for automatic."""
    plan = Plan(
        stages=stages,
        replicas=1,
        microbatches=microbatches or microbatches_of(stages),
        steps=STEPS,
        slots=slots,
        forward_s=MICROBATCH_S / 3,
        # With jitter an average message takes half as long again.
        links=Links(latency_s=max(round_trip_s, 1e-4) / 3),
    )
    swarm = VirtualSwarm(plan, seed=1)
    timeline = Timeline(swarm)
    swarm.run(until_s=10_000.0)
    begin, end = timeline.applied_at(FIRST), timeline.applied_at(STEPS)
    devices = [engine.device for node in swarm.nodes for engine in node.engines.values()]
    busy = sum(job.stop - job.start for device in devices for job in device.log if begin < job.stop <= end)
    return busy / (end - begin) / len(devices), [
        replica.execution.slots for node in swarm.nodes for replica in node.peer.replicas.values()
    ]


def main() -> None:
    """Print a row per depth and round trip, and the worst ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--quick", action="store_true", help="two stages")
    typed = parser.parse_args()
    rows = []
    print(f"{'stages':>6} {'rtt ms':>6} {'auto':>6} {'ratio':>6}  slots, first and last; fixed numbers")
    for stages in STAGES[:1] if typed.quick else STAGES:
        for round_trip_s in ROUND_TRIPS_S:
            found, slots = utilisation(stages, round_trip_s, 0)
            fixed = {number: utilisation(stages, round_trip_s, number)[0] for number in fixed_of(stages)}
            ratio = found / max(fixed.values())
            rows.append(
                {
                    "stages": stages,
                    "rtt_ms": 1e3 * round_trip_s,
                    "utilisation": found,
                    "slots": slots,
                    "fixed": fixed,
                    "ratio": ratio,
                }
            )
            others = "  ".join(f"{number}: {share:.3f}" for number, share in fixed.items())
            print(
                f"{stages:>6} {1e3 * round_trip_s:>6.0f} {found:>6.3f} {ratio:>6.3f}  {slots[0]:>3} {slots[-1]:>3}; "
                f"{others}",
                flush=True,
            )
    worst = min(row["ratio"] for row in rows)  # type: ignore[type-var]
    print(f"worst ratio: {worst:.3f}")
    if typed.json:
        typed.json.write_text(json.dumps({"rows": rows, "worst": worst}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
