"""The control plane's benchmark runs from end to end, and what it measures is what the machines say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmark_modules import load


def test_a_row_has_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "control.json"
    monkeypatch.setattr(sys, "argv", ["control.py", "--replicas", "3,5", "--microbatches", "20", "--json", str(result)])
    load("control").main()
    said = capsys.readouterr()
    assert said.out.count("\n") == 3 and "2 of 2" in said.err
    found = json.loads(result.read_text())
    small, large = found["rows"]
    assert found["exponents"].keys() == {"replicas"} and found["exponents"]["replicas"]["bytes_per_peer"] > 0
    assert (small["replicas"], large["replicas"], small["microbatches"]) == (3, 5, 20)
    for row in (small, large):
        assert min(row["claims_per_s"], row["leader_cpu"], row["bytes_per_peer"], row["heartbeat_ms"]) > 0
        assert 0 < row["quiet_report_bytes"] <= 200 < row["round_bytes"]
    assert large["leader_hears"] > small["leader_hears"]
    kinds = small["by_kind"]
    assert kinds["MemberState"] >= kinds["StagePlan"] > 0
    assert small["messages"] == sum(kinds.values()) - kinds["Heartbeat"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--replicas 1", "argument --replicas: 1: write whole numbers from 2 to 1000 with commas"),
        ("--microbatches 4,x", "argument --microbatches: 4,x: write whole numbers from 1 to 65536 with commas"),
        ("--replicas 4", "--replicas and --microbatches go together: give both, or none for the default run"),
        ("--json /nowhere/at/all.json", "--json /nowhere/at/all.json: there is no such folder; make it first"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, line: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["control.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        load("control").main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    assert said.err == f"control.py: error: {line}\n"
