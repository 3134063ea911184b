"""One replica is cut off from some of its mates, and not from all: no two views of the stage are the same."""

from __future__ import annotations

import pytest
from further import further
from test_sim_slow_joiner import version
from test_sim_uncallable import gaps

from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm


@pytest.mark.parametrize(
    ("stage", "replicas", "mates"),
    # Of two mates one, of three two: half of the stage does not hear it. Of four two: less than half.
    [(1, 3, 1), (0, 4, 2), (1, 4, 2), (1, 5, 2), *further((0, 5, 2), (1, 6, 4), (0, 6, 1))],
)
def test_a_replica_that_some_mates_do_not_hear_costs_one_step_a_few_seconds(
    stage: int, replicas: int, mates: int
) -> None:
    """It still got work that nobody counted, stood for leader under its own order, and had honest mates struck."""
    swarm = VirtualSwarm(Plan(stages=2, replicas=replicas, microbatches=8, steps=30, forward_s=0.1), 1)
    since_s = 0.0

    async def script(swarm: VirtualSwarm) -> None:
        nonlocal since_s
        await version(swarm, 6, stage)
        since_s = swarm.loop.time()
        *others, cut_off = swarm.replicas(stage)
        for mate in others[-mates:]:
            swarm.deafen(cut_off, mate)
            swarm.deafen(mate, cut_off)

    swarm.run(until_s=300.0, script=script)  # checks every commit and the final weights against the reference
    first, *later = sorted(gaps(swarm, since_s), reverse=True)
    assert first < 10.0 and later[0] < 4.0 and not swarm.checker.forks
    assert not [fields for _, _, event, fields in swarm.events if event == "late"], "nobody has done anything wrong"
