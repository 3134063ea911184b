"""The `swarmnet` command: parse, call, print. A command's module is imported when it is typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 it failed, 2 bad input, 130 interrupted."""
    import sys

    from swarmnet.cli.frame import run

    sys.exit(run(argv))
