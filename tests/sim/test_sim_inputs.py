"""Inputs have owners: real windows with real proofs through a swarm, and callers that may not feed a stage."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from strike import watched

from swarmnet.data.sampler import Sampler
from swarmnet.data.tokens import Tokens
from swarmnet.data.windows import WindowTree
from swarmnet.errors import RejectCode
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Data
from swarmnet.messages import Answer, Fetched, Packed, Process, Rejected
from swarmnet.pipeline.execution import Execution
from swarmnet.pipeline.windows import OwnTokens, ProvenWindows
from swarmnet.testing import virtual_reference, virtual_swarm
from swarmnet.testing.clock import SimulatedProcess
from swarmnet.testing.doubles import FakeService
from swarmnet.testing.network import Message
from swarmnet.testing.plan import Plan, manifest_of
from swarmnet.testing.virtual_engine import proven_tokens_of
from swarmnet.testing.virtual_swarm import VirtualSwarm
from swarmnet.trainer.trainer import Trainer
from swarmnet.transport import ReadPayload, ask

PLAN = Plan(stages=3, replicas=2, microbatches=6, steps=6)
STRANGER = PeerId("stranger")
HIDDEN = Packed("fp32", (1, 1, 1), bytes(4))


def proven(plan: Plan, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> OwnTokens:
    """The simulator's tokens are those of a real stream now, with real proofs that are really checked."""
    ids = np.random.default_rng(seed).integers(0, 251, 200).astype(np.uint8)
    tokens, shape = Tokens(ids, 256, "here.txt", "e" * 64), manifest_of(plan)
    root = WindowTree(tokens, 1, Sampler(0, 200, 1, 1).num_windows).root
    data = Data(num_tokens=200, tokens_sha256=tokens.sha256, tokens_root=root, tokenizer_sha256="e" * 64)
    own = OwnTokens(tokens, data, shape.training)
    monkeypatch.setattr(virtual_swarm, "proven_tokens_of", own.training)
    monkeypatch.setattr(virtual_swarm.SimulatedTokens, "training", staticmethod(own.training))
    monkeypatch.setattr(virtual_swarm, "SimulatedWindows", lambda microbatches: ProvenWindows.of(data, shape.training))
    monkeypatch.setattr(virtual_reference, "tokens_of", lambda number: own.training(number)[:1])
    return own


@pytest.mark.parametrize("data_at_peers", [True, False])
def test_real_windows_go_through_all_stages(data_at_peers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner dies in the middle, so that its inputs are fetched, from mates, stages before, and trainers."""
    plan = Plan(stages=3, replicas=2, microbatches=6, steps=5, trainers=2, data_at_peers=data_at_peers)
    proven(plan, monkeypatch)
    here = watched(plan, 1)

    async def script(here: VirtualSwarm) -> None:
        await asyncio.sleep(1.3)
        here.kill(here.replicas(0)[0])
        here.kill(here.replicas(1)[0])

    here.run(until_s=200.0, script=script)  # holds all sums and weights against one process
    assert not here.counts["bad_input"] and not here.counts["turned_away"]


@pytest.mark.parametrize("lie", ["tokens", "another window", "path"])
def test_a_stranger_with_other_tokens_changes_nothing_and_is_named(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = proven(PLAN, monkeypatch)
    here = watched(PLAN, 2)
    answers: list[Answer] = []

    def wrong(number: int) -> tuple[Packed, ...]:
        (tokens, path), (others, others_path) = own.training(number), own.training(number + 1)
        if lie == "another window":
            return others, others_path
        return (others, path) if lie == "tokens" else (tokens, Packed("uint8", path.shape, bytes(len(path.data))))

    async def script(here: VirtualSwarm) -> None:
        here.network.attach(STRANGER, SimulatedProcess(STRANGER), FakeService())
        transport = here.network.transport(STRANGER)
        for step in range(PLAN.steps):
            for node in here.replicas(0):
                for index in range(PLAN.microbatches):
                    answers.append(
                        await ask(
                            transport,
                            node.peer_id,
                            Process(step, 0, index),
                            wrong(step * PLAN.microbatches + index),
                            patience=lambda: 5.0,
                        )
                    )

    here.run(until_s=200.0, script=script)
    refused = [answer for answer in answers if isinstance(answer, Rejected) and answer.code is RejectCode.MALFORMED]
    assert refused and "is not proven to be window" in refused[0].reason
    named = [fields for _, _, event, fields in here.events if event == "bad_input"]
    assert {(fields["peer"], fields["stage"]) for fields in named} == {(STRANGER, 0)}
    assert len(named) <= 2 * (PLAN.steps + 1)  # once a replica and version, however often it tries


def test_a_holder_that_hands_out_other_tokens_is_named_and_another_one_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody feeds and no peer has data: the leader's orders are carried out with what a trainer hands out."""
    plan = Plan(stages=2, replicas=2, microbatches=4, steps=3, trainers=2, data_at_peers=False)
    own = proven(plan, monkeypatch)
    here = watched(plan, 3)

    def lying(callee: PeerId, caller: PeerId, said: Message) -> Message | None:
        lies = callee == "trainer.0" and isinstance(said, Fetched) and said.payload
        return Fetched(own.training(99)) if lies else None

    async def nothing(*_: object) -> None:
        await asyncio.Event().wait()

    here.network.intercepts.append(lying)
    monkeypatch.setattr(Trainer, "_send", nothing)
    here.run(until_s=300.0)
    assert here.counts["ordered"]
    assert {fields["peer"] for _, _, event, fields in here.events if event == "bad_input"} == {"trainer.0"}


@pytest.mark.parametrize("purpose", ["train", "eval"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_stranger_may_not_feed_later_stages(stage: int, purpose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens and proof are good, its activations are its own: refused, and not a byte of them is read."""
    here = watched(Plan(stages=3, replicas=2, microbatches=6, steps=6, eval_every=1), 4)
    answers: list[Answer] = []
    receive = Execution.receive

    async def watching(execution: Execution, caller: PeerId, request: Process, read: ReadPayload) -> tuple[Packed, ...]:
        assert caller != STRANGER, "its payload is read"
        return await receive(execution, caller, request, read)

    monkeypatch.setattr(Execution, "receive", watching)

    async def script(here: VirtualSwarm) -> None:
        here.network.attach(STRANGER, SimulatedProcess(STRANGER), FakeService())
        transport = here.network.transport(STRANGER)
        await asyncio.sleep(0.5)
        for step in range(6):
            for node in here.replicas(stage):
                tokens, proof = proven_tokens_of(6 * step)
                payload = (tokens, HIDDEN, proof) if purpose == "train" else (tokens, HIDDEN)
                answers.append(
                    await ask(transport, node.peer_id, Process(step, stage, 0, purpose), payload, patience=lambda: 5.0)
                )

    here.run(until_s=200.0, script=script)
    assert len(answers) == 12
    for answer in answers:
        assert isinstance(answer, Rejected) and answer.code is RejectCode.NOT_A_FEEDER
        assert answer.reason.startswith(f"you are not known here as a replica of stage {stage - 1}")
    named = {(fields["peer"], fields["stage"]) for _, _, event, fields in here.events if event == "turned_away"}
    assert named == {(STRANGER, stage)}
