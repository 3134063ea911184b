"""Open evaluations: they run in parallel to feeding, and are reported in the order in which they began."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from swarmnet.clock import loop_time
from swarmnet.errors import Refused
from swarmnet.ids import PeerId
from swarmnet.messages import Gradient
from swarmnet.trainer.scores import NoScore, said, same, score


class EvaluationHost(Protocol):
    """What a trainer does for its evaluations."""

    async def evaluate(self, version: int, number: int, avoid: tuple[PeerId, ...]) -> Gradient:
        """The loss of one microbatch by peers that are not among these. Raises Refused: the weights moved on."""
        ...

    def numerics(self, peer: PeerId) -> str:
        """The class in which a peer computes; "": not known."""
        ...

    def scored(self, version: int, loss: float) -> None:
        """That is the score of that version. The event comes later."""

    def event(self, name: str, fields: dict[str, object], /) -> None:
        """Something worth a line."""


class OpenEvaluation:
    """One that is not reported yet. heard_at: when an answer of it came last, or it began. Implements Looks."""

    def __init__(self, version: int, host: EvaluationHost, *, equal_bits: bool) -> None:
        self.version, self._host, self._equal_bits, self.heard_at = version, host, equal_bits, loop_time()
        self.scoring: asyncio.Task[tuple[float, int] | NoScore]
        self.telling: asyncio.Task[None]

    async def look(self, number: int, avoid: tuple[PeerId, ...]) -> Gradient | None:
        try:
            answer = await self._host.evaluate(self.version, number, avoid)
        except Refused:
            return None
        self.heard_at = loop_time()
        return answer

    def alike(self, one: Gradient, other: Gradient) -> bool:
        return same(one, other, numerics=self._host.numerics if self._equal_bits else None)

    def disputed(self, number: int, looks: Sequence[Gradient]) -> None:
        self._host.event("eval_disputed", {"step": self.version, "number": number, **said(looks)})


class Evaluations:
    """Those of one trainer. equal_bits: peers of one class make equal bits. rng: draws what is looked at twice."""

    def __init__(self, num_microbatches: int, host: EvaluationHost, *, equal_bits: bool, rng: random.Random) -> None:
        self._num_microbatches, self._host, self._equal_bits, self._rng = num_microbatches, host, equal_bits, rng
        self._open: list[OpenEvaluation] = []  # the earliest first

    def begin(self, version: int, group: asyncio.TaskGroup) -> OpenEvaluation:
        """Measure the held-out loss of that version, in tasks of `group`."""
        opened = OpenEvaluation(version, self._host, equal_bits=self._equal_bits)
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
            self._host.event("not_evaluated", {"step": each.version, "reason": f"no answer within {limit_s:g} s"})
        self.cancel()
        return True

    def cancel(self) -> None:
        """The results are not wanted any more."""
        for each in self._open:
            each.scoring.cancel()
            each.telling.cancel()
        self._open.clear()

    async def _score(self, opened: OpenEvaluation) -> tuple[float, int] | NoScore:
        try:
            return await score(self._num_microbatches, opened, self._rng)
        except NoScore as none:
            return none

    async def _tell(self, opened: OpenEvaluation, before: list[OpenEvaluation]) -> None:
        await asyncio.wait([opened.scoring, *(each.telling for each in before)])
        self._open.remove(opened)
        found = opened.scoring.result()
        if isinstance(found, NoScore):
            self._host.event("not_evaluated", {"step": opened.version, "reason": str(found)})
            return
        loss, num_tokens = found
        self._host.scored(opened.version, loss)
        self._host.event("evaluated", {"step": opened.version, "loss": loss, "num_tokens": num_tokens})
