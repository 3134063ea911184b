"""`swarmnet dashboard`: a page about a run, served to this machine's browser. It looks on as `swarmnet watch` does.

The page is a few files of this package and `data.json`; it asks no other host, and nobody can change anything by it.
"""

from __future__ import annotations

import json
import mimetypes
import socket
from collections.abc import Collection
from email.message import Message
from pathlib import Path
from typing import Self

from swarmnet.clock import boot_time, wall_time
from swarmnet.monitor.page import page
from swarmnet.monitor.run import WatchOptions, look_on, until_stopped
from swarmnet.monitor.state import WatchedRun
from swarmnet.monitor.view import WatchView
from swarmnet.peer.status import Waiting
from swarmnet.telemetry.log import plain
from swarmnet.telemetry.text import printable
from swarmnet.telemetry.web import Response, foreign, listening

ASSETS = Path(__file__).parent / "assets"
_FILES = frozenset(each.name for each in ASSETS.iterdir())

EVERY_S = 2.0
"""From one look to the next, and from one question of the page to the next."""


def run_dashboard(named: Path | str, bootstrap: tuple[str, ...], host: str, port: int) -> int:
    """Serve the page until Ctrl+C. Returns the exit code: 0; 1 if nobody announces the run; 2 if nobody answers.

    Raises UsageError, what `looking_on` raises, and KeyboardInterrupt if Ctrl+C came before the run was found.
    """
    view = ServedPage((host, socket.gethostname()))
    options = WatchOptions(every_s=EVERY_S, page=True)

    async def looking(waiting: Waiting) -> int:
        with listening("dashboard", host, port, view.respond) as at:
            view.greeting = f"swarmnet dashboard: {at}/"
            return await look_on(named, bootstrap, options, None, waiting, view)

    return until_stopped("dashboard", looking)


class ServedPage(WatchView):
    """A `WatchView` that keeps what the page asks for. names: of this machine, by which the page may be asked for."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.greeting = ""
        """Is printed once the run is found."""
        self._seen: WatchedRun | None = None
        self._looked_at = boot_time()
        self._body: bytes | None = None

    def __enter__(self) -> Self:
        print(self.greeting, flush=True)
        return self

    def look(self, seen: WatchedRun) -> None:
        """A look has been taken."""
        self._seen, self._looked_at, self._body = seen, boot_time(), None

    def respond(self, path: str, headers: Message) -> Response:
        """The page's own files, and `data.json`, which is made once for a look, if a page asks."""
        if (refused := foreign(headers, self._names)) is not None:
            return refused
        if path == "/data.json":
            if self._body is None:
                # Without characters that do something to their surroundings, such as writing backwards.
                data = plain(page(self._seen, now=wall_time()) if self._seen else {}, text=printable)
                self._body = json.dumps(data, separators=(",", ":")).encode()
            age = {"Age": f"{boot_time() - self._looked_at:.0f}"}
            return Response(200, self._body, "application/json", age)
        name = path.removeprefix("/") or "index.html"
        if name not in _FILES:
            return Response(404, b"there is no such page\n")
        kind = mimetypes.guess_type(name)[0] or "text/plain"
        return Response(200, (ASSETS / name).read_bytes(), f"{kind}; charset=utf-8")
