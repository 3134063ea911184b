"""The benchmark book: its page is what the results say, every target leads somewhere, bad input is one line."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from benchmark_modules import BENCHMARKS, load

report = load("report")
ROOT = BENCHMARKS.parent

FIGURES: dict[str, Any] = {
    "worst": 0.5,
    "rows": [{"r": 2, "name": "a, b", "x": {"p": 1.0}}, {"r": 4, "name": "c", "x": {"p": 3.0}, "late": None}],
}


def result(figures: Any = FIGURES, *, busy: bool = False) -> dict[str, Any]:
    return report.stamp("python benchmarks/some.py", figures, 100.0 if busy else 0.0)


def target(**fields: Any) -> Any:
    return report.Target(**{"part": "9", "what": "it", "anchor": "plan", "benchmark": "some", **fields})


def row(one: Any, results: dict[str, Any] | None = None) -> Any:
    (found,) = report.rows_of([one], {"some": report.Benchmark(1)}, {"some": result()} if results is None else results)
    return found


def test_the_page_is_what_the_results_say() -> None:
    targets, benchmarks = report.read_targets()
    results = report.read_results()
    page = report.render(report.rows_of(targets, benchmarks, results), benchmarks, results)
    assert report.PAGE.read_text(encoding="utf-8") == page, "run python benchmarks/report.py"


def test_every_target_leads_to_a_file() -> None:
    targets, benchmarks = report.read_targets()
    assert {"A1", "A2", "A3", "A4", "1", "2", "3", "4", "5", "6", "8"} == {each.part for each in targets}
    for each in targets:
        for file in (word for word in each.test.split() if not word.startswith("--")):
            assert (ROOT / file).exists(), f"{each.what}: {file}"
    named = {each.benchmark for each in targets if each.benchmark}
    assert named == benchmarks.keys(), "a benchmark in no target, or a target's that is not told how to run"
    for name, benchmark in benchmarks.items():
        assert (BENCHMARKS / f"{benchmark.program or name}.py").exists(), name


def test_every_figure_that_a_result_should_have_is_there_or_marked() -> None:
    targets, _ = report.read_targets()
    results = report.read_results()
    assert results.keys() <= {each.benchmark for each in targets}
    for each in targets:
        if each.figure and each.benchmark in results and report.figure_of(each, results[each.benchmark]) is None:
            assert each.noted is not None or each.open, f"{each.what}: {each.figure}"


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("worst", [0.5]),
        ("rows[].r", [2, 4]),
        ("rows[r=4].x.p", [3.0]),
        ("rows[name=a, b;r=2].{r,x}", [2, {"p": 1.0}]),
        ("rows[r=8].r", []),
        ("nothing.here", []),
        ("rows.r", []),
    ],
)
def test_paths(path: str, values: list[Any]) -> None:
    assert report.picked(FIGURES, path) == values


def test_a_path_that_is_none_is_said() -> None:
    with pytest.raises(report.ReportError, match="is no path at"):
        report.picked(FIGURES, "rows[r=2]x")


def test_figures_are_taken_and_divided() -> None:
    several = target(figure="rows[].x.p")
    assert report.figure_of(target(figure="rows[].x.p", take="max"), result()) == 3.0
    assert report.figure_of(target(figure="rows[r=4].x.p", over="worst"), result()) == 6.0
    assert report.figure_of(target(figure="rows[r=4].late", take="max"), result()) is None
    with pytest.raises(report.ReportError, match="is 2 numbers: say `take`"):
        report.figure_of(several, result())
    with pytest.raises(report.ReportError, match="is no number"):
        report.figure_of(target(figure="rows[r=4].name"), result())


def test_what_was_measured_what_was_noted_and_what_was_not() -> None:
    noted = {"noted": 7.0, "noted_on": datetime.date(2026, 1, 2)}
    measured = row(target(figure="worst", at_most=0.5, **noted))
    assert (measured.state, measured.value) == ("met", 0.5) and measured.said.startswith("**0.5**")
    assert row(target(figure="worst", at_least=0.51)).state == "missed"
    assert row(target(figure="worst", near=(1.0, 0.5))).state == "met"
    assert row(target(figure="worst")).state == "stated"
    old = row(target(figure="worst", at_most=0.5, **noted), {})
    assert old.state == "missed, noted" and "noted 2026-01-02" in old.said and old.value is None
    assert row(target(figure="worst", open="no time"), {}).state == "not measured"
    assert row(target(benchmark="", test="tests/x.py")).command == "pytest tests/x.py"
    assert "busy" in row(target(figure="worst", at_most=1.0), {"some": result(busy=True)}).said
    with pytest.raises(report.ReportError, match="has no figure"):
        row(target(figure="gone"))


def test_long_lists_are_left_out_of_what_is_kept() -> None:
    kept = report.small(
        {"curve": [0.1] * 65, "pairs": [[1, 2.0]] * 65, "few": [1] * 64, "rows": [{"losses": [1] * 99}]}
    )
    assert kept == {"few": [1] * 64, "rows": [{}]}


def ended(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with mock.patch.object(sys, "argv", ["report.py", *shlex.split(line)]):
        code = report.main()
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[target]\n", "targets.toml: "),
        ("[[target]]\npart = '1'\n", "targets.toml, target 1 (without `what`): part, what and anchor must be there"),
        ("[[target]]\npart='1'\nwhat='x'\nanchor='y'\nhope=1\n", "target 1 (x): no such key: hope"),
        ("[[target]]\npart='1'\nwhat='x'\nanchor='y'\n", "target 1 (x): say where the figure is"),
        ("[[target]]\npart='1'\nwhat='x'\nanchor='y'\nfigure='a'\ntake='most'\n", "take = 'most'; choose from"),
        ("[[target]]\npart='1'\nwhat='x'\nanchor='y'\nnoted=1\n", "`noted` and `noted_on` come together"),
        ("[[target]]\npart='1'\nwhat='x'\nanchor='y'\nfigure='a'\nbenchmark='b'\n", "no [benchmark.b]"),
        ("[benchmark.b]\nhours = 1\n", "targets.toml: "),
    ],
)
def test_a_bad_table_is_one_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "targets.toml"
    file.write_text(text)
    monkeypatch.setattr(report.read_targets, "__defaults__", (file,))
    code, told = ended("", capsys)
    assert code == 2 and told.startswith("report: ") and said in told and told.count("\n") == 1


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"date": 1})])
def test_a_bad_result_is_one_line(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.json").write_text(text)
    monkeypatch.setattr(report.read_results, "__defaults__", (tmp_path,))
    code, told = ended("", capsys)
    assert code == 2 and "lines.json: " in told and "--run lines" in told and told.count("\n") == 1


def test_an_unknown_benchmark_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = ended("--run linse", capsys)
    assert (code, told) == (2, "report: no such benchmark: linse; --list names them\n")


def test_a_benchmark_is_run_and_stamped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    report.run("lines", report.Benchmark(1))
    kept = json.loads((tmp_path / "lines.json").read_text())
    assert kept["command"] == "python benchmarks/lines.py" and kept["figures"]["total"]["code"] > 1000
    with pytest.raises(report.ReportError, match="lines ended with 2 and wrote no result"):
        report.run("lines", report.Benchmark(1, args="--no-such-flag"))


def test_a_result_from_elsewhere_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "found").write_text("[1, 2]")
    report.take(f"lines={tmp_path / 'found'}", {"lines": report.Benchmark(1, args="--x")})
    kept = json.loads((tmp_path / "lines.json").read_text())
    assert kept["figures"] == {"rows": [1, 2]} and kept["command"] == "python benchmarks/lines.py --x"
    for text, said in (("linse=x", "say NAME=FILE"), ("lines", "say NAME=FILE"), ("lines=/nowhere", "run lines again")):
        code, told = ended(f"--take {text}", capsys)
        assert code == 2 and said in told and told.count("\n") == 1
