"""How every long-running command is asked to stop: the first Ctrl+C or SIGTERM sets an event, the second ends it.

Nothing is torn down midway by the first. The second is the system's own: it needs no loop that still turns. SIGHUP (the
terminal is gone) sets the event, too, and never counts as a first or second: one lost connection sends it twice, from
the shell and from the kernel, and a logout sends it with SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def asking() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to stop. `nohup` starts it with SIGHUP ignored: that stays so."""
    return _SIGNALS if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*_SIGNALS, signal.SIGHUP)


@contextlib.contextmanager
def stopped_by_signal() -> Iterator[asyncio.Event]:
    """An event that the first of Ctrl+C, SIGTERM and SIGHUP sets; a second Ctrl+C or SIGTERM ends the process at once.

    Enter it before you say that you listen. Main thread only, inside a running loop.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def first() -> None:
        # From now on a second Ctrl+C ends the process, even if the loop hangs.
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        stop.set()

    numbers = asking()
    for number in numbers:
        loop.add_signal_handler(number, stop.set if number == signal.SIGHUP else first)
    try:
        yield stop
    finally:
        # After the first signal the handlers are the system's own already.
        for number in numbers:
            loop.remove_signal_handler(number)
        # The process was asked, and ends: a terminal that goes now must not cut that short.
        if stop.is_set():
            signal.signal(signal.SIGHUP, signal.SIG_IGN)


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None, and `work` cancelled, if `stop` is set before it is done. Raises what it raises.

    For what a command does before it listens, which may take as long as others do not answer.
    """
    working, asked = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, asked), return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()
        working.cancel()  # nothing, if it is done
        # What it holds is given back before the caller goes on.
        await asyncio.wait((working,))
    return None if working.cancelled() else working.result()
