"""`averaging.sync = "overlap"` in the engine: two versions of the weights, two sums, and the bits of one process."""

from __future__ import annotations

import asyncio
import functools
import random

import pytest
import torch
from further import further
from safetensors.torch import load
from stage_chain import StageChain, batch_of, chain_of, compute_thread, text, tiny, weights_of

from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.errors import Refused, RejectCode
from swarmnet.manifest.schema import Averaging, Manifest
from swarmnet.stage.interfaces import SavedActivations
from swarmnet.stage.passes import MemoryPolicy
from swarmnet.testing.reference import ReferenceResult, run_reference
from swarmnet.wire import codecs

STEPS = 10


def overlapping(
    stages: int = 2, *, codec: str = "int64", mode: str = "deterministic", lead: float = 0.0, after: int = 0
) -> Manifest:
    averaging = Averaging(sync="overlap", overlap_after=after, codec=codec)
    return tiny(stages, mode=mode, averaging=averaging, lead=lead)


@functools.cache
def one_process(manifest: Manifest, steps: int = STEPS) -> ReferenceResult:
    return run_reference(manifest, text(), steps=steps)


async def train(chain: StageChain, rng: random.Random, *, stop: int, parts: int = 1, ahead: bool = True) -> list[float]:
    """The mean losses of the steps up to `stop`. ahead: each step is computed while the one before is averaged."""
    first, delay = chain.step_number, chain.manifest.averaging.delay
    sums = [await chain.compute(rng, first)]
    while chain.step_number < stop:
        begun = ahead and chain.step_number + 1 < stop and delay.ahead(chain.step_number)
        async with asyncio.TaskGroup() as group:
            group.create_task(chain.finish(*sums[-1], parts=parts))
            following = group.create_task(chain.compute(rng, chain.step_number + 1)) if begun else None
        if following is not None:
            sums.append(following.result())
        elif chain.step_number < stop:
            sums.append(await chain.compute(rng, chain.step_number))
    return [loss / tokens for loss, tokens in sums]


async def trained(manifest: Manifest, *, replicas: int = 1, parts: int = 1, ahead: bool = True) -> ReferenceResult:
    result = ReferenceResult()
    async with chain_of(manifest, replicas=replicas) as chain:
        result.losses = await train(chain, random.Random(replicas), stop=STEPS, parts=parts, ahead=ahead)
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


async def the_sum(engine: TorchEngine) -> torch.Tensor:
    return codecs.decode(await engine.sums.contribution(0, engine.sums.num_elements))


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize(
    ("stages", "replicas", "parts", "ahead", "lead", "after", "codec"),
    [
        (2, 2, 3, True, 0.0, 0, "int64"),
        (1, 1, 1, False, 0.0, 0, "int64"),
        (3, 2, 1, True, 2.5, 3, "small"),
        *further((3, 2, 1, True, 2.5, 3, "int64"), (1, 1, 1, True, 0.0, 5, "int64"), (2, 2, 3, True, 0.0, 0, "small")),
    ],
)
async def test_deterministic_mode_has_the_references_bits(
    stages: int, replicas: int, parts: int, ahead: bool, lead: float, after: int, codec: str
) -> None:
    manifest = overlapping(stages, codec=codec, lead=lead, after=after)
    expected = one_process(manifest)
    exact = one_process(tiny(stages, averaging=Averaging(codec=codec), lead=lead), max(after, 1) + 1)
    assert expected.losses[-1] < expected.losses[0] - 0.3, "the reference does not learn; equality would say little"
    first = max(after, 1)
    assert expected.losses[:first] == exact.losses[:first] and expected.losses[first] != exact.losses[first], "no delay"
    assert_same_bits(await trained(manifest, replicas=replicas, parts=parts, ahead=ahead), expected)


async def test_replicas_that_spend_memory_in_different_ways_have_the_same_bits() -> None:
    manifest = overlapping(2, lead=2.5)
    policies = [MemoryPolicy(activations=policy) for policy in ("save", "recompute", "recompute_layers", "selective")]
    result = ReferenceResult()
    async with compute_thread() as compute:
        chain = StageChain(manifest, compute, memory=policies)
        result.losses = await train(chain, random.Random(4), stop=5, parts=3)
        result.weights = await chain.weights(3)
    assert_same_bits(result, one_process(manifest, 5))


async def test_fast_kernels_stay_within_rounding_of_the_reference() -> None:
    manifest = overlapping(2, mode="fast", lead=2.5)
    expected, found = one_process(manifest), await trained(manifest, replicas=2)
    assert max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)) <= 1e-5


# ---------------------------------------------------------------- two open steps


async def stash_of(chain: StageChain, index: int, step: int) -> tuple[TorchEngine, SavedActivations]:
    """A microbatch of the first stage whose weight gradient is owed."""
    route = [replicas[0] for replicas in chain.engines]
    return route[0], (await chain.travel(route, index, step=step))[0]


