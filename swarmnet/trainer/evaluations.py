"""Evaluations while they are open: they run beside feeding, and are told in the order in which they began."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from swarmnet.clock import loop_time
from swarmnet.errors import Refused
from swarmnet.ids import PeerId
from swarmnet.messages import Gradient
from swarmnet.trainer.scores import Look, NoScore, said, same, score

Ask = Callable[[int, int, tuple[PeerId, ...]], Awaitable[Gradient]]
"""(version, number of the microbatch, whom to go around) -> its loss by them. Raises Refused: they are gone."""


@dataclass(eq=False, slots=True)
class OpenEvaluation:
    """One that is not told yet. heard_at: when an answer of it came last, or it began."""

    version: int
    heard_at: float
    scoring: asyncio.Task[tuple[float, int] | NoScore] = field(init=False)
    telling: asyncio.Task[None] = field(init=False)


class Evaluations:
    """Those of one trainer.

    scored(version, loss) hears each score before the event. numerics: see `scores.same`. rng: draws what is looked at
    twice.
    """

    def __init__(
        self,
        num_microbatches: int,
        ask: Ask,
        numerics: Callable[[PeerId], str] | None,
        scored: Callable[[int, float], None],
        on_event: Callable[[str, dict[str, object]], None],
        rng: random.Random,
    ) -> None:
        self._num_microbatches, self._ask, self._numerics = num_microbatches, ask, numerics
        self._scored, self._on_event, self._rng = scored, on_event, rng
        self._open: list[OpenEvaluation] = []  # the earliest first

    def begin(self, version: int, group: asyncio.TaskGroup) -> OpenEvaluation:
        """Measure the held-out loss of that version, in tasks of `group`."""
        opened = OpenEvaluation(version, loop_time())
        opened.scoring = group.create_task(self._score(opened))
        opened.telling = group.create_task(self._tell(opened, self._open[-1:]))
        self._open.append(opened)
        return opened

    async def answered(self, some: list[OpenEvaluation], patience_s: Callable[[], float]) -> None:
        """Wait for what these ask for, as long as answers come: none for `patience_s()`, and it is enough."""
        while open_ := [each for each in some if not each.scoring.done()]:
            left_s = max(each.heard_at for each in open_) + patience_s() - loop_time()
            if left_s <= 0:
                return
            await asyncio.wait([each.scoring for each in open_], timeout=left_s)

    async def end(self, limit_s: float) -> bool:
        """Wait until all are told, for so long; then say of the rest that they are not. Was any open?"""
        if not self._open:
            return False
        await asyncio.wait([each.telling for each in self._open], timeout=limit_s)
        for each in self._open:
            self._on_event("not_evaluated", {"step": each.version, "reason": f"no answer within {limit_s:g} s"})
        self.cancel()
        return True

    def cancel(self) -> None:
        """Nobody wants to know any more."""
        for each in self._open:
            each.scoring.cancel()
            each.telling.cancel()
        self._open.clear()

    async def _score(self, opened: OpenEvaluation) -> tuple[float, int] | NoScore:
        version = opened.version
        try:
            return await score(
                self._num_microbatches,
                partial(self._look_at, opened),
                partial(same, numerics=self._numerics),
                lambda number, looks: self._on_event(
                    "eval_disputed", {"step": version, "number": number, **said(looks)}
                ),
                self._rng,
            )
        except NoScore as none:
            return none

    async def _look_at(self, opened: OpenEvaluation, number: int, avoid: tuple[PeerId, ...]) -> Look | None:
        try:
            answer = await self._ask(opened.version, number, avoid)
        except Refused:
            return None
        opened.heard_at = loop_time()
        return Look(answer.loss_sum, answer.num_tokens, answer.route)

    async def _tell(self, opened: OpenEvaluation, before: list[OpenEvaluation]) -> None:
        await asyncio.wait([opened.scoring, *(each.telling for each in before)])
        self._open.remove(opened)
        found = opened.scoring.result()
        if isinstance(found, NoScore):
            self._on_event("not_evaluated", {"step": opened.version, "reason": str(found)})
            return
        loss, num_tokens = found
        self._scored(opened.version, loss)
        self._on_event("evaluated", {"step": opened.version, "loss": loss, "num_tokens": num_tokens})
