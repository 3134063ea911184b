"""Real processes of this machine: what each is told, its events and log, what is done to it. Decides nothing.

A child that is started again appends to the same events file and the same log as before. One that was started for
chaos, or as a Byzantine replica, follows a file of orders, one for each start. Orders are JSON lines, and say what is
to hold from now on, so that reading one twice changes nothing:

    hold    id, phase, step, moment: hold once, the first time this phase comes at `step` or later, and say so
    go_on   id: hold no longer, or not at all, for that order
    links   cut: peer ids; paces: [bytes_per_s, latency_s] by peer id; the state of this child's links, whole
    trace   say what is worked on, microbatch by microbatch
    lie     kind, seed: compute falsely, from the start on (`testing.byzantine`)

Peer ids are learned from the children; a link rule reaches a child as soon as both ends have one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from swarmnet.config import toml
from swarmnet.config.peer import PeerConfig
from swarmnet.errors import UsageError
from swarmnet.net.stop import asking
from swarmnet.ranks.launcher import ChildCall, Launcher
from swarmnet.telemetry.events import EventLog, EventReader
from swarmnet.testing.fault import Fault, links_of, stage_of

START_S = 60.0
"""How long a start may take once all is imported: a fork takes milliseconds."""

PRELOAD = (
    "torch",
    "swarmnet.net.dht_node",
    "swarmnet.cli",
    "swarmnet.cli.serve",
    "swarmnet.config.check",
    "swarmnet.manifest.file",
    "swarmnet.net.endpoint",
    "swarmnet.peer.run",
    "swarmnet.engine.compute_thread",
    "swarmnet.engine.torch_engine",
    "swarmnet.trainer.run",
    "swarmnet.data.source",
    "swarmnet.model.huggingface.checkpoint",
    "torch.fx.experimental.symbolic_shapes",  # the first backward imports it, and with it sympy
)
"""What peers, trainers and the reference import. Importing these starts no thread and opens nothing."""


def child_launcher() -> Launcher:
    """What children are started with: forks of a process that has imported what they need."""
    return Launcher(PRELOAD, quiet=True)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What one start of a child is told."""

    name: str
    config: PeerConfig
    orders: Path | None = None
    """The file that it follows, if it runs with faults below it."""

    @property
    def events(self) -> Path:
        """Where it writes its events."""
        return self.config.dir / "events.jsonl"


ChildCommand = Callable[[ChildSpec], Sequence[str]]
"""Turns a spec into what follows `python`. Tests put scripts in that write the same events."""


def swarmnet_command(spec: ChildSpec) -> list[str]:
    """The real thing: the config file, and `-m swarmnet peer|trainer` with it; with orders, the same by `child`."""
    path = spec.config.dir / "peer.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(toml.write(spec.config), encoding="utf-8")
    if spec.orders is not None:
        return ["-m", "swarmnet.testing.injector", str(path), str(spec.orders)]
    role = ["trainer"] if "trainer" in spec.config.roles else ["peer", "--no-restart"]
    return ["-m", "swarmnet", *role, "--config", str(path)]


def reference_command(spec: ChildSpec) -> list[str]:
    """The single process that a swarm is compared with."""
    return ["-m", "swarmnet.testing.reference", str(spec.config.manifest), str(spec.events)]


class Child:
    """One running process."""

    def __init__(
        self, name: str, words: Sequence[str], log: Path, launcher: Launcher, reader: EventReader | None = None
    ) -> None:
        """Start it. words: what follows `python`. log: what it prints is appended there. reader: follows its events.

        Raises OSError if starting is impossible, LauncherLost.
        """
        self.name, self.log = name, log
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as before:
            self._log_from = before.tell()  # an earlier start has written before
        self._reader = reader
        deadline = time.monotonic() + START_S
        self._process = launcher.start(ChildCall(words, name, output=self.log), deadline)
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def returncode(self) -> int | None:
        """None while it runs; -9 after SIGKILL."""
        if self._code is None and self._process.wait(0.0):
            code = self._process.code()
            self._code = -signal.SIGKILL if code is None else code  # unknown: it was killed with the fork server
            self._process.close()
        return self._code

    def read(self) -> list[dict[str, Any]]:
        """Whole events written since the last call."""
        return [] if self._reader is None else self._reader.read()

    def send(self, number: signal.Signals) -> None:
        """A signal to this one process, if it still runs."""
        self._process.send(number)

    def wait(self) -> None:
        """Until it has ended, after SIGKILL."""
        while self.returncode() is None:
            self._process.wait(time.monotonic() + 1.0)

    def last_lines(self, count: int = 15) -> list[str]:
        """The end of what this start wrote to its log."""
        with self.log.open("rb") as log:
            log.seek(max(self._log_from, log.seek(0, os.SEEK_END) - 64 * 1024))
            return log.read().decode(errors="replace").splitlines()[-count:]


