"""benchmarks/sync_modes.py, two steps of it: it trains what it is asked to, compares, writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "sync_modes.py"


def test_it_prints_and_writes_its_table(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = subprocess.run(
        [
            sys.executable,
            str(BENCHMARK),
            "--steps",
            "2",
            "--seeds",
            "1",
            "--data",
            "corpus:small",
            "--variant",
            "overlap overlap_after=0",
            "--json",
            str(file),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    exact, late = json.loads(file.read_text())["rows"]
    assert exact["losses"][0] == late["losses"][0] and exact["losses"][1] != late["losses"][1]
    said = re.search(r"loss\(overlap overlap_after=0\) / loss\(exact\), mean of 1 seeds: train (\d+\.\d+)", done.stdout)
    assert said is not None and 0.9 < float(said[1]) < 1.1, "two steps from the same weights"
