"""The children of a local swarm: what each is told, its events and log, and how all are stopped. Decides nothing.

A child that is started again appends to the same events file and the same log as before.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from swarmnet.config import toml
from swarmnet.config.peer import Log, Mesh, PeerConfig
from swarmnet.net.admission_files import invitation_beside
from swarmnet.ranks.starter import ChildCall, Starter, best_starter
from swarmnet.telemetry.events import EventReader

Level = Literal["debug", "info", "warning", "error"]

ONE_RANK = Mesh()

START_S = 60.0
"""How long a start may take once all is imported: a fork takes milliseconds."""

PRELOAD = (
    "torch",
    "swarmnet.net.hivemind_dht",
    "swarmnet.cli",
    "swarmnet.cli.peer",
    "swarmnet.cli.trainer",
    "swarmnet.config.layers",
    "swarmnet.manifest.file",
    "swarmnet.net.endpoint",
    "swarmnet.peer.run",
    "swarmnet.stage.compute",
    "swarmnet.stage.torch_engine",
    "swarmnet.trainer.run",
    "swarmnet.local.oracle",
    "swarmnet.local.prepare",
    "swarmnet.local.interpose",
    "torch.fx.experimental.symbolic_shapes",  # the first backward imports it, and with it sympy
)
"""What peers, trainers and the oracle import. Importing these starts no thread and opens nothing."""


def child_starter() -> Starter:
    """What children are started with: on Linux forks of a process that has imported what they need."""
    return best_starter(PRELOAD, quiet=True)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What one start of a child is told. stage None: a trainer. slots None: as many as a peer has by default.

    orders: the file it follows, and then it runs with faults below it. mesh: its ranks.
    """

    name: str
    stage: int | None
    manifest: Path
    directory: Path
    events: Path
    bootstrap: tuple[str, ...]
    slots: int | None
    log_level: str
    orders: Path | None = None
    mesh: Mesh = ONE_RANK


ChildCommand = Callable[[ChildSpec], Sequence[str]]
"""Turns a spec into what follows `python`. Tests put scripts in that write the same events."""


def swarmnet_command(spec: ChildSpec) -> list[str]:
    """The real thing: `-m swarmnet peer|trainer ...`. Peers compute on the CPU, as the single process beside them.

    With orders: the same peer or trainer, started by `local.child` from a config file that is written here.
    """
    if spec.orders is not None:
        return _following(spec, spec.orders)
    slots = () if spec.slots is None else ("--slots", str(spec.slots))
    served = ("peer", "--stage", str(spec.stage), "--device", "cpu", "--no-restart", *slots, *_mesh(spec.mesh))
    role = ("trainer",) if spec.stage is None else served
    invited = _invitation(spec)
    return [
        "-m",
        "swarmnet",
        *role,
        "--manifest",
        str(spec.manifest),
        "--dir",
        str(spec.directory),
        "--events",
        str(spec.events),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--dht-port",
        "0",
        "--log-level",
        spec.log_level,
        *(part for address in spec.bootstrap for part in ("--bootstrap", address)),
        *(("--invitation", invited) if invited else ()),
    ]


def _invitation(spec: ChildSpec) -> str:
    """The file with this swarm's invitation; "" in an open run."""
    path = invitation_beside(spec.manifest)
    return str(path) if path.exists() else ""


def _mesh(mesh: Mesh) -> tuple[str, ...]:
    if mesh == ONE_RANK:
        return ()
    return (
        "--ranks",
        str(mesh.ranks),
        "--tensor",
        str(mesh.tensor),
        "--shard",
        mesh.shard,
        *(("--sequence-parallel",) if mesh.sequence_parallel else ()),
    )


def _following(spec: ChildSpec, orders: Path) -> list[str]:
    config = PeerConfig(
        manifest=spec.manifest,
        roles=("trainer",) if spec.stage is None else ("stage",),
        dir=spec.directory,
        stages=() if spec.stage is None else (spec.stage,),
        events=spec.events,
        host="127.0.0.1",
        device="cpu",
        bootstrap=spec.bootstrap,
        invitation=_invitation(spec),
        log=Log(level=cast(Level, spec.log_level)),
        mesh=spec.mesh,
        slots=PeerConfig().slots if spec.slots is None else spec.slots,
    )
    path = spec.directory / "peer.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(toml.write(config), encoding="utf-8")
    return ["-m", "swarmnet.local.child", str(path), str(orders)]


class Child:
    """One running process."""

    def __init__(self, spec: ChildSpec, call: Sequence[str], reader: EventReader, starter: Starter) -> None:
        """Start it. `reader` follows its events file. Raises OSError if starting is impossible, ForkerLost."""
        self.spec = spec
        self.log = spec.directory / "log.txt"
        spec.directory.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_from = log.tell()
        self._reader = reader
        deadline = time.monotonic() + START_S
        self._process = starter.start(ChildCall(call, spec.name, output=self.log), deadline)
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def returncode(self) -> int | None:
        """None while it runs; -9 after SIGKILL."""
        if self._code is None and self._process.wait(0.0):
            code = self._process.code()
            self._code = -signal.SIGKILL if code is None else code  # nobody can tell: it was killed with the forker
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
