"""File descriptors: as many as this process may have, a word when they run out, and the options of TCP sockets.

Every connection takes one, and gRPC says nothing when there is none left: it leaves callers waiting in the listening
socket and retries its own dials for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket

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


def set_options(sock: socket.socket, *, silence_s: int, unsent_bytes: int | None = None) -> None:
    """Send short messages without delay, and end a connection after so much silence of its other end. unsent_bytes: the
    bytes that the system buffers beyond what the network carries."""
    options = {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": silence_s * 2 // 5,
        "TCP_KEEPINTVL": silence_s // 5,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 1000 * silence_s,
        "TCP_NOTSENT_LOWAT": unsent_bytes,
    }
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if value is not None and hasattr(socket, name):  # of this system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


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
