"""Where a joining replica is, and when it will be in sync with its stage.

`steps_until_in_sync` forecasts when that ends. While the snapshot travels the others make steps, and the aggregate of
each has to come, too. S bytes of the snapshot and b aggregates are to come, of g bytes each; r bytes a second arrive; a
step takes T seconds. The replica is in sync after t more steps:

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


def steps_until_in_sync(to_come: float, sum_bytes: float, step_s: float, bytes_per_s: float) -> float | None:
    """How many more steps the others make until the replica is in sync, at that rate; None: it never is.

    to_come: bytes of the snapshot, and of the sums of the steps made since it was taken. sum_bytes: of each sum.
    """
    gained = bytes_per_s * step_s - sum_bytes
    return to_come / gained if gained > 0.0 else None


def rate_needed(to_come: float, sum_bytes: float, step_s: float, within: float) -> float:
    """Bytes per second with which the replica is in sync after so many steps."""
    return (to_come / within + sum_bytes) / step_s


def line_needed(bytes_per_s: float, sources: int) -> float:
    """The bandwidth that each source needs if all of them are busy all the time."""
    return bytes_per_s / (STATE_SHARE * sources)
