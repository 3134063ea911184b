"""A whole swarm's arithmetic without a swarm: stage engines chained in one process, payloads through the codecs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Sequence

import numpy as np
import torch

from swarmnet.data.sampler import Sampler
from swarmnet.data.tokens import Tokens
from swarmnet.engine.compute_thread import ComputeThread, Work
from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.ids import Ballot, Chain, PeerId, RoundId
from swarmnet.manifest.schema import Averaging, Cut, Manifest, Model, Numerics, Optimizer, Training
from swarmnet.messages import Commit, Packed
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.stage.interfaces import Contribution, SavedActivations, Summation
from swarmnet.stage.passes import MemoryPolicy
from swarmnet.wire import codecs

MODEL = Model(
    vocab_size=61, hidden_size=32, intermediate_size=56, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8
)

ROUND = RoundId(Ballot(0, PeerId("peer")), 0)
"""Of every step: ids repeat from step to step."""


def tiny(
    stages: int = 2,
    *,
    mode: str = "deterministic",
    model: Model = MODEL,
    microbatches: int = 4,
    layers: str | tuple[int, ...] = "auto",
    averaging: Averaging | None = None,
    eval_every: int = 0,
    **optimizer: object,
) -> Manifest:
    """A run of seconds: 20 steps, sequences of 16 tokens."""
    return Manifest(
        model=model,
        cut=Cut(stages=stages, layers=layers),
        training=Training(
            seed=3,
            total_steps=20,
            microbatches=microbatches,
            microbatch_size=2,
            sequence_length=16,
            eval_every=eval_every,
        ),
        optimizer=Optimizer(**{"learning_rate": 3e-3, "warmup_steps": 4} | optimizer),
        numerics=Numerics(mode=mode),
        averaging=averaging or Averaging(codec="int64"),
    )


def text(vocab_size: int = 61) -> Tokens:
    """A stream with something to learn: a noisy walk."""
    walk = np.random.default_rng(5).integers(0, 3, 6000).cumsum() % vocab_size
    return Tokens(walk.astype(np.uint8), vocab_size=vocab_size, source="walk", tokenizer_sha256="0" * 64)


def batch_of(manifest: Manifest, tokens: Tokens, step: int, index: int) -> Packed:
    """Microbatch (step, index) as it travels."""
    training = manifest.training
    sampler = Sampler(training.seed, tokens.num_tokens, training.sequence_length, training.microbatch_size)
    positions = sampler.positions(step * training.microbatches + index)
    return codecs.encode("int32", tokens.microbatch(positions, training.sequence_length))


async def take_over(sums: Summation, *pieces: Packed, start: int = 0) -> tuple[bytes, float]:
    """Put a finished sum, in these pieces, the first at position `start`, into a replica's buffer."""
    await sums.open_sum()
    for piece in pieces:
        await sums.put(start, piece)
        start += piece.shape[0]
    return await sums.seal()


