"""benchmarks/rebalance.py, short: every rule plays the trace, and the fields that others read are written."""

from __future__ import annotations

import json
from pathlib import Path

from benchmark_modules import printed_by


def test_every_rule_plays_the_trace(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    out = printed_by("rebalance", "--hours 1 --peers 20 --stages 2 --json", file)
    found = json.loads(file.read_text("utf-8"))
    assert {"overall", "last_hour", "swarm_t60", "swarm_t300", "gwtf", "moves_per_peer_hour", "back_s"} == found.keys()
    assert 0 < found["overall"] <= 1.001 and "gwtf" in out
