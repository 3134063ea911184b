"""Lies about work beside honest members, as `benchmarks/audit.py` has it, which prints when each is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from further import further

from tests.benchmark_modules import BENCHMARKS, load

audit = load("audit")

import audit_baselines  # noqa: E402  # beside it
import audit_lies  # noqa: E402
import audit_model  # noqa: E402

from swarmnet.manifest.schema import Audits  # noqa: E402
from swarmnet.testing.plan import Plan  # noqa: E402
from swarmnet.testing.virtual_swarm import VirtualSwarm  # noqa: E402

SHORT = {"microbatches": 20, "steps": 12, "q": 0.4}
RARE: dict[str, dict[str, float]] = {
    "reducer": {"microbatches": 10, "steps": 16},
    "weights": {"q": 0.6},
    "tenth": {"q": 0.6},
    "adaptive": {"q": 0.1, "steps": 50},
}
"""Where it takes more than that to show a lie, or less to steer clear of it."""

WITHOUT_HARM = ("reducer", "auditor", "accuser")
"""These change nothing of what is learnt: their sums are refused, and their findings outvoted."""


def test_honest_members_learn_what_one_process_does() -> None:
    swarm = VirtualSwarm(Plan(microbatches=8, steps=12, trainers=2), 1, audit_model.Regression)
    swarm.run()
    assert all(
        engine.weights == swarm.reference.weights[stage]
        for node in swarm.honest
        for stage, engine in node.engines.items()
    )
    before, after = (
        audit_model.held_out_loss(weights) for weights in (swarm.reference.history[0], swarm.reference.weights)
    )
    assert after < 0.8 * before


def test_what_is_learnt_is_the_truth() -> None:
    reference = VirtualSwarm(Plan(microbatches=50, steps=100), 1, audit_model.Regression).reference
    found = [audit_model.weights_in(weights) for weights in reference.weights]
    off = [abs(a - b) for stage in range(2) for a, b in zip(found[stage], audit_model.truth(stage), strict=True)]
    assert max(off) < audit_model.ONE / 4
    # The noise is about 1.
    assert 0.8 < audit_model.held_out_loss(reference.weights) < 1.3


def test_honest_members_are_named_by_nobody() -> None:
    row = audit.measure("", **SHORT)
    assert row.loss_ratio == 1.0 and row.steps == SHORT["steps"] and not row.broken
    assert row.false_bans == row.accused == 0 and not row.caught


ALIKE = ("scaled", "random", "stale", "tenth", "accuser")
"""Found as others of the table are."""


@pytest.mark.parametrize("name", [*(each for each in audit_lies.LIES if each not in ALIKE), *further(*ALIKE)])
def test_whoever_lies_is_named_and_nobody_else(name: str) -> None:
    size: dict[str, Any] = SHORT | RARE.get(name, {})
    row = audit.measure(name, **size)
    assert row.microbatches_until is not None and len(row.named_for) == row.liars
    assert row.false_bans == 0 and not row.broken and row.steps == size["steps"]
    assert (row.loss_ratio == 1.0) == (name in WITHOUT_HARM)
    # Who lies about its own work is looked at in vain by nobody; who lies about others' says so of them.
    assert (row.accused > 0) == (row.found_by == "jury")
    if row.found_by == "sum":
        assert (row.microbatches_until, row.lies) == (1, 1), "its first false part is refused, and it with it"


@pytest.mark.parametrize("which", ["microbatches", "contributions"])
def test_a_lie_about_weight_gradients_alone_shows_in_a_whole_contribution(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = Audits(**{"microbatches": 0.0, "contributions": 0.0, which: 0.6})
    monkeypatch.setattr(audit, "rates", lambda row: rates)
    row = audit.measure("weights", **SHORT)
    assert row.false_bans == 0 and row.overhead > 0.3 and row.lies >= row.own > 0
    assert (row.microbatches_until is not None) == (which == "contributions")


def test_the_bound_of_a_row_is_the_one_of_the_formula() -> None:
    row = audit.Row("sign-flip", "", "microbatch", 1, 1, 100, 0.01, 1.0, 461)
    assert audit.chance(row, 461) == pytest.approx(0.99, abs=0.005)
    alone = audit.Row("weights", "", "contribution", 1, 1, 5, 0.01, 1.0, 461)
    assert audit.chance(alone, 461) == pytest.approx(0.99, abs=0.001), "one microbatch a step"
    many = audit.Row("weights", "", "contribution", 1, 1, 100, 0.01, 1.0, 461)
    assert audit.chance(many, 461) < 0.25, "twenty a step"


def test_statistics_find_what_is_large_and_not_what_is_false() -> None:
    size = {"seed": 1, "microbatches": 60, "steps": 40}
    scaled, copied = (audit_baselines.sentinel(name, **size) for name in ("scaled", "lazy"))
    assert scaled.caught and copied.microbatches_until is None and copied.loss_ratio > 1.0


def test_validators_find_what_they_compute_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_baselines, "RATE", 0.2)
    size = {"seed": 1, "microbatches": 60, "steps": 40}
    assert audit_baselines.btard("sign-flip", **size).microbatches_until is not None
    assert audit_baselines.btard("reducer", **size).microbatches_until is not None
    assert audit_baselines.btard("", **size).false_bans == 0


def test_the_table_is_written(tmp_path: Path) -> None:
    words = ["--quick", "--rows", "reducer", "--processes", "1", "--json", str(tmp_path / "audit.json")]
    ran = subprocess.run([sys.executable, str(BENCHMARKS / "audit.py"), *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    told = json.loads((tmp_path / "audit.json").read_text())
    (row,) = told["rows"]
    assert {"attack", "caught", "microbatches_until", "false_bans", "loss_ratio", "overhead"} < row.keys()
    assert [each["attack"] for each in told["sentinel"] + told["btard"]] == ["reducer"] * 2


@pytest.mark.parametrize("words", [["--rows", "nonsense"], ["--parts", "all"], ["--seeds", "0"]])
def test_what_the_benchmark_does_not_know_it_refuses_in_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["audit.py", *words])
    with pytest.raises(SystemExit) as ended:
        audit.main()
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1


def test_the_chance_of_being_named() -> None:
    rates = {"microbatches": 0.01, "contributions": 0.0, "members": 10}
    assert audit.chance_named(460.6, false=1.0, per_step=8, liars=1, **rates) == pytest.approx(0.99, abs=3e-4)
    assert audit.chance_named(460.6, false=1.0, per_step=8, liars=5, **rates) == 0.0
    assert audit.chance_named(4606, false=0.1, per_step=8, liars=1, **rates) == pytest.approx(0.99, abs=3e-4)
    assert audit.chance_named(460.6, false=1.0, per_step=8, liars=2, **rates) < 0.985
    # Whom the liar's operator runs covers for nobody, but for its vote in the jury.
    assert audit.chance_named(460.6, false=1.0, per_step=8, liars=4, kin=4, **rates) == pytest.approx(0.99, abs=3e-4)
    assert audit.chance_named(460.6, false=1.0, per_step=8, liars=4, kin=2, **rates) < 0.975
    assert audit.chance_named(460.6, false=1.0, per_step=8, liars=5, kin=5, **rates) == 0.0
