"""Codecs that owe something: a run that was killed and resumed from its disks has the bits of one that never was."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from stage_chain import StageChain, compute_thread, tiny

from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.errors import BadCheckpoint
from swarmnet.ids import Chain, RunId
from swarmnet.manifest.schema import Averaging, Manifest, Model
from swarmnet.messages import StateHeader
from swarmnet.state.checkpoints import Checkpointer, CheckpointSchedule
from swarmnet.state.disk import CheckpointStore, DirectoryDisk

RUN, KILLED, LAST = RunId("a1" * 32), 3, 6
HASH = Chain("00" * 32)
MODEL = Model(
    vocab_size=64, hidden_size=64, intermediate_size=112, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16
)


class Kept:
    """A chain of engines whose every replica has a disk of its own."""

    def __init__(self, chain: StageChain, folder: Path) -> None:
        self.chain, self.said = chain, list[dict[str, object]]()
        self.checkpoints = {
            engine: Checkpointer(
                stage,
                engine,
                engine.sums,
                self._where,
                DirectoryDisk(CheckpointStore(folder / f"{stage}-{place}", RUN, owner=f"{stage}-{place}")),
                CheckpointSchedule(every=KILLED, last=LAST),
                keep=3,
                on_event=lambda event, fields: self.said.append({"event": event, **fields}),
            )
            for stage, replicas in enumerate(chain.engines)
            for place, engine in enumerate(replicas)
        }

    def _where(self) -> StateHeader:
        return StateHeader(self.chain.step_number, HASH, HASH, HASH)

    async def write(self) -> None:
        for checkpointer in self.checkpoints.values():
            written = await checkpointer.write_now()
            assert written is not None and written.problem is None

    async def load(self, version: int) -> None:
        """As a replica does that comes back."""
        for engine, checkpointer in self.checkpoints.items():
            assert version in await checkpointer.open()
            _, data = await checkpointer.load(version)
            await engine.restore(data, version=version)
            await checkpointer.recall(version)
        self.chain.step_number = version


async def train(chain: StageChain, until: int) -> None:
    while chain.step_number < until:
        await chain.step(random.Random(chain.step_number))


def bits(chain: StageChain) -> list[torch.Tensor]:
    """Weights of all replicas, and what they owe."""
    found = []
    for engine in (engine for replicas in chain.engines for engine in replicas):
        found += [parameter.detach().clone() for parameter in engine._state.newest]
        found += [tensor.clone() for tensor in engine.sums.codec.memory.values()]
    return found


def equal(one: StageChain, other: StageChain) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


def play(codec: str, story: Callable[[Callable[[], StageChain]], Awaitable[None]]) -> None:
    async def whole() -> None:
        manifest: Manifest = tiny(
            2,
            mode="fp32",
            model=MODEL,
            averaging=Averaging(sync="local", codec=codec, inner_steps=1, outer_warmup_steps=0),
        )
        async with compute_thread() as compute, asyncio.timeout(60):
            await story(lambda: StageChain(manifest, compute, replicas=2))

    asyncio.run(whole())


def test_killed_and_resumed_the_bits_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    async def story(new: Callable[[], StageChain]) -> None:
        undisturbed, killed, resumed = new(), new(), new()
        await train(undisturbed, LAST)
        await train(killed, KILLED)
        await Kept(killed, tmp_path).write()
        kept = Kept(resumed, tmp_path)
        await kept.load(KILLED)
        assert equal(killed, resumed) and not kept.said
        await train(resumed, LAST)
        assert equal(undisturbed, resumed)

        forgetful = new()
        for checkpointer in (kept := Kept(forgetful, tmp_path)).checkpoints.values():
            disk = checkpointer._disk
            assert isinstance(disk, DirectoryDisk)
            disk.store.owed_path(checkpointer._stage, KILLED).write_bytes(b"damaged")
        await kept.load(KILLED)
        named = [str(said["path"]) for said in kept.said]
        assert len(named) == 4 and all(path.endswith(".owed") for path in named), "named, and not used"
        await train(forgetful, LAST)
        assert not equal(undisturbed, forgetful), "it is the debts that make the bits"

    play("nf4", story)


def test_codecs_that_owe_nothing_write_nothing_beside(tmp_path: Path) -> None:
    async def story(new: Callable[[], StageChain]) -> None:
        chain = new()
        await train(chain, 1)
        await Kept(chain, tmp_path).write()

    play("int8", story)
    assert not list(tmp_path.rglob("*.owed")) and len(list(tmp_path.rglob("*.json"))) == 4


def test_a_joiner_owes_nothing_whoever_it_has_its_state_from(tmp_path: Path) -> None:
    async def story(new: Callable[[], StageChain]) -> None:
        chain = new()
        await train(chain, 2)
        donor: TorchEngine = chain.engines[0][0]
        joiner: TorchEngine = new().engines[0][0]
        await joiner.restore(bytes(await donor.snapshot()), version=2)
        residual = joiner.sums.codec.memory["averaging.residual"]
        assert not bool(residual.any()) and bool(donor.sums.codec.memory["averaging.residual"].any())
        checkpointer = Kept(chain, tmp_path).checkpoints[donor]
        await checkpointer.write_now()
        foreign = CheckpointStore(tmp_path / "0-0", RUN, owner="joiner")
        with pytest.raises(BadCheckpoint, match="owed by another peer"):
            foreign.owed(0, 2)

    play("nf4", story)
