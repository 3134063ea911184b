"""A peer that ends its process before its work is audited: by malice, or because its machine crashes."""

from __future__ import annotations

import asyncio
from typing import Any

from strike import kill_and_restart, node_of, reached

from swarmnet.audit.cases import APART
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Audits
from swarmnet.testing.clock import SimulatedProcess
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_engine import NUM_ELEMENTS
from swarmnet.testing.virtual_swarm import VirtualSwarm
from tests.benchmark_modules import load

strangers = load("strangers")

import strangers_lies  # noqa: E402  # beside it

MOST = 3
"""Steps with false work: each of three replicas audits a third of what it contributes, and two ends must be its own."""

EVERYTHING = Audits(microbatches=0.0, contributions=1.0)
RARELY = Audits(microbatches=0.0, contributions=0.05)


class RestartsAfterFalseWork(strangers_lies.Lie):
    """adds a false gradient in one step of 20, and ends its process as soon as that step is applied"""

    def begin(self) -> None:
        super().begin()
        self.swarm.loop.start(SimulatedProcess(PeerId("operator")), self.restart())

    def bend(self, engine: Any) -> Any:
        async def accumulate(stash: Any) -> bool:
            added: bool = await engine.accumulate(stash)
            if added and self.lying and stash.step % 20 == 17:
                into = engine.accumulator(stash.step)
                false = engine.arithmetic.numbers([5] * (NUM_ELEMENTS - 1) + [0])
                into.total = engine.arithmetic.add(into.total, false)
            return added

        return strangers_lies.Bent(engine, accumulate=accumulate)

    async def restart(self) -> None:
        ended = -1
        while True:
            await asyncio.sleep(0.05)
            replica = self.node.peer.replicas.get(self.stage) if self.node is not None else None
            version = replica.member.version if replica is not None else 0
            if self.lying and version % 20 == 18 and version != ended:
                ended = version
                self.swarm.kill(self.node)
                await asyncio.sleep(1.0)
                self.node = self.swarm.add((self.stage,), self.me)


def test_who_has_no_process_left_to_show_its_false_work_is_excluded() -> None:
    trial = strangers.Trial(3, 75.0, 1, strangers_lies.STAGE, 20.0, EVERYTHING)
    liar = RestartsAfterFalseWork(trial.swarm, PeerId("liar.0"))
    trial.run([liar])
    assert len(trial.judge([liar.me])) <= MOST and trial.named(liar.me)["excluded"], trial.tainted
    assert not trial.wronged and not trial.broken and trial.steps > 80


def test_a_peer_that_crashes_now_and_then_is_not_excluded() -> None:
    plan = Plan(stages=1, replicas=3, microbatches=3, steps=4 * APART, forward_s=0.1, audit=RARELY)
    swarm = VirtualSwarm(plan, 1)

    async def script(swarm: VirtualSwarm) -> None:
        victim = swarm.nodes[0].peer_id
        for crash in range(1, 4):
            await reached(swarm, crash * (APART + 4))
            kill_and_restart(swarm, node_of(swarm, victim), after_s=1.0)

    swarm.run(script=script)
    assert swarm.counts["audited"] and not swarm.counts["late"] and not swarm.counts["excluded"]
