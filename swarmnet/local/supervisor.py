"""Run a swarm of real processes to its end: start children, read their events, carry out faults.

The loop is synchronous and single-threaded: it looks at every child a few dozen times a second. It learns about the
swarm from the children's event files and exit codes alone; it never speaks the protocol.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from swarmnet.config.peer import Log, LogLevel, PeerConfig, listen_at
from swarmnet.host import OomKills
from swarmnet.local import earlier
from swarmnet.local.options import LocalOptions
from swarmnet.local.prepare import Meshes, Prepared, device_of, mesh_of, meshed, prepare
from swarmnet.local.progress import SwarmProgress
from swarmnet.local.screen import SwarmScreen
from swarmnet.net.admission_files import invitation_file
from swarmnet.ranks.launcher import Launcher, LauncherLost
from swarmnet.telemetry.events import LATER, EventLog
from swarmnet.telemetry.kinds import KINDS, EventFold
from swarmnet.telemetry.run_state import StageState
from swarmnet.testing.fault import Fault, Kill, KillAll, member_of
from swarmnet.testing.invariants import InvariantChecker
from swarmnet.testing.process_swarm import (
    Child,
    ChildCommand,
    ChildSpec,
    Interrupt,
    ProcessSwarm,
    child_launcher,
    reference_command,
    stop,
    swarmnet_command,
)
from swarmnet.testing.schedule import Action, FaultAction, FaultEnded, FaultPostponed, FaultSchedule
from swarmnet.testing.swarm import carry_out

TRACE = "trace.json"
"""Of each peer, in its directory."""

FULL_BYTES = 1 << 16
"""A disk with less free space is full."""


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
class Kit:
    """What tests replace."""

    child: ChildCommand = swarmnet_command
    reference: ChildCommand = reference_command
    launcher: Callable[[], Launcher] = child_launcher
    prepare: Callable[[LocalOptions, Path], Prepared] = prepare
    timing: Timing = field(default_factory=Timing)
    console: Console | None = None
    trace: bool = False
    """With chaos: children say what they work on."""
    strict: bool = False
    """Does a run in which a correct peer was suspended fail without `--verify`, too?"""


@dataclass(frozen=True, slots=True)
class LocalSwarm:
    """One swarm: what it consists of, and with what it is run."""

    options: LocalOptions
    kit: Kit
    out: Path
    console: Console
    prepared: Prepared
    replicas: dict[str, int]
    """Stage by name; the names, and those of trainers, are directories below `out`/peers."""
    trainers: tuple[str, ...]
    meshes: Meshes
    lives: Sequence[float] = ()
    """When it was begun and went on before this time, in unix seconds."""
    liars: Mapping[str, str] = field(default_factory=dict)
    """The Byzantine replicas, with their kinds, by name."""

    @property
    def exact(self) -> bool:
        """Is every loss to have the bits of one process's? Ranks that share a stage sum in another order than one, a
        GPU in another than the CPU."""
        on_cpu = all(device_of(mesh) == "cpu" for mesh in self.meshes.values())
        return self.prepared.exact and on_cpu and not meshed(self.meshes, self.replicas)

    @property
    def lossless(self) -> bool:
        """Does nothing on the way round what one process does not? On a small grid the rounding of ranks shows, too."""
        prepared = self.prepared
        return prepared.lossless and (self.exact or prepared.manifest.averaging.codec != "small")

    @property
    def config(self) -> PeerConfig:
        """What all children are told."""
        options, invitation = self.options, invitation_file(self.prepared.path)
        return PeerConfig(
            dir=self.out / "peers",  # each child has one of its own; the default would need a home
            manifest=self.prepared.path,
            host="127.0.0.1",
            invitation=str(invitation) if invitation.exists() else "",
            log=Log(level=cast(LogLevel, options.log_level)),
            slots=options.slots or 0,
        )

    def books(self) -> tuple[SwarmProgress, InvariantChecker]:
        """What is known of the run so far, to be told everything that happens."""
        manifest, training = self.prepared.manifest, self.prepared.manifest.training
        progress = SwarmProgress(
            steps=training.total_steps,
            trainers=frozenset(self.trainers),
            replicas={name: StageState(stage) for name, stage in self.replicas.items()},
            liars=self.liars,
        )
        checker = InvariantChecker(
            stages=manifest.cut.stages,
            steps=training.total_steps,
            microbatches=training.microbatches,
            exact=self.exact,
            equal=manifest.averaging.equal_bits,
            repeats=self.prepared.pure and self.lossless and not self.liars,
            names=progress.names,
            liars=self.liars,
        )
        if self.options.resume:
            earlier.replay(self.out, self.lives, progress, checker)
        return progress, checker


class Supervisor(EventFold):
    """Runs one `ProcessSwarm`. `run` once."""

    def __init__(
        self,
        swarm: LocalSwarm,
        faults: Sequence[Fault],
        *,
        launcher: Launcher,
        screen: SwarmScreen,
        interrupt: Interrupt,
    ) -> None:
        self.swarm, self.timing, self.launcher = swarm, swarm.kit.timing, launcher
        self.screen, self.interrupt = screen, interrupt
        self.progress, self.checker = swarm.books()
        self.faults = FaultSchedule(
            faults,
            replicas=swarm.replicas,
            steps=self.progress.steps,
            restart_s=self.timing.restart_s,
            meshed=meshed(swarm.meshes, swarm.replicas),
        )
        self.crashes: list[str] = []
        self.killed_all: int | None = None  # at which step all processes were killed, by order
        self._life = len(swarm.lives)
        # Every child's events in the order they were read, and our own.
        if not swarm.options.resume:
            (swarm.out / "events.jsonl").unlink(missing_ok=True)
        self._log = EventLog(swarm.out / "events.jsonl")
        self.processes = ProcessSwarm(launcher, swarm.kit.child, begin=self._begin, trace=swarm.kit.trace)
        self._dashboard: Child | None = None
        self._waiting: list[str] = []  # not started yet
        self._back_at: dict[str, float] = {}  # trainers killed from outside, and processes that found a full disk
        self._not_started: set[str] = set()  # of these, those with a full disk: it is said once
        self._oom_kills = OomKills.read()
        self._known_liars: set[str] = set()  # correct replicas have banned them
        self._away: dict[str, float] = {}  # killed replicas that have not synced again: since when
        self._complete_at: float | None = None
        self._all_up_at = 0.0  # when it is complete: when a replica was seen last that had not started yet
        self._ending = False  # events are still read, nothing is done about them
        self._warned_at = float("-inf")
        self._problem = ""
        self._resumes = self._life > 0  # until it is said from which version

    def run(self) -> str:
        """Until every step is done, nothing can go on, or someone interrupts. Returns the problem, "" if none.

        All children are gone on return, and every event they wrote has been read.
        """
        now = time.monotonic()
        self.progress.started_at, self.progress.moved_at = now - self.progress.earlier_s, now
        self._waiting = [*self.swarm.replicas, *self.swarm.trainers]
        with self._log:
            self._write(earlier.BEGAN, life=self._life, options=self.swarm.options.record())
            try:
                while not self._over(now):
                    time.sleep(self.timing.poll_s)
                    now = time.monotonic()
                    self._turn(now)
            except LauncherLost as error:
                self._problem = str(error)
            finally:
                self._end_all()
        return self._problem

    def _end_all(self) -> None:
        self._ending = True
        # Who is stopped would not hear the SIGTERM.
        for child in self.processes.children.values():
            child.send(signal.SIGCONT)
        if self._dashboard is not None:
            stop([self._dashboard], grace_s=self.timing.grace_s)
        forced = stop(self.processes.children.values(), grace_s=self.timing.grace_s, hurry=lambda: self.interrupt.again)
        # What they wrote at their end counts: final weights, commits.
        for name in list(self.processes.children):
            self._read(name, now=time.monotonic())
        if forced and not self._problem and not self.interrupt.count:
            self.screen.note(f"{', '.join(forced)} did not stop within {self.timing.grace_s:g} s and had to be killed")
        self.screen.update(self.progress, now=time.monotonic())

    def _turn(self, now: float) -> None:
        for name in list(self.processes.children):
            self._read(name, now=now)
            self._reap(name, now=now)  # after its last words
        self._perform(self.faults.tick(now=now), now=now)
        for name in [name for name, at in self._back_at.items() if now >= at]:
            del self._back_at[name]
            self._begin(name)
        if self._waiting and self.launcher.ready():
            self._start_waiting()
        self._look_at_dashboard()
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
        trainers = any(name in self.processes.children for name in self.swarm.trainers)
        # A replica killed in the last moments comes back and takes the final weights like any other.
        settled = self.progress.all_finished and not trainers and not self._away
        # A mesh may need minutes to start: it is no sign that its replica hangs.
        waits = self.progress.not_up(lambda name: mesh_of(self.swarm.meshes, name).ranks)
        if waits and now - self._complete_at < self.timing.give_up_s:
            self._all_up_at = now
        return settled or now - self._all_up_at > self.timing.settle_s

    def _write(self, event: str, **fields: Any) -> None:
        """One event of ours, such as a kill, in events.jsonl."""
        self._log.emit(event, name="local", **fields)

    # ---------------------------------------------------------------- children

    def _start_waiting(self) -> None:
        """The first replica alone, as there must be a DHT node to join; all others as soon as it has an address."""
        if not self.progress.starts:
            self._begin(self._waiting.pop(0))
        elif self.progress.bootstrap():
            while self._waiting and not self.interrupt.count:  # of many processes the last is started late
                # A Byzantine replica is banned by a majority, which a run that begins with some of its replicas does
                # not have.
                if self._waiting[0] in self.swarm.trainers and self.swarm.liars and self._replicas_start():
                    break
                self._begin(self._waiting.pop(0))

    def _replicas_start(self) -> bool:
        """Does one of them not hold its weights yet? One that a fault has stopped is not waited for."""
        return any(
            replica.alive and replica.version is None and name not in self.checker.faulted
            for name, replica in self.progress.replicas.items()
        )

    def _begin(self, name: str, stage: int | None = None) -> None:
        if stage is not None:
            self.progress.replicas[name] = StageState(stage)
        now = time.monotonic()
        directory, replica = self.swarm.out / "peers" / name, self.progress.replicas.get(name)
        config = self.swarm.config.model_copy(
            update={
                "roles": ("trainer",) if replica is None else ("stage",),
                "stages": () if replica is None else (replica.stage,),
                "dir": directory,
                "events": directory / "events.jsonl",
                "trace": directory / TRACE if self.swarm.options.trace and replica is not None else None,
                "bootstrap": self.progress.bootstrap(but=name),
                "mesh": (mesh := mesh_of(self.swarm.meshes, name)),
                "device": device_of(mesh),
            }
        )
        kind = self.swarm.liars.get(name)
        ordered = self.swarm.options.chaos is not None or kind is not None
        spec = ChildSpec(name, config, directory / "orders" / f"{time.time_ns()}.jsonl" if ordered else None)
        try:
            lie = None if kind is None else (kind, f"{self.swarm.prepared.run_id}/{name}")
            child = self.processes.launch(spec, lie=lie)
        except OSError as error:
            # Before training nothing is lost, and no process would be there to train.
            if error.errno not in LATER or self.progress.training_at is None:
                raise
            self._back_at[name] = now + self.timing.restart_s
            if name not in self._not_started:
                self._not_started.add(name)
                self.screen.note(
                    f"{name} cannot be started: {error.strerror}: {directory}; it is tried again and again"
                )
            return
        self._not_started.discard(name)
        self.progress.started(name, now=now)
        self._write("started", child=name, pid=child.pid, start=self.progress.starts[name])
        if replica is not None:
            self._perform(self.faults.started(name, now=now), now=now)

    def _read(self, name: str, *, now: float) -> None:
        for event in self.processes.children[name].read():
            self._log.copy({"name": name, **event})
            # The events of a Byzantine replica prove nothing: those of the others tell what is true of the run.
            if name not in self.swarm.liars and not self.checker.on(event, life=self._life, by=name):
                continue
            self.progress.on(name, event, now=now)
            self.screen.on(name, event)
            self._problem = self._problem or self.progress.halted
            if self._ending:
                continue
            self.take(event["event"], name, event, now)
            if "accuses" in KINDS[event["event"]].marks and name not in self.swarm.liars:
                self._named(event["peer"])
            self._perform(self.faults.on(name, event, now=now), now=now)
        if self._resumes and self.progress.training_at is not None:
            self._resumes = False
            self.screen.note(self.progress.again())

    def on_listening(self, name: str, event: Mapping[str, Any], now: float) -> None:
        self.processes.orders.listening(name, event["peer"])
        if self._dashboard is None and self.swarm.options.dashboard is not None:
            self._serve_dashboard(self.swarm.options.dashboard, event["links"][-1])

    def on_mesh_started(self, name: str, event: Mapping[str, Any], now: float) -> None:
        self.processes.ranks[name] = event["pids"]

    def on_synced(self, name: str, event: Mapping[str, Any], now: float) -> None:
        if name in self._away and name not in self.processes.killed:
            away = f"{now - self._away.pop(name):.1f} s after it was killed"
            self.screen.note(f"{name} is back at version {event['version']} by {event['how']}, {away}")

    def _serve_dashboard(self, where: str, link: str) -> None:
        """`swarmnet dashboard` next to the swarm, which does not depend on it."""
        host, port = listen_at(where)
        words = ("-m", "swarmnet", "dashboard", link, "--host", host, "--port", str(port))
        log = self.swarm.out / "dashboard.txt"
        log.unlink(missing_ok=True)
        self._dashboard, self._dashboard_told = Child("dashboard", words, log, self.launcher), False

    def _look_at_dashboard(self) -> None:
        """Say once where it is, or that it has ended."""
        if self._dashboard is None or self._dashboard_told:
            return
        ended = self._dashboard.returncode() is not None
        line, whole, _ = self._dashboard.log.read_text(encoding="utf-8", errors="replace").partition("\n")
        if whole or ended:
            self._dashboard_told = True
            self.screen.note(line if whole else "the dashboard has ended")

    def _named(self, peer: str) -> None:
        """A correct replica has banned this peer: printed for the first such event."""
        name = self.progress.names.get(peer, peer)
        if name not in self._known_liars and (found := self.progress.convictions.get(name)) is not None:
            self._known_liars.add(name)
            how = self.swarm.liars.get(name, "correct")
            self.screen.note(f"{name} ({how}) is banned: {found.reason}")

    def _reap(self, name: str, *, now: float) -> None:
        child = self.processes.children[name]
        if (code := child.returncode()) is None:
            return
        self._read(name, now=now)  # it may have written between the last look and its end
        # Whether it ended before training began, those say that are with it; and whether it ended as a banned peer.
        if self.progress.training_at is None or code == 2:
            for other in list(self.processes.children):
                self._read(other, now=now)
        self.processes.reaped(name)
        self.progress.ended(name)
        replica, ours, killed = name in self.progress.replicas, name in self.processes.killed, code == -signal.SIGKILL
        # A user, or the kernel for want of memory: it comes back all the same.
        by_others = killed and not ours
        self.screen.gone(name, self.progress.processes, back=by_others or (killed and name in self._away))
        self.processes.killed.discard(name)
        if left := code == 0 and name in self.processes.leaving:
            self.processes.leaving.discard(name)
            self.screen.note(f"{name} has left")
            self._write("left", child=name)
        elif code == 0 and (self._complete_at is not None or not replica):
            return  # a trainer ends when all steps are done
        elif code == 2 and name in self.progress.out:
            self.screen.note(f"{name} has ended: it is banned, and shut out")
            self._write("shut_out", child=name)
        elif by_others:
            if replica:
                self._away[name] = now
            kills = OomKills.read()
            why, self._oom_kills = kills.since(self._oom_kills) or "killed (from outside)", kills
            self._note_fault(Kill, name, f"{name} was {why}", by="from outside", now=now)
        elif not killed:
            self._crashed(child, code)
        if replica:
            self._perform(self.faults.gone(name, back=left or killed, now=now), now=now)
        elif killed:
            self._back_at[name] = now + self.timing.restart_s

    def _crashed(self, child: Child, code: int) -> None:
        name = child.name
        self.checker.faulted.add(name)
        how = f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        # Who is thrown out of the run may end as it likes.
        if name not in self.progress.convictions:
            self.crashes.append(f"{name} {how}")
        self._write("crashed", child=name, exit_code=code)
        lines = child.last_lines() or ["(it wrote nothing)"]
        self.screen.note("\n".join([f"{name} {how}; the end of {child.log}:", *(f"    {line}" for line in lines)]))
        replica = self.progress.replicas.get(name)
        if self._complete_at is not None:
            return
        # Before training a crash is most likely in the options, and waiting for others would hide it.
        if self.progress.training_at is None:
            self._problem = f"{name} {how} before training began, see {child.log}"
        elif replica is not None and not self.progress.alive(replica.stage):
            self._problem = f"{name} {how}, it was the last replica of stage {replica.stage}, see {child.log}"
        elif replica is None and not (self.processes.children.keys() | self._back_at.keys()) & set(self.swarm.trainers):
            self._problem = f"{name} {how}, no trainer is left, see {child.log}"

    # ---------------------------------------------------------------- faults

    def _perform(self, actions: list[Action], *, now: float) -> None:
        for action in actions:
            self._say(action, now)
            carry_out(action, self.processes)

    def _say(self, action: Action, now: float) -> None:
        """What is about to be done: on the terminal, in events.jsonl, in the summary."""
        match action:
            case FaultAction(KillAll(stage=None) as fault, step):
                self.killed_all = step
                self.screen.note(fault.told.format(fault=fault, step=step))
                self._write(fault.event, step=step)
            case FaultAction(fault, step, name, stage, rank):
                struck = fault.groups or [[f"s{fault.stage}"]] * isinstance(fault, KillAll)
                self.checker.faulted |= {each for each in self.progress.replicas if member_of(struck, each) is not None}
                told = fault.told.format(fault=fault, name=name, step=step, stage=stage, rank=rank)
                by = {"order": str(fault)}
                if isinstance(fault, Kill):
                    by = {"by": f"{fault}, step {step}"}
                    if fault.back:
                        self._away[name] = now
                self._note_fault(type(fault), name, told, now=now, **by)
            case FaultEnded(fault, name):
                if name in self.processes.children:  # else it was killed while it was stopped
                    self._write("continued", child=name, order=str(fault))
                self.screen.note(f"{fault} is over")
                self._write("over", order=str(fault))
            case FaultPostponed(fault, reason):
                self.progress.postponed.append(str(fault))
                self.screen.note(f"{fault} is postponed: {reason}")
                self._write("postponed", order=str(fault), reason=reason)

    def _note_fault(self, kind: type[Fault], name: str, told: str, *, now: float, **fields: str) -> None:
        """A fault was done, to `name` or to no single process: on the terminal, in events.jsonl, in the summary."""
        step = len(self.progress.points)
        if kind.strikes_one:
            self.checker.faulted.add(name)
        if kind is Kill:
            self.progress.kills.append((name, step, now - self.progress.started_at))
        self.progress.faults[kind.kind] += 1
        self.screen.note(told)
        self._write(kind.event, step=step, **fields, **({"child": name} if name else {}))

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
        # They tell what they do by files there.
        if shutil.disk_usage(self.swarm.out).free < FULL_BYTES:
            return f"the disk of {self.swarm.out} is full, which loses the events of its processes: free space there"
        what = (
            f"{next(iter(self.swarm.replicas))} has not said where its DHT node listens"
            if self._waiting
            else f"waiting for {self.progress.waiting_for()}"
        )
        return f"{what}; logs are in {self.swarm.out / 'peers'}/*/log.txt"
