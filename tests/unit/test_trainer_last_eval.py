"""The held-out loss of a run's last weights: measured once all steps are done, and never waited for in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from trainers import ME, REPLICA, RUN, Feeding, fed, replica

from swarmnet.directory import Record
from swarmnet.errors import PeerGone, RejectCode
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Manifest, Training
from swarmnet.messages import Accepted, Answer, Gradient, History, HistoryRequest, Process, Rejected
from swarmnet.telemetry.figures import Evaluation
from swarmnet.testing.doubles import Script, run_virtual
from swarmnet.trainer.trainer import feeder
from swarmnet.transport import ReadPayload

STEPS = 50
MANIFEST = Manifest(training=Training(total_steps=STEPS, eval_every=20, eval_microbatches=3))
NUM_TOKENS = MANIFEST.training.microbatch_size * MANIFEST.training.sequence_length
FURTHER = tuple(PeerId(f"replica of {stage}") for stage in range(1, MANIFEST.cut.stages))


def loss_of(nats: float) -> Gradient:
    """What a replica answers, per token."""
    return Gradient(nats * NUM_TOKENS, NUM_TOKENS, route=FURTHER)


def run(answer: Callable[[Process], Script], manifest: Manifest = MANIFEST, *others: Record) -> Feeding:
    """A trainer joins a finished run; answer: what its replica says to an evaluation."""
    return fed(manifest, lambda: (replica(version=STEPS), *others), lambda peer, request: [Accepted(), answer(request)])


def remembered(run: Feeding) -> list[Answer]:
    """What the trainer tells an observer at the end."""

    async def asked() -> list[Answer]:
        read = ReadPayload((), lambda: asyncio.sleep(0, ()))
        return [answer async for answer in run.trainer.on_call(PeerId("anybody"), HistoryRequest(), read)]

    return run_virtual(asked())


def test_the_last_weights_are_measured_and_published() -> None:
    swarm = run(lambda request: loss_of(0.5 + request.index))
    *first, again = asked = [request for _, request in swarm.transport.requests]
    assert {(request.step, request.purpose) for request in asked} == {(STEPS, "eval")}
    assert sorted(request.index for request in first) == [0, 1, 2] and not any(request.avoid for request in first)
    assert set(again.avoid) == {REPLICA, *FURTHER}
    measured = {"step": STEPS, "loss": 1.5, "num_tokens": 3 * NUM_TOKENS}
    assert [event[1:] for event in swarm.events] == [("evaluated", measured), ("done", {"step": STEPS})]
    assert swarm.directory.published[-1].eval_loss == (STEPS, 1.5) and swarm.directory.published[-1].trainer
    assert remembered(swarm) == [History(evaluations=(Evaluation(STEPS, 1.5),))]


def test_a_manifest_without_evaluations_has_none() -> None:
    training = MANIFEST.training.model_copy(update={"eval_every": 0})
    swarm = run(lambda request: Gradient(1.0, 1), MANIFEST.model_copy(update={"training": training}))
    assert [event[1:] for event in swarm.events] == [("done", {"step": STEPS})] and not swarm.transport.calls


@pytest.mark.parametrize("code", [RejectCode.FINISHED, RejectCode.STALE])
def test_a_refusal_is_an_answer(code: RejectCode) -> None:
    swarm = run(lambda request: Rejected(code, "no"))
    assert swarm.names == ["not_evaluated", "done"] and swarm.took_s < 1


def test_what_a_second_look_contradicts_is_not_published() -> None:
    """By the only route there is: nobody can tell when it was right."""
    swarm = run(lambda request: loss_of(0.5 if request.avoid else 1.0))
    assert swarm.names == ["eval_disputed", "not_evaluated", "done"]
    (_, _, disputed), (_, _, without), _ = swarm.events
    assert disputed["step"] == STEPS and disputed["losses"] == [1.0, 0.5]
    assert disputed["routes"] == [[REPLICA, *FURTHER]] * 2
    assert without == {
        "step": STEPS,
        "reason": f"microbatch {disputed['number']} has another loss by another route, and there is no third",
    }
    assert swarm.directory.published[-1].eval_loss is None and remembered(swarm) == [History()]


def test_nobody_left_to_ask_ends_the_wait() -> None:
    swarm = run(lambda request: PeerGone("refused", definite=True))
    assert [event for event in swarm.names if event != "rerouted"] == ["not_evaluated", "done"]
    assert swarm.took_s == pytest.approx(15, abs=1)


@pytest.mark.parametrize("left", [False, True])
def test_the_share_of_a_trainer_that_has_left_is_taken_over(left: bool) -> None:
    other = next(
        name for name in (PeerId(f"other-{number}") for number in range(100)) if feeder([name, ME], STEPS, -1) == name
    )
    record = Record(RUN, other, 3, (), (), trainer=True, finished=left)
    assert run(lambda request: loss_of(1.0), MANIFEST, record).names == (["evaluated", "done"] if left else ["done"])
