"""The `swarmnet` command: parse, call, print. A command's module is imported when it is typed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NoReturn


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 it failed, 2 bad input, 130 interrupted."""
    import os
    import signal
    import sys

    if os.getpid() == 1:
        _go_on_in_a_child()
    _open_standard_files()
    # Raised in the middle of an import, KeyboardInterrupt is a traceback, gets lost, or aborts native code.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_at_once)
    # Whoever started us may have held it until now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    from swarmnet.cli.frame import run

    sys.exit(run(argv))


def _open_standard_files() -> None:
    """Open the null device where the parent process has closed standard input, output or error (`>&-`).

    Otherwise the next file or connection takes that number, and what a library prints goes into it.
    """
    import os
    import sys

    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _go_on_in_a_child() -> None:
    """As PID 1 of a container: return in a child. PID 1 itself passes signals on, reaps, and ends as the child does.

    The kernel drops a signal to PID 1 that has no handler, and makes PID 1 the parent of every orphan.
    """
    import os
    import signal

    asked = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*asked, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        came = signal.sigwaitinfo({*asked, signal.SIGCHLD})
        if came.si_signo != signal.SIGCHLD:
            # A key such as Ctrl+C is sent by the terminal, to the child as well: twice would end it at once.
            if came.si_code <= 0 or came.si_signo == signal.SIGHUP:
                os.kill(child, came.si_signo)
            continue
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                os._exit(code if code >= 0 else 128 - code)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around imports of torch and all that stands on it: a sixth of their CPU time is the garbage collector's, which
    looks again and again at modules that stay. It does not look at them later, either."""
    import gc

    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave_at_once(*_: object) -> NoReturn:
    """What Ctrl+C does while nothing is held that would have to be given back; children die with their parent."""
    import os

    os._exit(130)
