"""A replica that was killed and comes back costs no long pause: its mate, the neighbours and itself go on at once."""

from __future__ import annotations

import asyncio
import itertools
from typing import Literal

import pytest
from further import further
from strike import kill_and_restart, watched
from test_sim_restart import reached

from swarmnet.ids import PeerId
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm


@pytest.mark.parametrize("sync", ["exact", "overlap"])
@pytest.mark.parametrize("seed", [0, 3, *further(1, 2)])
def test_of_two_one_is_killed_and_comes_back(sync: Literal["exact", "overlap"], seed: int) -> None:
    """What it signs counts for whoever still counts it, though it does not count itself before it has contributed."""
    swarm = watched(Plan(stages=2, replicas=2, microbatches=4, steps=40, forward_s=0.05, sync=sync), seed)
    applied_at: list[tuple[float, PeerId, int]] = []

    def look(peer: PeerId, event: str, fields: dict[str, object]) -> None:
        if event == "applied":
            applied_at.append((swarm.loop.time(), peer, int(str(fields["version"]))))

    swarm.hooks.append(look)
    back_at = 0.0

    async def script(swarm: VirtualSwarm) -> None:
        nonlocal back_at
        await reached(swarm, 5)
        kill_and_restart(swarm, swarm.nodes[seed], after_s=2.0)
        await asyncio.sleep(2.0)
        back_at = swarm.loop.time()
        await reached(swarm, 39)

    swarm.run(script=script)
    for peer in {peer for _, peer, _ in applied_at}:
        times = [at for at, other, _ in applied_at if other == peer and at > back_at]
        gaps = [later - at for at, later in itertools.pairwise(times)]
        assert max(gaps) < 5.0, (peer, max(gaps))
