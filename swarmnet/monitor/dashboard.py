"""`swarmnet dashboard`: a page about a run, served to this machine's browser. It looks on as `swarmnet watch` does.

The page is a few files of this package and `data.json`; it asks no other host, and changes nothing.
With `--json` each look is printed: a peer has that done by a process of its own, and serves the page itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from swarmnet.clock import wall_time
from swarmnet.monitor.page import page
from swarmnet.monitor.run import WatchOptions, look_on, until_stopped
from swarmnet.monitor.state import WatchedRun
from swarmnet.monitor.view import WatchView
from swarmnet.peer.status import Waiting
from swarmnet.telemetry.log import plain
from swarmnet.telemetry.text import printable
from swarmnet.telemetry.web import DashboardPage, listening

EVERY_S = 2.0
"""From one look to the next, and from one question of the page to the next."""


def run_dashboard(named: Path | str, bootstrap: tuple[str, ...], host: str, port: int, as_json: bool = False) -> int:
    """Serve the page until Ctrl+C; as_json: print what it would show. Returns the exit code: 0; 1 if no peer
    announces the run; 2 if none answers.

    Raises UsageError, what `looking_on` raises, and KeyboardInterrupt if Ctrl+C came before the run was found.
    """
    options = WatchOptions(every_s=EVERY_S, page=True)
    served = DashboardPage()

    async def looking(waiting: Waiting) -> int:
        if as_json:
            view = PageView(lambda data: print(data().decode(), flush=True))
            return await look_on(named, bootstrap, options, None, waiting, view)
        with listening("dashboard", host, port, lambda path, _headers: served.respond(path)) as at:
            view = PageView(served.look, f"swarmnet dashboard: {at}/\n")
            return await look_on(named, bootstrap, options, None, waiting, view)

    return until_stopped("dashboard", looking)


class PageView(WatchView):
    """A `WatchView` that gives each look away as what the page asks for. greeting: is printed once the run is found."""

    def __init__(self, took: Callable[[Callable[[], bytes]], None], greeting: str = "") -> None:
        self._took, self._greeting = took, greeting

    def __enter__(self) -> Self:
        print(self._greeting, end="", flush=True)
        return self

    def look(self, seen: WatchedRun) -> None:
        """A look has been taken."""
        self._took(partial(_encoded, seen))


def _encoded(seen: WatchedRun) -> bytes:
    # Without characters that do something to their surroundings, such as writing backwards.
    data = plain(page(seen, now=wall_time()), text=printable)
    return json.dumps(data, separators=(",", ":")).encode()
