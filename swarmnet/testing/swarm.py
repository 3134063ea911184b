"""One interface for all targets of faults, and the one module where a decision becomes an act.

`local` does them to real processes, `simulate` to virtual ones. Which process gets a fault and when is decided
elsewhere: by `schedule`, or by a test.
"""

from __future__ import annotations

from typing import Protocol

from swarmnet.testing.fault import LINKS, ClockChange, DiskFull, Drain, Fault, Join, Kill, KillAll, KillRank, Stop
from swarmnet.testing.schedule import (
    Action,
    FaultAction,
    FaultEnded,
    FaultPostponed,
    HoldAction,
    ReleaseAction,
    RestartAction,
)


class Swarm(Protocol):
    """Processes that faults can be done to, by name: "s1-r0", "trainer-0". What a kind of swarm cannot do it refuses
    before anything starts."""

    def start(self, name: str, stage: int | None = None) -> None:
        """A replica more, of this stage; None: the same process again, on what its disk has."""

    def kill(self, name: str) -> None:
        """SIGKILL."""

    def kill_rank(self, name: str, rank: int) -> None:
        """SIGKILL to one rank of a replica."""

    def kill_all(self, stage: int | None) -> None:
        """SIGKILL to every replica of the stage; None: to every process."""

    def stop(self, name: str) -> None:
        """SIGSTOP."""

    def resume(self, name: str) -> None:
        """SIGCONT, if it still runs."""

    def drain(self, name: str) -> None:
        """SIGTERM: it leaves in an orderly way."""

    def cut(self, rule: Fault) -> None:
        """From now on this partition, one-way cut or slow link holds."""

    def heal(self, rule: Fault) -> None:
        """It holds no longer."""

    def fill_disk(self, name: str, *, full: bool) -> None:
        """From now on writes of this replica fail, or succeed again."""

    def turn_clock(self, name: str, by_s: float) -> None:
        """Its wall clock jumps."""

    def hold(self, name: str, id: str, fault: Fault) -> None:
        """It is to hold in the phase of `fault`, and to say so."""

    def go_on(self, name: str, id: str) -> None:
        """It need not hold any more."""


def carry_out(action: Action, swarm: Swarm) -> None:
    """Do what was decided. What is only to be said (`FaultPostponed`) does nothing. Raises TypeError for what no swarm
    can do."""
    match action:
        case FaultAction(Join(), name=name, stage=stage):
            swarm.start(name, stage)
        case RestartAction(name):
            swarm.start(name)
        case FaultAction(Kill(), name=name):
            swarm.kill(name)
        case FaultAction(KillRank(), name=name, rank=rank):
            swarm.kill_rank(name, rank)
        case FaultAction(KillAll() as fault):
            swarm.kill_all(fault.stage)
        case FaultAction(Stop(), name=name):
            swarm.stop(name)
        case FaultEnded(Stop(), name):
            swarm.resume(name)
        case FaultAction(Drain(), name=name):
            swarm.drain(name)
        case FaultAction(fault) if isinstance(fault, LINKS):
            swarm.cut(fault)
        case FaultEnded(fault) if isinstance(fault, LINKS):
            swarm.heal(fault)
        case FaultAction(DiskFull(), name=name):
            swarm.fill_disk(name, full=True)
        case FaultEnded(DiskFull(), name):
            swarm.fill_disk(name, full=False)
        case FaultAction(ClockChange(by_s=by_s), name=name):
            swarm.turn_clock(name, by_s)
        case HoldAction(name, id, fault):
            swarm.hold(name, id, fault)
        case ReleaseAction(name, id):
            swarm.go_on(name, id)
        case FaultPostponed():
            pass
        case _:
            raise TypeError(f"nothing is to be done for {action}")
