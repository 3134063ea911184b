"""The engine on the ranks of a mesh: one process's steps, state that passes between meshes, and ranks that die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import dying_rank
import pytest
import torch
from kept_launchers import KeptLaunchers
from stage_chain import ROUND, StageChain, compute_thread, take_over, tiny

from swarmnet.engine.compute_thread import ComputeThread
from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.errors import BadMessage, MeshFailed, Refused, RejectCode, UsageError
from swarmnet.ids import RoundId
from swarmnet.manifest.schema import Averaging, Manifest
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks import backend as mesh_backend
from swarmnet.ranks import supervisor
from swarmnet.ranks.backend import MeshBackend
from swarmnet.ranks.layout import MeshLayout
from swarmnet.ranks.supervisor import RestartBackoff
from swarmnet.wire import codecs

CPUS = ("cpu", "cpu")
TP2 = MeshLayout(tensor=2, devices=CPUS)
LAYOUTS = {
    "tp2": TP2,
    "tp2sp": MeshLayout(tensor=2, sequence_parallel=True, devices=CPUS),
    "zero1": MeshLayout(data=2, shard="zero1", devices=CPUS),
    "zero3": MeshLayout(data=2, shard="zero3", devices=CPUS),
}
AT_ONCE = RestartBackoff(pause_s=0.0)
STEPS = 4
"""Its matrices are worth factors."""


@pytest.fixture(scope="module", autouse=True)
def launchers() -> Iterator[None]:
    with contextlib.closing(KeptLaunchers()) as kept, pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "Launcher", kept)
        yield


class Heard:
    """What an engine tells. It discards nothing by itself."""

    def __init__(self) -> None:
        self.lost = 0
        self.events: list[tuple[str, dict[str, object]]] = []

    def on_sums_lost(self) -> None:
        self.lost += 1

    def on_engine(self, event: str, fields: dict[str, object]) -> None:
        self.events.append((event, fields))

    def of(self, event: str) -> list[dict[str, object]]:
        return [fields for name, fields in self.events if name == event]


class Chains:
    """One run twice: on one-rank engines, and with stage `stage` on a mesh."""

    def __init__(
        self, manifest: Manifest, compute: ComputeThread, stage: int, layout: MeshLayout, backoff: RestartBackoff
    ) -> None:
        self.own, self.mixed = StageChain(manifest, compute), StageChain(manifest, compute)
        self.engine = torch_engine(
            manifest, stage, compute, MeshBackend(manifest.of_stage(stage), layout, backoff=backoff)
        )
        self.mixed.engines[stage] = [self.engine]
        self.one_rank = self.own.engines[stage][0]
        self.heard = Heard()
        self.engine.subscribe(self.heard)

    async def step(self) -> None:
        """The same step of both; equal losses."""
        seed = self.own.step_number
        expected, found = await self.own.step(random.Random(seed)), await self.mixed.step(random.Random(seed))
        assert found == pytest.approx(expected, rel=1e-5)

    async def check_weights(self) -> None:
        expected, found = await self.own.weights(), await self.mixed.weights()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5, msg=name)


@contextlib.asynccontextmanager
async def chains(
    manifest: Manifest, stage: int = 1, layout: MeshLayout = TP2, backoff: RestartBackoff = AT_ONCE
) -> AsyncIterator[Chains]:
    async with compute_thread() as compute:
        both = Chains(manifest, compute, stage, layout, backoff)
        try:
            yield both
        finally:
            both.engine.close()


async def kill(both: Chains, rank: int) -> None:
    """SIGKILL, and others in its place."""
    body = both.engine._backend
    assert isinstance(body, MeshBackend)
    lost = both.heard.lost
    handle = os.pidfd_open(body._group.pids[rank])
    os.kill(body._group.pids[rank], signal.SIGKILL)
    await asyncio.to_thread(select.select, [handle], [], [])
    os.close(handle)
    supervising = asyncio.ensure_future(both.engine.supervise())
    await asyncio.sleep(0)  # its first look is queued
    await both.engine.snapshot()  # behind that
    supervising.cancel()
    assert both.heard.lost == lost + 1


async def the_sum(engine: TorchEngine) -> torch.Tensor:
    return codecs.decode(await engine.sums.contribution(0, engine.sums.num_elements))


def orders(engine: TorchEngine, name: str) -> list[dict[str, Any]]:
    """The orders of a kind that ranks are given from now on."""
    body, found = engine._backend, list[dict[str, Any]]()
    assert isinstance(body, MeshBackend)
    order = body._group.order

    def heard(ordered: str, /, **fields: Any) -> Any:
        if ordered == name:
            found.append(fields)
        return order(ordered, **fields)

    body._group.order = heard  # type: ignore[method-assign, assignment]
    return found


def held(engine: TorchEngine) -> list[list[int]]:
    """Keys of the microbatches that each rank holds, by `dying_rank.PROGRAM`."""
    body = engine._backend
    assert isinstance(body, MeshBackend)
    return [list(answer["keys"]) for answer in body._ranks.order("held")]


# ---------------------------------------------------------------- equal to one process


def on_gpus(layout: MeshLayout) -> MeshLayout:
    """The same with a GPU for each rank; skips where there are too few."""
    if torch.cuda.device_count() < layout.ranks:
        pytest.skip(f"needs {layout.ranks} CUDA devices")
    return replace(layout, devices=tuple(f"cuda:{rank}" for rank in range(layout.ranks)))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fast", "deterministic"])
@pytest.mark.parametrize("mesh", ["one", *LAYOUTS])
async def test_ranks_on_gpus_take_the_steps_of_one_process_over_nccl(mesh: str, mode: str) -> None:
    """State passes to the CPU's replica and back; a rank that is killed is replaced, and the step is made again."""
    layout = on_gpus(MeshLayout() if mesh == "one" else LAYOUTS[mesh])
    async with chains(tiny(3, mode=mode), 1, layout) as both:
        await both.step()
        version, state = both.engine.version, bytes(await both.engine.snapshot())
        await both.one_rank.restore(state, version=version)
        await both.step()
        if layout.ranks > 1:
            await kill(both, 1)
        version, state = both.one_rank.version, bytes(await both.one_rank.snapshot())
        await both.engine.restore(state, version=version)
        assert bytes(await both.engine.snapshot()) == state
        await both.step()
        assert both.heard.lost == (layout.ranks > 1)


