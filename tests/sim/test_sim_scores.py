"""Scores of evaluations where a replica lies about them, and where peers only die."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from chaos import Chaos

from swarmnet.ids import PeerId
from swarmnet.stage.interfaces import SavedActivations
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_engine import SimulatedEngine, tokens_of
from swarmnet.testing.virtual_swarm import Guise, VirtualSwarm

PLAN = Plan(stages=2, replicas=3, microbatches=6, steps=8, eval_every=1, eval_microbatches=4)


class FalseScores(Guise):
    """It trains as everybody does, and says that its losses of evaluations are smaller than they are."""

    def engine(self, honest: SimulatedEngine) -> SimulatedEngine:
        forward = honest.forward

        async def lower(step: int, index: int, payload: Any, *, train: bool) -> SavedActivations:
            stash = await forward(step, index, payload, train=train)
            if not train:
                stash.loss_sum /= 2
            return stash

        honest.forward = lower  # type: ignore[method-assign]
        return honest


class NeverScores(Guise):
    """It trains as everybody does, and is at work on an evaluation for ever. asked: of which versions."""

    def __init__(self) -> None:
        self.asked: set[int] = set()

    def engine(self, honest: SimulatedEngine) -> SimulatedEngine:
        forward = honest.forward

        async def hang(step: int, index: int, payload: Any, *, train: bool) -> SavedActivations:
            if not train:
                self.asked.add(step)
                await asyncio.sleep(1e6)
            return await forward(step, index, payload, train=train)

        honest.forward = hang  # type: ignore[method-assign]
        return honest


def lied_to(plan: Plan, seed: int) -> VirtualSwarm:
    """A run whose last stage has one such replica."""
    swarm = VirtualSwarm(plan, seed)
    swarm.names[plan.replicas] = "liar"
    swarm.guises[PeerId("liar")] = FalseScores()
    swarm.run()
    return swarm


def said(swarm: VirtualSwarm, event: str) -> dict[int, dict[str, Any]]:
    """What trainers said, by version."""
    return {fields["step"]: fields for _, _, name, fields in swarm.events if name == event}


def honest(swarm: VirtualSwarm, version: int) -> float:
    """The held-out loss of that version in one process."""
    first, last = (swarm.arithmetic(stage, swarm.plan) for stage in range(2))
    before, after = swarm.reference.history[version]
    numbers = range(swarm.plan.eval_microbatches)
    return sum(last.loss(after, first.forward(before, tokens_of(10_000 + number))) for number in numbers) / len(numbers)


def test_a_score_that_a_second_look_contradicts_is_decided_by_a_third() -> None:
    disputed = published = 0
    for seed in range(3):
        swarm = lied_to(PLAN, seed)
        scores = said(swarm, "evaluated")
        for version, dispute in said(swarm, "eval_disputed").items():
            assert any("liar" in route for route in dispute["routes"]) and len(dispute["losses"]) == 3
            disputed += 1
            if version in scores:
                assert scores[version]["loss"] == honest(swarm, version)
                published += 1
    assert disputed and published > disputed / 2


def test_of_two_replicas_of_which_one_lies_no_score_is_published() -> None:
    """One of the two looks is the liar's, whichever is drawn."""
    swarm = lied_to(Plan(stages=2, replicas=2, microbatches=4, steps=6, eval_every=1, eval_microbatches=4), 1)
    assert not said(swarm, "evaluated")
    disputes = said(swarm, "eval_disputed")
    assert len(disputes) >= 5 and all(len(dispute["losses"]) == 2 for dispute in disputes.values())
    assert said(swarm, "not_evaluated").keys() == disputes.keys()


@pytest.mark.parametrize("seed", range(4))
def test_who_dies_is_no_liar(seed: int) -> None:
    swarm = VirtualSwarm(PLAN, seed)
    chaos = Chaos(until_s=20.0, crash_s=1.5, stop_s=6.0, join_s=8.0, longest_stop_s=4.0)
    swarm.run(script=chaos.script(chaos.schedule(seed)))
    assert swarm.counts["kills"] and not swarm.counts["eval_disputed"]
    scores = said(swarm, "evaluated")
    assert scores and all(fields["loss"] == honest(swarm, version) for version, fields in scores.items())


def test_one_replica_a_stage_is_taken_at_its_word() -> None:
    swarm = VirtualSwarm(Plan(stages=2, replicas=1, microbatches=4, steps=3, eval_every=1, eval_microbatches=4), 1)
    swarm.run()
    assert said(swarm, "evaluated").keys() >= {0, 1, 2} and not swarm.counts["eval_disputed"]


def test_a_replica_that_never_ends_an_evaluation_costs_the_scores_that_it_was_asked_for_and_no_other() -> None:
    swarm = VirtualSwarm(Plan(stages=2, replicas=3, microbatches=12, steps=20, eval_every=1, eval_microbatches=4), 0)
    swarm.names[0], liar = "liar", NeverScores()
    swarm.guises[PeerId("liar")] = liar
    swarm.run()
    told = [fields["step"] for _, _, name, fields in swarm.events if name in ("evaluated", "not_evaluated")]
    assert told == sorted(told), "in their order"
    scores = said(swarm, "evaluated")
    # While one hangs the weights of some that come after it move on; those that are in time are scored.
    missed = {fields["step"] for fields in said(swarm, "not_evaluated").values()}
    assert {fields["reason"] for fields in said(swarm, "not_evaluated").values()} == {
        "the weights moved on before all was measured"
    }
    assert not missed & scores.keys() and min(missed) in liar.asked
    assert len(scores) >= 5 and max(scores) > max(missed), "the run has not waited, and the last is scored"
    assert all(score["loss"] == honest(swarm, version) for version, score in scores.items())
