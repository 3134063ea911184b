"""How a child process is started: as a fork of the fork server (`ranks.fork`), which has imported its modules.

Importing torch takes seconds, a fork milliseconds. The pidfd of a child is ours, so that a signal never reaches another
process; the fork server reaps the child and tells its exit code. A child has a session of its own, so that Ctrl+C in
the terminal reaches us alone.

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
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnet import telemetry
from swarmnet.errors import SwarmError
from swarmnet.ranks.channel import ChannelClosed, ChildChannel, Packet, channel_pair, packed

log = telemetry.get(__name__)

FORK = Path(__file__).with_name("fork.py")

CODE_S = 1.0
"""How long a process that has ended may take to be reaped."""


class LauncherLost(SwarmError):
    """The fork server is gone, and its children with it, or it did not get ready in time."""


@dataclass(frozen=True, slots=True)
class ChildCall:
    """What a child runs: `python WORDS...`. Only a module (`-m MODULE`) is forked; others get a fresh interpreter."""

    words: Sequence[str]
    name: str
    """What ps and top call it."""
    output: Path | None = None
    """What it prints is appended to this file; None: to our stderr."""
    descriptors: Sequence[int] = ()
    """The child gets these, and their numbers as last arguments. The caller closes its own."""


class ChildProcess:
    """A started child. handle: its pidfd, ours to close; code(): how it has ended, None if that is unknown."""

    def __init__(self, pid: int, handle: int, code: Callable[[], int | None]) -> None:
        self.pid = pid
        """Its process id, for people: it may be another's once this one has ended."""
        self._handle: int | None = handle  # None: closed
        self._ask = code

    def send(self, number: signal.Signals) -> None:
        """A signal, unless it has ended."""
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def wait(self, deadline: float) -> bool:
        """Whether it has ended by `deadline` (of time.monotonic)."""
        if self._handle is None:
            return True
        ended = select.poll()
        ended.register(self._handle, select.POLLIN)
        return bool(ended.poll(max(deadline - time.monotonic(), 0.0) * 1000))

    def code(self) -> int | None:
        """Of a process that has ended: exit code, -9 after SIGKILL, None if it is unknown."""
        return self._ask()

    def close(self) -> None:
        """Let go of it, once it has ended. May be called again."""
        self.code()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a child inherits of `environment`: no SWARMNET_* setting.

    It has one thread for products, as several children spin against each other; and a crash in native code leaves the
    stacks of all its threads in its log.
    """
    kept = {key: value for key, value in environment.items() if not key.startswith("SWARMNET_")}
    return (
        kept | {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")} | {"PYTHONFAULTHANDLER": "1"}
    )


class Launcher:
    """Starts children by a fork server, which imports `modules` first.

    Packets to the fork server: {name, output, words} and the child's descriptors, answered by {started: pid} and a
    pidfd. From it: {threads} once all is imported; {ended: pid, code}.

    If a fork server's imports take too long, it is kept: the next start finds more of them done.
    """

    def __init__(self, modules: Sequence[str], *, quiet: bool = False) -> None:
        """Start the fork server; it imports while the caller goes on. Raises OSError.

        quiet: nothing that the imports print is seen.
        """
        self._codes: dict[int, int] = {}
        self._ready = self._owes = False
        ours, theirs = channel_pair()
        self._control = ChildChannel(ours)
        says = subprocess.DEVNULL if quiet else 2
        arguments = str(os.getpid()), str(theirs.fileno()), json.dumps(list(modules))
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", str(FORK), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=says,
                stderr=says,
                env=child_environment(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )

    def ready(self) -> bool:
        """Would `start` begin at once, without waiting for imports? Raises LauncherLost."""
        if not self._ready and select.select([self._control], [], [], 0)[0]:
            self._hear(time.monotonic() + CODE_S)
        return self._ready

    def lost(self) -> bool:
        """Nothing can be started with it any more."""
        # The answer that it owes would be taken for that of another child.
        return self._owes or self._server.poll() is not None

    def start(self, call: ChildCall, deadline: float) -> ChildProcess:
        """Start it by `deadline` (of time.monotonic). Raises LauncherLost, OSError."""
        while not self._ready:
            self._hear(deadline)
        order = {"name": call.name, "output": call.output and str(call.output), "words": list(call.words)}
        self._owes = True  # until the fork server has answered: see `lost`
        self._control.send(packed(order), *call.descriptors)
        handles: list[int] = []
        while not handles:
            packet, handles = self._hear(deadline)
        self._owes, pid = False, packet["started"]
        return ChildProcess(pid, handles[0], functools.cache(lambda: self.code(pid)))

    def code(self, pid: int) -> int | None:
        """The exit code of a child that has ended, once. If the fork server is gone it is unknown."""
        deadline = time.monotonic() + CODE_S
        try:
            while pid not in self._codes:
                self._hear(deadline)
        except LauncherLost:
            return None
        return self._codes.pop(pid)

    def abort(self) -> None:
        """From another thread: kill all children, have a `start` under way end at once, and start nothing more."""
        self._control.shutdown()  # here `_hear` notices it, there the fork server

    def close(self) -> None:
        """Start no more. Children that still run are killed, with what they have started."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it still imports, and has no children yet
            self._server.wait(CODE_S)
        self._server.kill()
        self._server.wait()

    def _hear(self, deadline: float) -> tuple[Packet, list[int]]:
        """The next packet; that the server is ready and how children ended is noted.

        Raises LauncherLost after `deadline`, and when the server has ended.
        """
        if not select.select([self._control], [], [], max(deadline - time.monotonic(), 0.0))[0]:
            raise LauncherLost("the fork server did not answer in time")
        try:
            packet, descriptors = self._control.receive()
        except ChannelClosed as error:
            raise LauncherLost("the fork server has ended") from error
        if "ended" in packet:
            self._codes[packet["ended"]] = packet["code"]
        if "threads" in packet:
            self._ready = True
            if packet["threads"] != 1:
                log.warning("children_not_forked", threads=packet["threads"])
        return packet, descriptors
