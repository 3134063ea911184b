"""benchmarks/sync_modes.py, two steps of it: it trains what it is asked to, compares, writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmark_modules import printed_by


def test_it_prints_and_writes_its_table(tmp_path: Path, one_thread: None) -> None:
    file = tmp_path / "rows.json"
    line = "--steps 2 --seeds 1 --data corpus:small --variant 'overlap overlap_after=0' --json"
    out = printed_by("sync_modes", line, file)
    exact, late = json.loads(file.read_text())["rows"]
    assert exact["losses"][0] == late["losses"][0] and exact["losses"][1] != late["losses"][1]
    said = re.search(r"loss\(overlap overlap_after=0\) / loss\(exact\), mean of 1 seeds: train (\d+\.\d+)", out)
    assert said is not None and 0.9 < float(said[1]) < 1.1, "two steps from the same weights"
