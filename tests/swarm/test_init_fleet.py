"""What `init --fleet` writes is a run that trains."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from swarmnet.cli.frame import run
from swarmnet.manifest.file import load

FLEET = """
[[machines]]
name = "desk"
count = 3
device = "cpu"
host_gib = 8.0

[[machines]]
name = "slow"
device = "cpu"
tflops = 0.02
"""


def test_the_manifest_for_a_fleet_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fleet.toml").write_text(FLEET, encoding="utf-8")
    small = (
        "--set model.hidden_size=32 --set model.intermediate_size=64 --set model.num_layers=2 --set model.head_dim=8"
    )
    said = f"--steps 3 --stages 2 --set training.microbatches=4 --set training.eval_every=0 {small}"
    assert run(f"init run.toml --data corpus:small --fleet fleet.toml {said}".split()) == 0
    out = capfd.readouterr().out
    assert "for fleet.toml: 3 x desk, 1 x slow (*: chosen):" in out and "stage 0: " in out and "stage 1: " in out
    manifest = load("run.toml")
    assert manifest.cut.stages == 2 and manifest.training.total_steps == 3
    config = tomllib.loads(Path("run.desk.peer.toml").read_text("utf-8"))
    assert config["device"] == "cpu" and config["slots"] >= 1
    assert run(["local", "--manifest", "run.toml", "--replicas", "1", "--out", "trained"]) == 0
    assert "3" in capfd.readouterr().out
