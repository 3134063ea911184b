"""Scripted faults at exact points.

Each run ends with the weights of the single process; every commit on the way was the single process's sum, with every
index counted once. Invariants are checked at every event and every 50 virtual milliseconds.
"""

# ruff: noqa: ASYNC110  (on virtual time, looking again in two milliseconds costs nothing)

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from further import further
from strike import check_always, kill_and_restart, leader_of, member_of, node_of, soon, watched

from swarmnet.messages import Accepted, Committed, Gradient, Process
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm

PLAN = Plan(stages=3, replicas=2, microbatches=6, steps=5)
STEP = 1
"""The first step that may be struck; the one before it has shown that all is well."""

Predicate = Callable[[VirtualSwarm, Node, int], bool]


def state(node: Node, stage: int):
    return node.peer.replicas[stage].member


def held(node: Node, stage: int):
    return state(node, stage).oldest.claims


def tasks_of(node: Node, stage: int):
    """What the oldest open step has at work; None while the weights move."""
    return node.peer.replicas[stage].execution.steps.get(state(node, stage).version)


def works_of(node: Node, stage: int):
    tasks = tasks_of(node, stage)
    return list(tasks.by_index.values()) if tasks is not None else []


def answered(node: Node, stage: int) -> set[int]:
    tasks = tasks_of(node, stage)
    return {index for index in range(64) if tasks.cache.answer(index)} if tasks is not None else set()


def holds_sum(swarm: VirtualSwarm, stage: int) -> bool:
    members = [state(node, stage) for node in swarm.replicas(stage) if stage in node.peer.replicas]
    return any(member.oldest.finished is not None and member.version >= STEP for member in members)


POINTS: dict[str, Predicate] = {
    "after_claim": lambda swarm, node, stage: bool(held(node, stage).asked or held(node, stage).assigned),
    "after_forward": lambda swarm, node, stage: any(
        work.computing and work.discards is not None for work in works_of(node, stage)
    ),
    "after_gradient": lambda swarm, node, stage: bool(answered(node, stage) - held(node, stage).accumulated),
    "after_summed": lambda swarm, node, stage: bool(held(node, stage).accumulated),
    "in_round_before_ack": lambda swarm, node, stage: (
        state(node, stage).oldest.part.exchange is not None and not holds_sum(swarm, stage)
    ),
    "in_round_after_ack": lambda swarm, node, stage: holds_sum(swarm, stage),
    "after_commit": lambda swarm, node, stage: state(node, stage).oldest.barrier.of(stage) is not None,
}


class Trap:
    """Springs once, on the first replica of the stage that is at the point, not before step STEP."""

    def __init__(
        self, swarm: VirtualSwarm, stage: int, point: str, *, leader: bool, strike: Callable[[Node], None]
    ) -> None:
        self.swarm, self.stage, self.reached, self.leader = swarm, stage, POINTS[point], leader
        self.strike, self.sprung = strike, False
        swarm.network.intercepts.append(lambda sender, receiver, message: self.look())
        swarm.hooks.append(lambda peer, event, fields: self.look())

    def look(self) -> None:
        if self.sprung:
            return
        leader = leader_of(self.swarm, self.stage)
        for node in self.swarm.replicas(self.stage):
            ready = self.stage in node.peer.replicas and state(node, self.stage).version >= STEP
            if ready and (node is leader) == self.leader and self.reached(self.swarm, node, self.stage):
                self.sprung = True
                soon(self.swarm, lambda node=node: self.strike(node))
                return

    async def watch(self, swarm: VirtualSwarm) -> None:
        while not swarm.done:
            self.look()
            swarm.check_now()
            await asyncio.sleep(0.002 if not self.sprung else 0.05)


@pytest.mark.parametrize("turn", [0, *further(1, 2)])
@pytest.mark.parametrize("leader", [False, True], ids=["member", "leader"])
@pytest.mark.parametrize("point", POINTS)
def test_kill_at(point: str, leader: bool, turn: int) -> None:
    """Each in one stage; in the others, too, under --long."""
    stage = (list(POINTS).index(point) + leader + turn) % 3
    swarm = watched(PLAN)
    trap = Trap(swarm, stage, point, leader=leader, strike=lambda node: kill_and_restart(swarm, node))
    swarm.run(until_s=60.0, script=trap.watch)
    assert trap.sprung and swarm.counts["kills"] == 1


