"""Whole rounds under every averaging codec, real engines and exchanges in one process, in one group and over a grid:
equal bits, nothing lost, retries too."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace

import pytest
import torch
from stage_chain import commit, compute_thread, take_over, tiny
from torch import Tensor

from swarmnet.averaging.butterfly import ExchangeContext
from swarmnet.averaging.exchange import Exchange
from swarmnet.averaging.grid import grid_of
from swarmnet.engine.compute_thread import ComputeThread
from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.errors import PeerGone
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.manifest.schema import Averaging, Manifest, Model
from swarmnet.messages import Finished, Part, Round, Stamp
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.rounding import NoRounding
from swarmnet.sums.local_sum import LocalSum
from swarmnet.testing.doubles import FakeTransport

MODEL = Model(
    vocab_size=64, hidden_size=64, intermediate_size=112, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16
)
STAMP, TOKENS = Stamp(1, 0, Chain("00" * 32)), 10
ONE, GRID = (3,), (3, 2, 2)
"""Rows of a round."""


def peers_of(rows: tuple[int, ...]) -> tuple[PeerId, ...]:
    return tuple(map(PeerId, "abcdefg"[: sum(rows)]))


def round_of(
    number: int, rows: tuple[int, ...], receivers: Collection[PeerId] = (), idle: Collection[PeerId] = ()
) -> Round:
    everybody = peers_of(GRID)
    ballot, receivers = Ballot(1, everybody[0]), tuple(receivers or peers_of(rows))
    shares = tuple(
        (peer, Generation(1, 0), frozenset() if peer in idle else frozenset({everybody.index(peer)}))
        for peer in receivers
    )
    return Round(STAMP, RoundId(ballot, number), shares, receivers, (), rows=rows)


class Members:
    """Replicas of one stage that call each other directly. `fails` says which calls break.

    Each has its own integers in the accumulator or, with local sync, its own pseudo-gradient.
    """

    def __init__(self, manifest: Manifest, compute: ComputeThread, peers: Collection[PeerId]) -> None:
        self.manifest, self.compute = manifest, compute
        self.fails: Callable[[PeerId, Part], bool] = lambda peer, part: False
        self.engines: dict[PeerId, TorchEngine] = {}
        self.exchanges: dict[PeerId, Exchange] = {}
        self.vectors: dict[PeerId, Tensor] = {}
        self.heard: list[tuple[PeerId, str]] = []
        transport = FakeTransport(
            lambda peer, part: PeerGone("broke off") if self.fails(peer, part) else self.exchanges[peer].serve(part)
        )
        for peer in peers:
            engine = torch_engine(manifest, 0, compute, DeviceBackend(manifest.of_stage(0)))
            self.engines[peer] = engine
            self.exchanges[peer] = Exchange(
                ExchangeContext(
                    peer,
                    engine.sums,
                    transport,
                    num_tokens=TOKENS,
                    group_size=3,
                    running_s=0.05,
                    on_event=lambda event, fields, peer=peer: self.heard.append((peer, event)),
                )
            )

    async def begin(self) -> Members:
        """At version 1: no outer step is in step 0."""
        for place, (peer, engine) in enumerate(self.engines.items()):
            await engine.restore(await engine.snapshot(), version=0, becomes=STAMP.step)
            self.vectors[peer] = self.fill(engine, place)
        return self

    @staticmethod
    def fill(engine: TorchEngine, place: int) -> Tensor:
        """Returns what it contributes."""
        size, seeded = engine.sums.num_elements, torch.Generator().manual_seed(place)
        accumulator, step = engine._accumulators[0], STAMP.step
        if not isinstance(engine.sums, LocalSum):
            held = accumulator.read(step)
            return held.copy_((torch.randn(size, generator=seeded) * 1000).long())
        assert accumulator.add([torch.zeros(size)], NoRounding(), step=step, index=0, discards=engine.discards(step))
        outer = engine._state.outer
        assert outer is not None
        for weight in engine._state.newest:
            with torch.no_grad():
                weight.sub_(torch.randn(weight.shape, generator=seeded) * 10.0**place)
        return outer.vector(0, size)

    async def sum(self, current: Round) -> Finished:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.exchanges[peer].sum(current, dict.fromkeys(indexes, (1.0, TOKENS))))
                for peer, _, indexes in current.contributions
            ]
        assert len({task.result() for task in tasks}) == 1
        assert len({self.total(peer).numpy().tobytes() for peer in current.receivers}) == 1
        return tasks[0].result()

    def close(self) -> None:
        for exchange in self.exchanges.values():
            exchange.close()
        self.fails = lambda peer, part: False

    async def apply(self, finished: Finished, peers: Collection[PeerId] = ()) -> None:
        done = replace(commit(0, STAMP.step, finished.digest, 1.0, TOKENS, finished.grad_sq_norm), id=finished.id)
        for peer in peers or self.engines:
            await self.engines[peer].apply([done])

    def total(self, peer: PeerId) -> Tensor:
        sums = self.engines[peer].sums
        return (sums._exchanged if isinstance(sums, LocalSum) else sums._sum).flat

    def residual(self, peer: PeerId) -> torch.Tensor:
        residual = self.engines[peer].sums.codec.residual
        assert residual is not None
        return residual

    def residuals(self) -> list[Tensor]:
        return [self.residual(peer).clone() for peer in self.engines]


def run_of(codec: str, microbatches: int) -> Manifest:
    local = codec not in ("int64", "small")
    sync = {"sync": "local", "inner_steps": 1, "outer_warmup_steps": 0} if local else {}
    averaging = Averaging(codec=codec, **sync)
    return tiny(
        1, mode="fp32" if local else "deterministic", model=MODEL, microbatches=microbatches, averaging=averaging
    )


@contextlib.asynccontextmanager
async def members_of(codec: str, rows: tuple[int, ...]) -> AsyncIterator[Members]:
    peers = peers_of(rows)
    async with compute_thread() as compute, asyncio.timeout(60):
        yield await Members(run_of(codec, len(peers)), compute, peers).begin()


@pytest.mark.parametrize("rows", [ONE, GRID], ids=["one group", "grid"])
@pytest.mark.parametrize(
    ("codec", "near"), [("int64", 0.0), ("small", 0.0), ("fp32", 1e-6), ("fp16", 1e-3), ("int8", 2e-2), ("nf4", 0.25)]
)
async def test_all_hold_the_same_sum_and_it_is_near(codec: str, near: float, rows: tuple[int, ...]) -> None:
    async with members_of(codec, rows) as members:
        finished = await members.sum(round_of(1, rows))
        assert finished.num_tokens == sum(rows) * TOKENS
        exact = sum(vector.double() for vector in members.vectors.values())
        assert (members.total(PeerId("a")).double() - exact).norm() <= near * exact.norm()


@pytest.mark.parametrize(("rows", "idle"), [(ONE, "b"), (GRID, "")], ids=["one group", "grid"])
async def test_what_is_not_in_the_sum_is_owed(rows: tuple[int, ...], idle: str) -> None:
    """On any hop, and also where one replica contributes nothing and only reduces."""
    async with members_of("nf4", rows) as members:
        finished = await members.sum(round_of(1, rows, idle=tuple(map(PeerId, idle))))
        assert not any(bool(residual.any()) for residual in members.residuals()), "not applied yet"
        total = members.total(PeerId("a")).double()
        await members.apply(finished)
        computed = sum(vector.double() for peer, vector in members.vectors.items() if peer not in idle)
        owed = sum(residual.double() for residual in members.residuals())
        assert (total + owed - computed).norm() <= 1e-5 * computed.norm() and owed.norm() > 1e-3 * computed.norm()


async def test_a_round_that_is_abandoned_half_way_changes_nothing() -> None:
    """The first round breaks at its end, the second is of two, the third of all three is applied."""
    async with members_of("nf4", ONE) as members:
        last = members.engines[PeerId("a")].sums.phases[0] - 1
        members.fails = lambda peer, part: part.kind == "reduced" and part.stop > last
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await members.sum(round_of(1, ONE))
        members.close()
        await members.sum(round_of(2, (2,), peers_of((2,))))
        finished = await members.sum(round_of(3, ONE))
        total = members.total(PeerId("a")).clone()
        await members.apply(finished)

        undisturbed = await Members(members.manifest, members.compute, peers_of(ONE)).begin()
        expected = await undisturbed.sum(round_of(3, ONE))
        assert expected == finished and torch.equal(undisturbed.total(PeerId("a")), total)
        await undisturbed.apply(expected)
        assert all(map(torch.equal, members.residuals(), undisturbed.residuals()))


async def test_a_collected_sum_of_a_round_i_took_part_in_counts_as_sent() -> None:
    async with members_of("nf4", ONE) as members:
        finished = await members.sum(round_of(1, ONE))
        late, holder = members.engines[PeerId("c")].sums, members.engines[PeerId("a")].sums
        await take_over(late, await holder.finished_sum(0, sum(holder.phases)))
        await members.apply(finished)
        assert bool(members.residual(PeerId("c")).any())


async def test_a_replica_that_takes_over_a_state_owes_nothing() -> None:
    async with members_of("nf4", ONE) as members:
        await members.apply(await members.sum(round_of(1, ONE)))
        replica = members.engines[PeerId("a")]
        assert bool(replica.sums.codec.residual.any())
        await replica.restore(await replica.snapshot(), version=STAMP.step + 1)
        assert not bool(replica.sums.codec.residual.any()), "it was owed by another past"


@pytest.mark.parametrize("codec", ["small", "int64"])
async def test_a_finished_sum_is_handed_on_in_any_pieces(codec: str) -> None:
    async with members_of(codec, ONE) as members:
        finished = await members.sum(round_of(1, ONE))
        holder, late = (members.engines[peer].sums for peer in peers_of((2,)))
        edge, end = 256, holder.num_elements
        pieces = [await holder.finished_sum(0, edge), await holder.finished_sum(edge, end)]
        assert await take_over(late, *pieces) == (finished.digest, finished.grad_sq_norm)
        assert sum(piece.num_bytes for piece in pieces) <= 2 * end, "of 13 bits each"


def test_rows_of_these_rounds_are_what_the_tests_say() -> None:
    assert [len(row) for row in grid_of(round_of(1, GRID)).rows] == list(GRID)