def stop(children: Iterable[Child], *, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> list[str]:
    """SIGTERM to each, SIGKILL by process id to those that still run after `grace_s`. Returns the names of the latter.

    hurry: asked all the while; True ends the grace at once. All are reaped on return.
    """
    running = [child for child in children if child.returncode() is None]
    for child in running:
        child.send(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while running and time.monotonic() < deadline and not hurry():
        time.sleep(0.02)
        running = [child for child in running if child.returncode() is None]
    for child in running:
        child.send(signal.SIGKILL)
    for child in running:  # only now: those that still run would slow every end down
        child.wait()
    return [child.name for child in running]


class Interrupt:
    """Counts Ctrl+C, SIGTERM and SIGHUP instead of raising in the middle of things. A context manager, main thread
    only.

    exit_code: 128 + the first signal's number, as shells have it; 0 before any.
    """

    def __init__(self) -> None:
        self.count, self.exit_code = 0, 0
        self._hang_ups = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in asking():
            self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self._hang_ups += number == signal.SIGHUP
        self.exit_code = self.exit_code or 128 + number

    @property
    def again(self) -> bool:
        """Asked more than once: no grace any more. Terminals that go do not count (`net.stop`)."""
        return self.count - self._hang_ups > 1


# ---------------------------------------------------------------- orders


class FaultOrders:
    """Who is not open here has no faults below it, and is told nothing. trace: all say what they work on."""

    def __init__(self, *, trace: bool = False) -> None:
        self._trace = trace
        self._files: dict[str, EventLog] = {}
        self._said: dict[str, dict[str, object]] = {}
        self._peers: dict[str, str] = {}
        self._rules: list[Fault] = []

    def open(self, name: str, path: Path) -> None:
        """`name` is about to be started and will follow `path`, which does not exist yet."""
        self.close(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._files[name] = EventLog(path)
        self._links(name)
        if self._trace:
            self.send(name, "trace")

    def close(self, name: str) -> None:
        """`name` has ended."""
        if (file := self._files.pop(name, None)) is not None:
            file.close()
        self._said.pop(name, None)

    def send(self, name: str, order: str, **fields: object) -> None:
        """Tell a child something, if it listens."""
        if (file := self._files.get(name)) is not None:
            file.emit(order, **fields)

    def listening(self, name: str, peer: str) -> None:
        """`name` goes by this peer id."""
        self._peers[name] = peer
        self._follow_rules()  # they say something new of a process that has an id now

    def cut(self, rule: Fault) -> None:
        """From now on this partition, one-way cut or slow link holds."""
        self._rules.append(rule)
        self._follow_rules()

    def heal(self, rule: Fault) -> None:
        """It holds no longer."""
        self._rules.remove(rule)
        self._follow_rules()

    def _follow_rules(self) -> None:
        for name in sorted(self._files):
            self._links(name)

    def _links(self, name: str) -> None:
        cut, paces = links_of(name, self._rules, self._peers)
        links: dict[str, object] = {
            "cut": sorted(self._peers[other] for other in cut),
            "paces": {self._peers[other]: pace for other, pace in paces.items()},
        }
        # Most rules are about others: a child is told only what changes for it.
        if links != self._said.get(name, {"cut": [], "paces": {}}):
            self._said[name] = links
            self.send(name, "links", **links)


# ---------------------------------------------------------------- the swarm


class ProcessSwarm:
    """A `testing.swarm.Swarm` of children. It knows no run: `begin` says what a replica is told, and calls `launch`.

    Args:
        launcher: what children are started with.
        command: of each.
        begin: starts the process of this name, of this stage if it is a replica more, by `launch`.
        trace: children say what they work on.
    """

    def __init__(
        self,
        launcher: Launcher,
        command: ChildCommand,
        *,
        begin: Callable[[str, int | None], None],
        trace: bool = False,
    ) -> None:
        self.children: dict[str, Child] = {}
        self.orders = FaultOrders(trace=trace)
        self.ranks: dict[str, Sequence[int]] = {}  # process ids, of the replicas that have several
        self.killed: set[str] = set()  # by us, not reaped yet
        self.leaving: set[str] = set()  # told to drain
        self._launcher, self._command, self._begin = launcher, command, begin
        self._readers: dict[str, EventReader] = {}  # outlive their children

    def launch(self, spec: ChildSpec, *, lie: tuple[str, str] | None = None) -> Child:
        """Start this child. lie: its Byzantine kind, and the seed of that. Raises OSError, LauncherLost."""
        if spec.orders is not None:
            self.orders.open(spec.name, spec.orders)
        if lie is not None:
            self.orders.send(spec.name, "lie", kind=lie[0], seed=lie[1])
        if (reader := self._readers.get(spec.name)) is None:
            reader = self._readers[spec.name] = EventReader(spec.events)
            reader.read()  # of a run that goes on: said in an earlier life
        child = Child(spec.name, self._command(spec), spec.config.dir / "log.txt", self._launcher, reader)
        self.children[spec.name] = child
        return child

    def reaped(self, name: str) -> None:
        """It has ended, and all that it wrote was read."""
        del self.children[name]
        self.orders.close(name)

    def start(self, name: str, stage: int | None = None) -> None:
        self._begin(name, stage)

    def kill(self, name: str) -> None:
        self.killed.add(name)
        self.children[name].send(signal.SIGKILL)

    def kill_rank(self, name: str, rank: int) -> None:
        # It may have ended by itself a moment ago.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.ranks[name][rank], signal.SIGKILL)

    def kill_all(self, stage: int | None) -> None:
        for name in self.children:
            if stage in (None, stage_of(name)):
                self.kill(name)

    def stop(self, name: str) -> None:
        self.children[name].send(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        if name in self.children:
            self.children[name].send(signal.SIGCONT)

    def drain(self, name: str) -> None:
        self.leaving.add(name)
        self.children[name].send(signal.SIGTERM)

    def cut(self, rule: Fault) -> None:
        self.orders.cut(rule)

    def heal(self, rule: Fault) -> None:
        self.orders.heal(rule)

    def fill_disk(self, name: str, *, full: bool) -> None:
        raise UsageError("all processes are on the disk of this machine")

    def turn_clock(self, name: str, by_s: float) -> None:
        raise UsageError("all processes go by the clock of this machine")

    def hold(self, name: str, id: str, fault: Fault) -> None:
        step = -1 if fault.step is None else fault.step
        self.orders.send(name, "hold", id=id, phase=fault.phase, step=step, moment=fault.moment)

    def go_on(self, name: str, id: str) -> None:
        self.orders.send(name, "go_on", id=id)
