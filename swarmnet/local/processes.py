"""The children of a local swarm: what each is told, its events and log, and how all are stopped. Decides nothing.

A child that is started again appends to the same events file and the same log as before. One that was started for
chaos, or to lie, follows a file of orders, one for each start. Orders are JSON lines, and say what is to hold from now
on, so that reading one twice changes nothing:

    hold    id, phase, step, moment: hold once, the first time this phase comes at `step` or later, and say so
    go_on   id: hold no longer, or not at all, for that order
    links   cut: peer ids; paces: [bytes_per_s, latency_s] by peer id; the state of this child's links, whole
    trace   say what is worked on, microbatch by microbatch
    lie     kind, seed: compute falsely, from the start on (`testing.byzantine`)

Peer ids are learned from the children; a link rule reaches a child as soon as both ends have one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from swarmnet.config import toml
from swarmnet.config.peer import PeerConfig, listen_at
from swarmnet.net.stop import asking
from swarmnet.ranks.launcher import ChildCall, Launcher
from swarmnet.telemetry.events import EventLog, EventReader
from swarmnet.testing.fault import Fault, links_of

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
    "swarmnet.local.prepare",
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
    return ["-m", "swarmnet.local.reference", str(spec.config.manifest), str(spec.events)]


class Child:
    """One running process."""

    def __init__(self, spec: ChildSpec, command: ChildCommand, reader: EventReader, launcher: Launcher) -> None:
        """Start it. `reader` follows its events file. Raises OSError if starting is impossible, LauncherLost."""
        self.spec = spec
        self.log = spec.config.dir / "log.txt"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_from = log.tell()  # an earlier start has written before
        self._reader = reader
        deadline = time.monotonic() + START_S
        self._process = launcher.start(ChildCall(command(spec), spec.name, output=self.log), deadline)
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
        return self._reader.read()

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
    return [child.spec.name for child in running]


class DashboardProcess:
    """`swarmnet dashboard` beside a local swarm. The swarm does not depend on it."""

    def __init__(self, where: str, link: str, log: Path, launcher: Launcher) -> None:
        """Start it. where: [HOST:]PORT. log: what it prints. Raises LauncherLost."""
        host, port = listen_at(where)
        words = ("-m", "swarmnet", "dashboard", link, "--host", host, "--port", str(port))
        self._log, self._said = log, False
        log.write_bytes(b"")
        self._process = launcher.start(ChildCall(words, "dashboard", output=log), time.monotonic() + START_S)

    def news(self) -> str:
        """Where it is, or that it has ended: said once, else ""."""
        if self._said:
            return ""
        ended = self._process.wait(0.0)
        line, whole, _ = self._log.read_text(encoding="utf-8", errors="replace").partition("\n")
        self._said = bool(whole) or ended
        return line if whole else "the dashboard has ended" if ended else ""

    def stop(self, grace_s: float) -> None:
        """End it."""
        self._process.send(signal.SIGTERM)
        if not self._process.wait(time.monotonic() + grace_s):
            self._process.send(signal.SIGKILL)
        self._process.wait(time.monotonic() + START_S)
        self._process.close()


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
        self._rules: Sequence[Fault] = ()

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
        # The same rules say something new of a process that has an id now.
        self._rules, rules = (), self._rules
        self.rules(rules)

    def rules(self, rules: Sequence[Fault]) -> None:
        """From now on these partitions and slow links hold."""
        if rules != self._rules:
            self._rules = rules
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
