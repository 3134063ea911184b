"""What the machine of faults hears, and what it wants done. Names are those of processes: "s1-r0"."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.local.fault import Fault, Moment, Phase

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class At:
    """Replica `name` is synced and holds `version` of its stage. took: it has just taken its state from others."""

    name: str
    version: int
    took: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """The process of `name` was started (again)."""

    name: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The process of `name` has ended, whoever did it. back: it is to be started again, unless its fault forbids."""

    name: str
    back: bool = True


@dataclass(frozen=True, slots=True)
class HoldReached:
    """`name` holds where it was told to."""

    hold: str
    name: str
    step: int | None


@dataclass(frozen=True, slots=True)
class SnapshotAsked:
    """`name` has asked for a snapshot for the first time since it was started."""

    name: str


@dataclass(frozen=True, slots=True)
class RankCount:
    """`name` has so many rank processes now; 0: it has lost them, and starts them anew."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class RunComplete:
    """The run's last step is done: nothing new is to be done to anybody, and everything ends that lasts."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = At | Started | Gone | HoldReached | SnapshotAsked | RankCount | RunComplete | Tick

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class KillAction:
    """SIGKILL `name` now. `step`: the version its stage was at. back: it will be started again."""

    name: str
    stage: int
    step: int
    order: str
    back: bool = True


@dataclass(frozen=True, slots=True)
class KillRankAction:
    """SIGKILL rank number `rank` of `name` now."""

    name: str
    rank: int
    step: int
    order: str


@dataclass(frozen=True, slots=True)
class KillAllAction:
    """SIGKILL every process now."""

    step: int
    order: str


@dataclass(frozen=True, slots=True)
class StopAction:
    """SIGSTOP `name`."""

    name: str
    order: str
    for_s: float


@dataclass(frozen=True, slots=True)
class ContinueAction:
    """SIGCONT `name`."""

    name: str
    order: str


@dataclass(frozen=True, slots=True)
class DrainAction:
    """SIGTERM to `name`: it is to leave in an orderly way."""

    name: str
    stage: int
    step: int
    order: str


@dataclass(frozen=True, slots=True)
class JoinAction:
    """Start a replica that was not there before."""

    name: str
    stage: int
    order: str


@dataclass(frozen=True, slots=True)
class RestartAction:
    """Start `name` again in its old directory."""

    name: str


@dataclass(frozen=True, slots=True)
class HoldAction:
    """`name` is to hold in that phase, from `step` on, and say so."""

    name: str
    id: str
    phase: Phase
    step: int
    moment: Moment


@dataclass(frozen=True, slots=True)
class ReleaseAction:
    """`name` goes on, or need not hold any more."""

    name: str
    id: str


@dataclass(frozen=True, slots=True)
class LinksAction:
    """From now on these partitions and slow links hold, and no others. order: the one that is new, "" if none."""

    rules: tuple[Fault, ...]
    order: str


@dataclass(frozen=True, slots=True)
class FaultEnded:
    """A fault that lasts has ended."""

    order: str


@dataclass(frozen=True, slots=True)
class FaultPostponed:
    """This has to wait; it is done as soon as it may."""

    order: str
    stage: int
    reason: str


Act = (
    KillAction
    | KillRankAction
    | KillAllAction
    | StopAction
    | ContinueAction
    | DrainAction
    | JoinAction
    | RestartAction
    | HoldAction
    | ReleaseAction
    | LinksAction
    | FaultEnded
    | FaultPostponed
)
