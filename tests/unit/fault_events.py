"""What a replica's events tell the machine of faults."""

from __future__ import annotations

from swarmnet.testing.schedule import Action, FaultSchedule


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
