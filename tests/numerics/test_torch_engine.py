"""The torch engine as its contract says: what it refuses, what it counts, what a snapshot holds."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import threading
import weakref
from collections.abc import Awaitable, Mapping
from typing import Any

import pytest
import torch
from blake3 import blake3
from further import further
from safetensors.torch import load, save
from stage_chain import MODEL, StageChain, batch_of, chain_of, commit, compute_thread, take_over, text, tiny, weights_of

from swarmnet.engine.payloads import Payloads
from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.errors import BadMessage, DeviceFull, Overflow, Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Numerics, Wire
from swarmnet.messages import Packed
from swarmnet.model.decoder import StageModule, loss_sum
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.interfaces import Contribution, SavedActivations
from swarmnet.stage.rounding import MAX_SUM
from swarmnet.stage.snapshot import Layout
from swarmnet.testing.reference import run_reference
from swarmnet.wire import codecs


def pack(tensors: Mapping[str, torch.Tensor], *, stage: int, version: int) -> memoryview:
    """A snapshot of these tensors, whatever they are."""
    layout = Layout({name: tensor.shape for name, tensor in tensors.items()}, stage=stage)
    memory = layout.memory()
    for name, place in layout.views(memory).items():
        place.copy_(tensors[name])
    return layout.seal(memory, version=version)


def packed(tensor: torch.Tensor, codec: str = "fp32") -> Packed:
    return codecs.encode(codec, tensor)


def raw(tensor: torch.Tensor, codec: str = "fp32") -> Packed:
    """Bytes as a liar would send them: `encode` refuses NaN."""
    return Packed(codec, tuple(tensor.shape), tensor.numpy().tobytes())


def from_a_mate(packed: Packed) -> Contribution:
    return Contribution(PeerId("mate"), 1, packed)


async def refused(awaited: Awaitable[object], code: RejectCode) -> BadMessage:
    with pytest.raises(BadMessage) as caught:
        await awaited
    assert caught.value.code is code
    return caught.value


async def the_sum(engine: TorchEngine) -> torch.Tensor:
    return codecs.decode(await engine.sums.contribution(0, engine.sums.num_elements))


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("stages", [1, 3])
async def test_every_parameter_gradient_is_the_references(stages: int) -> None:
    """One microbatch: the flat accumulator of each stage against plain autograd on the whole."""
    manifest = tiny(stages)
    module = StageModule(MODEL, range(MODEL.num_layers), first=True, last=True)
    module.reset(seed=manifest.training.seed)
    tokens = codecs.decode(batch_of(manifest, text(), 0, 2))
    torch.set_num_threads(1)
    loss_sum(module(tokens[:, :-1]), tokens[:, 1:]).backward()
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}

    async with chain_of(manifest) as chain:
        seen: set[str] = set()
        route = [replicas[0] for replicas in chain.engines]
        for engine, stash in zip(route, await chain.travel(route, 2), strict=True):
            assert await engine.accumulate(stash)
            flat, start = await the_sum(engine), 0
            for name in await weights_of(engine):
                gradient = (expected[name] * 2.0**32).round().long()
                assert torch.equal(flat[start : start + gradient.numel()].view_as(gradient), gradient), name
                start += gradient.numel()
                seen.add(name)
            assert start == engine.sums.num_elements
        assert seen == expected.keys()


@functools.cache
def losses_of_one_process() -> list[float]:
    """Nothing travels there, so it is the same for every codec."""
    return run_reference(tiny(3), text(), steps=6).losses


@pytest.mark.parametrize("codec", ["int8", "nf4", *further("bf16", "fp16", "bnb8")])
async def test_lossy_wires_train(codec: str) -> None:
    manifest = tiny(3).model_copy(update={"wire": Wire(activations=codec, gradients=codec)})
    async with chain_of(manifest) as chain:
        rng = random.Random(1)
        losses = [await chain.step(rng) for _ in range(6)]
        expected = losses_of_one_process()
        assert losses != expected
        assert losses == pytest.approx(expected, abs=0.05)


# ---------------------------------------------------------------- counting


async def one_stash(chain: StageChain, index: int = 0) -> tuple[TorchEngine, SavedActivations]:
    """A microbatch of the first stage whose weight gradient is owed."""
    route = [replicas[0] for replicas in chain.engines]
    return route[0], (await chain.travel(route, index))[0]


async def test_a_stash_is_added_once_and_answers_the_same_again() -> None:
    async with chain_of(tiny(2)) as chain:
        engine, stash = await one_stash(chain)
        passed_s = stash.compute_s
        assert await engine.accumulate(stash) and stash.compute_s > passed_s
        once = await the_sum(engine)
        assert await engine.accumulate(stash)
        assert torch.equal(await the_sum(engine), once)
        _, again = await one_stash(chain)
        assert not await engine.accumulate(again), "another stash of the same index"
        assert torch.equal(await the_sum(engine), once)


async def test_a_cancelled_weight_pass_that_ran_is_known_to_have_run() -> None:
    async with chain_of(tiny(2)) as chain:
        engine, stash = await one_stash(chain)
        waiting = asyncio.ensure_future(engine.accumulate(stash))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert await engine.accumulate(stash)
        _, other = await one_stash(chain, 1)
        assert await engine.accumulate(other)
        total = await the_sum(engine)
        engine.discard()
        for index in (0, 1):
            _, stash = await one_stash(chain, index)
            assert await engine.accumulate(stash)
        assert torch.equal(await the_sum(engine), total)


async def test_a_discard_empties_and_fences() -> None:
    async with chain_of(tiny(2)) as chain:
        engine, stash = await one_stash(chain)
        _, late = await one_stash(chain, 1)
        assert await engine.accumulate(stash)
        engine.discard()
        assert engine.discards(0) == stash.discards + 1
        assert not await engine.accumulate(late)
        assert not await engine.accumulate(stash), "its sum is gone"
        assert not bool((await the_sum(engine)).any())
        _, fresh = await one_stash(chain, 1)
        assert await engine.accumulate(fresh)


async def test_a_discard_while_the_weight_pass_is_queued_or_running_is_seen_by_the_caller() -> None:
    async with chain_of(tiny(2)) as chain:
        for index in range(4):
            engine, stash = await one_stash(chain, index)
            adding = asyncio.ensure_future(engine.accumulate(stash))
            for _ in range(index):
                await asyncio.sleep(0)
            engine.discard()
            assert not await adding
            assert not bool((await the_sum(engine)).any())


async def test_a_discard_while_a_forward_is_queued_fences_that_forward() -> None:
    async with chain_of(tiny(2)) as chain:
        engine = chain.engines[0][0]
        payload = (batch_of(chain.manifest, chain.tokens, 0, 0),)
        forward = asyncio.ensure_future(engine.forward(0, 0, payload, train=True))
        await asyncio.sleep(0)
        engine.discard()
        assert (await forward).discards == engine.discards(0) - 1


async def test_overflow_is_refused_and_counts_nothing() -> None:
    manifest = tiny(1).model_copy(update={"numerics": Numerics(mode="deterministic", grid_bits=48)})
    manifest = manifest.model_copy(update={"training": manifest.training.model_copy(update={"microbatches": 1 << 20})})
    async with chain_of(manifest) as chain:
        engine, stash = await one_stash(chain)
        with pytest.raises(Overflow):
            await engine.accumulate(stash)
        assert not bool((await the_sum(engine)).any())


async def test_a_gradient_that_is_not_finite_counts_nothing() -> None:
    """A stage-0 output gradient so large that its weight gradient leaves fp32."""
    async with chain_of(tiny(2)) as chain:
        engine = chain.engines[0][0]
        stash = (await chain.forward([engine], 0))[0]
        huge = torch.full((2, 16, MODEL.hidden_size), 3e38)
        await engine.backward(stash, (packed(huge),))
        await refused(engine.accumulate(stash), RejectCode.NON_FINITE)
        assert not bool((await the_sum(engine)).any())


# ---------------------------------------------------------------- payloads


async def test_payloads_are_refused_for_what_is_wrong_with_them_and_the_engine_works_on() -> None:
    async with chain_of(tiny(2)) as chain:
        first, last = chain.engines[0][0], chain.engines[1][0]
        tokens = batch_of(chain.manifest, chain.tokens, 0, 0)
        hidden = (await first.forward(0, 0, (tokens,), train=True)).output[1]
        ids = codecs.decode(tokens)
        nan = torch.zeros(2, 16, MODEL.hidden_size)
        nan[1, 3, 5] = torch.nan
        cases: list[tuple[TorchEngine, tuple[Packed, ...], RejectCode]] = [
            (first, (), RejectCode.BAD_SHAPE),
            (first, (tokens, hidden), RejectCode.BAD_SHAPE),
            (first, (packed(ids[:, :-1], "int32"),), RejectCode.BAD_SHAPE),
            (first, (packed(ids.float()),), RejectCode.MALFORMED),
            (first, (packed(ids + 61, "int32"),), RejectCode.MALFORMED),
            (first, (packed(ids - 61, "int32"),), RejectCode.MALFORMED),
            (first, (Packed("int32", (2, 17), bytes(tokens.data)[:-4]),), RejectCode.MALFORMED),
            (last, (tokens,), RejectCode.BAD_SHAPE),
            (last, (tokens, packed(torch.zeros(2, 16, 8))), RejectCode.BAD_SHAPE),
            (last, (tokens, packed(torch.zeros(1, 16, MODEL.hidden_size))), RejectCode.BAD_SHAPE),
            (last, (tokens, packed(torch.zeros(2, 16, MODEL.hidden_size), "bf16")), RejectCode.MALFORMED),
            (last, (tokens, raw(nan)), RejectCode.NON_FINITE),
            (last, (tokens, raw(nan + torch.inf)), RejectCode.NON_FINITE),
        ]
        for engine, payload, code in cases:
            await refused(engine.forward(0, 0, payload, train=True), code)
        assert await last.forward(0, 0, (tokens, hidden), train=True)


async def test_a_refused_gradient_leaves_the_stash_good() -> None:
    async with chain_of(tiny(2)) as chain:
        first, last = chain.engines[0][0], chain.engines[1][0]
        front, back = await chain.forward([first, last], 0)
        (gradient,) = await last.backward(back, ())
        await refused(first.backward(front, ()), RejectCode.BAD_SHAPE)
        await refused(first.backward(front, (packed(torch.zeros(2, 16, 3)),)), RejectCode.BAD_SHAPE)
        await refused(first.backward(front, (packed(torch.ones(2, 16, 32), "bf16"),)), RejectCode.MALFORMED)
        await refused(first.backward(front, (raw(torch.full((2, 16, 32), torch.nan)),)), RejectCode.NON_FINITE)
        assert await first.backward(front, (gradient,)) == ()
        assert await first.accumulate(front)
        with pytest.raises(ValueError, match="has run already"):
            await first.backward(front, (gradient,))


async def test_what_we_made_non_finite_ourselves_is_nobodys_fault() -> None:
    async with chain_of(tiny(3)) as chain:
        middle, last = chain.engines[1][0], chain.engines[2][0]
        noise = torch.randn(2, 16, MODEL.hidden_size, generator=torch.Generator().manual_seed(0))
        payload = batch_of(chain.manifest, chain.tokens, 0, 0), packed(noise * 1e-2)
        stash = await middle.forward(0, 0, payload, train=True)
        with pytest.raises(Refused) as backward:
            await middle.backward(stash, (packed(noise.sign() * 3e38),))
        weights = load(bytes(await last.snapshot()))
        weights["lm_head.weight"].mul_(1e38).add_(3e38)
        await last.restore(pack(weights, stage=2, version=0), version=0)
        with pytest.raises(Refused) as forward:
            await last.forward(0, 0, payload, train=True)
        assert backward.value.code is forward.value.code is RejectCode.OVERFLOWED


async def test_what_a_liar_sends_makes_nothing_infinite() -> None:
    """The largest values that an honest stage lets in give values that the next one lets in, both ways."""
    async with chain_of(tiny(3)) as chain:
        middle, last = chain.engines[1][0], chain.engines[2][0]
        tokens = batch_of(chain.manifest, chain.tokens, 0, 0)
        largest = packed(torch.full((2, 16, MODEL.hidden_size), codecs.MAX_VALUE))
        stash = await middle.forward(0, 0, (tokens, largest), train=True)
        codecs.check_bounded(stash.output[1])
        (gradient,) = await middle.backward(stash, (largest,))
        codecs.check_bounded(gradient)
        after = await last.forward(0, 0, stash.output, train=True)
        assert math.isfinite(after.loss_sum)
        beyond = packed(2 * codecs.decode(largest))
        assert torch.equal(
            codecs.decode((await middle.forward(0, 1, (tokens, beyond), train=True)).output[1]).abs().amax(),
            torch.tensor(codecs.MAX_VALUE),
        )
        with pytest.raises(BadMessage):
            codecs.check_bounded(beyond)


async def test_evaluation_keeps_nothing_and_its_loss_is_trainings() -> None:
    async with chain_of(tiny(2)) as chain:
        route = [replicas[0] for replicas in chain.engines]
        trained, evaluated = await chain.forward(route, 0), await chain.forward(route, 0, train=False)
        assert (trained[-1].loss_sum, trained[-1].num_tokens) == (evaluated[-1].loss_sum, evaluated[-1].num_tokens)
        assert all(stash.saved is None for stash in evaluated)
        with pytest.raises(ValueError, match="evaluation"):
            await route[-1].backward(evaluated[-1], ())


# ---------------------------------------------------------------- averaging


async def test_parts_that_do_not_fit_are_refused() -> None:
    async with chain_of(tiny(2)) as chain:
        await chain.step(random.Random(0))
        engine = chain.engines[0][0]
        n = engine.sums.num_elements
        half = packed(torch.zeros(n // 2, dtype=torch.int64), "small")
        beyond = packed(torch.full((n,), MAX_SUM) + 1, "small")
        await refused(take_over(engine.sums, half), RejectCode.BAD_SHAPE)
        await refused(take_over(engine.sums, packed(torch.zeros(n))), RejectCode.MALFORMED)
        await refused(take_over(engine.sums, beyond), RejectCode.MALFORMED)
        await refused(engine.sums.reduce([from_a_mate(beyond)], 0, n), RejectCode.MALFORMED)
        await refused(engine.sums.reduce([from_a_mate(half)], 0, n), RejectCode.BAD_SHAPE)
        await refused(engine.sums.contribution(0, n + 1), RejectCode.BAD_SHAPE)
        with pytest.raises(Overflow):
            most = packed(torch.full((n,), MAX_SUM), "small")
            await engine.sums.reduce([from_a_mate(most), from_a_mate(most)], 0, n)


async def test_the_digest_is_that_of_the_decoded_sum_and_the_sum_can_be_handed_on() -> None:
    async with chain_of(tiny(2), replicas=2) as chain:
        (one, two), _ = chain.engines
        for engine, index in ((one, 0), (two, 1)):
            stash = (await chain.travel([engine, chain.engines[1][0]], index))[0]
            assert await engine.accumulate(stash)
        parts = [packed for _, packed in await chain.reduced([one, two], 3, (0, one.sums.num_elements))]
        digest, square = await take_over(one.sums, *parts)
        n = one.sums.num_elements
        assert sum(part.num_bytes for part in parts) < 0.6 * 8 * n, "shards travel packed"
        of_its_only_block = blake3(torch.cat([codecs.decode(part) for part in parts]).numpy().tobytes()).digest()
        assert digest == blake3(of_its_only_block).digest()
        whole = await one.sums.finished_sum(0, n)
        summed = codecs.decode(whole, expect_shape=(n,))
        assert of_its_only_block == blake3(summed.numpy().tobytes()).digest()
        assert whole.num_bytes < 0.6 * 8 * n, "it travels packed"
        handed_on = [await one.sums.finished_sum(0, 100), await one.sums.finished_sum(100, n)]
        assert await take_over(two.sums, *handed_on) == (digest, square)
        total = (await the_sum(one) + await the_sum(two)).double() * 2.0**-32
        assert square == pytest.approx(total.square().sum().item(), rel=1e-12)


async def test_a_packed_piece_does_not_change_when_the_engine_moves_on() -> None:
    async with chain_of(tiny(2)) as chain:
        engine, stash = await one_stash(chain)
        await engine.accumulate(stash)
        piece = await engine.sums.contribution(0, engine.sums.num_elements)
        before = bytes(piece.data)
        engine.discard()
        _, other = await one_stash(chain, 1)
        await engine.accumulate(other)
        assert bytes(piece.data) == before


# ---------------------------------------------------------------- versions


async def test_work_of_another_version_is_refused() -> None:
    async with chain_of(tiny(2)) as chain:
        route = [replicas[0] for replicas in chain.engines]
        only_forward = (await chain.forward(route, 0))[0]
        owed = (await chain.travel(route, 1))[0]
        gradient = (packed(torch.zeros(2, 16, MODEL.hidden_size)),)
        payload = (batch_of(chain.manifest, chain.tokens, 0, 0),)
        with pytest.raises(Refused) as early:
            await route[0].forward(1, 0, payload, train=True)
        assert early.value.code is RejectCode.NOT_READY
        await chain.step(random.Random(0))
        for late in (route[0].forward(0, 0, payload, train=True), route[0].backward(only_forward, gradient)):
            with pytest.raises(Refused) as stale:
                await late
            assert stale.value.code is RejectCode.STALE
        assert not await route[0].accumulate(owed)
        assert not bool((await the_sum(route[0])).any())


async def test_apply_needs_a_sum_of_this_version_and_all_commits_in_order() -> None:
    async with chain_of(tiny(2)) as chain:
        engine = chain.engines[0][0]
        commits = [commit(stage, 0, b"", 1.0, 32, 1.0) for stage in range(2)]
        with pytest.raises(ValueError, match="no finished sum"):
            await engine.apply(commits)
        await take_over(engine.sums, await engine.sums.contribution(0, engine.sums.num_elements))
        for wrong in (commits[:1], commits[::-1], [commit(stage, 1, b"", 1.0, 32, 1.0) for stage in range(2)]):
            with pytest.raises(ValueError, match="commit of each stage"):
                await engine.apply(wrong)
        for tokens, square in ((0, 1.0), (32, float("nan")), (32, float("inf")), (32, -1.0)):
            false = [commit(stage, 0, b"", 1.0, tokens, square) for stage in range(2)]
            await refused(engine.apply(false), RejectCode.MALFORMED)
        assert engine.version == 0
        await engine.apply(commits)
        assert engine.version == 1
        with pytest.raises(ValueError, match="no finished sum"):
            await engine.apply(commits)


async def test_a_restored_engine_continues_with_the_same_bits() -> None:
    async with chain_of(tiny(2), replicas=2) as chain:
        rng = random.Random(0)
        for _ in range(6):
            await chain.step(rng)
        copies = [await replicas[0].snapshot() for replicas in chain.engines]
        assert copies == [await replicas[0].snapshot() for replicas in chain.engines]
        for replicas, data in zip(chain.engines, copies, strict=True):
            await replicas[1].reset_to_seed()
            await replicas[1].restore(memoryview(data), version=6)
            assert await replicas[1].snapshot() == data
        for _ in range(6):
            await chain.step(rng)
        first, second = await chain.weights(0), await chain.weights(1)
        assert all(torch.equal(first[name], second[name]) for name in first)


async def test_restoring_discards_and_reset_goes_back_to_the_seed() -> None:
    async with chain_of(tiny(2)) as chain:
        engine, stash = await one_stash(chain)
        begin = await engine.snapshot()
        await engine.accumulate(stash)
        _, late = await one_stash(chain, 1)
        await engine.restore(begin, version=0)
        assert not bool((await the_sum(engine)).any())
        assert not await engine.accumulate(late)
        await chain.step(random.Random(0))
        assert engine.version == 1 and await engine.snapshot() != begin
        await engine.reset_to_seed()
        assert engine.version == 0 and await engine.snapshot() == begin


async def test_snapshots_that_do_not_fit_are_refused_and_change_nothing() -> None:
    async with chain_of(tiny(2)) as chain:
        engine = chain.engines[0][0]
        good = bytes(await engine.snapshot())
        other = bytes(await chain.engines[1][0].snapshot())
        name = "model.embed_tokens.weight"

        def changed(**tensors: torch.Tensor | None) -> bytes:
            state = {key: value for key, value in {**load(good), **tensors}.items() if value is not None}
            return bytes(pack(state, stage=0, version=0))

        weight = load(good)[name]
        cases = [
            (b"", RejectCode.MALFORMED),
            (good[:100], RejectCode.MALFORMED),
            (good[:-4], RejectCode.MALFORMED),
            (b"\xff" * 64, RejectCode.MALFORMED),
            (b"\x02" + bytes(7) + b"[]", RejectCode.MALFORMED),
            (other, RejectCode.MALFORMED),
            (save(load(good), metadata={}), RejectCode.MALFORMED),
            (bytes(pack(load(good), stage=0, version=1)), RejectCode.MALFORMED),
            (changed(**{name: None}), RejectCode.MALFORMED),
            (changed(extra=weight), RejectCode.MALFORMED),
            (changed(**{name: weight[:-1]}), RejectCode.MALFORMED),
            (good.replace(b"F32", b"U32"), RejectCode.MALFORMED),
            (changed(**{name: weight * torch.nan}), RejectCode.NON_FINITE),
            (changed(**{f"optimizer.exp_avg_sq.{name}": weight - 1}), RejectCode.MALFORMED),
        ]
        for data, code in cases:
            await refused(engine.restore(data, version=0), code)
            assert await engine.snapshot() == good
        await engine.restore(good, version=0)


# ---------------------------------------------------------------- a CUDA device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_cuda_device_has_the_same_bits_in_any_order_and_the_references_curve(replicas: int) -> None:
    manifest = tiny(2)
    curves = []

    async def train(seed: int) -> None:
        async with compute_thread() as compute:
            chain = StageChain(manifest, compute, replicas=replicas, device="cuda")
            rng = random.Random(seed)
            curves.append(([await chain.step(rng) for _ in range(10)], await chain.weights()))

    for seed in (1, 2):
        asyncio.run(train(seed))
    assert curves[0][0] == curves[1][0]
    assert all(torch.equal(curves[0][1][name], curves[1][1][name]) for name in curves[0][1])
    assert curves[0][0] == pytest.approx(run_reference(manifest, text(), steps=10).losses, abs=1e-3)


async def test_a_device_without_memory_is_full_and_what_the_job_had_made_is_gone() -> None:
    async with chain_of(tiny(1)) as chain:
        ((engine,),) = chain.engines
        made: list[weakref.ref[torch.Tensor]] = []

        def fills(*_: object, **__: object) -> None:
            activation = torch.zeros(3)
            made.append(weakref.ref(activation))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._backend, "forward", fills)
            with pytest.raises(DeviceFull, match=r"^CUDA out of memory$"):
                await chain.forward([engine], 0)
        assert made[0]() is None
        await chain.step(random.Random(0))


async def test_a_sum_that_is_torn_is_told_as_lost() -> None:
    async with chain_of(tiny(1)) as chain:
        ((engine,),) = chain.engines
        lost: list[int] = []
        engine._backend.watch(lambda: lost.append(engine.discards(0)), lambda event, fields: None)
        (stash,) = await chain.travel([engine], 0)
        rounding, before = type(engine._backend._rounded.of(0)), engine.discards(0)

        def fills(*_: object, **__: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounding, "add", fills)
            with pytest.raises(DeviceFull):
                await engine.accumulate(stash)
        assert lost == [before + 2]
        with pytest.raises(Refused):
            await engine.sums.contribution(0, 1)
        engine.discard()
        await chain.step(random.Random(0))


@pytest.mark.parametrize(("apart", "least"), [(False, 0), (True, 1 << 20), (True, 0)])
async def test_large_payloads_are_coded_on_the_compute_thread_only_where_it_computes(
    apart: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded: list[tuple[str, bool]] = []
    for name in ("input", "output", "gradient", "input_gradient"):
        plain = getattr(Payloads, name)

        def told(*arguments: Any, _plain: Any = plain, _name: str = name, **named: Any) -> Any:
            coded.append((_name, threading.current_thread().name == "compute"))
            return _plain(*arguments, **named)

        monkeypatch.setattr(Payloads, name, told)
    monkeypatch.setattr(DeviceBackend, "apart", apart)
    monkeypatch.setattr("swarmnet.engine.torch_engine.LARGE_BYTES", least)

    async with chain_of(tiny(2)) as chain:
        await chain.step(random.Random(0))
        (engine,), _ = chain.engines
        with pytest.raises(BadMessage):
            await engine.forward(1, 0, [Packed("int32", (1,), bytes(4))], train=True)
    assert {name for name, _ in coded} == {"input", "output", "gradient", "input_gradient"}
    assert {compute for _, compute in coded} == {not apart or least > 0}
