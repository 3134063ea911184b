"""Who is in a run, and what changed since the last look: who joined, left, or has trouble. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from swarmnet.ids import PeerId, Restart
from swarmnet.peer.swarm_health import Assessment

TRAINER = -1
"""In the place of a stage."""


@dataclass(frozen=True, slots=True)
class Change:
    """kind: "joined", "left", "went_back", or "problem". text: for a person; `fields` for a program."""

    kind: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)


def members(assessment: Assessment) -> set[tuple[int, PeerId]]:
    """(stage, peer) of everybody who serves, and of trainers."""
    serving = {
        (line.stage, replica.peer)
        for line in assessment.stages
        for replica in line.replicas
        if replica.synced and replica.going is None
    }
    return serving | {(TRAINER, trainer.peer) for trainer in assessment.trainers}


class Presence:
    """Tell it each look at the run."""

    def __init__(self) -> None:
        self._here: set[tuple[int, PeerId]] | None = None
        self._problems: set[tuple[str, int | None]] = set()
        self._restart = 0

    def look(self, found: Assessment) -> Iterator[Change]:
        """What is different from the last look. Nobody is new at the first one."""
        here = members(found)
        before = here if self._here is None else self._here
        number = found.restart.number
        if self._here is not None and number > self._restart:
            yield went_back(found.restart)
        for kind, who in (("joined", here - before), ("left", before - here)):
            for stage, peer in sorted(who):
                role = "as a trainer" if stage == TRAINER else f"stage {stage}"
                text = (
                    f"{short(peer)} {kind} {role}"
                    if kind == "joined" or stage != TRAINER
                    else f"trainer {short(peer)} left"
                )
                yield Change(kind, text, {"peer": peer, "stage": None if stage == TRAINER else stage})
        problems = {(each.kind, each.stage) for each in found.problems if each.severity != "note"}
        for each in found.problems:
            if (each.kind, each.stage) in problems - self._problems:
                yield Change("problem", f"{each.severity}: {each.text}", {"kind": each.kind, "text": each.text})
        self._here, self._problems, self._restart = here, problems, number


def went_back(restart: Restart) -> Change:
    """The run went back."""
    return Change("went_back", f"the run went back to version {restart.version}", {"version": restart.version})


def short(peer: PeerId) -> str:
    """The end of an id, by which people tell peers apart."""
    return f"...{peer[-8:]}"


def synced(assessment: Assessment) -> str:
    """Synced replicas of each stage, as 2/3/2."""
    return "/".join(str(sum(replica.synced for replica in line.replicas)) for line in assessment.stages)
