"""The one HTTP listener, and the dashboard that it serves: for a peer (`peer.web`), and for `swarmnet dashboard`.

Read-only. A thread of its own takes requests, for few clients at a time and each for a few seconds, so that it says
when the event loop hangs. The loop answers, between two of its turns: an answer is of one moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import hashlib
import ipaddress
import mimetypes
import os
import re
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from swarmnet.clock import boot_time
from swarmnet.errors import UsageError
from swarmnet.telemetry import log as telemetry

log = telemetry.get(__name__)

ASSETS = Path(__file__).parents[1] / "monitor" / "assets"
"""The dashboard's files. What they show, `monitor.page` makes."""

_FILES = frozenset(each.name for each in ASSETS.iterdir())

ANSWER_S = 2.0
"""An event loop that has not answered after so long does not live."""

MOST_CONNECTIONS, REQUEST_S = 32, 10.0
"""At a time, and how long one lasts at most."""

_LOOK_S = 0.05
"""So long its end takes at most."""

_PACKED_FROM = 1000
"""Bytes of an answer that is worth compressing."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}
"""Of every answer: text of a stranger that got into a page could neither run nor reach another host."""


@dataclass(frozen=True, slots=True)
class Response:
    """What is sent for one request."""

    code: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


Respond = Callable[[str, Message], Response]
"""Called in the event loop with a path, without its query, and the headers of the request."""


@contextlib.contextmanager
def listening(name: str, host: str, port: int, respond: Respond) -> Iterator[str]:
    """Listen there until the context is left; yields http://HOST:PORT. For the event loop that responds.

    name: of what listens, for errors. Raises UsageError if it cannot listen there.
    """
    loop = asyncio.get_running_loop()

    def ask(path: str, headers: Message) -> Response:
        """In a thread of the listener: the loop's answer."""
        answer: Future[Response] = Future()

        def fill() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # the caller has had its 503: requests that pile up cost a busy loop nothing
            try:
                answer.set_result(respond(path, headers))
            except Exception:
                log.exception("request_failed", path=path)
                answer.set_result(Response(500, b"it failed: the log says why\n"))

        try:
            loop.call_soon_threadsafe(fill)
            return answer.result(ANSWER_S)
        # It hangs, or it is closed.
        except (TimeoutError, RuntimeError):
            answer.cancel()
            return Response(503, b"the peer does not answer\n")

    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listener = _Listener(family, address[:2], ask)
    except OSError as error:
        # Python says the address once more, as a tuple; a host that has none is no error of the system's.
        code = error.errno or 0
        reason = os.strerror(code) if code > 0 else error.strerror or str(error)
        raise UsageError(f"{name}: cannot listen at {host}:{port} ({reason}): choose another host or port") from error
    threading.Thread(target=listener.serve_forever, args=(_LOOK_S,), name="web", daemon=True).start()
    try:
        at, taken = listener.socket.getsockname()[:2]
        yield f"http://{f'[{at}]' if family is socket.AF_INET6 else at}:{taken}"
    finally:
        listener.shutdown()
        listener.server_close()


def foreign(headers: Message, names: Collection[str]) -> Response | None:
    """The refusal of a request that names another host than this machine (`trusted`), or that a page of another site
    has a browser make, which costs the peer's event loop time; None: it may be answered."""
    hosts = headers.get_all("Host", [])
    if len(hosts) != 1 or not trusted(hosts[0], names):
        return Response(421, b"ask by an address, by localhost, or by the name at which this listens\n")
    # Browsers alone send these, and no page can change them (Fetch metadata, W3C).
    own = headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
    if not own and headers.get("Sec-Fetch-Dest") != "document":
        return Response(403, b"a page of another site may link to this, and not load it\n")
    return None


class DashboardPage:
    """The dashboard: its files, and the newest look at the run as `/data.json`. asked: a page wants looks."""

    def __init__(self, asked: Callable[[], None] = lambda: None) -> None:
        self._asked = asked
        self.look(lambda: b"{}")

    def look(self, data: Callable[[], bytes]) -> None:
        """A look has been taken. data: it as JSON, made once for a look, if a page asks."""
        self._data, self._looked_at = functools.cache(data), boot_time()

    def respond(self, path: str) -> Response:
        """For who is not `foreign`."""
        if path == "/data.json":
            self._asked()
            return Response(200, self._data(), "application/json", {"Age": f"{boot_time() - self._looked_at:.0f}"})
        name = path.removeprefix("/") or "index.html"
        if name not in _FILES:
            return Response(404, b"there is no such page\n")
        kind = mimetypes.guess_type(name)[0] or "text/plain"
        return Response(200, (ASSETS / name).read_bytes(), f"{kind}; charset=utf-8")


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


class _Listener(ThreadingTCPServer):
    allow_reuse_address, daemon_threads = True, True

    def __init__(self, family: int, address: Any, ask: Respond) -> None:
        self.address_family, self.ask = family, ask
        self._room = threading.Semaphore(MOST_CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, if there is room: a descriptor that a stranger holds is none for a checkpoint."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One connection, for so long at most, however slowly it speaks."""
        end = threading.Timer(REQUEST_S, _cut, (request,))
        end.daemon = True
        try:
            end.start()
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client has left."""


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Listener
    error_content_type, error_message_format = "text/plain", "%(code)d\n"

    def do_GET(self) -> None:
        """One request."""
        found = self.server.ask(self.path.partition("?")[0], self.headers)
        tag = f'"{hashlib.sha256(found.body).hexdigest()[:16]}"'
        headers = {"Content-Type": found.kind, **_HEADERS, **found.headers}
        code, body = found.code, found.body
        if code == 200:
            headers["ETag"] = tag
            if self.headers.get("If-None-Match") == tag:
                code, body = 304, b""
        if len(body) >= _PACKED_FROM and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, headers["Content-Encoding"] = gzip.compress(body, 6), "gzip"
        self.send_response_only(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self.send_error(405)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse

    def log_message(self, format: str, *args: object) -> None:
        """A request is no news."""