@pytest.mark.parametrize(
    ("mesh", "stage", "mode"),
    [
        ("tp2", 1, "deterministic"),
        ("zero3", 0, "fast"),
        pytest.param("tp2sp", 2, "fast", marks=pytest.mark.long),
        pytest.param("zero1", 1, "deterministic", marks=pytest.mark.long),
    ],
)
async def test_steps_are_those_of_one_process_and_state_passes_between_meshes(mesh: str, stage: int, mode: str) -> None:
    async with chains(tiny(3, mode=mode), stage, LAYOUTS[mesh]) as both:
        for _ in range(2):
            await both.step()
        version, state = both.engine.version, bytes(await both.engine.snapshot())
        assert len(state) == len(await both.one_rank.snapshot())
        await both.one_rank.restore(state, version=version)  # each goes on from the other's
        assert bytes(await both.one_rank.snapshot()) == state
        assert await both.one_rank.measure() == await both.engine.measure()
        await both.step()
        version, state = both.one_rank.version, bytes(await both.one_rank.snapshot())
        await both.engine.restore(state, version=version)
        assert bytes(await both.engine.snapshot()) == state
        await both.step()
        await both.check_weights()
        assert not both.heard.lost and len(both.heard.of("mesh_started")) == 1


async def test_the_same_sum_leads_to_the_same_bits_on_any_mesh() -> None:
    """In deterministic mode, where a sum is made on one replica and fetched by another."""
    async with chains(tiny(2)) as both:
        for _ in range(STEPS):
            chain = both.own
            rng = random.Random(chain.step_number)
            loss, tokens = await chain.compute(rng, chain.step_number)
            one, mesh = both.one_rank, both.engine
            one_commits: list[Any] = []
            apply = one.apply

            async def both_apply(commits: Any, apply: Any = apply, kept: list[Any] = one_commits) -> Any:
                kept.append(commits)
                return await apply(commits)

            one.apply = both_apply  # type: ignore[method-assign]
            await chain.finish(loss, tokens)
            one.apply = apply  # type: ignore[method-assign]
            digest, _ = await take_over(mesh.sums, await one.sums.finished_sum(0, one.sums.num_elements))
            assert digest == one_commits[0][1].digest
            await mesh.apply(one_commits[0])
            assert await mesh.measure() == await one.measure()
        assert await mesh.snapshot() == await one.snapshot()


