"""Who cannot show its work is struck if it should have it, and not if it has lost it by a restart."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from strike import kill_and_restart
from test_sim_restart import reached

from swarmnet.errors import RejectCode
from swarmnet.manifest.schema import Audits
from swarmnet.messages import AuditRequest, Rejected
from swarmnet.peer.peer import Peer
from swarmnet.simulate.plan import Plan
from swarmnet.simulate.swarm import Swarm

PLAN = Plan(
    stages=1, replicas=4, microbatches=8, steps=16, forward_s=0.1, audit=Audits(microbatches=0.5, contributions=0.5)
)


def watched(plan: Plan) -> tuple[Swarm, Counter[str], Counter[str]]:
    """A swarm, what is held against whom, and who sits out."""
    swarm, withheld, struck = Swarm(plan, 1), Counter[str](), Counter[str]()

    def look(peer: str, event: str, fields: dict[str, Any]) -> None:
        if event == "withheld":
            withheld[fields["peer"]] += 1
        if event == "strike" and "pledged" in fields["reason"]:
            struck[fields["peer"]] += 1
        assert event not in ("convicted", "finding", "disputed"), (peer, event, fields)

    swarm.hooks.append(look)
    return swarm, withheld, struck


def test_a_replica_that_was_started_again_is_not_blamed_for_what_it_lost() -> None:
    swarm, withheld, struck = watched(PLAN)

    async def script(swarm: Swarm) -> None:
        for node in swarm.nodes[:3]:
            await reached(swarm, 3 + 3 * swarm.nodes.index(node))
            kill_and_restart(swarm, node, after_s=0.5)
            await asyncio.sleep(0.5)

    swarm.run(script=script)
    assert not withheld and not struck


def test_who_has_not_heard_its_auditor_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, withheld, struck = watched(PLAN)
    answers, turned_away = Peer._answers, set[tuple[str, str]]()

    def strange(self: Peer, caller: Any, request: Any, payload: Any) -> Any:
        async def refused() -> Any:
            yield Rejected(RejectCode.NOT_A_FEEDER, "you are not known here")

        if isinstance(request, AuditRequest) and (self.me, caller) not in turned_away:
            turned_away.add((self.me, caller))
            return refused()
        return answers(self, caller, request, payload)

    monkeypatch.setattr(Peer, "_answers", strange)
    swarm.run()
    assert len(turned_away) > 3 and not withheld and not struck


@pytest.mark.parametrize("silent", [False, True])
def test_who_does_not_show_its_work_sits_out(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, withheld, struck = watched(replace(PLAN, steps=150))
    answers = Peer._answers

    def refuse(self: Peer, caller: Any, request: Any, payload: Any) -> Any:
        async def held() -> Any:
            await asyncio.sleep(1000.0)
            yield None

        if self.me == liar and type(request).__name__ == "AuditRequest":
            if silent:
                return held()
            request = replace(request, index=7, step=1 << 30)
        return answers(self, caller, request, payload)

    monkeypatch.setattr(Peer, "_answers", refuse)
    liar = ""

    async def script(swarm: Swarm) -> None:
        nonlocal liar
        liar = swarm.nodes[0].peer_id
        await reached(swarm, 5)

    swarm.run(script=script)
    assert set(withheld) == {liar} and set(struck) == {liar}
