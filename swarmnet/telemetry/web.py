"""The one HTTP listener, and the dashboard that it serves: for a peer (`peer.web`), and for `swarmnet dashboard`.

Read-only. A thread of its own takes requests, for few clients at a time and each for a few seconds, so that it says
when the event loop hangs. It refuses requests that a page of another site makes (`foreign`), then the loop answers,
between two of its turns: an answer is of one moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import hashlib
import io
import ipaddress
import mimetypes
import os
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from email.message import Message
from http.client import LineTooLong
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

_CHEAP = frozenset(("/", "/healthz", *(f"/{name}" for name in _FILES)))
"""What a browser may have that sends no `Sec-Fetch-Site`: it costs next to nothing, and other sites cannot read it."""

ANSWER_S = 2.0
"""An event loop that has not answered after so long does not live."""

MOST_CONNECTIONS, REQUEST_S = 32, 10.0
"""At a time, and how long one lasts at most."""

MOST_HEAD = 1 << 14
"""Bytes of a request. To parse the 6 MB that Python takes in 100 lines would hold up all other threads for seconds."""

_TURN_S = 0.5
"""So long a request waits while another large answer is made: a thread that waits is none for `/healthz`."""

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
    body: bytes | Callable[[], bytes]
    """A function is called in a thread of the listener, one at a time: what takes the event loop too long."""
    kind: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


Respond = Callable[[str, Message], Response]
"""Called in the event loop with a path, without its query, and the headers of the request."""


@contextlib.contextmanager
def listening(name: str, host: str, port: int, respond: Respond) -> Iterator[str]:
    """Listen there until the context is left; yields http://HOST:PORT. For the event loop that responds.

    name: of what listens, for errors. respond: to requests that are not `foreign`. Raises UsageError if it cannot
    listen there.
    """
    loop, names, turn = asyncio.get_running_loop(), (host, socket.gethostname()), threading.Lock()

    def made(path: str, make: Callable[[], Response]) -> Response:
        try:
            return make()
        except Exception:
            log.exception("request_failed", path=path)
            return Response(500, b"it failed: the log says why\n")

    def ask(path: str, headers: Message) -> Response:
        """In a thread of the listener: the loop's answer, or a refusal, which costs the loop nothing."""
        if (refused := foreign(path, headers, names)) is not None:
            return refused
        answer: Future[Response] = Future()

        def fill() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # the caller has had its 503: requests that pile up cost a busy loop nothing
            answer.set_result(made(path, lambda: respond(path, headers)))

        try:
            loop.call_soon_threadsafe(fill)
            found = answer.result(ANSWER_S)
        # It hangs, or it is closed.
        except (TimeoutError, RuntimeError):
            answer.cancel()
            return Response(503, b"the peer does not answer\n")
        if isinstance(make := found.body, bytes):
            return found
        # Several at a time would take turns with the event loop, and leave it less.
        if not turn.acquire(timeout=_TURN_S):
            return Response(503, b"another answer is being made: ask again\n", headers={"Retry-After": "1"})
        try:
            answered = made(path, lambda: replace(found, body=make()))
            if isinstance(answered.body, bytes):
                _packed(answered.body)  # here, one at a time; who asks next finds it
            return answered
        finally:
            turn.release()

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
        if ipaddress.ip_address(at).is_unspecified:  # all addresses of this machine: what others call it is not known
            at = "::1" if family is socket.AF_INET6 else "127.0.0.1"
        yield f"http://{f'[{at}]' if family is socket.AF_INET6 else at}:{taken}"
    finally:
        listener.shutdown()
        listener.server_close()


def foreign(path: str, headers: Message, names: Collection[str]) -> Response | None:
    """The refusal of a request that names another host than this machine (`trusted`), or that a page of another site
    may have a browser make, which costs the peer's event loop time; None: it may be answered."""
    hosts = headers.get_all("Host", [])
    if len(hosts) != 1 or not trusted(hosts[0], names):
        return Response(421, b"ask by an address, by localhost, or by the name at which this listens\n")
    # Browsers alone send Sec-Fetch headers, and no page can change them (Fetch metadata, W3C). A link that a user
    # follows has Sec-Fetch-User; what a page prefetches, embeds or opens by itself has not.
    site, origin = headers.get("Sec-Fetch-Site", "none"), headers.get("Origin", f"http://{hosts[0]}")
    followed = headers.get("Sec-Fetch-Dest") == "document" and headers.get("Sec-Fetch-User") == "?1"
    linked = followed and path != "/data.json" and "Sec-Purpose" not in headers
    if origin.partition("://")[2] != hosts[0] or not (site in ("none", "same-origin") or linked):
        return Response(403, b"a page of another site may link to this, and not load it\n")
    # Browsers send them to https, localhost and 127.0.0.0/8 alone. Elsewhere nothing tells this server's own page from
    # another site's but a header that a page may not send to another site before that has agreed (CORS preflight).
    silent = "Sec-Fetch-Site" not in headers and "Mozilla/" in headers.get("User-Agent", "")
    if silent and path not in _CHEAP and "X-Requested-With" not in headers:
        return Response(403, b"a browser gets this at localhost or 127.0.0.1 alone (ssh -L), or ask with curl\n")
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
        """For the event loop."""
        if path == "/data.json":
            self._asked()
            return Response(200, self._data(), "application/json", {"Age": f"{boot_time() - self._looked_at:.0f}"})
        name = path.removeprefix("/") or "index.html"
        if name not in _FILES:
            return Response(404, b"there is no such page\n")
        kind = mimetypes.guess_type(name)[0] or "text/plain"
        return Response(200, (ASSETS / name).read_bytes(), f"{kind}; charset=utf-8")


