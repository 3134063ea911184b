"""Decide which replica is killed when, and when it comes back. Pure: events and `now` in, actions out.

A kill ordered for a step fires in the middle of it: after the stage has shown that version, a random fraction of a
usual step later. It never takes a stage's last synced replica: at least one other must be synced and hold the stage's
newest version; until then the kill is postponed, and said once. Whoever dies comes back after `restart_s`.
Knows no processes: the supervisor kills, starts, and tells what happened.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarmnet.local.options import KillOrder

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class At:
    """Replica `name` is synced and holds `version` of its stage."""

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Gone:
    """The process of `name` was killed, whoever did it. back: it is to be started again."""

    name: str
    back: bool = True


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL `name` now. `step`: the version its stage was at."""

    name: str
    stage: int
    step: int
    order: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Start `name` again in its old directory."""

    name: str


@dataclass(frozen=True, slots=True)
class Postponed:
    """This kill has to wait; it fires as soon as it may."""

    order: str
    stage: int
    reason: str


@dataclass(slots=True)
class _Order:
    label: str
    stage: int
    step: int
    fire_at: float | None = None
    reported: bool = False


@dataclass(slots=True)
class _Replica:
    stage: int
    version: int | None = None          # None: not synced, or dead


@dataclass(slots=True)
class _Stage:
    seen: int = -1                      # newest version any replica ever showed
    since: float = 0.0
    step_s: float = field(default=0.0)  # how long the last whole step took


class Churn:
    """One swarm's deaths and returns."""

    def __init__(self, kills: Sequence[KillOrder], *, replicas: Mapping[str, int], steps: int,
                 rng: random.Random, every_s: float | None = None, restart_s: float = 1.0) -> None:
        self._orders = [_Order(str(kill), kill.stage, kill.step) for kill in sorted(kills)]
        self._replicas = {name: _Replica(stage) for name, stage in sorted(replicas.items())}
        self._stages = {stage: _Stage() for stage in sorted(set(replicas.values()))}
        self._steps, self._rng, self._every_s, self._restart_s = steps, rng, every_s, restart_s
        self._next_timed: float | None = None
        self._num_timed = 0
        self._down: set[str] = set()                   # killed or dead, not yet started again
        self._returns: dict[str, float] = {}

    @property
    def pending(self) -> tuple[str, ...]:
        """Labels of ordered kills that have not happened (yet)."""
        return tuple(order.label for order in self._orders)

    def on(self, event: At | Gone | Tick, *, now: float) -> list[Kill | Restart | Postponed]:
        """Take one event in; what is to be done now."""
        match event:
            case At(name, version):
                self._at(name, version, now)
            case Gone(name, back):
                self._replicas[name].version = None
                self._down.add(name)
                if back:
                    self._returns.setdefault(name, now + self._restart_s)
        self._schedule_timed(now)
        return [*self._restarts(now), *self._kills(now)]

    def _at(self, name: str, version: int, now: float) -> None:
        replica = self._replicas[name]
        if name in self._down:                         # written before it died, read after
            return
        replica.version = max(version, -1 if replica.version is None else replica.version)
        stage = self._stages[replica.stage]
        if version > stage.seen:
            if version == stage.seen + 1 and stage.seen >= 0:
                stage.step_s = now - stage.since
            stage.seen, stage.since = version, now

    def _restarts(self, now: float) -> list[Restart]:
        due = sorted(name for name, at in self._returns.items() if now >= at)
        for name in due:
            del self._returns[name]
            self._down.discard(name)
        return [Restart(name) for name in due]

    def _schedule_timed(self, now: float) -> None:
        if self._every_s is None:
            return
        if self._next_timed is None:                   # the first one counts from when every stage has a replica
            if all(self._versions(stage) for stage in self._stages):
                self._next_timed = now + self._every_s
            return
        if now < self._next_timed:
            return
        self._next_timed = now + self._every_s
        if any(order.label.startswith("every") for order in self._orders):
            return                                     # the one before is still waiting: do not pile up
        self._num_timed += 1
        stage = self._rng.choice(sorted(self._stages))
        self._orders.append(_Order(f"every-{self._num_timed}", stage, max(self._stages[stage].seen, 0), fire_at=now))

    def _kills(self, now: float) -> list[Kill | Postponed]:
        actions: list[Kill | Postponed] = []
        for order in list(self._orders):
            stage = self._stages[order.stage]
            if stage.seen < order.step or stage.seen >= self._steps:
                continue
            if order.fire_at is None:
                order.fire_at = stage.since + self._rng.uniform(0.1, 0.6) * stage.step_s
            if stage.seen == order.step and now < order.fire_at:
                continue
            victims = self._victims(order.stage)
            if victims:
                name = self._rng.choice(victims)
                self._orders.remove(order)
                self._replicas[name].version = None
                self._down.add(name)
                actions.append(Kill(name, order.stage, stage.seen, order.label))
            elif not order.reported and (why := self._why_not(order)):
                order.reported = True
                actions.append(Postponed(order.label, order.stage, why))
        return actions

    def _versions(self, stage: int) -> dict[str, int]:
        return {name: replica.version for name, replica in self._replicas.items()
                if replica.stage == stage and replica.version is not None}

    def _victims(self, stage: int) -> list[str]:
        """Synced replicas of `stage` without which another one still holds its newest version."""
        versions = self._versions(stage)
        newest = self._stages[stage].seen
        return [name for name in versions
                if any(version >= newest for other, version in versions.items() if other != name)]

    def _why_not(self, order: _Order) -> str:
        versions = self._versions(order.stage)
        if len(versions) < 2:
            return f"{len(versions)} synced replica{'' if len(versions) == 1 else 's'} in stage {order.stage}"
        if self._stages[order.stage].seen > order.step:
            return f"only one replica of stage {order.stage} is at its newest version"
        return ""                                      # the others are a moment behind: not worth a word
