"""What a peer serves over HTTP: names and units, one moment, health, the page; Grafana asks for what is there."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import re
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from swarmnet.config.check import EXTRAS
from swarmnet.config.peer import listen_at
from swarmnet.directory import Record, StageStatus
from swarmnet.errors import UsageError
from swarmnet.ids import Chain, Incarnation, PeerId, RunId
from swarmnet.net.traffic import Traffic
from swarmnet.peer import web as peer_web
from swarmnet.peer.web import RunLooks, serving_web
from swarmnet.telemetry import web
from swarmnet.telemetry.run_state import RunState
from swarmnet.telemetry.spans import SpanBook
from swarmnet.telemetry.web import DashboardPage

parser = pytest.importorskip("prometheus_client.parser", reason="needs the extra metrics")

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
PAGE = DASHBOARD.with_name("metrics.md")


def peer(*, synced: bool = True, paused: bool = False, alone: bool = False, halted: int | None = None) -> Any:
    """As much of a peer as is asked: one of stage 1, that knows another."""
    status = StageStatus(1, 7, Chain("c"), synced, queue=3, slots=4)
    record = Record(RunId("ab" * 32), PeerId("me"), Incarnation(1), (), (status,), tokens_per_second=120.5)
    state, spans = seen(), SpanBook()
    state.record, state.halted = record, halted
    spans.add("forward", 1, 6, 3, 1.0, 2.0)
    other = SimpleNamespace(stages=(SimpleNamespace(stage=1, synced=True), SimpleNamespace(stage=2, synced=False)))
    return SimpleNamespace(
        run_id=record.run,
        me=record.peer,
        label="...me stage 1",
        state=state,
        spans=spans,
        paused=paused,
        records={"other": other},
        replicas={1: SimpleNamespace(execution=SimpleNamespace(leaving=paused and not alone))},
        status=lambda: record,
    )


def seen() -> RunState:
    found = RunState()
    found.serve(1, now=0.0)
    applied = {"stage": 1, "version": 7, "averaging_bytes": 1000}
    found.on("figures", {"step": 6, "loss": 2.5, "num_tokens": 8, "grad_norm": 0.5, "learning_rate": 0.1}, now=10.0)
    for now in (10.0, 12.0, 52.0):
        found.on("applied", applied, now=now)
        found.on("executed", {"stage": 1, "executions": 9, "counted": 8}, now=now)
    found.on("evicted", {"stage": 1, "peer": "evil\x1b[2J", "reason": "late"}, now=53.0)
    return found


def get(url: str, headers: Mapping[str, str] = MappingProxyType({})) -> tuple[int, str]:
    """(status, text)"""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def asked(path: str, subject: Any, *, where: str = "0", **headers: str) -> tuple[int, str]:
    """(status, text) that a peer answers."""

    async def main() -> tuple[int, str]:
        traffic = Traffic()
        traffic.up.total, traffic.down.total = 11, 12
        with serving_web(where, subject, traffic, DashboardPage()) as at:
            return await asyncio.to_thread(get, at + path, headers)

    return asyncio.run(main())


def scraped() -> dict[str, Any]:
    code, text = asked("/metrics", peer())
    assert code == 200
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def test_a_scrape_has_what_the_page_lists_in_base_units_without_peer_ids() -> None:
    found = scraped()
    ours = {name for name in found if name.startswith("swarmnet_")}
    listed = {name.removesuffix("_total") for name in re.findall(r"`(swarmnet_\w+)", PAGE.read_text())}
    assert ours == listed
    for name, family in found.items():
        assert not re.search(r"_(ms|minutes|kib|mib|mbit)(_|$)", name), name
        assert family.documentation.endswith(".")
        labels = {label for sample in family.samples for label in sample.labels}
        assert labels <= {"stage", "event", "le", "version", "run", "implementation"}, name
    assert {"process_open_fds", "process_resident_memory_bytes"} <= found.keys()


def test_the_figures_are_those_of_the_peer_and_its_events() -> None:
    found = scraped()

    def value(name: str, **labels: str) -> float:
        samples = (each for family in found.values() for each in family.samples)
        (value,) = (each.value for each in samples if (each.name, each.labels) == (name, labels))
        return value

    of_stage = {"weights_version": 7, "replicas": 2, "slots": 4, "steps_total": 3, "averaging_sent_bytes_total": 3000}
    of_stage |= {"microbatches_executed_total": 9, "microbatches_counted_total": 8}
    assert {name: value(f"swarmnet_{name}", stage="1") for name in of_stage} == of_stage
    plain = {"loss": 2.5, "run_tokens_per_second": 120.5, "sent_bytes_total": 11, "received_bytes_total": 12}
    plain |= {"step_duration_seconds_sum": 42, "step_duration_seconds_count": 2}
    assert {name: value(f"swarmnet_{name}") for name in plain} == plain
    assert value("swarmnet_events_total", event="evicted") == 1
    assert value("swarmnet_step_duration_seconds_bucket", le="2.5") == 1


def test_the_state_is_what_the_figures_come_from() -> None:
    code, text = asked("/state", peer(synced=False))
    found = json.loads(text)
    (stage,) = found["stages"].values()
    assert code == 200 and (stage["steps"], stage["contributed"], stage["sent_bytes"]) == (3, 8, 3000)
    assert stage["evicted"] == {"evil\x1b[2J": ["late", 53.0]} and "\x1b" not in text
    assert found["points"][-1]["loss"] == 2.5 and found["events"]["evicted"] == 1
    assert found["not_ready"] == "no state yet of stage 1" and found["record"]["stages"][0]["slots"] == 4


def test_the_trace_has_the_spans_of_the_last_steps() -> None:
    code, text = asked("/trace", peer())
    (span,) = (event for event in json.loads(text) if event["ph"] == "X")
    assert code == 200 and (span["name"], span["args"]) == ("forward", {"stage": 1, "step": 6, "index": 3})


ELSEWHERE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}
FOLLOWED = {**ELSEWHERE, "Sec-Fetch-User": "?1"}
BROWSER = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64) Firefox/140.0"}
LAN = {"Host": "192.168.1.5:9100"}
ALL = ["/", "/page.js", "/data.json", "/metrics", "/state", "/trace", "/healthz", "/readyz"]


@pytest.mark.parametrize(
    ("paths", "headers", "code"),
    [
        # A page that has its own name lead here, or asks at an address that no machine has.
        *((ALL, {"Host": host}, 421) for host in ("page.example", "0.0.0.0:9100", "[::]:9100")),
        # A page of another site, and a link to this.
        *((ALL, {"Sec-Fetch-Site": site}, 403) for site in ("cross-site", "same-site")),
        (ALL, ELSEWHERE, 403),
        *((ALL, {**link, "Sec-Purpose": "prefetch"}, 403) for link in (ELSEWHERE, FOLLOWED)),
        (["/data.json"], FOLLOWED, 403),
        (["/", "/metrics", "/trace"], FOLLOWED, 200),
        *((ALL, {"Origin": origin}, 403) for origin in ("http://page.example", "null")),
        (ALL, {**LAN, "Origin": "http://192.168.1.5:9100"}, 200),
        *((ALL, {**BROWSER, "Sec-Fetch-Site": site}, 200) for site in ("same-origin", "none")),
        # A browser that does not say which page asks, as at an address of the local network.
        (["/data.json", "/metrics", "/readyz", "/state", "/trace", "/more"], BROWSER | LAN, 403),
        (["/", "/page.js", "/healthz"], BROWSER | LAN, 200),
        (ALL, {**BROWSER, **LAN, "X-Requested-With": "swarmnet"}, 200),
        # Scrapers and probes.
        (ALL, {**LAN, "User-Agent": "Prometheus/3.5.0"}, 200),
        *((ALL, {"Host": host}, 200) for host in ("localhost:9100", socket.gethostname())),
    ],
)
async def test_a_page_of_another_site_is_refused_before_it_costs_the_peer_anything(
    paths: list[str], headers: dict[str, str], code: int
) -> None:
    looks: list[None] = []
    with serving_web("0", peer(), Traffic(), DashboardPage(lambda: looks.append(None))) as at:
        codes = {path: (await asyncio.to_thread(get, at + path, headers))[0] for path in paths}
    assert codes == dict.fromkeys(paths, code)
    assert bool(looks) == (code == 200 and "/data.json" in paths)


async def test_a_name_at_which_it_listens_is_one_by_which_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    here = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as resolver:
            resolver.setattr(socket, "getaddrinfo", lambda *_, **__: [here])
            at = stack.enter_context(serving_web("peer-7.lan:0", peer(), Traffic(), DashboardPage()))
        assert (await asyncio.to_thread(get, f"{at}/metrics", {"Host": "Peer-7.lan:9100"}))[0] == 200


async def test_a_trace_is_made_once_for_all_who_ask_and_not_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    def trace(*_: object) -> bytes:
        made.append(threading.current_thread() is threading.main_thread())
        return b"[]"

    monkeypatch.setattr(peer_web, "trace", trace)
    with serving_web("0", peer(), Traffic(), DashboardPage()) as at:
        asked = [asyncio.to_thread(get, f"{at}/trace") for _ in range(6)]
        assert await asyncio.gather(*asked) == [(200, "[]")] * 6
    assert made == [False]


async def test_large_answers_are_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_TURN_S", 0.05)
    begun, over = threading.Event(), threading.Event()

    def make() -> bytes:
        begun.set()
        assert over.wait(60)
        return b"made"

    with web.listening("it", "127.0.0.1", 0, lambda path, _: web.Response(200, make if path == "/" else b"ok")) as at:
        first = asyncio.create_task(asyncio.to_thread(get, f"{at}/"))
        assert await asyncio.to_thread(begun.wait, 60)
        assert await asyncio.to_thread(get, f"{at}/") == (503, "another answer is being made: ask again\n")
        assert await asyncio.to_thread(get, f"{at}/healthz") == (200, "ok")
        over.set()
        assert await first == (200, "made")


async def test_a_large_answer_that_fails_is_said_and_the_next_one_is_made() -> None:
    def make() -> bytes:
        raise ValueError

    with web.listening("it", "127.0.0.1", 0, lambda *_: web.Response(200, make)) as at:
        for _ in range(2):
            assert (await asyncio.to_thread(get, f"{at}/"))[0] == 500


def test_a_scraper_gets_openmetrics_if_it_asks_and_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = asked("/metrics", peer(), Accept="application/openmetrics-text; version=1.0.0")
    assert code == 200 and text.endswith("# EOF\n")
    monkeypatch.setitem(EXTRAS, "metrics", "no_such_package")
    words = "/metrics needs the package no_such_package: pip install 'swarmnet-train[metrics]'\n"
    assert asked("/metrics", peer()) == (501, words)


LOOKING = """
import itertools, os, time
for number in itertools.count():
    print('{"run": %d, "pid": %d}' % (number, os.getpid()), flush=True)
    time.sleep(0.02)
