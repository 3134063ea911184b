"""A stopped process (SIGSTOP) answers nothing and breaks nothing: the swarm must route around it by itself."""

from __future__ import annotations

import asyncio
import itertools
import statistics

import pytest
from strike import watched

from swarmnet.messages import Process
from swarmnet.pipeline.router import Router
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Enough, Node, VirtualSwarm

WINDOW_S = 30.0
PLAN = Plan(stages=2, replicas=4, microbatches=16, steps=400, forward_s=0.1)


def steps_within(swarm: VirtualSwarm, begin: float, end: float) -> int:
    """Steps that were committed by everybody's first commit, in [begin, end)."""
    first: dict[object, float] = {}
    for at, _, event, fields in swarm.events:
        if event == "committed" and fields["stage"] == 0:
            first.setdefault(fields["step"], at)
    return sum(begin <= at < end for at in first.values())


def measure(
    *, stage: int | None, seed: int = 3, plan: Plan = PLAN, window_s: float = WINDOW_S
) -> tuple[int, float, VirtualSwarm]:
    """Steps in the window, and how long it took from the stop to the next commit of stage 0."""
    swarm = watched(plan, seed)

    async def script(swarm: VirtualSwarm) -> None:
        await asyncio.sleep(20.0)
        if stage is not None:
            victim = max(
                (node for node in swarm.replicas(stage)), key=lambda node: node.peer.replicas[stage].execution.queue
            )
            swarm.stop(victim)
        await asyncio.sleep(window_s)
        raise Enough

    swarm.run(until_s=200.0, script=script)
    steps = steps_within(swarm, 20.0, 20.0 + window_s)
    first = min((at for at, _, event, _ in swarm.events if event == "committed" and at > 20.0), default=1e9)
    return steps, first - 20.0, swarm


def test_one_hung_replica_of_four_costs_less_than_30_percent() -> None:
    """Over three runs: in a window of a dozen steps one more or less is chance."""
    healthy = hung = 0
    for seed in range(1, 4):
        healthy += measure(stage=None, seed=seed)[0]
        steps, around_s, _ = measure(stage=1, seed=seed)
        hung += steps
        assert around_s <= 5.0
    assert hung >= 0.7 * healthy, f"{hung} of {healthy} steps"


@pytest.mark.parametrize(("stage", "seed"), [(0, 3), (1, 4)], ids=["leader", "member"])
def test_one_hung_replica_of_three_delays_one_step_by_the_silence_limit(stage: int, seed: int) -> None:
    """Also when microbatches are slow and when it keeps the ledger: its share is known, and executed at once."""
    plan = Plan(stages=2, replicas=3, microbatches=16, steps=400, forward_s=0.2)
    _, _, swarm = measure(stage=stage, seed=seed, plan=plan, window_s=40.0)
    first: dict[object, float] = {}
    for at, _, event, fields in swarm.events:
        if event == "committed" and fields["stage"] == stage:
            first.setdefault(fields["step"], at)
    commits = sorted(first.values())
    lengths = [(ended, ended - began) for began, ended in itertools.pairwise(commits)]
    usual = statistics.median(length for _, length in lengths)
    struck, *later = [length for ended, length in lengths if ended > 20.0]
    assert struck <= usual + 5.0
    assert max(later) <= 1.5 * usual, "and no later step pays for it again"


def test_it_is_routed_around_and_rejoins_with_equal_weights() -> None:
    swarm = watched(Plan(stages=2, replicas=4, microbatches=16, steps=60, forward_s=0.02), seed=5)
    calls: list[tuple[float, str]] = []
    swarm.network.intercepts.append(
        lambda caller, callee, request: (
            calls.append((swarm.loop.time(), callee)) if isinstance(request, Process) else None
        )
    )
    stopped: list[Node] = []

    async def script(swarm: VirtualSwarm) -> None:
        await asyncio.sleep(4.0)
        stopped.append(swarm.replicas(1)[2])
        swarm.stop(stopped[0])
        await asyncio.sleep(12.0)
        swarm.resume(stopped[0])

    swarm.run(
        until_s=200.0, script=script
    )  # ends only when everybody, the stopped one too, has the reference's weights
    name = stopped[0].peer_id
    while_stopped = [at for at, callee in calls if callee == name and 9.0 < at < 16.0]
    assert len(while_stopped) <= 4, "it is tried again now and then, nothing more"


def test_busy_never_bans() -> None:
    failures: list[str] = []
    failed = Router.failed

    def counted(self, pick, *, now, hung):
        failures.append(pick.peer)
        failed(self, pick, now=now, hung=hung)

    swarm = watched(Plan(stages=2, replicas=2, microbatches=12, steps=4, slots=1, forward_s=0.1, trainers=2))
    swarm.slowdown = {f"s1.{number}": 6.0 for number in (2, 3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "failed", counted)
        swarm.run(until_s=200.0)
    assert failures == [] and swarm.counts["rerouted"] == 0


def test_a_replica_whose_compute_hangs_in_a_run_of_three_stages_is_left_out() -> None:
    """Its heartbeats go on. A stage hears of adjacent ones alone: that it knows no others excuses no member."""
    swarm = watched(Plan(stages=3, replicas=3, microbatches=12, steps=400, forward_s=0.05), seed=3)

    async def script(swarm: VirtualSwarm) -> None:
        await asyncio.sleep(10.0)
        swarm.replicas(0)[2].engines[0].device.forward_s = 1e7
        await asyncio.sleep(60.0)
        raise Enough

    swarm.run(until_s=200.0, script=script)
    assert steps_within(swarm, 40.0, 70.0) > 3
