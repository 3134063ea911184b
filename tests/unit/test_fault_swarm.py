"""From decision to act: every kind of fault has one method of `Swarm`, and ends by it."""

from __future__ import annotations

from typing import Any

import pytest

from swarmnet.testing.fault import (
    KINDS,
    ClockChange,
    DiskFull,
    Drain,
    Fault,
    Join,
    Kill,
    KillAll,
    KillRank,
    OneWayCut,
    Partition,
    Slow,
    Stop,
)
from swarmnet.testing.schedule import (
    Action,
    FaultAction,
    FaultEnded,
    FaultPostponed,
    HoldAction,
    ReleaseAction,
    RestartAction,
)
from swarmnet.testing.swarm import carry_out


class Recorded:
    """A `Swarm` that notes what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self.calls.append((name, *args, *named.values()))


KILL, STOP, DISK = Kill(step=1), Stop(step=1, for_s=1.0), DiskFull(step=1, for_s=1.0)
CUT = Partition(step=1, for_s=1.0, between=(("s0",), ("s1",)))
DEAF = OneWayCut(step=1, for_s=1.0, senders=("s0",), receivers=("s1",))
SLOW = Slow(step=1, for_s=1.0, peers=("s0",), latency_s=0.1)
ACTS: list[tuple[Action, tuple[Any, ...] | None]] = [
    (FaultAction(KILL, 1, "s1-r0", 1), ("kill", "s1-r0")),
    (RestartAction("s1-r0"), ("start", "s1-r0")),
    (FaultAction(Join(step=1), 1, "s1-r3", 1), ("start", "s1-r3", 1)),
    (FaultAction(STOP, 1, "s1-r0", 1), ("stop", "s1-r0")),
    (FaultEnded(STOP, "s1-r0"), ("resume", "s1-r0")),
    (FaultAction(Drain(step=1), 1, "s1-r0", 1), ("drain", "s1-r0")),
    (FaultAction(KillRank(step=1), 1, "s1-r0", 1, 2), ("kill_rank", "s1-r0", 2)),
    (FaultAction(KillAll(step=1), 1), ("kill_all", None)),
    (FaultAction(KillAll(step=1, stage=2), 1), ("kill_all", 2)),
    *((FaultAction(rule, 1), ("cut", rule)) for rule in (CUT, DEAF, SLOW)),
    *((FaultEnded(rule), ("heal", rule)) for rule in (CUT, DEAF, SLOW)),
    (FaultAction(DISK, 1, "s1-r0", 1), ("fill_disk", "s1-r0", True)),
    (FaultEnded(DISK, "s1-r0"), ("fill_disk", "s1-r0", False)),
    (FaultAction(ClockChange(step=1, by_s=9.0), 1, "s1-r0", 1), ("turn_clock", "s1-r0", 9.0)),
    (HoldAction("s1-r0", "a", KILL), ("hold", "s1-r0", "a", KILL)),
    (ReleaseAction("s1-r0", "a"), ("go_on", "s1-r0", "a")),
    (FaultPostponed(KILL, "why"), None),
]


@pytest.mark.parametrize(("action", "call"), ACTS)
def test_each_action_is_one_call(action: Action, call: tuple[Any, ...] | None) -> None:
    swarm = Recorded()
    carry_out(action, swarm)
    assert swarm.calls == ([call] if call else [])


def test_what_no_swarm_can_do_is_refused() -> None:
    with pytest.raises(TypeError, match="nothing is to be done for"):
        carry_out(FaultEnded(KILL, "s1-r0"), Recorded())


def test_no_kind_is_left_out() -> None:
    done: set[type[Fault]] = {type(action.fault) for action, _ in ACTS if isinstance(action, FaultAction)}
    assert done == {*KINDS.values(), KillAll}
