"""Whole rounds under every codec, real engines and exchanges in one process: equal bits, nothing lost, retries too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from stage_chain import Direct, commit, compute_thread, tiny

from swarmnet.averaging.exchange import Exchange
from swarmnet.engine.compute_thread import ComputeThread
from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.errors import BadMessage
from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.manifest.schema import Averaging, Manifest, Model
from swarmnet.messages import Finished, Part, Round, Stamp
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.accumulator import Accumulator
from swarmnet.stage.rounding import NoRounding
from swarmnet.sums.feedback import Feedback

MODEL = Model(
    vocab_size=64, hidden_size=64, intermediate_size=112, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16
)
PEERS = tuple(map(PeerId, "abc"))
STAMP = Stamp(0, 0, Chain("00" * 32))
CODECS = ("fp32", "bf16", "fp16", "int8", "bnb8", "nf4", "auto", "auto:nf4", "topk:0.05", "powersgd:2")
OWING = ("nf4", "auto:nf4", "topk:0.05", "powersgd:2")


def round_of(number: int, receivers: tuple[PeerId, ...] = PEERS, idle: tuple[PeerId, ...] = ()) -> Round:
    ballot = Ballot(1, PEERS[0])
    shares = tuple(
        (peer, Generation(1, 0), frozenset() if peer in idle else frozenset({PEERS.index(peer)})) for peer in receivers
    )
    return Round(STAMP, ballot, RoundId(ballot, number), shares, receivers, ())


@dataclass
class Member:
    engine: TorchEngine
    exchange: Exchange
    gradient: torch.Tensor

    @property
    def feedback(self) -> Feedback:
        feedback = self.engine.sums.codec.feedback
        assert feedback is not None
        return feedback


class Members(Direct):
    """Replicas of one stage that call each other directly. `fails` says which calls break."""

    def __init__(self, manifest: Manifest, compute: ComputeThread) -> None:
        self.manifest, self.compute = manifest, compute
        self.fails: Callable[[PeerId, Part], bool] = lambda peer, part: False
        self.all: dict[PeerId, Member] = {}
        self.exchanges: dict[PeerId, Exchange] = {}
        for place, peer in enumerate(PEERS):
            engine = torch_engine(manifest, 0, compute, DeviceBackend(manifest.of_stage(0)))
            gradient = (
                torch.randn(engine.sums.num_elements, generator=torch.Generator().manual_seed(place)) * 10.0**place
            )
            self.fill(engine._accumulators[0], engine, gradient)
            exchange = Exchange(peer, engine.sums, self, num_tokens=10, running_s=0.05)
            self.all[peer], self.exchanges[peer] = Member(engine, exchange, gradient), exchange

    @staticmethod
    def fill(accumulator: Accumulator, engine: TorchEngine, gradient: torch.Tensor) -> None:
        assert accumulator.add(
            [gradient], NoRounding(), step=engine.version, index=0, voids=engine.voids(engine.version)
        )

    async def sum(self, current: Round) -> list[Finished]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.all[peer].exchange.sum(current, dict.fromkeys(indexes, (1.0, 10))))
                for peer, _, indexes in current.contributions
            ]
        return [task.result() for task in tasks]

    async def apply(self, finished: Finished) -> None:
        done = replace(commit(0, 0, finished.digest, 1.0, 10, finished.grad_sq_norm), id=finished.id)
        for member in self.all.values():
            await member.engine.apply([done])

    def total(self, peer: PeerId = PEERS[0]) -> torch.Tensor:
        return self.all[peer].engine.sums._sum.flat.double()


def play(codec: str, story: Callable[[Members], object]) -> None:
    async def whole() -> None:
        manifest = tiny(1, mode="fp32", model=MODEL).model_copy(update={"averaging": Averaging(codec=codec)})
        async with compute_thread() as compute, asyncio.timeout(60):
            await story(Members(manifest, compute))

    asyncio.run(whole())


@pytest.mark.parametrize("codec", CODECS)
def test_all_hold_the_same_sum_and_it_is_near(codec: str) -> None:
    async def story(members: Members) -> None:
        told = await members.sum(round_of(1))
        assert told[0] == told[1] == told[2] and told[0].num_tokens == 30
        sums = {member.engine.sums._sum.flat.numpy().tobytes() for member in members.all.values()}
        assert len(sums) == 1
        exact = sum(member.gradient.double() for member in members.all.values())
        near = {
            "fp32": 1e-6,
            "bf16": 1e-2,
            "fp16": 1e-3,
            "int8": 2e-2,
            "bnb8": 3e-2,
            "nf4": 0.2,
            "auto": 2e-2,
            "auto:nf4": 0.2,
        }.get(codec, 1.0)
        assert (members.total() - exact).norm() <= near * exact.norm()

    play(codec, story)


@pytest.mark.parametrize("codec", OWING)
def test_what_is_not_in_the_sum_is_owed(codec: str) -> None:
    """Also where one replica contributes nothing and only reduces."""

    async def story(members: Members) -> None:
        idle = (PEERS[1],)
        (finished, *_) = await members.sum(round_of(1, idle=idle))
        assert not any(bool(member.feedback.residual.any()) for member in members.all.values()), "not applied yet"
        total = members.total()
        await members.apply(finished)
        computed = sum(m.gradient.double() for peer, m in members.all.items() if peer not in idle)
        owed = sum(member.feedback.residual.double() for member in members.all.values())
        assert (total + owed - computed).norm() <= 1e-5 * computed.norm() and owed.norm() > 1e-3 * computed.norm()

    play(codec, story)


@pytest.mark.parametrize("codec", OWING)
def test_a_round_that_is_abandoned_half_way_changes_nothing(codec: str) -> None:
    """The first round breaks in its last phase, the second is of two, the third of all three is applied."""

    async def story(members: Members) -> None:
        last = sum(members.all[PEERS[0]].engine.sums.phases) - 1
        members.fails = lambda peer, part: part.kind == "reduced" and part.stop > last
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await members.sum(round_of(1))
        for member in members.all.values():
            member.exchange.close()
        members.fails = lambda peer, part: False
        await members.sum(round_of(2, PEERS[:2]))
        (finished, *_) = await members.sum(round_of(3))
        total = members.total()
        await members.apply(finished)
        residuals = [member.feedback.residual.clone() for member in members.all.values()]

        undisturbed = Members(members.manifest, members.compute)
        (expected, *_) = await undisturbed.sum(round_of(3))
        assert expected == finished and torch.equal(undisturbed.total(), total)
        await undisturbed.apply(expected)
        for residual, member in zip(residuals, undisturbed.all.values(), strict=True):
            assert torch.equal(residual, member.feedback.residual)

    play(codec, story)


@pytest.mark.parametrize("codec", OWING)
def test_a_collected_sum_of_a_round_i_took_part_in_counts_as_sent(codec: str) -> None:
    async def story(members: Members) -> None:
        (finished, *_) = await members.sum(round_of(1))
        late, holder = members.all[PEERS[2]], members.all[PEERS[0]]
        whole = await holder.engine.sums.finished_sum(0, holder.engine.sums.num_elements)
        await late.engine.sums.install([whole])
        await members.apply(finished)
        assert bool(late.feedback.residual.any())

    play(codec, story)


@pytest.mark.parametrize(("codec", "most"), [("int8", 1.1), ("bf16", 2.0), ("fp16", 2.1), ("fp32", 4.0)])
def test_a_finished_sum_is_handed_on_in_the_bytes_it_was_reduced_in(codec: str, most: float) -> None:
    async def story(members: Members) -> None:
        (finished, *_) = await members.sum(round_of(1))
        holder, late = (members.all[peer].engine.sums for peer in PEERS[:2])
        edge, end = 256, holder.num_elements
        pieces = [await holder.finished_sum(0, edge), await holder.finished_sum(edge, end)]
        assert await late.install(pieces) == (finished.digest, finished.grad_sq_norm)
        assert sum(piece.num_bytes for piece in pieces) <= most * end
        unpacked = [await late.unpack(piece) for piece in pieces]
        assert await late.install(unpacked) == (finished.digest, finished.grad_sq_norm)

    play(codec, story)


@pytest.mark.parametrize("codec", ["powersgd:2"])
def test_directions_are_learned_by_all_that_summed(codec: str) -> None:
    async def story(members: Members) -> None:
        before = members.all[PEERS[0]].engine.sums.codec.low_rank.directions
        (finished, *_) = await members.sum(round_of(1))
        await members.apply(finished)
        after = [member.engine.sums.codec.low_rank.directions for member in members.all.values()]
        assert torch.equal(after[0], after[1]) and torch.equal(after[0], after[2]) and not torch.equal(after[0], before)

    play(codec, story)


@pytest.mark.parametrize("codec", OWING)
def test_what_is_owed_survives_a_restart_of_its_replica(codec: str) -> None:
    async def story(members: Members) -> None:
        (finished, *_) = await members.sum(round_of(1))
        await members.apply(finished)
        old = members.all[PEERS[0]]
        state, (version, owed) = await old.engine.snapshot(), await old.engine.sums.memory()
        assert version == 1 and owed is not None
        manifest = members.manifest
        new = torch_engine(manifest, 0, members.compute, DeviceBackend(manifest.of_stage(0)))
        with pytest.raises(BadMessage, match="not the snapshot asked for"):
            await new.sums.recall(owed)  # not before its state is back
        await new.restore(state, version=version)
        assert not bool(new.sums.codec.feedback.residual.any())
        await new.sums.recall(owed)
        assert torch.equal(new.sums.codec.feedback.residual, old.feedback.residual)
        assert bytes((await new.sums.memory())[1]) == bytes(owed)
        await new.restore(state, version=version)  # other state: what was owed was owed by another past
        await new.sums.open_round(round_of(9).id)
        assert not bool(new.sums.codec.feedback.residual.any())

    play(codec, story)


def test_codecs_that_owe_nothing_save_nothing() -> None:
    async def story(members: Members) -> None:
        assert await members.all[PEERS[0]].engine.sums.memory() == (0, None)

    play("int8", story)
