"""The benchmarks of latency and of goodput, at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmark_modules import load, printed_by

latency, goodput = load("latency"), load("goodput")


@pytest.mark.parametrize("layer", latency.LAYERS)
def test_the_reference_is_as_busy_as_swarm_was_without_latency(layer) -> None:
    assert latency.reference(layer, 0, microbatches=10) == pytest.approx(layer.published[0], abs=0.01)


def test_the_reference_loses_with_latency_what_swarm_lost() -> None:
    ours = latency.LAYERS[-1]
    for round_trip_ms, published in zip(latency.ROUND_TRIPS_MS, ours.published, strict=True):
        assert latency.reference(ours, round_trip_ms, microbatches=20) == pytest.approx(published, abs=0.03)


def test_latency_writes_its_rows(tmp_path: Path) -> None:
    printed_by("latency", "--quick --json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    near, far = found["rows"]
    assert {"layer", "rtt_ms", "utilisation", "reference", "barrier"} <= near.keys()
    assert far["reference"] < far["utilisation"] < near["utilisation"] < 1
    assert all(0 < row["round_trips"] <= 2 for row in found["depths"])


def test_goodput_writes_what_kills_cost_and_would_have_cost(tmp_path: Path) -> None:
    printed_by("goodput", "--quick --json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["kills"] and 0.3 < found["goodput"] < 1.0 and found["goodput"] < found["goodput_1pct"] < 1.0
    assert found["without_ledger"]["lost"] > 0
    assert found["losses"]["exact"] != found["losses"]["without_ledger"]


def test_shares_of_one_are_the_exact_sum() -> None:
    ones = np.ones((3, 4, 8))
    exact = goodput.toy_losses(ones, steps=30)
    assert exact[-1] < 0.5 * exact[0]
    assert goodput.toy_losses(ones[:1], steps=30) == exact
    fewer = ones.copy()
    fewer[1, 2, :3] = 0.0
    assert goodput.toy_losses(fewer, steps=30)[:2] == exact[:2]
    assert goodput.toy_losses(fewer, steps=30)[2:] != exact[2:]
