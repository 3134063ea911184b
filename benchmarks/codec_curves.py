"""The loss curve under every averaging codec beside that of fp32: equal tokens, equal order, equal first weights.

    python benchmarks/codec_curves.py [--steps N] [--replicas N] [--codec NAME]... [--json FILE] [--png FILE]

A small decoder of one stage on the default data (Python's standard library, as bytes), real engines (accumulator, codec
and what it owes, reducer, optimizer), every round reduced part by part. Printed per codec: the held-out loss at the end
over that of fp32 (1.00 is no harm), the largest distance of the two training curves after the warm-up, each smoothed
over 20 steps, and the bytes one replica sends in a round over those of fp32. All replicas must hold equal bits of every
sum: a digest that differs ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from curves import SMOOTH, Curve, smooth
from curves import draw as draw_curves

from swarmnet.data.sampler import Sampler
from swarmnet.data.source import load_tokens
from swarmnet.data.tokens import Tokens
from swarmnet.engine.compute_thread import ComputeThread
from swarmnet.ids import Ballot, Chain, PeerId, RoundId
from swarmnet.manifest.schema import Averaging, Cut, Data, Manifest, Model, Numerics, Optimizer, Training
from swarmnet.messages import Commit, Packed
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.seams import Contribution
from swarmnet.wire import codecs

CODECS = ("fp32", "bf16", "fp16", "int8", "bnb8", "auto", "nf4", "powersgd:16", "powersgd:8", "powersgd:4", "topk:0.05")
EVALS = 32
ROUND = RoundId(Ballot(0, PeerId("replica0")), 0)


def manifest_of(codec: str, *, steps: int, seed: int, source: str) -> Manifest:
    return Manifest(
        model=Model(hidden_size=64, intermediate_size=176, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16),
        cut=Cut(stages=1),
        data=Data(source=source),
        training=Training(seed=seed, total_steps=steps, microbatches=8, microbatch_size=4, sequence_length=64),
        optimizer=Optimizer(learning_rate=3e-3, warmup_steps=10),
        numerics=Numerics(mode="fp32"),
        averaging=Averaging(codec=codec),
    )


class Replicas:
    """Replicas of the only stage; microbatch i belongs to replica i mod n."""

    def __init__(self, manifest: Manifest, compute: ComputeThread, tokens: Tokens, size: int) -> None:
        self.manifest, self._tokens = manifest, tokens
        self._engines = [torch_engine(manifest, 0, compute, DeviceBackend(manifest.of_stage(0))) for _ in range(size)]
        training = manifest.training
        self._sampler = Sampler(training.seed, tokens.num_tokens, training.sequence_length, training.microbatch_size)
        self.sent_bytes = 0

    def _microbatch(self, number: int) -> tuple[Packed, ...]:
        length = self.manifest.training.sequence_length
        return (codecs.encode("int32", self._tokens.microbatch(self._sampler.positions(number), length)),)

    async def step(self, step: int) -> float:
        """One optimizer step; its mean loss."""
        microbatches = self.manifest.training.microbatches
        loss, num_tokens = 0.0, 0
        for index in range(microbatches):
            engine = self._engines[index % len(self._engines)]
            stash = await engine.forward(step, index, self._microbatch(step * microbatches + index), train=True)
            await engine.backward(stash, ())
            assert await engine.accumulate(stash)
            loss, num_tokens = loss + stash.loss_sum, num_tokens + stash.num_tokens
        for engine in self._engines:
            await engine.sums.open_round(ROUND)
            await engine.sums.open_sum()
        for phase, span in enumerate(itertools.pairwise(itertools.accumulate(self._engines[0].sums.phases, initial=0))):
            if phase:
                for engine in self._engines:
                    await engine.sums.next_phase()
            await self._all_reduce(*span)
        sealed = {await engine.sums.seal() for engine in self._engines}
        if len(sealed) != 1:
            raise SystemExit(f"replicas hold different sums of step {step}")
        digest, square = sealed.pop()
        for engine in self._engines:
            await engine.apply([Commit(0, step, Chain(""), ROUND, digest, num_tokens, loss, square)])
        return loss / num_tokens

    async def _all_reduce(self, first: int, last: int) -> None:
        """Positions [first, last): replica r reduces the r-th part. Counts what replica 0 sends to others."""
        others = len(self._engines) - 1
        edges = [first + (last - first) * part // (others + 1) for part in range(others + 2)]
        for reducer, (start, stop) in enumerate(itertools.pairwise(edges)):
            share = len(self._engines)
            contributions = [
                Contribution(PeerId(f"replica{place}"), share, await engine.sums.contribution(start, stop))
                for place, engine in enumerate(self._engines)
            ]
            reduced = (await self._engines[reducer].sums.reduce(contributions, start, stop)).packed
            self.sent_bytes += others * reduced.num_bytes if reducer == 0 else contributions[0].packed.num_bytes
            for engine in self._engines:
                await engine.sums.put(start, reduced)

    async def held_out(self) -> float:
        """The mean loss on microbatches that no step has seen."""
        total, count, training = 0.0, 0, self.manifest.training
        for number in range(EVALS):
            payload = self._microbatch(training.total_steps * training.microbatches + number)
            stash = await self._engines[0].forward(self._engines[0].version, number, payload, train=False)
            total, count = total + stash.loss_sum, count + stash.num_tokens
        return total / count


def train(codec: str, tokens: Tokens, *, steps: int, replicas: int, seed: int = 0) -> dict[str, object]:
    """{codec, losses (each step's), held_out, bytes (one replica's, per round)}."""

    async def whole(compute: ComputeThread) -> dict[str, object]:
        manifest = manifest_of(codec, steps=steps, seed=seed, source=tokens.source)
        run = Replicas(manifest, compute, tokens, replicas)
        losses = [await run.step(step) for step in range(steps)]
        return {"codec": codec, "losses": losses, "held_out": await run.held_out(), "bytes": run.sent_bytes / steps}

    compute = ComputeThread()
    try:
        return asyncio.run(whole(compute))
    finally:
        compute.close()


def compare(row: dict, base: dict) -> None:
    """Add what is printed: ratios to fp32."""
    row["held_out_ratio"] = row["held_out"] / base["held_out"]
    pairs = list(zip(smooth(row["losses"]), smooth(base["losses"]), strict=True))[SMOOTH:]
    row["curve_distance"] = max((abs(one / other - 1) for one, other in pairs), default=0.0)
    row["bytes_ratio"] = row["bytes"] / base["bytes"]


def draw(rows: Sequence[dict], path: Path) -> None:
    """Every codec's curve beside that of fp32."""
    curves = [
        Curve(row["losses"], rows[0]["losses"], place, f"{row['codec']}  ({row['bytes_ratio']:.3f} of the bytes)")
        for place, row in enumerate(rows)
    ]
    draw_curves(curves, path, over="fp32's", goal=(0.99, 1.01), limits=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--codec", action="append")
    parser.add_argument("--data", default="stdlib", help="as data.source of a manifest")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = load_tokens(options.data)
    print(f"{options.replicas} replicas, {options.steps} steps, {options.data}")
    print(f"{'codec':12}{'held-out loss':>16}{'over fp32':>12}{'largest distance':>18}{'bytes':>8}")
    rows: list[dict] = []
    for codec in dict.fromkeys(("fp32", *(options.codec or CODECS))):
        row = dict(train(codec, tokens, steps=options.steps, replicas=options.replicas))
        rows.append(row)
        compare(row, rows[0])
        print(
            f"{codec:12}{row['held_out']:16.4f}{row['held_out_ratio']:12.4f}{row['curve_distance']:18.4f}"
            f"{row['bytes_ratio']:8.3f}",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows}) + "\n", encoding="utf-8")
    if options.png is not None:
        draw(rows, options.png)


if __name__ == "__main__":
    main()
