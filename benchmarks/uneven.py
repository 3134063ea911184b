"""What unequal machines cost: one of three replicas of a stage is `--ratio` times slower, 32 microbatches a step.

    python benchmarks/uneven.py [--ratio 8] [--json FILE] [--quick] [--real]

Whole swarms on virtual time (`swarmnet/simulate`), with 1 to 4 stages and the slow replica in the first, a middle or
the last one; every other replica is a fast one. `sum` is the sum of the speeds in the uneven stage. Per shape:

    exact      seconds of a step with three equal machines of the same total speed, over those with the unequal ones
    overlap    microbatches per second with `sync = "overlap"`, as a share of `sum`
    of sum     the same share in exact mode, unequal and equal machines

Each figure is of three seeds, since one seed is off by 0.03. Peers have two slots for each stage and two more. A step
ends when the last stage has committed it. `bound`: with nothing but compute, and a step after the other, whole
microbatches allow so much of what three equal machines reach in one stage. `--json` writes the worst shape of both.

`--real` measures `exact` of one stage in real processes (`uneven_real.py`), and nothing else: three swarms of each kind
by turns, and the median of the ratios of tokens per second. `--json` then writes `real` and the `rows` of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from swarmnet.ids import PeerId, RunId
from swarmnet.testing.plan import RUN, Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

MICROBATCHES, REPLICAS = 32, 3
FORWARD_S = 0.05
"""Of a fast replica; a microbatch takes three times as long."""
SHAPES = ((1, 0), (2, 0), (2, 1), (3, 1), (4, 0), (4, 2), (4, 3))
"""Number of stages, and the uneven one."""
QUICK = ((1, 0), (2, 1))
SEEDS = (1, 2, 3)


def speeds_of(ratio: float) -> tuple[float, ...]:
    """The unequal machines' speeds."""
    return (1.0,) * (REPLICAS - 1) + (1.0 / ratio,)


def step_seconds(
    stages: int,
    uneven: int,
    speeds: tuple[float, ...],
    *,
    overlap: bool = False,
    steps: int = 14,
    warmup: int = 4,
    forward_s: float = FORWARD_S,
    seed: int = 1,
    run: RunId = RUN,
) -> float:
    """Virtual seconds of a step, over those after the warm-up. run: it decides who leads when."""
    plan = Plan(
        stages=stages,
        replicas=REPLICAS,
        microbatches=MICROBATCHES,
        steps=steps,
        sync="overlap" if overlap else "exact",
        slots=2 * stages + 2,
        forward_s=forward_s,
        run=run,
    )
    swarm = VirtualSwarm(plan, seed)
    for number, speed in enumerate(speeds):
        swarm.slowdown[PeerId(f"s{uneven}.{REPLICAS * uneven + number}")] = 1.0 / speed
    swarm.run(until_s=3600.0)
    ends: dict[int, float] = {}
    for at, _, event, fields in swarm.events:
        if event == "committed":
            ends[fields["step"]] = max(at, ends.get(fields["step"], 0.0))
    return (ends[steps - 1] - ends[warmup - 1]) / (steps - warmup)


def mean_seconds(
    stages: int, uneven: int, speeds: tuple[float, ...], *, overlap: bool = False, **lengths: int
) -> float:
    """Of a step, over the seeds. lengths: `steps` and `warmup`."""
    return statistics.fmean(
        step_seconds(stages, uneven, speeds, overlap=overlap, seed=seed, **lengths) for seed in SEEDS
    )


def least_seconds(speeds: tuple[float, ...]) -> float:
    """Of a step of one stage with nothing but compute, in microbatches of a machine of speed 1: they are whole."""
    ends = sorted(count / speed for speed in speeds for count in range(1, MICROBATCHES + 1))
    return ends[MICROBATCHES - 1]


def real(speeds: tuple[float, ...], equal: tuple[float, ...], *, turns: int) -> dict[str, object]:
    """Tokens per second of real processes with these speeds, over those with equal ones: the median, and each turn."""
    from uneven_real import real_step_seconds

    ideal_s = MICROBATCHES * 3 * FORWARD_S / sum(speeds)
    rows: list[dict[str, float]] = []
    print("  turn   exact   of sum   (equal)")
    for turn in range(turns):
        mine, theirs = (
            real_step_seconds(each, microbatches=MICROBATCHES, forward_s=FORWARD_S) for each in (speeds, equal)
        )
        rows.append({"exact": theirs / mine, "of_sum": ideal_s / mine, "equal_of_sum": ideal_s / theirs})
        print(f"{turn:6}  {theirs / mine:6.3f}  {ideal_s / mine:7.3f}  {ideal_s / theirs:8.3f}", flush=True)
    median = statistics.median(row["exact"] for row in rows)
    print(f"median  {median:6.3f}")
    return {"real": median, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ratio", type=float, default=8.0, help="how much slower the slow one is")
    parser.add_argument("--quick", action="store_true", help="two shapes")
    parser.add_argument("--json", type=Path, help="write the worst of each column there")
    parser.add_argument("--real", action="store_true", help="real processes instead, one stage")
    options = parser.parse_args()
    speeds = speeds_of(options.ratio)
    total = sum(speeds)
    equal = (total / REPLICAS,) * REPLICAS
    ideal_s = MICROBATCHES * 3 * FORWARD_S / total
    bound = least_seconds(equal) / least_seconds(speeds)
    print(f"one of {REPLICAS} replicas {options.ratio:g} times slower, {MICROBATCHES} microbatches; bound {bound:.3f}")
    if options.real:
        found = real(speeds, equal, turns=1 if options.quick else 3)
        if options.json:
            options.json.write_text(json.dumps(found | {"bound": bound}) + "\n", encoding="utf-8")
        return
    print("stages  uneven   exact   of sum   (equal)   overlap")
    exact, overlap = [], []
    for stages, uneven in QUICK if options.quick else SHAPES:
        mine, theirs = mean_seconds(stages, uneven, speeds), mean_seconds(stages, uneven, equal)
        hidden = mean_seconds(stages, uneven, speeds, overlap=True, steps=30, warmup=12)
        exact.append(theirs / mine)
        overlap.append(ideal_s / hidden)
        print(
            f"{stages:6}  {uneven:6}  {exact[-1]:6.3f}  {ideal_s / mine:7.3f}  {ideal_s / theirs:8.3f}  "
            f"{overlap[-1]:8.3f}",
            flush=True,
        )
    print(f" worst          {min(exact):6.3f}                     {min(overlap):8.3f}")
    print(f"median          {statistics.median(exact):6.3f}                     {statistics.median(overlap):8.3f}")
    if options.json:
        options.json.write_text(
            json.dumps({"exact": min(exact), "overlap": min(overlap), "bound": bound}) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
