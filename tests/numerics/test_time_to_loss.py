"""benchmarks/time_to_loss.py, a few steps of it: boundaries round where stages meet, and the tables are written."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from benchmark_modules import load, printed_by

from swarmnet.model.decoder import StageModule

benchmark = load("time_to_loss")


def test_boundaries_round_between_layers_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = []
    rounded = benchmark.boundaries.rounded
    monkeypatch.setattr(benchmark.boundaries, "rounded", lambda x, codec: passed.append(codec) or rounded(x, codec))
    module = StageModule(benchmark.MODEL, range(benchmark.MODEL.num_layers), first=True, last=True)
    module.reset(seed=0)
    ids = torch.arange(8).view(1, 8)
    plain = module(ids)
    for codec, equal in (("fp32", True), ("int8", False)):
        passed.clear()
        with benchmark.coded(codec):
            logits = module(ids)
            logits.sum().backward()
        assert passed == [codec] * 6, "three boundaries, there and back"
        assert torch.equal(logits, plain) is equal
    assert torch.equal(module(ids), plain), "outside, nothing is rounded"


def test_steps_to_a_loss_lie_between_evaluations() -> None:
    assert benchmark.steps_to([(0, 4.0), (10, 3.0), (20, 2.0)], 2.5) == 15.0
    assert benchmark.steps_to([(0, 4.0), (10, 3.0)], 3.0) == 10.0
    assert benchmark.steps_to([(0, 4.0), (10, 3.0)], 2.5) is None


def test_overlap_begins_with_exact_steps_and_who_never_gets_there_has_no_time() -> None:
    found = dict.fromkeys(benchmark.MODES, 10.0) | {"overlap": 1.0}
    assert benchmark.whole_s("overlap", 60, found) == 600.0
    assert benchmark.whole_s("overlap", 150, found) == 1050.0
    steps: dict[str, float | None] = dict.fromkeys(benchmark.MODES, 50.0)
    line = benchmark.compared(found, {"all": steps, "low": steps | {"local": None, "1F1B": 25.0}})
    assert line["exact"]["all_times"] == 1.0 and line["1F1B"]["low_times"] == 2.0
    assert line["local"]["low_s"] is None and line["local"]["low_times"] is None


def test_it_prints_and_writes_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    for name in ("EVERY", "EVALS", "SEQUENCES"):
        monkeypatch.setattr(benchmark, name, 1)
    file = tmp_path / "found.json"
    out = printed_by("time_to_loss", "--steps 2 --quick --data corpus:small --json", file)
    found = json.loads(file.read_text())
    assert "not measured: the meter's model" in out
    assert [row["mode"] for row in found["rows"]] == list(benchmark.MODES) == list(found["steps"]["all"])
    assert {row["mode"]: row["all_times"] for row in found["rows"]}[benchmark.SWARM] == 1.0
    assert all(0 < count <= 2 for count in found["steps"]["all"].values())
    assert found["losses"]["low"] <= found["losses"]["all"]
    assert found["curves"]["1F1B"] == found["curves"][benchmark.SWARM] != found["curves"]["exact"]
    assert 181_487 < found["meter"]["bytes_alone_s"] < 293_889


def test_lines_are_read_or_refused() -> None:
    assert benchmark.lines_of("200x50,50x200") == [(200, 50), (50, 200)]
    for text in ("", "200", "200x0", "200x50,", "axb"):
        with pytest.raises(argparse.ArgumentTypeError, match="say 200x50"):
            benchmark.lines_of(text)
