"""Peers that send what is not finite, or tokens of something else: they are named and left for others, nothing is
discarded, and the weights are the reference's."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
from further import further
from strike import watched

from swarmnet.errors import RejectCode
from swarmnet.ids import PeerId
from swarmnet.messages import Answer, Fetched, Gradient, Packed, Process, Rejected
from swarmnet.testing.clock import SimulatedProcess
from swarmnet.testing.doubles import FakeService
from swarmnet.testing.network import Message
from swarmnet.testing.plan import Plan
from swarmnet.testing.virtual_engine import proven_tokens_of
from swarmnet.testing.virtual_swarm import VirtualSwarm
from swarmnet.transport import ask

PLAN = Plan(stages=3, replicas=2, microbatches=6, steps=4, max_discarded=0)
HIDDEN = Packed("fp32", (1, 1, 1), struct.pack("<f", 7.0))
NAN = Packed("fp32", (1, 1, 1), struct.pack("<f", math.nan))
LONG = Packed("fp32", (1, 1, 2), struct.pack("<ff", 1.0, 2.0))
STRANGER = PeerId("stranger")


async def begun(swarm: VirtualSwarm) -> None:
    """Everybody has state: from now on calls are looked at."""
    synced, there = set(), asyncio.Event()

    def look(peer: PeerId, event: str, fields: dict[str, object]) -> None:
        if event == "synced":
            synced.add(peer)
            if len(synced) == len(swarm.nodes):
                there.set()

    swarm.hooks.append(look)
    await there.wait()


def unharmed(swarm: VirtualSwarm) -> None:
    """Nothing was left out, nobody stopped; that the weights are right, the run itself has checked."""
    assert not swarm.counts["discarded"] and not swarm.counts["halted"]


def not_finite(number: int, stage: int) -> tuple[Packed, ...]:
    """What stage `stage` cannot use; in stage 0, where nothing else is sent, tokens that are none."""
    tokens, proof = proven_tokens_of(number)
    return (tokens, NAN, proof) if stage else (Packed("int32", (1, 2), struct.pack("<ii", -1, 1)), proof)


def of_another(number: int, stage: int) -> tuple[Packed, ...]:
    """Well-formed, with a good proof, of the next microbatch."""
    tokens, proof = proven_tokens_of(number + 1)
    return (tokens, HIDDEN, proof) if stage else (tokens, proof)


def with_its_proof(number: int, stage: int) -> tuple[Packed, ...]:
    """Tokens of its own under the proof of those that belong there."""
    mine, (_, proof) = Packed("int32", (1, 2), struct.pack("<ii", 1, 2)), proven_tokens_of(number)
    return (mine, HIDDEN, proof) if stage else (mine, proof)


@pytest.mark.parametrize("wrong", [not_finite, of_another, with_its_proof])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("seed", [0, *further(1)])
def test_somebody_uploads_what_is_wrong_to_everybody(
    wrong: Callable[[int, int], tuple[Packed, ...]], stage: int, seed: int
) -> None:
    """In stage 0 a stranger; further on, where strangers are not heard, a replica of the stage before."""
    swarm = watched(PLAN, seed)
    answers: list[Answer] = []
    liar = PeerId(f"s{stage - 1}.{2 * stage - 2}") if stage else STRANGER

    async def script(swarm: VirtualSwarm) -> None:
        swarm.network.attach(STRANGER, SimulatedProcess(STRANGER), FakeService())
        transport = swarm.network.transport(liar)
        await begun(swarm)

        async def send(peer: PeerId, step: int, index: int) -> None:
            bad = wrong(step * PLAN.microbatches + index, stage)
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
    code = RejectCode.NON_FINITE if wrong is not_finite and stage else RejectCode.MALFORMED
    assert any(answer.code is code for answer in refused)
    assert not any(answer.code is RejectCode.OVERFLOWED for answer in refused)
    named = {
        (fields["peer"], fields["stage"], fields["code"])
        for _, _, event, fields in swarm.events
        if event == "bad_input"
    }
    assert named == {(liar, stage, code.value)}


def lying(swarm: VirtualSwarm, liar: str, change: Callable[[Answer], Answer]) -> list[Answer]:
    """Change what one peer answers; returns the lies it told."""
    told: list[Answer] = []

    def changed(callee: PeerId, caller: PeerId, said: Message) -> Message | None:
        if callee == liar and isinstance(said, Answer) and (lie := change(said)) is not said:
            told.append(lie)
            return lie
        return None

    swarm.network.intercepts.append(changed)
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
    left = [fields for _, _, event, fields in swarm.events if event == "rerouted" and fields["peer"] == liar]
    assert told and any(fields["reason"] == "BadMessage" for fields in left)
