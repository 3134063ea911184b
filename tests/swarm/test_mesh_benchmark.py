"""The mesh benchmark runs, both ways compute the same, and it writes what it promises; how fast is not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "mesh.py"


@pytest.mark.long
def test_a_quick_run_compares_every_way(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--json", str(file)], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    rows = figures["tensor"]
    assert [(row["stage"], row["sequence_parallel"]) for row in rows] == [("small", False), ("small", True)]
    for row in rows:
        assert len(row["ours"]) == len(row["theirs"]) == 2 and row["ratio"]["median"] > 0
        assert row["difference"] < 1e-5, "the two ways do not compute the same"
