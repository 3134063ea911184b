"""Rules that hold a whole swarm together: without each, a named script breaks.

The rules of the machines alone are mutated in unit/test_member.py, script by script.
"""

# ruff: noqa: ASYNC110  (on virtual time, looking again in two milliseconds costs nothing)

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from strike import check_always, kill_and_restart, member_of, watched
from test_sim_scenarios import owners_of_one_index

from swarmnet.pipeline.execution import Execution
from swarmnet.pipeline.slots import Slots
from swarmnet.pipeline.tasks import StepTasks
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_engine import SimulatedEngine, SimulatedSum
from swarmnet.testing.virtual_swarm import Broken, VirtualSwarm

Accumulate = Callable[[SimulatedEngine, object], object]


def discard_within_a_weight_pass(monkeypatch: pytest.MonkeyPatch, accumulate: Accumulate) -> VirtualSwarm:
    """A swarm in which one replica's accumulator is discarded while a weight pass on top of others is under way."""
    swarm, struck = watched(Plan(stages=2, replicas=2, microbatches=6, steps=3)), []

    async def interrupted(engine: SimulatedEngine, stash) -> bool:
        if not struck and engine.version == 1 and engine.stage == 0 and engine.accumulator(1).added:
            struck.append(engine)
            node = next(node for node in swarm.nodes if node.engines.get(0) is engine)
            driver, member = node.peer.replicas[0].driver, member_of(swarm, node.peer_id, 0)
            end_accumulator = member.oldest._end_accumulator
            swarm.loop.call_later(swarm.plan.forward_s / 2, lambda: driver._tell(end_accumulator, "discarded_myself"))
        return await accumulate(engine, stash)

    monkeypatch.setattr(SimulatedEngine, "accumulate", interrupted)
    return swarm


def test_without_the_discard_counter_a_discarded_gradient_lands_in_the_next_accumulator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accumulate = SimulatedEngine.accumulate

    async def heedless(engine: SimulatedEngine, stash) -> bool:
        counted = await accumulate(engine, stash)
        into = engine.accumulator(stash.step)
        if not counted and stash.step == engine.version and stash.index not in into.added:
            delta = engine.arithmetic.weight_gradient(engine.weights, stash.saved.payload, stash.saved.gradient)
            into.total = engine.arithmetic.add(into.total, engine.arithmetic.numbers(delta))
        return counted

    healthy = discard_within_a_weight_pass(monkeypatch, accumulate)
    healthy.run(until_s=90.0, script=check_always)
    assert healthy.counts["discarded_myself"] == 1
    with pytest.raises(Broken, match="another sum"):
        discard_within_a_weight_pass(monkeypatch, heedless).run(until_s=90.0, script=check_always)


def owners_die_in_full_replicas(seed: int) -> None:
    """One slot each, nothing remembered: every repair recomputes from tokens."""
    swarm = watched(Plan(stages=3, replicas=2, microbatches=6, steps=4, output_cache_bytes=0, slots=1), seed)

    async def script(swarm: VirtualSwarm) -> None:
        while not (victims := owners_of_one_index(swarm)):
            await asyncio.sleep(0.002)
        for node in victims:
            kill_and_restart(swarm, node)
        await check_always(swarm)

    swarm.run(until_s=20.0, script=script)  # after half a minute callers give up calls that never end


def test_without_the_reserved_slot_repairs_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = StepTasks.__init__

    class SlotOfAll:
        def __init__(self, slots: Slots) -> None:
            self.slots = slots

        async def __aenter__(self) -> None:
            await self.slots.take()

        async def __aexit__(self, *_: object) -> None:
            self.slots.give()

    def crowded(tasks: StepTasks, step: int, execution: Execution) -> None:
        begin(tasks, step, execution)
        tasks._reserved = SlotOfAll(tasks._slots)  # type: ignore[assignment]

    seeds = range(6)
    for seed in seeds:
        owners_die_in_full_replicas(seed)
    monkeypatch.setattr(StepTasks, "__init__", crowded)
    stuck = 0
    for seed in seeds:
        try:
            owners_die_in_full_replicas(seed)
        except Broken as broken:
            assert "no end" in str(broken)
            stuck += 1
    assert stuck, "it depends on who is where: more than half of all seeds are stuck"


def ranks_lost_in_a_round(monkeypatch: pytest.MonkeyPatch) -> VirtualSwarm:
    """A swarm in which a replica's ranks are lost just before its contribution is asked for; it hears of it later."""
    swarm, struck = watched(Plan(stages=2, replicas=2, microbatches=6, steps=3)), []
    contribution = SimulatedEngine.contribution

    async def interrupted(engine: SimulatedEngine, start: int, stop: int, reference: bytes = b""):
        if not struck and engine.version == 1 and engine.stage == 0 and engine.accumulator(1).added:
            struck.append(engine)
            engine.lose_ranks(told_after_s=0.2)
        return await contribution(engine, start, stop, reference)

    monkeypatch.setattr(SimulatedEngine, "contribution", interrupted)
    return swarm


def test_a_lost_sum_that_is_read_all_the_same_breaks_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = ranks_lost_in_a_round(monkeypatch)
    healthy.run(until_s=90.0, script=check_always)
    assert healthy.counts["sum_lost"] == 1
    monkeypatch.setattr(SimulatedSum, "lost", property(lambda self: False, lambda self, lost: None), raising=False)
    with pytest.raises(Broken, match="another sum"):
        ranks_lost_in_a_round(monkeypatch).run(until_s=90.0, script=check_always)
