"""The children of a local swarm: start, tail, kill, stop. Knows process ids, directories and logs; decides nothing.

A child that is started again appends to the same events file and the same log as before.
Children run in their own session, so Ctrl+C in the terminal reaches the supervisor alone, and they are on a leash:
when the supervisor dies, however, so do they.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from swarmnet.telemetry.events import EventReader

LEASH = Path(__file__).with_name("leash.py")


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What one start of a child is told. stage None: a trainer."""

    name: str
    stage: int | None
    manifest: Path
    directory: Path
    events: Path
    bootstrap: tuple[str, ...]
    slots: int
    log_level: str


ChildCommand = Callable[[ChildSpec], Sequence[str]]
"""Turns a spec into argv. Tests put scripts in that write the same events."""


def swarmnet_command(spec: ChildSpec) -> list[str]:
    """The real thing: `python -m swarmnet peer|trainer ...`."""
    role = ["trainer"] if spec.stage is None else ["peer", "--stage", str(spec.stage), "--slots", str(spec.slots)]
    return [
        sys.executable, "-m", "swarmnet", *role, "--manifest", str(spec.manifest), "--dir", str(spec.directory),
        "--events", str(spec.events), "--host", "127.0.0.1", "--port", "0", "--dht-port", "0",
        "--log-level", spec.log_level, *(part for address in spec.bootstrap for part in ("--bootstrap", address)),
    ]


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a child inherits: one thread per process (more spin against each other), no SWARMNET_* setting of ours."""
    kept = {key: value for key, value in environment.items() if not key.startswith("SWARMNET_")}
    return kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Child:
    """One running process."""

    def __init__(self, spec: ChildSpec, argv: Sequence[str], reader: EventReader) -> None:
        """Start it. `reader` follows its events file. Raises OSError if starting is impossible."""
        self.spec = spec
        self.log = spec.directory / "log.txt"
        spec.directory.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_from = log.tell()
            self._process = self._start(argv, log)
        self._reader = reader

    def _start(self, argv: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        leash = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid())]
        return subprocess.Popen([*leash, *argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                env=child_environment(os.environ), start_new_session=True)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def returncode(self) -> int | None:
        """None while it runs; -9 after SIGKILL."""
        return self._process.poll()

    def read(self) -> list[dict[str, Any]]:
        """Whole events written since the last call."""
        return self._reader.read()

    def send(self, number: signal.Signals) -> None:
        """A signal to this one process, if it still runs."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Reap it after SIGKILL."""
        return self._process.wait()

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
        child.wait()
    return [child.spec.name for child in running]
