"""Runs a peer as a child process and starts it again when it crashes. This process stays small: it imports no torch.

What follows a crash is decided by `restarts`. The child dies with its parent: it does not outlive this process, and
neither does what the child has started. It knows nothing of swarms.
"""

from __future__ import annotations

import contextlib
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from swarmnet.net.parent_death import dies_with_parent
from swarmnet.peer.revival import Over, Pauses, Revivals

_FORWARDED = (signal.SIGINT, signal.SIGTERM)


def supervise(
    command: Sequence[str],
    *,
    pauses: Pauses = Pauses(),  # noqa: B008  (frozen)
    rng: random.Random | None = None,
    say: Callable[[str], None] = lambda line: print(f"swarmnet: {line}", file=sys.stderr, flush=True),
) -> int:
    """Run `command` until it ends by itself or is asked to; return its exit code, 128 + n after signal n.

    Main thread only. Ctrl+C and SIGTERM are passed on, as often as they come. say: told each crash, in one line.
    """
    with _Signals() as signals:
        restarts = Revivals(pauses, rng or random.Random())
        while True:
            began_at = time.monotonic()
            code = _run(command, signals)
            outcome = restarts.ended(code, ran_s=time.monotonic() - began_at, asked=signals.asked)
            if isinstance(outcome, Over):
                return outcome.code
            say(outcome.words)
            if signals.pause(outcome.after_s):
                return 0


def _run(command: Sequence[str], signals: _Signals) -> int:
    """One life of the child. A session of its own keeps the terminal's Ctrl+C from reaching it twice."""
    with subprocess.Popen(dies_with_parent(*command), start_new_session=True) as child, signals.to(child):
        while (code := child.poll()) is None:
            signals.wait(None)
        return code


class _Signals:
    """Ctrl+C and SIGTERM go to the child; these and the child's end wake whoever waits. A context manager."""

    def __init__(self) -> None:
        self.asked = False
        self._child: subprocess.Popen[bytes] | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> _Signals:
        self._ears, mouth = socket.socketpair()
        self._mouth = mouth
        self._ears.setblocking(False)
        mouth.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        for number in (*_FORWARDED, signal.SIGCHLD):
            self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup)
        self._ears.close()
        self._mouth.close()

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGCHLD:
            return
        self.asked = True
        if self._child is not None:
            self._child.send_signal(number)

    @contextlib.contextmanager
    def to(self, child: subprocess.Popen[bytes]) -> Iterator[None]:
        """Pass signals on to `child` within this context; one that came while it was being started, too."""
        self._child = child
        if self.asked:
            child.send_signal(signal.SIGTERM)
        try:
            yield
        finally:
            self._child = None

    def wait(self, seconds: float | None) -> None:
        """Until a signal arrives, or the time is up."""
        if select.select([self._ears], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                while self._ears.recv(4096):
                    pass

    def pause(self, seconds: float) -> bool:
        """Wait; True as soon as somebody asks to stop."""
        until = time.monotonic() + seconds
        while not self.asked and (left := until - time.monotonic()) > 0:
            self.wait(left)
        return self.asked
