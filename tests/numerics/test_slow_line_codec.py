"""A replica on a slow line sends in `wire.slow`, is answered so, and trains like the others."""

from __future__ import annotations

import asyncio
import random

import pytest
from stage_chain import StageChain, compute_thread, tiny

from swarmnet.manifest.schema import Averaging, Wire

LOCAL = Averaging(sync="local", codec="fp32", inner_steps=1, outer_warmup_steps=0, outer_momentum=0.0)
"""Of an outer step in each step: what is left of it is the mean of all."""
RUN = tiny(3, mode="fp32", averaging=LOCAL).model_copy(
    update={"wire": Wire(activations="bf16", slow="int8", slow_mbit=20.0)}
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_codec_is_chosen_per_link_in_a_chain_of_three() -> None:
    async def crossings() -> list[tuple[list[str], list[str]]]:
        """(codecs of what went forward, of what came back), with no line known, the middle one slow, and fast again."""
        async with compute_thread() as compute:
            chain, found = StageChain(RUN, compute), []
            route = [engine for (engine,) in chain.engines]
            for index, line in enumerate((0, 10**6, 10**7)):
                route[1].carries(line)
                stashes = await chain.forward(route, index)
                down = [stash.output[1].codec for stash in stashes[:-1]]
                up: list[str] = []
                gradient = await route[2].backward(stashes[2], ())
                for engine, stash in ((route[1], stashes[1]), (route[0], stashes[0])):
                    up.append(gradient[0].codec)
                    gradient = await engine.backward(stash, gradient)
                found.append((down, up))
            return found

    ordinary = (["bf16", "bf16"], ["fp32", "fp32"])
    assert asyncio.run(crossings()) == [ordinary, (["bf16", "int8"], ["int8", "int8"]), ordinary]


def test_the_loss_stays_where_one_replica_is_on_a_slow_line() -> None:
    async def train(line: int) -> list[float]:
        async with compute_thread() as compute:
            chain = StageChain(RUN, compute, replicas=2)
            for _, second in chain.engines:
                second.carries(line)
            return [await chain.step(random.Random(step)) for step in range(8)]

    plain, slow = asyncio.run(train(0)), asyncio.run(train(10**6))
    assert slow != plain and max(abs(one / other - 1) for one, other in zip(slow, plain, strict=True)) < 1e-2
