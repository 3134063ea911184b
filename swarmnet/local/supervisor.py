"""Run a swarm of real processes to its end: start children, read their events, carry out faults, judge, report.

The loop is synchronous and single-threaded: it looks at every child a few dozen times a second. It learns about the
swarm from the children's event files and exit codes alone; it never speaks the protocol.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnet.config.peer import PeerConfig
from swarmnet.local.audit import Audit
from swarmnet.local.fault import Drain, Join, Kill, KillAll, KillRank, Stop
from swarmnet.local.faults import (
    Action,
    FaultAction,
    FaultEnded,
    FaultPostponed,
    Faults,
    HoldAction,
    ReleaseAction,
    RestartAction,
)
from swarmnet.local.meshes import Meshes, mesh_of
from swarmnet.local.news import News
from swarmnet.local.orders import FaultOrders
from swarmnet.local.processes import Child, ChildCommand, ChildSpec, Interrupt, stop
from swarmnet.local.progress import ReplicaView, SwarmProgress
from swarmnet.local.report import MergedLog
from swarmnet.local.screen import SwarmScreen
from swarmnet.ranks.starter import ForkerLost, Starter
from swarmnet.telemetry.events import EventReader


@dataclass(frozen=True, slots=True)
class Timing:
    """Patience, in seconds."""

    poll_s: float = 0.02
    restart_s: float = 1.0  # a killed child stays away this long
    stalled_s: float = 60.0  # without progress: say what is missing
    give_up_s: float = 600.0  # without progress: stop
    settle_s: float = 30.0  # after the last step, once all processes are up: for replicas that are behind, and trainers
    grace_s: float = 10.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True, slots=True)
class SwarmLayout:
    """Who runs where."""

    out: Path
    config: PeerConfig
    """What all children are told alike."""
    replicas: dict[str, int]
    """Stage by name; the names, and those of trainers, are directories below `out`/peers."""
    trainers: tuple[str, ...]
    meshes: Meshes
    """Whose replicas have several ranks."""
    chaos: bool
    """Faults in phases and on links: children follow orders."""
    trace: bool
    """They say what they work on, too."""
    life: int
    """How often this run has been resumed."""


class Supervisor:
    """One swarm. `run` once."""

    def __init__(
        self,
        layout: SwarmLayout,
        *,
        progress: SwarmProgress,
        audit: Audit,
        faults: Faults,
        starter: Starter,
        command: ChildCommand,
        screen: SwarmScreen,
        log: MergedLog,
        interrupt: Interrupt,
        timing: Timing,
    ) -> None:
        self.layout, self.progress, self.audit, self.faults = layout, progress, audit, faults
        self.starter, self.command = starter, command
        self.screen, self.log, self.interrupt, self.timing = screen, log, interrupt, timing
        self.crashes: list[str] = []
        self.killed_all: int | None = None  # at which step all processes were killed, by order
        self._stages = dict(layout.replicas)  # those that joined, too
        self._orders = FaultOrders(trace=layout.trace)
        self._ranks: dict[str, tuple[int, ...]] = {}  # process ids, of the replicas whose ranks are up
        self._leaving: set[str] = set()  # told to drain
        self._children: dict[str, Child] = {}
        self._readers: dict[str, EventReader] = {}  # outlive their children
        self._waiting: list[str] = []  # not started yet
        self._back_at: dict[str, float] = {}  # trainers killed from outside
        self._starts: dict[str, int] = {}
        self._killed: set[str] = set()  # by us, not reaped yet
        self._away: dict[str, float] = {}  # killed replicas that have not synced again: since when
        self._complete_at: float | None = None
        self._all_up_at = 0.0  # when it is complete: when a replica was seen last that had not started yet
        self._ending = False  # events are still read, nothing is done about them
        self._warned_at = float("-inf")
        self._problem = ""
        self._news = News()
        self._resumes = layout.life > 0  # until it is said from which version

    def run(self) -> str:
        """Until every step is done, nothing can go on, or someone interrupts. Returns the problem, "" if none.

        All children are gone on return, and every event they wrote has been read.
        """
        now = time.monotonic()
        self.progress.started_at, self.progress.moved_at = now - self.progress.earlier_s, now
        self._waiting = [*self.layout.replicas, *self.layout.trainers]
        try:
            while not self._over(now):
                time.sleep(self.timing.poll_s)
                now = time.monotonic()
                self._turn(now)
        except ForkerLost as error:
            self._problem = str(error)
        finally:
            self._ending = True
            # Who is stopped would not hear the SIGTERM.
            for child in self._children.values():
                child.send(signal.SIGCONT)
            forced = stop(self._children.values(), grace_s=self.timing.grace_s, hurry=lambda: self.interrupt.again)
            # What they wrote at their end counts: final weights, commits.
            for name in list(self._children):
                self._read(name, now=time.monotonic())
        if forced and not self._problem and not self.interrupt.count:
            self.screen.note(f"{', '.join(forced)} did not stop within {self.timing.grace_s:g} s and had to be killed")
        self.screen.update(self.progress, now=time.monotonic())
        return self._problem

    def _turn(self, now: float) -> None:
        for name in list(self._children):
            self._read(name, now=now)
            self._reap(name, now=now)  # after its last words
        self._perform(self.faults.tick(now=now), now=now)
        for name in [name for name, at in self._back_at.items() if now >= at]:
            del self._back_at[name]
            self._start(name, now=now)
        if self._waiting and self.starter.ready():
            self._start_waiting(now)
        self._say(self._news.tick(now=now))
        self.screen.update(self.progress, now=now)
        self._watch(now)

    def _over(self, now: float) -> bool:
        if self.interrupt.count or self._problem or self.killed_all is not None:
            return True
        if not self.progress.complete:
            return False
        if self._complete_at is None:
            self._complete_at = self._all_up_at = now
            self._perform(self.faults.complete(now=now), now=now)
        trainers = any(name in self._children for name in self.layout.trainers)
        # A replica killed in the last moments comes back and takes the final weights like any other.
        settled = self.progress.all_finished and not trainers and not self._away
        # A mesh may need minutes to start: it is no sign that its replica hangs.
        if self.progress.not_up(self._num_ranks) and now - self._complete_at < self.timing.give_up_s:
            self._all_up_at = now
        return settled or now - self._all_up_at > self.timing.settle_s

    def _num_ranks(self, name: str) -> int:
        return mesh_of(self.layout.meshes, name).ranks

    # ---------------------------------------------------------------- children

    def _start_waiting(self, now: float) -> None:
        """The first replica alone, as there must be a DHT node to join; all others as soon as it has an address."""
        if not self._starts:
            self._start(self._waiting.pop(0), now=now)
        elif self.progress.bootstrap():
            while self._waiting and not self.interrupt.count:  # of many processes the last is started late
                self._start(self._waiting.pop(0), now=now)

    def _start(self, name: str, *, now: float) -> None:
        number = self._starts[name] = self._starts.get(name, 0) + 1
        directory, stage = self.layout.out / "peers" / name, self._stages.get(name)
        config = self.layout.config.model_copy(
            update={
                "roles": ("trainer",) if stage is None else ("stage",),
                "stages": () if stage is None else (stage,),
                "dir": directory,
                "events": directory / "events.jsonl",
                "bootstrap": self.progress.bootstrap(but=name),
                "mesh": mesh_of(self.layout.meshes, name),
            }
        )
        spec = ChildSpec(name, config, directory / "orders" / f"{time.time_ns()}.jsonl" if self.layout.chaos else None)
        if spec.orders is not None:
            self._orders.open(name, spec.orders)
        if (reader := self._readers.get(name)) is None:
            reader = self._readers[name] = EventReader(spec.events)
            reader.read()  # of a run that goes on: said before, and replayed by `earlier`
        child = self._children[name] = Child(spec, self.command, reader, self.starter)
        self.progress.started(name, now=now)
        self.log.ours("started", child=name, pid=child.pid, start=number)
        if name in self._stages:
            self._perform(self.faults.started(name, now=now), now=now)

    def _read(self, name: str, *, now: float) -> None:
        for event in self._children[name].read():
            self.log.child(name, event)
            if event["event"] == "dropped" and not self.audit.anew(event["to"], life=self.layout.life):
                continue  # another replica has said so
            self.progress.on(name, event, now=now)
            self.audit.on(event, life=self.layout.life)
            self._say(self._news.on(name, event, now=now))
            if event["event"] == "halted":
                self._problem = event["reason"]
            if not self._ending:
                self._perform(self._decide(name, event, now), now=now)
        if self._resumes and self.progress.training_at is not None:
            self._resumes = False
            self._say([self.progress.again()])

    def _decide(self, name: str, event: Mapping[str, Any], now: float) -> list[Action]:
        """What an event of `name` means for the faults."""
        match event["event"]:
            case "synced" if name in self._stages:
                version, how = event["version"], event["how"]
                if name in self._away and name not in self._killed:
                    away = f"{now - self._away.pop(name):.1f} s after it was killed"
                    self.screen.note(f"{name} is back at version {version} by {how}, {away}")
                return self.faults.at(name, version, took=how == "snapshot", now=now)
            case "applied" if name in self._stages:
                return self.faults.at(name, event["version"], now=now)
            case "listening":
                self._orders.listening(name, event["peer"])
            case "reached":
                return self.faults.holds(name, event["hold"], now=now)
            case "mesh_started":
                self._ranks[name] = tuple(event["pids"])
                return self.faults.ranks(name, len(event["pids"]), now=now)
            case "rank_lost":
                self._ranks.pop(name, None)
                return self.faults.ranks(name, 0, now=now)
            case "asking":
                return self.faults.asked(name, now=now)
        return []

    def _say(self, lines: list[str]) -> None:
        for line in lines:
            self.screen.note(line)

    def _reap(self, name: str, *, now: float) -> None:
        child = self._children[name]
        if (code := child.returncode()) is None:
            return
        self._read(name, now=now)  # it may have written between the last look and its end
        if self.progress.training_at is None:
            for other in list(self._children):  # whether it ended before training began, those say that are with it
                self._read(other, now=now)
        del self._children[name]
        self._orders.close(name)
        self._ranks.pop(name, None)
        self.progress.ended(name)
        self._say(self._news.gone(name, back=self._returns(name, code)))
        if name in self._leaving and code == 0:
            self._leaving.discard(name)
            self.screen.note(f"{name} has left")
            self.log.ours("left", child=name)
            self._perform(self.faults.gone(name, now=now), now=now)
            return
        if (done := self._complete_at is not None) and code == 0:
            return
        if name in self.layout.trainers and code == 0:
            return  # a trainer ends when all steps are done
        ours = name in self._killed
        self._killed.discard(name)
        if code == -signal.SIGKILL:
            # Somebody by hand, or the kernel for want of memory: it comes back all the same.
            if not ours:
                if name in self._stages:
                    self._away[name] = now
                self._note_kill(name, f"{name} was killed (from outside)", by="from outside", now=now)
            if name in self._stages:
                self._perform(self.faults.gone(name, now=now), now=now)
            else:
                self._back_at[name] = now + self.timing.restart_s
        else:
            self._crashed(child, code, done=done, now=now)

    def _returns(self, name: str, code: int) -> bool:
        """Will it be started again after this end? Killed from outside, or by an order that brings it back."""
        return code == -signal.SIGKILL and (name not in self._killed or name in self._away)

    def _crashed(self, child: Child, code: int, *, done: bool, now: float) -> None:
        name = child.spec.name
        if name in self._stages:
            self._perform(self.faults.gone(name, back=False, now=now), now=now)
        how = f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        self.crashes.append(f"{name} {how}")
        self.log.ours("crashed", child=name, code=code)
        lines = child.last_lines() or ["(it wrote nothing)"]
        self.screen.note("\n".join([f"{name} {how}; the end of {child.log}:", *(f"    {line}" for line in lines)]))
        stage = self._stages.get(name)
        if done:
            return
        # Before training a crash is most likely in the options, and waiting for others would hide it.
        if self.progress.training_at is None:
            self._problem = f"{name} {how} before training began, see {child.log}"
        elif stage is not None and not self.progress.alive(stage):
            self._problem = f"{name} {how}, it was the last replica of stage {stage}, see {child.log}"
        elif stage is None and not (self._children.keys() | self._back_at.keys()) & set(self.layout.trainers):
            self._problem = f"{name} {how}, no trainer is left, see {child.log}"

    # ---------------------------------------------------------------- faults

    def _perform(self, actions: list[Action], *, now: float) -> None:
        for action in actions:
            match action:
                case FaultAction(fault):
                    self._strike(action, now)
                    if fault.groups:
                        self._orders.rules(self.faults.rules)
                case FaultEnded(fault, name):
                    if fault.groups:
                        self._orders.rules(self.faults.rules)
                    elif name in self._children:  # else it was killed while it was stopped
                        self._children[name].send(signal.SIGCONT)
                        self.log.ours("continued", child=name, order=str(fault))
                    self.screen.note(f"{fault} is over")
                    self.log.ours("over", order=str(fault))
                case FaultPostponed(fault, reason):
                    self.progress.postponed.append(str(fault))
                    self.screen.note(f"{fault} is postponed: {reason}")
                    self.log.ours("postponed", order=str(fault), reason=reason)
                case HoldAction(name, id, fault):
                    step = -1 if fault.step is None else fault.step
                    self._orders.send(name, "hold", id=id, phase=fault.phase, step=step, moment=fault.moment)
                case ReleaseAction(name, id):
                    self._orders.send(name, "go_on", id=id)
                case RestartAction(name):
                    self._start(name, now=now)

    def _strike(self, action: FaultAction, now: float) -> None:
        """Do it, and say so: on the terminal, in events.jsonl, in the summary."""
        fault, name = action.fault, action.name
        told = fault.told.format(fault=fault, name=name, step=action.step, stage=action.stage, rank=action.rank)
        fields = {"order": str(fault)} | ({"child": name} if name else {})
        match fault:
            case Kill():
                self._killed.add(name)
                self._children[name].send(signal.SIGKILL)
                if fault.returns_s is not None:
                    self._away[name] = now
                self._note_kill(name, told, by=f"{fault}, step {action.step}", now=now)
                return
            case KillAll():
                self.killed_all = action.step
                self.screen.note(told)
                self.log.ours(fault.event, step=action.step)
                for child in self._children.values():
                    child.send(signal.SIGKILL)
                return
            case KillRank():
                # It may have ended by itself a moment ago.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._ranks[name][action.rank], signal.SIGKILL)
            case Stop():
                self._children[name].send(signal.SIGSTOP)
            case Drain():
                self._leaving.add(name)
                self._children[name].send(signal.SIGTERM)
            case Join():
                # Progress has to know it before its process is started.
                self._stages[name] = action.stage
                self.progress.replicas[name] = ReplicaView(action.stage)
        self.progress.faults[fault.kind] += 1
        self.screen.note(told)
        self.log.ours(fault.event, step=len(self.progress.points), **fields)
        if isinstance(fault, Join):
            self._start(name, now=now)

    def _note_kill(self, name: str, told: str, *, by: str, now: float) -> None:
        step = len(self.progress.points)
        self.progress.kills.append((name, step, now - self.progress.started_at))
        self.progress.faults[Kill.kind] += 1
        self.screen.note(told)
        self.log.ours(Kill.event, child=name, by=by, step=step)

    # ---------------------------------------------------------------- patience

    def _watch(self, now: float) -> None:
        still = now - self.progress.moved_at
        if still < self.timing.stalled_s or self._complete_at is not None:
            self._warned_at = float("-inf")
            return
        if still >= self.timing.give_up_s:
            self._problem = f"no progress for {still:.0f} s: {self._missing()}"
        elif now - self._warned_at >= self.timing.stalled_s:
            self._warned_at = now
            self.screen.note(f"no progress for {still:.0f} s: {self._missing()}")

    def _missing(self) -> str:
        what = (
            f"{next(iter(self.layout.replicas))} has not said where its DHT node listens"
            if self._waiting
            else f"waiting for {self.progress.waiting_for()}"
        )
        return f"{what}; logs are in {self.layout.out / 'peers'}/*/log.txt"
