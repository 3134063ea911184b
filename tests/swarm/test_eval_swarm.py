"""`swarmnet eval` of a swarm of real processes: what its trainer measures, what its checkpoints say, whoever dies."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import PATIENCE_S, Running

from swarmnet.cli.frame import run
from swarmnet.cli.scores import Scores

STEPS = 3


@pytest.fixture
def processes() -> Iterator[list[Running]]:
    """Nothing outlives the test."""
    started: list[Running] = []
    yield started
    for each in started:
        each.process.kill()
    for each in started:
        each.process.wait()


def test_the_swarm_scores_what_its_trainer_and_its_checkpoints_do_and_a_killed_replica_does_not_show(
    tmp_path: Path, processes: list[Running], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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

    def start(name: str, *words: str) -> Running:
        processes.append(Running(tmp_path / name, *words))
        return processes[-1]

    def evaluated(*words: str) -> dict:
        capsys.readouterr()
        assert run(["eval", *words, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    first = start("first", "peer", "--manifest", str(tmp_path / "run.toml"), "--stage", "0,1", "--device", "cpu")
    heard = first.says("listening")
    (link,), address = heard["links"], heard["dht"][0]
    second = start("second", "join", link, "--stage", "0,1", "--device", "cpu", "--no-restart")
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
    assert (through["tokens"], through["versions"]) == (measured["num_tokens"], {str(STEPS): measured["num_tokens"]})
    assert not through["partial"] and through["microbatches"] == 2 < through["of_microbatches"]
    assert evaluated("run.toml", "--dir", "first", "--microbatches", "2")["loss"] == pytest.approx(
        through["loss"], abs=1e-6
    )

    Path("text.txt").write_text("Another text, which nobody has trained on.\n" * 40)
    so_far = Scores.so_far

    def impatient(scores: Scores, waiting: str = "") -> str:
        if scores.tally.num_microbatches == 3:
            signal.raise_signal(signal.SIGINT)
        return so_far(scores, waiting)

    monkeypatch.setattr(Scores, "so_far", impatient)
    capsys.readouterr()
    try:
        assert run(["eval", "run.toml", "--bootstrap", address, "--data", "text.txt", "--json"]) == 130
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the first Ctrl+C leaves the system's own
    partial = json.loads(capsys.readouterr().out)
    assert partial["partial"] and 3 <= partial["microbatches"] < partial["of_microbatches"]
    assert partial["loss"] > 0.0

    def deadly(scores: Scores, waiting: str = "") -> str:
        if scores.tally.num_microbatches == 3:
            second.process.kill()
        return so_far(scores, waiting)

    monkeypatch.setattr(Scores, "so_far", deadly)
    killed = evaluated("run.toml", "--bootstrap", address, "--data", "text.txt")
    assert second.process.wait(timeout=PATIENCE_S) == -9
    monkeypatch.setattr(Scores, "so_far", so_far)
    whole = evaluated("run.toml", "--dir", "first", "--data", "text.txt")
    assert killed["microbatches"] == killed["of_microbatches"] == whole["microbatches"] > 20
    assert killed["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    assert killed["bits_per_byte"] == pytest.approx(whole["bits_per_byte"], abs=1e-6)
