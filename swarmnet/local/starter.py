"""How a child process is started: in a fresh interpreter, or as a fork of one that has everything imported already.

Importing torch and hivemind costs two seconds of CPU per process; a fork costs milliseconds. Either way the child is a
process of its own, in its own session (Ctrl+C in the terminal reaches the supervisor alone) and on a leash: when the
supervisor dies, however, so does the child. Knows no peer and no swarm.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from swarmnet.errors import SwarmError
from swarmnet.mesh.rank_starter import rank_environment
from swarmnet.net.leash import leashed

ZYGOTE = Path(__file__).with_name("zygote.py")
MAX_PACKET = 1 << 16

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


class ForkerLost(SwarmError):
    """The process that children are forked from is gone, and they with it."""


class ChildProcess(Protocol):
    """A started child."""

    @property
    def pid(self) -> int: ...

    def returncode(self, *, wait: bool = False) -> int | None:
        """Exit code, -9 after SIGKILL, None while it runs. wait: until it has ended."""
        ...

    def send(self, number: signal.Signals) -> None:
        """A signal to this one process, if it still runs."""
        ...


class Starter(Protocol):
    """Two implementations: FreshChildren, Preloaded."""

    def ready(self) -> bool:
        """A child can be started now. Ask again until it is so."""
        ...

    def start(self, call: Sequence[str], *, name: str, log: Path) -> ChildProcess:
        """Run `python CALL...`; what it prints is appended to `log`. Only when ready. Raises OSError, ForkerLost."""
        ...

    def close(self) -> None:
        """Start no more. Children that still run may be killed."""
        ...


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a child inherits: as a rank does; and a crash in native code leaves the stacks of all threads in its log."""
    return rank_environment(environment) | {"PYTHONFAULTHANDLER": "1"}


# ---------------------------------------------------------------- a fresh interpreter


class FreshChildren:
    """Starts whatever Python can run, anywhere; each child imports everything for itself."""

    def ready(self) -> bool:
        """It is always ready."""
        return True

    def start(self, call: Sequence[str], *, name: str, log: Path) -> ChildProcess:
        with log.open("ab") as output:
            return _FreshChild(
                subprocess.Popen(
                    leashed(sys.executable, *call),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=child_environment(os.environ),
                    start_new_session=True,
                )
            )

    def close(self) -> None:
        """Children of their own end by themselves: there is nothing to close."""


class _FreshChild:
    """A child of our own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def returncode(self, *, wait: bool = False) -> int | None:
        return self._process.wait() if wait else self._process.poll()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


# ---------------------------------------------------------------- a fork of a process that is ready


class Preloaded:
    """Starts `python -m MODULE ...` as forks of a zygote. Linux only.

    Packets on the control socket, JSON. To the zygote: {name, log, module, arguments}, answered in order by {started:
    pid}; {pid, signal}. From it: {threads} once all is imported; {ended: pid, code}. Only the zygote, the parent, can
    signal a pid and know that it is still the child's. If the imports end it or leave threads behind, each child gets
    a fresh interpreter instead, and says itself what is wrong.
    """

    def __init__(self, modules: Sequence[str] = PRELOAD) -> None:
        """Start the zygote; it imports `modules` while the caller goes on. Raises OSError."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        self._started: list[int] = []
        self._ready = self._lost = False
        self._instead: FreshChildren | None = None
        with theirs:
            self._zygote = subprocess.Popen(
                leashed(
                    sys.executable,
                    "-P",
                    str(ZYGOTE),
                    str(theirs.fileno()),
                    json.dumps(sys.path),
                    json.dumps(list(modules)),
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=child_environment(os.environ),
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )

    def ready(self) -> bool:
        if not (self._ready or self._instead):
            self._listen(block=False)
            if self._lost and not self._ready:
                self._instead = FreshChildren()
        return self._ready or self._instead is not None

    def start(self, call: Sequence[str], *, name: str, log: Path) -> ChildProcess:
        """Fork the child from the zygote. `call` must begin with -m."""
        if self._instead is not None:
            return self._instead.start(call, name=name, log=log)
        assert self._ready and call[0] == "-m", call
        self._say({"name": name, "log": str(log), "module": call[1], "arguments": list(call[2:])})
        while not self._started:
            self._listen(block=True)
            if self._lost:
                raise ForkerLost("the process that children are forked from has ended")
        return _ForkedChild(self, self._started.pop())

    def close(self) -> None:
        self._control.close()
        self._zygote.kill()
        self._zygote.wait()

    def code(self, pid: int, *, wait: bool) -> int | None:
        """As ChildProcess.returncode. The children of a lost zygote have been killed with it."""
        self._listen(block=False)
        while wait and pid not in self._codes and not self._lost:
            self._listen(block=True)
        return self._codes.get(pid, -signal.SIGKILL if self._lost else None)

    def signal(self, pid: int, number: signal.Signals) -> None:
        """As ChildProcess.send."""
        self._say({"pid": pid, "signal": int(number)})

    def _say(self, packet: dict[str, Any]) -> None:
        self._control.setblocking(True)
        try:
            self._control.send(json.dumps(packet).encode())
        except (BrokenPipeError, ConnectionResetError):
            self._lost = True

    def _listen(self, *, block: bool) -> None:
        """Take in what the zygote has said; block: at least one packet, or its end."""
        self._control.setblocking(block)
        while not self._lost:
            try:
                packet = self._control.recv(MAX_PACKET)
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet = b""
            if packet:
                self._heard(json.loads(packet))
            else:
                self._lost = True
            self._control.setblocking(False)

    def _heard(self, packet: dict[str, int]) -> None:
        if "threads" in packet:
            self._ready = packet["threads"] == 1
            self._lost = not self._ready
        elif "started" in packet:
            self._started.append(packet["started"])
        else:
            self._codes[packet["ended"]] = packet["code"]


class _ForkedChild:
    """A child of the zygote, which alone can signal and reap it."""

    def __init__(self, starter: Preloaded, pid: int) -> None:
        self._starter, self._pid = starter, pid

    @property
    def pid(self) -> int:
        return self._pid

    def returncode(self, *, wait: bool = False) -> int | None:
        return self._starter.code(self._pid, wait=wait)

    def send(self, number: signal.Signals) -> None:
        self._starter.signal(self._pid, number)


def best_starter() -> Starter:
    """What suits this system: forking after an import is safe on Linux only."""
    return Preloaded() if sys.platform == "linux" else FreshChildren()
