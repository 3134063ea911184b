"""How a rank process is started: as a fork of one that has torch imported, or in a fresh interpreter.

Forked ranks are the zygote's children (`mesh.rank_zygote`), not ours: it reaps them and tells their exit codes, and we
hold a pidfd of each, so that a signal never reaches another process. Not `multiprocessing`: its fork server would run
the main module again in each rank, keeps a second process for resources, leaves a directory behind when we are killed
and does not end what its children have started. Knows no order and no group.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from swarmnet import telemetry
from swarmnet.errors import SwarmError
from swarmnet.mesh.rank_line import receive_with_descriptor

log = telemetry.get(__name__)

ZYGOTE = Path(__file__).with_name("rank_zygote.py")
MAX_PACKET = 1 << 12

DUMP = signal.SIGUSR1
"""Ends a rank that hangs, with the stacks of its threads on stderr."""

MOST_LATE = 3
"""So many deadlines may pass while modules are imported; whoever is later still hangs."""

CODE_S = 1.0
"""How long a process that has ended may take to be reaped."""

PRELOAD = (
    "torch",
    "torch.distributed",
    "swarmnet.mesh.rank",
    "torch.fx.experimental.symbolic_shapes",  # the first backward imports it, and with it sympy
)
"""What every rank imports, beside its program. Importing these starts no thread and touches no device."""

ENDED = "the process that ranks are forked from has ended"


class RankStarterLost(SwarmError):
    """The process that ranks are forked from is gone, and they with it, or it did not get ready in time."""


class RankProcess(Protocol):
    """A started rank."""

    @property
    def pid(self) -> int:
        """Its process id, for people: it may be another's once this one has ended."""
        ...

    def send(self, number: signal.Signals) -> None:
        """A signal, unless it has ended."""
        ...

    def wait(self, deadline: float) -> bool:
        """Whether it has ended by `deadline` (of time.monotonic)."""
        ...

    def code(self) -> int | None:
        """Of a process that has ended: exit code, -9 after SIGKILL, None if nobody can tell."""
        ...

    def close(self) -> None:
        """Let go of it, once it has ended."""
        ...


class RankStarter(Protocol):
    """Two implementations: ForkedRanks, FreshRanks."""

    def lost(self) -> bool:
        """Nothing can be started with it any more."""
        ...

    def start(self, line: socket.socket, name: str, deadline: float) -> RankProcess:
        """A rank at this end of its line, which the caller closes then. Raises RankStarterLost, OSError."""
        ...

    def abort(self) -> None:
        """From another thread: have a `start` under way end at once; nothing more is started."""
        ...

    def close(self) -> None:
        """Start no more. Ranks that still run may be killed."""
        ...


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a rank inherits: no SWARMNET_* setting; one thread per rank, as more spin against each other."""
    kept = {key: value for key, value in environment.items() if not key.startswith("SWARMNET_")}
    return kept | {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}


def best_starter(program: str) -> RankStarter:
    """What suits this system: forking after an import is safe on Linux only. Raises OSError."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # another system, an old kernel, a sandbox that forbids it
        return FreshRanks()
    return ForkedRanks((*PRELOAD, program))


# ---------------------------------------------------------------- a fork of a process that is ready


