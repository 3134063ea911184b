"""Members of one operator may cover for each other: those of other operators look more often at what they do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Audits
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

KIN = (PeerId("s1.3"), PeerId("s1.4"))
PLAN = Plan(stages=2, replicas=3, microbatches=12, steps=12, audit=Audits(microbatches=0.3, contributions=0.0))


def swarm_of(*kin: PeerId, plan: Plan = PLAN, seed: int = 1) -> VirtualSwarm:
    """These are run by one operator, the others by one each."""
    swarm = VirtualSwarm(plan, seed)
    swarm.operators = dict.fromkeys(kin, 7)
    return swarm


def looks(*kin: PeerId) -> Counter[tuple[bool, bool]]:
    """Audits by whether the auditor is of KIN, and whether the audited is."""
    found = Counter[tuple[bool, bool]]()

    def look(peer: PeerId, event: str, fields: dict[str, Any]) -> None:
        if event == "audited" and fields["stage"] == 1:
            found[peer in KIN, fields["peer"] in KIN] += 1

    # Few are drawn in one run.
    for seed in range(4):
        swarm = swarm_of(*kin, seed=seed)
        swarm.hooks.append(look)
        swarm.run()
    return found


def test_the_third_looks_at_what_two_of_one_operator_do_as_often_as_both_others_would() -> None:
    apart, together = looks(), looks(*KIN)
    # Of a rate of 0.3 two draw 0.16 each, who draws alone 0.3.
    assert 1.4 * apart[False, True] < together[False, True]
    # Whatever a member says of its operator, nobody looks less.
    assert together[True, True] >= 0.7 * apart[True, True] > 0
    assert together[True, False] >= 0.7 * apart[True, False] > 0


@pytest.mark.parametrize("invite", [False, True])
def test_everybody_sees_the_same_operators(invite: bool) -> None:
    """An invitation says more than a network: whoever is invited by name is an operator of its own."""
    swarm = swarm_of(*KIN, plan=Plan(stages=2, replicas=3, steps=2, invite=invite))
    swarm.run()
    members = [node.peer_id for node in swarm.nodes if 1 in node.stages]
    for node in swarm.nodes:
        seen = [node.peer.operator(peer) for peer in members]
        assert seen == ([*members] if invite else ["44.7.0.0/16" if peer in KIN else peer for peer in members])
