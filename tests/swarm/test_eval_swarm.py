"""`swarmnet eval` of a swarm of real processes: what its trainer measures, and what its checkpoints say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from running import PATIENCE_S, Running

from swarmnet.cli.frame import run

STEPS = 3


def test_a_version_of_the_swarm_scores_what_its_trainer_and_its_checkpoints_do(
    tmp_path: Path, start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        run(
            [
                "init",
                "run.toml",
                "--data",
                "corpus:small",
                "--stages",
                "2",
                "--steps",
                str(STEPS),
                *(
                    word
                    for setting in (
                        "model.num_layers=2",
                        "model.hidden_size=32",
                        "model.intermediate_size=48",
                        "model.num_heads=2",
                        "model.num_kv_heads=1",
                        "model.head_dim=16",
                        "training.sequence_length=16",
                        "training.microbatch_size=2",
                        "training.microbatches=4",
                    )
                    for word in ("--set", setting)
                ),
            ]
        )
        == 0
    )

    def evaluated(*words: str) -> dict:
        capsys.readouterr()
        assert run(["eval", *words, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    alone = ("--stage", "0,1", "--device", "cpu", "--no-restart")
    first = start("first", "peer", "--manifest", str(tmp_path / "run.toml"), *alone)
    heard = first.says("listening")
    (link,), address = heard["links"], heard["dht"][0]
    second = start("second", "join", link, *alone)
    for stage in (0, 1):
        second.says("synced", stage=stage)
    trainer = start("trainer", "trainer", "--manifest", str(tmp_path / "run.toml"), "--bootstrap", address)
    for each in (first, second):
        for stage in (0, 1):
            each.says("finished", stage=stage, version=STEPS)
    measured = trainer.says("evaluated", step=STEPS)
    assert trainer.process.wait(timeout=PATIENCE_S) == 0

    through = evaluated(link, "--microbatches", "2")
    assert through["loss"] == pytest.approx(measured["loss"], abs=1e-6)
    assert (through["tokens"], through["version"]) == (measured["num_tokens"], STEPS)
    assert not through["partial"] and through["microbatches"] == 2 < through["of_microbatches"]
    on_disk = evaluated("run.toml", "--dir", "first", "--microbatches", "2")
    assert on_disk["loss"] == pytest.approx(through["loss"], abs=1e-6)

    second.process.kill()
    Path("text.txt").write_text("Another text, which nobody has trained on.\n" * 40)
    fetched = evaluated("run.toml", "--bootstrap", address, "--data", "text.txt")
    assert fetched == evaluated("run.toml", "--dir", "first", "--data", "text.txt")
