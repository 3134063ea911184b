"""Steps that overlap (averaging.sync = "overlap"): the same faults, held against one process with a delay of one.

Every commit is the sum of that process, the weights of both versions are its weights, nothing is lost or counted twice.
And what it is for: averaging that takes a good part of a step keeps no device waiting.
"""

# ruff: noqa: ASYNC110  (on virtual time, looking again in two milliseconds costs nothing)

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from further import further
from strike import check_always, kill_and_restart, leader_of, until, watched
from test_sim_drain import Farewells, executions, indexes
from test_sim_random import KINDS, LONG, SEEDS, run
from test_sim_scenarios import POINTS, STEP, Trap, held, state
from timeline import Timeline, seconds_of

from swarmnet.manifest.schema import Audits
from swarmnet.messages import Process
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_engine import tokens_of
from swarmnet.testing.virtual_reference import SimulatedReference
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm

PLAN = Plan(stages=2, replicas=2, microbatches=6, steps=4, averaging_s=0.3, sync="overlap")
"""Averaging takes longer than computing, so both open steps are at work most of the time."""


def newest(node: Node, stage: int):
    return state(node, stage).steps[1].claims


EARLY = {
    "newest_claimed": lambda swarm, node, stage: bool(newest(node, stage).asked or newest(node, stage).assigned),
    "newest_summed": lambda swarm, node, stage: bool(newest(node, stage).accumulated),
    "newest_summed_and_oldest_in_round": lambda swarm, node, stage: (
        bool(newest(node, stage).accumulated) and state(node, stage).oldest.part.exchange is not None
    ),
}


LATE = [point for point in POINTS if point not in ("after_forward", "in_round_after_ack")]


