"""The state of a run as the events of one process show it: `RunState`, with a `StageState` for each replica. Pure.

Metrics, reminders, stall reports, contributions and the terminal of a peer and the table of `swarmnet local` are drawn
from it. What no event says comes from the peer: the record that it announces, and once a second bytes, limits and the
others' contributions (`peer.run`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from swarmnet.bounds import Recent
from swarmnet.directory import Record
from swarmnet.ids import PeerId
from swarmnet.telemetry.kinds import KINDS, WARNING, marked

STEP_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

PACE_STEPS = 10
"""The usual pace is that of so many steps, wherever one is shown."""

_MOST_PEERS = 64
"""Excluded peers that are remembered, of each kind."""


_few = partial(Recent, _MOST_PEERS)

_TOLD = marked("told")
_WARNS = frozenset(name for name, kind in KINDS.items() if kind.level == WARNING) - {"waiting"}
"""What is waited for is in `RunState.waits`, for as long as it lasts."""

_MOST_TOLD = 32

CROSSED_S = 10
"""Rates of the line are those of so many seconds."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """What came of one step."""

    step: int
    loss: float
    """Nats per token, the mean of the step."""
    tokens: int
    time: float
    """When it was applied: seconds of the clock of the state or curve that has it."""
    grad_norm: float = 0.0
    """Of the mean gradient, before it is clipped."""
    learning_rate: float = 0.0
    held_out: float | None = None
    """Of the weights that the step made."""
    replicas: str = ""
    """Synced ones of each stage when it was seen, as "2/3"; empty: it was not seen live."""


def step_s(points: Sequence[StepPoint]) -> float | None:
    """Seconds of a step over these; None if there are no two, or the run went back meanwhile."""
    if len(points) < 2 or points[-1].step <= points[0].step or points[-1].time <= points[0].time:
        return None
    return (points[-1].time - points[0].time) / (points[-1].step - points[0].step)


def tokens_per_second(points: Sequence[StepPoint]) -> float | None:
    """Of the whole run, over these steps; None as `step_s`."""
    seconds = step_s(points)
    return points[-1].tokens / seconds if seconds else None


@dataclass(slots=True)
class StageState:
    """One replica. All that is counted begins with its process."""

    stage: int
    alive: bool = False
    """Its process runs."""
    version: int | None = None
    """None: it is not in sync."""
    finished: bool = False
    """Its last version is that of the run."""
    mesh: str = ""
    """Of its ranks; "": one."""
    ranks_lost: bool = False
    """They start again."""
    rank_restarts: int = 0
    steps: int = 0
    """Applied."""
    executed: int = 0
    """Training forwards."""
    contributed: int = 0
    """Microbatches in committed aggregates."""
    worked: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PACE_STEPS + 1))
    """When the last steps were done, and `contributed` then."""
    new_steps: int = 0
    new_contributed: int = 0
    """Of `steps` and `contributed`, those that were not computed once more after the run went back."""
    newest: int = 0
    """The highest version so far."""
    again: bool = False
    """The last step was done before, too."""
    sent_bytes: int = 0
    """Of aggregates."""
    applied_at: float | None = None
    paced: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_STEPS + 1))
    """When it was in sync, and each of its last steps since."""
    evicted: Recent[PeerId, tuple[str, float]] = field(default_factory=_few)
    """Reason, and when."""
    late: Recent[PeerId, str] = field(default_factory=_few)
    convicted: Recent[PeerId, tuple[str, float]] = field(default_factory=_few)
    disputed: Recent[PeerId, tuple[int, int]] = field(default_factory=_few)
    """By the peer that did the work: the last step, and how many cases."""

    def per_second(self, now: float) -> float:
        """Microbatches that it contributes, over the last steps; less and less while no step comes."""
        if len(self.worked) < 2:
            return 0.0
        (began, first), (_, last) = self.worked[0], self.worked[-1]
        return max(last - first, 0) / max(now - began, 1e-3)

    def on(self, event: str, fields: Mapping[str, Any], *, now: float) -> None:
        """Take in one event of the replica."""
        # The run was extended, or it went back.
        if event in ("synced", "applied") and fields["version"] != self.version:
            self.finished = False
        match event:
            case "synced":
                self.version = fields["version"]
                # The time in which it fetched its state says nothing about the pace.
                self.paced.clear()
                self.paced.append(now)
            case "applied":
                self.version, self.applied_at = fields["version"], now
                self.steps += 1
                self.new_steps += self.version > self.newest
                self.again = self.version <= self.newest
                self.newest = max(self.version, self.newest)
                self.sent_bytes += fields.get("averaging_bytes", 0)
                self.paced.append(now)
            case "executed":
                counted = fields.get("counted", 0)
                self.new_contributed += 0 if self.again else counted - self.contributed
                self.executed, self.contributed = fields["executions"], counted
                self.worked.append((now, counted))
            case "mesh_started":
                self.mesh, self.ranks_lost = fields["mesh"], False
                self.rank_restarts += fields["epoch"] > 1
            case "rank_lost":
                self.ranks_lost = True
            case "finished":
                self.finished, self.version = True, fields["version"]
            case "evicted":
                self.evicted[fields["peer"]] = fields["reason"], now
            case "late":
                self.late[fields["peer"]] = fields["reason"]
            case "convicted":
                step, reason = f"step {fields['step']}", fields["reason"]
                self.convicted[fields["peer"]] = reason if step in reason else f"{step}: {reason}", now
                # The dispute is decided.
                self.disputed.pop(fields["peer"], None)
            case "disputed" if fields["peer"] not in self.convicted:
                _, number = self.disputed.get(fields["peer"], (0, 0))
                self.disputed[fields["peer"]] = fields["step"], number + 1


class Wait(NamedTuple):
    """What no step can be done without: fields of the event `waiting`."""

    since: float
    fields: Mapping[str, Any]


@dataclass(slots=True)
class StateTransfer:
    """The state of a stage on its way here, and the steps since. first: bytes that were here at `since`, from an
    earlier attempt: they say nothing about the pace. following: fields of that event, once the steps are replayed."""

    since: float
    first: int
    fields: Mapping[str, Any]
    following: Mapping[str, Any] | None = None


class ContributorRank(NamedTuple):
    """Where this peer stands among those of which it knows that they have contributed. rank: 1 is who has contributed
    the most; 0: it has contributed nothing."""

    rank: int = 0
    known: int = 0
    share: float = 0.0


class LineBytes(NamedTuple):
    """Bytes since the process began, and when that was looked up."""

    time: float = 0.0
    sent: int = 0
    received: int = 0


@dataclass(slots=True)
class RunState:
    """One process, a peer or a trainer."""

    events: Counter[str] = field(default_factory=Counter)
    first: dict[str, float] = field(default_factory=dict)
    """When each kind of event first came."""
    told: deque[tuple[str, Mapping[str, Any]]] = field(default_factory=lambda: deque(maxlen=_MOST_TOLD))
    """The last events that the terminal tells, and `num_told` of all."""
    num_told: int = 0
    warned: Recent[tuple[str, object, object], tuple[Mapping[str, Any], float]] = field(default_factory=_few)
    """The last warning of each kind, by its stage and peer: its fields, and when."""
    fetches: dict[int, StateTransfer] = field(default_factory=dict)
    """By stage."""
    pausing: str = ""
    """Why the peer takes no new microbatches; "": it does."""
    leaving: str = ""
    """What a peer that leaves waits for."""
    record: Record | None = None
    """Its short form, as the peer announces it: queues, limits of what is in flight, what is on disk, stall reports.
    None: of a process that announces none, or has not yet."""
    halted: int | None = None
    """The version at which the run cannot go on here until a peer joins."""
    microbatch_tokens: int = 0
    standing: ContributorRank = field(default_factory=ContributorRank)
    lent: tuple[float, float] = (0.0, 0.0)
    """Bytes per second that may be sent and received; 0: all that the line carries."""
    crossed: deque[LineBytes] = field(default_factory=lambda: deque(maxlen=CROSSED_S + 1))
    stages: dict[int, StageState] = field(default_factory=dict)
    links: Sequence[str] = ()
    """By which others join."""
    dht: Sequence[str] = ()
    """Addresses at which its DHT node listens."""
    synced_at: float = float("-inf")
    waits: dict[int | None, Wait] = field(default_factory=dict)
    """By stage; None: of the whole process."""
    points: deque[StepPoint] = field(default_factory=lambda: deque(maxlen=PACE_STEPS + 1))
    """Of the last steps that had tokens."""
    durations: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS_S) + 1))
    """Steps of the lowest stage here, by the bucket of the seconds since the step before."""
    seconds: float = 0.0
    """Of these steps together."""

    @property
    def version(self) -> int | None:
        """Which all its stages have; None: not all are in sync."""
        versions = [here.version for here in self.stages.values()]
        return None if None in versions else min((each for each in versions if each is not None), default=None)

    @property
    def num_steps(self) -> int:
        """Of the run, as far as it can be foreseen; 0: not yet."""
        return self.record.steps if self.record is not None else 0

    def eta_s(self, now: float) -> float | None:
        """Seconds to the last step at the pace of the last ones; None: unknown. The step under way counts for as long
        as it has lasted, if that makes the pace slower."""
        pace, version = step_s(self.points), self.version
        if pace is None or version is None or not self.num_steps:
            return None
        first, last = self.points[0], self.points[-1]
        return (self.num_steps - version) * max(pace, (now - first.time) / (last.step - first.step + 1))

    @property
    def line(self) -> tuple[float, float]:
        """Bytes per second that were sent and received lately."""
        if len(self.crossed) < 2:
            return 0.0, 0.0
        began, ended = self.crossed[0], self.crossed[-1]
        seconds = max(ended.time - began.time, 1e-3)
        return (ended.sent - began.sent) / seconds, (ended.received - began.received) / seconds

    def serve(self, stage: int, *, now: float) -> StageState:
        """From now on a replica of that stage runs here."""
        self.stages[stage] = StageState(stage, alive=True, paced=deque([now], maxlen=PACE_STEPS + 1))
        return self.stages[stage]

    def on(self, event: str, fields: Mapping[str, Any], *, now: float) -> None:
        """Take in one event. now: seconds of any clock, the same for all of them."""
        self.events[event] += 1
        self.first.setdefault(event, now)
        if event in _TOLD:
            self.told.append((event, fields))
            self.num_told += 1
        if event in _WARNS:
            self.warned[event, fields.get("stage"), fields.get("peer")] = fields, now
        stage = fields.get("stage")
        here = self.stages.get(stage) if stage is not None else None
        before = here.applied_at if here is not None else None
        if here is not None:
            here.on(event, fields, now=now)
        match event:
            case "listening" | "hidden":
                self.links, self.dht = fields.get("links", ()), fields.get("dht", self.dht)
            case "waiting":
                if stage not in self.waits or self.waits[stage].fields["reason"] != fields["reason"]:
                    self.waits[stage] = Wait(now, fields)
            case "complete":
                self.waits.pop(None, None)
            case "halted" if here is not None:
                self.halted = here.version
            # What it waited for before is not what it waits for now.
            case "restart" | "draining":
                self.waits.clear()
                self.leaving = fields.get("left", "") if event == "draining" else self.leaving
            case "pausing":
                self.pausing = fields["why"]
            case "resumed":
                self.pausing = ""
            case "fetching":
                begun = self.fetches.get(fields["stage"]) or StateTransfer(now, fields["bytes"], fields)
                self.fetches[fields["stage"]] = StateTransfer(begun.since, begun.first, fields)
            case "following" if fields["stage"] in self.fetches:
                self.fetches[fields["stage"]].following = fields
            case "synced" | "applied":
                self.waits.pop(stage, None)
                # A later fetch of the stage has a pace of its own.
                self.fetches.pop(fields.get("stage", -1), None)
                self.synced_at = now if event == "synced" else self.synced_at
            case "figures" if fields["num_tokens"]:
                step, loss, num_tokens = fields["step"], fields["loss"], fields["num_tokens"]
                self.points.append(StepPoint(step, loss, num_tokens, now, fields["grad_norm"], fields["learning_rate"]))
        if event == "applied" and before is not None and stage == min(self.stages):
            self.durations[sum(now - before > bound for bound in STEP_BUCKETS_S)] += 1
            self.seconds += now - before
