"""How a child process is started: as a fork of one that has everything loaded, or in a fresh interpreter.

Importing torch takes seconds, a fork milliseconds. `ranks.forker` says what holds for a forked child. Its pidfd is
ours, so that a signal never reaches another process; the forker reaps it and tells its exit code. A fresh child ends
with its line, or with us if it has none. Either way a child has a session of its own: Ctrl+C in the terminal reaches us
alone.

Not `multiprocessing`: its fork server would run the main module again in each child, keeps a second process for
resources, leaves a directory behind when we are killed and does not end what its children have started.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from swarmnet import telemetry
from swarmnet.errors import SwarmError
from swarmnet.net.parent_death import dies_with_parent
from swarmnet.ranks.line import receive_with_descriptor

log = telemetry.get(__name__)

FORKER = Path(__file__).with_name("forker.py")
MAX_PACKET = 1 << 12

CODE_S = 1.0
"""How long a process that has ended may take to be reaped."""

ENDED = "the process that children are forked from has ended"


class ForkerLost(SwarmError):
    """The process that children are forked from is gone, and they with it, or it did not get ready in time."""


@dataclass(frozen=True, slots=True)
class ChildCall:
    """What a child runs: `python WORDS...`, which begins with "-m"."""

    words: Sequence[str]
    name: str
    """What ps and top call it."""
    output: Path | None = None
    """What it prints is appended to this file; None: to our stderr."""
    line: socket.socket | None = None
    """The child gets this end of it, and its number as the last argument. The caller closes its own."""


class ChildProcess:
    """A started child. handle: its pidfd, ours to close; code(): how it has ended, None if nobody can tell."""

    def __init__(self, pid: int, handle: int, code: Callable[[], int | None]) -> None:
        self.pid = pid
        """Its process id, for people: it may be another's once this one has ended."""
        self._handle, self._ask = handle, code
        self._code: int | None = None
        self._ended = self._asked = self._closed = False

    def send(self, number: signal.Signals) -> None:
        """A signal, unless it has ended."""
        if not self._closed:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def wait(self, deadline: float) -> bool:
        """Whether it has ended by `deadline` (of time.monotonic)."""
        if not self._closed:
            ended = select.poll()
            ended.register(self._handle, select.POLLIN)
            self._ended = bool(ended.poll(max(deadline - time.monotonic(), 0.0) * 1000))
        return self._ended

    def code(self) -> int | None:
        """Of a process that has ended: exit code, -9 after SIGKILL, None if nobody can tell."""
        if not self._asked:
            self._code, self._asked = self._ask(), True
        return self._code

    def close(self) -> None:
        """Let go of it, once it has ended. May be called again."""
        self.code()
        if not self._closed:
            self._closed = self._ended = True
            os.close(self._handle)


