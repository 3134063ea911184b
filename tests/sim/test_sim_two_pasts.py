"""A peer that was away while the run went back brings checkpoints of the other past: they are not put together."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from strike import watched
from test_sim_past import lose_checkpoints, until
from test_sim_restart import kill_everybody, reached

from swarmnet.ids import OnDisk, PeerId, Restart
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm

AWAY, STAYS = PeerId("s0.0"), PeerId("s0.1")
PLAN = Plan(
    stages=2, microbatches=4, steps=20, checkpoint_every=4, forward_s=0.05, classes=2, served=((0,), (0,), (1,))
)


def on_disk(swarm: VirtualSwarm, peer: PeerId) -> list[OnDisk]:
    return [info.on_disk for _, (info, _) in sorted(swarm.disks[peer].files.items())]


@pytest.mark.parametrize("later", [False, True], ids=["all at once", "later"])
def test_the_other_past_of_whoever_was_away_leads_nobody(later: bool) -> None:
    """With two numerics classes the twelfth version of one past is not that of the other. later: the peer comes back to
    a run that waits for its stage, which nobody else has kept."""
    swarm = watched(replace(PLAN))

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 13)
        away = next(node for node in swarm.nodes if node.peer_id == AWAY)
        other = swarm.replicas(1)[0]
        swarm.kill(away)
        assert OnDisk(12) in on_disk(swarm, AWAY) and OnDisk(8) in on_disk(swarm, AWAY)
        swarm.kill(other)
        lose_checkpoints(swarm, other, after=8)
        swarm.add((1,), other.peer_id)
        await until(lambda: any(one == OnDisk(12, Restart(1, 8)) for one in on_disk(swarm, other.peer_id)))
        victims = kill_everybody(swarm)
        swarm.disks[STAYS].files.clear()
        await asyncio.sleep(40.0)  # longer than any record lives
        back = [peer for peer, _ in victims if peer != STAYS]
        for peer in back:
            swarm.add((1,), peer)
        if later:
            await asyncio.sleep(10.0)
        swarm.add((0,), AWAY)
        swarm.add_trainer()

    swarm.run(script=script, until_s=300.0)
    decided = {(f["number"], f["version"]) for _, _, event, f in swarm.events if event == "restart"}
    assert decided == {(1, 8), (2, 8)}, "from the eighth, which both pasts have, and not from two twelfths"
    assert not swarm.counts["dropped"]
