"""The held-out loss of a run's last weights: measured once all steps are done, and never waited for in vain."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import pytest

from swarmnet.directory import Record, StageStatus
from swarmnet.errors import PeerGone, RejectCode
from swarmnet.ids import PeerId, RunId, first_chain
from swarmnet.manifest.schema import Manifest, Training
from swarmnet.messages import (
    Accepted,
    Answer,
    Control,
    Evaluation,
    Gradient,
    History,
    HistoryRequest,
    Packed,
    Process,
    Rejected,
    Request,
)
from swarmnet.testing.clock import VirtualLoop
from swarmnet.trainer.trainer import Trainer, feeder
from swarmnet.transport import ReadPayload

RUN, ME, REPLICA = RunId("00" * 32), PeerId("trainer"), PeerId("replica")
STEPS = 50
MANIFEST = Manifest(training=Training(total_steps=STEPS, eval_every=20, eval_microbatches=3))
NUM_TOKENS = MANIFEST.training.microbatch_size * MANIFEST.training.sequence_length
TOKENS = (Packed("int32", (1,), b"\0" * 4),)
FURTHER = tuple(PeerId(f"replica of {stage}") for stage in range(1, MANIFEST.cut.stages))


def loss_of(nats: float) -> Gradient:
    """What a replica answers, per token."""
    return Gradient(nats * NUM_TOKENS, NUM_TOKENS, route=FURTHER)


@dataclass
class Swarm:
    """A directory of a finished run, and a transport to its one replica. answer: what that says to an evaluation."""

    answer: Callable[[Process], Answer]
    asked: list[Process] = field(default_factory=list)
    published: list[Record] = field(default_factory=list)
    others: tuple[Record, ...] = ()
    remembered: list[Answer] = field(default_factory=list)
    """What the trainer tells an onlooker at the end."""

    async def publish(self, record: Record) -> None:
        self.published.append(record)

    def complete(self) -> bool:
        return True

    async def records(self, near: object = None, *, at_once: bool = False) -> tuple[Record, ...]:
        status = StageStatus(0, STEPS, first_chain(RUN, 0), synced=True, slots=4)
        return (Record(RUN, REPLICA, 1, (), (status,)), *self.others)

    def tell(self, peer: PeerId, message: Control) -> None:
        """Nothing is told here."""

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        assert isinstance(request, Process)
        self.asked.append(request)
        yield Accepted()
        yield self.answer(request)


async def nothing() -> tuple[Packed, ...]:
    return ()


def run(swarm: Swarm, manifest: Manifest = MANIFEST) -> tuple[list[tuple[str, dict[str, object]]], float]:
    """Run a trainer that joins now; its events, and how long it took on virtual time."""
    events: list[tuple[str, dict[str, object]]] = []
    trainer = Trainer(
        ME,
        manifest,
        transport=swarm,
        directory=swarm,
        record=lambda: Record(RUN, ME, 2, (), ()),
        tokens=lambda number: TOKENS,
        eval_tokens=lambda number: TOKENS,
        on_event=lambda event, fields: events.append((event, fields)),
    )

    async def story() -> None:
        await trainer.run()
        answers = trainer.on_call(PeerId("anybody"), HistoryRequest(), ReadPayload((), nothing))
        swarm.remembered += [answer async for answer in answers]

    loop = VirtualLoop()
    try:
        loop.run_until_complete(story())
        return events, loop.time()
    finally:
        loop.close()


def test_the_last_weights_are_measured_and_published() -> None:
    swarm = Swarm(lambda request: loss_of(0.5 + request.index))
    events, _ = run(swarm)
    assert {(request.step, request.purpose) for request in swarm.asked} == {(STEPS, "eval")}
    *first, again = swarm.asked
    assert sorted(request.index for request in first) == [0, 1, 2] and not any(request.avoid for request in first)
    assert set(again.avoid) == {REPLICA, *FURTHER}
    measured = {"step": STEPS, "loss": 1.5, "num_tokens": 3 * NUM_TOKENS}
    assert events == [("evaluated", measured), ("done", {"step": STEPS})]
    assert swarm.published[-1].eval_loss == (STEPS, 1.5) and swarm.published[-1].trainer
    assert swarm.remembered == [History(evaluations=(Evaluation(STEPS, 1.5),))]


def test_a_manifest_without_evaluations_has_none() -> None:
    training = MANIFEST.training.model_copy(update={"eval_every": 0})
    swarm = Swarm(lambda request: Gradient(1.0, 1))
    assert run(swarm, MANIFEST.model_copy(update={"training": training}))[0] == [("done", {"step": STEPS})]
    assert not swarm.asked


@pytest.mark.parametrize("code", [RejectCode.FINISHED, RejectCode.STALE])
def test_a_refusal_is_an_answer(code: RejectCode) -> None:
    events, seconds = run(Swarm(lambda request: Rejected(code, "no")))
    assert [event for event, _ in events] == ["not_evaluated", "done"] and seconds < 1


def test_what_a_second_look_contradicts_is_not_published() -> None:
    """By the only route there is: nobody can tell when it was right."""
    swarm = Swarm(lambda request: loss_of(0.5 if request.avoid else 1.0))
    events, _ = run(swarm)
    assert [event for event, _ in events] == ["eval_disputed", "not_evaluated", "done"]
    (_, disputed), (_, without), _ = events
    assert disputed["step"] == STEPS and disputed["losses"] == [1.0, 0.5]
    assert disputed["routes"] == [[REPLICA, *FURTHER]] * 2
    assert without == {
        "step": STEPS,
        "reason": f"microbatch {disputed['number']} has another loss by another route, and there is no third",
    }
    assert swarm.published[-1].eval_loss is None and swarm.remembered == [History()]


def test_nobody_left_to_ask_ends_the_wait() -> None:
    def gone(request: Process) -> Answer:
        raise PeerGone("refused", definite=True)

    events, seconds = run(Swarm(gone))
    assert [event for event, _ in events if event != "rerouted"] == ["not_evaluated", "done"]
    assert seconds == pytest.approx(20, abs=1)


@pytest.mark.parametrize("left", [False, True])
def test_the_share_of_a_trainer_that_has_left_is_taken_over(left: bool) -> None:
    other = next(
        name for name in (PeerId(f"other-{number}") for number in range(100)) if feeder([name, ME], STEPS, -1) == name
    )
    record = Record(RUN, other, 3, (), (), trainer=True, finished=left)
    swarm = Swarm(lambda request: loss_of(1.0), others=(record,))
    events, _ = run(swarm)
    assert [event for event, _ in events] == (["evaluated", "done"] if left else ["done"])
