"""The averaging benchmark runs from end to end: real processes, gRPC and TLS, gloo beside them; a member is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "averaging.py"


def run(tmp_path: Path, *arguments: str) -> dict[str, list[dict[str, float]]]:
    result = tmp_path / "averaging.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--no-hivemind", "--json", str(result), *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(result.read_text()))


def test_rounds_are_right_and_send_no_more_than_they_must(tmp_path: Path) -> None:
    rows = run(tmp_path, "--peers", "3", "--parameters", "300k", "--codec", "fp32,int8", "--turns", "1")["rows"]
    assert [row["codec"] for row in rows] == ["fp32", "int8"]
    assert all(row["vs_gloo"] > 0 and 0.99 < row["bytes_vs_bound"] < 1.05 for row in rows)


@pytest.mark.long
def test_a_member_killed_in_a_round_costs_the_others_a_moment(tmp_path: Path) -> None:
    (found,) = run(tmp_path, "--kill", "--peers", "3", "--parameters", "20M", "--codec", "fp32")["kill"]
    assert found["ours"] is not None