@pytest.mark.parametrize("after", [pytest.param(0, marks=pytest.mark.long), 2])
async def test_where_steps_overlap(after: int) -> None:
    async def train(chain: StageChain) -> None:
        """Each step is computed while the one before is averaged."""
        rng, delay = random.Random(1), chain.manifest.averaging.delay
        begun = await chain.compute(rng, 0)
        while chain.step_number < STEPS:
            step, following = chain.step_number, None
            async with asyncio.TaskGroup() as group:
                group.create_task(chain.finish(*begun))
                if delay.ahead(step):
                    following = group.create_task(chain.compute(rng, step + 1))
            begun = following.result() if following is not None else await chain.compute(rng, step + 1)

    async with chains(tiny(2, averaging=Averaging(sync="overlap", overlap_after=after, codec="int64"))) as both:
        for chain in (both.own, both.mixed):
            await train(chain)
        await both.check_weights()
        for _ in range(2):
            assert len(await both.engine.snapshot()) == len(await both.one_rank.snapshot())


async def test_replicas_that_train_on_their_own() -> None:
    averaging = Averaging(sync="local", codec="fp32", inner_steps=2, outer_warmup_steps=0)
    async with chains(tiny(2, mode="fp32", averaging=averaging)) as both:
        loads = orders(both.engine, "load")
        for _ in range(STEPS):
            await both.step()
        assert [each["version"] for each in loads] == [0, 2], "at the start, and after an outer step"
        await both.check_weights()
        version, state = both.engine.version, bytes(await both.engine.snapshot())
        await both.engine.restore(state, version=version)
        assert bytes(await both.engine.snapshot()) == state
        await kill(both, 1)
        assert bytes(await both.engine.snapshot()) == state
        await both.step()
        await both.check_weights()


def test_ranks_that_cannot_share_the_stage_are_refused_before_any_is_started() -> None:
    with pytest.raises(UsageError, match="Ranks that can: 1, 2, 4"):
        MeshBackend(tiny(2).of_stage(0), MeshLayout(tensor=3, devices=("cpu",) * 3))


# ---------------------------------------------------------------- what may be counted


async def test_a_discard_empties_the_sum_and_work_that_is_given_up_leaves_nothing_on_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh_backend, "PROGRAM", dying_rank.PROGRAM)
    async with chains(tiny(2)) as both:
        chain, engine = both.mixed, both.engine
        route = [replicas[0] for replicas in chain.engines]
        stashes = await chain.travel(route, 0)
        assert await engine.accumulate(stashes[1]) and await engine.accumulate(stashes[1])
        total = await the_sum(engine)
        (again,) = (await chain.travel(route, 0))[1:]
        again.discards = engine.discards(0)
        assert not await engine.accumulate(again)  # counted already
        assert torch.equal(await the_sum(engine), total)
        late = (await chain.travel(route, 1))[1]
        engine.discard(0)
        assert not await engine.accumulate(late)
        assert not any(await the_sum(engine)) and not engine._accumulators[0].indexes(0)
        bad = (await chain.forward(route, 2))[1]
        with pytest.raises(BadMessage):
            await engine.backward(bad, (await engine.sums.contribution(0, 1),))
        await chain.forward(route, 3, train=False)
        del stashes, again, late, bad
        assert held(engine) == [[], []]
        stale = (await chain.travel(route, 3))[1]
        for each in (both.own, both.mixed):
            for replicas in each.engines:
                replicas[0].discard()
        await both.step()
        assert held(engine) == [[], []]  # of an applied step
        with pytest.raises(Refused, match=r"other weights|have changed"):
            await engine.backward(stale, ())
        await both.check_weights()


