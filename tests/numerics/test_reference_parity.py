"""Promise 2: stages, replicas, order and grouping do not show in losses or weights."""

from __future__ import annotations

import asyncio
import functools
import random

import pytest
import torch
from further import further
from stage_chain import MODEL, StageChain, compute_thread, text, tiny

from swarmnet.manifest.schema import Averaging, Manifest
from swarmnet.testing.reference import ReferenceResult, run_reference

STEPS = 8


@functools.cache
def one_process(manifest: Manifest, steps: int = STEPS) -> ReferenceResult:
    return run_reference(manifest, text(), steps=steps)


async def train(
    manifest: Manifest, *, replicas: int, parts: int = 1, seed: int = 0, steps: int = STEPS
) -> ReferenceResult:
    result = ReferenceResult()
    async with compute_thread() as compute:
        chain = StageChain(manifest, compute, replicas=replicas)
        rng = random.Random(seed)
        for _ in range(steps):
            result.losses.append(await chain.step(rng, parts=parts))
        result.weights = await chain.weights()
        for replica in range(1, replicas):
            for name, weight in (await chain.weights(replica)).items():
                assert torch.equal(weight, result.weights[name]), name
    return result


def assert_same_bits(found: ReferenceResult, expected: ReferenceResult) -> None:
    assert found.losses == expected.losses
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name


@pytest.mark.parametrize(
    ("stages", "replicas", "parts", "codec"),
    [
        (3, 2, 2, "int64"),
        (3, 2, 3, "small"),
        *further(*((*shape, "int64") for shape in ((1, 1, 1), (2, 2, 3), (3, 1, 1), (4, 2, 1))), (1, 1, 1, "small")),
    ],
)
def test_deterministic_mode_has_the_references_bits(stages: int, replicas: int, parts: int, codec: str) -> None:
    manifest = tiny(stages, averaging=Averaging(codec=codec))
    expected = one_process(manifest)
    assert expected.losses[-1] < expected.losses[0] - 0.3, "the reference does not learn; equality would say little"
    found = asyncio.run(train(manifest, replicas=replicas, parts=parts, seed=stages))
    assert_same_bits(found, expected)


@pytest.mark.parametrize("layers", [(0, 4, 0), (3, 0, 1)])
def test_a_stage_without_layers_has_the_references_bits(layers: tuple[int, ...]) -> None:
    manifest = tiny(3, layers=layers)
    assert_same_bits(asyncio.run(train(manifest, replicas=2)), one_process(manifest))


def test_biases_and_tied_embeddings_have_the_references_bits() -> None:
    manifest = tiny(1, model=MODEL.model_copy(update={"attention_bias": True, "tie_embeddings": True}))
    expected = one_process(manifest)
    assert "lm_head.weight" not in expected.weights and "model.layers.0.self_attn.q_proj.bias" in expected.weights
    assert_same_bits(asyncio.run(train(manifest, replicas=2)), expected)


@pytest.mark.parametrize(("stages", "replicas"), [(3, 2), *further((1, 1))])
def test_fast_mode_stays_within_rounding_of_plain_torch(stages: int, replicas: int) -> None:
    found = asyncio.run(train(tiny(stages, mode="fast"), replicas=replicas, steps=10))
    expected = one_process(plain_torch(stages), 10)
    largest = max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True))
    assert largest <= 1e-4


def plain_torch(stages: int, **fields: object) -> Manifest:
    """A run whose reference is autograd and `clip_grad_norm_` of torch, with no grid."""
    return tiny(stages, mode="fp32", averaging=Averaging(sync="local", codec="fp32"), **fields)


def test_the_grid_is_a_rounding_of_the_gradient_and_no_other_algorithm() -> None:
    exact, plain = (run_reference(each, text()) for each in (tiny(2, eval_every=10), plain_torch(2, eval_every=10)))
    assert exact.losses[0] == plain.losses[0]
    assert max(abs(a - b) for a, b in zip(exact.losses, plain.losses, strict=True)) <= 1e-4
    assert exact.evals.keys() == plain.evals.keys() == {0, 10, 20}
    assert exact.evals[20] < exact.evals[10] < exact.evals[0]
