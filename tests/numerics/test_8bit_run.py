"""`optimizer.state = "8bit"` in engines: the bits of one process, and the same bits after a snapshot."""

from __future__ import annotations

import asyncio
import random

import torch
from stage_chain import MODEL, StageChain, compute_thread, text, tiny

from swarmnet.testing.reference import run_reference

WIDE = MODEL.model_copy(update={"hidden_size": 64, "intermediate_size": 96, "num_layers": 2})  # matrices above LEAST


def test_a_restored_replica_goes_on_with_the_same_bits() -> None:
    manifest = tiny(2, model=WIDE, microbatches=2, state="8bit", lead=1.0)

    async def train() -> tuple[list[float], dict[str, torch.Tensor]]:
        async with compute_thread() as compute:
            chain, rng = StageChain(manifest, compute, replicas=2), random.Random(1)
            losses = [await chain.step(rng) for _ in range(3)]
            for first, second in chain.engines:
                data = bytes(await first.snapshot())
                await second.reset_to_seed()
                await second.restore(data, version=3)
                assert bytes(await second.snapshot()) == data
            losses += [await chain.step(rng) for _ in range(3)]
            weights = await chain.weights()
            for name, weight in (await chain.weights(1)).items():
                assert torch.equal(weight, weights[name]), name
            return losses, weights

    losses, weights = asyncio.run(train())
    expected = run_reference(manifest, text(), steps=6)
    plain = run_reference(tiny(2, model=WIDE, microbatches=2, lead=1.0), text(), steps=6)
    assert losses == expected.losses != plain.losses
    assert all(torch.equal(weights[name], weight) for name, weight in expected.weights.items())


def test_fast_kernels_follow_the_reference_too() -> None:
    manifest = tiny(1, mode="fast", model=WIDE, microbatches=2, state="8bit")

    async def train() -> list[float]:
        async with compute_thread() as compute:
            chain = StageChain(manifest, compute)
            return [await chain.step(random.Random(step)) for step in range(6)]

    expected = run_reference(manifest, text(), steps=6).losses
    assert max(abs(a - b) for a, b in zip(asyncio.run(train()), expected, strict=True)) < 1e-4
