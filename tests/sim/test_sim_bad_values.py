"""Peers that send what is not finite: they are left for others, nothing is voided, and the weights are the oracle's."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
from strike import watched

from swarmnet.errors import RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Fetched, Gradient, Packed, Process, Rejected
from swarmnet.net.ask import ask
from swarmnet.simulate.clock import Process as Running
from swarmnet.simulate.engine import tokens_of
from swarmnet.simulate.plan import Plan
from swarmnet.simulate.swarm import Swarm

PLAN = Plan(stages=3, replicas=2, microbatches=6, steps=4, max_void=0)
NAN = Packed("fp32", (1, 1, 1), struct.pack("<f", math.nan))
LONG = Packed("fp32", (1, 1, 2), struct.pack("<ff", 1.0, 2.0))
STRANGER = PeerId("stranger")


class Mute:
    """A stranger that serves nothing."""

    def on_tell(self, caller, message) -> None:
        pass

    async def on_call(self, caller, request, read):
        yield Rejected(RejectCode.NOT_SERVED)

    def on_gone(self, peer, *, definite) -> None:
        pass


async def begun(swarm: Swarm) -> None:
    """Everybody has state: from now on calls are looked at."""
    synced, there = set(), asyncio.Event()

    def look(peer: PeerId, event: str, fields: dict[str, object]) -> None:
        if event == "synced":
            synced.add(peer)
            if len(synced) == len(swarm.nodes):
                there.set()

    swarm.hooks.append(look)
    await there.wait()


def unharmed(swarm: Swarm) -> None:
    """Nothing was left out, nobody stopped; that the weights are right, the run itself has checked."""
    assert not swarm.counts["voided"] and not swarm.counts["halted"]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_stranger_uploads_nan_to_everybody(stage: int, seed: int) -> None:
    swarm = watched(PLAN, seed)
    answers: list[Answer] = []
    bad = (tokens_of(0)[0], NAN) if stage else (Packed("int32", (1, 2), struct.pack("<ii", -1, 1)),)

    async def script(swarm: Swarm) -> None:
        swarm.network.attach(STRANGER, Running(STRANGER), Mute())
        transport = swarm.network.transport(STRANGER)
        await begun(swarm)

        async def send(peer: PeerId, step: int, index: int) -> None:
            answers.append(await ask(transport, peer, Process(step, stage, index), bad, patience=lambda: 20.0))

        async with asyncio.TaskGroup() as group:
            for step in range(PLAN.steps):
                for node in swarm.replicas(stage):
                    for index in range(PLAN.microbatches):
                        group.create_task(send(node.peer_id, step, index))
                await asyncio.sleep(0.5)

    swarm.run(until_s=120.0, script=script)
    unharmed(swarm)
    refused = [answer for answer in answers if isinstance(answer, Rejected)]
    assert any(answer.code in (RejectCode.NON_FINITE, RejectCode.MALFORMED) for answer in refused)
    assert not any(answer.code is RejectCode.VOID for answer in refused)


def lying(swarm: Swarm, liar: str, change: Callable[[Answer], Answer]) -> list[Answer]:
    """Change what one peer answers; returns the lies it told."""
    answer, told = swarm.network._answer, []

    def changed(call, said) -> None:
        if call.callee == liar and said is not None and (lie := change(said)) is not said:
            told.append(lie)
            said = lie
        answer(call, said)

    swarm.network._answer = changed  # type: ignore[method-assign]
    return told


@pytest.mark.parametrize("wrong", [NAN, LONG], ids=["nan", "shape"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_replica_answers_bad_gradients_and_is_left_alone(stage: int, wrong: Packed) -> None:
    swarm = watched(PLAN)
    liar = f"s{stage}.{2 * stage}"

    def lie(said: Answer) -> Answer:
        return replace(said, payload=(wrong,)) if isinstance(said, Gradient | Fetched) and said.num_tokens else said

    told = lying(swarm, liar, lie)
    swarm.run(until_s=240.0)
    unharmed(swarm)
    left = [fields for _, _, event, fields in swarm.events if event == "rerouted" and fields["from"] == liar]
    assert told and any(fields["reason"] == "BadMessage" for fields in left)
