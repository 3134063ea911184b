"""A schedule of faults whose replicas have started, and what their events tell it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from swarmnet.testing.fault import Fault
from swarmnet.testing.schedule import Action, FaultAction, FaultSchedule

STEPS = 20

A = TypeVar("A")


def replicas(stages: int, each: int) -> dict[str, int]:
    """Their names, and the stage of each."""
    return {f"s{stage}-r{number}": stage for stage in range(stages) for number in range(each)}


def machine(faults: Iterable[Fault], names: Mapping[str, int], *, meshed: tuple[str, ...] = ()) -> FaultSchedule:
    """meshed: those whose ranks are up."""
    found = FaultSchedule(faults, replicas=names, steps=STEPS, meshed=meshed)
    for name in names:
        assert found.started(name, now=0.0) == []
    for name in meshed:
        assert ranks(found, name, 2, now=0.0) == []
    return found


def bring(faults: FaultSchedule, version: int, *names: str, now: float) -> list[Action]:
    """These hold `version`, or all if none is named."""
    return [act for name in names or list(faults._replicas) for act in at(faults, name, version, now=now)]


def brought(faults: FaultSchedule, *versions: int) -> list[Action]:
    """All hold each version, at the second of its number."""
    return [act for version in versions for act in bring(faults, version, now=float(version))]


def only(acts: Iterable[object], kind: type[A]) -> list[A]:
    return [act for act in acts if isinstance(act, kind)]


def struck(acts: Iterable[Action], kind: type[Fault]) -> list[FaultAction]:
    return [act for act in only(acts, FaultAction) if isinstance(act.fault, kind)]


def at(faults: FaultSchedule, name: str, version: int, *, now: float, took: bool = False) -> list[Action]:
    """`name` holds `version`. took: it has just taken its state from others."""
    how = {"event": "synced", "how": "snapshot"} if took else {"event": "applied"}
    return faults.on(name, {"version": version, **how}, now=now)


def holds(faults: FaultSchedule, name: str, hold: str, *, now: float) -> list[Action]:
    """`name` holds where it was told to."""
    return faults.on(name, {"event": "reached", "hold": hold}, now=now)


def asked(faults: FaultSchedule, name: str, *, now: float) -> list[Action]:
    """`name` asks for a snapshot."""
    return faults.on(name, {"event": "asking"}, now=now)


def ranks(faults: FaultSchedule, name: str, number: int, *, now: float) -> list[Action]:
    """`name` has so many rank processes now; 0: it has lost them."""
    started = {"event": "mesh_started", "pids": list(range(number))}
    return faults.on(name, started if number else {"event": "rank_lost"}, now=now)
