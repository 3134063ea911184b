"""What members of a simulated swarm counted is shown to mates, who find the same outputs, gradients and sums."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Literal

import pytest
from strike import check_always, kill_and_restart, reached, watched

from swarmnet.errors import Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Audits
from swarmnet.messages import AuditData, AuditRequest, Rejected, Request, WorkRecord
from swarmnet.pipeline.works import MOST_ASKS, digest
from swarmnet.pledge import proves, whole_of
from swarmnet.stage.interfaces import PastWork
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_engine import product
from swarmnet.testing.virtual_swarm import Node, VirtualSwarm
from swarmnet.transport import ask

SEED = b"of the aggregate's vector"

SELDOM = Audits(microbatches=1e-9, contributions=0.0)
"""Works are kept and pledged, and nobody looks at them of itself."""


class Auditors:
    """After each update one replica of a stage looks into all that a mate counted two steps before, each in turn.

    sums: what stands for what a replica had in its accumulator as the step was applied, by (stage, step, peer).
    """

    def __init__(self, swarm: VirtualSwarm) -> None:
        self.swarm, self.looked, self.shares, self.without, self.due = swarm, 0, 0, 0, 0
        self.sums: dict[tuple[int, int, PeerId], bytes] = {}
        self._due: list[tuple[Node, int, int]] = []
        swarm.hooks.append(self._on_event)

    def _on_event(self, peer: PeerId, event: str, fields: dict[str, object]) -> None:
        node = self.swarm.last.get(peer)
        if node is None:
            return
        if event == "applied":
            stage, version = int(str(fields["stage"])), int(str(fields["version"]))
            replica = node.peer.replicas[stage]
            finished = replica.member.last_finished
            assert finished is not None
            for member, _, indexes in finished.contributions:
                if member == peer:
                    assert replica.execution.works.records(version - 1).keys() == indexes
            if self.swarm.replicas(stage).index(node) == version % self.swarm.plan.replicas:
                self._due.append((node, stage, version - 2))

    async def look(self) -> None:
        async with asyncio.TaskGroup() as group:
            looking = []
            while not self.swarm.done:
                await asyncio.sleep(0.02)
                while self._due:
                    looking.append(group.create_task(self._look(*self._due.pop())))
            # Whoever is asked now may have left.
            for task in looking:
                task.cancel()

    async def _look(self, node: Node, stage: int, step: int) -> None:
        mates = [other for other in self.swarm.replicas(stage) if other is not node and other.up]
        if step < 0 or not node.up or not mates:
            return
        self.due += 1
        mate = mates[step % len(mates)]
        held = mate.peer.replicas[stage].execution.works
        records, root, works = held.records(step), held.root(step), list[PastWork]()
        for index, record in records.items():
            request = AuditRequest(step, stage, index, mate.peer_id)
            answer = await ask(self.swarm.network.transport(node.peer_id), mate.peer_id, request)
            # One of them was killed: it remembers nothing, or is not heard yet.
            if isinstance(answer, Rejected):
                self.without += 1
                return
            assert isinstance(answer, AuditData) and answer.work == record
            assert proves(answer.path, record, root)
            works.append((index, *node.peer.replicas[stage].execution.opened(request, answer)))
        try:
            found, share = await node.engines[stage].recompute(step, works, SEED)
        except Refused:
            self.without += 1
            return
        for again, (index, inputs, gradient) in zip(found, works, strict=True):
            # Until a process knows that nobody was it before, it says that it may have sent something else, too.
            assert records[index].resent == (step < 2) or self.swarm.counts["kills"]
            payloads = inputs, again.output, gradient, again.answer
            found_again = WorkRecord(index, *map(digest, payloads), again.loss_sum, again.num_tokens)
            assert replace(records[index], resent=False) == found_again
            self.looked += 1
        if (pledged := self.sums.get((stage, step, mate.peer_id))) is not None:
            assert share == pledged
            self.shares += 1


def remember_sums(swarm: VirtualSwarm, auditors: Auditors) -> None:
    """What each replica has summed, as it is asked for its part in the round."""
    for node in swarm.nodes:
        for stage, engine in node.engines.items():
            apply = engine.apply

            async def applied(commits, node=node, stage=stage, engine=engine, apply=apply):
                total = engine.accumulator(engine.version).total
                auditors.sums[stage, engine.version, node.peer_id] = whole_of(product(SEED, total, 0))
                await apply(commits)

            engine.apply = applied  # type: ignore[method-assign]


@pytest.mark.parametrize("sync", ["exact", "overlap"])
@pytest.mark.parametrize("killed", [False, True])
def test_mates_find_what_was_counted(sync: Literal["exact", "overlap"], killed: bool) -> None:
    plan = Plan(stages=2, replicas=3, microbatches=12, steps=12, sync=sync, boundary_elements=3, audit=SELDOM)
    swarm = watched(plan)
    auditors = Auditors(swarm)

    async def script(swarm: VirtualSwarm) -> None:
        remember_sums(swarm, auditors)
        async with asyncio.TaskGroup() as group:
            group.create_task(auditors.look())
            group.create_task(check_always(swarm))
            if killed:
                await reached(swarm, 4)
                kill_and_restart(swarm, swarm.nodes[1])

    swarm.run(until_s=120.0, script=script)
    assert auditors.shares > plan.steps / 2 and auditors.looked > 2 * auditors.shares
    # Those of the last steps may have been cut off by the end; of a process that was killed nobody hears.
    assert killed or auditors.shares >= auditors.due - 2 * plan.stages
    assert killed or not auditors.without


def test_only_a_mate_is_shown_anything() -> None:
    swarm, said = watched(Plan(stages=2, replicas=2, microbatches=4, steps=4, audit=SELDOM)), {}

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 2)
        asked, mate, stranger = swarm.nodes[2], swarm.nodes[3], swarm.nodes[0]
        index = min(asked.peer.replicas[1].execution.works.records(1))
        for name, node in (("mate", mate), ("stranger", stranger)):
            request = AuditRequest(1, 1, index, asked.peer_id)
            said[name] = await ask(swarm.network.transport(node.peer_id), asked.peer_id, request)

    swarm.run(until_s=60.0, script=script)
    assert isinstance(said["mate"], AuditData)
    assert isinstance(said["stranger"], Rejected) and said["stranger"].code is RejectCode.NOT_A_FEEDER


def test_a_mate_that_asks_for_ever_is_refused_and_named() -> None:
    """It is shown each work so many times, and its asking costs no other mate anything."""
    swarm, shown = watched(Plan(stages=1, replicas=3, microbatches=6, steps=8, audit=SELDOM)), Counter[AuditRequest]()

    async def script(swarm: VirtualSwarm) -> None:
        await reached(swarm, 2)
        asked, greedy, other = swarm.nodes
        indexes = asked.peer.replicas[0].execution.works.records(1)
        requests = [AuditRequest(1, 0, index, asked.peer_id) for index in indexes]
        for request in (MOST_ASKS + 3) * requests:
            answer = await ask(swarm.network.transport(greedy.peer_id), asked.peer_id, request)
            if isinstance(answer, AuditData):
                shown[request] += 1
            else:
                assert isinstance(answer, Rejected) and answer.code is RejectCode.TOO_OFTEN
        for request in requests:
            assert isinstance(await ask(swarm.network.transport(other.peer_id), asked.peer_id, request), AuditData)

    swarm.run(until_s=60.0, script=script)
    assert shown and set(shown.values()) == {MOST_ASKS}
    named = {(peer, fields["peer"]) for _, peer, event, fields in swarm.events if event == "asks_too_often"}
    assert named == {(swarm.nodes[0].peer_id, swarm.nodes[1].peer_id)}


def test_correct_auditors_ask_no_more_often_than_they_may() -> None:
    """Each of three looks at all works, alone and within whole contributions."""
    plan = Plan(stages=1, replicas=4, microbatches=8, steps=12, audit=Audits(microbatches=1.0, contributions=1.0))
    swarm, asked = watched(plan), Counter[tuple[PeerId, PeerId, AuditRequest]]()

    def count(caller: PeerId, callee: PeerId, request: Request) -> None:
        if isinstance(request, AuditRequest):
            asked[caller, callee, request] += 1

    swarm.network.intercepts.append(count)
    swarm.run(until_s=300.0)
    assert swarm.counts["audited"] and max(asked.values()) <= 2 < MOST_ASKS
    assert not swarm.counts["asks_too_often"] and not swarm.counts["withheld"]
