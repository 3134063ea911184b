"""How every long-running command is asked to stop: the first Ctrl+C or SIGTERM sets an event, the second ends it.

Nothing is torn down midway by the first. The second is the system's own: it needs no loop that still turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stopped_by_signal() -> Iterator[asyncio.Event]:
    """An event that the first of Ctrl+C and SIGTERM sets; from then on another one ends the process at once.

    Enter it before you say that you listen. Main thread only, inside a running loop.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def first() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        stop.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, first)
    try:
        yield stop
    finally:
        if not stop.is_set():
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
