"""A newcomer that nobody can connect to stops by itself, and the run goes on as if it had never come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from strike import happened

from swarmnet.ids import PeerId
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm

JOINER = PeerId("joiner")
PLAN = Plan(stages=2, replicas=2, microbatches=4, steps=12, forward_s=0.1)


def said(swarm: VirtualSwarm, event: str, peer: PeerId = JOINER) -> list[dict[str, object]]:
    return [fields for _, who, name, fields in swarm.events if who == peer and name == event]


def joined(firewall: Callable[[VirtualSwarm], list[Node]], *, seed: int = 1) -> VirtualSwarm:
    """A run of 2 x 2 that a newcomer joins after two steps; `firewall` says who cannot dial it."""
    swarm = VirtualSwarm(PLAN, seed)

    async def script(swarm: VirtualSwarm) -> None:
        await happened(swarm, "applied", version=2)
        for node in firewall(swarm):
            swarm.network.lines.block_dial(node.peer_id, JOINER)
        swarm.add((1,), JOINER)
        await happened(swarm, "unreachable", "synced", peer=JOINER)
        swarm.heal()  # what a run makes of a member that only some can call is not this test's

    swarm.run(until_s=120.0, script=script)
    return swarm


def ends_at(swarm: VirtualSwarm) -> float:
    """When the run made its last step."""
    return max(at for at, who, event, _ in swarm.events if event == "applied" and who != JOINER)


def test_a_firewalled_newcomer_stops_and_the_run_does_not_notice() -> None:
    swarm = joined(lambda swarm: swarm.nodes)
    assert swarm.counts["given_up"] == 1 and not said(swarm, "synced") and not said(swarm, "dialled_back")
    [unreachable] = said(swarm, "unreachable")
    could_not = unreachable["could_not"]
    assert isinstance(could_not, dict) and set(could_not) == {
        f"s{stage}.{number}" for number, stage in enumerate((0, 0, 1, 1))
    }
    assert unreachable["addresses"] == ["memory/joiner"]
    contributors = {
        peer for *_, event, fields in swarm.events if event == "committed" for peer, _ in fields["contributions"]
    }  # type: ignore[attr-defined]
    assert JOINER not in contributors
    alone = VirtualSwarm(PLAN, 1)
    alone.run(until_s=120.0)
    assert ends_at(swarm) < 1.15 * ends_at(alone), "no step waited for it"


def test_a_newcomer_that_half_of_them_reach_is_let_in() -> None:
    swarm = joined(lambda swarm: [node for node in swarm.nodes if 0 in node.stages])
    assert not swarm.counts["given_up"] and said(swarm, "synced")
    [back] = said(swarm, "dialled_back")
    assert back["could"] and set(back["could"]) <= {"s1.2", "s1.3"}  # type: ignore[call-overload]


def test_the_first_of_a_run_ask_nobody_and_who_comes_back_is_asked_for_again() -> None:
    swarm = VirtualSwarm(PLAN, 3)

    async def script(swarm: VirtualSwarm) -> None:
        node = swarm.nodes[3]
        await happened(swarm, "applied", version=2)
        assert not said(swarm, "dialled_back", node.peer_id)
        swarm.kill(node)
        swarm.add(node.stages, node.peer_id)

    swarm.run(until_s=120.0, script=script)
    [back] = said(swarm, "dialled_back", swarm.nodes[3].peer_id)
    assert back["could"] and not swarm.counts["given_up"]


def test_members_that_cannot_be_asked_keep_nobody_out() -> None:
    """The newcomer's own network is away: it waits, as it always did, and comes in when the network is back."""
    swarm = VirtualSwarm(PLAN, 4)

    async def script(swarm: VirtualSwarm) -> None:
        await happened(swarm, "applied", version=2)
        swarm.partition([node.peer_id for node in swarm.nodes], [JOINER])
        swarm.add((1,), JOINER)
        await asyncio.sleep(40.0)
        assert not said(swarm, "synced")
        swarm.heal()
        # It counts as done once it knows the last version, which may be before it holds it.
        await happened(swarm, "synced", peer=JOINER)

    swarm.run(until_s=200.0, script=script)
    assert said(swarm, "synced") and not swarm.counts["given_up"]
