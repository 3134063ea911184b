"""Where the swarm stands, folded from its children's events. Pure: no file, no process, no clock.

The first member's word about a commit counts for the curve; the audit compares the others with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmnet.telemetry.kinds import KINDS, EventFold
from swarmnet.telemetry.run_state import PACE_STEPS, RunState, StageState, StepPoint, step_s, tokens_per_second


@dataclass(slots=True)
class Conviction:
    """One peer that correct replicas have banned. step: how many steps had a loss by then."""

    step: int
    reason: str
    by: set[str] = field(default_factory=set)


@dataclass(slots=True)
class SwarmProgress(EventFold):
    """A swarm of `steps` steps; `replicas` maps the name of each replica to its stage."""

    steps: int
    replicas: dict[str, StageState]
    past: list[StageState] = field(default_factory=list)  # of processes that have ended
    liars: Mapping[str, str] = field(default_factory=dict)  # the Byzantine ones, with their kinds, by name
    trainers: frozenset[str] = frozenset()
    started_at: float = 0.0
    earlier_s: float = 0.0  # how long it had run before it was resumed
    earlier_points: int = 0  # how many points are from then
    done: set[int] = field(default_factory=set)  # steps with a loss that this start of the swarm has computed (again)
    points: list[StepPoint] = field(default_factory=list)  # times: since the swarm was started
    evaluations: dict[int, float] = field(default_factory=dict)
    figures: dict[int, tuple[float, float]] = field(default_factory=dict)  # learning rate and gradient norm, by step
    training_at: float | None = None  # when every stage first had a synced replica
    moved_at: float = 0.0  # the last sign that training goes on
    kills: list[tuple[str, int, float]] = field(default_factory=list)  # (name, step, seconds)
    faults: Counter[str] = field(default_factory=Counter)  # by kind; kills, too
    on_disk: dict[int, set[int]] = field(default_factory=dict)  # versions ever written, by stage
    unwritten: dict[int, str] = field(default_factory=dict)  # by stage: who could not write its last weights, and why
    postponed: list[str] = field(default_factory=list)
    strays: set[tuple[int, int, str]] = field(default_factory=set)  # (stage, version, peer) of diverged weights
    names: dict[str, str] = field(default_factory=dict)  # of processes, by peer id
    events: Counter[tuple[str, str]] = field(default_factory=Counter)  # how many, by process and kind
    convictions: dict[str, Conviction] = field(default_factory=dict)  # by name
    halted: str = ""  # why the run cannot go on until a peer joins
    out: set[str] = field(default_factory=set)  # banned peers: no peer of the run takes their messages any more
    starts: Counter[str] = field(default_factory=Counter)  # of processes, by name
    processes: dict[str, RunState] = field(default_factory=dict)  # those that run, trainers, too
    _early: dict[int, StepPoint] = field(default_factory=dict)

    @property
    def dht(self) -> dict[str, Sequence[str]]:
        """Addresses of the processes that are up."""
        return {name: process.dht for name, process in self.processes.items() if process.dht}

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return 1 + max(replica.stage for replica in self.replicas.values())

    @property
    def checkpoint(self) -> int | None:
        """The newest version that every stage has written to some disk; None if there is none."""
        written = [self.on_disk.get(stage, set()) for stage in range(self.stages)]
        return max(set.intersection(*written), default=None)

    @property
    def lost_weights(self) -> dict[int, str]:
        """For each stage without its last weights on any disk: which replicas could not write them where, and why."""
        return {
            stage: why
            for stage, why in sorted(self.unwritten.items())
            if self.steps not in self.on_disk.get(stage, set())
        }

    def total(self, figure: str) -> int:
        """The sum of a figure of `StageState` over all processes, also those that have ended."""
        return sum(getattr(each, figure) for each in (*self.past, *self.replicas.values()))

    def count(self, event: str) -> int:
        """How many events of this kind all processes wrote."""
        return sum(number for (_, kind), number in self.events.items() if kind == event)

    def started(self, name: str, *, now: float) -> None:
        """The process of `name` has been started (again)."""
        self.starts[name] += 1
        if self.training_at is None:
            self.moved_at = now  # while all start, each start is progress; later it is none
        self.processes.pop(name, None)
        if name in self.replicas:
            self._renew(name, alive=True)

    def ended(self, name: str) -> None:
        """The process of `name` is gone."""
        self.processes.pop(name, None)
        if name in self.replicas:
            # It keeps what it had reached: the run may be complete with it.
            self._renew(name, finished=self.replicas[name].finished)

    def _renew(self, name: str, *, alive: bool = False, finished: bool = False) -> None:
        before = self.replicas[name]
        self.past.append(before)
        self.replicas[name] = StageState(before.stage, alive=alive, finished=finished)

    def on(self, name: str, event: Mapping[str, Any], *, now: float) -> None:
        """Take in one event of child `name`, as its file has it."""
        replica = self.replicas.get(name)
        kind = KINDS[event["event"]]
        if name in self.liars and "self" not in kind.marks:
            return
        self.events[name, kind.name] += 1
        if name not in self.processes:
            self.processes[name] = RunState(stages={} if replica is None else {replica.stage: replica})
        self.processes[name].on(kind.name, event, now=now)
        if "accuses" in kind.marks:
            whom, reason = self.names.get(event["peer"], event["peer"]), event.get("reason", event.get("why", ""))
            self.convictions.setdefault(whom, Conviction(len(self.points), reason)).by.add(name)
        if "version" in kind.marks and self.training_at is None:
            self.moved_at = now
            if all(self.synced(stage) for stage in range(self.stages)):
                self.training_at = now
        self.take(kind.name, name, event, now)

    def on_listening(self, name: str, event: Mapping[str, Any], now: float) -> None:
        self.names[event["peer"]] = name

    def on_convicted(self, name: str, event: Mapping[str, Any], now: float) -> None:
        self.out.add(self.names.get(event["peer"], event["peer"]))

    def on_convicted_here(self, name: str, event: Mapping[str, Any], now: float) -> None:
        if name in self.liars:
            self.out.add(name)  # it may end before another peer's event about it is read

    def on_halted(self, name: str, event: Mapping[str, Any], now: float) -> None:
        self.halted = event["reason"]

    def on_applied(self, name: str, event: Mapping[str, Any], now: float) -> None:
        self.moved_at = now

    def on_evaluated(self, name: str, event: Mapping[str, Any], now: float) -> None:
        self.evaluations[event["step"]] = float(event["loss"])

    def on_figures(self, name: str, event: Mapping[str, Any], now: float) -> None:
        self.figures[event["step"]] = event["learning_rate"], event["grad_norm"]

    def on_checkpoint(self, name: str, event: Mapping[str, Any], now: float) -> None:
        self.on_disk.setdefault(event["stage"], set()).add(event["version"])

    def on_drift(self, name: str, event: Mapping[str, Any], now: float) -> None:
        self.strays.add((event["stage"], event["version"], event["peer"]))

    def on_finished(self, name: str, event: Mapping[str, Any], now: float) -> None:
        if problem := event.get("problem"):
            self.unwritten.setdefault(event["stage"], f"{name} could not write {event['path']}: {problem}")
        elif name not in self.liars:
            self.on_disk.setdefault(event["stage"], set()).add(event["version"])
        self.moved_at = now

    def on_dropped(self, name: str, event: Mapping[str, Any], now: float) -> None:
        """The steps from `to` on will be others than those of before: the curve goes on with the new ones."""
        version = event["to"]
        del self.points[version:]
        self._early = {step: point for step, point in self._early.items() if step < version}
        self.earlier_points = min(self.earlier_points, version)

    def on_committed(self, name: str, event: Mapping[str, Any], now: float) -> None:
        self.moved_at = now
        step, num_tokens = event["step"], event["num_tokens"]
        if event["stage"] != self.stages - 1:
            return
        self.done.add(step)
        if step < len(self.points) or step in self._early:
            return  # another member has said so
        loss = float(event["loss_sum"]) / num_tokens if num_tokens else 0.0
        self._early[step] = StepPoint(step, loss, num_tokens, now - self.started_at)
        while (point := self._early.pop(len(self.points), None)) is not None:
            self.points.append(point)

    def _live(self, stage: int) -> list[StageState]:
        """The replicas of a stage that run, except for banned ones."""
        return [
            replica
            for name, replica in self.replicas.items()
            if replica.stage == stage and replica.alive and name not in self.out
        ]

    def synced(self, stage: int) -> list[int]:
        """Versions of the live synced replicas of a stage."""
        return [replica.version for replica in self._live(stage) if replica.version is not None]

    def in_sync(self, stage: int) -> int:
        """How many replicas of a stage train now: they run, hold their weights and are not far behind the others."""
        versions = [each.version for each in self._live(stage) if each.version is not None and not each.ranks_lost]
        return sum(version > max(versions) - PACE_STEPS for version in versions)

    def alive(self, stage: int) -> int:
        """How many replicas of a stage run."""
        return len(self._live(stage))

    @property
    def complete(self) -> bool:
        """Every step has a loss and every stage a replica that holds the last version."""
        ended = {replica.stage for replica in self.replicas.values() if replica.finished}
        return len(self.points) >= self.steps and len(ended) == self.stages

    @property
    def all_finished(self) -> bool:
        """As `complete`, and no correct live replica is still behind."""
        return self.complete and not self.behind

    @property
    def behind(self) -> list[str]:
        """Live replicas that do not hold the last version. A Byzantine one is not waited for: it may be out of the
        run."""
        return sorted(
            name
            for name, replica in self.replicas.items()
            if replica.alive and not replica.finished and name not in self.liars
        )

    @property
    def wronged(self) -> list[str]:
        """Correct peers that correct replicas have banned."""
        return sorted(self.convictions.keys() - self.liars.keys())

    def not_up(self, ranks: Callable[[str], int]) -> list[str]:
        """The live replicas that have not started yet. ranks: how many one has, by its name."""
        return sorted(
            name
            for name, replica in self.replicas.items()
            if replica.alive
            and not replica.finished
            and (not self.dht.get(name) or (ranks(name) > 1 and (not replica.mesh or replica.ranks_lost)))
        )

    def bootstrap(self, *, but: str = "", most: int = 4) -> tuple[str, ...]:
        """DHT addresses of up to `most` live peers other than `but`."""
        live = [self.dht.get(name) for name in sorted(self.replicas) if name != but]
        return tuple(addresses[0] for addresses in live if addresses)[:most]

    def tokens_per_second(self) -> float:
        """Over the whole training: from when every stage had a replica to the newest commit of the last stage."""
        points = self.points[self.earlier_points :]
        if not points or self.training_at is None:
            return 0.0
        # What was done before a resume was done by other processes, at another pace.
        elapsed = points[-1].time - (self.training_at - self.started_at)
        return sum(point.tokens for point in points) / elapsed if elapsed > 0 else 0.0

    @property
    def _recent(self) -> list[StepPoint]:
        """The last steps since the start, and the one before them."""
        return self.points[self.earlier_points :][-PACE_STEPS - 1 :]

    def recent_tokens_per_second(self) -> float:
        """Over the last steps; over all of them while there is one."""
        return tokens_per_second(self._recent) or self.tokens_per_second()

    def eta_s(self) -> float | None:
        """Seconds to the last step at the recent pace; None while there is no pace."""
        seconds = step_s(self._recent)
        return None if seconds is None else (self.steps - len(self.points)) * seconds

    @property
    def starting(self) -> str:
        """What goes on before the first step, in words; "" from then on."""
        if len(self.points) > self.earlier_points:
            return ""
        replicas, total = len(self.replicas), len(self.replicas) + len(self.trainers)
        if not self.starts:
            return f"importing torch and hivemind, once for {total} processes"
        up = len(self.dht.keys() & self.replicas.keys())
        if up < replicas:
            return f"starting replicas, {up} of {replicas} are up"
        synced = sum(len(self.synced(stage)) for stage in range(self.stages))
        if synced < replicas:
            return f"{replicas} replicas are up, {synced} of them hold their weights"
        # Trainers are started once all replicas are there.
        if len(self.dht) < total:
            return f"{replicas} replicas hold their weights, starting the trainer"
        return f"{total} processes are up, the first step is under way"

    def again(self) -> str:
        """In words, when a resumed run has begun to train: what was there, and what is done again."""
        version = min(max(self.synced(stage), default=0) for stage in range(self.stages))
        done = self.earlier_points
        if version >= done:
            return f"goes on from version {version}" + (f"; the {done} steps before it are done" if done else "")
        steps = f"step {version} is" if done - version == 1 else f"steps {version} to {done - 1} are"
        return f"goes on from version {version}: of the {done} steps done before, {steps} done again"

    def state_of(self, name: str) -> str:
        """A replica in a word: the version it holds, or what it is doing instead."""
        replica = self.replicas[name]
        if name in self.out:
            return "convicted"
        if not replica.alive:
            return "down" if self.starts[name] else "to come"
        if replica.ranks_lost:
            return "ranks restart"
        if replica.version is not None:
            return f"{replica.version}"
        return "joining" if name in self.dht else "starting"

    def waiting_for(self) -> str:
        """In words: what would have to happen next."""
        empty = [stage for stage in range(self.stages) if not self.alive(stage)]
        if empty:
            return f"no replica of stage {', '.join(map(str, empty))} runs"
        unsynced = [stage for stage in range(self.stages) if not self.synced(stage)]
        if unsynced:
            return f"stage {', '.join(map(str, unsynced))} has no synced replica"
        newest = {stage: max(self.synced(stage)) for stage in range(self.stages)}
        if all(version >= self.steps for version in newest.values()):
            return f"final snapshots of {', '.join(self.behind)}" if self.behind else "the trainers to end"
        slowest = min(newest.values())
        stages = sorted(stage for stage, version in newest.items() if version == slowest)
        return f"stage {', '.join(map(str, stages))} to apply step {slowest}"