@pytest.fixture(autouse=True)
def early_points(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, reached in EARLY.items():
        monkeypatch.setitem(POINTS, name, reached)


def test_without_faults_it_is_the_single_process_with_a_delay_of_one() -> None:
    swarm = watched(replace(PLAN, stages=3, steps=6))
    swarm.run(until_s=60.0, script=check_always)
    assert swarm.counts["executed"] == swarm.counts["applied"] == 3 * 2 * 6
    assert executions(swarm) == indexes(swarm.plan) and swarm.counts["ordered"] == swarm.counts["rerouted"] == 0
    exact = SimulatedReference(replace(swarm.plan, sync="exact"))
    assert exact.history[:2] == swarm.reference.history[:2] and exact.history[2] != swarm.reference.history[2]


def test_nobody_sends_what_is_more_than_one_step_ahead_of_the_open_ones() -> None:
    swarm = watched(replace(PLAN, steps=8))
    ahead: set[int] = set()

    def on_open(caller, callee, request) -> None:
        if isinstance(request, Process) and request.stage == 0:
            versions = [state(node, 0).version for node in swarm.replicas(0) if 0 in node.peer.replicas]
            ahead.add(request.step - max(versions))

    swarm.network.intercepts.append(on_open)
    swarm.run(until_s=60.0, script=check_always)
    assert max(ahead) == 2 and 1 in ahead


def test_the_held_out_loss_of_a_version_is_that_of_its_weights() -> None:
    swarm = watched(replace(PLAN, steps=5, eval_every=1))

    async def script(swarm: VirtualSwarm) -> None:
        await until(lambda: swarm.counts["done"], every_s=0.05)

    swarm.run(until_s=60.0, script=script)
    found = {fields["step"]: fields["loss"] for _, _, event, fields in swarm.events if event == "evaluated"}
    assert {0, 5} <= found.keys() and len(found) >= 4
    first, last = (swarm.nodes[0].engines[0].arithmetic, swarm.nodes[-1].engines[1].arithmetic)
    for version, loss in found.items():
        weights = swarm.reference.history[version]
        assert loss == last.loss(weights[1], first.forward(weights[0], tokens_of(10_000)))


@pytest.mark.parametrize("leader", [False, True], ids=["member", "leader"])
@pytest.mark.parametrize("point", [*EARLY, "after_forward", "in_round_after_ack", *further(*LATE)])
def test_kill_at(point: str, leader: bool) -> None:
    swarm = watched(PLAN if point in EARLY else replace(PLAN, averaging_s=0.001))
    trap = Trap(swarm, 1, point, leader=leader, strike=lambda node: kill_and_restart(swarm, node))
    swarm.run(until_s=60.0, script=trap.watch)
    assert trap.sprung and swarm.counts["kills"] == 1


@pytest.mark.parametrize(
    ("point", "leader", "for_s"),
    [
        *(("newest_summed", False, 2.0), ("in_round_before_ack", True, 8.0), ("after_commit", False, 40.0)),
        *further(("newest_summed", True, 8.0), ("in_round_before_ack", False, 40.0), ("after_commit", False, 2.0)),
        *further(("newest_summed", False, 40.0), ("in_round_before_ack", False, 2.0), ("after_commit", True, 8.0)),
    ],
)
def test_stopped_and_continued(point: str, leader: bool, for_s: float) -> None:
    """Two replicas stay, so a stopped one is given up; it comes back within the step, some steps later, far behind."""
    swarm = watched(replace(PLAN, replicas=3))

    def found() -> Node | None:
        keeps = leader_of(swarm, 0)
        return next(
            (
                node
                for node in swarm.replicas(0)
                if (node is keeps) == leader
                and 0 in node.peer.replicas
                and state(node, 0).version >= STEP
                and POINTS[point](swarm, node, 0)
            ),
            None,
        )

    async def script(swarm: VirtualSwarm) -> None:
        while (zombie := found()) is None:
            await asyncio.sleep(0.002)
        swarm.stop(zombie)
        await asyncio.sleep(for_s)
        swarm.resume(zombie)
        await check_always(swarm)

    swarm.run(until_s=150.0, script=script)


def test_a_replica_joins_while_both_steps_are_at_work() -> None:
    swarm = watched(replace(PLAN, steps=10))

    async def script(swarm: VirtualSwarm) -> None:
        for version in (1, 3):
            first = swarm.replicas(1)[0]
            while not (
                1 in first.peer.replicas and state(first, 1).version == version and newest(first, 1).accumulated
            ):
                await asyncio.sleep(0.002)
            swarm.add((1,))
        await check_always(swarm)

    swarm.run(until_s=60.0, script=script)
    joined = [fields for _, peer, event, fields in swarm.events if event == "synced" and fields["how"] == "snapshot"]
    assert len(joined) == 2


@pytest.mark.parametrize("leader", [False, True], ids=["member", "leader"])
def test_who_leaves_stays_until_both_its_steps_are_averaged(leader: bool) -> None:
    swarm = watched(PLAN)
    farewells = Farewells(swarm)
    trap = Trap(swarm, 1, "newest_summed_and_oldest_in_round", leader=leader, strike=farewells.ask)
    swarm.run(until_s=60.0, script=trap.watch)
    assert [words for _, words in farewells.gone.values()] == ["nothing here is needed any more"]
    assert executions(swarm) == indexes(swarm.plan), "a farewell made somebody compute again"


@pytest.mark.parametrize("slots", [1, 4])
def test_owners_of_the_oldest_step_die_while_the_newest_has_taken_all_its_slots(slots: int) -> None:
    swarm = watched(replace(PLAN, stages=3, microbatches=12, slots=slots, output_cache_bytes=0))

    async def script(swarm: VirtualSwarm) -> None:
        def tasks_of(node: Node, stage: int):
            return node.peer.replicas[stage].execution.steps

        victims: list[Node] = []
        while len(victims) < 3:
            victims = [
                next(
                    (
                        node
                        for node in swarm.replicas(stage)
                        if state(node, stage).version == STEP
                        and held(node, stage).accumulated
                        and tasks_of(node, stage)[STEP + 1].queue == slots
                    ),
                    None,
                )
                for stage in range(3)
            ]
            victims = [node for node in victims if node is not None]
            if swarm.done:
                return
            await asyncio.sleep(0.002)
        for node in victims:
            kill_and_restart(swarm, node)
        await check_always(swarm)

    swarm.run(until_s=120.0, script=script)
    assert swarm.counts["kills"] == 3


@pytest.mark.parametrize("for_s", [4.0, 25.0])
def test_a_cut_through_all_stages_heals(for_s: float) -> None:
    swarm = watched(replace(PLAN, steps=8, classes=2, forward_s=0.1), seed=2)

    async def script(swarm: VirtualSwarm) -> None:
        await until(
            lambda: any(newest(node, 0).accumulated and state(node, 0).version == STEP for node in swarm.replicas(0))
        )
        swarm.partition(
            [swarm.replicas(0)[0], swarm.replicas(1)[0], "trainer.0"], [swarm.replicas(0)[1], swarm.replicas(1)[1]]
        )
        await asyncio.sleep(for_s)
        swarm.heal()
        await check_always(swarm)

    swarm.run(until_s=200.0, script=script)


def test_everybody_dies_and_goes_on_from_disks_with_the_weights_of_both_versions() -> None:
    swarm = watched(replace(PLAN, steps=8, checkpoint_every=2))

    async def script(swarm: VirtualSwarm) -> None:
        while (
            min(
                (
                    state(node, stage).version
                    for stage in range(2)
                    for node in swarm.replicas(stage)
                    if stage in node.peer.replicas
                ),
                default=0,
            )
            < 5
        ):
            await asyncio.sleep(0.01)
        for node in [node for node in swarm.nodes if node.up]:
            kill_and_restart(swarm, node)
        await asyncio.sleep(1.5)
        await check_always(swarm)

    swarm.run(until_s=120.0, script=script)
    assert any(event == "synced" and fields["how"] == "checkpoint" for _, _, event, fields in swarm.events)


# ---------------------------------------------------------------- what it is for


BUSY = Plan(stages=2, replicas=2, microbatches=32, steps=7, averaging_s=0.4)
"""A device computes for about a second a step; a round takes 0.4 s of its own."""


def stalls(sync: str) -> tuple[list[float], float]:
    """(seconds per step that each device waits for averaging, seconds per step), steady state."""
    # With audits a device has something to do while it waits.
    swarm = VirtualSwarm(replace(BUSY, sync=sync, audit=Audits(microbatches=0.0, contributions=0.0)), 1)
    timeline = Timeline(swarm)
    swarm.run(until_s=60.0)
    begin, end = swarm.applied_at[2], swarm.applied_at[6]
    assert all(bar.stop - bar.start >= 0.4 for bar in timeline.bars() if bar.what == "averaging")
    waited = [seconds_of(timeline.stalls(node.peer_id, begin, end)) / 4 for node in swarm.nodes]
    return waited, (end - begin) / 4


def test_no_device_waits_for_averaging() -> None:
    exact, exact_step_s = stalls("exact")
    overlap, overlap_step_s = stalls("overlap")
    assert min(exact) >= 0.4 and max(overlap) == 0.0
    assert overlap_step_s < 0.8 * exact_step_s


# ---------------------------------------------------------------- everything at random


FEW = ("tangle_2x3", "everything_2x2", "restarts_2x2")
"""Kinds of which one seed runs in every run of the suite."""

SEED = 3000


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, (plan, chaos) in list(KINDS.items()):
        monkeypatch.setitem(KINDS, kind, (replace(plan, sync="overlap"), chaos))


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("kind", [*FEW, *further("crashes_3x2", "one_slot_no_memo_3x2", "cuts_2x2")])
def test_random_faults(kind: str) -> None:
    swarm = run(kind, SEED)
    assert swarm.plan.sync == "overlap"


@pytest.mark.long
@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("kind", KINDS)
def test_many_seeds(kind: str) -> None:
    for seed in range(4000, 4000 + LONG * SEEDS[kind]):
        run(kind, seed)
