"""Where a run stands, who is in it, and what changed since the last look: who joined, left, or has trouble. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarmnet.ids import PeerId, Restart
from swarmnet.monitor.curve import Curve
from swarmnet.monitor.waterfall import StepBar
from swarmnet.peer.swarm_health import Assessment, Problem, ReplicaLine
from swarmnet.telemetry.text import short

T = TypeVar("T")

TRAINER = -1
"""In the place of a stage."""


@dataclass(frozen=True, slots=True)
class Change:
    """kind: "joined", "left", "gone" (without a word, or shut out), "restarted", "went_back", or "problem". text: for a
    person; `fields` for a program."""

    kind: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)


def members(assessment: Assessment) -> set[tuple[int, PeerId]]:
    """(stage, peer) of everybody who serves, and of trainers."""
    serving = {
        (line.stage, replica.peer)
        for line in assessment.stages
        for replica in line.replicas
        if replica.ready and replica.going is None
    }
    return serving | {(TRAINER, trainer.peer) for trainer in assessment.trainers}


class Presence:
    """Tell it each look at the run."""

    def __init__(self) -> None:
        self._before: Assessment | None = None

    def look(self, found: Assessment) -> Iterator[Change]:
        """What is different from the last look. Nobody is new at the first one."""
        before, self._before = self._before, found
        here, were = members(found), members(before or found)
        replicas, earlier = _replicas(found), _replicas(before or found)
        if before is not None and found.restart.number > before.restart.number:
            yield went_back(found.restart)
        for stage, peer in sorted(here - were):
            role = "as a trainer" if stage == TRAINER else f"stage {stage}"
            yield Change("joined", f"{short(peer)} joined {role}", _who(peer, stage))
        for stage, peer in sorted(were - here):
            last = replicas.get((stage, peer)) or earlier.get((stage, peer))
            kind, text = _left(stage, peer, last.state if last else "")
            yield Change(kind, text, _who(peer, stage))
        for stage, peer in sorted(replicas.keys() & were & here):
            if replicas[stage, peer].incarnation != earlier[stage, peer].incarnation:
                yield Change("restarted", f"{short(peer)} was started again, stage {stage}", _who(peer, stage))
        known = {_about(each) for each in before.problems} if before else set()
        for each in found.problems:
            if each.severity != "note" and _about(each) not in known:
                yield Change("problem", f"{each.severity}: {each.text}", {"kind": each.kind, "text": each.text})


def _replicas(found: Assessment) -> dict[tuple[int, PeerId], ReplicaLine]:
    return {(line.stage, each.peer): each for line in found.stages for each in line.replicas}


def _about(problem: Problem) -> tuple[bool, str, int | None, PeerId | None]:
    return problem.severity == "note", problem.kind, problem.stage, problem.peer


def _left(stage: int, peer: PeerId, state: str) -> tuple[str, str]:
    """The kind of change, and words. state: as it was last seen."""
    # A trainer's last record says that it has finished, and is not shown.
    if stage == TRAINER:
        return "left", f"trainer {short(peer)} left"
    if state == "leaving" or state.startswith("going to"):
        return "left", f"{short(peer)} left stage {stage}"
    how = "was shut out" if state == "convicted" else "is gone without a word"
    return "gone", f"{short(peer)} {how}, stage {stage}"


def _who(peer: PeerId, stage: int) -> dict[str, Any]:
    return {"peer": peer, "stage": None if stage == TRAINER else stage}


def went_back(restart: Restart) -> Change:
    """The run was restarted."""
    return Change("went_back", f"the run was restarted from version {restart.version}", {"version": restart.version})


def fairly(stages: Iterable[Sequence[T]]) -> list[T]:
    """The first of each stage, then the second of each: so that no stage is without."""
    return [each for row in itertools.zip_longest(*stages) for each in row if each is not None]


def shown(thing: object, fields: str) -> dict[str, Any]:
    """These fields of it, as JSON. fields: names, with spaces between."""
    return {name: getattr(thing, name) for name in fields.split()}


@dataclass(frozen=True, slots=True)
class Observation:
    """The run at one moment, as it is seen from outside. All that `swarmnet watch` and the dashboard show is in it.

    changes: who came and went since the look before. steps, versions: those of the curve that are new or have changed.
    bars: how members have spent their last step, if they were asked.
    """

    found: Assessment
    curve: Curve
    changes: Sequence[Change] = ()
    steps: Collection[int] = ()
    versions: Collection[int] = ()
    bars: Sequence[StepBar] = ()

    @property
    def synced(self) -> str:
        """Synced replicas of each stage, as 2/3/2."""
        return "/".join(str(sum(replica.ready for replica in line.replicas)) for line in self.found.stages)

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step, at the pace of the last ones; None: unknown, or no step is done now."""
        found, newest = self.found, self.curve.newest
        step_s = self.curve.step_s(newest.step) if newest else None
        if newest is None or step_s is None or not found.steps or found.still_s:
            return found.eta_s
        return max(found.steps - newest.step - 1, 0) * step_s

    def state(self) -> dict[str, Any]:
        """Where the run stands, as JSON."""
        found, curve, newest = self.found, self.curve, self.curve.newest
        held_out = curve.newest_held_out
        figures = dict.fromkeys(("step", "loss", "learning_rate", "grad_norm", "tokens_per_second"))
        if newest is not None:
            pace = curve.tokens_per_second(newest.step)
            figures = shown(newest, "step loss learning_rate grad_norm") | {"tokens_per_second": pace}
        return {
            **shown(found, "run steps finished still_s num_tainted num_disputed"),
            **figures,
            # What members answer is newer than their records.
            "version": newest.step + 1 if newest else found.version,
            "held_out": None if held_out is None else {"version": held_out, "loss": curve.evaluations[held_out]},
            "eta_s": self.eta_s,
            "stages": [
                {
                    "stage": line.stage,
                    "replicas": [shown(each, "peer state version speed region") for each in line.replicas],
                }
                for line in found.stages
            ],
            "trainers": [trainer.peer for trainer in found.trainers],
            "problems": [shown(each, "severity kind text") for each in found.problems],
        }
