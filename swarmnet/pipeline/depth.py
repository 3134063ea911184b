"""How many microbatches a replica holds at once: as many as it computes while it holds one.

That is Little's law, applied as TCP's BBR does: the shortest time that was seen is that of an empty way, so queues that
more microbatches make do not ask for still more. Pure.
"""

from __future__ import annotations

import collections
import math
import statistics

_SAMPLES = 31
"""What a microbatch takes to compute is the median of so many."""


def held_s(stages: int, microbatch_s: float, round_trip_s: float = 0.0, crossing_s: float = 0.0) -> float:
    """Seconds for which an empty pipeline holds a microbatch in the first of `stages` equal stages.

    A stage passes on an activation after a third of its compute and a gradient after another; the weight-gradient pass
    delays no other stage. A call is announced before its payload is sent, and its answer comes by itself: a round trip
    and a half. crossing_s: an activation and its gradient on the link.
    """
    return stages * (2 / 3 * microbatch_s + 1.5 * round_trip_s) + microbatch_s / 3 + (stages - 1) * crossing_s


def slots_enough(held: float, pace_s: float, share: float, *, before: int = 0, onward: int = 1) -> int:
    """Slots that keep a device busy which computes a microbatch in `pace_s` and holds it for `held` seconds.

    share: how many of a step's microbatches come to it. before, onward: stages before its own, and from its own on.
    `held / pace_s` flow in a long step. Twice as many more wait for their weight pass alone, a third of their compute:
    that is what a device has to do at the end of a step, while the last gradients are on their way to it. All stages
    take what the first one sends on, so `held` is taken as it is there; later ones a quarter more, since each measures
    for itself, and who refuses a call holds up the others. One more than fits, since they come unevenly.
    """
    first = held + before * (held - pace_s / 3) / onward
    return min(math.ceil((3.75 if before else 3) * first / pace_s), math.ceil(share)) + 1


class Depth:
    """The slots of one replica, by what it has measured.

    before, onward: stages before its own, and from its own on. most: as many as the operator and memory allow.
    """

    def __init__(self, before: int, onward: int, *, most: int) -> None:
        self._before, self._onward, self.most = before, onward, most
        self._least_s: list[float] = []  # of this step, the two shortest times for which one was held
        self._held_before_s = math.inf  # of the last step with any
        self._computes: collections.deque[float] = collections.deque(maxlen=_SAMPLES)

    def counted(self, held: float, compute_s: float) -> bool:
        """A microbatch was computed to the end. held: seconds to its answer, and of its weight pass. Is the way another
        than was believed?"""
        self._computes.append(compute_s)
        before = self._held_s
        self._least_s = sorted([*self._least_s, held])[:2]
        return self._held_s != before

    @property
    def _held_s(self) -> float:
        """The shortest of this step but one: a stage behind may have been told to begin with one before it came."""
        return self._least_s[-1] if self._least_s else math.inf

    def next_step(self) -> None:
        """Ways change: what was seen two steps ago is forgotten."""
        if self._least_s:
            self._held_before_s, self._least_s = self._held_s, []

    def slots(self, share: float) -> int:
        """How many from now on. share: of a step's microbatches, about this replica's part."""
        pace_s = statistics.median(self._computes) if self._computes else 1.0
        held = min(self._held_s, self._held_before_s)
        # No microbatch has come back yet: the estimate is the stages' compute alone.
        if held == math.inf or not pace_s:
            held, pace_s = held_s(self._onward, 1.0), 1.0
        enough = slots_enough(held, pace_s, share, before=self._before, onward=self._onward)
        return max(min(enough, self.most), 1)
