"""What a replica's averaging codec owes comes back with its own checkpoint, and goes to nobody else."""

from __future__ import annotations

import asyncio

from strike import node_of, watched
from test_sim_restart import kill_everybody, reached

from swarmnet.ids import PeerId
from swarmnet.simulate.plan import Plan
from swarmnet.simulate.swarm import Swarm


def test_who_comes_back_owes_what_it_owed_and_a_joiner_nothing() -> None:
    swarm = watched(Plan(stages=2, replicas=2, microbatches=4, steps=14, checkpoint_every=4, forward_s=0.05))
    recalled: dict[PeerId, tuple[str, bytes | None]] = {}

    def look(peer: PeerId, event: str, fields: dict[str, object]) -> None:
        node = node_of(swarm, peer)
        if event == "synced" and fields["how"] in ("checkpoint", "snapshot") and node is not None:
            recalled[peer] = str(fields["how"]), node.engines[node.stages[0]].debt

    swarm.hooks.append(look)

    async def script(swarm: Swarm) -> None:
        await reached(swarm, 2)
        for node in swarm.nodes:
            node.engines[node.stages[0]].debt = f"of {node.peer_id}".encode()
        await reached(swarm, 5)
        victims = kill_everybody(swarm)
        await asyncio.sleep(40.0)
        swarm.disks[victims[0][0]].files.clear()  # its state it can have from its mate
        for peer, stages in victims:
            swarm.add(stages, peer)
        swarm.add_trainer()
        await reached(swarm, 8)
        swarm.add((1,), "joiner")
        await reached(swarm, 11)

    swarm.run(script=script)
    without, *others = sorted(peer for peer in recalled if peer != "joiner")
    assert recalled == {
        **{peer: ("checkpoint", f"of {peer}".encode()) for peer in others},
        without: ("snapshot", None),
        PeerId("joiner"): ("snapshot", None),
    }
