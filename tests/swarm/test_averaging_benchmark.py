"""The averaging benchmark runs from end to end: real processes, gRPC and TLS, gloo beside them; a member is killed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "averaging.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    return importlib.import_module("averaging")


def run(tmp_path: Path, *arguments: str) -> dict[str, list[dict[str, float]]]:
    result = tmp_path / "averaging.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--no-hivemind", "--json", str(result), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(result.read_text()))


def test_rounds_are_right_and_send_no_more_than_they_must(tmp_path: Path) -> None:
    rows = run(tmp_path, "--peers", "3", "--parameters", "300k", "--codec", "small,int64", "--turns", "1")["rows"]
    assert [row["codec"] for row in rows] == ["small", "int64"]
    assert all(row["vs_gloo"] > 0 and 0.0 < row["check_share"] < 1.0 for row in rows)
    assert 0.5 < rows[0]["bytes_vs_bound"] < 1.3 and rows[1]["bytes_vs_bound"] < 1.05
    assert all(row["bytes_vs_bound"] <= row["bytes_vs_bound_most"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--codec foo", "argument --codec: foo: codecs are int64, small"),
        ("--codec small,", "argument --codec: small,: codecs are"),
        ("--peers 1", "argument --peers: 1: write how many peers average, 2 to 64, with commas"),
        ("--peers 2,x", "argument --peers: 2,x: write how many peers"),
        ("--parameters 10G", "argument --parameters: 10G: write numbers with commas, such as 250k,10M"),
        ("--parameters 0", "argument --parameters: 0: vectors have 1000 to 1000000000 parameters"),
        ("--links 2", "argument --links: 2: write PEERSxMBIT with commas"),
        ("--links 1x10", "argument --links: 1x10: write how many peers"),
        ("--uneven 4x0", "argument --uneven: 4x0: write PEERSxRATIO with commas, such as 4x5"),
        ("--uneven 4x5,", "argument --uneven: 4x5,: write PEERSxRATIO"),
        ("--turns 0", "argument --turns: 0: must be a whole number above 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    benchmark: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    line: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["averaging.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    assert said.err.startswith("averaging.py: error: ") and line in said.err and said.err.count("\n") == 1


def test_a_cut_that_is_askew_shows_in_the_most_that_a_peer_sent(benchmark: ModuleType) -> None:
    times, even = {"phase_s": 1.0, "whole_s": 1.0, "cpu_s": 1.0}, 50 * benchmark.ELEMENT_BYTES["int64"]
    turns = [
        {**times, "each": [{"sent": sent, "checked_s": 0.0, "summed_at": 1.0, "ended_at": 1.0} for sent in sizes]}
        for sizes in ((even, even), (1.75 * even, 0.25 * even))
    ]
    row = benchmark.summary("int64", "fp32", 2, 50, {"ours": turns, "gloo": [], "hivemind": []})
    assert (row["bytes_vs_bound"], row["bytes_vs_bound_most"]) == (1.0, 1.75)


def test_the_check_has_the_longest_wait_and_what_is_left_once_all_have_their_sum(benchmark: ModuleType) -> None:
    turns = [
        {"phase_s": 2.0, "each": [{"checked_s": s, "summed_at": 2.0 - s, "ended_at": 2.0} for s in each]}
        for each in ((0.1, 0.5), (0.3, 0.2))
    ]
    assert benchmark.check_of(turns) == {
        "check_s": 0.4,
        "check_share": 0.2,
        "check_alone_s": 0.15,
        "check_alone_share": 0.075,
    }


def test_uneven_lines_cost_no_byte_more_and_every_exchange_comes_to_its_end(tmp_path: Path) -> None:
    (row,) = run(tmp_path, "--uneven", "4x5", "--parameters", "1M")["uneven"]
    assert row["exchanges_finished"] == row["exchanges_begun"] == 24
    assert 0.95 < row["bytes_vs_bound"] < 1.1
    assert row["cut_s"] < row["even_s"]


@pytest.mark.long
def test_a_member_killed_in_a_round_costs_the_others_a_moment(tmp_path: Path) -> None:
    (found,) = run(tmp_path, "--kill", "--peers", "3", "--parameters", "20M", "--codec", "int64")["kill"]
    assert found["ours"] is not None
