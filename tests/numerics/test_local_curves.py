"""benchmarks/local_sync.py, short: every setting trains, and sends as much less as its exchanges are rarer."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_modules import load, printed_by

from swarmnet.data.source import load_tokens

STEPS = 24


def local_sync() -> ModuleType:
    return load("local_sync")


@cache
def found(partners: str, fragments: int = 1, codec: str = "fp32") -> dict:
    setting = local_sync().Setting(
        "test", partners=partners, inner_steps=8, fragments=fragments, codec=codec, outer_warmup_steps=12
    )
    row: dict = local_sync().train(setting, load_tokens("corpus:small"), steps=STEPS, replicas=4, seed=0)
    return row


@pytest.mark.parametrize(
    ("partners", "fragments", "codec", "fewer"),
    [
        ("all", 1, "fp32", 8),
        ("all", 2, "fp32", 6),
        ("all", 1, "int8", 31),
        ("all", 1, "sparse:0.05", 45),
        ("pairs", 1, "fp32", 12),
    ],
)
def test_it_learns_nearly_as_fast_and_sends_far_less(partners: str, fragments: int, codec: str, fewer: float) -> None:
    row, exact = found(partners, fragments, codec), found("")
    assert row["held_out"] < 1.2 * exact["held_out"] < 0.95 * exact["losses"][0]
    assert exact["bytes"] / row["bytes"] == pytest.approx(fewer, rel=0.15)


def test_one_replica_that_meets_itself_is_exact() -> None:
    module, tokens = local_sync(), load_tokens("corpus:small")
    alone = replace(module.SETTINGS[1], outer_learning_rate=1.0, outer_momentum=0.0, inner_steps=2, codec="fp32")
    one, other = (module.train(each, tokens, steps=6, replicas=1, seed=0) for each in (alone, module.SETTINGS[0]))
    assert one["losses"] == pytest.approx(other["losses"], abs=1e-4)


def test_it_prints_and_writes_its_table(tmp_path: Path, one_thread: None) -> None:
    file = tmp_path / "rows.json"
    line = "--steps 3 --seeds 1 --only 'diloco, int8' --set inner_steps=2 --data corpus:small --json"
    out = printed_by("local_sync", line, file)
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["exact", "diloco, int8"] and rows[1]["inner_steps"] == 2
    assert {"loss_ratio", "worst_loss_ratio", "fewer_bytes"} <= rows[1].keys() and "misses" in out
