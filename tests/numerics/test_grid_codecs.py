"""Rounds over a grid with real engines: equal bits under every codec, nothing lost on any hop, reducers on each."""

# ruff: noqa: ASYNC110  (real compute threads say nothing when they are done with a chunk)

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
import torch
from stage_chain import Direct, commit, compute_thread, tiny
from torch import Tensor

from swarmnet.averaging.exchange import Exchange
from swarmnet.averaging.grid import grid_of
from swarmnet.engine.compute_thread import ComputeThread
from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.manifest.schema import Averaging, Manifest, Model
from swarmnet.messages import Finished, Part, Round, Stamp
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.rounding import NoRounding

MODEL = Model(
    vocab_size=64, hidden_size=64, intermediate_size=112, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=16
)
PEERS = tuple(PeerId(name) for name in "abcdefg")
STAMP = Stamp(0, 0, Chain("00" * 32))
TOKENS = 10
OWING = ("nf4", "auto:nf4", "topk:0.05", "powersgd:2")


def round_of(number: int, receivers: Collection[PeerId] = PEERS, rows: tuple[int, ...] = (3, 2, 2)) -> Round:
    ballot = Ballot(1, PEERS[0])
    shares = tuple((peer, Generation(1, 0), frozenset({PEERS.index(peer)})) for peer in receivers)
    return Round(STAMP, ballot, RoundId(ballot, number), shares, tuple(receivers), (), rows=rows, columns=2)


class Members(Direct):
    """Replicas of one stage that call each other directly. `fails` says which calls break."""

    def __init__(self, manifest: Manifest, compute: ComputeThread) -> None:
        self.fails: Callable[[PeerId, Part], bool] = lambda peer, part: False
        self.engines: dict[PeerId, TorchEngine] = {}
        self.exchanges: dict[PeerId, Exchange] = {}
        self.gradients: dict[PeerId, Tensor] = {}
        self.heard: list[tuple[PeerId, str, dict[str, object]]] = []
        for place, peer in enumerate(PEERS):
            engine = torch_engine(manifest, 0, compute, DeviceBackend(manifest.of_stage(0)))
            self.gradients[peer] = torch.randn(engine.sums.num_elements, generator=torch.Generator().manual_seed(place))
            self.engines[peer] = engine
            self.exchanges[peer] = Exchange(
                peer,
                engine.sums,
                self,
                num_tokens=TOKENS,
                group_size=3,
                running_s=0.05,
                on_event=lambda event, fields, peer=peer: self.heard.append((peer, event, fields)),
            )

    def fill(self) -> None:
        for peer, engine in self.engines.items():
            assert engine._accumulators[0].add(
                [self.gradients[peer]], NoRounding(), step=0, index=0, voids=engine.voids(0)
            )

    async def sum(self, current: Round) -> Finished:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.exchanges[peer].sum(current, dict.fromkeys(indexes, (1.0, TOKENS))))
                for peer, _, indexes in current.contributions
            ]
        assert len({task.result() for task in tasks}) == 1
        bits = {self.engines[peer].sums._sum.flat.numpy().tobytes() for peer in current.receivers}
        assert len(bits) == 1, "whatever was lost, all hold the same"
        return tasks[0].result()

    async def break_off(self, current: Round, peers: Collection[PeerId]) -> set[PeerId]:
        """Give up as soon as these have summed over their rows what they reduce. Returns who reduces anything."""
        running = asyncio.ensure_future(self.sum(current))
        while not all(self.exchanges[peer]._open for peer in peers):
            await asyncio.sleep(0.01)
        rows = {peer: self.exchanges[peer]._open[0] for peer in peers}
        wanted = {peer: len(cut) for peer, row in rows.items() for who, cut in row.group.chunks if who == peer}
        while not all(len(rows[peer].done) == wanted[peer] for peer in wanted):
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        for exchange in self.exchanges.values():
            exchange.close()
        self.fails = lambda peer, part: False
        return set(wanted)

    async def apply(self, finished: Finished, peers: Collection[PeerId] = PEERS) -> None:
        done = replace(commit(0, 0, finished.digest, 1.0, TOKENS, finished.grad_sq_norm), id=finished.id)
        for peer in peers:
            await self.engines[peer].apply([done])

    def total(self) -> Tensor:
        return self.engines[PEERS[0]].sums._sum.flat.double()

    def owed(self, peers: Collection[PeerId]) -> Tensor:
        feedbacks = [self.engines[peer].sums.codec.feedback for peer in peers]
        return sum((feedback.residual.double() for feedback in feedbacks if feedback is not None), torch.zeros(()))

    def computed(self, peers: Collection[PeerId]) -> Tensor:
        return sum((self.gradients[peer].double() for peer in peers), torch.zeros(()))