"""


@contextlib.asynccontextmanager
async def looking(source: str, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[tuple[DashboardPage, list[Any]]]:
    """The page of a peer whose looks are those of a Python with this source, and the events that it tells."""
    monkeypatch.setattr(peer_web, "same_python", lambda: [sys.executable, "-c", source])
    told: list[Any] = []
    looks = RunLooks(lambda: ["swarm:far", "swarm:near"], lambda event, fields: told.append((event, fields)))
    task = asyncio.create_task(looks.run())
    try:
        async with asyncio.timeout(60):
            yield looks.page, told
            assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_process_looks_at_the_run_while_a_page_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_web, "AWAY_S", 0.5)

    def ends(pid: int) -> bool:
        return not Path(f"/proc/{pid}").exists()

    async with looking(LOOKING, monkeypatch) as (page, told):
        for path in ("/", "/page.js"):  # the page's own files are no looks
            assert page.respond(path).code == 200
        await asyncio.sleep(0.1)
        seen = json.loads(page.respond("/data.json").body)
        assert seen == {}
        pids = []
        for _ in range(2):
            while (new := json.loads(page.respond("/data.json").body)) in (seen, {}):  # noqa: ASYNC110  (a page polls)
                await asyncio.sleep(0.01)
            while not ends(new["pid"]):  # noqa: ASYNC110  (nobody asks any more)
                await asyncio.sleep(0.01)
            pids.append(new["pid"])
            seen = json.loads(page.respond("/data.json").body)
        assert pids[0] != pids[1] and not told


@pytest.mark.parametrize(("source", "reason"), [("exit(2)", "exit code 2"), ("print('x' * 10**6)", "limit")])
async def test_looks_that_fail_are_said_and_are_no_end_of_the_peer(
    source: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_web, "_MOST_BYTES", 1000)
    async with looking(source, monkeypatch) as (page, told):
        assert page.respond("/data.json").body == b"{}"
        while not told:  # noqa: ASYNC110  (there is no event to wait for)
            await asyncio.sleep(0.01)
        ((event, fields),) = told
        assert event == "no_dashboard" and reason in fields["reason"]


def test_the_dashboard_asks_for_what_is_there() -> None:
    samples = {sample.name for family in scraped().values() for sample in family.samples}
    board = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked_for = {name for text in expressions for name in re.findall(r"(?:swarmnet|process)_\w+", text)}
    assert len(asked_for) > 10 and asked_for <= samples
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize(
    ("path", "subject", "code", "words"),
    [
        ("/healthz", peer(synced=False), 200, "ok"),
        ("/readyz", peer(), 200, "ok"),
        ("/readyz", peer(synced=False), 503, "no state yet of stage 1"),
        ("/readyz", peer(paused=True), 503, "paused, as asked"),
        ("/readyz", peer(paused=True, alone=True), 200, "ok"),
        ("/readyz", peer(halted=9), 503, "the run halted at version 9"),
        ("/nowhere", peer(), 404, "there is no such page"),
    ],
)
def test_health_is_said_in_words(path: str, subject: Any, code: int, words: str) -> None:
    assert asked(path, subject) == (code, f"{words}\n")


def test_an_answer_that_fails_is_said_here_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    broken = peer()
    broken.status = None
    assert asked("/readyz", broken) == (500, "it failed: the log says why\n")
    assert [(each.getMessage(), each.exc_info is not None) for each in caplog.records] == [("request_failed", True)]


async def test_a_loop_that_does_not_answer_is_not_healthy_and_an_answer_that_comes_too_late_is_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or callers that try again and again would hold up the loop that hangs already."""
    made: list[str] = []
    respond = lambda path, _: (made.append(path), web.Response(200, b""))[1]  # noqa: E731
    with web.listening("the peer", "127.0.0.1", 0, respond) as at:
        monkeypatch.setattr(web, "ANSWER_S", 0.05)
        for path in ("/healthz", "/readyz", "/metrics"):
            assert get(at + path) == (503, "the peer does not answer\n")  # this thread is the loop's: it waits here
        monkeypatch.setattr(web, "ANSWER_S", 60.0)
        assert (await asyncio.to_thread(get, f"{at}/timely"))[0] == 200 and made == ["/timely"]


