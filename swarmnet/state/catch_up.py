"""Where a joining replica is, and when it will be in sync with its stage.

`Ahead` forecasts when that ends. While the snapshot travels the others make steps, and the aggregate of each has to
come, too. S bytes of the snapshot and b aggregates are to come, of g bytes each; r bytes a second arrive; a step takes
T seconds. The replica is in sync after t more steps:

    r T t = S + (b + t) g        t = (S + b g) / (r T - g)

and never if a step brings no more bytes than its own aggregate has.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.manifest.schema import Delay
from swarmnet.messages import Commit, Finished, Stamp, StateHeader
from swarmnet.net.traffic import STATE_SHARE


@dataclass(frozen=True, slots=True)
class InSync:
    """Where a joining replica is: `finished`, in the engine's buffer, and `commits` are of the open step,
    `last_commits` of the one before."""

    header: StateHeader
    finished: Finished | None = None
    commits: tuple[Commit, ...] = ()
    last_commits: tuple[Commit, ...] = ()


def next_stamp(header: StateHeader, stage: int, delay: Delay) -> Stamp:
    """The stamp of the step that is applied next: it carries the chain of the weights it is computed on."""
    chain = header.before if delay.behind(header.version) else header.chain
    return Stamp(header.version, stage, chain, header.restart)


# ---------------------------------------------------------------- when it ends

WITHIN = 30
"""Steps in which a joining replica should be in sync."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a joining replica still has to fetch."""

    state_bytes: float
    """Of the snapshot."""
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
        """How many more steps the others make until the replica is in sync, at that rate; None: it never is."""
        gained = bytes_per_s * self.step_s - self.sum_bytes
        return self.num_bytes / gained if gained > 0.0 else None

    def needs(self, within: float) -> float:
        """Bytes per second with which the replica is in sync after so many steps."""
        return (self.num_bytes / within + self.sum_bytes) / self.step_s


def line_needed(bytes_per_s: float, sources: int) -> float:
    """The bandwidth that each source needs if all of them are busy all the time."""
    return bytes_per_s / (STATE_SHARE * sources)
