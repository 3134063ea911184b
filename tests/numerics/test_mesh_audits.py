"""Every backend computes past microbatches again: the bytes that it sent, and the contribution that it pledged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import dying_rank
import pytest
from further import further
from kept_launchers import KeptLaunchers
from stage_chain import StageChain, compute_thread, tiny
from test_mesh_engine import AT_ONCE, CPUS, TP2, Killing
from test_recompute import (
    KEPT,
    SEED,
    STEPS,
    Counted,
    assert_as_then,
    compute,
    finish,
    other_than,
    same,
    shares,
    times,
    train,
)

from swarmnet.audit.cases import TOLERANCE
from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.errors import RankLost, Refused, RejectCode
from swarmnet.manifest.schema import Averaging, Manifest
from swarmnet.messages import AuditData, WorkRecord
from swarmnet.peer.engines import torch_engine
from swarmnet.pipeline.works import digest, off_by
from swarmnet.ranks import backend as mesh_backend
from swarmnet.ranks import supervisor
from swarmnet.ranks.backend import MeshBackend
from swarmnet.ranks.layout import MeshLayout
from swarmnet.stage.interfaces import Recomputed
from swarmnet.testing.byzantine import Deceit, LyingBackend

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUTS = {
    "one rank": MeshLayout(),
    "tp2": TP2,
    "dp": MeshLayout(data=2, shard="dp", devices=CPUS),
    "zero1": MeshLayout(data=2, shard="zero1", devices=CPUS),
    "zero2": MeshLayout(data=2, shard="zero2", devices=CPUS),
    "zero3": MeshLayout(data=2, shard="zero3", devices=CPUS),
}
EXACT, OVERLAP = Averaging(codec="int64"), Averaging(codec="small", sync="overlap", overlap_after=2)


@pytest.fixture(scope="module", autouse=True)
def launchers() -> Iterator[None]:
    with contextlib.closing(KeptLaunchers()) as kept, pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "Launcher", kept)
        yield


@contextlib.asynccontextmanager
async def chain_of(manifest: Manifest, stage: int, layouts: tuple[str, str]) -> AsyncIterator[StageChain]:
    """The two replicas of that stage have these layouts, all others are one rank each."""
    async with compute_thread() as thread:
        chain, bodies = StageChain(manifest, thread, replicas=2), list[MeshBackend]()
        for replica, name in enumerate(layouts):
            if LAYOUTS[name].ranks > 1:
                bodies.append(MeshBackend(manifest.of_stage(stage), LAYOUTS[name], backoff=AT_ONCE))
                chain.engines[stage][replica] = torch_engine(manifest, stage, thread, bodies[-1])
        for replicas in chain.engines:
            for engine in replicas:
                engine._backend.past.keep(KEPT)
        try:
            yield chain
        finally:
            for body in bodies:
                body.close()


def asked(share: list[Counted]) -> list[Any]:
    return [(work.index, work.inputs, work.gradient) for work in share]


def shown(work: Counted) -> AuditData:
    """What a replica that is alone in its class hands out of that work."""
    payloads = work.inputs, work.output, work.gradient, work.answer
    record = WorkRecord(work.index, *map(digest, payloads), work.loss_sum, work.num_tokens)
    return AuditData(record, b"", (*work.output, *work.answer))


async def again(engine: TorchEngine, work: Counted) -> Recomputed:
    (found,), _ = await engine.recompute(work.step, [(work.index, work.inputs, work.gradient)])
    return found


@pytest.mark.parametrize(
    ("layout", "stage", "sync"),
    [
        ("tp2", 2, "overlap"),
        ("zero1", 0, "exact"),
        ("zero2", 1, "overlap"),
        ("zero3", 1, "exact"),
        *further(
            ("dp", 1, "exact"),
            ("dp", 1, "overlap"),
            ("tp2", 2, "exact"),
            ("zero1", 0, "overlap"),
            ("zero2", 1, "exact"),
            ("zero3", 1, "overlap"),
        ),
    ],
)
async def test_a_backend_computes_again_what_another_of_its_class_has_sent_and_summed(
    layout: str, stage: int, sync: str
) -> None:
    async with chain_of(tiny(3, averaging=EXACT if sync == "exact" else OVERLAP), stage, (layout, layout)) as chain:
        works, found = await train(chain)
        seen = 0
        for (step, place, replica), share in shares(works).items():
            if place != stage:
                continue
            mate = other_than(chain, share[0])
            if step < STEPS - KEPT:
                with pytest.raises(Refused) as caught:
                    await again(mate, share[0])
                assert caught.value.code is RejectCode.NOT_READY
                continue
            assert_as_then(await again(mate, share[0]), share[0])
            made, root = await mate.recompute(step, asked(share), SEED)
            for each, work in zip(made, share, strict=True):
                assert_as_then(each, work)
            assert root == found[step, stage, replica]
            _, short = await mate.recompute(step, asked(share[1:]), SEED)
            assert short != root
            seen += 1
        assert seen == 2 * KEPT
        for engine in chain.engines[stage]:
            memories = engine._backend.past._memory  # type: ignore[attr-defined]
            assert [memory.numel() >= engine._state.canonical.num_elements for memory in memories] == KEPT * [True]
        # Other weights come: no earlier step has its weights here any more.
        work = next(work for work in works if work.stage == stage and work.step == STEPS - 1)
        mate = other_than(chain, work)
        await mate.restore(await mate.snapshot(), version=mate.version)
        with pytest.raises(Refused):
            await again(mate, work)


@pytest.mark.parametrize("layout", ["tp2", "zero2"])
async def test_ranks_and_one_rank_are_as_near_as_rounding_and_a_lie_of_either_is_not(layout: str) -> None:
    async with chain_of(tiny(3), 1, (layout, "one rank")) as chain:
        works, _ = await train(chain)
        off, lies = list[float](), list[float]()
        for work in (work for work in works if work.stage == 1 and work.step >= STEPS - KEPT):
            made = await again(other_than(chain, work), work)
            off.append(off_by(shown(work), made))
            lies += [off_by(times(factor, work), made) for factor in (-1.0, 0.0, 10.0)]
        assert max(off) < TOLERANCE / 64 and min(lies) > 2 * TOLERANCE, (max(off), min(lies))


@pytest.mark.parametrize("kind", ["sign-flip", "lazy"])
async def test_false_work_of_ranks_is_seen_by_ranks_and_by_one_rank(kind: str) -> None:
    """Its class sees other bytes; a replica of another class sees more than rounding."""
    async with chain_of(tiny(3), 1, ("tp2", "one rank")) as chain:
        false, replicas = list[int](), chain.engines[1]
        deceit = Deceit(kind, "seed", lambda event, **fields: false.append(fields["index"]))
        replicas[0]._backend = cast(Any, LyingBackend(replicas[0]._backend, deceit))
        works = await compute(chain, 0)
        await finish(chain, works)
        share = [work for work in works if (work.stage, work.replica) == (1, 0)]
        assert false
        for engine in replicas:
            made, _ = await engine.recompute(0, asked(share), SEED)
            for each, work in zip(made, share, strict=True):
                if engine is replicas[0]:
                    assert same(each.answer, work.answer) == (work.index not in false)
                assert (off_by(shown(work), each) > 2 * TOLERANCE) == (work.index in false)


async def test_ranks_that_die_in_an_audit_cost_the_share_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one work was made of is shown all the same: a replica that shows nothing is suspended."""
    monkeypatch.setattr(mesh_backend, "PROGRAM", dying_rank.PROGRAM)
    async with chain_of(tiny(2), 1, ("tp2", "one rank")) as chain:
        engine = chain.engines[1][0]
        killing = Killing(engine)
        works, found = await train(chain)
        share = [work for work in works if (work.step, work.stage, work.replica) == (STEPS - 1, 1, 0)]
        for when in ("before", "after"):
            killing.arm("again", 1, when)
            for work in share[:2]:
                assert_as_then(await again(engine, work), work)
            assert killing.armed is None
        # Its first gradient died with the ranks: the rest is another contribution, and is not taken for this one.
        killing.arm("again", 1, "before")
        with pytest.raises(Refused) as caught:
            await engine.recompute(STEPS - 1, asked(share), SEED)
        assert caught.value.code is RejectCode.NOT_READY and killing.armed is None
        assert (await engine.recompute(STEPS - 1, asked(share), SEED))[1] == found[STEPS - 1, 1, 0]
        # Nor is what ranks hold once they have read another state: an empty sum would accuse a correct peer.
        body, (tokens, hidden) = cast(MeshBackend, engine._backend), engine._payloads.input(share[0].inputs)
        begun = body.new_share()
        weights = body.past.get(STEPS - 1)
        assert weights is not None
        await asyncio.to_thread(body.recompute, weights, share[0].index, tokens, hidden, None, begun)
        await asyncio.to_thread(body._ranks.reload)
        with pytest.raises(Refused):
            await asyncio.to_thread(body.read_share, begun, STEPS - 1)


