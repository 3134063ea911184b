"""Replicas of one stage that compute in different precisions, in a run of fast kernels: equal weights, fp32's curve."""

from __future__ import annotations

import asyncio
import random
from typing import Literal

import pytest
import torch
from stage_chain import StageChain, compute_thread, tiny

from swarmnet.peer.devices import computed_here
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks.device_backend import DeviceBackend

STEPS = 12

pytestmark = pytest.mark.usefixtures("one_thread")


async def trained(second: Literal["fp32", "bf16"]) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses, and the weights of both replicas of every stage; the second ones compute in `second`."""
    manifest = tiny(2, mode="fast")
    theirs = computed_here(manifest, second)
    async with compute_thread() as compute:
        chain = StageChain(manifest, compute)
        for stage, replicas in enumerate(chain.engines):
            backend = DeviceBackend(theirs.of_stage(stage), device="cpu")
            replicas.append(torch_engine(theirs, stage, compute, backend))
        losses = [await chain.step(random.Random(step), parts=2) for step in range(STEPS)]
        return losses, [await chain.weights(replica) for replica in (0, 1)]


def test_replicas_of_two_precisions_hold_the_same_weights() -> None:
    (plain, _), (mixed, weights) = (asyncio.run(trained(second)) for second in ("fp32", "bf16"))
    first, second = weights
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert mixed != plain, "the second replicas did compute otherwise"
    assert max(abs(one / other - 1) for one, other in zip(mixed, plain, strict=True)) < 2e-3
