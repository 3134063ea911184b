"""`swarmnet dashboard` over HTTP: read-only, for this machine, and strangers' words are text; and typed wrongly."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import re
import socket
from typing import Any, cast

import pytest

from swarmnet.cli.frame import run
from swarmnet.directory import Complaint, Record, StageStatus
from swarmnet.errors import UsageError
from swarmnet.ids import Chain, PeerId, RunId
from swarmnet.monitor import dashboard
from swarmnet.monitor.curve import Curve
from swarmnet.monitor.dashboard import PageView
from swarmnet.monitor.state import WatchedRun
from swarmnet.peer.control import Control
from swarmnet.peer.swarm_health import assess
from swarmnet.telemetry.web import ASSETS, DashboardPage, listening, trusted

LINK = f"swarm:{'ab' * 32}@/ip4/127.0.0.1/tcp/1/p2p/12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"
HERE = socket.gethostname()
HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[31m"


def page(**hostile: Any) -> DashboardPage:
    """Of a run of one peer."""
    status = StageStatus(0, 5, Chain("c"), synced=True)
    record = Record(RunId("ab" * 32), PeerId("a"), 1, ("/ip4/192.0.2.1/tcp/1",), (status,), **hostile)
    served = DashboardPage()
    seen = WatchedRun(Curve(), now=0.0)
    seen.look(assess(record.run, [record], 1), now=0.0)
    seen.name = HOSTILE
    PageView(served.look).look(seen)
    return served


def ask(
    served: DashboardPage, path: str, *, method: str = "GET", host: str | None = "127.0.0.1:8470", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers, body."""

    def request(at: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(at.removeprefix("http://"), timeout=20)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in (headers if host is None else headers | {"host": host}).items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        with contextlib.closing(connection), connection.getresponse() as answer:
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    async def main() -> tuple[int, dict[str, str], bytes]:
        with listening("test", "127.0.0.1", 0, lambda path, _headers: served.respond(path)) as at:
            return await asyncio.to_thread(request, at)

    return asyncio.run(main())


@pytest.mark.parametrize("path", ["/", *sorted(f"/{each.name}" for each in ASSETS.iterdir()), "/data.json"])
def test_every_answer_forbids_what_is_not_from_here(path: str) -> None:
    status, headers, body = ask(page(), path)
    assert status == 200 and body
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    assert headers["x-content-type-options"] == "nosniff" and "frame-ancestors 'none'" in policy


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(method: str) -> None:
    assert ask(page(), "/data.json", method=method)[0] == 405
    status, headers, body = ask(page(), "/", method=method)
    assert (status, body) == (405, b"405\n")
    assert "content-security-policy" in headers and "server" not in headers, "Python's own names its version"


@pytest.mark.parametrize("path", ["/page.py", "/../page.py", "/%2e%2e/page.py", "/../../peer/run.py", "//etc/passwd"])
def test_only_the_pages_own_files_are_given_out(path: str) -> None:
    assert ask(page(), path)[0] == 404


@pytest.mark.parametrize(
    ("host", "may"),
    [
        ("127.0.0.1:8470", True),
        ("localhost", True),
        ("LOCALHOST.:1", True),
        ("[::1]:8470", True),
        ("192.0.2.7:80", True),
        (f"{HERE}:8470", True),
        ("0.0.0.0:8470", False),
        ("[::]:8470", False),
        ("[::ffff:0.0.0.0]:8470", False),
        ("evil.example", False),
        ("127.0.0.1.evil.example:8470", False),
        ("localhost.evil.example", False),
        ("[::1].evil.example", False),
        ("localhost:1@evil.example", False),
        ("", False),
        (None, False),
    ],
)
def test_a_page_that_has_its_name_lead_here_is_refused(host: str | None, may: bool) -> None:
    assert host is None or trusted(host, [HERE]) == may
    assert ask(page(), "/data.json", host=host)[0] == (200 if may else 421)


def test_the_same_look_is_not_sent_twice() -> None:
    served = page()
    status, headers, _ = ask(served, "/data.json")
    again, more, body = ask(served, "/data.json", if_none_match=headers["etag"])
    assert (status, again, body) == (200, 304, b"") and more["age"] == "0"


def test_a_browser_gets_a_large_answer_compressed_and_others_do_not() -> None:
    _, plain, body = ask(page(), "/page.js")
    _, packed, short = ask(page(), "/page.js", accept_encoding="br, gzip")
    assert "content-encoding" not in plain and packed["content-encoding"] == "gzip"
    assert len(short) < len(body) == len(gzip.decompress(short)) and packed["etag"] == plain["etag"]


def test_before_the_first_look_there_is_no_run() -> None:
    assert ask(DashboardPage(), "/data.json")[2] == b"{}"


def test_what_strangers_say_is_text_that_does_nothing_to_its_surroundings() -> None:
    complaint = Complaint(0, PeerId("a"), "unreached", HOSTILE)
    served = page(software=HOSTILE, numerics=HOSTILE, nickname=HOSTILE, complaints=(complaint,))
    _, headers, body = ask(served, "/data.json")
    assert headers["content-type"] == "application/json"
    shown = json.loads(body)
    peer = shown["peers"]["a"]
    for text in (shown["name"], *map(peer.get, ("software", "numerics", "nickname")), peer["complaints"][0]["reason"]):
        assert text.startswith("<img src=x onerror=alert(1)>") and text.isprintable()


def test_the_pages_own_script_makes_no_html_of_a_text_and_names_no_other_host() -> None:
    own = [(ASSETS / name).read_text(encoding="utf-8") for name in ("index.html", "page.js", "page.css")]
    assert not [word for text in own for word in ("innerHTML", "dangerously", "eval(", "://") if word in text]


def brightness(color: str) -> float:
    """Relative luminance, WCAG 2."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((brightness(one), brightness(other)))
    return (high + 0.05) / (low + 0.05)


def over(color: str, ground: str, opacity: float) -> str:
    """What is seen of a color that lets its ground through."""
    parts = [[int(each[at : at + 2], 16) for at in (1, 3, 5)] for each in (color, ground)]
    return "#" + "".join(f"{round(opacity * one + (1 - opacity) * two):02x}" for one, two in zip(*parts, strict=True))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_are_read_and_lines_seen_on_each_ground(theme: str) -> None:
    sheet = (ASSETS / "page.css").read_text(encoding="utf-8")
    tables = re.findall(r":root \{(.*?)\}", sheet, flags=re.DOTALL)
    of = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", tables[theme == "dark"]))
    grounds = ["ground", "card", "note-ground"]
    words = [(word, ground) for word in ("ink", "soft", "good", "warn", "bad", "loss") for ground in grounds]
    words += [("ink", "warn-ground"), ("ink", "bad-ground")]
    assert not [(pair, found) for pair in words if (found := contrast(*(of[each] for each in pair))) < 4.5]
    drawn = ("loss", "held", "pace", "forward", "backward", "averaging", "barrier", "update", "good", "bad")
    assert not [(each, found) for each in drawn if (found := contrast(of[each], of["card"])) < 3.0]
    # The names of a step's phases are on their bars.
    (opacity,) = map(float, re.findall(r"rect\.phase \{ fill-opacity: ([0-9.]+); \}", sheet))
    bars = {each: over(of[each], of["note-ground"], opacity) for each in drawn[3:8]}
    assert not [(each, found) for each, bar in bars.items() if (found := contrast(of["ink"], bar)) < 4.5]


def test_a_host_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dashboard", LINK, "--host", "no.such.host.invalid"]) == 2
    err = capsys.readouterr().err
    assert "cannot listen at no.such.host.invalid:0" in err and err.count("\n") == 1


def test_a_port_that_is_taken_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run(["dashboard", LINK, "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another host or port" in capsys.readouterr().err


def test_variables_of_a_peer_do_not_open_the_page_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(dashboard, "run_dashboard", lambda *arguments: said.extend(arguments) or 0)
    monkeypatch.setenv("SWARMNET_HOST", "0.0.0.0")
    monkeypatch.setenv("SWARMNET_PORT", "31340")
    assert run(["dashboard", LINK]) == 0
    assert said[2:] == ["127.0.0.1", 0, False]


def test_a_peer_tells_its_owner_by_which_links_others_join() -> None:
    control = Control(cast(Any, None), cast(Any, None), paused=False)
    with pytest.raises(UsageError, match="name the run by its link"):
        control.answer({"ask": "links"}, minute=0, day="")
    control.links = ("swarm:far", "swarm:near")
    assert control.answer({"ask": "links"}, minute=0, day="").facts == {"links": ["swarm:far", "swarm:near"]}
