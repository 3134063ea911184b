"""What a member remembers of the run's last steps, for all callers: an observer is no member.

The last figures are kept, and no more; an answer has a few of them; and all who ask share so many answers a second.
"""

from __future__ import annotations

import bisect
from collections.abc import AsyncGenerator
from dataclasses import replace

from swarmnet.clock import loop_time
from swarmnet.messages import Answer, Busy, History, HistoryRequest
from swarmnet.net.limits import HISTORIES
from swarmnet.telemetry.figures import MAX_EVALUATIONS, MAX_FIGURES, Evaluation, StepFigures
from swarmnet.telemetry.spans import SpanBook

KEPT_STEPS = 2048
"""Steps that a member remembers: half a megabyte."""


class HistoryBook:
    """Figures of steps as a replica applies them, and a trainer's evaluations. Answers `HistoryRequest`."""

    def __init__(self, spans: SpanBook | None = None) -> None:
        """spans: the timings of a peer's last steps."""
        self._spans = SpanBook() if spans is None else spans
        self._figures: list[StepFigures] = []  # by step; `ago_s` is when, in loop time
        self._evaluations: list[Evaluation] = []
        self._answers = HISTORIES.bucket()

    def applied(self, figures: StepFigures) -> None:
        """A step was applied. Its `ago_s` is when, in loop time."""
        known = self._figures
        place = bisect.bisect_left(known, figures.step, key=_step)
        # Another stage of this peer has said so already.
        if place < len(known) and known[place] == replace(figures, ago_s=known[place].ago_s):
            return
        # The run went back: what came of the steps from here on does not count any more.
        del known[place:]
        known.append(figures)
        del known[:-KEPT_STEPS]

    def evaluated(self, evaluation: Evaluation) -> None:
        """The held-out loss of some weights was measured."""
        known = [each for each in self._evaluations if each.version < evaluation.version]
        self._evaluations = [*known, evaluation][-MAX_EVALUATIONS:]

    def since(self, step: int, *, now: float) -> History:
        """What is known of the steps from `step` on, as many as one answer has."""
        place = bisect.bisect_left(self._figures, step, key=_step)
        return History(
            tuple(replace(each, ago_s=now - each.ago_s) for each in self._figures[place : place + MAX_FIGURES]),
            tuple(each for each in self._evaluations if each.version >= step),
            self._spans.times(now=now),
        )

    async def serve(self, request: HistoryRequest) -> AsyncGenerator[Answer, None]:
        """Answer, or say when to come back."""
        now = loop_time()
        wait_s = self._answers.ask(now)
        yield Busy(wait_s, -1) if wait_s else self.since(request.since, now=now)


def _step(figures: StepFigures) -> int:
    return figures.step
