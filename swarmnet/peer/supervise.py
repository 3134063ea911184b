"""Runs a peer as a child process and starts it again when it crashes. This process stays small: it imports no torch.

The child does not outlive this process, and neither does what the child has started. It knows nothing of swarms.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarmnet.clock import run_loop, set_within
from swarmnet.host import OomKills
from swarmnet.net.parent_death import dies_with_parent
from swarmnet.net.stop import asking
from swarmnet.pacing import Backoff

FINAL = frozenset({0, 2})
"""Exit codes after which nothing is started again: all went well; the operator's input was wrong and still is."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """first_s doubles with each crash up to longest_s; a process that ran for healthy_s begins anew.

    Up to longest_full_s where the kernel has ended it for memory: it will run out of it again.
    """

    first_s: float = 1.0
    longest_s: float = 60.0
    healthy_s: float = 600.0
    longest_full_s: float = 3600.0


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
        self._pauses = pauses
        # A tenth less at random, so that machines that crashed together do not come back together.
        self._crashes = Backoff(pauses.first_s, pauses.longest_s, jitter=0.1, rng=rng)

    def ended(self, code: int, *, ran_s: float, asked: bool, for_memory: str = "") -> StartAgain | Over:
        """The process ended. code: negative for a signal. asked: the operator wanted it to end. for_memory: in which
        words the kernel killed it for memory, if it did."""
        # The same input would fail the same way again.
        if asked or code in FINAL:
            return Over(code if code >= 0 else 128 - code)
        if ran_s >= self._pauses.healthy_s:
            self._crashes.reset()
        longest_s = self._pauses.longest_full_s if for_memory else self._pauses.longest_s
        after_s = self._crashes.failed(0.0, longest_s=longest_s)
        ended = f"{for_memory}," if for_memory else f"ended by {_name(-code)}"
        how = f"ended with exit code {code}" if code >= 0 else f"was {ended}"
        # The kernel's counters do not see daemons that end processes for memory.
        why = " (a person or a service did it, or memory ran out)" if code == -9 and not for_memory else ""
        row = f", the {_ordinal(self._crashes.failures)} time in a row" if self._crashes.failures > 1 else ""
        return StartAgain(after_s, f"the peer {how} after {ran_s:.0f} s{why}{row}; it starts again in {after_s:.1f} s")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def supervise(
    command: Sequence[str],
    *,
    pauses: Pauses = Pauses(),
    rng: random.Random | None = None,
    say: Callable[[str], None] = lambda line: print(f"swarmnet: {line}", file=sys.stderr, flush=True),
) -> int:
    """Run `command` until it ends by itself or is asked to; return its exit code, 128 + n after signal n.

    Main thread only. Ctrl+C, SIGTERM and SIGHUP are passed on, as often as they come. The command starts with SIGINT
    blocked, and unblocks it when it has a handler. say: told each crash, in one line.
    """
    return run_loop(_supervise(command, Revivals(pauses, rng or random.Random()), say))


async def _supervise(command: Sequence[str], revivals: Revivals, say: Callable[[str], None]) -> int:
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    child: asyncio.subprocess.Process | None = None

    def forward(number: signal.Signals) -> None:
        asked.set()
        if child is not None and child.returncode is None:
            child.send_signal(number)

    for number in asking():
        loop.add_signal_handler(number, forward, number)
    while True:
        began_at, kills = loop.time(), OomKills.read()
        # A session of its own keeps the terminal's Ctrl+C from reaching the child twice.
        # In an interpreter that starts it would be a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            child = await asyncio.create_subprocess_exec(*dies_with_parent(*command), start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        # A signal that came while the child was being started has reached nobody yet.
        if asked.is_set():
            child.send_signal(signal.SIGTERM)
        code = await child.wait()
        for_memory = OomKills.read().since(kills) if code == -signal.SIGKILL else ""
        outcome = revivals.ended(code, ran_s=loop.time() - began_at, asked=asked.is_set(), for_memory=for_memory)
        if isinstance(outcome, Over):
            return outcome.code
        say(outcome.words)
        if await set_within(asked, outcome.after_s):
            return 0