def play(averaging: Averaging, story: Callable[[Members], object]) -> None:
    async def whole() -> None:
        manifest = tiny(1, mode="fp32", model=MODEL, microbatches=7, averaging=averaging)
        async with compute_thread() as compute, asyncio.timeout(60):
            members = Members(manifest, compute)
            members.fill()
            await story(members)

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("codec", "near"),
    [
        ("fp32", 1e-6),
        ("bf16", 1e-2),
        ("int8", 2e-2),
        ("auto", 2e-2),
        ("nf4", 0.25),
        ("topk:0.05", 1.0),
        ("powersgd:2", 1.0),
    ],
)
def test_all_hold_the_same_sum_and_it_is_near(codec: str, near: float) -> None:
    async def story(members: Members) -> None:
        finished = await members.sum(round_of(1))
        assert finished.num_tokens == 7 * TOKENS
        exact = members.computed(PEERS)
        assert (members.total() - exact).norm() <= near * exact.norm()

    play(Averaging(codec=codec), story)


@pytest.mark.parametrize("codec", OWING)
def test_what_is_lost_on_any_hop_is_owed(codec: str) -> None:
    async def story(members: Members) -> None:
        finished = await members.sum(round_of(1))
        total = members.total()
        await members.apply(finished)
        computed, owed = members.computed(PEERS), members.owed(PEERS)
        assert owed.norm() > 1e-3 * computed.norm()
        assert (total + owed - computed).norm() <= 1e-5 * computed.norm()

    play(Averaging(codec=codec), story)


@pytest.mark.parametrize("codec", OWING)
def test_so_it_is_where_sums_of_the_round_before_are_kept(codec: str) -> None:
    """A member of the last row is lost while the rows' sums are summed: the other rows' stand."""

    async def story(members: Members) -> None:
        lost, left = PEERS[6], PEERS[:6]
        members.fails = lambda peer, part: peer == lost and part.hop == 1
        reducers = await members.break_off(round_of(1), PEERS[:5])
        assert reducers
        finished = await members.sum(round_of(2, left, (3, 2, 1)))
        kept = {peer for peer, event, _ in members.heard if event == "sums_kept"}
        assert kept == (set() if codec.startswith("powersgd") else reducers)
        total = members.total()
        await members.apply(finished, left)
        computed, owed = members.computed(left), members.owed(left)
        assert (total + owed - computed).norm() <= 1e-5 * computed.norm()

    play(Averaging(codec=codec), story)


@pytest.mark.parametrize("reducer", ["norm_clip", "centered_clip"])
def test_a_liar_is_found_in_its_row_and_the_row_is_weighed_by_its_microbatches(reducer: str) -> None:
    async def story(members: Members) -> None:
        shared = torch.randn(members.engines[PEERS[0]].sums.num_elements, generator=torch.Generator().manual_seed(9))
        for peer in PEERS:
            members.engines[peer].void()
            members.gradients[peer] = shared + 0.1 * members.gradients[peer]
        honest = members.computed(PEERS)
        members.gradients[PEERS[0]] = -50.0 * members.gradients[PEERS[0]]
        members.fill()
        await members.sum(round_of(1))
        named = {fields["peer"] for _, event, fields in members.heard if event == "clipped" and fields["hop"] == 0}
        assert PEERS[0] in named
        ratio = float(members.total().norm() / honest.norm())
        assert torch.nn.functional.cosine_similarity(members.total(), honest, dim=0) > 0.98 and 0.5 < ratio < 1.1

    play(Averaging(codec="fp32", reducer=reducer), story)


def test_rows_of_these_rounds_are_what_the_tests_say() -> None:
    assert [len(row) for row in grid_of(round_of(1)).rows] == [3, 2, 2]
