"""What a body finds out by itself, in whatever thread, told in the event loop whose business it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from swarmnet.stage.engine import Audience


class Posted:
    """`stage.body.Watcher` that hands on to an event loop, in the order in which it hears, before what failed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, audience: Audience) -> None:
        self._loop, self._audience = loop, audience

    def lost(self) -> None:
        self._post(self._audience.on_sums_lost)

    def event(self, event: str, fields: dict[str, object]) -> None:
        self._post(lambda: self._audience.on_engine(event, fields))

    def _post(self, tell: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(tell)
