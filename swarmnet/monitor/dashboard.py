"""`swarmnet dashboard`: a page about a run, served to this machine's browser. It looks on as `swarmnet watch` does.

The page is a few files of this package and `data.json`; it asks no other host, and nobody can change anything by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import json
import os
import re
import socket
from collections.abc import AsyncGenerator, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from swarmnet.clock import boot_time, run_loop, wall_time
from swarmnet.errors import UsageError
from swarmnet.monitor.page import RunPage
from swarmnet.monitor.presence import Observation
from swarmnet.monitor.run import WatchOptions, look_on
from swarmnet.net.stop import stopped_by_signal, unless_stopped
from swarmnet.peer.status import Waiting
from swarmnet.telemetry.log import plain
from swarmnet.telemetry.text import printable

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ASSETS = Path(__file__).parent / "assets"

EVERY_S = 2.0
"""From one look to the next, and from one question of the page to the next."""

MOST_CONNECTIONS = 64

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Of every answer: whatever got into the page could neither run nor tell anybody."""


def run_dashboard(named: Path | str, bootstrap: tuple[str, ...], host: str, port: int) -> int:
    """Serve the page until Ctrl+C. Returns the exit code: 0; 1 if nobody announces the run; 2 if nobody answers.

    Raises UsageError, what `looking_on` raises, and KeyboardInterrupt if Ctrl+C came before the run was found.
    """
    with Waiting(command="dashboard") as waiting:
        code = run_loop(_dashboard(named, bootstrap, host, port, waiting))
        if code is None and not waiting.answered:
            raise KeyboardInterrupt
        return code or 0


async def _dashboard(
    named: Path | str, bootstrap: tuple[str, ...], host: str, port: int, waiting: Waiting
) -> int | None:
    with stopped_by_signal() as stop, _bound(host, port) as sockets:
        page = ServedPage(f"swarmnet dashboard: {_address(sockets[0])}")
        async with _served(page, sockets, host):
            options = WatchOptions(every_s=EVERY_S, stays=True, timed=True)
            return await unless_stopped(stop, look_on(named, bootstrap, options, None, waiting, page))


class ServedPage:
    """A `WatchView` that keeps what the page asks for. greeting: is printed once the run is found."""

    def __init__(self, greeting: str = "") -> None:
        self._greeting = greeting
        self._page = RunPage(now=wall_time())
        self._looked_at = boot_time()
        self._body: bytes | None = None
        self._tag = ""

    def __enter__(self) -> Self:
        print(self._greeting, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def look(self, seen: Observation) -> None:
        """A look has been taken."""
        self._page.look(seen, now=wall_time())
        self._looked_at, self._body = boot_time(), None

    def note(self, text: str) -> None:
        """The page has its own words."""

    def end(self, text: str) -> None:
        """The page stays."""

    @property
    def age_s(self) -> float:
        """Since the last look."""
        return boot_time() - self._looked_at

    def answer(self) -> tuple[bytes, str]:
        """What `data.json` is, and its tag. Made once for a look, if anybody asks."""
        if self._body is None:
            data = plain(_shown(self._page.data(now=wall_time())))
            self._body = json.dumps(data, separators=(",", ":")).encode()
            self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:16]}"'
        return self._body, self._tag


def _shown(value: Any) -> Any:
    """The same, each text without characters that do something to their surroundings, such as writing backwards."""
    match value:
        case str():
            return printable(value)
        case dict():
            return {_shown(key): _shown(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_shown(inner) for inner in value]
    return value


# ---------------------------------------------------------------- over HTTP


def trusted(host: str, names: Collection[str]) -> bool:
    """May a page that was asked for at this `Host` be given out? Yes for an address, for `localhost`, and for `names`.

    A stranger's page can have its own host name lead to this machine (DNS rebinding), and would then read what the
    browser takes for that page's own.
    """
    found = re.fullmatch(r"(?:\[([^\]]*)\]|([^:]*))(?::\d+)?", host.lower())
    if found is None:
        return False
    name = (found[1] or found[2] or "").removesuffix(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in {"localhost", *(each.lower() for each in names)}
    return True


def application(page: ServedPage, names: Collection[str]) -> ASGIApp:
    """The page as ASGI: its files, and `data.json`. names: of this machine, by which it may be asked for."""
    from starlette.applications import Starlette
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    async def data(request: Request) -> Response:
        body, tag = page.answer()
        headers = {"ETag": tag, "Age": f"{page.age_s:.0f}"}
        if request.headers.get("If-None-Match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="application/json", headers=headers)

    app = Starlette(routes=[Route("/data.json", data), Mount("/", StaticFiles(directory=ASSETS, html=True))])
    app.add_middleware(GZipMiddleware, minimum_size=1000)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        said = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(said) == 1 and trusted(said[0], names):
            await app(scope, receive, sent)
        else:
            refusal = "ask for this page by an address, by localhost, or by the name given as --host\n"
            await Response(refusal, status_code=421, media_type="text/plain")(scope, receive, sent)

    return guarded


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Listening there. Raises UsageError."""
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.create_server(address[:2], family=family) as bound:
            yield [bound]
    except OSError as error:
        # Python says the address once more, as a tuple; a host that has none is no error of the system's.
        code = error.errno or 0
        reason = os.strerror(code) if code > 0 else error.strerror or str(error)
        raise UsageError(
            f"dashboard: cannot listen at {host}:{port} ({reason}): choose another --host or --port"
        ) from error


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if bound.family is socket.AF_INET6 else host}:{port}/"


@contextlib.asynccontextmanager
async def _served(page: ServedPage, sockets: list[socket.socket], host: str) -> AsyncGenerator[None, None]:
    import uvicorn

    class Quiet(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Ctrl+C is the command's."""
            yield

    config = uvicorn.Config(
        application(page, (host, socket.gethostname())),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
    listener = Quiet(config)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(listener.serve(sockets=sockets))
        try:
            yield
        finally:
            listener.should_exit = True
            await asyncio.wait([serving])