# ---------------------------------------------------------------- ranks that die

FAULTS = [
    ("forward", 0, "before"),
    ("backward", 1, "after"),
    ("accumulate", 1, "before"),
    ("accumulate", 0, "after"),
    ("write_sum", 1, "before"),
    ("update", 1, "before"),
    ("update", 0, "after"),
]


class Killing:
    """Has a rank die in the second order of a kind, or in the first `times` of those that are rare."""

    def __init__(self, engine: TorchEngine) -> None:
        body = engine._backend
        assert isinstance(body, MeshBackend)
        self._order, self._count = body._group.order, 0
        self._times = 1
        self.armed: tuple[str, int, str] | None = None
        body._group.order = self  # type: ignore[method-assign, assignment]

    def arm(self, name: str, rank: int, when: str, *, times: int = 1) -> None:
        self.armed, self._count, self._times = (name, rank, when), 0, times

    def __call__(self, name: str, /, deadline_s: float | None = None, **fields: Any) -> Any:
        if self.armed is not None and name == self.armed[0]:
            self._count += 1
            rare = name in ("write_sum", "update", "load")
            if rare or self._count == 2:
                fields["die"] = self.armed[1:]
                if self.armed[2] == "hangs":  # no answer comes: a short wait shows as much as the usual one
                    assert deadline_s is None
                    deadline_s = 0.5
                if not rare or self._count == self._times:
                    self.armed = None
        return self._order(name, deadline_s=deadline_s, **fields)


@pytest.mark.parametrize("sync", ["exact", "overlap"])
async def test_a_rank_dies_in_an_order_of_any_kind(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_backend, "PROGRAM", dying_rank.PROGRAM)
    faults = FAULTS if sync == "exact" else FAULTS[3:]
    async with chains(tiny(2, averaging=Averaging(sync=sync, codec="int64"))) as both:
        killing = Killing(both.engine)
        for number, fault in enumerate(faults):
            killing.arm(*fault)
            seed = both.own.step_number
            expected = await both.own.step(random.Random(seed))
            assert await until_done(both, seed) == pytest.approx(expected, rel=1e-5), fault
            assert killing.armed is None, f"no order {fault[0]}"
            assert (both.heard.lost, len(both.heard.of("rank_lost"))) == (number + 1, number + 1), fault
            lost = both.heard.of("rank_lost")[-1]
            assert lost["rank"] == fault[1] and "SIGKILL" in str(lost["reason"]), lost
        await both.check_weights()
        assert len(both.heard.of("mesh_started")) == len(faults) + 1
        version, seen = both.engine.version, await both.engine.measure()
        await both.one_rank.restore(await both.engine.snapshot(), version=version)
        assert await both.one_rank.measure() == seen
        # Ranks hold that state, too: from there the next step leads them and one rank to the same weights.
        await both.step()
        await both.check_weights()


