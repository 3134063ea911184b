"""When a joiner will be level with its stage, from bytes and lines. Pure.

While a copy travels the others make steps, and the sum of each has to come, too. S bytes of the copy and b sums are to
come, of g bytes each; r bytes a second arrive; a step takes T seconds. The joiner is level after t more steps:

    r T t = S + (b + t) g        t = (S + b g) / (r T - g)

and never if a step brings no more bytes than its own sum has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarmnet.net.traffic import STATE_SHARE

WITHIN = 30
"""Steps in which a joiner should be level."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What still has to come to a joiner."""

    state_bytes: float
    """Of the copy."""
    sums: float
    """Of the steps that the others have made since it was taken."""
    sum_bytes: float
    """Of each."""
    step_s: float
    """How long a step takes the others."""

    @property
    def num_bytes(self) -> float:
        return self.state_bytes + self.sums * self.sum_bytes

    def steps(self, bytes_per_s: float) -> float | None:
        """How many more steps the others make until the joiner is level, if so much arrives; None: it never is."""
        gained = bytes_per_s * self.step_s - self.sum_bytes
        return self.num_bytes / gained if gained > 0.0 else None

    def needs(self, within: float) -> float:
        """Bytes per second that make the joiner level within so many steps."""
        return (self.num_bytes / within + self.sum_bytes) / self.step_s


def arrives(lines: Iterable[float], down: float, *, busy: float = 1.0) -> float:
    """Bytes per second that a joiner can count on.

    Of each donor's line it has a tenth while the line is busy with steps, and all of it while it rests; its own line,
    `down`, carries no more than it can.
    """
    return min(down, sum(line * (1.0 - busy * (1.0 - STATE_SHARE)) for line in lines))


def sums_arrive(num_bytes: float, seconds: float, *, copy: float, step_s: float) -> float:
    """Bytes per second in which sums come, of which so many have come in so long.

    copy: the rate of the copy before them; 0: there was none. The first sums say little, since lines rest in one part
    of each step: as much as a step of `step_s` brought of the copy counts beside them.
    """
    before_s = step_s if copy else 0.0
    return (num_bytes + copy * before_s) / max(seconds + before_s, 1e-9)


def line_needed(bytes_per_s: float, donors: int) -> float:
    """The line that each donor must have if all of them are busy all the time."""
    return bytes_per_s / (STATE_SHARE * donors)