async def test_a_stash_of_the_newest_step_outlives_the_apply_of_the_oldest() -> None:
    async with chain_of(overlapping()) as chain:
        rng = random.Random(0)
        for _ in range(3):
            await chain.step(rng)
        route = [replicas[0] for replicas in chain.engines]
        sum_of_3 = await chain.compute(rng, 3)
        travelled = (await chain.travel(route, 0, step=4))[0]
        only_forward = await chain.forward(route, 1, step=4)
        await chain.finish(*sum_of_3)
        assert route[0].version == 4
        gradient = await route[1].backward(only_forward[1], ())
        await route[0].backward(only_forward[0], gradient)
        assert await route[0].accumulate(travelled) and await route[0].accumulate(only_forward[0])
        before = await the_sum(route[0])
        route[0].discard(4)
        for index in (0, 1):
            _, stash = await stash_of(chain, index, 4)
            assert await route[0].accumulate(stash)
        assert bool(before.any()) and torch.equal(await the_sum(route[0]), before)


async def test_what_is_left_of_an_applied_step_is_refused() -> None:
    async with chain_of(overlapping()) as chain:
        route = [replicas[0] for replicas in chain.engines]
        owed = (await chain.travel(route, 0))[0]
        only_forward = (await chain.forward(route, 1))[0]
        payload = (batch_of(chain.manifest, chain.tokens, 0, 0),)
        with pytest.raises(Refused) as early:
            await route[0].forward(2, 0, payload, train=True)
        assert early.value.code is RejectCode.NOT_READY
        await chain.step(random.Random(0))
        gradient = (codecs.encode("fp32", torch.zeros(2, 16, 32)),)
        for late in (route[0].forward(0, 0, payload, train=True), route[0].backward(only_forward, gradient)):
            with pytest.raises(Refused) as stale:
                await late
            assert stale.value.code is RejectCode.STALE
        assert not await route[0].accumulate(owed)
        assert not bool((await the_sum(route[0])).any())


async def test_a_discard_of_one_step_leaves_the_other() -> None:
    async with chain_of(overlapping()) as chain:
        engine, old = await stash_of(chain, 0, 0)
        _, new = await stash_of(chain, 0, 1)
        _, waiting = await stash_of(chain, 1, 1)
        assert await engine.accumulate(old) and await engine.accumulate(new)
        total = await the_sum(engine)
        before = engine.discards(0), engine.discards(1)
        engine.discard(1)
        assert (engine.discards(0), engine.discards(1)) == (before[0], before[1] + 1)
        assert torch.equal(await the_sum(engine), total)
        assert not await engine.accumulate(new) and not await engine.accumulate(waiting)
        engine.discard()
        assert not await engine.accumulate(old) and not bool((await the_sum(engine)).any())
        again = engine.discards(0)
        chain_loss = await chain.compute(random.Random(0), 0)
        await chain.finish(*chain_loss)
        engine.discard(0)
        assert engine.discards(2) == again, "of an applied step nothing is left to discard"


# ---------------------------------------------------------------- snapshots


@pytest.mark.parametrize("version", [3, 4])
async def test_a_restored_engine_continues_with_the_same_bits(version: int) -> None:
    async with chain_of(overlapping(), replicas=2) as chain:
        rng = random.Random(0)
        await train(chain, rng, stop=version)
        copies = [await replicas[0].snapshot() for replicas in chain.engines]
        assert copies == [await replicas[1].snapshot() for replicas in chain.engines]
        for replicas, data in zip(chain.engines, copies, strict=True):
            tensors = load(bytes(data))
            names = (await weights_of(replicas[0])).keys()
            assert all(not torch.equal(tensors[f"previous.{n}"], tensors[n]) for n in names if tensors[n].ndim == 2)
            await replicas[1].reset_to_seed()
            await replicas[1].restore(memoryview(data), version=version)
            assert await replicas[1].snapshot() == data
        await train(chain, rng, stop=version + 5)
        first, second = await chain.weights(0), await chain.weights(1)
        assert all(torch.equal(first[name], second[name]) for name in first)


async def test_a_snapshot_becomes_a_version_of_other_parity() -> None:
    """As a run that goes on from an older state: weights and those before them keep their meaning."""
    async with chain_of(overlapping()) as chain:
        for _ in range(3):
            await chain.step(random.Random(0))
        engine = chain.engines[0][0]
        data, weights = await engine.snapshot(), await weights_of(engine)
        payload = (batch_of(chain.manifest, chain.tokens, 0, 0),)
        before = [bytes((await engine.forward(step, 0, payload, train=False)).output[1].data) for step in (3, 4)]
        assert before[0] != before[1]
        await engine.restore(data, version=3, becomes=6)
        assert engine.version == 6
        assert all(torch.equal(weight, weights[name]) for name, weight in (await weights_of(engine)).items())
        after = [bytes((await engine.forward(step, 0, payload, train=False)).output[1].data) for step in (6, 7)]
        assert after == before


async def test_version_0_has_the_seeds_weights_for_both_open_steps() -> None:
    async with chain_of(overlapping()) as chain:
        engine = chain.engines[0][0]
        begin = await engine.snapshot()
        await chain.step(random.Random(0))
        await engine.reset_to_seed()
        assert await engine.snapshot() == begin
        tensors = load(bytes(begin))
        assert all(torch.equal(tensors[f"previous.{name}"], tensors[name]) for name in await weights_of(engine))
