"""What the supervisor tells a child that was started for chaos, and the child's answers: JSON lines in files.

Orders say what is to hold from now on, so that reading one twice changes nothing. A child starts with its own file, in
which what holds at that moment is already written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from swarmnet.local.fault import LinkLimit, Moment, Phase

REACHED = "reached"
"""The child's event: it holds. `hold`, `phase`, `step` (null for a joiner, which knows none)."""
WORKED = "worked"
"""The child's event while it is traced: `step`, `index`, and `phase`: "begun"; "forward", which is done; "counted",
when its gradient is in."""
ASKING = "asking"
"""The child's event: it asks for a snapshot, for the first time since it was started."""


@dataclass(frozen=True, slots=True)
class HoldAt:
    """Hold once, the first time this phase comes at `step` or later."""

    id: str
    phase: Phase
    step: int
    moment: Moment


@dataclass(frozen=True, slots=True)
class GoOn:
    """Hold no longer, or not at all, for this order."""

    id: str


@dataclass(frozen=True, slots=True)
class SetLinks:
    """The state of this child's links, whole. cut, paces: by peer id."""

    cut: frozenset[str] = frozenset()
    paces: Mapping[str, LinkLimit] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """Say what is worked on, microbatch by microbatch."""


Order = HoldAt | GoOn | SetLinks | Trace


def record(order: Order) -> tuple[str, dict[str, Any]]:
    """An order as (name, fields) for `EventLog.emit`."""
    match order:
        case HoldAt(id, phase, step, moment):
            return "hold", {"id": id, "phase": phase, "step": step, "moment": moment}
        case GoOn(id):
            return "go_on", {"id": id}
        case Trace():
            return "trace", {}
        case SetLinks(cut, paces):
            return "links", {
                "cut": sorted(cut),
                "paces": {peer: [pace.bytes_per_s, pace.latency_s] for peer, pace in sorted(paces.items())},
            }


def order_of(fields: Mapping[str, Any]) -> Order:
    """The order that `record` wrote."""
    match fields["event"]:
        case "hold":
            return HoldAt(fields["id"], cast(Phase, fields["phase"]), fields["step"], cast(Moment, fields["moment"]))
        case "go_on":
            return GoOn(fields["id"])
        case "trace":
            return Trace()
        case "links":
            return SetLinks(
                frozenset(fields["cut"]), {peer: LinkLimit(*numbers) for peer, numbers in fields["paces"].items()}
            )
        case other:
            raise AssertionError(f"no such order: {other}")
