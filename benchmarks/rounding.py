"""How far rounding alone drives two curves of one run apart: the same gradients, added one by one and in two sums.

    python benchmarks/rounding.py [--steps N] [--seeds N] [--data SOURCE]... [--rate RATE:WARMUP]... [--json FILE]

The default manifest in fp32, trained twice in one process (`swarmnet.local.oracle`): microbatches added in order, and
odd and even ones apart, as two replicas do. No swarm is in it. Printed per data, rate and seed: the largest difference
of the losses in the first 20 steps, which `local --oracle` holds to 1e-5, the step it is at, the largest of all steps,
and the last loss over that of the first rate named, with the same data and seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from swarmnet.local import oracle
from swarmnet.local.audit import FP32_STEPS
from swarmnet.local.prepare import read_tokens, with_data
from swarmnet.manifest.schema import Averaging, Data, Manifest, Numerics, Optimizer, Training

USUAL = Optimizer()


class InTwoSums(oracle._Plain):
    """The oracle's update, with the gradients of odd and even microbatches summed apart."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sums: list[list[torch.Tensor]] = [[], []]

    def count(self, index: int) -> None:
        gradients = [parameter.grad for parameter in self._behind]
        held = self._sums[index % 2]
        self._sums[index % 2] = [a + b for a, b in zip(held, gradients, strict=True)] if held else gradients
        for parameter in self._behind:
            parameter.grad = None

    def step(self, step: int, num_tokens: int) -> None:
        for parameter, even, odd in zip(self._behind, *self._sums, strict=True):
            parameter.grad = even + odd
        self._sums = [[], []]
        super().step(step, num_tokens)


def curves(
    source: str, training: Training, *, steps: int, optimizer: Optimizer = USUAL
) -> tuple[list[float], list[float]]:
    """The losses of the first `steps` steps, added one by one and in two sums."""
    manifest = with_data(
        Manifest(
            data=Data(source=source),
            numerics=Numerics(mode="fp32"),
            averaging=Averaging(codec="fp32"),
            training=training,
            optimizer=optimizer,
        ),
        base=Path(),
    )
    tokens, plain = read_tokens(manifest), oracle._Plain
    in_order = oracle.run_oracle(manifest, tokens, steps=steps).losses
    oracle._Plain = InTwoSums  # type: ignore[misc]
    try:
        return in_order, oracle.run_oracle(manifest, tokens, steps=steps).losses
    finally:
        oracle._Plain = plain  # type: ignore[misc]


def apart(one: list[float], other: list[float]) -> list[float]:
    """Distances, step by step."""
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="How far rounding alone drives two curves of one run apart.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", action="append", help="as data.source of a manifest; repeatable")
    parser.add_argument("--rate", action="append", help="peak and warm-up, such as 3e-3:10; repeatable")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    usual = f"{USUAL.learning_rate:g}:{USUAL.warmup_steps}"
    rates, rows = args.rate or [usual, "3e-3:10"], []
    print(f"{'data':14}  {'rate':>9}  seed  first {FP32_STEPS}  at step  all steps  last loss, over {rates[0]}'s")
    for source in args.data or ["stdlib", "corpus:small"]:
        for seed in range(args.seeds):
            first = None
            for rate in rates:
                peak, warmup = rate.split(":")
                optimizer = Optimizer(learning_rate=float(peak), warmup_steps=int(warmup))
                training = Training(seed=seed, total_steps=args.steps)
                losses, grouped = curves(source, training, steps=args.steps, optimizer=optimizer)
                distances = apart(losses, grouped)
                early = max(distances[:FP32_STEPS])
                first = first or losses[-1]
                rows.append(
                    {
                        "data": source,
                        "rate": rate,
                        "seed": seed,
                        "early": early,
                        "at": distances.index(early),
                        "all": max(distances),
                        "over": losses[-1] / first,
                    }
                )
                row = rows[-1]
                print(
                    f"{source:14}  {rate:>9}  {seed:4}  {early:8.1e}  {row['at']:7}  {row['all']:9.1e}  "
                    f"{row['over']:.4f}",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