async def test_a_rank_that_hangs_is_lost_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, and answers nothing: no process of its epoch outlives that."""
    monkeypatch.setattr(mesh_backend, "PROGRAM", dying_rank.PROGRAM)
    async with chains(tiny(1), 0, backoff=RestartBackoff(order_s=80.0, pause_s=0.0)) as both:
        killing, body = Killing(both.engine), both.engine._backend
        assert isinstance(body, MeshBackend) and body._group._deadline_s == 80.0
        await both.step()
        killing.arm("forward", 1, "hangs")
        handles = [os.pidfd_open(pid) for pid in body._group.pids]
        seed = both.own.step_number
        expected = await both.own.step(random.Random(seed))
        assert await until_done(both, seed) == pytest.approx(expected, rel=1e-5)
        assert killing.armed is None
        lost = both.heard.of("rank_lost")[0]
        assert "no answer" in str(lost["reason"]), lost
        for handle in handles:
            assert select.select([handle], [], [], 60.0)[0], "a rank that is over runs on"
            os.close(handle)
        await both.check_weights()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_rank_dies_as_it_reads_a_state(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of a restore, and in that of the start that follows."""
    monkeypatch.setattr(mesh_backend, "PROGRAM", dying_rank.PROGRAM)
    async with chains(tiny(1), 0) as both:
        killing, states = Killing(both.engine), []
        for _ in range(2):
            await both.own.step(random.Random(1))
            states.append(bytes(await both.one_rank.snapshot()))
        await both.engine.restore(states[0], version=1)
        await both.mixed.forward([both.engine], 0, step=1, train=False)
        for number, version in enumerate((2, 1, 2), start=1):
            killing.arm("load", number % 2, when, times=2)
            for engine in (both.engine, both.one_rank):
                await engine.restore(states[version - 1], version=version)
            (found,) = await both.mixed.forward([both.engine], 0, step=version, train=False)
            (expected,) = await both.own.forward([both.one_rank], 0, step=version, train=False)
            assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5) and killing.armed is None
            assert (both.heard.lost, len(both.heard.of("rank_lost"))) == (number, 2 * number)
            assert bytes(await both.engine.snapshot()) == states[version - 1]
        both.own.step_number = both.mixed.step_number = 2
        for engine in (both.engine, both.one_rank):
            engine.discard()
        await both.step()
        await both.check_weights()


@pytest.mark.parametrize("sync", ["exact", "overlap"])
async def test_a_rank_dies_as_the_state_is_written(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next ones make the update again, of the version before and the sum, which are still there."""
    monkeypatch.setattr(mesh_backend, "PROGRAM", dying_rank.PROGRAM)
    averaging = Averaging(sync=sync, codec="small", **({"overlap_after": 1} if sync != "exact" else {}))
    async with chains(tiny(2, averaging=averaging)) as both:
        for _ in range(2):
            await both.step()
        killing = Killing(both.engine)
        killing.arm("update", 1, "writing")
        await both.step()
        assert killing.armed is None and len(both.heard.of("rank_lost")) == 1
        await both.step()
        await both.check_weights()


async def until_done(both: Chains, seed: int) -> float:
    """A step of the mixed chain, begun again after a loss as the step machine does it."""
    while True:
        lost, step = both.heard.lost, both.mixed.step_number
        try:
            return await both.mixed.step(random.Random(seed))
        except (Refused, AssertionError):  # not added: the assertion of `compute`
            await asyncio.sleep(0)
            assert both.heard.lost > lost
            assert both.engine.version == step
            for replicas in both.mixed.engines:
                replicas[0].discard()


@pytest.mark.long
@pytest.mark.parametrize("sync", ["exact", "overlap"])
async def test_ranks_die_at_any_moment(sync: str) -> None:
    """Fifty lives of them; every step is one process's, and no process or descriptor is left."""
    rng = random.Random(7)
    pids: set[int] = set()
    manifest = tiny(2, averaging=Averaging(sync=sync, codec="int64"))
    endless = manifest.training.model_copy(update={"total_steps": 10_000})
    async with chains(
        manifest.model_copy(update={"training": endless}), backoff=RestartBackoff(restarts=1000, pause_s=0.0)
    ) as both:
        body = both.engine._backend
        assert isinstance(body, MeshBackend)

        async def strike() -> None:
            while len(both.heard.of("rank_lost")) < 50:
                await asyncio.sleep(rng.uniform(0.0, 0.4))
                pids.update(body._group.pids)
                if body._group.pids:
                    with contextlib.suppress(ProcessLookupError, IndexError):
                        os.kill(body._group.pids[rng.randrange(2)], signal.SIGKILL)

        await both.own.step(random.Random(0))
        await both.mixed.step(random.Random(0))
        descriptors = len(os.listdir("/proc/self/fd"))
        striking = asyncio.ensure_future(strike())
        while not striking.done():
            seed = both.own.step_number
            expected = await both.own.step(random.Random(seed))
            assert await until_done(both, seed) == pytest.approx(expected, rel=1e-5)
        assert both.heard.lost > 5  # in most of them something had been summed
        assert not [lost for lost in both.heard.of("rank_lost") if "SIGKILL" not in str(lost["reason"])]
        await both.check_weights()
        seen = await both.engine.measure()
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        await both.one_rank.restore(await both.engine.snapshot(), version=both.engine.version)
        assert await both.one_rank.measure() == seen
    assert len(pids) >= 50 and not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]  # noqa: ASYNC240


