"""Evaluations beside feeding: what they hold back, for how long, in which order they are told, and how they end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from trainers import REPLICA, fed, replica

from swarmnet.errors import Refused, RejectCode
from swarmnet.ids import PeerId
from swarmnet.manifest.schema import Cut, Manifest, Training
from swarmnet.messages import Accepted, Gradient, Process, Running
from swarmnet.testing.doubles import Script, run_virtual
from swarmnet.trainer.evaluations import Evaluations

SHARE = 4
MANIFEST = Manifest(
    cut=Cut(stages=1), training=Training(total_steps=3, microbatches=SHARE, eval_every=1, eval_microbatches=2)
)
NUM_TOKENS = MANIFEST.training.microbatch_size * MANIFEST.training.sequence_length


def _now() -> float:
    return asyncio.get_running_loop().time()


def answered(score_s: float, request: Process) -> list[Script]:
    """Training at once, an evaluation after `score_s`; the replica is `Running` meanwhile."""
    waits = int(2 * score_s) if request.purpose == "eval" else 0
    return [Accepted(), *[0.5, Running()] * waits, Gradient(float(NUM_TOKENS), NUM_TOKENS)]


def test_the_share_is_fed_beside_an_evaluation_but_for_its_last_microbatch() -> None:
    """With that the step could end, and the weights that are measured be gone."""
    swarm = fed(MANIFEST, lambda: [replica(slots=2 * SHARE)], lambda peer, request: answered(2.0, request))
    assert [(name, fields["step"]) for _, name, fields in swarm.events] == [
        *(("evaluated", v) for v in range(4)),
        ("done", 3),
    ]
    times = [at for _, request, at in swarm.transport.calls if request.purpose == "train" and request.step == 0]
    assert times[: SHARE - 1] == [0.0] * (SHARE - 1) and times[-1] == pytest.approx(4.0), (
        "first looks, and a second one"
    )


class Host:
    """Implements EvaluationHost. told: (seconds, event, version) of what happens."""

    def __init__(self, ask: Callable[[int], Awaitable[Gradient]], told: list[tuple[float, str, object]]) -> None:
        self._ask, self._told = ask, told

    async def evaluate(self, version: int, number: int, avoid: tuple[PeerId, ...]) -> Gradient:
        return await self._ask(version)

    def numerics(self, peer: PeerId) -> str:
        return ""

    def scored(self, version: int, loss: float) -> None:
        self._told.append((_now(), "scored", version))

    def event(self, name: str, fields: dict[str, object]) -> None:
        self._told.append((_now(), name, fields["step"]))


def scores(
    ask: Callable[[int], Awaitable[Gradient]], story: Callable[[Evaluations, asyncio.TaskGroup], Awaitable[None]]
) -> list[tuple[float, str, object]]:
    """What is told while that happens: (seconds, event, version)."""
    told: list[tuple[float, str, object]] = []

    async def run() -> None:
        evaluations = Evaluations(1, Host(ask, told), equal_bits=False, rng=random.Random(0))
        async with asyncio.TaskGroup() as group:
            await story(evaluations, group)

    run_virtual(run())
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
