"""File descriptors: as many as this process may have, and a word when they run out.

Every connection takes one, and gRPC says nothing when there is none left: it leaves callers waiting in the listening
socket and retries its own dials for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource

from swarmnet import telemetry

log = telemetry.get(__name__)

_ENOUGH = 1 << 20
_FEW = 0.9
_LOOK_S = 1.0


def raise_limit() -> int:
    """Raise this process's soft limit to its hard one. Returns the limit that holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    # A common soft limit is 1024, which some hundred peers use up.
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def lowest_free() -> int | None:
    """The lowest descriptor that is free: all below it are taken. None: there is none."""
    try:
        free = os.open(os.devnull, os.O_RDONLY)
    except OSError as error:
        if error.errno == errno.EMFILE:
            return None
        raise
    os.close(free)
    return free


class DescriptorWatch:
    """Says once when descriptors run out, and again after there were enough."""

    def __init__(self, limit: int) -> None:
        self._limit, self._few = limit, False

    def look(self, free: int | None) -> None:
        """free: what `lowest_free` found."""
        few = free is None or free >= _FEW * self._limit
        # Once: it is looked at every second.
        if few and not self._few:
            log.warning(
                "descriptors_run_out",
                taken=self._limit if free is None else free,
                limit=self._limit,
                advice="connections fail without a word when there are none left: raise the limit "
                "(ulimit -n, LimitNOFILE= of a unit), or look for who holds so many connections",
            )
        self._few = few

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            self.look(lowest_free())
            await asyncio.sleep(_LOOK_S)
