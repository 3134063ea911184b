"""The pipeline benchmark runs and writes what it promises; how fast is not asserted (docs/benchmarks.md has it)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "pipeline.py"


@pytest.mark.long
def test_a_quick_run_writes_the_ratios_and_counts_the_bytes(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--json", str(file)], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert {"vs_1f1b", "vs_single", "bytes_vs_2e", "microbatch_ms"} <= figures.keys()
    assert min(figures["vs_1f1b"], figures["vs_single"]) > 0
    # Both directions cross, and neither twice: int8 costs 4 bytes per 256 elements, tokens and headers come on top.
    assert 1 + 4 / 256 < figures["bytes_vs_2e"] < 1.5
    losses = figures["last_loss"]
    assert max(losses.values()) - min(losses.values()) < 1e-4, "the ways do not train the same model"
    for spent in figures["microbatch_ms"].values():
        assert spent["wall"]["rounding and summing"] > 0, "no clock has run"
        assert sum(spent["wall"].values()) > 0
