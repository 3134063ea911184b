"""A real peer is scraped while it trains: `--metrics`."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from running import Running
from tiny_run import write_tiny_run

parser = pytest.importorskip("prometheus_client.parser", reason="needs the extra metrics")


def test_a_peer_that_trains_is_ready_and_its_figures_are_those_of_its_events(tmp_path: Path) -> None:
    run = write_tiny_run(tmp_path, stages=1, steps=100_000, microbatches=4)
    words = ("--manifest", str(run), "--device", "cpu")
    with Running(tmp_path / "peer", "peer", "--stage", "0", "--no-restart", "--metrics", "0", *words) as peer:
        at = peer.until(lambda event: event["event"] == "metrics")["at"]
        listening = peer.until(lambda event: event["event"] == "listening")
        with Running(tmp_path / "trainer", "trainer", "--bootstrap", listening["dht"][0], *words[:2]):
            peer.until(lambda event: event["event"] == "applied" and event["step"] >= 2)
            with urllib.request.urlopen(f"{at}/readyz", timeout=30) as answer:
                assert answer.read() == b"ok\n"
            before = sum(event["event"] == "applied" for event in peer.events)
            with urllib.request.urlopen(f"{at}/metrics", timeout=30) as answer:
                families = list(parser.text_string_to_metric_families(answer.read().decode()))
    found = {sample.name: sample for family in families for sample in family.samples}
    steps, counted = found["swarmnet_steps_total"], found["swarmnet_microbatches_counted_total"]
    assert steps.labels == {"stage": "0"} and steps.value >= before >= 3
    assert 4 * (steps.value - 1) <= counted.value <= 4 * steps.value, "of a single replica, perhaps between two events"
    assert found["swarmnet_received_bytes_total"].value > 0
    assert found["swarmnet_loss"].value in [event["loss"] for event in peer.so_far("applied")]
