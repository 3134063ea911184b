"""The dashboard of a peer of this machine: nobody looks before a page asks, and the peer does not depend on it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from running import PATIENCE_S, Forked, Running
from tiny_run import write_tiny_run

from swarmnet.manifest.file import load, run_id


def eventually(what: Callable[[], Any]) -> Any:
    """What it returns once that is something; a page is polled, for there is no event to wait for."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def run_at(at: str) -> str:
    """The run that is shown there; "" while there is none, "nobody" if nobody listens."""
    try:
        with urllib.request.urlopen(f"{at}data.json", timeout=30) as answer:
            return str(json.load(answer).get("run", ""))
    except urllib.error.URLError:
        return "nobody"


def looking_at(link: str) -> list[int]:
    """Processes that take looks for a peer."""
    lines = {int(each.parent.name): each for each in Path("/proc").glob("[0-9]*/cmdline")}
    found = []
    for pid, line in lines.items():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = line.read_text().split("\0")
            found += [pid] if {link, "dashboard", "--json"} <= {*words} and "-S" not in words else []
    return found


def test_a_peer_shows_its_run_while_a_page_asks_and_needs_no_looks_to_go_on(tmp_path: Path) -> None:
    path = write_tiny_run(tmp_path)
    words = ("peer", "--stage", "0", "--no-restart", "--manifest", str(path), "--device", "cpu")
    with Running(tmp_path / "a", *words, "--dashboard", "0") as a:
        own, link = a.says("dashboard")["at"], a.says("listening")["links"][-1]
        a.says("synced")
        assert not looking_at(link)
        log = tmp_path / "linkless.txt"
        linkless = Forked("-m", "swarmnet", "dashboard", "--dir", str(a.directory), log=log)
        try:
            assert eventually(lambda: run_at(own)) == run_id(load(path))
            # gRPC's own log lines may come before and after.
            printed = eventually(lambda: re.search(r"dashboard: (http://\S+/)\n", log.read_text()))
            assert eventually(lambda: run_at(printed[1])) == run_id(load(path))
            linkless.send_signal(signal.SIGINT)
            assert linkless.wait() == 0, log.read_text()
        finally:
            if linkless.poll() is None:
                linkless.kill()
                linkless.wait()
        (pid,) = looking_at(link)
        os.kill(pid, signal.SIGKILL)
        assert "exit code -9" in a.says("no_dashboard")["reason"]
        with urllib.request.urlopen(f"{own}readyz", timeout=30) as answer:
            assert answer.read() == b"ok\n"
        assert a.stop() == 0
    assert run_at(own) == "nobody"


def test_a_peer_that_ends_takes_its_looks_along(tmp_path: Path) -> None:
    path = write_tiny_run(tmp_path)
    words = ("peer", "--stage", "0", "--no-restart", "--manifest", str(path), "--device", "cpu", "--dashboard", "0")
    with Running(tmp_path / "a", *words) as a:
        own, link = a.says("dashboard")["at"], a.says("listening")["links"][-1]
        assert eventually(lambda: run_at(own)) and looking_at(link)
        assert a.stop() == 0
    assert not looking_at(link)