async def test_ranks_that_die_in_every_audit_are_spared_further_ones_and_train_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with chain_of(tiny(2), 1, ("tp2", "one rank")) as chain:
        works, _ = await train(chain)
        work, engine = next(work for work in works if (work.step, work.stage) == (STEPS - 1, 1)), chain.engines[1][0]
        body, asked_for = cast(MeshBackend, engine._backend), list[str]()
        order = body._group.order

        def dies(name: str, /, **fields: Any) -> Any:
            asked_for.append(name)
            if name == "again":
                raise RankLost(1, "ended")
            return order(name, **fields)

        body._group.order = dies  # type: ignore[method-assign, assignment]
        for _ in range(4):
            with pytest.raises(Refused):
                await again(engine, work)
        assert asked_for.count("again") == 4, "two lives each, and then none"
        with pytest.raises(Refused, match="cannot recompute: ranks were lost 4 times in a row"):
            await again(engine, work)
        assert caplog.text.count("recomputing_stopped") == 1
        for other in (other for replicas in chain.engines for other in replicas):
            other.discard()
        assert await compute(chain, STEPS)


async def test_an_engine_is_ready_once_its_ranks_are_up() -> None:
    """A peer announces its state then: until then a step would wait for it, and suspend it."""
    async with chain_of(tiny(1), 0, ("tp2", "one rank")) as chain:
        ranks, one = chain.engines[0]
        await one.ready()
        waiting = asyncio.ensure_future(ranks.ready())
        await asyncio.sleep(0)
        assert not waiting.done()
        supervising = asyncio.ensure_future(ranks.supervise())
        await waiting
        assert len(cast(MeshBackend, ranks._backend)._group.pids) == 2
        supervising.cancel()
