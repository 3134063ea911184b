"""A whole swarm as real processes on this machine: `run_local(LocalOptions(...))`."""

from swarmnet.local.options import LocalOptions
from swarmnet.local.run import run_local

__all__ = ["LocalOptions", "run_local"]
