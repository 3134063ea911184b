"""The `swarmnet` command: parse, call, print. A command's module is imported when it is typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 it failed, 2 bad input, 130 interrupted."""
    import signal
    import sys

    # Raised in the middle of an import, KeyboardInterrupt is a traceback, gets lost, or aborts native code.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_at_once)
    # Whoever started us may have held it until now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    from swarmnet.cli.frame import run

    sys.exit(run(argv))


def leave_at_once(*_: object) -> NoReturn:
    """What Ctrl+C does while nothing is held that would have to be given back; children die with their parent."""
    import os

    os._exit(130)