async def test_a_lost_sum_is_refused_until_it_is_discarded() -> None:
    async with chains(tiny(2)) as both:
        chain, engine = both.mixed, both.engine
        route = [replicas[0] for replicas in chain.engines]
        kept, counted = [(await chain.travel(route, index))[1] for index in range(2)]
        assert await engine.accumulate(counted)
        await engine.sums.open_round(ROUND)
        assert any(await the_sum(engine))
        discards = engine.discards(0)
        await kill(both, 0)
        assert engine.discards(0) == discards + 1
        kept.discards = engine.discards(0)
        assert not await engine.accumulate(kept), "its ranks are gone"
        with pytest.raises(Refused) as refused:
            await engine.sums.contribution(0, engine.sums.num_elements)
        assert refused.value.code is RejectCode.NOT_READY
        engine.discard(0)
        with pytest.raises(Refused):
            await engine.sums.contribution(0, engine.sums.num_elements)  # of the round that it was to be in
        await engine.sums.open_round(RoundId(ROUND.ballot, 1))
        assert not any(await the_sum(engine))


async def test_ranks_that_finish_nothing_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_backend, "PROGRAM", dying_rank.PROGRAM)
    async with compute_thread() as compute:
        manifest = tiny(1)
        backoff = RestartBackoff(restarts=1, pause_s=0.01)
        engine = torch_engine(manifest, 0, compute, MeshBackend(manifest.of_stage(0), TP2, backoff=backoff))
        body = engine._backend
        assert isinstance(body, MeshBackend)
        order = body._group.order
        body._group.order = lambda name, **fields: order(name, die=[1, "after"], **fields)  # type: ignore
        heard = Heard()
        engine.subscribe(heard)
        try:
            with pytest.raises(MeshFailed, match=r"tp2.*finished nothing.*SIGKILL"):
                await engine.supervise()
            assert len(heard.of("rank_lost")) == 2 and not heard.of("mesh_started")
            with pytest.raises(Refused) as refused:
                await StageChain(manifest, compute).forward([engine], 0)
            assert refused.value.code is RejectCode.NOT_READY
            assert len(await engine.snapshot()) > 0  # the state is still here
        finally:
            engine.close()
            engine.close()


async def test_ranks_that_evaluate_are_good_for_something() -> None:
    async with chains(tiny(1), 0, backoff=RestartBackoff(restarts=1, pause_s=0.0)) as both:
        for _ in range(3):
            await both.mixed.forward([replicas[0] for replicas in both.mixed.engines], 0, train=False)
            await kill(both, 0)
        assert len(both.heard.of("mesh_started")) == 4
