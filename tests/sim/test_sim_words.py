"""A member that is heard and cannot be called is named: in what `swarmnet status` says, and in the log of its mate."""

from __future__ import annotations

import asyncio

import pytest
from further import further

from swarmnet.manifest.schema import Audits
from swarmnet.peer.swarm_health import assess
from swarmnet.testing.plan import RUN, Plan
from swarmnet.testing.virtual_swarm import Enough, VirtualSwarm


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("seed", [0, *further(1, 2, 3)])
def test_a_run_that_stands_still_for_a_member_that_cannot_be_called_says_so(seed: int, checked: bool) -> None:
    audit = Audits() if checked else Audits(microbatches=0.0, contributions=0.0)
    swarm = VirtualSwarm(Plan(stages=2, replicas=2, microbatches=6, steps=60, forward_s=0.05, audit=audit), seed)
    mate, victim = "s0.0", "s0.1"
    said: set[tuple[str, str]] = set()

    async def script(swarm: VirtualSwarm) -> None:
        await asyncio.sleep(3.0)
        for node in swarm.nodes:
            if node.peer_id != victim:
                swarm.block_dial(node, swarm.replicas(0)[1])
        for _ in range(40):
            await asyncio.sleep(1.0)
            found = assess(RUN, await swarm.directory.records(), 2).problems
            said.update((problem.kind, problem.text) for problem in found)
        raise Enough

    swarm.run(until_s=300, script=script)
    whom = f" {victim} of stage 0, which no peer can connect to"
    still = [text for kind, text in said if kind == "standstill"]
    assert all(text.startswith("no step for ") for text in still) and any(text.endswith(whom) for text in still)
    # Nobody gets through a checked sum without its pledge: it is waited for, and never left out.
    assert checked or any(whom in text for kind, text in said if kind == "unreached")
    assert {(peer, fields["peer"]) for _, peer, event, fields in swarm.events if event == "cannot_reach"} == {
        (mate, victim)
    }
