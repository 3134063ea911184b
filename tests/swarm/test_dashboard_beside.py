"""The dashboard of a peer of this machine: the peer does not depend on it, and takes its own along when it ends."""

from __future__ import annotations

import json
import re
import signal
import socket
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


def test_a_peer_goes_on_without_its_dashboard_and_ends_it_with_itself(tmp_path: Path) -> None:
    path = write_tiny_run(tmp_path)
    words = ("peer", "--stage", "0", "--no-restart", "--manifest", str(path), "--device", "cpu")
    with Running(tmp_path / "a", *words, "--dashboard", "0") as a:
        own = a.says("dashboard")["at"]
        log = tmp_path / "linkless.txt"
        linkless = Forked("-m", "swarmnet", "dashboard", "--dir", str(a.directory), log=log)
        try:
            bootstrap = ("--bootstrap", a.says("listening")["dht"][0])
            with (
                socket.create_server(("127.0.0.1", 0)) as taken,
                Running(tmp_path / "b", *words, *bootstrap, "--dashboard", str(taken.getsockname()[1])) as b,
            ):
                assert "exit code 2" in b.says("no_dashboard")["reason"]
                b.says("synced")
                assert b.stop() == 0
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
        assert a.stop() == 0
        eventually(lambda: run_at(own) == "nobody")
