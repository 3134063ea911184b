"""How members spent their last whole step: who computed, averaged and waited when. For a step's waterfall.

Each member speaks for itself alone, by its own clock's seconds; when that was is by the clock here. What cannot be is
left out, and so is a bar of another length, or of another time, than most of its step: a false answer is then no
part of the picture, or moves only the bar of its sender.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from swarmnet.ids import PeerId
from swarmnet.messages import MAX_STAGES, History
from swarmnet.monitor.curve import MOST_SAID
from swarmnet.telemetry.spans import StepTimes

_ANSWER_S = 3.0
"""Answers of one look may be that far apart."""

_SLACK_S = 1e-6

_MOST_UNUSUAL = 3.0
"""A bar of more than so many usual steps, or as far from the others, is not drawn: it would leave them no space."""


@dataclass(frozen=True, slots=True)
class StepBar:
    """One replica's last whole step."""

    peer: PeerId
    stage: int
    step: int
    began: float
    """Unix seconds, by the clock here; so is `ended`."""
    ended: float
    times: StepTimes
    """`times.phases` and `times.idle_s` together are the step."""


def bars_of(peer: PeerId, answer: History, *, now: float, num_stages: int = MAX_STAGES) -> list[StepBar]:
    """What a member's answer says, by stage. now: Unix seconds, when it came."""
    found = {}
    for each in answer.times:
        if each.stage < num_stages and _can_be(each):
            ended = now - each.ago_s
            found[each.stage] = StepBar(peer, each.stage, each.step, ended - each.seconds, ended, each)
    return [found[stage] for stage in sorted(found)]


def _can_be(times: StepTimes) -> bool:
    phases = times.phases.values()
    return (
        max(times.ago_s, times.seconds) < MOST_SAID
        and all(
            phase.began_s <= phase.ended_s <= times.seconds + _SLACK_S
            and phase.busy_s <= phase.ended_s - phase.began_s + _SLACK_S
            for phase in phases
        )
        and sum(phase.busy_s for phase in phases) <= times.seconds + _SLACK_S
    )


def one_step(bars: Collection[StepBar]) -> dict[str, Any] | None:
    """As JSON, the step that most of them tell, of several the newest; None if they tell none. Seconds since its first
    replica began."""
    told = Counter(step for _, step in {(bar.peer, bar.step) for bar in bars})
    if not told:
        return None
    step = max(told, key=lambda each: (told[each], each))
    of_it = [bar for bar in bars if bar.step == step]
    near_s = _MOST_UNUSUAL * statistics.median_low(bar.times.seconds for bar in of_it) + _ANSWER_S
    of_it = [bar for bar in of_it if bar.times.seconds <= near_s]
    usual_end = statistics.median_low(bar.ended for bar in of_it)
    of_it = [bar for bar in of_it if abs(bar.ended - usual_end) <= near_s]
    of_it.sort(key=lambda bar: (bar.stage, bar.peer))
    began = min(bar.began for bar in of_it)
    return {
        "step": step,
        "seconds": max(bar.ended for bar in of_it) - began,
        "bars": [
            {
                "peer": bar.peer,
                "stage": bar.stage,
                "began_s": bar.began - began,
                "seconds": bar.times.seconds,
                "idle_s": bar.times.idle_s,
                "phases": {name: asdict(phase) for name, phase in bar.times.phases.items()},
            }
            for bar in of_it
        ],
    }
