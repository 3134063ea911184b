"""The loss curve of `overlap`, whose gradients come one step late, beside that of `exact`: equal tokens, equal start.

    python benchmarks/sync_modes.py [--steps N] [--run N] [--seeds N] [--jobs N] [--variant "overlap lead=2.5"]...
                                    [--json FILE] [--png FILE]

A small decoder on the default data (Python's standard library, as bytes), trained by the single process that a swarm's
curve is equal to, bit for bit (`swarmnet.testing.reference`; tests/numerics/test_overlap.py holds the engines to it). A
variant is a mode and, if need be, fields of the manifest's [averaging] and [optimizer]; the first of them is what
`swarmnet init --sync overlap` writes, the others take its parts away. Printed for each variant and seed: the mean
training loss of the last SMOOTH steps and the held-out loss at the end, both over those of `exact` at the default
settings with the same seed (1.00 is no harm), and the largest distance of the two training curves after the warm-up,
each smoothed over SMOOTH steps. run: steps of the whole run, of which the first `steps` are trained: in a long one the
learning rate stays near its peak, where late gradients do the most harm. jobs: trained side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from curves import SMOOTH, Curve, smooth
from curves import draw as draw_curves

from swarmnet.data.source import load_tokens
from swarmnet.manifest.schema import Averaging, Cut, Data, Manifest, Model, Optimizer, Training
from swarmnet.testing.reference import run_reference

VARIANTS = (
    "overlap lead=2.5 overlap_after=300",
    "overlap lead=2.5 overlap_after=100",
    "overlap overlap_after=300",
    "exact lead=2.5",
)
EVALS = 32


def manifest_of(variant: str, *, steps: int, run: int, seed: int, source: str) -> Manifest:
    """Raises pydantic's ValidationError for a mode or setting that does not exist."""
    sync, *settings = variant.split()
    fields = {name: json.loads(value) for name, value in (setting.split("=", 1) for setting in settings)}
    averaging = {name: value for name, value in fields.items() if name in Averaging.model_fields}
    optimizer = {name: value for name, value in fields.items() if name not in averaging}
    return Manifest(
        model=Model(hidden_size=64, intermediate_size=176, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16),
        cut=Cut(stages=1),
        data=Data(source=source),
        training=Training(
            seed=seed,
            total_steps=run,
            microbatches=8,
            microbatch_size=4,
            sequence_length=64,
            eval_every=steps,
            eval_microbatches=EVALS,
        ),
        optimizer=Optimizer.model_validate(optimizer),
        averaging=Averaging.model_validate({"sync": sync, **averaging}),
    )


def train(variant: str, data: str, steps: int, run: int, seed: int) -> dict:
    """{variant, seed, losses (each step's), held_out}."""
    torch.set_num_threads(1)
    tokens = load_tokens(data)
    result = run_reference(
        manifest_of(variant, steps=steps, run=run, seed=seed, source=tokens.source), tokens, steps=steps
    )
    return {"variant": variant, "seed": seed, "losses": result.losses, "held_out": result.evals[steps]}


def compare(row: dict, base: dict) -> None:
    """Add what is printed: ratios to `exact`."""
    last = min(SMOOTH, len(row["losses"]))
    row["train"] = sum(row["losses"][-last:]) / last
    row["train_ratio"] = row["train"] * last / sum(base["losses"][-last:])
    row["held_out_ratio"] = row["held_out"] / base["held_out"]
    pairs = list(zip(smooth(row["losses"]), smooth(base["losses"]), strict=True))[SMOOTH:]
    row["curve_distance"] = max((abs(one / other - 1) for one, other in pairs), default=0.0)


def mean(values: Iterable[float]) -> float:
    """Of at least one."""
    found = list(values)
    return sum(found) / len(found)


def draw(rows: Sequence[dict], path: Path) -> None:
    """The curves of the first seed, and the ratio to `exact` of every seed."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    bases = {row["seed"]: row["losses"] for row in rows if row["variant"] == variants[0]}
    first = min(bases)
    curves = [
        Curve(
            row["losses"],
            bases[row["seed"]],
            variants.index(row["variant"]),
            row["variant"] if row["seed"] == first else None,
            alpha=1.0 if row["seed"] == first else 0.5,
        )
        for row in rows
    ]
    draw_curves(curves, path, over="exact's, every seed", goal=(0.99, 1.01), limits=(0.94, 1.06))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--run", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--variant", action="append")
    parser.add_argument("--data", default="stdlib", help="as data.source of a manifest")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    variants = tuple(dict.fromkeys(("exact", *(options.variant or VARIANTS))))
    width = max(map(len, variants))
    print(f"{options.steps} steps of {options.run}, {options.data}")
    print(
        f"{'variant':{width}}  seed{'train':>9}{'over exact':>12}{'held-out':>10}{'over exact':>12}"
        f"{'largest distance':>18}"
    )
    asked = [
        (variant, options.data, options.steps, options.run, seed)
        for seed in range(options.seeds)
        for variant in variants
    ]
    rows: list[dict] = []
    bases: dict[int, dict] = {}
    with contextlib.ExitStack() as stack:
        side_by_side = map
        if options.jobs > 1:
            side_by_side = stack.enter_context(ProcessPoolExecutor(options.jobs, get_context("spawn"))).map
        for row in side_by_side(train, *zip(*asked, strict=True)):
            compare(row, bases.setdefault(row["seed"], row))
            rows.append(row)
            print(
                f"{row['variant']:{width}}{row['seed']:6}{row['train']:9.4f}{row['train_ratio']:12.4f}"
                f"{row['held_out']:10.4f}{row['held_out_ratio']:12.4f}{row['curve_distance']:18.4f}",
                flush=True,
            )
    summary = []
    for variant in variants:
        found = [row for row in rows if row["variant"] == variant]
        summary.append(
            {
                "variant": variant,
                "train_ratio": mean(row["train_ratio"] for row in found),
                "held_out_ratio": mean(row["held_out_ratio"] for row in found),
            }
        )
        print(
            f"loss({variant}) / loss(exact), mean of {len(found)} seeds: "
            f"train {summary[-1]['train_ratio']:.4f}, held-out {summary[-1]['held_out_ratio']:.4f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"summary": summary, "rows": rows}) + "\n", encoding="utf-8")
    if options.png is not None:
        draw(rows, options.png)


if __name__ == "__main__":
    main()
