"""A joiner that cannot call one of its donors: everybody else can, and the joiner hears it."""

from __future__ import annotations

from test_sim_slow_joiner import JOINER, PLAN, check_joined, fields, join, version

from swarmnet.ids import PeerId
from swarmnet.testing.virtual_swarm import VirtualSwarm


def test_a_donor_that_cannot_be_called_costs_a_joiner_its_patience_once() -> None:
    """Steps take a second; for the one that does not answer each of them would take ten."""
    swarm = VirtualSwarm(PLAN, 1)

    def heal(peer: PeerId, event: str, _: dict[str, object]) -> None:
        if (peer, event) == (JOINER, "synced"):
            swarm.heal()  # what a member does that cannot call a mate is told elsewhere

    async def script(swarm: VirtualSwarm) -> None:
        await version(swarm, 5)
        swarm.hooks.append(heal)
        swarm.deafen(JOINER, swarm.replicas(1)[0])
        join(swarm, down=3_000.0)

    swarm.run(script=script)
    _, steps = check_joined(swarm)
    assert steps >= 8 and not fields(swarm, "fetching_again")
    followed = [at for at, _ in fields(swarm, "following")]
    assert len(followed) >= 7 and followed[-1] - followed[0] < 3.0, "the trail is faster than the run"
    assert {f["donor"] for _, f in fields(swarm, "join_failed")} == {"s1.3"}
