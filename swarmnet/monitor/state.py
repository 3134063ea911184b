"""A run as it is seen from outside: `WatchedRun`, from which `swarmnet watch`, the dashboard and files are drawn. Pure.

It has what `Curve` believes of the steps, what `assess` makes of the records, and what changed from look to look: who
joined, left, or has trouble.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from swarmnet.ids import PeerId
from swarmnet.monitor.curve import Curve
from swarmnet.monitor.waterfall import StepBar, one_step
from swarmnet.peer.swarm_health import Assessment, Problem, ReplicaLine
from swarmnet.telemetry.text import short

TRAINER = -1
"""Instead of a stage."""

MOST_STAYS, MOST_CHANGES = 200, 400
"""That are remembered: the newest, and all stays that last."""

MOST_CONTRIBUTORS = 100
"""That are told: those who have contributed the most."""

PACE_LOOKS = 16
"""A replica's microbatches per second are those between so many looks."""


@dataclass(frozen=True, slots=True)
class Change:
    """kind: "joined", "left", "gone" (without a word, or shut out), "restarted", "went_back", or "problem". text: for a
    person; `fields` for a program. step: the newest then. time: Unix seconds."""

    kind: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    time: float = 0.0


@dataclass(slots=True)
class Stay:
    """A peer's time in a stage, in Unix seconds. began: None: before the first look. ended: None: it is here.

    how: "left" if it had said that it would; "gone" if not; "" while it is here.
    """

    stage: int
    peer: PeerId
    began: float | None = None
    ended: float | None = None
    how: str = ""


class WatchedRun:
    """Tell it each look at the run."""

    found: Assessment
    """Of the last look; there is none before."""

    def __init__(self, curve: Curve, *, now: float) -> None:
        """now: Unix seconds, here and below."""
        self.curve, self.since, self.looks = curve, now, 0
        self.changes: Sequence[Change] = ()
        """Since the look before. At the first one no peer is new."""
        self.steps: Collection[int] = ()
        """Of the curve, those that are new or have changed; so are `versions` of its held-out losses."""
        self.versions: Collection[int] = ()
        self.history: deque[Change] = deque(maxlen=MOST_CHANGES)
        """All but problems."""
        self.stays: list[Stay] = []
        self.waterfall: dict[str, Any] | None = None
        """How members spent their last step, if they were asked (`one_step`)."""
        self.name = ""
        """Of the run, in its manifest; empty: unknown."""
        self._executions: dict[tuple[int, PeerId], deque[tuple[float, int]]] = {}

    def look(
        self,
        found: Assessment,
        *,
        now: float,
        steps: Collection[int] = (),
        versions: Collection[int] = (),
        bars: Sequence[StepBar] = (),
    ) -> None:
        """What is known now."""
        before = self.found if self.looks else None
        self.found, self.looks, self.steps, self.versions = found, self.looks + 1, steps, versions
        # Between two steps of a fast run members have nothing to tell: the last step that was told stays.
        self.waterfall = one_step(bars) or self.waterfall
        at = newest.step if (newest := self.curve.newest) else 0
        self.changes = [replace(each, step=at, time=now) for each in self._changed(before)]
        if before is None:
            self.stays = [Stay(stage, peer) for stage, peer in sorted(members(found))]
        for change in self.changes:
            if change.kind != "problem":
                self._stay(change)
                self.history.append(change)
        ended = [stay for stay in self.stays if stay.ended is not None]
        for stay in ended[: max(len(self.stays) - MOST_STAYS, 0)]:
            self.stays.remove(stay)
        executions = {who: each.executions for who, each in _replicas(found).items()}
        self._executions = {who: self._executions.get(who) or deque(maxlen=PACE_LOOKS) for who in executions}
        for who, said in self._executions.items():
            if said and executions[who] < said[-1][1]:
                said.clear()  # it was started again
            said.append((now, executions[who]))

    def per_second(self, stage: int, peer: PeerId) -> float:
        """Microbatches that a replica of the last look executes."""
        (began, first), (ended, last) = self._executions[stage, peer][0], self._executions[stage, peer][-1]
        return (last - first) / max(ended - began, 1e-3)

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
                    "replicas": [shown(each, "peer state version speed region nickname") for each in line.replicas],
                }
                for line in found.stages
            ],
            "contributors": [asdict(each) for each in found.contributors[:MOST_CONTRIBUTORS]],
            "trainers": [trainer.peer for trainer in found.trainers],
            "problems": [shown(each, "severity kind text") for each in found.problems],
        }

    def _changed(self, before: Assessment | None) -> Iterator[Change]:
        """What is different from the last look."""
        found, curve = self.found, self.curve
        here, were = members(found), members(before or found)
        replicas, earlier = _replicas(found), _replicas(before or found)
        # At the first look a file may be ahead: the run went back while nobody watched.
        went_back = curve.ahead if before is None else found.restart.number > before.restart.number
        if went_back:
            yield Change(
                "went_back",
                f"the run was restarted from version {found.restart.version}",
                {"version": found.restart.version},
            )
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

    def _stay(self, change: Change) -> None:
        """Note a change of who is there."""
        if change.kind == "went_back":
            return
        peer, stage = change.fields["peer"], change.fields["stage"]
        stage = TRAINER if stage is None else stage
        ends = change.kind in ("left", "gone")
        for stay in self.stays:
            if (stay.stage, stay.peer, stay.ended) == (stage, peer, None):
                stay.ended, stay.how = change.time, change.kind if ends else "gone"  # who was started again had ended
        if not ends:
            self.stays.append(Stay(stage, peer, change.time))


def members(assessment: Assessment) -> set[tuple[int, PeerId]]:
    """(stage, peer) of all that serve, and of trainers."""
    serving = {who for who, each in _replicas(assessment).items() if each.ready and each.going is None}
    return serving | {(TRAINER, trainer.peer) for trainer in assessment.trainers}


def synced(found: Assessment) -> str:
    """Synced replicas of each stage, as 2/3/2."""
    return "/".join(str(sum(replica.ready for replica in line.replicas)) for line in found.stages)


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


def shown(thing: object, fields: str) -> dict[str, Any]:
    """These fields of it, as JSON. fields: names, with spaces between."""
    return {name: getattr(thing, name) for name in fields.split()}
