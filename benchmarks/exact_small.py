"""Training under `averaging.codec = "small"` beside plain fp32 sums: equal tokens, equal order, equal first weights.

    python benchmarks/exact_small.py [--steps N] [--seeds N] [--microbatches N] [--width N] [--full] [--json FILE]

A decoder of a million parameters on the default data (Python's standard library, as bytes). Every microbatch's gradient
goes through the product's grid (`stage.rounding`), partial sums of R members and the total through its codec; only the
network is left out. Beside it the same training in fp32, and in fp32 with unbiased noise of the same size as the grid's
(share of the mean squared sum, as measured), which says how much of a difference is luck.

Printed: held-out loss over fp32's, bytes a parameter that a member sends in a step (its contribution up, its part of
the total down; each as if it sent all of it, so that `int64` has about 8) after the first step, the share of gradients
cut off, and seconds of rounding beside a microbatch's compute. Without flags one seed, ten minutes; `--full`: five
seeds, and 32 microbatches beside 8.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from harness import Benchmark, write
from torch import Tensor

from swarmnet.data.sampler import Sampler
from swarmnet.data.source import load_tokens
from swarmnet.data.tokens import Tokens
from swarmnet.manifest.schema import Model, Optimizer
from swarmnet.model.decoder import StageModule, loss_sum
from swarmnet.stage.canonical import clip_factor, learning_rate
from swarmnet.stage.optimizer import StageOptimizer
from swarmnet.stage.rounding import (
    LIMIT,
    FineRounding,
    NoRounding,
    Rectangle,
    Rounding,
    SmallRounding,
    first_scales,
    next_scales,
)
from swarmnet.wire import codecs

LENGTH, SEQUENCES, EVALS, BITS = 64, 32, 32, 32
GROUPS = (2, 4, 16)
LEAST_STEPS = 20
"""What is measured is measured in every tenth step."""
LOSS_GOAL, BYTES_GOALS = 1.005, {8: 1.3, 32: 1.6}


def model_of(width: int) -> Model:
    """A decoder of four layers; width 128 has 1.0 million parameters."""
    return Model(
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_layers=5,
        num_heads=width // 32,
        num_kv_heads=width // 64,
        head_dim=32,
    )


class Run:
    """One training. sums: "fp32", "small", or "noise:SHARE" of the mean squared sum."""

    def __init__(self, tokens: Tokens, sums: str, seed: int, microbatches: int, width: int, steps: int) -> None:
        self.tokens, self.sums, self.seed, self.microbatches, self.steps = tokens, sums, seed, microbatches, steps
        self.module = StageModule(model_of(width), range(model_of(width).num_layers), first=True, last=True)
        self.module.reset(seed=seed)
        self.parameters = list(self.module.parameters())
        self.named = [(name, tuple(p.shape)) for name, p in self.module.named_parameters()]
        self.held = [Rectangle.whole(name, shape) for name, shape in self.named]
        self.sizes = [p.numel() for p in self.parameters]
        self.table = Optimizer()
        self.optimizer = StageOptimizer(self.parameters, self.table)
        self.sampler = Sampler(seed, tokens.num_tokens, LENGTH, SEQUENCES // microbatches)
        self.losses: list[float] = []
        self.sent: dict[int, list[float]] = {members: [] for members in GROUPS}
        self.cut_off: list[float] = []
        self.error: list[float] = []
        self.compute_s = self.rounding_s = 0.0

    def go(self) -> float:
        """Train; returns the held-out loss."""
        scales: list[Tensor] = []
        for step in range(self.steps):
            grid: Rounding = NoRounding()
            if self.sums == "small":
                fine = FineRounding(BITS, self.microbatches)
                grid = SmallRounding(self.held, scales, step=step) if step else fine
            total, plain, loss = self._sum(step, grid)
            pieces = total.split(self.sizes)
            values = torch.cat([piece for at, each in enumerate(pieces) for piece in grid.values(each, at, scale=1.0)])
            if self.sums == "small":
                shapes = [shape for _, shape in self.named]
                counted = self.microbatches
                scales = (
                    next_scales(pieces, shapes, scales, scales, counted=counted)
                    if step
                    else first_scales(pieces, shapes, counted=counted, bits=BITS)
                )
                if step:
                    self.error.append(float((values - plain).square().sum() / plain.square().sum()))
            elif self.sums.startswith("noise"):
                size = float(plain.square().mean()) * float(self.sums.partition(":")[2])
                drawn = torch.randn(plain.shape, generator=torch.Generator().manual_seed(step + 10**6 * self.seed))
                values = plain + drawn * plain.abs().clamp(min=1e-12) * (size / float(plain.square().mean())) ** 0.5
            self._apply(values.float(), step)
            self.losses.append(loss)
        return self._held_out()

    def _sum(self, step: int, grid: Rounding) -> tuple[Tensor, Tensor, float]:
        """(the sum on the grid, the sum in fp32, mean loss)."""
        parts = max(GROUPS) if self.sums == "small" and step % 10 == 5 else 1
        dtype = torch.float32 if isinstance(grid, NoRounding) else torch.int64
        sums = [torch.zeros(sum(self.sizes), dtype=dtype) for _ in range(parts)]
        plain, loss = torch.zeros(sum(self.sizes)), 0.0
        for index in range(self.microbatches):
            began = time.thread_time()
            batch = self.tokens.microbatch(self.sampler.positions(step * self.microbatches + index), LENGTH)
            found = loss_sum(self.module(batch[:, :-1]), batch[:, 1:])
            found.backward()
            gradients = [p.grad for p in self.parameters]
            self.compute_s += time.thread_time() - began
            began = time.thread_time()
            into = sums[index % parts].split(self.sizes)
            for place, (total, gradient) in enumerate(zip(into, gradients, strict=True)):
                grid.add(total, gradient.contiguous().view(-1), place, index=index)
            self.rounding_s += time.thread_time() - began
            for p in self.parameters:
                p.grad = None
            plain += torch.cat([gradient.view(-1) for gradient in gradients])
            loss += found.item()
        total = torch.stack(sums).sum(0)
        if parts > 1:
            self._measure(sums, total, grid, gradients)
        return total, plain, loss / (SEQUENCES * LENGTH)

    def _measure(self, sums: Sequence[Tensor], total: Tensor, grid: Rounding, gradients: Sequence[Tensor]) -> None:
        down = codecs.encode("small", total).num_bytes
        for members in GROUPS:
            partial = [torch.stack(list(sums[first::members])).sum(0) for first in range(members)]
            up = statistics.mean(codecs.encode("small", each).num_bytes for each in partial)
            self.sent[members].append((up + down) / total.numel())
        one = torch.zeros_like(total)
        for place, (into, gradient) in enumerate(zip(one.split(self.sizes), gradients, strict=True)):
            grid.add(into, gradient.contiguous().view(-1), place, index=0)
        self.cut_off.append(float((one.abs() >= LIMIT).double().mean()))

    def _apply(self, total: Tensor, step: int) -> None:
        num_tokens, squares = SEQUENCES * LENGTH, [float(total.double().square().sum())]
        scale = clip_factor(squares, num_tokens=num_tokens, clip_norm=self.table.clip_norm) / num_tokens
        pieces = (total * scale).split(self.sizes)
        gradients = [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]
        self.optimizer.step(gradients, learning_rate=learning_rate(self.table, step, total_steps=self.steps))

    @torch.no_grad()
    def _held_out(self) -> float:
        total = 0.0
        for index in range(EVALS):
            batch = self.tokens.microbatch(self.sampler.eval_positions(index), LENGTH)
            total += loss_sum(self.module(batch[:, :-1]), batch[:, 1:]).item()
        return total / (EVALS * (SEQUENCES // self.microbatches) * LENGTH)


def compare(tokens: Tokens, seed: int, microbatches: int, width: int, steps: int) -> dict[str, Any]:
    """One row: fp32, small, and fp32 with as much noise."""
    plain = Run(tokens, "fp32", seed, microbatches, width, steps).go()
    small = Run(tokens, "small", seed, microbatches, width, steps)
    held_out = small.go()
    share = statistics.mean(small.error)
    noisy = Run(tokens, f"noise:{share}", seed, microbatches, width, steps).go()
    second = {members: sent[len(sent) // 2 :] for members, sent in small.sent.items()}
    return {
        "seed": seed,
        "microbatches": microbatches,
        "parameters": sum(small.sizes),
        "steps": steps,
        "held_out_fp32": plain,
        "loss_ratio": held_out / plain,
        "noise_ratio": noisy / plain,
        "error": share,
        "bytes_per_parameter": {str(members): statistics.mean(sent) for members, sent in second.items()},
        "saturated": max(small.cut_off),
        "rounding_share": small.rounding_s / small.compute_s,
    }


def main() -> None:
    parser = Benchmark(__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="five seeds, 8 and 32 microbatches")
    args = parser.asked()
    if args.steps < LEAST_STEPS or args.seeds < 1 or args.width < 64 or args.width % 64:
        parser.error(f"at least {LEAST_STEPS} steps and one seed; a width that is a multiple of 64")
    if odd := [count for count in args.microbatches if count < 1 or SEQUENCES % count]:
        parser.error(f"{SEQUENCES} sequences a step are no multiple of {odd[0]} microbatches")
    torch.set_num_threads(1)
    tokens = load_tokens("stdlib")
    seeds, counts = (5, [8, 32]) if args.full else (args.seeds, args.microbatches)
    rows = []
    for microbatches in counts:
        for seed in range(seeds):
            row = compare(tokens, seed, microbatches, args.width, args.steps)
            rows.append(row)
            sent = ", ".join(f"R={members} {value:.2f}" for members, value in row["bytes_per_parameter"].items())
            print(
                f"M={microbatches} seed {seed}: loss {row['loss_ratio']:.4f} of fp32 (noise {row['noise_ratio']:.4f}); "
                f"bytes a parameter {sent} (goal {BYTES_GOALS.get(microbatches, '-')}); error {row['error']:.4f}; "
                f"cut off {row['saturated']:.1e}; rounding {row['rounding_share']:.3f} of compute",
                flush=True,
            )
        found = [row["loss_ratio"] for row in rows if row["microbatches"] == microbatches]
        spread = f" +- {statistics.stdev(found):.4f}" if len(found) > 1 else ""
        print(f"M={microbatches}: mean loss {statistics.mean(found):.4f}{spread} of fp32 (goal {LOSS_GOAL})")
    write(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
