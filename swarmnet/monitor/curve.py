"""A run's curve, pieced together from what members answer about their steps. Pure.

A step is taken once more than half of those who should know it say the same. A lie costs only the liar, as long as most
of those who are asked tell the truth. Of two that disagree neither is believed. A step that is taken stays, unless the
run goes back and does it again.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarmnet.ids import NO_RESTART, PeerId, Restart
from swarmnet.messages import LARGEST_TOKEN_LOSS, MAX_FIGURES, History, StepFigures, is_loss
from swarmnet.quorum import quorum
from swarmnet.telemetry.run_state import PACE_STEPS, StepPoint, step_s, tokens_per_second

_MOST_OPEN = 4096
"""Steps of which one member's word is kept until they are taken."""

_MOST_WITNESSES = 64

MOST_SAID = 1e9
"""No run is as old, in seconds, and no gradient as long."""


@dataclass(slots=True)
class _Witness:
    """What one member has said of steps that are not taken yet."""

    next: int = 0
    """It is asked for steps from here on."""
    spoke: bool = False
    """Has it said anything yet?"""
    said: dict[int, StepFigures] = field(default_factory=dict)


class Curve:
    """Tell it what members answer (`hear`), then let it decide (`settle`)."""

    def __init__(self, points: Iterable[StepPoint] = ()) -> None:
        """points: what is in the files already."""
        points = list(points)
        self._points = {point.step: point for point in points}
        self._steps = sorted(self._points)
        self._first = 0
        self._unknown = set(self._points)  # of the files, not yet heard from anybody
        self._witnesses: dict[PeerId, _Witness] = {}
        self._evaluations = {point.step + 1: point.held_out for point in points if point.held_out is not None}
        self._restart: Restart = NO_RESTART
        self._again_from: int | None = None  # steps from here on may have been done again
        self._done_again: set[int] = set()  # those that were taken since
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
        """The last step that is known, of those that stand."""
        return next((self._points[step] for step in reversed(self._steps) if self.stands(step)), None)

    @property
    def newest_held_out(self) -> int | None:
        """The last version, of those that stand, whose held-out loss is known."""
        return max((version for version in self._evaluations if self.stands(version - 1)), default=None)

    def stands(self, step: int) -> bool:
        """It is of the run's present past: the run has not gone back to before it, or most have told it since."""
        return not self.may_differ(step) or step in self._done_again

    def may_differ(self, step: int) -> bool:
        """From what a file says: the run has gone back to before it."""
        return self._again_from is not None and step >= self._again_from

    @property
    def compared(self) -> bool:
        """Whether members have told a step that is in the files, or there is none."""
        return not self._points or len(self._unknown) < len(self._points)

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

    def wanted(self, peer: PeerId) -> int:
        """From which step on this member is to be asked."""
        return self._witness(peer).next

    def hear(self, peer: PeerId, answer: History, *, steps: int) -> bool:
        """Take in an answer to `HistoryRequest(wanted(peer))`. steps: how many the run has, 0: unknown.

        Returns whether there may be more: then ask again at once. What cannot be is not heard.
        """
        witness = self._witness(peer)
        known = [each.step for each in answer.figures]
        sound = known == sorted(set(known)) and all(
            witness.next <= each.step < (steps or each.step + 1)
            and is_loss(each.loss_sum, each.num_tokens)
            and max(each.ago_s, each.grad_norm, each.learning_rate) < MOST_SAID
            for each in answer.figures
        )
        if not sound or not known:
            return False
        witness.next, witness.spoke = known[-1] + 1, True
        witness.said |= {each.step: each for each in answer.figures}
        for step in sorted(witness.said)[:-_MOST_OPEN]:
            del witness.said[step]
        return len(known) == MAX_FIGURES

    def went_back(self, restart: Restart) -> bool:
        """The newest restart that half of those who serve follow: what came of the steps after it is asked for anew.
        Returns whether it is a new one."""
        if restart <= self._restart:
            return False
        self._restart = restart
        self._again_from = min(restart.version, restart.version if self._again_from is None else self._again_from)
        self._witnesses.clear()
        self._done_again.clear()
        return True

    def settle(
        self, answering: Collection[PeerId], *, now: float, replicas: str, live_s: float, busy: int = 0
    ) -> tuple[list[int], list[int]]:
        """Take what most say. answering: who has answered this time; nobody else has a say. busy: how many were too
        busy to: whoever keeps them so must not leave the word to few. now: Unix seconds. replicas: as of a point that
        is not older than live_s.

        Returns the steps that are new or changed, and steps of which other things are said than are known here.
        """
        here = [witness for peer in answering if (witness := self._witnesses.get(peer))]
        steps = sorted(set(itertools.chain.from_iterable(each.said for each in here)))
        changed: list[int] = []
        against: list[int] = []
        self.disputed = None
        speaking = [each for each in here if each.spoke]
        for step in steps:
            told = [each.said[step] for each in speaking if step in each.said]
            # Who has told later steps alone was not there: it came later, or skipped the step. Who has not come so far
            # may yet say something else.
            behind = sum(each.next <= step for each in speaking) + busy
            agreed, known = _most_say(told), self._points.get(step)
            fixed = known is not None and self.stands(step)
            # One alone is believed only where there are not enough to outvote it.
            enough = len(agreed) >= max(quorum(len(told) + behind), 2 if len(speaking) + busy > 2 else 1)
            if not enough and not fixed:
                if len(told) > len(agreed) and not behind and self.disputed is None:
                    self.disputed = step
                continue
            for each in here:
                each.said.pop(step, None)
            if not enough:
                continue
            if self._again_from is not None:
                self._done_again.add(step)
            found = self._point(agreed, now=now, replicas=replicas, live_s=live_s)
            if known is not None and (known.loss, known.tokens) == (found.loss, found.tokens):
                self._unknown.discard(step)
                continue
            if fixed:
                against.append(step)
                continue
            self._unknown.discard(step)
            if known is None:
                bisect.insort(self._steps, step)
            self._points[step] = found
            changed.append(step)
        return changed, against

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

    def _witness(self, peer: PeerId) -> _Witness:
        if peer not in self._witnesses:
            # All that it remembers, until it is known whether the files are of this run.
            while self.compared and self._first in self._points:
                self._first += 1
            since = self._first if self._again_from is None else min(self._first, self._again_from)
            self._witnesses[peer] = _Witness(next=since)
            for other in list(self._witnesses)[:-_MOST_WITNESSES]:
                del self._witnesses[other]
        return self._witnesses[peer]

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
