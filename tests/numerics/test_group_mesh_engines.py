"""Rounds over a group mesh with real engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import torch
from stage_chain import Direct, compute_thread, tiny
from torch import Tensor

from swarmnet.averaging.exchange import Exchange
from swarmnet.averaging.grid import grid_of
from swarmnet.engine.compute_thread import ComputeThread
from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.manifest.schema import Manifest, Model
from swarmnet.messages import Finished, Part, Round, Stamp
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.rounding import FineRounding

MODEL = Model(
    vocab_size=64, hidden_size=64, intermediate_size=112, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=16
)
PEERS = tuple(PeerId(name) for name in "abcdefg")
STAMP = Stamp(0, 0, Chain("00" * 32))
TOKENS = 10


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
                [self.gradients[peer]], FineRounding(32, 7), step=0, index=0, voids=engine.voids(0)
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


def play(story: Callable[[Members], object]) -> None:
    async def whole() -> None:
        manifest = tiny(1, model=MODEL, microbatches=7)
        async with compute_thread() as compute, asyncio.timeout(60):
            members = Members(manifest, compute)
            members.fill()
            await story(members)

    asyncio.run(whole())


def test_all_hold_the_sum_of_what_was_accumulated() -> None:
    async def story(members: Members) -> None:
        finished = await members.sum(round_of(1))
        assert finished.num_tokens == 7 * TOKENS
        total = members.engines[PEERS[0]].sums._sum.flat
        assert torch.equal(total, sum(engine._accumulators[0].read(0) for engine in members.engines.values()))

    play(story)


def test_rows_of_these_rounds_are_what_the_tests_say() -> None:
    assert [len(row) for row in grid_of(round_of(1)).rows] == [3, 2, 2]
