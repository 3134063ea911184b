"""Two of eight replicas lie about their gradients: training goes on under centred clip, and does not without it."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_modules import load, printed_by
from further import further

STEPS = 80
LIARS = {"replica0", "replica1"}


def robust() -> ModuleType:
    """benchmarks/robust.py: the eight replicas and their attackers."""
    return load("robust")


@cache
def clean() -> float:
    loss: float = robust().train("sum", None, steps=STEPS)[0]
    return loss


def test_the_clean_run_learns() -> None:
    assert clean() < 0.35 * math.log(61)


@pytest.mark.parametrize("attack", ["flip_x10", *further("scaled", "random")])
def test_with_centered_clip_the_loss_stays_and_the_liars_are_named(attack: str) -> None:
    loss, clipped = robust().train("centered_clip", attack, steps=STEPS)
    assert loss / clean() < 1.02
    honest = max((count for peer, count in clipped.items() if peer not in LIARS), default=0)
    assert min(clipped.get(liar, 0) for liar in LIARS) > 10 * honest


@pytest.mark.long
def test_gradients_with_the_sign_turned_are_borne_too() -> None:
    """The plain sum bears them as well: the mean points the same way, half as long, and Adam does not mind lengths."""
    assert robust().train("centered_clip", "sign_flip", steps=STEPS)[0] / clean() < 1.02


@pytest.mark.parametrize("attack", ["flip_x10", *further("scaled", "random")])
def test_without_it_the_loss_does_not_stay(attack: str) -> None:
    loss, clipped = robust().train("sum", attack, steps=STEPS)
    assert loss / clean() > 1.02
    assert not clipped, "the plain sum believes everybody"


def test_the_benchmark_prints_its_table(tmp_path: Path, one_thread: None) -> None:
    file = tmp_path / "figures.json"
    line = "--steps 3 --seeds 1 --reducer centered_clip --attack collude --json"
    out = printed_by("robust", line, file)
    assert "collude" in out and "centered_clip" in out and file.exists()