class ForkedRanks:
    """Starts ranks as forks of a zygote, which imports `modules` first. Linux only.

    Packets on the control socket, JSON. To the zygote: {name} and the rank's end of its line, answered by {started:
    pid} and a pidfd. From it: {threads} once all is imported; {ended: pid, code}. Should the imports end it or leave
    threads behind, ranks get fresh interpreters instead and say themselves what is wrong. A zygote whose imports take
    too long is kept: the next start finds them further on.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        """Start the zygote; it imports while the caller goes on. Raises OSError."""
        self._codes: dict[int, int] = {}
        self._ready = self._owes = self._aborted = False
        self._times_late = 0
        self._instead: FreshRanks | None = None
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._zygote = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        str(ZYGOTE),
                        str(os.getpid()),
                        str(theirs.fileno()),
                        json.dumps(sys.path),
                        json.dumps(list(modules)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    env=rank_environment(os.environ),
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                )
        except BaseException:
            self._control.close()
            raise

    def lost(self) -> bool:
        """A zygote that owes a rank is lost, too: its answer would be taken for another's."""
        if self._aborted:
            return True
        useless = self._owes or self._times_late > MOST_LATE or self._zygote.poll() is not None
        return self._instead is None and useless

    def start(self, line: socket.socket, name: str, deadline: float) -> RankProcess:
        if not self._ready and self._instead is None:
            self._get_ready(deadline)
        if self._instead is not None:
            return self._instead.start(line, name, deadline)
        self._owes = True
        try:
            socket.send_fds(self._control, [json.dumps({"name": name}).encode()], [line.fileno()])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise RankStarterLost(ENDED) from error
        while True:
            packet, handle = self._hear(deadline)
            if handle is not None:
                self._owes = False
                return _ForkedRank(self, packet["started"], handle)

    def _get_ready(self, deadline: float) -> None:
        try:
            threads = self._hear(deadline)[0]["threads"]
        except RankStarterLost:
            if self._aborted or not self._ended(deadline):
                self._times_late += 1
                raise
            threads = 0
        self._ready = threads == 1
        if not self._ready:
            log.warning("ranks_not_forked", threads=threads)
            self._instead = FreshRanks()

    def _ended(self, deadline: float) -> bool:
        """Has the zygote, by then?"""
        try:
            self._zygote.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _hear(self, deadline: float) -> tuple[dict[str, Any], int | None]:
        """The next packet, exit codes noted. Raises RankStarterLost after `deadline`, and when the zygote has ended."""
        try:
            self._control.settimeout(max(deadline - time.monotonic(), 1e-3))
            data, descriptor = receive_with_descriptor(self._control, MAX_PACKET)
        except TimeoutError as error:
            raise RankStarterLost("the process that ranks are forked from did not answer in time") from error
        except OSError as error:
            raise RankStarterLost(ENDED) from error
        if not data:
            raise RankStarterLost(ENDED)
        packet: dict[str, Any] = json.loads(data)
        if "ended" in packet:
            self._codes[packet["ended"]] = packet["code"]
        return packet, descriptor

    def code(self, pid: int) -> int | None:
        """The exit code of a rank that has ended, once. A zygote that is gone takes it along."""
        deadline = time.monotonic() + CODE_S
        try:
            while pid not in self._codes:
                self._hear(deadline)
        except RankStarterLost:
            return None
        return self._codes.pop(pid)

    def abort(self) -> None:
        """Close the zygote's end of the control socket, which `_hear` notices."""
        self._aborted = True
        self._zygote.kill()

    def close(self) -> None:
        self._control.close()
        self._zygote.kill()
        self._zygote.wait()


class _ForkedRank:
    """A rank that is the zygote's child. handle: its pidfd, ours to close."""

    def __init__(self, starter: ForkedRanks, pid: int, handle: int) -> None:
        self._starter, self._pid, self._handle = starter, pid, handle
        self._code: int | None = None
        self._asked = False

    @property
    def pid(self) -> int:
        return self._pid

    def send(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._handle, number)
        except ProcessLookupError:  # it has ended
            pass

    def wait(self, deadline: float) -> bool:
        ended = select.poll()
        ended.register(self._handle, select.POLLIN)
        return bool(ended.poll(max(deadline - time.monotonic(), 0.0) * 1000))

    def code(self) -> int | None:
        if not self._asked:
            self._code, self._asked = self._starter.code(self._pid), True
        return self._code

    def close(self) -> None:
        self.code()
        os.close(self._handle)


# ---------------------------------------------------------------- a fresh interpreter

FRESH = "import socket, sys; from swarmnet.mesh.rank import main; main(socket.socket(fileno=int(sys.argv[1])))"


class FreshRanks:
    """Starts ranks anywhere; each imports everything for itself. They end with their lines."""

    def lost(self) -> bool:
        """It is never lost."""
        return False

    def start(self, line: socket.socket, name: str, deadline: float) -> RankProcess:
        before = f"import sys; sys.path[:] = {sys.path!r}; "
        return _FreshRank(
            subprocess.Popen(
                [sys.executable, "-P", "-c", before + FRESH, str(line.fileno()), name],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=rank_environment(os.environ),
                start_new_session=True,
                pass_fds=(line.fileno(),),
            )
        )

    def abort(self) -> None:
        """A start never waits, so none has to be ended."""

    def close(self) -> None:
        """Ranks end with their lines: there is nothing to close."""


class _FreshRank:
    """A rank that is our own child."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, deadline: float) -> bool:
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def code(self) -> int | None:
        return self._process.poll()

    def close(self) -> None:
        self._process.poll()