@pytest.mark.parametrize("point", [point for point in POINTS if point != "after_commit"])
def test_kill_leader_and_then_its_successor(point: str) -> None:
    swarm = watched(Plan(stages=2, replicas=3, microbatches=6, steps=4))

    def strike(node: Node) -> None:
        kill_and_restart(swarm, node)
        swarm.hooks.append(kill_next)

    def kill_next(peer: str, event: str, fields: dict[str, object]) -> None:
        if event == "leader" and fields["stage"] == 1 and swarm.counts["kills"] == 1:
            successor = next(node for node in swarm.nodes if node.up and node.peer_id == peer)
            soon(swarm, lambda: kill_and_restart(swarm, successor) if swarm.counts["kills"] == 1 else None)

    trap = Trap(swarm, 1, point, leader=True, strike=strike)
    swarm.run(until_s=90.0, script=trap.watch)
    assert trap.sprung and swarm.counts["kills"] == 2


def test_leader_dies_after_it_told_exactly_one_member_of_the_commit() -> None:
    swarm = watched(Plan(stages=2, replicas=3, microbatches=6, steps=4))
    told: list[str] = []

    def on_tell(sender, receiver, message) -> bool | None:
        if isinstance(message, Committed) and message.commit.stage == 0 and message.commit.step == STEP:
            leader = leader_of(swarm, 0)
            if not told and leader is not None and leader.peer_id == sender and receiver.startswith("s0"):
                told.append(receiver)
                soon(swarm, lambda: kill_and_restart(swarm, leader))
                return None
            return bool(told) and sender != leader_of(swarm, 0)
        return None

    swarm.network.intercepts.append(on_tell)
    swarm.run(until_s=60.0, script=check_always)
    assert told and swarm.counts["kills"] == 1


def test_the_same_identity_restarts_within_the_step() -> None:
    swarm = watched(PLAN)
    trap = Trap(swarm, 1, "after_summed", leader=False, strike=lambda node: kill_and_restart(swarm, node, after_s=0.05))
    swarm.run(until_s=60.0, script=trap.watch)
    assert trap.sprung and swarm.counts["kills"] == 1


@pytest.mark.parametrize("stage", [0, 1])
def test_caller_dies_while_uploading(stage: int) -> None:
    swarm = watched(PLAN)
    struck: list[str] = []

    def answered(callee, caller, message) -> None:
        if isinstance(message, Accepted) and not struck and callee.startswith(f"s{stage + 1}."):
            member = member_of(swarm, caller, stage)
            if member is not None and member.version == STEP:
                struck.append(caller)
                soon(swarm, lambda: kill_and_restart(swarm, node_of(swarm, caller)))

    swarm.network.intercepts.append(answered)
    swarm.run(until_s=60.0, script=check_always)
    assert struck and swarm.counts["kills"] == 1


def test_trainer_dies_while_uploading() -> None:
    swarm = watched(Plan(stages=2, replicas=2, microbatches=6, steps=4, trainers=2))
    struck: list[str] = []

    def answered(callee, caller, message) -> None:
        if isinstance(message, Accepted) and not struck and caller == "trainer.0":
            struck.append(caller)
            soon(swarm, lambda: swarm.kill(caller))

    swarm.network.intercepts.append(answered)
    swarm.run(until_s=90.0, script=check_always)
    assert struck


def owners_of_one_index(swarm: VirtualSwarm) -> list[Node]:
    """The replicas that have summed one and the same index in every stage, in the struck step."""
    for index in range(swarm.plan.microbatches):
        found = [
            node
            for stage in range(swarm.plan.stages)
            for node in swarm.replicas(stage)
            if stage in node.peer.replicas
            and state(node, stage).version == STEP
            and state(node, stage).oldest.finished is None
            and index in held(node, stage).accumulated
        ]
        if len(found) == swarm.plan.stages:
            return found
    return []


@pytest.mark.parametrize("output_cache_bytes", [0, 1 << 20], ids=["no_memo", "memo"])
@pytest.mark.parametrize("slots", [1, 4])
def test_owners_of_an_index_in_all_stages_die_together(output_cache_bytes: int, slots: int) -> None:
    swarm = watched(
        Plan(stages=3, replicas=2, microbatches=6, steps=4, output_cache_bytes=output_cache_bytes, slots=slots)
    )

    async def script(swarm: VirtualSwarm) -> None:
        while not (victims := owners_of_one_index(swarm)):
            await asyncio.sleep(0.002)
        for node in victims:
            kill_and_restart(swarm, node)
        await check_always(swarm)

    swarm.run(until_s=120.0, script=script)
    assert swarm.counts["kills"] == 3


@pytest.mark.parametrize("trainers", [1, 3])
def test_one_slot_and_loss_of_one_owner_in_each_stage_at_once(trainers: int) -> None:
    swarm = watched(Plan(stages=3, replicas=2, microbatches=8, steps=4, slots=1, trainers=trainers))

    async def script(swarm: VirtualSwarm) -> None:
        while not all(
            any(state(node, stage).version == STEP and held(node, stage).accumulated for node in swarm.replicas(stage))
            for stage in range(3)
        ):
            await asyncio.sleep(0.002)
        for stage in range(3):
            victim = next(node for node in swarm.replicas(stage) if held(node, stage).accumulated)
            kill_and_restart(swarm, victim)
        await check_always(swarm)

    swarm.run(until_s=120.0, script=script)
    assert swarm.counts["kills"] == 3


