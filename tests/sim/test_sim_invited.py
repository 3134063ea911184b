"""A run by invitation on virtual time: guests train as in an open run, the uninvited and the banned have no say."""

from __future__ import annotations

import asyncio

from swarmnet.errors import RejectCode
from swarmnet.messages import Fetch, Rejected
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm
from swarmnet.transport import ask


def outcome(*, invite: bool) -> tuple[float, int]:
    swarm = VirtualSwarm(Plan(invite=invite, steps=5), 1)
    swarm.run()
    return swarm.loop.time(), len(swarm.events)


def test_among_guests_nothing_is_different() -> None:
    assert outcome(invite=True) == outcome(invite=False)


def test_who_is_not_invited_feeds_nobody_and_serves_nobody() -> None:
    """An uninvited replica and an uninvited trainer run the same code as all others."""
    asked: list[object] = []

    async def strangers(swarm: VirtualSwarm) -> None:
        await asyncio.sleep(1)
        stranger = swarm.add([0], "stranger", invited=False)
        feeder = swarm.add_trainer("feeder", invited=False)
        await asyncio.sleep(5)
        guest, transport = swarm.nodes[0], swarm.network.transport(stranger.peer_id)
        for node in swarm.nodes:
            if node is not stranger:
                assert not {stranger.peer_id, feeder} & node.peer.records.keys()
                assert stranger.peer_id not in node.peer.everyone()
        asked.append(await ask(transport, guest.peer_id, Fetch(0, 0, 0, "input", cached=False)))
        swarm.kill(feeder)
        swarm.kill(stranger)

    swarm = VirtualSwarm(Plan(invite=True, steps=40), 1)
    swarm.run(script=strangers)
    assert not [peer for _, peer, event, _ in swarm.events if event == "committed" and peer == "stranger"]
    (answer,) = asked
    assert isinstance(answer, Rejected) and answer.code is RejectCode.NOT_ADMITTED
    assert "swarmnet owner invite run.toml stranger" in answer.reason


def test_a_banned_member_is_out_and_the_others_go_on() -> None:
    """Its mates take it for silent; weights are still those of one process."""
    at: list[int] = []

    async def banning(swarm: VirtualSwarm) -> None:
        banned = swarm.nodes[-1]
        await asyncio.sleep(2)
        swarm.ban(banned)
        at.append(swarm.nodes[0].peer.replicas[0].member.version)
        await asyncio.sleep(60)
        assert all(banned.peer_id not in node.peer.records for node in swarm.nodes[:-1])
        swarm.kill(banned)

    swarm = VirtualSwarm(Plan(invite=True, replicas=3, steps=60), 1)
    swarm.run(script=banning, until_s=900)
    assert at[0] < 60
