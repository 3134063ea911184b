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
class Reached:
    """`name` holds where it was told to."""

    hold: str
    name: str
    step: int | None


@dataclass(frozen=True, slots=True)
class Asked:
    """`name` has asked for a snapshot for the first time since it was started."""

    name: str


@dataclass(frozen=True, slots=True)
class Ranks:
    """`name` has so many rank processes now; 0: it has lost them, and starts them anew."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Complete:
    """The run's last step is done: nothing new is to be done to anybody, and everything ends that lasts."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = At | Started | Gone | Reached | Asked | Ranks | Complete | Tick

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL `name` now. `step`: the version its stage was at. back: it will be started again."""

    name: str
    stage: int
    step: int
    order: str
    back: bool = True


@dataclass(frozen=True, slots=True)
class KillRank:
    """SIGKILL rank number `rank` of `name` now."""

    name: str
    rank: int
    step: int
    order: str


@dataclass(frozen=True, slots=True)
class KillAll:
    """SIGKILL every process now."""

    step: int
    order: str


@dataclass(frozen=True, slots=True)
class Stop:
    """SIGSTOP `name`."""

    name: str
    order: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Continue:
    """SIGCONT `name`."""

    name: str
    order: str


@dataclass(frozen=True, slots=True)
class Drain:
    """SIGTERM to `name`: it is to leave in an orderly way."""

    name: str
    stage: int
    step: int
    order: str


@dataclass(frozen=True, slots=True)
class Join:
    """Start a replica that was not there before."""

    name: str
    stage: int
    order: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Start `name` again in its old directory."""

    name: str


@dataclass(frozen=True, slots=True)
class Hold:
    """`name` is to hold in that phase, from `step` on, and say so."""

    name: str
    id: str
    phase: Phase
    step: int
    moment: Moment


@dataclass(frozen=True, slots=True)
class Release:
    """`name` goes on, or need not hold any more."""

    name: str
    id: str


@dataclass(frozen=True, slots=True)
class Links:
    """From now on these partitions and slow links hold, and no others. order: the one that is new, "" if none."""

    rules: tuple[Fault, ...]
    order: str


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that lasts has ended."""

    order: str


@dataclass(frozen=True, slots=True)
class Postponed:
    """This has to wait; it is done as soon as it may."""

    order: str
    stage: int
    reason: str


Act = Kill | KillRank | KillAll | Stop | Continue | Drain | Join | Restart | Hold | Release | Links | Done | Postponed
