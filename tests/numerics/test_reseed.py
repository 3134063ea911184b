"""A stage made from its neighbours: complete, of the right shapes, deterministic, and better than noise."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from stage_chain import MODEL, StageChain, compute_thread, tiny
from torch import Tensor

from swarmnet.errors import BadMessage
from swarmnet.manifest.schema import Manifest
from swarmnet.model.initial import draw
from swarmnet.stage import snapshot
from swarmnet.stage.torch_engine import TorchEngine
from swarmnet.state.reseed import counterpart, reseed

FIVE = MODEL.model_copy(update={"num_layers": 5})
CUTS: list[tuple[int, str | tuple[int, ...]]] = [
    (1, "auto"),
    (2, "auto"),
    (3, "auto"),
    (4, "auto"),
    (5, "auto"),
    (2, (4, 1)),
    (3, (1, 3, 1)),
    (3, (3, 1, 1)),
    (3, (2, 0, 3)),
    (3, (0, 5, 0)),
    (5, (1, 2, 1, 1, 0)),
]


def run(story: Callable[[StageChain], Coroutine[Any, Any, None]], manifest: Manifest) -> None:
    async def whole() -> None:
        async with compute_thread() as compute:
            await story(StageChain(manifest, compute))

    asyncio.run(whole())


async def snapshots(chain: StageChain) -> list[memoryview]:
    return [await replicas[0].snapshot() for replicas in chain.engines]


def made(manifest: Manifest, stage: int, whole: list[memoryview], version: int) -> memoryview:
    """`stage` as its neighbours in `whole` make it."""
    before = whole[stage - 1] if stage else None
    after = whole[stage + 1] if stage + 1 < len(whole) else None
    return reseed(manifest, stage, version=version, before=before, after=after)


async def loss(chain: StageChain, indexes: range = range(4)) -> float:
    route = [replicas[0] for replicas in chain.engines]
    last = [(await chain.forward(route, index, train=False))[-1] for index in indexes]
    return sum(stash.loss_sum for stash in last) / sum(stash.num_tokens for stash in last)


@pytest.mark.parametrize(("stages", "layers"), CUTS)
def test_every_stage_of_every_cut_can_be_made_and_runs(stages: int, layers: str | tuple[int, ...]) -> None:
    manifest = tiny(stages, layers=layers, model=FIVE)

    async def story(chain: StageChain) -> None:
        rng = random.Random(1)
        for _ in range(2):
            await chain.step(rng)
        whole = await snapshots(chain)
        for stage, replicas in enumerate(chain.engines):
            data = made(manifest, stage, whole, 2)
            assert {n: t.shape for n, t in load(bytes(data)).items()} == {
                n: t.shape for n, t in load(bytes(whole[stage])).items()
            }
            assert data == made(manifest, stage, whole, 2)
            engine: TorchEngine = replicas[0]
            await engine.restore(data, version=2)
            assert engine.version == 2 and math.isfinite(await loss(chain))
            await engine.restore(whole[stage], version=2)

    run(story, manifest)


def test_layers_are_the_mean_of_their_neighbours_and_the_optimizer_begins_anew() -> None:
    async def story(chain: StageChain) -> None:
        await chain.step(random.Random(2))
        whole = await snapshots(chain)
        before, after = (load(bytes(whole[near])) for near in (0, 2))
        for name, tensor in load(bytes(made(chain.manifest, 1, whole, 1))).items():
            if name.startswith("optimizer."):
                assert not bool(tensor.any())
            else:
                low, high = (re.sub(r"layers\.\d+", f"layers.{layer}", name) for layer in (0, 2))
                assert torch.equal(tensor, (before[low] + after[high]) / 2)

    run(story, tiny(3, layers=(1, 1, 1), model=MODEL.model_copy(update={"num_layers": 3})))


def test_the_edges_copy_their_only_neighbour_and_draw_what_it_has_not() -> None:
    async def story(chain: StageChain) -> None:
        await chain.step(random.Random(2))
        manifest, whole = chain.manifest, await snapshots(chain)
        seeded = {0: {"model.embed_tokens.weight"}, 1: {"model.norm.weight", "lm_head.weight"}}
        for stage, names in seeded.items():
            other = load(bytes(whole[1 - stage]))
            found = load(bytes(made(manifest, stage, whole, 1)))
            for name, tensor in found.items():
                if name in names:
                    expected = draw(name, tensor.shape, manifest.model, seed=manifest.training.seed)
                elif not name.startswith("optimizer."):
                    shift = 2 if stage == 0 else -2
                    expected = other[re.sub(r"(?<=layers\.)\d+", lambda m, s=shift: str(int(m[0]) + s), name)]
                else:
                    continue
                assert torch.equal(tensor, expected)

    run(story, tiny(2, layers=(2, 2)))


def test_in_a_run_that_began_with_a_checkpoint_what_no_neighbour_has_comes_from_there() -> None:
    async def story(chain: StageChain) -> None:
        await chain.step(random.Random(2))
        manifest, whole = chain.manifest, await snapshots(chain)
        began = {name: torch.full(tensor.shape, 7.0) for name, tensor in load(bytes(whole[0])).items()}
        found = load(bytes(reseed(manifest, 0, version=1, before=None, after=whole[1], initial=began)))
        without = load(bytes(made(manifest, 0, whole, 1)))
        changed = {name for name, tensor in found.items() if not torch.equal(tensor, without[name])}
        assert changed == {"model.embed_tokens.weight"} and bool((found["model.embed_tokens.weight"] == 7.0).all())
        alone = load(bytes(reseed(manifest, 0, version=1, before=None, after=None, initial=began)))
        assert all(bool((tensor == 7.0).all()) for name, tensor in alone.items() if not name.startswith("optimizer."))

    run(story, tiny(2, layers=(2, 2)))


def drawn(manifest: Manifest, like: memoryview, *, seed: int, alike: bool) -> dict[str, Tensor]:
    """Weights anew for a stage, without moments; `alike`: every layer gets the same ones."""

    def draw_one(name: str, tensor: Tensor) -> Tensor:
        if name.startswith("optimizer."):
            return torch.zeros_like(tensor)
        name = re.sub(r"(?<=layers\.)\d+", "0", name) if alike else name
        return draw(name, tensor.shape, manifest.model, seed=seed)

    return {name: draw_one(name, tensor) for name, tensor in load(bytes(like)).items()}


@pytest.mark.parametrize("lost", [1, 2])
def test_where_layers_resemble_each_other_a_stage_inside_is_better_made_than_drawn(lost: int) -> None:
    """The premise of the method. Long training brings it about; here all layers begin alike, and are then trained."""

    async def story(chain: StageChain) -> None:
        for stage, empty in enumerate(await snapshots(chain)):
            alike = drawn(chain.manifest, empty, seed=3, alike=True)
            await chain.engines[stage][0].restore(snapshot.pack(alike, stage=stage, version=0), version=0)
        rng = random.Random(3)
        for _ in range(20):
            await chain.step(rng)
        losses = {"trained": await loss(chain)}
        whole, engine = await snapshots(chain), chain.engines[lost][0]
        await engine.restore(made(chain.manifest, lost, whole, 20), version=20)
        losses["made"] = await loss(chain)
        for seed in (3, 4):
            noise = drawn(chain.manifest, whole[lost], seed=seed, alike=False)
            await engine.restore(snapshot.pack(noise, stage=lost, version=20), version=20)
            losses[f"drawn from {seed}"] = await loss(chain)
        print(f"stage {lost}: {losses}")
        assert losses["made"] < min(losses["drawn from 3"], losses["drawn from 4"])

    run(story, tiny(4, learning_rate=0.005, model=MODEL.model_copy(update={"init_std": 0.1})))


def test_neighbours_that_do_not_fit_are_refused() -> None:
    async def story(chain: StageChain) -> None:
        manifest, whole = chain.manifest, await snapshots(chain)
        for before, after, version in [
            (whole[1], whole[2], 0),
            (whole[0], whole[0], 0),
            (whole[0], whole[2], 1),
            (b"", whole[2], 0),
            (whole[0][:-4], whole[2], 0),
        ]:
            with pytest.raises(BadMessage):
                reseed(manifest, 1, version=version, before=before, after=after)

    run(story, tiny(3))


@given(st.integers(1, 40), st.integers(1, 40))
def test_counterparts_are_in_order_and_spread_over_all(count: int, others: int) -> None:
    found = [counterpart(place, count, others) for place in range(count)]
    assert found == sorted(found) and found[0] >= 0 and found[-1] < others
    assert count != others or found == list(range(count))
    assert count < others or set(found) == set(range(others))
