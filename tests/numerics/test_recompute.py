"""A microbatch of a step that is over, computed again: the very bytes that were sent then, and the very sum."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import pytest
import torch
from further import further
from stage_chain import MODEL, StageChain, batch_of, compute_thread, tiny

from swarmnet.audit.cases import TOLERANCE
from swarmnet.engine.compute_thread import ComputeThread
from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.errors import BadMessage, Refused, RejectCode
from swarmnet.manifest.schema import Averaging, Lora, Manifest, Numerics, Wire
from swarmnet.messages import AuditData, Packed, WorkRecord
from swarmnet.pipeline.works import digest, off_by
from swarmnet.pledge import whole_of
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.interfaces import Recomputed
from swarmnet.stage.passes import MemoryPolicy
from swarmnet.sums.linear import drawn
from swarmnet.wire import codecs

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, KEPT, REPLICAS = 4, 2, 2
SEED = b"of the aggregate's vector"

Payload = tuple[Packed, ...]


@dataclasses.dataclass(frozen=True)
class Counted:
    """A microbatch as it travelled through a stage, and who counted it."""

    step: int
    stage: int
    index: int
    replica: int
    inputs: Payload
    output: Payload
    gradient: Payload
    answer: Payload
    loss_sum: float
    num_tokens: int


def same(one: Sequence[Packed], other: Sequence[Packed]) -> bool:
    return [(p.codec, tuple(p.shape), bytes(p.data)) for p in one] == [
        (p.codec, tuple(p.shape), bytes(p.data)) for p in other
    ]


async def compute(chain: StageChain, step: int) -> list[Counted]:
    """All microbatches of an open step, even indexes by the first replica of each stage, odd ones by the second."""
    found = []
    for index in range(chain.manifest.training.microbatches):
        route = [replicas[index % REPLICAS] for replicas in chain.engines]
        payload: Payload = (batch_of(chain.manifest, chain.tokens, step, index),)
        inputs, stashes = [], []
        for engine in route:
            inputs.append(payload)
            stashes.append(await engine.forward(step, index, payload, train=True))
            payload = stashes[-1].output
        gradient: Payload = ()
        for stage in reversed(range(len(route))):
            stash = stashes[stage]
            answer = await route[stage].backward(stash, gradient)
            assert await route[stage].accumulate(stash)
            found.append(
                Counted(step, stage, index, index % REPLICAS, inputs[stage], stash.output, gradient, answer,
                        stash.loss_sum, stash.num_tokens)
            )  # fmt: skip
            gradient = answer
    return found


async def roots(chain: StageChain) -> dict[tuple[int, int, int], bytes]:
    """(oldest open step, stage, replica) -> what stands for what that replica contributes."""
    found = {}
    for stage, replicas in enumerate(chain.engines):
        for replica, engine in enumerate(replicas):
            flat = codecs.decode(await engine.sums.contribution(0, engine.sums.num_elements))
            assert flat.dtype == torch.int64
            found[chain.step_number, stage, replica] = whole_of(drawn(SEED, flat.numel()).product(flat))
    return found


async def finish(chain: StageChain, works: Sequence[Counted]) -> None:
    losses = [(work.loss_sum, work.num_tokens) for work in works if work.stage + 1 == len(chain.engines)]
    await chain.finish(sum(loss for loss, _ in losses), sum(tokens for _, tokens in losses))


async def train(
    chain: StageChain, look: Callable[[list[Counted]], Coroutine[Any, Any, None]] | None = None
) -> tuple[list[Counted], dict[tuple[int, int, int], bytes]]:
    """STEPS steps, and what they were made of. look: called in the middle of each with what is over by then."""
    works, found, late = list[Counted](), dict[tuple[int, int, int], bytes](), chain.manifest.averaging.delay
    computed = {0: await compute(chain, 0)}
    for step in range(STEPS):
        # Where steps overlap the next one is computed on the weights that this update replaces.
        if late.ahead(step):
            computed[step + 1] = await compute(chain, step + 1)
        if look is not None:
            await look(works)
        found |= await roots(chain)
        await finish(chain, computed[step])
        works += computed[step]
        if step + 1 not in computed:
            computed[step + 1] = await compute(chain, step + 1)
    return works, found


@contextlib.asynccontextmanager
async def chained(manifest: Manifest, **options: Any) -> AsyncIterator[StageChain]:
    async with compute_thread() as thread:
        yield chain_of(manifest, thread, **options)


def chain_of(manifest: Manifest, thread: ComputeThread, **options: Any) -> StageChain:
    chain = StageChain(manifest, thread, **{"replicas": REPLICAS} | options)
    for replicas in chain.engines:
        for engine in replicas:
            engine._backend.past.keep(KEPT)
    return chain


def assert_as_then(again: Recomputed, work: Counted) -> None:
    assert same(again.output, work.output) and same(again.answer, work.answer), work
    assert (again.loss_sum, again.num_tokens) == (work.loss_sum, work.num_tokens)


def other_than(chain: StageChain, work: Counted) -> TorchEngine:
    """A mate of whoever counted it."""
    return chain.engines[work.stage][1 - work.replica]


def shares(works: Sequence[Counted]) -> dict[tuple[int, int, int], list[Counted]]:
    found = dict[tuple[int, int, int], list[Counted]]()
    for work in works:
        found.setdefault((work.step, work.stage, work.replica), []).append(work)
    return found


def small(sync: str = "exact", **more: Any) -> Averaging:
    return Averaging(codec="small", sync=sync, **more)


RUNS = {
    "int64": tiny(3),
    "small": tiny(3, averaging=small()),
    "one stage": tiny(1, averaging=small()),
    "overlap": tiny(3, averaging=Averaging(codec="int64", sync="overlap")),
    "overlap, small": tiny(3, averaging=small("overlap", overlap_after=2)),
    "bf16": tiny(3, averaging=small()).model_copy(
        update={"numerics": Numerics(compute="bf16"), "wire": Wire(activations="bf16", gradients="int8")}
    ),
    "8 bits": tiny(2, averaging=small(), state="8bit"),
    "adapters, overlap": tiny(
        3,
        averaging=small("overlap", overlap_after=1),
        model=MODEL.model_copy(update={"hidden_size": 64, "intermediate_size": 64, "num_heads": 8}),
    ).model_copy(update={"lora": Lora(r=4, base="nf4")}),
}


ON_A_GPU = [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ("small", "overlap", "bf16")]


async def once(
    engine: TorchEngine, step: int, index: int, inputs: Sequence[Packed], gradient: Sequence[Packed]
) -> Recomputed:
    """One microbatch again."""
    (found,), _ = await engine.recompute(step, [(index, inputs, gradient)])
    return found


@pytest.mark.parametrize(("name", "device"), [*((name, "cpu") for name in RUNS), *ON_A_GPU])
async def test_what_a_mate_computes_again_are_the_bytes_that_were_sent_then(name: str, device: str) -> None:
    async with chained(RUNS[name], device=device) as chain:
        works, found = await train(chain)
        seen = 0
        for (step, stage, replica), share in shares(works).items():
            mate = other_than(chain, share[0])
            if step < STEPS - KEPT:
                with pytest.raises(Refused) as caught:
                    await once(mate, step, share[0].index, share[0].inputs, share[0].gradient)
                assert caught.value.code is RejectCode.NOT_READY
                continue
            for work in share:
                assert_as_then(await once(mate, step, work.index, work.inputs, work.gradient), work)
            again, root = await mate.recompute(step, [(w.index, w.inputs, w.gradient) for w in share], SEED)
            for each, work in zip(again, share, strict=True):
                assert_as_then(each, work)
            assert root == found[step, stage, replica]
            # A share without one of its microbatches, or with another input gradient, is another.
            _, short = await mate.recompute(step, [(w.index, w.inputs, w.gradient) for w in share[1:]], SEED)
            assert short != root
            seen += 1
        assert seen == KEPT * len(chain.engines) * REPLICAS


@pytest.mark.parametrize("name", ["overlap, small", "bf16", *further("int64")])
async def test_training_is_the_same_whoever_computes_again_meanwhile(name: str) -> None:
    weights = []

    async with chained(RUNS[name]) as chain:
        await train(chain)
        weights.append(await chain.weights())
    async with chained(RUNS[name]) as chain:

        async def look(works: list[Counted]) -> None:
            # Two steps and several audits at a time, which take turns in one spare module.
            drawn = [work for work in works if work.step >= chain.step_number - 2][::3]
            jobs = [once(other_than(chain, w), w.step, w.index, w.inputs, w.gradient) for w in drawn]
            whole = [
                other_than(chain, w).recompute(w.step, [(w.index, w.inputs, w.gradient)], SEED) for w in drawn[::2]
            ]
            again, shared = await asyncio.gather(asyncio.gather(*jobs), asyncio.gather(*whole))
            for each, work in zip((*again, *(one for (one,), _ in shared)), (*drawn, *drawn[::2]), strict=True):
                assert_as_then(each, work)

        await train(chain, look)
        weights.append(await chain.weights())
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())


async def test_every_memory_policy_gives_the_same_bytes() -> None:
    policies = [MemoryPolicy(), MemoryPolicy(activations="recompute"), MemoryPolicy(activations="selective")]
    async with chained(RUNS["small"], memory=policies) as chain:
        works, found = await train(chain)
        for (step, stage, replica), share in shares(works).items():
            if step == STEPS - 1:
                for engine in chain.engines[stage]:
                    again, root = await engine.recompute(step, [(w.index, w.inputs, w.gradient) for w in share], SEED)
                    for each, work in zip(again, share, strict=True):
                        assert_as_then(each, work)
                    assert root == found[step, stage, replica]


async def test_a_wrong_input_is_refused_and_other_weights_make_kept_ones_worthless() -> None:
    async with chained(RUNS["int64"]) as chain:
        works, _ = await train(chain)
        work = next(work for work in works if work.step == STEPS - 1 and work.stage == 1)
        mate = other_than(chain, work)
        with pytest.raises(BadMessage):
            await once(mate, work.step, work.index, work.inputs[:1], work.gradient)
        with pytest.raises(BadMessage):
            await once(mate, work.step, work.index, work.inputs, ())
        # Computed on another input, the answer is another.
        other = await once(mate, work.step, work.index, work.inputs, work.inputs[1:])
        assert same(other.output, work.output) and not same(other.answer, work.answer)
        await mate.restore(await mate.snapshot(), version=mate.version)
        with pytest.raises(Refused):
            await once(mate, work.step, work.index, work.inputs, work.gradient)


async def test_memory_is_taken_once_and_given_back_when_nobody_computes_again() -> None:
    async with chained(RUNS["int64"]) as chain:
        works, _ = await train(chain)
        for replicas in chain.engines:
            backend = replicas[0]._backend
            assert isinstance(backend, DeviceBackend)
            assert [
                memory.numel() >= backend.state.canonical.num_elements for memory in backend.past._memory
            ] == KEPT * [True]
        work = works[-1]
        mate = other_than(chain, work)
        await once(mate, work.step, work.index, work.inputs, work.gradient)
        assert isinstance(mate._backend, DeviceBackend) and mate._backend._past is None


async def test_rounding_of_another_class_is_far_below_what_is_borne_and_every_gross_lie_above() -> None:
    """Float32 beside bf16: on one device nothing is further apart."""
    manifest, off, lies = tiny(3, averaging=small()), list[float](), list[float]()
    async with chained(manifest.model_copy(update={"numerics": Numerics(compute="bf16")})) as chain:
        works = await compute(chain, 0)

        async def fine(other: StageChain) -> None:
            await finish(other, await compute(other, 0))
            for work in works:
                again = await once(other.engines[work.stage][0], 0, work.index, work.inputs, work.gradient)
                payloads = work.inputs, work.output, work.gradient, work.answer
                record = WorkRecord(work.index, *map(digest, payloads), work.loss_sum, work.num_tokens)
                shown = AuditData(record, b"", (*work.output, *work.answer))
                off.append(off_by(shown, again))
                assert off_by(dataclasses.replace(shown, payload=shown.payload[1:]), again) == math.inf, (
                    "not what was pledged"
                )
                for false in (times(-1.0, work), times(10.0, work), times(0.0, work)):
                    lies.append(off_by(false, again))

        async with compute_thread() as thread:
            await fine(chain_of(manifest, thread))
    assert 0.0 < max(off) < TOLERANCE / 4 and min(lies) > 2 * TOLERANCE, (max(off), min(lies))


def times(factor: float, work: Counted) -> AuditData:
    """What would be shown of the same work so many times as large."""

    def larger(payload: Payload, skipped: int) -> Payload:
        scaled = [codecs.encode(each.codec, factor * codecs.decode(each)) for each in payload[skipped:]]
        return (*payload[:skipped], *scaled)

    output, answer = larger(work.output, 1), larger(work.answer, 0)
    loss = factor * work.loss_sum
    record = WorkRecord(work.index, *map(digest, (work.inputs, output, work.gradient, answer)), loss, work.num_tokens)
    return AuditData(record, b"", (*output, *answer))
