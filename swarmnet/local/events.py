"""What children write about themselves, parsed once. One JSON object a line becomes one frozen value.

Only what the supervisor decides by has a class here; any other event is an `OtherEvent` and goes to events.jsonl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swarmnet.errors import SwarmError

ORACLE_STEP = "oracle_step"
"""What the single process writes after each step: `step`, `loss`, `tokens`."""


class BadEvent(SwarmError):
    """A child wrote an event that lacks a field of the contract: a bug of ours, shown with the line."""


@dataclass(frozen=True, slots=True)
class ListeningEvent:
    """The child is up: its peer id, the multiaddrs of its DHT node, and the links by which others can join."""

    peer: str
    dht: tuple[str, ...]
    links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SyncedEvent:
    """The replica holds its stage at `version` and takes part."""

    stage: int
    version: int
    how: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CommittedEvent:
    """One member's view of a commit. loss_sum counts in the last stage only."""

    stage: int
    step: int
    loss_sum: float
    num_tokens: int
    digest: str
    contributions: tuple[tuple[str, tuple[int, ...]], ...]
    voided: frozenset[int]


@dataclass(frozen=True, slots=True)
class AppliedEvent:
    """The replica made an optimizer step and is now at `version`. averaging_bytes: of sums that it has handed to its
    mates since the step before."""

    stage: int
    step: int
    version: int
    averaging_bytes: int = 0


@dataclass(frozen=True, slots=True)
class OuterStepEvent:
    """A step that replicas have taken together (`averaging.sync = "local"`). taken: with what this one has learned."""

    stage: int
    step: int
    taken: bool


@dataclass(frozen=True, slots=True)
class ReroutedEvent:
    """A microbatch had to go to another replica."""

    stage: int
    step: int
    index: int


@dataclass(frozen=True, slots=True)
class ExecutedEvent:
    """How many training forwards of `stage` this process has done so far."""

    stage: int
    executions: int


@dataclass(frozen=True, slots=True)
class EvaluatedEvent:
    """Held-out loss on the weights of version `step`."""

    step: int
    loss: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The replica holds the run's last version."""

    stage: int
    version: int
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class HaltedEvent:
    """The run cannot go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class HoldReachedEvent:
    """The child holds in a phase, as it was told to. step None: it does not know."""

    hold: str
    step: int | None


@dataclass(frozen=True, slots=True)
class SnapshotAskedEvent:
    """The child asks for a snapshot, for the first time since it was started."""


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """The replica has written `version` of its stage to its disk."""

    stage: int
    version: int


@dataclass(frozen=True, slots=True)
class BadCheckpointEvent:
    """A file on the replica's disk is no checkpoint that could be used."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointFailedEvent:
    """A checkpoint could not be written."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class DriftEvent:
    """The weights of `peer` were not those of the others at `version`: it takes theirs."""

    stage: int
    version: int
    peer: str


@dataclass(frozen=True, slots=True)
class WaitingEvent:
    """The replica of `stage` has no state, and nobody to have it from. None: what no step can be done without."""

    reason: str
    stage: int | None = None


@dataclass(frozen=True, slots=True)
class RestartEvent:
    """The whole run goes on from an earlier version; the number-th time that it has to."""

    number: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class MeshStartedEvent:
    """All ranks of the replica's mesh are up, the epoch-th time. pids: by rank."""

    stage: int
    mesh: str
    epoch: int
    pids: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class RankLostEvent:
    """A rank of the replica's mesh has died or hangs: all of them start anew. rank None: it is not known which."""

    stage: int
    rank: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class DroppedEvent:
    """The stage's state at `version` is not what its steps before made of it: older, or made anew."""

    stage: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class CompleteEvent:
    """All stages are served now."""


@dataclass(frozen=True, slots=True)
class OtherEvent:
    """Anything else."""

    kind: str


Event = (
    ListeningEvent
    | SyncedEvent
    | CommittedEvent
    | AppliedEvent
    | OuterStepEvent
    | ReroutedEvent
    | ExecutedEvent
    | EvaluatedEvent
    | FinishedEvent
    | HaltedEvent
    | HoldReachedEvent
    | SnapshotAskedEvent
    | CheckpointEvent
    | BadCheckpointEvent
    | CheckpointFailedEvent
    | DriftEvent
    | WaitingEvent
    | RestartEvent
    | MeshStartedEvent
    | RankLostEvent
    | DroppedEvent
    | CompleteEvent
    | OtherEvent
)


def _committed(record: Mapping[str, Any]) -> CommittedEvent:
    return CommittedEvent(
        stage=record["stage"],
        step=record["step"],
        loss_sum=float(record["loss_sum"]),
        num_tokens=record["num_tokens"],
        digest=str(record["digest"]),
        contributions=tuple((peer, tuple(indexes)) for peer, indexes in record["contributions"]),
        voided=frozenset(record["voided"]),
    )


_PARSERS: dict[str, Callable[[Mapping[str, Any]], Event]] = {
    "listening": lambda r: ListeningEvent(r["peer"], tuple(r["dht"]), tuple(r.get("links", ()))),
    "synced": lambda r: SyncedEvent(r["stage"], r["version"], r["how"], r["seconds"]),
    "committed": _committed,
    "applied": lambda r: AppliedEvent(r["stage"], r["step"], r["version"], r.get("averaging_bytes", 0)),
    "outer_step": lambda r: OuterStepEvent(r["stage"], r["step"], True),
    "outer_missed": lambda r: OuterStepEvent(r["stage"], r["step"], False),
    "rerouted": lambda r: ReroutedEvent(r["stage"], r["step"], r["index"]),
    "executed": lambda r: ExecutedEvent(r["stage"], r["executions"]),
    "evaluated": lambda r: EvaluatedEvent(r["step"], float(r["loss"]), r["num_tokens"]),
    "halted": lambda r: HaltedEvent(str(r["reason"])),
    "checkpoint": lambda r: CheckpointEvent(r["stage"], r["version"]),
    "checkpoint_bad": lambda r: BadCheckpointEvent(str(r["path"]), str(r["reason"])),
    "checkpoint_failed": lambda r: CheckpointFailedEvent(str(r["path"]), str(r["reason"])),
    "drift": lambda r: DriftEvent(r["stage"], r["version"], r["peer"]),
    "waiting": lambda r: WaitingEvent(str(r["reason"]), r.get("stage")),
    "complete": lambda r: CompleteEvent(),
    "restart": lambda r: RestartEvent(r["number"], r["version"], str(r["reason"])),
    "mesh_started": lambda r: MeshStartedEvent(
        r["stage"], str(r["mesh"]), r["epoch"], tuple(map(int, r["pids"])), float(r["seconds"])
    ),
    "rank_lost": lambda r: RankLostEvent(r["stage"], r["rank"], str(r["reason"])),
    "dropped": lambda r: DroppedEvent(r["stage"], r["to"], str(r["reason"])),
    "reached": lambda r: HoldReachedEvent(r["hold"], r["step"]),
    "asking": lambda r: SnapshotAskedEvent(),
    "finished": lambda r: FinishedEvent(r["stage"], r["version"], r["weights_sha256"]),
}


def parse(record: Mapping[str, Any]) -> Event:
    """One JSON object as a value. Raises BadEvent when a field of the contract is missing or of the wrong form."""
    kind = str(record.get("event", ""))
    try:
        return _PARSERS[kind](record) if kind in _PARSERS else OtherEvent(kind)
    except (KeyError, TypeError, ValueError) as error:
        raise BadEvent(f"event {kind!r} lacks or garbles {error}", record=dict(record)) from error