class StageChain:
    """stages x replicas engines; `step` trains one step with every index at some replica of each stage.

    step_number: the version of all, and of what a round is about. memory: of the replicas of each stage.
    """

    def __init__(
        self,
        manifest: Manifest,
        compute: ComputeThread,
        *,
        replicas: int = 1,
        device: str = "cpu",
        memory: Sequence[MemoryPolicy] = (),
    ) -> None:
        self.manifest, self.tokens = manifest, text(manifest.model.vocab_size)
        self.engines = [
            [
                torch_engine(
                    manifest, stage, compute, DeviceBackend(manifest.of_stage(stage), device=device, memory=each)
                )
                for each in memory or [MemoryPolicy()] * replicas
            ]
            for stage in range(manifest.cut.stages)
        ]
        self.step_number = 0

    async def forward(
        self, route: Sequence[TorchEngine], index: int, *, train: bool = True, step: int | None = None
    ) -> list[SavedActivations]:
        """One microbatch forward through the engines of `route`; step: the oldest open one by default."""
        step = self.step_number if step is None else step
        payload: tuple[Packed, ...] = (batch_of(self.manifest, self.tokens, step, index),)
        stashes = []
        for engine in route:
            stashes.append(await engine.forward(step, index, payload, train=train))
            payload = stashes[-1].output
        return stashes

    async def travel(
        self, route: Sequence[TorchEngine], index: int, *, step: int | None = None
    ) -> list[SavedActivations]:
        """Forward and the input gradients back; weight gradients still owed."""
        stashes = await self.forward(route, index, step=step)
        gradient: tuple[Packed, ...] = ()
        for engine, stash in zip(reversed(route), reversed(stashes), strict=True):
            gradient = await engine.backward(stash, gradient)
        assert gradient == ()
        return stashes

    async def step(self, rng: random.Random, *, parts: int = 1) -> float:
        """Train one step, indexes in random order, at random replicas; returns the step's mean loss."""
        loss, tokens = await self.compute(rng, self.step_number)
        await self.finish(loss, tokens, parts=parts)
        return loss / tokens

    async def compute(self, rng: random.Random, step: int) -> tuple[float, int]:
        """All microbatches of an open step, each counted by one replica of each stage: (loss sum, tokens)."""
        indexes = list(range(self.manifest.training.microbatches))
        rng.shuffle(indexes)
        losses: dict[int, tuple[float, int]] = {}
        owed = []
        for index in indexes:
            route = [rng.choice(replicas) for replicas in self.engines]
            stashes = await self.travel(route, index, step=step)
            losses[index] = stashes[-1].loss_sum, stashes[-1].num_tokens
            owed += zip(route, stashes, strict=True)
        rng.shuffle(owed)
        for engine, stash in owed:
            assert await engine.accumulate(stash)
        loss, tokens = 0.0, 0
        for index in sorted(losses):
            loss += losses[index][0]
            tokens += losses[index][1]
        return loss, tokens

    async def finish(self, loss: float, num_tokens: int, *, parts: int = 1) -> None:
        """Average every stage's accumulators, commit, apply everywhere."""
        commits = []
        for stage, replicas in enumerate(self.engines):
            await self.all_reduce(replicas, parts)
            installed = {await engine.sums.seal() for engine in replicas}
            assert len(installed) == 1
            digest, square = installed.pop()
            commits.append(commit(stage, self.step_number, digest, loss, num_tokens, square))
        for replicas in self.engines:
            for engine in replicas:
                await engine.apply(commits)
        self.step_number += 1

    async def all_reduce(self, replicas: Sequence[TorchEngine], parts: int) -> None:
        """A round of one stage up to `seal`, every phase of it in `parts` parts."""
        for engine in replicas:
            await engine.sums.open_round(ROUND)
            await engine.sums.open_sum()
        for span in itertools.pairwise(itertools.accumulate(replicas[0].sums.phases, initial=0)):
            for start, packed in await self.reduced(replicas, parts, span):
                for engine in replicas:
                    await engine.sums.put(start, packed)

    async def reduced(
        self, replicas: Sequence[TorchEngine], parts: int, span: tuple[int, int]
    ) -> list[tuple[int, Packed]]:
        """(start, sum) of each part of the positions in `span`."""
        first, last = span
        edges = [first + (last - first) * part // parts for part in range(parts + 1)]
        return [
            (
                start,
                (
                    await replicas[part % len(replicas)].sums.reduce(
                        [
                            Contribution(PeerId(f"replica{place}"), 1, await engine.sums.contribution(start, stop))
                            for place, engine in enumerate(replicas)
                        ],
                        start,
                        stop,
                    )
                ).packed,
            )
            for part, (start, stop) in enumerate(itertools.pairwise(edges))
        ]

    async def weights(self, replica: int = 0) -> dict[str, torch.Tensor]:
        """All weights of the run, from the given replica of each stage."""
        found: dict[str, torch.Tensor] = {}
        for replicas in self.engines:
            found |= await weights_of(replicas[replica])
        return found


async def weights_of(engine: TorchEngine) -> dict[str, torch.Tensor]:
    """Copies of the weights by name, on the CPU."""
    state = engine._state

    def copied() -> dict[str, torch.Tensor]:
        pairs = zip(state.canonical.shapes, state.newest, strict=True)
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in pairs}

    return await engine._jobs.run(Work.STATE, engine.version, 0, copied)


def commit(stage: int, step: int, digest: bytes, loss: float, num_tokens: int, square: float) -> Commit:
    """A commit as the protocol would have made it."""
    return Commit(stage, step, Chain(""), ROUND, digest, num_tokens, loss, square)


@contextlib.asynccontextmanager
async def compute_thread() -> AsyncIterator[ComputeThread]:
    """A compute thread for one test."""
    compute = ComputeThread()
    try:
        yield compute
    finally:
        await asyncio.to_thread(compute.close)


@contextlib.asynccontextmanager
async def chain_of(manifest: Manifest, *, replicas: int = 1) -> AsyncIterator[StageChain]:
    """A chain whose engines compute on a thread of its own."""
    async with compute_thread() as compute:
        yield StageChain(manifest, compute, replicas=replicas)
