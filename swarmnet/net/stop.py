"""How every long-running command is asked to stop: Ctrl+C or SIGTERM set an event, and nothing is torn down midway."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stopped_by_signal() -> Iterator[asyncio.Event]:
    """An event that Ctrl+C and SIGTERM set until the context is left. Enter it before you say that you listen.

    Main thread only, inside a running loop.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