def trusted(host: str, names: Collection[str]) -> bool:
    """May a page that was asked for at this `Host` be given out? Yes for an address, `localhost`, and `names`.

    A stranger's page can have its own host name lead to this machine (DNS rebinding), and would then read what the
    browser takes for that page's own. It cannot do so with an address; 0.0.0.0 and :: are none of a machine, though
    browsers reach this one by them.
    """
    found = re.fullmatch(r"(?:\[([^\]]*)\]|([^:]*))(?::\d+)?", host.lower())
    if found is None:
        return False
    name = (found[1] or found[2] or "").removesuffix(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name in {"localhost", *(each.lower() for each in names)}
    return not _unmapped(address).is_unspecified


def _unmapped(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IPv4 address that is written as an IPv6 one, as such."""
    return getattr(address, "ipv4_mapped", None) or address


class _Listener(ThreadingTCPServer):
    allow_reuse_address, daemon_threads = True, True
    # With the default of 5 the kernel drops connections that arrive together, and a client tries again after a second.
    request_queue_size = 2 * MOST_CONNECTIONS

    def __init__(self, family: int, address: Any, ask: Respond) -> None:
        self.address_family, self.ask = family, ask
        self._lock, self._room = threading.Lock(), threading.Semaphore(2 * MOST_CONNECTIONS)
        self._held: dict[Any, str] = {}  # by connection, the oldest first: the network at the other end
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own. If there are too many, the oldest connection of the network that has most is cut: one
        that holds connections shuts out no other."""
        # A descriptor that a stranger holds is none for a checkpoint. Those that were cut are about to end.
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            if len(self._held) >= MOST_CONNECTIONS:
                numbers = Counter(self._held.values())
                most = max(numbers.values())
                oldest = next(each for each, network in self._held.items() if numbers[network] == most)
                del self._held[oldest]
                _cut(oldest)
            self._held[request] = _network(client_address[0])
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._ended(request)
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
            self._ended(request)

    def _ended(self, request: Any) -> None:
        with self._lock:
            self._held.pop(request, None)
        self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client has left."""


def _network(address: str) -> str:
    """What one host has: an IPv4 address, or the 64 bits of an IPv6 network."""
    at = _unmapped(ipaddress.ip_address(address.partition("%")[0]))
    return str(at) if at.version == 4 else str(ipaddress.ip_network((int(at) >> 64 << 64, 64)))


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        connection.shutdown(socket.SHUT_RDWR)


@functools.lru_cache(maxsize=4)
def _packed(body: bytes) -> tuple[str, bytes]:
    """The ETag of an answer, and it compressed if that is worth it, made once for all who get the same."""
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    return tag, gzip.compress(body, 6) if len(body) >= _PACKED_FROM else b""


class _Headers(Message):
    """The headers of a request. No Content-Type makes Python look for parts of a multipart body in them, which takes
    0.1 s for each head."""

    def get_content_type(self) -> str:
        """Likewise."""
        return "text/plain"

    def get_content_maintype(self) -> str:
        """Likewise."""
        return "text"


class _Head(io.BufferedReader):
    """The head of a request, which is all that is read of it."""

    left = MOST_HEAD

    def readline(self, size: int | None = -1, /) -> bytes:
        """As `BaseHTTPRequestHandler` reads it. Raises LineTooLong once that is more than `MOST_HEAD`."""
        line = super().readline(self.left)
        self.left -= len(line)
        if not self.left:
            raise LineTooLong("head")
        return line


class _Handler(BaseHTTPRequestHandler):
    server: _Listener
    MessageClass = _Headers

    def setup(self) -> None:
        """The head is read with a limit."""
        super().setup()
        self.rfile = _Head(self.connection.makefile("rb", buffering=0))

    def do_GET(self) -> None:
        """One request."""
        self._send(self.server.ask(self.path.partition("?")[0], self.headers))

    do_HEAD = do_GET

    def _send(self, found: Response) -> None:
        code, body = found.code, found.body
        assert isinstance(body, bytes)
        headers = {"Content-Type": found.kind, **_HEADERS, **found.headers}
        tag, packed = _packed(body)
        if code == 200:
            headers["ETag"] = tag
            if self.headers.get("If-None-Match") == tag:
                code, body, packed = 304, b"", b""
        if packed and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, headers["Content-Encoding"] = packed, "gzip"
        self.send_response_only(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Python's own names its version, repeats what the client said, and lacks `_HEADERS`."""
        self._send(Response(code, f"{code}\n".encode()))

    def _refuse(self) -> None:
        self.send_error(405)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse

    def log_message(self, format: str, *args: object) -> None:
        """A request is no news."""
