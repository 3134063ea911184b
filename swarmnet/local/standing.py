"""What the machine of faults keeps in mind: orders, replicas, stages, and what lasts. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnet.local.fault import Fault


@dataclass(slots=True)
class Order:
    """A fault that has not happened yet. stage: whose steps and phases count."""

    fault: Fault
    stage: int | None
    fire_at: float | None = None
    reported: bool = False
    holds: dict[str, str] = field(default_factory=dict)  # replica -> id of its hold
    waits: dict[str, float] = field(default_factory=dict)  # who holds in a transfer, until it may go or then


@dataclass(slots=True)
class ReplicaStanding:
    """What is known of one replica."""

    stage: int
    version: int | None = None  # None: not synced, or dead
    up: bool = True
    stopped: bool = False
    draining: bool = False
    ranks: int = 0  # processes beside its own that can be killed
    good_at: int = -1  # from this version on it has been through a whole step undisturbed


@dataclass(slots=True)
class Stage:
    """How far a stage is."""

    seen: int = -1  # newest version any replica ever showed
    since: float = 0.0
    step_s: float = 0.0  # how long the last whole step took


@dataclass(slots=True)
class Lasting:
    """A fault that has begun and not ended."""

    until: float
    fault: Fault
    name: str = ""  # who is stopped, or held for a joiner
    hold: str = ""
    joiner: str = ""