class Starter(Protocol):
    """Two implementations: ForkStarter, FreshStarter."""

    def ready(self) -> bool:
        """Would `start` begin at once, without waiting for imports? Raises ForkerLost."""

    def lost(self) -> bool:
        """Nothing can be started with it any more."""

    def start(self, call: ChildCall, deadline: float) -> ChildProcess:
        """Start it by `deadline` (of time.monotonic). Raises ForkerLost, OSError."""

    def abort(self) -> None:
        """From another thread: have a `start` under way end at once; nothing more is started."""

    def close(self) -> None:
        """Start no more. Children that still run may be killed."""


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a child inherits of `environment`: no SWARMNET_* setting.

    It has one thread for products, as several children spin against each other; and a crash in native code leaves the
    stacks of all its threads in its log.
    """
    kept = {key: value for key, value in environment.items() if not key.startswith("SWARMNET_")}
    return (
        kept | {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")} | {"PYTHONFAULTHANDLER": "1"}
    )


def _environment() -> dict[str, str]:
    """As `child_environment`; a child imports from where we do."""
    return child_environment(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}


# ---------------------------------------------------------------- a fork of a process that is ready


class ForkStarter:
    """Starts children as forks of a forker, which imports `modules` first.

    Packets on the control socket are JSON. To the forker: {name, output, module, arguments} and the child's line,
    answered by {started: pid} and a pidfd. From the forker: {threads} once all is imported; {ended: pid, code}.

    Should the imports end the forker or leave threads behind, children get fresh interpreters instead, and say
    themselves what is wrong. A forker whose imports take too long is kept: the next start finds it further on.
    """

    def __init__(self, modules: Sequence[str], *, quiet: bool = False) -> None:
        """Start the forker; it imports while the caller goes on. Raises OSError.

        quiet: nothing that the imports print is seen.
        """
        self._codes: dict[int, int] = {}
        self._ready = self._owes = self._aborted = False
        self._instead: FreshStarter | None = None
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        says = subprocess.DEVNULL if quiet else 2
        try:
            with theirs:
                self._forker = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        str(FORKER),
                        str(os.getpid()),
                        str(theirs.fileno()),
                        json.dumps(list(modules)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=says,
                    stderr=says,
                    env=_environment(),
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                )
        except BaseException:
            self._control.close()
            raise

    def ready(self) -> bool:
        if not self._ready and select.select([self._control], [], [], 0)[0]:
            self._get_ready(time.monotonic() + CODE_S)
        return self._ready

    def lost(self) -> bool:
        if self._aborted:
            return True
        # a forker that owes a child is useless, too: its answer would be taken for another's
        useless = self._owes or self._forker.poll() is not None
        return self._instead is None and useless

    def start(self, call: ChildCall, deadline: float) -> ChildProcess:
        if not self._ready:
            self._get_ready(deadline)
        if self._instead is not None:
            return self._instead.start(call, deadline)
        assert call.words[0] == "-m", call
        order = {
            "name": call.name,
            "output": None if call.output is None else str(call.output),
            "module": call.words[1],
            "arguments": list(call.words[2:]),
        }
        self._owes = True  # until the forker has answered: see `lost`
        try:
            lines = [] if call.line is None else [call.line.fileno()]
            socket.send_fds(self._control, [json.dumps(order).encode()], lines)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ForkerLost(ENDED) from error
        while True:
            packet, handle = self._hear(deadline)
            if handle is not None:
                self._owes = False
                return ChildProcess(packet["started"], handle, functools.partial(self.code, packet["started"]))

    def _get_ready(self, deadline: float) -> None:
        try:
            threads = self._hear(deadline)[0]["threads"]
        except ForkerLost:
            # It is late, and may be ready next time.
            if self._aborted or not self._ended(deadline):
                raise
            threads = 0  # an import has ended the forker
        self._ready = True
        if threads != 1:  # only the thread that forks lives on in a fork: locks of the others would stay taken
            log.warning("children_not_forked", threads=threads)
            self._instead = FreshStarter()

    def _ended(self, deadline: float) -> bool:
        """Has the forker, by then?"""
        try:
            self._forker.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _hear(self, deadline: float) -> tuple[dict[str, Any], int | None]:
        """The next packet, exit codes noted. Raises ForkerLost after `deadline`, and when the forker has ended."""
        try:
            self._control.settimeout(max(deadline - time.monotonic(), 1e-3))
            data, descriptor = receive_with_descriptor(self._control, MAX_PACKET)
        except TimeoutError as error:
            raise ForkerLost("the process that children are forked from did not answer in time") from error
        except OSError as error:
            raise ForkerLost(ENDED) from error
        if not data:
            raise ForkerLost(ENDED)
        packet: dict[str, Any] = json.loads(data)
        if "ended" in packet:
            self._codes[packet["ended"]] = packet["code"]
        return packet, descriptor

    def code(self, pid: int) -> int | None:
        """The exit code of a child that has ended, once. A forker that is gone takes it along."""
        deadline = time.monotonic() + CODE_S
        try:
            while pid not in self._codes:
                self._hear(deadline)
        except ForkerLost:
            return None
        return self._codes.pop(pid)

    def abort(self) -> None:
        self._aborted = True
        self._forker.kill()  # its end of the control socket is closed then, and `_hear` notices

    def close(self) -> None:
        self._control.close()
        self._forker.kill()  # its children die with it
        self._forker.wait()


# ---------------------------------------------------------------- a fresh interpreter


class FreshStarter:
    """Starts whatever Python can run, anywhere; each child imports everything for itself."""

    def ready(self) -> bool:
        return True

    def lost(self) -> bool:
        return False

    def start(self, call: ChildCall, deadline: float) -> ChildProcess:
        command, line = [sys.executable, "-P", *call.words], call.line
        with contextlib.ExitStack() as stack:
            into = 2 if call.output is None else stack.enter_context(call.output.open("ab"))
            process = subprocess.Popen(
                dies_with_parent(*command) if line is None else [*command, str(line.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=into,
                stderr=into,
                env=_environment(),
                start_new_session=True,
                pass_fds=() if line is None else (line.fileno(),),
            )
        return ChildProcess(process.pid, os.pidfd_open(process.pid), process.poll)

    def abort(self) -> None:
        """A start never waits, so none has to be ended."""

    def close(self) -> None:
        """Children end by themselves: there is nothing to close."""
