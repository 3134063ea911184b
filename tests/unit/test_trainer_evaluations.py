"""Evaluations beside feeding: what they hold back, for how long, in which order they are told, and how they end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from swarmnet.directory import Record, StageStatus
from swarmnet.errors import Refused, RejectCode
from swarmnet.ids import PeerId, RunId, first_chain
from swarmnet.manifest.schema import Cut, Manifest, Training
from swarmnet.messages import Accepted, Answer, Control, Gradient, Packed, Process, Request, Running
from swarmnet.testing.clock import VirtualLoop
from swarmnet.trainer.evaluations import Evaluations
from swarmnet.trainer.trainer import Trainer

RUN, ME, REPLICA = RunId("00" * 32), PeerId("trainer"), PeerId("replica")
SHARE = 4
MANIFEST = Manifest(
    cut=Cut(stages=1), training=Training(total_steps=3, microbatches=SHARE, eval_every=1, eval_microbatches=2)
)
NUM_TOKENS = MANIFEST.training.microbatch_size * MANIFEST.training.sequence_length
TOKENS = (Packed("int32", (1,), b"\0" * 4),)


def _now() -> float:
    return asyncio.get_running_loop().time()


def on_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


@dataclass
class OneReplica:
    """A directory and a transport. It answers training at once, an evaluation after `score_s`, and is `Running`."""

    score_s: float
    asked: list[tuple[float, Process]] = field(default_factory=list)

    async def publish(self, record: Record) -> None:
        pass

    def complete(self) -> bool:
        return True

    async def records(self, near: object = None, *, at_once: bool = False) -> tuple[Record, ...]:
        status = StageStatus(0, 0, first_chain(RUN, 0), synced=True, slots=2 * SHARE)
        return (Record(RUN, REPLICA, 1, (), (status,)),)

    def tell(self, peer: PeerId, message: Control) -> None:
        pass

    async def call(
        self, peer: PeerId, request: Request, payload: tuple[Packed, ...] = (), *, deadline: float
    ) -> AsyncGenerator[Answer, None]:
        assert isinstance(request, Process)
        self.asked.append((_now(), request))
        yield Accepted()
        until = _now() + (self.score_s if request.purpose == "eval" else 0.0)
        while _now() < until:
            await asyncio.sleep(min(0.5, until - _now()))
            yield Running()
        yield Gradient(float(NUM_TOKENS), NUM_TOKENS)


def fed(swarm: OneReplica) -> list[tuple[str, dict[str, object]]]:
    events: list[tuple[str, dict[str, object]]] = []
    trainer = Trainer(
        ME,
        MANIFEST,
        transport=swarm,
        directory=swarm,
        record=lambda: Record(RUN, ME, 2, (), ()),
        tokens=lambda number: TOKENS,
        eval_tokens=lambda number: TOKENS,
        on_event=lambda event, fields: events.append((event, fields)),
    )
    on_virtual_time(trainer.run())
    return events


def test_the_share_is_fed_beside_an_evaluation_but_for_its_last_microbatch() -> None:
    """With that the step could end, and the weights that are measured be gone."""
    swarm = OneReplica(score_s=2.0)
    events = fed(swarm)
    assert [(name, fields["step"]) for name, fields in events] == [*(("evaluated", v) for v in range(4)), ("done", 3)]
    times = [at for at, request in swarm.asked if request.purpose == "train" and request.step == 0]
    assert times[: SHARE - 1] == [0.0] * (SHARE - 1) and times[-1] == pytest.approx(4.0), (
        "first looks, and a second one"
    )


def scores(
    ask: Callable[[int], Awaitable[Gradient]], story: Callable[[Evaluations, asyncio.TaskGroup], Awaitable[None]]
) -> list[tuple[float, str, object]]:
    """What is told while that happens: (seconds, event, version)."""
    told: list[tuple[float, str, object]] = []

    async def run() -> None:
        evaluations = Evaluations(
            1,
            lambda version, number, avoid: ask(version),
            None,
            lambda version, loss: told.append((_now(), "scored", version)),
            lambda event, fields: told.append((_now(), event, fields["step"])),
            random.Random(0),
        )
        async with asyncio.TaskGroup() as group:
            await story(evaluations, group)

    on_virtual_time(run())
    return told


async def answered_after(seconds: float) -> Gradient:
    await asyncio.sleep(seconds)
    return Gradient(1.0, 1)


def test_scores_are_told_in_their_order_also_if_a_later_one_is_there_first() -> None:
    async def ask(version: int) -> Gradient:
        if version == 1:
            raise Refused(RejectCode.STALE, "gone", peer=REPLICA)
        return await answered_after({0: 5.0, 2: 1.0}[version])

    async def story(evaluations: Evaluations, group: asyncio.TaskGroup) -> None:
        for version in range(3):
            evaluations.begin(version, group)
        assert await evaluations.end(20.0)
        assert not await evaluations.end(20.0), "none is open"

    assert scores(ask, story) == [
        (10.0, "scored", 0),
        (10.0, "evaluated", 0),
        (10.0, "not_evaluated", 1),
        (10.0, "scored", 2),
        (10.0, "evaluated", 2),
    ]


def test_what_is_given_up_is_not_told() -> None:
    async def story(evaluations: Evaluations, group: asyncio.TaskGroup) -> None:
        evaluations.begin(0, group)
        await asyncio.sleep(1.0)
        evaluations.cancel()
        evaluations.begin(0, group)

    assert [at for at, _, _ in scores(lambda version: answered_after(2.0), story)] == [5.0, 5.0]


def test_a_slow_evaluation_is_waited_for_as_long_as_answers_come() -> None:
    async def story(evaluations: Evaluations, group: asyncio.TaskGroup) -> None:
        begun = [evaluations.begin(0, group)]
        await evaluations.answered(begun, lambda: 3.0)
        assert _now() == 4.0, "two looks of 2 s"
        begun = [evaluations.begin(1, group)]
        await evaluations.answered(begun, lambda: 1.5)
        assert _now() == 5.5
        await evaluations.answered([], lambda: 1.5)

    assert [event for _, event, _ in scores(lambda version: answered_after(2.0), story)] == ["scored", "evaluated"] * 2


def test_the_end_is_not_waited_for_in_vain() -> None:
    async def story(evaluations: Evaluations, group: asyncio.TaskGroup) -> None:
        for version in range(3):
            evaluations.begin(version, group)
        await evaluations.end(20.0)

    never = scores(lambda version: answered_after(2.0 if version == 0 else 1e6), story)
    assert never == [(4.0, "scored", 0), (4.0, "evaluated", 0), (20.0, "not_evaluated", 1), (20.0, "not_evaluated", 2)]
