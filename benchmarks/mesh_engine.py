"""benchmarks/mesh.py's third part: microbatches through an engine whose stage is on ranks, and through one in process.

Both are `TorchEngine`s of the middle stage of three, fed with payloads as they come from the wire and asked for what
leaves. The difference is all that a mesh adds: shared memory, orders, and what ranks compute in step.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import torch
from mesh_tensor import BACKWARDS, MICROBATCHES, Case

from swarmnet.engine.compute_thread import ComputeThread
from swarmnet.engine.torch_engine import TorchEngine
from swarmnet.ids import Ballot, PeerId, RoundId
from swarmnet.manifest.schema import Averaging, Cut, Manifest, Numerics, Training
from swarmnet.messages import Packed
from swarmnet.peer.engines import torch_engine
from swarmnet.ranks.backend import MeshBackend
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.ranks.layout import MeshLayout
from swarmnet.wire import codecs

STAGE = 1


def manifest_of(case: Case) -> Manifest:
    """The middle stage of three has the case's layers."""
    layers = case.model.num_layers
    return Manifest(
        model=case.model.model_copy(update={"num_layers": layers + 2}),
        cut=Cut(stages=3, layers=(1, layers, 1)),
        numerics=Numerics(mode="fast", compute=case.compute),
        averaging=Averaging(codec="int64"),
        training=Training(
            total_steps=10,
            microbatches=MICROBATCHES,
            microbatch_size=case.microbatch_size,
            sequence_length=case.sequence_length,
            eval_every=0,
        ),
    )


class Fed:
    """An engine and what it is fed with."""

    def __init__(self, engine: TorchEngine, manifest: Manifest) -> None:
        self._engine = engine
        generator, training = torch.Generator().manual_seed(2), manifest.training
        rows, length, width = training.microbatch_size, training.sequence_length, manifest.model.hidden_size

        def packed() -> Packed:
            return codecs.encode("fp32", torch.randn(rows, length, width, generator=generator))

        tokens = torch.randint(manifest.model.vocab_size, (rows, length + 1), generator=generator, dtype=torch.int32)
        self._inputs = [(codecs.encode("int32", tokens), packed()) for _ in range(MICROBATCHES)]
        self._gradients = [(packed(),) for _ in range(MICROBATCHES)]

    async def step(self) -> list[Packed]:
        """All microbatches of a step, counted; what left: activations and input gradients."""
        self._engine.void()
        stashes = [
            await self._engine.forward(0, index, payload, train=True) for index, payload in enumerate(self._inputs)
        ]
        left = [stash.output[1] for stash in stashes]
        for index in BACKWARDS:
            left += await self._engine.backward(stashes[index], self._gradients[index])
        for index in BACKWARDS:
            assert await self._engine.accumulate(stashes[index])
        return left

    async def total(self) -> Packed:
        """The sum of the gradients."""
        await self._engine.sums.open_round(RoundId(Ballot(0, PeerId("benchmark")), 0))
        return await self._engine.sums.contribution(0, self._engine.sums.num_elements)


@contextlib.contextmanager
def engines(case: Case, devices: list[str]) -> Iterator[dict[str, Fed]]:
    """One in this process, on the first device, and one on ranks that split each layer."""
    manifest, compute = manifest_of(case), ComputeThread()
    mesh = MeshLayout(tensor=len(devices), devices=tuple(devices))
    with contextlib.ExitStack() as stack:
        stack.callback(compute.close)
        here = torch_engine(manifest, STAGE, compute, DeviceBackend(manifest.of_stage(STAGE), device=devices[0]))
        there = torch_engine(manifest, STAGE, compute, MeshBackend(manifest.of_stage(STAGE), mesh))
        stack.callback(there.close)
        yield {"mesh": Fed(there, manifest), "in process": Fed(here, manifest)}


def microbatches(case: Case, devices: list[str]) -> dict[str, list[float] | float]:
    """Seconds per microbatch and turn of either, and how far what they computed is apart, relative."""
    torch.set_num_threads(1)
    with engines(case, devices) as fed:
        return asyncio.run(_measure(case, fed))


async def _measure(case: Case, fed: dict[str, Fed]) -> dict[str, list[float] | float]:
    seen = {name: [*await each.step(), await each.total()] for name, each in fed.items()}
    difference = max(_difference(a, b) for a, b in zip(*seen.values(), strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in fed}
    for turn in range(1 + case.turns):  # the first warms up
        for name in list(fed)[:: 1 if turn % 2 else -1]:  # nobody always goes first
            began = time.perf_counter()
            for _ in range(case.repeats):
                await fed[name].step()
            took = (time.perf_counter() - began) / (case.repeats * MICROBATCHES)
            seconds[name] += [took] if turn else []
    return {**seconds, "difference": difference}


def _difference(one: Packed, other: Packed) -> float:
    ours, theirs = codecs.decode(one), codecs.decode(other)
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
