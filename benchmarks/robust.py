"""Every reducer against every attack: the loss a run ends with when two of eight replicas lie about their gradients.

    python benchmarks/robust.py [--steps N] [--seeds N] [--reducer NAME]... [--attack NAME]... [--json FILE]

A tiny decoder, one stage, eight replicas with one microbatch each per step, the gradient reduced in eight parts through
the real engine (accumulator, codec, reducer, optimizer). Replicas hold equal weights after every step, so one engine
plays all of them in turn. The global clip (optimizer.clip_norm) is off: what is measured is the reducer. The clean run
is the plain sum of honest gradients; a cell is the held-out loss at the end divided by the clean run's, the median over
seeds. 1.00 is no harm.

    sign_flip   minus the gradient                   flip_x10   minus ten times the gradient
    scaled      the gradient by up to a million,     random     noise, ten times as long as the gradient
                another factor every step            collude    minus the honest mean, twice the median long:
                                                                just inside a norm clip
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from swarmnet.data.sampler import Sampler
from swarmnet.data.tokens import Tokens
from swarmnet.engine.compute_thread import ComputeThread
from swarmnet.ids import Ballot, Chain, PeerId, RoundId
from swarmnet.manifest.schema import Averaging, Cut, Manifest, Model, Numerics, Optimizer, Training
from swarmnet.messages import Commit, Packed
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.seams import Contribution
from swarmnet.wire import codecs

REPLICAS, LIARS, EVALS = 8, 2, 8
REDUCERS = ("sum", "norm_clip", "centered_clip")

Attack = Callable[[int, Tensor, Sequence[Tensor], torch.Generator], Tensor]
"""(step, the liar's own gradient, the honest ones, randomness) -> what it sends."""


def _random(step: int, own: Tensor, honest: Sequence[Tensor], rng: torch.Generator) -> Tensor:
    noise = torch.randn(own.shape, generator=rng)
    return noise * (10 * own.norm() / noise.norm())


def _collude(step: int, own: Tensor, honest: Sequence[Tensor], rng: torch.Generator) -> Tensor:
    mean = torch.stack(list(honest)).mean(0)
    length = statistics.median(float(each.norm()) for each in honest)
    return mean * (-2.0 * length / float(mean.norm()))


ATTACKS: dict[str, Attack] = {
    "sign_flip": lambda step, own, honest, rng: -own,
    "flip_x10": lambda step, own, honest, rng: -10.0 * own,
    "scaled": lambda step, own, honest, rng: own * float(10 ** (6 * torch.rand((), generator=rng))),
    "random": _random,
    "collude": _collude,
}


def manifest_of(reducer: str, *, steps: int, seed: int) -> Manifest:
    """The run: one stage of one layer, fp32 sums, the reducer as `swarmnet init` would write it."""
    return Manifest(
        model=Model(
            vocab_size=61, hidden_size=16, intermediate_size=56, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8
        ),
        cut=Cut(stages=1),
        training=Training(seed=seed, total_steps=steps, microbatches=REPLICAS, microbatch_size=16, sequence_length=16),
        optimizer=Optimizer(learning_rate=2e-2, warmup_steps=10, clip_norm=1e9),
        numerics=Numerics(mode="fp32"),
        averaging=Averaging(codec="fp32", reducer=reducer),
    )


class Replicas:
    """Eight replicas of the only stage; the first LIARS of them send what `attack` makes of their gradient."""

    def __init__(self, manifest: Manifest, compute: ComputeThread, attack: Attack | None) -> None:
        self.manifest, self._attack = manifest, attack
        self.engine = torch_engine(manifest, 0, compute, DeviceBackend(manifest.of_stage(0)))
        walk = np.random.default_rng(5).integers(0, 3, 20_000).cumsum() % manifest.model.vocab_size
        self._tokens = Tokens(
            walk.astype(np.uint8), vocab_size=manifest.model.vocab_size, source="walk", tokenizer_sha256="0" * 64
        )
        self._sampler = Sampler(
            manifest.training.seed,
            self._tokens.num_tokens,
            manifest.training.sequence_length,
            manifest.training.microbatch_size,
        )
        self._rng = torch.Generator().manual_seed(manifest.training.seed)
        self.clipped: dict[str, int] = {}

    def _microbatch(self, number: int) -> tuple[Packed, ...]:
        length = self.manifest.training.sequence_length
        return (codecs.encode("int32", self._tokens.microbatch(self._sampler.positions(number), length)),)

    async def step(self, step: int) -> None:
        """Everybody's gradient, the liars' changed, reduced part by part, applied."""
        engine = self.engine
        sums, loss, num_tokens = [], 0.0, 0
        for index in range(REPLICAS):
            stash = await engine.forward(step, index, self._microbatch(step * REPLICAS + index), train=True)
            await engine.backward(stash, ())
            await engine.accumulate(stash)
            sums.append(codecs.decode(await engine.sums.contribution(0, engine.sums.num_elements)))
            engine.void()  # the next one's accumulator
            loss, num_tokens = loss + stash.loss_sum, num_tokens + stash.num_tokens
        if self._attack is not None:
            for liar in range(LIARS):
                sums[liar] = self._attack(step, sums[liar], sums[LIARS:], self._rng)
        parts = []
        edges = [engine.sums.num_elements * part // REPLICAS for part in range(REPLICAS + 1)]
        for start, stop in itertools.pairwise(edges):
            reduced = await engine.sums.reduce(
                [
                    Contribution(PeerId(f"replica{place}"), 1, codecs.encode("fp32", each[start:stop]))
                    for place, each in enumerate(sums)
                ],
                start,
                stop,
            )
            parts.append(reduced.packed)
            for clipped in reduced.clipped:
                self.clipped[clipped.peer] = self.clipped.get(clipped.peer, 0) + 1
        digest, square = await engine.sums.install(parts)
        round_id = RoundId(Ballot(0, PeerId("replica0")), 0)
        await engine.apply([Commit(0, step, Chain(""), round_id, digest, num_tokens, loss, square)])

    async def held_out(self) -> float:
        """The mean loss on microbatches that no step has seen."""
        total, count, steps = 0.0, 0, self.manifest.training.total_steps
        for number in range(EVALS):
            payload = self._microbatch(steps * REPLICAS + number)
            stash = await self.engine.forward(self.engine.version, number, payload, train=False)
            total, count = total + stash.loss_sum, count + stash.num_tokens
        return total / count


def train(reducer: str, attack: str | None, *, steps: int, seed: int = 0) -> tuple[float, dict[str, int]]:
    """(held-out loss at the end, how many parts each replica was clipped in)."""

    async def whole(compute: ComputeThread) -> tuple[float, dict[str, int]]:
        manifest = manifest_of(reducer, steps=steps, seed=seed)
        replicas = Replicas(manifest, compute, None if attack is None else ATTACKS[attack])
        for step in range(steps):
            await replicas.step(step)
        return await replicas.held_out(), replicas.clipped

    compute = ComputeThread()
    try:
        return asyncio.run(whole(compute))
    finally:
        compute.close()


def main() -> None:
    """Print the table; write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--reducer", action="append", choices=REDUCERS)
    parser.add_argument("--attack", action="append", choices=tuple(ATTACKS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    attacks: list[str | None] = [None, *(options.attack or ATTACKS)]
    clean = [train("sum", None, steps=options.steps, seed=seed)[0] for seed in range(options.seeds)]
    print(f"{REPLICAS} replicas, {LIARS} liars, {options.steps} steps; clean loss {statistics.median(clean):.4f}")
    print(f"{'':14}" + "".join(f"{attack or 'nobody':>11}" for attack in attacks))
    rows = []
    for reducer in options.reducer or REDUCERS:
        row: dict[str, object] = {"reducer": reducer}
        for attack in attacks:
            found = [train(reducer, attack, steps=options.steps, seed=seed)[0] for seed in range(options.seeds)]
            row[attack or "nobody"] = statistics.median(one / base for one, base in zip(found, clean, strict=True))
        rows.append(row)
        print(f"{reducer:14}" + "".join(f"{row[attack or 'nobody']:11.3f}" for attack in attacks), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"clean_loss": statistics.median(clean), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
