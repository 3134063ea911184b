"""Who cannot show its work is struck if it should have it, and not if it has lost it by a restart."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from further import further
from strike import kill_and_restart, until
from test_sim_restart import reached

from swarmnet.errors import RejectCode
from swarmnet.manifest.schema import Audits
from swarmnet.messages import AuditRequest, Heartbeat, Rejected, Sent
from swarmnet.peer.peer import Peer
from swarmnet.statement import statement
from swarmnet.testing.network import MemoryTransport
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_swarm import Enough, SimulatedSigner, VirtualSwarm

PLAN = Plan(
    stages=1, replicas=4, microbatches=8, steps=16, forward_s=0.1, audit=Audits(microbatches=0.5, contributions=0.5)
)


def watched(plan: Plan) -> tuple[VirtualSwarm, Counter[str], Counter[str]]:
    """A swarm, what is held against whom, and who sits out."""
    swarm, withheld, struck = VirtualSwarm(plan, 1), Counter[str](), Counter[str]()

    def look(peer: str, event: str, fields: dict[str, Any]) -> None:
        if event == "withheld":
            withheld[fields["peer"]] += 1
        if event == "late" and "pledged" in fields["reason"]:
            struck[fields["peer"]] += 1
        assert event not in ("convicted", "rechecked", "disputed"), (peer, event, fields)

    swarm.hooks.append(look)
    return swarm, withheld, struck


def test_a_replica_that_was_started_again_is_not_blamed_for_what_it_lost() -> None:
    swarm, withheld, struck = watched(PLAN)

    async def script(swarm: VirtualSwarm) -> None:
        for node in swarm.nodes[:3]:
            await reached(swarm, 3 + 3 * swarm.nodes.index(node))
            kill_and_restart(swarm, node, after_s=0.5)
            await asyncio.sleep(0.5)

    swarm.run(script=script)
    assert not withheld and not struck


def test_a_replica_whose_ranks_die_with_its_shards_on_their_way_still_shows_its_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its accumulator is gone, and the aggregate that the others complete holds what it had accumulated."""
    swarm, withheld, struck = watched(PLAN)
    lost: set[tuple[str, int]] = set()

    def look(peer: str, event: str, fields: dict[str, Any]) -> None:
        if event == "averaged" and (peer, fields["step"]) not in lost:
            lost.add((peer, fields["step"]))
            node = next(node for node in swarm.nodes if node.peer_id == peer)
            node.engines[0].lose_ranks(told_after_s=0.0)

    swarm.hooks.append(look)
    swarm.run()
    assert swarm.counts["sum_lost"] >= PLAN.steps
    assert swarm.counts["audited"] > PLAN.steps and not withheld and not struck


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


@pytest.mark.parametrize(
    "way",
    [
        "is silent",
        "ends the call",
        "says nothing for a while",
        "says it was started again",
        "shows it when the weights are gone",
        *further("refuses", "says it has left"),
    ],
)
def test_who_does_not_show_its_work_sits_out(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, withheld, struck = watched(replace(PLAN, steps=150))
    answers, tell, liar, hushed_at = Peer._answers, MemoryTransport.tell, "", -1.0

    def refuse(self: Peer, caller: Any, request: Any, payload: Any) -> Any:
        async def dodge() -> Any:
            nonlocal hushed_at
            hushed_at = swarm.loop.time()
            if way == "is silent":
                await asyncio.sleep(1000.0)
            if way == "says it has left":
                yield Rejected(RejectCode.NOT_SERVED, "this peer has left")

        async def late(honest: Any) -> Any:
            shown = [answer async for answer in honest]
            await asyncio.sleep(19.0)
            for answer in shown:
                yield answer

        if self.me != liar or not isinstance(request, AuditRequest):
            return answers(self, caller, request, payload)
        if way == "shows it when the weights are gone":
            return late(answers(self, caller, request, payload))
        if way in ("refuses", "says it was started again"):
            return answers(self, caller, replace(request, index=7, step=1 << 30), payload)
        return dodge()

    def lie(self: Any, peer: Any, message: Any) -> None:
        if way == "says it was started again" and isinstance(message, Heartbeat) and self._me == liar:
            message = replace(message, incarnation=message.incarnation ^ 1)
        if way == "says nothing for a while" and self._me == liar and swarm.loop.time() < hushed_at + 1.3:
            return
        tell(self, peer, message)

    monkeypatch.setattr(Peer, "_answers", refuse)
    monkeypatch.setattr(MemoryTransport, "tell", lie)

    async def script(swarm: VirtualSwarm) -> None:
        nonlocal liar
        liar = swarm.nodes[0].peer_id
        await until(lambda: struck, every_s=1.0)
        await reached(swarm, swarm.nodes[0].peer.replicas[0].member.version + 5)
        raise Enough

    swarm.run(script=script)
    assert set(withheld) == {liar} and set(struck) == {liar}


def test_who_tells_too_much_of_what_was_sent_is_heard_no_more_until_the_next_step() -> None:
    """Each word that nobody has heard before costs a signature, and a call to whoever has counted that."""
    swarm = VirtualSwarm(replace(PLAN, stages=2, steps=6), 1)
    heard: Counter[str] = Counter()

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 2)
        flooder = swarm.nodes[0]
        replica = flooder.peer.replicas[0]
        stamp = next(iter(replica.auditor.cases._sums.values())).stamp
        for number in range(2000):
            words = Sent(stamp, number % 8, "output", number.to_bytes(32, "big"), flooder.peer_id, bytes(32), bytes(32))
            words = replace(words, signature=SimulatedSigner(flooder.peer_id).sign(statement(words)))
            for mate in swarm.nodes:
                if mate.stages == (0,) and mate is not flooder:
                    mate.peer.on_tell(flooder.peer_id, words)
        for mate in swarm.nodes:
            if mate.stages == (0,) and mate is not flooder:
                heard[mate.peer_id] = sum(
                    len(known.compared) for known in mate.peer.replicas[0].auditor.cases._sums.values()
                )

    swarm.run(script=script)
    assert heard and all(0 < count <= 32 + 2 * PLAN.microbatches + 20 for count in heard.values()), heard


def test_nobody_has_work_computed_again_that_it_can_compute_itself() -> None:
    """Who is of another numerics class may ask what was made; a mate of the same would cost others their devices."""
    swarm = VirtualSwarm(replace(PLAN, steps=8, audit=Audits(microbatches=1e-9, contributions=0.0)), 1)
    answers, named = list[Any](), set[str]()

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 3)
        asker, mate = swarm.nodes[:2]
        known = list(asker.peer.replicas[0].auditor.cases._sums.values())[-1]
        for index, peer in known.owners.items():
            if peer == mate.peer_id:
                request = AuditRequest(known.stamp.step, 0, index, peer, made=True)
                call = swarm.network.transport(asker.peer_id).call(peer, request, (), deadline=60.0)
                answers.extend([answer async for answer in call])

    swarm.hooks.append(lambda peer, event, fields: named.add(fields["peer"]) if event == "asks_too_often" else None)
    swarm.run(script=script)
    assert answers and named == {swarm.nodes[0].peer_id}
    assert all(isinstance(each, Rejected) and each.code is RejectCode.TOO_OFTEN for each in answers), answers
