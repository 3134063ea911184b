"""A peer that cannot take over a state says why, once per donor, and joins as soon as it can."""

from __future__ import annotations

import asyncio

import pytest
from strike import watched

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.state import snapshot_fetch
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import VirtualSwarm


def test_a_failed_join_is_said_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BadMessage(RejectCode.TOO_LARGE, "no state is small enough")

    swarm = watched(Plan(stages=2, replicas=2, microbatches=6, steps=12))

    async def script(swarm: VirtualSwarm) -> None:
        applied = asyncio.Event()
        swarm.hooks.append(lambda peer, event, fields: applied.set() if fields.get("version") == 2 else None)
        await applied.wait()
        monkeypatch.setattr(snapshot_fetch, "check_content", refuse)
        node = swarm.add([0])
        await asyncio.sleep(15.0)
        failed = [
            (fields["donor"], fields["reason"])
            for _, peer, event, fields in swarm.events
            if peer == node.peer_id and event == "join_failed" and "donor" in fields
        ]
        assert failed and len({donor for donor, _ in failed}) == len(failed), "once per donor"
        assert all("too_large" in str(reason) for _, reason in failed)
        assert node.peer.replicas[0].member.version == 0
        monkeypatch.undo()

    swarm.run(until_s=120.0, script=script)
    assert [fields["how"] for _, _, event, fields in swarm.events if event == "synced"][-1] == "snapshot"
