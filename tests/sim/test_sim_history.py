"""What members of any stage tell an observer of the run's steps: the same, whoever is asked and whatever happened."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from strike import reached

from swarmnet.ids import PeerId
from swarmnet.messages import History, HistoryRequest, Packed
from swarmnet.monitor.waterfall import bars_of
from swarmnet.telemetry.figures import StepFigures
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm
from swarmnet.transport import ReadPayload

STRANGER = PeerId("stranger")


async def nothing() -> tuple[Packed, ...]:
    return ()


async def told(node: Node, since: int = 0) -> History:
    (answer,) = [
        answer async for answer in node.peer.on_call(STRANGER, HistoryRequest(since), ReadPayload((), nothing))
    ]
    assert isinstance(answer, History)
    return answer


def key(figures: StepFigures) -> tuple[int, float, int, float, float]:
    return figures.step, figures.loss_sum, figures.num_tokens, figures.grad_norm, figures.learning_rate


@pytest.mark.parametrize("sync", ["exact", "overlap"])
@pytest.mark.parametrize("served", [None, ((0, 2), (1,), (1, 2), (0,))])
def test_members_of_all_stages_tell_the_uninvited_the_same(sync, served) -> None:
    swarm = VirtualSwarm(Plan(stages=3, steps=12, invite=True, sync=sync, served=served), 1)
    heard: list[History] = []

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 4)
        first = swarm.replicas(1)[0]
        swarm.kill(first)
        swarm.add(first.stages, first.peer_id)
        await reached(swarm, 10)
        heard.extend([await told(node) for node in swarm.nodes if node.up])

    swarm.run(script=script)
    by_step: dict[int, set[tuple[int, float, int, float, float]]] = {}
    for history in heard:
        for each in history.figures:
            by_step.setdefault(each.step, set()).add(key(each))
    assert set(range(9)) <= by_step.keys() and all(len(different) == 1 for different in by_step.values())
    assert all(math.isfinite(each.ago_s) and each.ago_s >= 0 for history in heard for each in history.figures)


@pytest.mark.parametrize("sync", ["exact", "overlap"])
def test_every_member_tells_how_it_spent_its_last_step(sync: Literal["exact", "overlap"]) -> None:
    swarm = VirtualSwarm(Plan(stages=2, replicas=2, steps=8, sync=sync), 1)
    heard: list[tuple[Node, History]] = []

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 6)
        heard.extend([(node, await told(node, 1 << 53)) for node in swarm.nodes if node.up])

    swarm.run(script=script)
    computed_s = 0.0
    for node, history in heard:
        assert not history.figures
        (times,) = history.times
        assert (times.stage,) == node.stages and times.step >= 4
        assert [bar.stage for bar in bars_of(node.peer_id, history, now=0.0)] == [times.stage], "it can be"
        # Where steps overlap, it waits for the pass that runs.
        assert times.update.busy_s >= node.engines[times.stage].device.forward_s - 1e-9
        if sync == "exact":
            assert times.averaging.busy_s > 0 and times.averaging.ended_s <= times.barrier.began_s
        computed_s += times.forward.busy_s + times.backward.busy_s
    # A third of a microbatch each: forward, backward and weights.
    device = swarm.nodes[0].engines[swarm.nodes[0].stages[0]].device
    if sync == "exact":
        assert computed_s == pytest.approx(2 * swarm.plan.microbatches * 3 * device.forward_s)


def test_an_observer_that_asks_too_often_is_told_to_wait_and_nobody_else_is_kept_waiting() -> None:
    swarm = VirtualSwarm(Plan(steps=4), 1)

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 2)
        node = swarm.nodes[0]
        for _ in range(40):
            await told(node)
        with pytest.raises(AssertionError):
            await told(node)

    swarm.run(script=script)
