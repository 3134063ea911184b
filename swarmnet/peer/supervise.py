"""Runs a peer as a child process and starts it again when it crashes. This process stays small: it imports no torch.

The child is forked before anything large is imported, so the interpreter and the command line are read once.

The child does not outlive this process, and neither does what the child has started. It knows nothing of swarms.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable

from swarmnet.clock import boot_time
from swarmnet.host import OomKills
from swarmnet.net.parent_death import tie
from swarmnet.net.stop import asking
from swarmnet.pacing import Backoff

FINAL = frozenset({0, 2})
"""Exit codes after which nothing is started again: all went well; the operator's input was wrong and still is."""


FIRST_S, LONGEST_S = 1.0, 60.0
"""The pause after the first crash, which doubles with each one, and the longest."""

LONGEST_FULL_S = 3600.0
"""The longest where the kernel has ended the process for memory: it will run out of it again."""

_HEALTHY_S = 600.0
"""After a process that ran for so long the count of restarts starts over."""


def exit_code(code: int, *, asked: bool) -> int | None:
    """With which exit code all is over; None: the process is started again. code: its own, negative for a signal.
    asked: the operator wanted it to end."""
    # The same input would fail the same way again.
    return (code if code >= 0 else 128 - code) if asked or code in FINAL else None


class Revivals:
    """The crashes of one peer, in a row."""

    def __init__(self, rng: random.Random) -> None:
        # A tenth less at random, so that machines that crashed together do not come back together.
        self._crashes = Backoff(FIRST_S, LONGEST_S, jitter=0.1, rng=rng)

    def crashed(self, code: int, *, ran_s: float, for_memory: str = "") -> tuple[float, str]:
        """In how many seconds to start it again, and what happened, for one line. for_memory: in which words the kernel
        killed it for memory, if it did."""
        if ran_s >= _HEALTHY_S:
            self._crashes.reset()
        longest_s = LONGEST_FULL_S if for_memory else LONGEST_S
        after_s = self._crashes.failed(0.0, longest_s=longest_s)
        ended = f"{for_memory}," if for_memory else f"ended by {_name(-code)}"
        how = f"ended with exit code {code}" if code >= 0 else f"was {ended}"
        # The kernel's counters do not see daemons that end processes for memory.
        why = " (a person or a service did it, or memory ran out)" if code == -9 and not for_memory else ""
        row = f", the {_ordinal(self._crashes.failures)} time in a row" if self._crashes.failures > 1 else ""
        return after_s, f"the peer {how} after {ran_s:.0f} s{why}{row}; it starts again in {after_s:.1f} s"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


_FORK_AGAIN_S = 10.0


def supervise(
    *, say: Callable[[str], None] = lambda line: print(f"swarmnet: {line}", file=sys.stderr, flush=True)
) -> int | None:
    """Return None in a child process, which is to do the work. In this process return, once that is over, its exit
    code, 128 + n after signal n; until then start it again after each crash.

    Main thread only, and no other thread may run: it forks, so that no module is imported twice. Ctrl+C, SIGTERM and
    SIGHUP are passed on, as often as they come. say: told each crash, in one line.
    """
    revivals, parent, numbers, asked = Revivals(random.Random()), os.getpid(), {*asking()}, False
    # A blocked signal waits until `sigwait` takes it: none is lost between two lives.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*numbers, signal.SIGCHLD, signal.SIGALRM})
    while True:
        began_at, kills = boot_time(), OomKills.read()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both would write what is left
        try:
            child = os.fork()
        except OSError as error:  # perhaps for the memory that has just ended the last one
            say(f"cannot start a process ({error.strerror}); trying again in {_FORK_AGAIN_S:.0f} s")
            signal.setitimer(signal.ITIMER_REAL, _FORK_AGAIN_S)
            if signal.sigwait({*numbers, signal.SIGALRM}) != signal.SIGALRM:
                return 0
            continue
        if child == 0:
            # A session of its own keeps the terminal's Ctrl+C from reaching the child twice.
            os.setsid()
            tie(parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return None
        code = None
        while code is None:
            came = signal.sigwait({*numbers, signal.SIGCHLD})
            if came in numbers:
                asked = True
                os.kill(child, came)
            elif (status := os.waitpid(child, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(status[1])
        # What a killed child was drawing in the terminal has no end of line.
        if code < 0 and sys.stdout.isatty():
            print(flush=True)
        # The signals stay blocked: this process has nothing left to do.
        if (over := exit_code(code, asked=asked)) is not None:
            return over
        for_memory = OomKills.read().since(kills) if code == -signal.SIGKILL else ""
        after_s, words = revivals.crashed(code, ran_s=boot_time() - began_at, for_memory=for_memory)
        say(words)
        signal.setitimer(signal.ITIMER_REAL, after_s)
        if signal.sigwait({*numbers, signal.SIGALRM}) != signal.SIGALRM:
            return 0
