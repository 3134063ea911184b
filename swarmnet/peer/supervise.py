"""Runs a peer as a child process and starts it again when it crashes. This process stays small: it imports no torch.

The child does not outlive this process, and neither does what the child has started. It knows nothing of swarms.
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
from dataclasses import dataclass
from types import FrameType

from swarmnet.net.parent_death import dies_with_parent

FINAL = frozenset({0, 2})
"""Exit codes after which nothing is started again: all went well; the operator's input was wrong and still is."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """first_s doubles with each crash up to longest_s; a process that ran for healthy_s begins anew."""

    first_s: float = 1.0
    longest_s: float = 60.0
    healthy_s: float = 600.0


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Start it again `after_s` seconds from now. words: what happened, for one line."""

    after_s: float
    words: str


@dataclass(frozen=True, slots=True)
class Over:
    """End with this exit code."""

    code: int


class Revivals:
    """The crashes of one peer, in a row."""

    def __init__(self, pauses: Pauses, rng: random.Random) -> None:
        self._pauses, self._rng = pauses, rng
        self._in_a_row = 0

    def ended(self, code: int, *, ran_s: float, asked: bool) -> StartAgain | Over:
        """The process ended. code: negative for a signal. asked: the operator wanted it to end."""
        if asked or code in FINAL:
            return Over(code if code >= 0 else 128 - code)
        self._in_a_row = 1 if ran_s >= self._pauses.healthy_s else self._in_a_row + 1
        # A tenth more or less, so that machines that crashed together do not come back together.
        doubled = self._pauses.first_s * 2.0 ** min(self._in_a_row - 1, 32)
        after_s = min(doubled, self._pauses.longest_s) * self._rng.uniform(0.9, 1.1)
        how = f"ended with exit code {code}" if code >= 0 else f"was ended by {_name(-code)}"
        row = f", the {_ordinal(self._in_a_row)} time in a row" if self._in_a_row > 1 else ""
        return StartAgain(after_s, f"the peer {how} after {ran_s:.0f} s{row}; it starts again in {after_s:.1f} s")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


_FORWARDED = (signal.SIGINT, signal.SIGTERM)


def supervise(
    command: Sequence[str],
    *,
    pauses: Pauses = Pauses(),
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
