"""What codecs at stage boundaries do to the loss: activations and their gradients through the codec at every boundary.

    python benchmarks/boundaries.py [--width N] [--stages N] [--steps N] [--seed N] [--json FILE] [FORWARD,BACKWARD ...]

A decoder of a layer a stage on the default data, in one process: equal tokens, equal order, equal first weights. Per
pair of codecs (`wire.activations`, `wire.gradients`) it prints the held-out loss at the end over that of fp32, and the
mean loss of the last 20 steps over it. With --json each row is written as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from curves import SMOOTH
from torch import Tensor

from swarmnet.data.sampler import Sampler
from swarmnet.data.source import load_tokens
from swarmnet.data.tokens import Tokens
from swarmnet.manifest.schema import Model, Optimizer
from swarmnet.model.decoder import StageModule, loss_sum
from swarmnet.stage.canonical import clip_factor, learning_rate
from swarmnet.stage.optimizer import StageOptimizer
from swarmnet.wire import codecs

PAIRS = ("int8,int8", "int8,nf4", "nf4,int8", "nf4,nf4")
ROWS, LENGTH, EVALS = 16, 64, 32
OPTIMIZER = Optimizer()


class Boundary(torch.autograd.Function):
    """The identity, as two codecs leave it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: str, backward: str) -> Tensor:
        ctx.codec = backward
        return rounded(x, forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return rounded(gradient, ctx.codec), None, None


def rounded(x: Tensor, codec: str) -> Tensor:
    """What arrives of `x`."""
    return codecs.decode(codecs.encode(codec, x.contiguous())).view(x.shape)


def train(pair: str, tokens: Tokens, *, width: int, stages: int, steps: int, seed: int) -> dict[str, Any]:
    """{pair, losses (each step's), held_out}."""
    forward, backward = pair.split(",")
    heads = max(width // 64, 2)
    model = Model(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_layers=stages,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
    )
    chain = [StageModule(model, range(at, at + 1), first=not at, last=at == stages - 1) for at in range(stages)]
    for stage in chain:
        stage.reset(seed=seed)
    parameters = [parameter for stage in chain for parameter in stage.parameters()]
    optimizer, sampler = StageOptimizer(parameters, OPTIMIZER), Sampler(seed, tokens.num_tokens, LENGTH, ROWS)

    def loss_of(number: int) -> Tensor:
        batch = tokens.microbatch(sampler.positions(number), LENGTH)
        x = chain[0](batch[:, :-1])
        for stage in chain[1:]:
            x = stage(Boundary.apply(x, forward, backward))
        return loss_sum(x, batch[:, 1:])

    losses, count = [], ROWS * LENGTH
    for step in range(steps):
        loss = loss_of(step)
        gradients = torch.autograd.grad(loss, parameters)
        square = sum(float(each.double().square().sum()) for each in gradients)
        scale = clip_factor([square], num_tokens=count, clip_norm=OPTIMIZER.clip_norm) / count
        rate = learning_rate(OPTIMIZER, step, total_steps=steps)
        optimizer.step([each * scale for each in gradients], learning_rate=rate)
        losses.append(loss.item() / count)
    with torch.no_grad():
        held_out = sum(loss_of(steps + number).item() for number in range(EVALS)) / (EVALS * count)
    return {"pair": pair, "losses": losses, "held_out": held_out}


def end_of(losses: Sequence[float]) -> float:
    """The mean of the last steps."""
    return sum(losses[-SMOOTH:]) / len(losses[-SMOOTH:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    for name, default in (("width", 64), ("stages", 8), ("steps", 300), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--data", default="stdlib", help="as data.source of a manifest")
    parser.add_argument("--json", type=Path)
    parser.add_argument("pairs", nargs="*", metavar="FORWARD,BACKWARD")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    tokens, rows = load_tokens(options.data), []
    print(f"{options.stages - 1} boundaries of width {options.width}, {options.steps} steps, seed {options.seed}")
    print(f"{'forward,back':14}{'held-out loss':>14}{'over fp32':>11}{'training':>10}")
    shape = {name: getattr(options, name) for name in ("width", "stages", "steps", "seed")}
    for pair in dict.fromkeys(("fp32,fp32", *(options.pairs or PAIRS))):
        row = train(pair, tokens, **shape)
        rows.append(row)
        held_out, training = row["held_out"] / rows[0]["held_out"], end_of(row["losses"]) / end_of(rows[0]["losses"])
        print(f"{pair:14}{row['held_out']:14.4f}{held_out:11.4f}{training:10.4f}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(shape | {"rows": rows}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
