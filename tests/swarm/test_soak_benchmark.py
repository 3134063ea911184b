"""The soak as it is run, but for seconds: every kind of process is sampled, and Ctrl+C is not needed to end it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.long
def test_a_short_soak_ends_by_itself_and_has_a_trend_of_all_that_lived_through_it(tmp_path: Path) -> None:
    result = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--minutes", "1", "--json", str(result), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    spared = {"s0-r0", "s1-r0", "trainer-0", "s0-r0/p2pd", "forker", "supervisor"}
    assert spared <= {row["process"] for row in found["rows"] if row["kind"] == "memory_mib"}
    assert {"s0-r0", "trainer-0"} <= {row["process"] for row in found["rows"] if row["kind"] == "tasks"}
    assert found["steps"] > 0 and (found["lost"], found["doubled"], found["conflicts"]) == (0, 0, 0)
    assert "worst memory_mib: " in done.stdout and "told most often: " in done.stdout
