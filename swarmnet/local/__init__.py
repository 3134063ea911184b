"""A whole swarm as real processes on this machine: `run_local(LocalOptions(...))`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmnet.local.options import LocalOptions

if TYPE_CHECKING:
    from swarmnet.local.supervisor import Kit

__all__ = ["LocalOptions", "run_local"]


def run_local(options: LocalOptions, kit: Kit | None = None) -> int:
    """Run it and print its progress; returns the exit code. Imports rich and more when it is called."""
    from swarmnet.local.run import run_local as run

    return run(options, kit)
