"""Tie a child to its parent's life, then become the child's real command. Standard library only.

A launcher and not `preexec_fn`: that would fork a process full of gRPC and torch threads.

As a script, `python -I -S parent_death.py PARENT_PID COMMAND...`: asks Linux to SIGKILL this process when the parent
dies, makes sure the parent has not died before that, and replaces itself. The process id stays. Elsewhere the child
runs untied.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def tie(parent: int) -> None:
    """From now on this process dies with `parent`, which must be its parent. Ends the process if that is too late."""
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
        # The parent died between our fork and prctl: no process would ever end us.
        if os.getppid() != parent:
            sys.exit("the parent is gone")


def dies_with_parent(*command: str) -> list[str]:
    """The command line that runs `command` as a child of this process and ends it when this process dies."""
    return [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), *command]


def same_python() -> list[str]:
    """The beginning of a command line that runs what this process would import."""
    # `python -m` looks for modules in the working directory; the installed command does not.
    return [sys.executable] if sys.path[:1] == [os.getcwd()] else [sys.executable, "-P"]


def main() -> None:
    """Never returns."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    tie(parent)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
