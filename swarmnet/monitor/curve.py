"""A run's curve, pieced together from what members answer about their steps. Pure.

A step is taken once more than half of those who should know it say the same. A false answer costs only its sender, as
long as most of those who are asked tell the truth. Of two that disagree neither is believed. A step that is taken
stays, unless the run goes back and does it again.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from swarmnet.bounds import LARGEST_TOKEN_LOSS, is_loss
from swarmnet.ids import NO_RESTART, PeerId, Restart
from swarmnet.messages import History
from swarmnet.quorum import quorum
from swarmnet.telemetry.figures import MAX_FIGURES, StepFigures
from swarmnet.telemetry.run_state import PACE_STEPS, StepPoint, step_s, tokens_per_second

MOST_SAID = 1e9
"""No run is as old, in seconds, and no gradient as long."""

_PATIENCE = 10
"""Looks in which a gap is asked for."""


def told(answer: History, since: int, steps: int) -> dict[int, StepFigures]:
    """What an answer to `HistoryRequest(since)` says, by step; {} if it cannot be. steps: of the run, 0: unknown."""
    known = [each.step for each in answer.figures]
    sound = known == sorted(set(known)) and all(
        since <= each.step < (steps or each.step + 1)
        and is_loss(each.loss_sum, each.num_tokens)
        and max(each.ago_s, each.grad_norm, each.learning_rate) < MOST_SAID
        for each in answer.figures
    )
    return {each.step: each for each in answer.figures} if sound else {}


class Curve:
    """Ask members for steps from `wanted` on, then let it decide (`settle`)."""

    def __init__(self, points: Iterable[StepPoint] = ()) -> None:
        """points: what is in the files of this run already."""
        points = list(points)
        self._points = {point.step: point for point in points}
        self._steps = sorted(self._points)
        self._evaluations = {point.step + 1: point.held_out for point in points if point.held_out is not None}
        self._restart: Restart = NO_RESTART
        self._undone: set[int] = set()  # the run went back to before them, and most have not told them since
        self._spoke: set[PeerId] = set()
        self.wanted = next(step for step in itertools.count() if step not in self._points)
        """Members are asked for steps from here on."""
        self._looks = 0  # in which `wanted` stayed
        self.disputed: int | None = None
        """The first step about which members disagree so that none can be believed."""

    # ------------------------------------------------------------ what is known

    @property
    def points(self) -> list[StepPoint]:
        """By step."""
        return [self._points[step] for step in self._steps]

    def __contains__(self, step: int) -> bool:
        return step in self._points

    @property
    def newest(self) -> StepPoint | None:
        """The last step that is known, of the run's present past."""
        return next((self._points[step] for step in reversed(self._steps) if step not in self._undone), None)

    @property
    def ahead(self) -> bool:
        """Is the last step that is known one that the run went back to before, and has not done again?"""
        return bool(self._steps) and self._steps[-1] in self._undone

    @property
    def newest_held_out(self) -> int | None:
        """The last version of the run's present past that has a known held-out loss."""
        return max((version for version in self._evaluations if version - 1 not in self._undone), default=None)

    @property
    def evaluations(self) -> Mapping[int, float]:
        """Held-out losses by version."""
        return self._evaluations

    def before(self, step: int, count: int) -> list[StepPoint]:
        """The last `count` points up to `step`."""
        end = bisect.bisect_right(self._steps, step)
        return [self._points[each] for each in self._steps[max(end - count, 0) : end]]

    def since(self, step: int) -> list[StepPoint]:
        """From `step` on."""
        return [self._points[each] for each in self._steps[bisect.bisect_left(self._steps, step) :]]

    def step_s(self, step: int) -> float | None:
        """Seconds of a step, over the last ones up to this; None: unknown."""
        return step_s(self.before(step, PACE_STEPS + 1))

    def tokens_per_second(self, step: int) -> float | None:
        """Of the whole run, over the last steps up to this; None: unknown."""
        return tokens_per_second(self.before(step, PACE_STEPS + 1))

    # ------------------------------------------------------------ what members say

    def went_back(self, restart: Restart) -> bool:
        """The newest restart that half of those who serve follow: the steps after it are asked for again.
        Returns whether it is a new one."""
        if restart <= self._restart:
            return False
        self._restart, self._spoke = restart, set()
        known = {*self._steps, *(version - 1 for version in self._evaluations)}
        self._undone |= {step for step in known if step >= restart.version}
        self.wanted = min(self.wanted, restart.version)
        return True

    def settle(
        self,
        answers: Mapping[PeerId, Mapping[int, StepFigures]],
        *,
        now: float,
        replicas: str,
        live_s: float,
        busy: int = 0,
    ) -> list[int]:
        """Take what most say. answers: of those who were asked this time, by step, from `wanted` on. busy: how many
        were too busy to: a peer that keeps them busy must not leave the decision to few. now: Unix seconds. replicas:
        as of a point that is not older than live_s.

        Returns the steps that are new or changed.
        """
        self._spoke = {peer for peer, steps in answers.items() if steps or peer in self._spoke}
        speaking = [answers[peer] for peer in self._spoke]
        reached = [max(steps, default=self.wanted - 1) for steps in speaking]
        changed: list[int] = []
        self.disputed = None
        for step in sorted({*itertools.chain.from_iterable(speaking)}):
            if step in self._points and step not in self._undone:
                continue
            said = [steps[step] for steps in speaking if step in steps]
            # Who has told later steps alone was not there: it came later, or skipped the step. Who has not come so far
            # may yet say something else.
            behind = sum(last < step for last in reached) + busy
            agreed = _most_say(said)
            # One alone is believed only where there are not enough to outvote it.
            if len(agreed) >= max(quorum(len(said) + behind), 2 if len(speaking) + busy > 2 else 1):
                if self._take(self._point(agreed, now=now, replicas=replicas, live_s=live_s)):
                    changed.append(step)
            elif len(said) > len(agreed) and not behind and self.disputed is None:
                self.disputed = step
        self._advance(-1 if busy else min(reached, default=-1))
        return changed

    def _take(self, point: StepPoint) -> bool:
        """Is it new, or another one than before?"""
        known = self._points.get(point.step)
        self._undone.discard(point.step)
        if known is not None and (known.loss, known.tokens) == (point.loss, point.tokens):
            return False
        if known is None:
            bisect.insort(self._steps, point.step)
        self._points[point.step] = point
        return True

    def _advance(self, all_told: int) -> None:
        """Ask for later steps from now on. all_told: of those who answer each has told that step, or later ones."""
        self._looks += 1
        # Members that were silent may fill a gap; but one that stays may not make all repeat what came after it.
        if self._looks >= _PATIENCE and (newest := self.newest) is not None:
            self.wanted = max(self.wanted, all_told + 1, newest.step - MAX_FIGURES)
        while self.wanted in self._points and self.wanted not in self._undone:
            self.wanted, self._looks = self.wanted + 1, 0

    def evaluated(self, found: Mapping[int, float], *, steps: int) -> list[int]:
        """Held-out losses by version, of trainers. Returns the versions that are new or changed."""
        changed = []
        for version, loss in sorted(found.items()):
            # No model is so bad, and no run so long.
            if not 0 <= loss <= LARGEST_TOKEN_LOSS or (steps and version > steps):
                continue
            if self._evaluations.get(version) != loss:
                self._evaluations[version] = loss
                changed.append(version)
            if (point := self._points.get(version - 1)) is not None and point.held_out != loss:
                self._points[version - 1] = replace(point, held_out=loss)
        return changed

    def _point(self, agreed: Sequence[StepFigures], *, now: float, replicas: str, live_s: float) -> StepPoint:
        first = agreed[0]
        ago_s = statistics.median_low([each.ago_s for each in agreed])
        return StepPoint(
            first.step,
            first.loss_sum / first.num_tokens if first.num_tokens else 0.0,
            first.num_tokens,
            self._between(first.step, now - ago_s),
            statistics.median_low([each.grad_norm for each in agreed]),
            statistics.median_low([each.learning_rate for each in agreed]),
            self._evaluations.get(first.step + 1),
            replicas if ago_s <= live_s else "",
        )

    def _between(self, step: int, at: float) -> float:
        """`at`, no earlier than the step before and no later than the one after: each was timed by other members."""
        place = bisect.bisect_left(self._steps, step)
        after = next((each for each in self._steps[place : place + 2] if each > step), None)
        latest = at if after is None else min(at, self._points[after].time)
        return max(latest, self._points[self._steps[place - 1]].time) if place else latest


def _most_say(said: Sequence[StepFigures]) -> list[StepFigures]:
    """Those who say what most say of a step: the loss and the tokens, which its commit holds."""
    by: dict[tuple[float, int], list[StepFigures]] = {}
    for each in said:
        by.setdefault((each.loss_sum, each.num_tokens), []).append(each)
    return max(by.values(), key=len, default=[])
