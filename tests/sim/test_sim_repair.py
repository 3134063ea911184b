"""What a crash costs: the struck stage executes again what was lost with the victim, and no other stage anything."""

from __future__ import annotations

from collections import Counter

import pytest
from further import further
from strike import check_always, node_of, soon, watched

from swarmnet.ids import PeerId
from swarmnet.messages import Process, Request
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

STEP = 2


def executions(swarm: VirtualSwarm) -> Counter[int]:
    """stage -> executions of STEP by replicas that lived to apply it."""
    found: Counter[int] = Counter()
    before: dict[tuple[PeerId, int], int] = {}
    applied: dict[tuple[PeerId, int], int] = {}
    for _, peer, event, fields in swarm.events:
        if event == "applied":
            applied[peer, fields["stage"]] = fields["step"]
        if event == "executed":
            key = (peer, fields["stage"])
            if applied[key] == STEP:
                found[fields["stage"]] += fields["executions"] - before.get(key, 0)
            before[key] = fields["executions"]
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("nth", [3, *further(1, 4)])
def test_a_crash_is_repaired_by_one_stage_alone(stage: int, nth: int) -> None:
    """It dies as it is called for the nth time in the step: with microbatches before it, in it and behind it.

    Twelve among three: somebody is called four times."""
    plan = Plan(stages=3, replicas=3, microbatches=12, steps=4)
    swarm = watched(plan)
    calls: Counter[PeerId] = Counter()
    struck: list[PeerId] = []

    def strike(caller: PeerId, callee: PeerId, request: Request) -> None:
        if isinstance(request, Process) and (request.stage, request.step) == (stage, STEP) and not struck:
            calls[callee] += 1
            victim = node_of(swarm, callee)
            if calls[callee] == nth and victim is not None:
                struck.append(callee)
                soon(swarm, lambda: swarm.kill(victim))

    swarm.network.intercepts.append(strike)
    swarm.run(until_s=60.0, script=check_always)
    assert swarm.counts["kills"] == 1
    found = executions(swarm)
    assert found == dict.fromkeys(range(plan.stages), plan.microbatches), "one execution per index by those who lived"
