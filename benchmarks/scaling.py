"""Strong and weak scaling: 1, 2, 4, 8 replicas a stage, whole swarms on virtual time at costs that were measured.

    python benchmarks/scaling.py [--json FILE] [--mbit N] [--rtt MS] [--quick]

Four stages, exact, small sums, int8 at boundaries. A microbatch of 512 tokens in a stage of two layers of width 512
takes the CPU seconds that it takes on one core of this machine (the median of several: forward and backward, and
the optimizer's step); codecs take what docs/codecs.md has; lines, latencies, claims, rounds and barrier are the
simulator's, with production peers (`plan_accuracy.py`).

    strong    64 microbatches a step, shared by R:      efficiency = seconds with 1 / (R x seconds with R)
    weak      16 microbatches a step for each replica:  efficiency = seconds with 1 / seconds with R

`busy`: the share of a step in which a device computes. Strong scaling leaves each replica fewer microbatches to fill
the pipeline with, whoever trains. `--json` writes `rows` and the measured `costs`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from plan_accuracy import Fleet, simulated

from swarmnet.manifest.schema import Model, Optimizer
from swarmnet.model.decoder import StageModule
from swarmnet.plan.cost import Load, Site, Way, cost
from swarmnet.stage.optimizer import StageOptimizer

STAGES, REPLICAS = 4, (1, 2, 4, 8)
STRONG, WEAK = 64, 16
WIDTH, LAYERS, TOKENS, TURNS = 512, 2, 512, 7


def costs() -> dict[str, float]:
    """CPU seconds of a microbatch in a stage, and of an update; parameters."""
    model = Model(
        hidden_size=WIDTH,
        intermediate_size=11 * WIDTH // 4,
        num_layers=LAYERS + 2,
        num_heads=WIDTH // 64,
        num_kv_heads=WIDTH // 64,
        head_dim=64,
    )
    stage = StageModule(model, range(1, 1 + LAYERS), first=False, last=False)
    stage.reset(seed=0)
    parameters = list(stage.parameters())
    optimizer, hidden = StageOptimizer(parameters, Optimizer()), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    computed, updated = [], []
    for _ in range(TURNS):
        began = time.thread_time()
        out = stage(hidden)
        gradients = torch.autograd.grad(out, [*parameters, hidden], torch.ones_like(out))[:-1]
        computed.append(time.thread_time() - began)
        began = time.thread_time()
        optimizer.step(list(gradients), learning_rate=1e-4)
        updated.append(time.thread_time() - began)
    return {
        "microbatch_s": statistics.median(computed),
        "update_s": statistics.median(updated),
        "parameters": sum(each.numel() for each in parameters),
    }


def seconds(replicas: int, microbatches: int, found: dict[str, float], site: Site) -> float:
    """Of a step."""
    load = Load(
        STAGES,
        replicas,
        microbatches,
        found["microbatch_s"],
        TOKENS * WIDTH,
        round(found["parameters"]),
        found["update_s"],
    )
    way = Way("int8", "int8", "small", "exact", 1)
    return simulated(Fleet("", load, site, replace(way, slots=cost(load, site, way).slots)))[0]


def table(kind: str, replicas: Sequence[int], found: dict[str, float], site: Site) -> list[dict[str, Any]]:
    """A row for each number of replicas."""
    rows: list[dict[str, Any]] = []
    for number in replicas:
        microbatches = STRONG if kind == "strong" else WEAK * number
        took = seconds(number, microbatches, found, site)
        first_s = rows[0]["step_s"] if rows else took
        speedup = first_s / took * (1 if kind == "strong" else number)
        compute_s = microbatches / number * found["microbatch_s"]
        busy = compute_s / took
        rows.append(
            {
                "kind": kind,
                "replicas": number,
                "microbatches": microbatches,
                "step_s": took,
                "speedup": speedup,
                "efficiency": speedup / number,
                "busy": busy,
            }
        )
        print(
            f"{kind:<7} {number:>8} {microbatches:>12} {took:>9.2f} {speedup:>8.2f} {speedup / number:>10.1%} "
            f"{busy:>7.1%}",
            flush=True,
        )
    return rows


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/scaling.py --mbit 50",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--mbit", type=float, default=200.0, help="of every line, each way  [%(default)g]")
    parser.add_argument("--rtt", type=float, default=50.0, metavar="MS", help="of all pairs  [%(default)g]")
    parser.add_argument("--quick", action="store_true", help="1 and 2 replicas")
    typed = parser.parse_args()
    if typed.mbit <= 0 or typed.rtt <= 0:
        parser.error("--mbit and --rtt must be above 0")
    if typed.json and not typed.json.absolute().parent.is_dir():
        parser.error(f"--json {typed.json}: there is no such folder; make it first")
    torch.set_num_threads(1)
    print("measuring a microbatch", file=sys.stderr, flush=True)
    found = costs()
    print(
        f"{STAGES} stages, {typed.mbit:g} Mbit/s, {typed.rtt:g} ms; a microbatch {found['microbatch_s']:.3f} s of CPU, "
        f"an update {found['update_s']:.3f} s, {found['parameters'] / 1e6:.1f}M parameters a stage"
    )
    print(f"{'':<7} {'replicas':>8} {'microbatches':>12} {'s a step':>9} {'speedup':>8} {'efficiency':>10} {'busy':>7}")
    site = Site(typed.mbit * 125e3, 30e12, typed.rtt / 1e3)
    replicas = REPLICAS[:2] if typed.quick else REPLICAS
    rows = [row for kind in ("strong", "weak") for row in table(kind, replicas, found, site)]
    if typed.json:
        written = {"rows": rows, "costs": found, "mbit": typed.mbit, "rtt_ms": typed.rtt}
        typed.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
