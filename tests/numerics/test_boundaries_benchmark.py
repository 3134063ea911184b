"""benchmarks/boundaries.py, short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_modules import printed_by


def test_codecs_at_boundaries_print_and_write_their_table(tmp_path: Path, one_thread: None) -> None:
    file = tmp_path / "rows.json"
    out = printed_by("boundaries", "--steps 2 --stages 3 --data corpus:small int8,nf4 fp32,fp32 --json", file)
    assert out.startswith("2 boundaries of width 64, 2 steps, seed 0") and "int8,nf4" in out
    plain, rounded = json.loads(file.read_text("utf-8"))["rows"]
    assert plain["pair"] == "fp32,fp32" and plain["losses"] != rounded["losses"]
    assert rounded["held_out"] == pytest.approx(plain["held_out"], rel=0.01)
