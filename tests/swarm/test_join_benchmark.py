"""The benchmark of joining runs from end to end: real processes, gRPC and TLS, several donors, a capped link."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "join.py"


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root and iproute2")
def test_state_comes_over_throttled_lines_and_is_compared(tmp_path: Path) -> None:
    result = tmp_path / "join.json"
    done = subprocess.run(
        [
            sys.executable,
            str(BENCHMARK),
            "--donors",
            "1,2",
            "--megabytes",
            "5",
            "--rate-mbit",
            "40",
            "--rounds",
            "1",
            "--json",
            str(result),
        ],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "one raw TCP stream" in done.stdout and "2 donors" in done.stdout
    found = json.loads(result.read_text())
    assert set(found["vs_raw"]) == {"1", "2"} and found["raw_mbit"] < 60, "the line is throttled"
