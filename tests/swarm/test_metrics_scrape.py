"""A real peer is scraped while it trains: `--dashboard`."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from dataclasses import dataclass
from typing import Any

import pytest
from fed_slowly import SLOWLY
from running import Running
from tiny_run import write_tiny_run

parser = pytest.importorskip("prometheus_client.parser", reason="needs the extra metrics")


@dataclass(frozen=True)
class Scraped:
    """A page, the state, how many steps were applied before it was asked for, and the losses of all steps so far."""

    page: str
    state: dict[str, Any]
    before: int
    losses: list[Any]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Scraped:
    folder = tmp_path_factory.mktemp("scrape")
    run = write_tiny_run(folder, stages=1, steps=100_000, microbatches=4)
    words = ("--manifest", str(run), "--device", "cpu")
    with Running(folder / "peer", "peer", "--stage", "0", "--no-restart", "--dashboard", "0", *words) as peer:
        at = peer.until(lambda event: event["event"] == "dashboard")["at"]
        listening = peer.until(lambda event: event["event"] == "listening")
        known = ("--bootstrap", listening["dht"][0])
        with Running(folder / "trainer", "trainer", *known, *words[:2], module=SLOWLY):
            peer.until(lambda event: event["event"] == "applied" and event["step"] >= 2)
            with urllib.request.urlopen(f"{at}readyz", timeout=30) as answer:
                assert answer.read() == b"ok\n"
            before = sum(event["event"] == "applied" for event in peer.events)
            with urllib.request.urlopen(f"{at}metrics", timeout=30) as answer:
                page = answer.read().decode()
            with urllib.request.urlopen(f"{at}state", timeout=30) as answer:
                state = json.load(answer)
    return Scraped(page, state, before, [event["loss"] for event in peer.so_far("applied")])


def test_a_peer_that_trains_is_ready_and_its_figures_are_those_of_its_events(scraped: Scraped) -> None:
    families = parser.text_string_to_metric_families(scraped.page)
    found = {sample.name: sample for family in families for sample in family.samples}
    steps, counted = found["swarmnet_steps_total"], found["swarmnet_microbatches_counted_total"]
    assert steps.labels == {"stage": "0"} and steps.value >= scraped.before >= 3
    assert 4 * (steps.value - 1) <= counted.value <= 4 * steps.value, "of a single replica, perhaps between two events"
    assert found["swarmnet_received_bytes_total"].value > 0
    assert found["swarmnet_loss"].value in scraped.losses
    assert found["swarmnet_tasks"].value > 5
    events = {"dashboard", "listening", "applied"}
    assert events <= scraped.state["events"].keys() and scraped.state["not_ready"] == ""
    (stage,) = scraped.state["record"]["stages"]
    assert stage["synced"] and scraped.state["stages"]["0"]["steps"] >= steps.value


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_prometheus_own_linter_has_nothing_to_say(scraped: Scraped) -> None:
    linted = subprocess.run(
        ["promtool", "check", "metrics"], input=scraped.page, capture_output=True, text=True, timeout=60, check=False
    )
    assert (linted.returncode, linted.stdout + linted.stderr) == (0, "")
