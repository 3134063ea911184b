"""A liar that contributes, and three keys that only beat, describe a forged state to a replica that joins."""

from __future__ import annotations

import pytest
from benchmark_modules import load
from further import further

from swarmnet.ids import PeerId

strangers = load("strangers")

QUIET_S, LIES_S = 5.0, 30.0

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("seed", [1, *further(*range(2, 9))])
@pytest.mark.parametrize("name", ["forged-weights", "forged-table"])
def test_a_joining_replica_takes_the_state_of_those_who_contribute(name: str, seed: int) -> None:
    liar = PeerId("liar.0")
    trial = strangers.Trial(3, LIES_S, seed, strangers.STAGE, QUIET_S)
    trial.run([strangers.LIES[name](trial.swarm, liar)])
    # Weights are held against the reference whenever an honest replica takes a state over, or applies a step.
    assert not trial.broken and trial.weights_equal and trial.named(liar)["join_failed"], trial.broken
    (joined,) = (node for node in trial.swarm.honest if node.peer_id.startswith("joins"))
    member = joined.peer.replicas[strangers.STAGE].member
    synced = [
        fields["how"] for _, peer, event, fields in trial.swarm.events if (peer, event) == (joined.peer_id, "synced")
    ]
    assert synced == ["snapshot"] and member.synced and not member.membership.exclusions
    assert joined.peer_id in member.membership.voters(strangers.STAGE), "its work counts"
    assert trial.steps >= LIES_S, "half of what the three make alone"
    # Once it votes, the others rank it as drawn: if its turn comes and it does not lead, a step stands for 9 s.
    assert trial.longest_s < 5.0
