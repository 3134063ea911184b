"""benchmarks/codec_curves.py, short: replicas agree to the bit, and a good codec does not show in the first steps."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_modules import load, printed_by

from swarmnet.data.source import load_tokens

STEPS = 16


def curves() -> ModuleType:
    return load("codec_curves")


@cache
def row(codec: str) -> dict:
    return curves().train(codec, load_tokens("corpus:small"), steps=STEPS, replicas=2)


@pytest.mark.parametrize("codec", [pytest.param("fp16", marks=pytest.mark.long), "int8", "auto"])
def test_the_loss_stays_within_1_percent_of_fp32(codec: str) -> None:
    found = dict(row(codec))
    curves().compare(found, row("fp32") | {"bytes": row("fp32")["bytes"]})
    assert abs(found["held_out_ratio"] - 1) < 0.01
    assert found["bytes_ratio"] == pytest.approx({"fp16": 0.5, "int8": 0.254, "auto": 0.305}[codec], abs=0.01)


def test_it_prints_and_writes_its_table(tmp_path: Path, one_thread: None) -> None:
    file = tmp_path / "rows.json"
    line = "--steps 2 --replicas 3 --codec powersgd:4 --codec topk:0.05 --data corpus:small --json"
    out = printed_by("codec_curves", line, file)
    assert "powersgd:4" in out and "topk:0.05" in out and file.exists()


def test_codecs_at_boundaries_print_and_write_their_table(tmp_path: Path, one_thread: None) -> None:
    file = tmp_path / "rows.json"
    out = printed_by("boundaries", "--steps 2 --stages 3 --data corpus:small int8,nf4 fp32,fp32 --json", file)
    assert out.startswith("2 boundaries of width 64, 2 steps, seed 0") and "int8,nf4" in out
    plain, rounded = json.loads(file.read_text("utf-8"))["rows"]
    assert plain["pair"] == "fp32,fp32" and plain["losses"] != rounded["losses"]
    assert rounded["held_out"] == pytest.approx(plain["held_out"], rel=0.01)
