"""What a peer did in its last steps, as spans of time: what was computed, waited for, sent and averaged. Pure.

Times are seconds of the event loop's clock, and come in with each span. Who does something says so when it is over.
`SpanBook` keeps the spans of the last steps, `SpanBook.times` says what became of the last whole one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

from swarmnet.bounds import Between
from swarmnet.ids import Number

_Seconds = Annotated[float, Between(0.0, math.inf)]

MAX_STEP_TIMES = 8
"""Stages of a peer for which it tells times: 200 bytes each."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One phase of a step: when it began and ended, in seconds since the step began, and how long it was under way."""

    began_s: _Seconds = 0.0
    ended_s: _Seconds = 0.0
    busy_s: _Seconds = 0.0


_NO_TIME = PhaseTime()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How a replica spent its last whole step, from one update to the next. Where it was in two phases at once, it was
    in the one that comes first here, so that together they are at most the step. docs/metrics.md has more."""

    stage: Annotated[int, Between(0, (1 << 16) - 1)]
    step: Number
    ago_s: _Seconds
    """Seconds since it ended."""
    seconds: _Seconds
    """From its beginning to its end."""
    update: PhaseTime = _NO_TIME
    forward: PhaseTime = _NO_TIME
    backward: PhaseTime = _NO_TIME
    """With the weight passes."""
    averaging: PhaseTime = _NO_TIME
    barrier: PhaseTime = _NO_TIME
    """It held its stage's whole sum and waited for commits."""

    @property
    def phases(self) -> dict[str, PhaseTime]:
        """In the order of a step."""
        names = ("forward", "backward", "averaging", "barrier", "update")
        return {name: getattr(self, name) for name in names}

    @property
    def idle_s(self) -> float:
        """In no phase."""
        return max(self.seconds - sum(phase.busy_s for phase in self.phases.values()), 0.0)

    def at(self, ago_s: float) -> StepTimes:
        """The same, told so long after its end."""
        return replace(self, ago_s=max(ago_s, 0.0))


SpanKind = Literal[
    "forward", "backward", "weights", "averaging", "collect", "barrier", "update",
    "reduce_scatter", "all_gather", "slot", "receive", "queue", "call", "send", "grant",
]  # fmt: skip
"""The first seven are what `StepTimes` adds up. docs/metrics.md says what each is."""

KEPT_STEPS, KEPT_S = 4, 5.0
"""Whole steps with kept spans, and for how long at least, because they are written now and then."""

MOST_SPANS = 1 << 15
"""Of all stages of a peer, however long a step is: at most 8 MB."""

_PHASES = ("update", "forward", "backward", "averaging", "barrier")
"""Of a step. Where a peer is in two at once, it is in the first of them."""
_PHASE_OF: dict[str, int] = {phase: place for place, phase in enumerate(_PHASES)} | {"weights": 2, "collect": 3}


class Span(NamedTuple):
    """One thing done. number: the index of the microbatch, or the hop of an averaging phase; -1: neither."""

    kind: SpanKind
    stage: int
    step: int
    number: int
    began: float
    ended: float


class SpanBook:
    """The spans of a peer's last steps, all its stages together. most: spans, at most."""

    def __init__(self, most: int = MOST_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=most)
        self._ends: dict[int, deque[tuple[int, float]]] = {}  # by stage: (step, when it was applied)
        self._times: dict[int, tuple[float, StepTimes]] = {}  # by stage: when that step ended, and what it was
        self.added = 0
        """Spans, since the process began."""

    def add(self, kind: SpanKind, stage: int, step: int, number: int, began: float, ended: float) -> None:
        """Something is over."""
        self._spans.append(Span(kind, stage, step, number, began, ended))
        self.added += 1

    def applied(self, stage: int, step: int, *, now: float) -> None:
        """This stage's weights are those of the next version: a step is whole."""
        ends = self._ends.setdefault(stage, deque(maxlen=KEPT_STEPS + 1))
        ends.append((step, now))
        oldest = min(now - KEPT_S, *(known[0][1] for known in self._ends.values()))
        while self._spans and len(ends) > KEPT_STEPS and self._spans[0].ended < oldest:
            self._spans.popleft()

    def since(self, added: int) -> list[Span]:
        """Those that came after the first `added`, as far as they are kept."""
        new = min(self.added - added, len(self._spans))
        return [self._spans[place] for place in range(-new, 0)]

    def times(self, *, now: float) -> tuple[StepTimes, ...]:
        """The last whole step of each stage here. It began when the one before was applied."""
        found = []
        for stage, ends in sorted(self._ends.items())[:MAX_STEP_TIMES]:
            step, ended = ends[-1]
            # Worked out once, when somebody asks for it.
            if stage not in self._times or self._times[stage][0] != ended:
                spans = [span for span in self._spans if span.stage == stage and span.kind in _PHASE_OF]
                before = [at for known, at in ends if known == step - 1]
                # After a gap, with the first work on it.
                began = (
                    before[-1] if before else min((span.began for span in spans if span.step == step), default=ended)
                )
                self._times[stage] = ended, _summed(spans, stage, step, began, ended)
            found.append(self._times[stage][1].at(now - ended))
        return tuple(found)


def _summed(spans: Iterable[Span], stage: int, step: int, began: float, ended: float) -> StepTimes:
    """What a stage was in between `began` and `ended`, whichever step it was for. Each moment counts once."""
    edges: list[tuple[float, int, int]] = []
    for span in spans:
        first, last = max(span.began, began), min(span.ended, ended)
        if first < last:
            edges += [(first, 1, _PHASE_OF[span.kind]), (last, -1, _PHASE_OF[span.kind])]
    edges.sort()
    under_way, at = [0] * len(_PHASES), began
    found: list[PhaseTime] = [PhaseTime()] * len(_PHASES)
    for time, change, phase in edges:
        current = _first_of(under_way)
        if current is not None and time > at:
            before = found[current]
            first = before.began_s if before.busy_s else at - began
            found[current] = PhaseTime(first, time - began, before.busy_s + time - at)
        at = time
        under_way[phase] += change
    return StepTimes(stage, step, 0.0, ended - began, **dict(zip(_PHASES, found, strict=True)))


def _first_of(under_way: Sequence[int]) -> int | None:
    return next((phase for phase, number in enumerate(under_way) if number), None)
