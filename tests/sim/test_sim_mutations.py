"""The void counter holds a whole swarm together: without it a script breaks.

The machines' own rules are mutated in unit/test_member.py, script by script.
"""

from __future__ import annotations

import asyncio

import pytest
from strike import check_always, watched

from swarmnet.simulate.engine import SimulatedEngine
from swarmnet.simulate.plan import Plan
from swarmnet.simulate.swarm import Broken, Swarm


def test_without_the_void_counter_a_voided_gradient_lands_in_the_next_accumulator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accumulate = SimulatedEngine.accumulate

    async def heedless(engine: SimulatedEngine, stash) -> bool:
        counted = await accumulate(engine, stash)
        if not counted and stash.step == engine.version and stash.index not in engine.added:
            assert isinstance(stash.saved, list)
            delta = engine.arithmetic.weight_gradient(engine.weights, *stash.saved)
            engine._sum = [a + b for a, b in zip(engine._sum, delta, strict=True)]
        return counted

    swarm = watched(Plan(stages=2, replicas=2, microbatches=6, steps=3))

    async def script(swarm: Swarm) -> None:
        while True:  # void an accumulator while a weight pass is under way
            await asyncio.sleep(0.005)
            for node in swarm.replicas(0):
                member = node.peer.replicas[0].member
                working = [w for w in node.peer.replicas[0].execution.works.values() if w.voids is not None]
                if member.version == 1 and member.account.summed and working:
                    node.peer.replicas[0].driver._perform(member._void_myself())
                    await check_always(swarm)
                    return

    swarm.run(until_s=90.0, script=script)  # with the counter all is well

    monkeypatch.setattr(SimulatedEngine, "accumulate", heedless)
    with pytest.raises(Broken):
        watched(Plan(stages=2, replicas=2, microbatches=6, steps=3)).run(until_s=90.0, script=script)