async def test_who_holds_connections_takes_no_more_than_a_few_and_loses_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(web, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(web, "REQUEST_S", 0.3)

    def hold(at: str) -> None:
        host, _, port = at.removeprefix("http://").rpartition(":")
        held = [socket.create_connection((host, int(port)), timeout=20) for _ in range(5)]
        for each in held:  # two have to wait until their time is over, the others are closed at once
            each.sendall(b"GET /me")
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""
            each.close()

    with serving_web("0", peer(), Traffic(), DashboardPage()) as at:
        await asyncio.to_thread(hold, at)
        answer = None
        while answer is None:  # its last thread ends
            with contextlib.suppress(OSError):
                answer = await asyncio.to_thread(get, f"{at}/readyz")
        assert answer == (200, "ok\n")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
async def test_a_host_that_holds_all_connections_shuts_out_no_other_and_no_probe(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "REQUEST_S", 60.0)  # nobody is cut for the time that a busy machine takes

    def hold(at: str) -> None:
        where = ("127.0.0.1", int(at.rpartition(":")[2]))
        with contextlib.ExitStack() as stack:
            slow = stack.enter_context(socket.create_connection(where, timeout=50, source_address=("127.0.0.3", 0)))
            slow.sendall(b"GET /healthz HTTP/1.0\r\n")
            for _ in range(2 * web.MOST_CONNECTIONS - 4):
                held = socket.create_connection(where, timeout=20, source_address=(source, 0))
                stack.enter_context(held).sendall(b"GET /me")
            for _ in range(8):
                assert get(f"{at}/healthz") == (200, "ok\n")
            slow.sendall(b"Host: localhost\r\n\r\n")
            assert slow.makefile("rb").read().startswith(b"HTTP/1.0 200")

    with serving_web("0", peer(), Traffic(), DashboardPage()) as at:
        await asyncio.to_thread(hold, at)


def test_a_host_with_many_addresses_is_one() -> None:
    hosts = (
        {"192.0.2.1", "::ffff:192.0.2.1"},
        {"192.0.2.2", "::ffff:192.0.2.2"},
        {"2001:db8::1", "2001:db8::2:0:0:9"},
        {"2001:db8:0:1::1"},
        {"fe80::1%eth0", "fe80::2%eth0"},
    )
    networks = [{web._network(address) for address in host} for host in hosts]
    assert all(len(each) == 1 for each in networks) and len(set.union(*networks)) == len(hosts)


async def test_a_request_has_a_limit() -> None:
    def send(at: str, head: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", int(at.rpartition(":")[2])), timeout=20) as connection:
            with contextlib.suppress(OSError):  # it is closed meanwhile
                connection.sendall(head)
                return connection.makefile("rb").readline()
        return b""

    with serving_web("0", peer(), Traffic(), DashboardPage()) as at:
        for head, codes in [
            (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nCookie: %s\r\n\r\n" % (b"x" * 12_000), [b"200"]),
            (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"a: %s\r\n" % (b"x\r " * 9000) * 90, [b"431", b""]),
            (b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"x" * 20_000), [b""]),
        ]:
            found = await asyncio.to_thread(send, at, head)
            assert found[9:12] in codes, found


def test_a_head_is_not_searched_for_the_parts_of_a_body() -> None:
    parts = b"".join(b"Content-Type:multipart/x;boundary=%d\r\r--%d\r" % (each, each) for each in range(9))
    parsed = http.client.parse_headers(io.BytesIO(b"Host: a\r\n" + parts + b"\n\r\n"), _class=web._Headers)
    assert parsed["Host"] == "a" and not parsed.is_multipart()


@pytest.mark.parametrize("where", ["127.0.0.1:0", "[::1]:0", "0", "0.0.0.0:0", "[::]:0"])
def test_it_listens_where_it_was_told(where: str) -> None:
    assert asked("/readyz", peer(), where=where)[0] == 200


async def test_a_port_that_is_taken_is_said_in_a_line() -> None:
    with serving_web("0", peer(), Traffic(), DashboardPage()) as at:
        port = at.rpartition(":")[2]
        with pytest.raises(UsageError, match=f"--dashboard {port}: cannot listen at .*:{port} .*: choose another"):
            with serving_web(port, peer(), Traffic(), DashboardPage()):
                pass
    with serving_web(port, peer(), Traffic(), DashboardPage()) as again:  # free as soon as the other has ended
        assert again == at


def test_places_to_listen() -> None:
    places = {"9100": ("127.0.0.1", 9100), "0.0.0.0:1": ("0.0.0.0", 1), "[::1]:1": ("::1", 1)}
    assert {text: listen_at(text) for text in places} == places
    for text in ("", "x", ":9100", "host:", "70000", "host:x"):
        with pytest.raises(ValueError, match="must be a port, or HOST:PORT"):
            listen_at(text)
