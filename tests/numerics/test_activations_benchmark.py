"""benchmarks/activations.py: what it prints has the order that docs/plan.md tells."""

from __future__ import annotations

import torch

from tests.benchmark_modules import load

benchmark = load("activations")


def test_policies_keep_what_the_page_says() -> None:
    rows = {(row["policy"], row["compute"]): row for row in benchmark.activations(4, 64, 256, 1, torch.device("cpu"))}
    kept = {key: row["forward"] for key, row in rows.items()}
    assert kept["save", "fp32"] == 1.0 and 0.5 < kept["save", "bf16"] < 0.7
    assert 0.4 < kept["selective", "fp32"] < 0.7 and kept["recompute_layers", "fp32"] < 0.12
    assert kept["recompute", "fp32"] < 0.01
    assert rows["recompute_layers", "fp32"]["peak"] < 0.7 and rows["recompute", "fp32"]["peak"] < 1.15


def test_8_bit_moments_are_a_quarter_and_round_less_than_bitsandbytes() -> None:
    assert benchmark.moments(1, torch.device("cpu"))["bytes"] < 0.3
    found = benchmark.rounding(1 << 16)
    assert found["off"] < 0.025 and found["off"] < found["bitsandbytes_off"]
