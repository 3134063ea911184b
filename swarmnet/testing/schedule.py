"""Decide what is done to whom and when, and who comes back. Pure: what has happened and `now` in, actions out.

What takes a replica away (kill, stop, drain) never takes a stage's last good one: another must be synced, hold the
stage's newest version and be undisturbed. Until then it is postponed, and said once. While a replica is stopped, cut
off or not yet a member, its stage may commit a step without it, and only the others have the sum: it counts as good
again when it has been through a whole step since.

Nothing is drawn here. Of the possible replicas a fault is done to the one with the fewest faults so far, the first by
name; of stages likewise. What is drawn from a seed is drawn before (`fault.expand`).

A fault in a phase is armed: replicas of its stage hold there and say so, and only then is decided. Knows no
processes: the supervisor kills, starts and tells what happened. Names are those of processes: "s1-r0".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swarmnet.telemetry.kinds import EventFold
from swarmnet.testing.fault import (
    TRANSFERS,
    DiskFull,
    Drain,
    Fault,
    Join,
    Kill,
    KillRank,
    OneWayCut,
    Partition,
    Slow,
    Stop,
    member_of,
)

ASK_S = 15.0
"""A replica held for a joiner is let go after this, whether the joiner has asked or not."""

WAIT_S = 10.0
"""Transfers of state are rare: who holds in one when it may not go yet stays there for so long."""

# ---------------------------------------------------------------- actions


class FaultAction(NamedTuple):
    """Do `fault` now."""

    fault: Fault
    step: int
    """The version that the stage is at."""
    name: str = ""
    """To whom, or who joins; "" for what is done to no single replica."""
    stage: int = -1
    rank: int = -1


class FaultEnded(NamedTuple):
    """A fault that lasts has ended: `name` goes on, or links are as before."""

    fault: Fault
    name: str = ""


class FaultPostponed(NamedTuple):
    """This has to wait; it is done as soon as it may."""

    fault: Fault
    reason: str


class HoldAction(NamedTuple):
    """`name` is to hold in the phase of `fault`, from its step on, and say so."""

    name: str
    id: str
    fault: Fault


class ReleaseAction(NamedTuple):
    """`name` goes on, or need not hold any more."""

    name: str
    id: str


class RestartAction(NamedTuple):
    """Start `name` again in its old directory."""

    name: str


Action = FaultAction | FaultEnded | FaultPostponed | HoldAction | ReleaseAction | RestartAction

# ---------------------------------------------------------------- what is remembered


@dataclass(slots=True)
class Order:
    """A fault that has not happened yet."""

    fault: Fault
    stage: int | None  # the stage of the steps and phases that count
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
    ranks: int = 0  # processes in addition to its own that can be killed
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


def _again_s(fault: Fault) -> float:
    return fault.every_s if isinstance(fault, Kill) else 0.0


class FaultSchedule(EventFold):
    """One swarm's troubles.

    Each method takes in one thing that has happened and returns what is to be done now.

    Args:
        faults: what is ordered.
        replicas: stage by name.
        steps: of the whole run.
        restart_s: who died by itself returns then.
        meshed: who has ranks that can be killed.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        *,
        replicas: Mapping[str, int],
        steps: int,
        restart_s: float = 1.0,
        meshed: Collection[str] = (),
    ) -> None:
        self._meshed = sorted({replicas[name] for name in meshed})
        self._struck: Counter[str] = Counter()
        self._ordered: Counter[int] = Counter()  # of each stage, where the order names none
        self._replicas = {name: ReplicaStanding(stage) for name, stage in sorted(replicas.items())}
        self._stages = {stage: Stage() for stage in sorted(set(replicas.values()))}
        self._orders = [Order(fault, self._stage_for(fault)) for fault in faults]
        self._steps, self._restart_s = steps, restart_s
        self._training_at: float | None = None
        self._num_holds = 0
        self._returns: dict[str, float] = {}
        self._back_s: dict[str, float | None] = {}  # what was ordered for those that are about to go
        self._lasting: list[Lasting] = []
        self._complete = False

    @property
    def pending(self) -> tuple[str, ...]:
        """Labels of what was ordered and has not happened (yet). A repeated fault counts once it was postponed."""
        return tuple(str(order.fault) for order in self._orders if order.reported or not _again_s(order.fault))

    # ---------------------------------------------------------------- what happens

    def tick(self, *, now: float) -> list[Action]:
        """Time has passed."""
        return self._next([], now)

    def on(self, name: str, event: Mapping[str, Any], *, now: float) -> list[Action]:
        """One event of the process `name`."""
        if name not in self._replicas:
            return []  # a trainer's
        actions = self.take(event["event"], name, event, now)
        return [] if actions is None else self._next(actions, now)

    def on_applied(self, name: str, event: Mapping[str, Any], now: float) -> list[Action]:
        self._holds_version(name, event["version"], now, took=event.get("how") == "snapshot")
        return []

    on_synced = on_applied

    def on_reached(self, name: str, event: Mapping[str, Any], now: float) -> list[Action]:
        return self._reached(event["hold"], name, now)

    def on_asking(self, name: str, event: Mapping[str, Any], now: float) -> list[Action]:
        # For the first time since it was started.
        return self._end([lasting for lasting in self._lasting if lasting.joiner == name])

    def on_mesh_started(self, name: str, event: Mapping[str, Any], now: float) -> list[Action]:
        self._replicas[name].ranks = len(event["pids"])
        return []

    def on_rank_lost(self, name: str, event: Mapping[str, Any], now: float) -> list[Action]:
        self._replicas[name].ranks = 0  # it restarts them
        return []

    def _holds_version(self, name: str, version: int, now: float, *, took: bool) -> None:
        """`name` holds `version` of its stage. took: it has just taken its state from others."""
        replica = self._replicas[name]
        if not replica.up:
            return  # it was written before it died, and read after
        replica.version = version
        stage = self._stages[replica.stage]
        if replica.stopped or self._cut_off(name):
            replica.good_at = max(stage.seen, version) + 2
        elif took:
            replica.good_at = version + 1
        if version > stage.seen:
            if version == stage.seen + 1 and stage.seen >= 0:
                stage.step_s = now - stage.since
            stage.seen, stage.since = version, now

    def started(self, name: str, *, now: float) -> list[Action]:
        """The process of `name` was started (again)."""
        self._replicas[name] = ReplicaStanding(self._replicas[name].stage)
        # It may take state at once: what waits for a transfer waits for its transfers, too.
        holds: list[Action] = [
            self._hold(order, name)
            for order in self._orders
            if order.holds and order.fault.phase in TRANSFERS and name in self._whom(order)
        ]
        return self._next(holds, now)

    def moved(self, name: str, stage: int) -> None:
        """`name` serves another stage from now on."""
        if self._replicas[name].stage != stage:
            self._replicas[name] = ReplicaStanding(stage)

    def gone(self, name: str, *, now: float, back: bool = True) -> list[Action]:
        """The process of `name` has ended, for any reason. back: start it again, unless its fault forbids that."""
        replica = self._replicas[name]
        replica.version, replica.up, replica.stopped = None, False, False
        after = self._back_s.pop(name, self._restart_s)
        if back and after is not None:
            self._returns.setdefault(name, now + after)
        for order in self._orders:
            order.holds.pop(name, None)
            order.waits.pop(name, None)
        # What is done to its disk outlives the process.
        mine = [each for each in self._lasting if name in (each.name, each.joiner)]
        actions = self._end([each for each in mine if not isinstance(each.fault, DiskFull)])
        # The dead need not be told to go on.
        return self._next([act for act in actions if not (isinstance(act, ReleaseAction) and act.name == name)], now)

    def complete(self, *, now: float) -> list[Action]:
        """The run's last step is done: no fault is done any more, and every lasting one ends."""
        self._complete = True
        released = [ReleaseAction(name, hold) for order in self._orders for name, hold in order.holds.items()]
        return self._next([*released, *self._end(list(self._lasting))], now)

    def _next(self, actions: Iterable[Action], now: float) -> list[Action]:
        """`actions`, and whatever else is due."""
        found = list(actions)
        if self._training_at is None and all(self._versions(stage) for stage in self._stages):
            self._training_at = now
        found += self._end([lasting for lasting in self._lasting if now >= lasting.until])
        for name in sorted(name for name, at in self._returns.items() if now >= at):
            del self._returns[name]
            found.append(RestartAction(name))
        if not self._complete:
            for order in list(self._orders):
                found += self._try(order, now)
        return found

    # ---------------------------------------------------------------- what is known

    def _stage_for(self, fault: Fault) -> int | None:
        """The stage of the steps and phases that count."""
        if fault.place is not None:
            return fault.place
        if fault.phase is None and not fault.strikes_one:
            return None
        # Where no replica has ranks, it is postponed.
        meshed = self._meshed if isinstance(fault, KillRank) else []
        stage = min(meshed or self._stages, key=self._ordered.__getitem__)
        self._ordered[stage] += 1
        return stage

    def _versions(self, stage: int) -> list[int]:
        """Of the replicas that hold the stage's weights."""
        held = (replica.version for replica in self._replicas.values() if replica.stage == stage)
        return [version for version in held if version is not None]

    def _others(self, name: str) -> list[str]:
        """The other replicas of its stage."""
        stage = self._replicas[name].stage
        return [other for other, replica in self._replicas.items() if replica.stage == stage and other != name]

    def _cut_off(self, name: str) -> bool:
        return any(self._touches(lasting.fault, name) for lasting in self._lasting)

    def _touches(self, fault: Fault, name: str) -> bool:
        """Is `name` slowed down by this, or cut off from a replica of its own stage?"""
        if (mine := member_of(fault.groups, name)) is None:
            return False
        apart = (member_of(fault.groups, other) not in (None, mine) for other in self._others(name))
        return isinstance(fault, Slow) or any(apart)

    def _good(self, name: str) -> bool:
        """Synced at its stage's newest version, and nothing is being done to it."""
        replica = self._replicas[name]
        return (
            replica.up
            and replica.version is not None
            and replica.version >= self._stages[replica.stage].seen
            and replica.version >= replica.good_at
            and not (replica.stopped or replica.draining or self._cut_off(name))
        )

    def _may(self, fault: Fault, name: str) -> bool:
        """May this be done to `name`? What takes it away needs it up and undisturbed, and another of its stage good."""
        replica = self._replicas[name]
        if not fault.takes_away:
            able = not isinstance(fault, KillRank) or (replica.ranks > 0 and not replica.stopped)
            return able and replica.version is not None
        return self._free(name) and any(self._good(other) for other in self._others(name))

    def _free(self, name: str) -> bool:
        """Synced, and nothing is being done to it."""
        replica = self._replicas[name]
        return replica.up and replica.version is not None and not (replica.stopped or replica.draining)

    # ---------------------------------------------------------------- when

    def _seen(self, order: Order) -> Stage:
        if order.stage is not None:
            return self._stages[order.stage]
        return max(self._stages.values(), key=lambda stage: stage.seen)

    def _due(self, order: Order, now: float) -> bool:
        """Is it time? A fault in a phase is armed a step ahead."""
        fault, stage = order.fault, self._seen(order)
        if stage.seen >= self._steps:
            return False
        if fault.at_s is not None:
            return self._training_at is not None and now >= self._training_at + fault.at_s
        assert fault.step is not None
        if fault.phase is not None:
            # The order has to reach the replica before the step does.
            return stage.seen >= max(fault.step - 1, 0)
        if stage.seen < fault.step:
            return False
        if order.fire_at is None:
            # By how long the last step took.
            order.fire_at = stage.since + fault.into_step * stage.step_s
        return stage.seen > fault.step or now >= order.fire_at

    def _try(self, order: Order, now: float) -> list[Action]:
        for name, until in order.waits.items():
            if self._strikes(order, name) or now >= until:
                del order.waits[name]
                return self._reached(order.holds[name], name, now, last=True)
        if order.holds or not self._due(order, now):
            return []
        if order.fault.phase is not None:
            return self._arm(order)
        if not order.fault.strikes_one:
            return self._carry_out(order, "", now)
        victims = [name for name in self._whom(order) if self._may(order.fault, name)]
        if not victims:
            return self._postponed(order)
        return self._carry_out(order, min(victims, key=self._struck.__getitem__), now)

    def _whom(self, order: Order) -> list[str]:
        peer = order.fault.peer
        return [
            name for name, it in self._replicas.items() if (it.stage == order.stage if peer is None else name == peer)
        ]

    def _postponed(self, order: Order) -> list[Action]:
        why = "" if order.reported else self._why_not(order)
        order.reported = order.reported or bool(why)
        return [FaultPostponed(order.fault, why)] if why else []

    def _why_not(self, order: Order) -> str:
        assert order.stage is not None
        missed = order.fault.step is not None and self._stages[order.stage].seen > order.fault.step
        if isinstance(order.fault, KillRank):
            return f"no replica of stage {order.stage} has its ranks up" if missed else ""
        versions = self._versions(order.stage)
        if len(versions) < 2:
            return f"{len(versions)} synced replica{'' if len(versions) == 1 else 's'} in stage {order.stage}"
        if missed and order.fault.peer is not None and not any(map(self._free, self._whom(order))):
            return f"{order.fault.peer} is away, or something is being done to it"
        if missed:
            return f"only one replica of stage {order.stage} is at its newest version and undisturbed"
        return ""  # the others are a moment behind: not worth a word

    # ---------------------------------------------------------------- in a phase

    def _arm(self, order: Order) -> list[Action]:
        """Let all of the stage hold in the phase: the fault is done to the first that reaches it."""
        transfer = order.fault.phase in TRANSFERS
        up = [name for name in self._whom(order) if self._replicas[name].up]
        whom = [name for name in up if transfer or self._may(order.fault, name)]
        return [self._hold(order, name) for name in whom] or self._postponed(order)

    def _hold(self, order: Order, name: str) -> HoldAction:
        self._num_holds += 1
        order.holds[name] = f"{order.fault} ({self._num_holds})"
        return HoldAction(name, order.holds[name], order.fault)

    def _strikes(self, order: Order, name: str) -> bool:
        """May this be done to `name`, which holds?"""
        fault = order.fault
        # A joiner that has no state yet is no stage's last replica.
        joiner = fault.takes_away and fault.phase == "fetch" and self._replicas[name].version is None
        return joiner or not fault.strikes_one or self._may(fault, name)

    def _reached(self, hold: str, name: str, now: float, *, last: bool = False) -> list[Action]:
        order = next((order for order in self._orders if order.holds.get(name) == hold), None)
        if order is None or self._complete:
            # The order was carried out on another replica, or died with the one that had it.
            return [ReleaseAction(name, hold)]
        if not self._strikes(order, name):
            if order.fault.phase in TRANSFERS and not last:
                order.waits[name] = now + WAIT_S
                return self._postponed(order)
            del order.holds[name]
            return [ReleaseAction(name, hold), *self._postponed(order)]
        others = [ReleaseAction(other, held) for other, held in order.holds.items() if other != name]
        return [*self._carry_out(order, name, now, hold=hold), *others]

    # ---------------------------------------------------------------- what

    def _carry_out(self, order: Order, name: str, now: float, *, hold: str = "") -> list[Action]:
        """Do it: to `name`, or while `name` holds, or to no single replica."""
        fault, replica = order.fault, self._replicas.get(name)
        act = FaultAction(fault, self._seen(order).seen)
        if replica is not None and fault.strikes_one:
            act = act._replace(name=name, stage=replica.stage)
        self._orders.remove(order)
        self._struck[name] += 1
        if (again_s := _again_s(fault)) and self._training_at is not None:
            # Ordered when this one is done, so that those that have to wait do not pile up.
            again = fault.model_copy(update={"step": None, "at_s": now - self._training_at + again_s})
            self._orders.append(Order(again, self._stage_for(again)))
        match fault:
            case Kill() if replica is not None:
                replica.version, replica.up = None, False
                self._back_s[name] = fault.back_s if fault.back else None
                hold = ""  # the dead are not told to go on
            case Drain() if replica is not None:
                replica.draining = True
                self._back_s[name] = fault.back_s
            case KillRank() if replica is not None:
                act, replica.ranks = act._replace(rank=self._struck[name] % replica.ranks), 0
            case Stop() if replica is not None:
                replica.stopped = True
                self._lasting.append(Lasting(now + fault.for_s, fault, name, hold))
                hold = ""  # it holds until it goes on
            case Join():
                joiner = self._newcomer(fault.place)
                act = act._replace(name=joiner, stage=self._replicas[joiner].stage)
                if hold:  # until the joiner has asked
                    self._lasting.append(Lasting(now + ASK_S, fault, name, hold, joiner))
                    hold = ""
            case Partition() | OneWayCut() | Slow() | DiskFull():
                self._lasting.append(Lasting(now + fault.for_s, fault, act.name))
        return [act, ReleaseAction(name, hold)] if hold else [act]

    def _newcomer(self, stage: int | None) -> str:
        """A new name in `stage`, or in the stage with the fewest live replicas."""
        if stage is None:
            alive = Counter(each.stage for each in self._replicas.values() if each.up and not each.draining)
            stage = min(self._stages, key=lambda number: (alive[number], number))
        number = sum(replica.stage == stage for replica in self._replicas.values())
        while (name := f"s{stage}-r{number}") in self._replicas:
            number += 1
        self._replicas[name] = ReplicaStanding(stage)
        return name

    # ---------------------------------------------------------------- ends

    def _end(self, over: list[Lasting]) -> list[Action]:
        """These have lasted long enough: who is stopped goes on, links are as before, the joiner is not waited for."""
        actions: list[Action] = []
        for lasting in over:
            self._lasting.remove(lasting)
            if isinstance(lasting.fault, Stop):
                self._replicas[lasting.name].stopped = False
                self._disturbed(lasting.name)
            for name in self._replicas:
                if self._touches(lasting.fault, name):
                    self._disturbed(name)
            if not isinstance(lasting.fault, Join):
                actions.append(FaultEnded(lasting.fault, lasting.name))
            if lasting.hold:
                actions.append(ReleaseAction(lasting.name, lasting.hold))
        return actions

    def _disturbed(self, name: str) -> None:
        """It was away until now: the step that its stage is in, and the next one, may be committed without it."""
        replica = self._replicas[name]
        replica.good_at = self._stages[replica.stage].seen + 2
