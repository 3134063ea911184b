"""Strangers say anything that is well-formed, to everybody: nobody dies and nothing is lost."""

from __future__ import annotations

import asyncio
import random

import pytest
from further import further

from swarmnet.ids import Ballot, Chain, Generation, PeerId, RoundId
from swarmnet.messages import Commit, Committed, Control, Finished, Heartbeat, MemberState, Round, StagePlan, Stamp
from swarmnet.step.commits import commit_of
from swarmnet.testing.clock import SimulatedProcess
from swarmnet.testing.doubles import FakeService
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm


class Stranger:
    """A greeted identity that serves nothing and says what it likes."""

    def __init__(self, swarm: VirtualSwarm, name: str, rng: random.Random) -> None:
        self.swarm, self.peer, self.rng = swarm, PeerId(name), rng
        swarm.network.attach(self.peer, SimulatedProcess(name), FakeService(lambda *_: []))

    def message(self) -> tuple[PeerId, Control]:
        """Any control message, with the right stamp of somebody alive and everything else drawn at random."""
        rng = self.rng
        node = rng.choice([node for node in self.swarm.nodes if node.up])
        stage = rng.choice(node.stages)
        member = node.peer.replicas[stage].member
        stamp = rng.choice(
            [
                member.oldest.stamp,
                member.oldest.stamp,
                Stamp(member.version + 1, stage, member.chain),
                Stamp(rng.randrange(9), rng.randrange(60), Chain("0" * 64)),
            ]
        )
        ballot = rng.choice(
            [member.oldest.promised or Ballot(0, self.peer), Ballot(rng.choice([0, 5, 1 << 53]), self.peer)]
        )
        generation = rng.choice(
            [member.oldest.claims.generation, Generation(rng.getrandbits(60), rng.choice([0, 1 << 53]))]
        )
        index = rng.choice([0, 1, 2, 3, 65535])
        some = frozenset(rng.sample([0, 1, 2, 3, 60000], 2))
        peers = tuple(rng.sample([self.peer, node.peer_id, PeerId("nobody")], rng.randrange(4)))
        number = RoundId(ballot, rng.randrange(3))
        commit = Commit(
            rng.choice([stage, 1 - stage, 40]),
            stamp.step,
            stamp.chain,
            number,
            b"x",
            rng.choice([0, 4]),
            rng.choice([0.0, 1e300]),
            rng.choice([1.0, 1e308]),
            some,
        )
        finished = Finished(number, b"x", 4, 0.0, 1.0, ((self.peer, generation, some),))
        parts = tuple((peer, generation, frozenset({place})) for place, peer in enumerate(peers))
        return node.peer_id, rng.choice(
            [
                StagePlan(stamp, ballot, given=some, whole=True),
                StagePlan(stamp, ballot, generation, frozenset({index})),
                StagePlan(stamp, ballot, generation, moved=((index, self.peer),)),
                StagePlan(stamp, ballot, generation, evicted="discard"),
                StagePlan(stamp, ballot, execute=frozenset({index})),
                MemberState(
                    stamp, ballot, generation, some, some, rng.choice([None, commit_of(stamp, finished)]), None, 0, some
                ),
                StagePlan(
                    stamp, ballot, attempt=Round(stamp, number, parts, tuple(rng.sample(peers, len(peers))), (), some)
                ),
                StagePlan(stamp, ballot, attempt=Round(stamp, number, (), (), peers)),
                Committed(commit),
                Heartbeat(
                    Stamp(stamp.step, rng.choice([50, 3000]), stamp.chain), 1, True, ballot, (commit,), (commit,)
                ),
            ]
        )


@pytest.mark.parametrize("seed", [0, 1, *further(*range(2, 8))])
def test_strangers_cost_only_themselves(seed: int) -> None:
    swarm = VirtualSwarm(Plan(stages=2, replicas=2, microbatches=4, steps=12), seed)

    async def script(swarm: VirtualSwarm) -> None:
        rng = random.Random(seed)
        strangers = [Stranger(swarm, f"stranger.{number}", rng) for number in range(2)]
        await asyncio.sleep(1.0)
        while not swarm.done:
            for stranger in strangers:
                to, message = stranger.message()
                swarm.network.tell(stranger.peer, to, message)
            await asyncio.sleep(0.01)

    swarm.run(until_s=300, script=script)  # checks every commit and the final weights against the reference
    assert swarm.counts["evicted_me"] == swarm.counts["resync"] == 0
    for node in swarm.nodes:
        for replica in node.peer.replicas.values():
            assert replica.execution.num_tasks <= swarm.plan.microbatches