def test_calls_of_the_next_step_take_no_slot_while_this_one_needs_repair() -> None:
    swarm = watched(Plan(stages=2, replicas=2, microbatches=6, steps=4, slots=2, trainers=3))
    early: list[int] = []

    def on_open(caller, callee, request) -> None:
        member = member_of(swarm, callee, 0)
        if isinstance(request, Process) and request.stage == 0 and member is not None and member.version < request.step:
            early.append(request.step)

    swarm.network.intercepts.append(on_open)
    trap = Trap(swarm, 1, "in_round_before_ack", leader=False, strike=lambda node: kill_and_restart(swarm, node))
    swarm.run(until_s=90.0, script=trap.watch)
    assert trap.sprung and STEP + 1 in early


def test_two_trainers_on_the_same_split_count_nothing_twice() -> None:
    swarm = watched(Plan(stages=2, replicas=2, microbatches=6, steps=4, trainers=2))
    publish = swarm.directory.publish

    async def hide_trainers(record) -> None:
        if not record.trainer:
            await publish(record)

    swarm.directory.publish = hide_trainers
    fed: list[tuple[int, int, str]] = []

    def on_open(caller, callee, request) -> None:
        if isinstance(request, Process) and caller.startswith("trainer"):
            fed.append((request.step, request.index, caller))

    swarm.network.intercepts.append(on_open)
    swarm.run(until_s=60.0, script=check_always)
    twice = [
        entry
        for entry in {(step, index) for step, index, _ in fed}
        if {(*entry, "trainer.0"), (*entry, "trainer.1")} <= set(fed)
    ]
    assert len(twice) > 6


def test_a_trainer_dies_in_the_middle_and_the_leader_orders_the_rest() -> None:
    swarm = watched(Plan(stages=2, replicas=2, microbatches=6, steps=4))

    async def script(swarm: VirtualSwarm) -> None:
        while not any(
            state(node, 0).version == STEP and state(node, 0).oldest.claims.accumulated for node in swarm.replicas(0)
        ):
            await asyncio.sleep(0.002)
        swarm.kill("trainer.0")
        await check_always(swarm)

    swarm.run(until_s=120.0, script=script)
    assert swarm.counts["ordered"] > 0


def test_without_any_trainer_the_leader_executes_from_data() -> None:
    swarm = watched(Plan(stages=2, replicas=2, microbatches=4, steps=2, trainers=0))
    swarm.run(until_s=120.0, script=check_always)
    assert swarm.counts["ordered"] >= 8 and swarm.counts["rerouted"] == 0


def test_a_trainer_far_behind_or_ahead_of_the_run_finds_its_place() -> None:
    swarm = watched(Plan(stages=2, replicas=2, microbatches=4, steps=6))

    async def script(swarm: VirtualSwarm) -> None:
        trainer = swarm.trainers["trainer.0"]
        while min(state(node, 0).version for node in swarm.replicas(0)) < 1:
            await asyncio.sleep(0.01)
        swarm.loop.stop_process(trainer)  # it misses steps that the leader executes
        while min(state(node, 0).version for node in swarm.replicas(0)) < 3:
            swarm.check_now()
            await asyncio.sleep(0.05)
        swarm.loop.continue_process(trainer)
        await check_always(swarm)

    swarm.run(until_s=120.0, script=script)


def test_answers_already_given_are_given_again_after_repair() -> None:
    """The caller of a dead owner asks its successor; the gradient it gets counts nothing twice anywhere."""
    swarm = watched(PLAN)
    struck: list[str] = []

    def answered(callee, caller, message) -> None:
        member = member_of(swarm, callee, 2)
        if isinstance(message, Gradient) and not struck and member is not None and member.version == STEP:
            struck.append(callee)
            # The answer is on its way, the weight pass is not.
            soon(swarm, lambda: kill_and_restart(swarm, node_of(swarm, callee)))

    swarm.network.intercepts.append(answered)
    swarm.run(until_s=60.0, script=check_always)
    assert struck


def test_heartbeats_alone_carry_every_commit() -> None:
    """All pushed commits are lost: the barrier still opens, a heartbeat later."""
    swarm = watched(Plan(stages=3, replicas=2, microbatches=4, steps=3))
    swarm.network.intercepts.append(lambda sender, receiver, message: not isinstance(message, Committed))
    swarm.run(until_s=60.0, script=check_always)
