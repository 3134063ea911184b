"""A swarm of real processes that begins with a checkpoint: one peer has its files, a stranger with a link has not.

What it has trained is fetched from it while it is up. tests/numerics has transformers load such files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from running import PATIENCE_S, Running
from safetensors.torch import load_file, save_file

from swarmnet.cli.frame import run
from swarmnet.data.source import load_tokens
from swarmnet.manifest.file import load
from swarmnet.manifest.schema import Model
from swarmnet.model.decoder import StageModule
from swarmnet.model.huggingface.config import config_of
from swarmnet.peer import collect_remote
from swarmnet.testing.reference import run_reference

STEPS = 4


def test_one_peer_has_the_files_and_everybody_trains(
    tmp_path: Path, start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Model(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
    module = StageModule(model, range(2), first=True, last=True)
    module.reset(seed=1)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(config_of(model, longest=16)))
    save_file(dict(module.state_dict()), tmp_path / "hf/model.safetensors")
    assert (
        run(
            [
                "init",
                "run.toml",
                "--from",
                "hf",
                "--data",
                "corpus:small",
                "--tokenizer",
                "bytes",
                "--stages",
                "2",
                "--steps",
                str(STEPS),
                "--set",
                "training.sequence_length=16",
                "--set",
                "training.eval_every=0",
                "--set",
                "protocol.long_silence_s=1800",
            ]
        )
        == 0
    )  # nothing moves before the trainer comes

    alone = ("--device", "cpu", "--no-restart")
    having = start("having", "peer", "--manifest", str(tmp_path / "run.toml"), "--stage", "0,1", *alone)
    having.says("synced", stage=1, how="seed")
    (link,) = having.says("listening")["links"]
    stranger = start("stranger", "join", link, "--stage", "1", *alone)
    synced = stranger.says("synced", stage=1)
    assert (synced["how"], synced["version"]) == ("snapshot", 0)

    address = having.says("listening")["dht"][0]
    trainer = start("trainer", "trainer", "--manifest", str(tmp_path / "run.toml"), "--bootstrap", address)
    for each, stage in ((having, 0), (having, 1), (stranger, 1)):
        each.says("finished", stage=stage, version=STEPS)
    assert trainer.process.wait(timeout=PATIENCE_S) == 0

    capsys.readouterr()
    assert run(["export", link, "out"]) == 0, capsys.readouterr().err
    assert f"the weights of step {STEPS} of {STEPS}" in capsys.readouterr().out
    expected = run_reference(load("run.toml"), load_tokens("corpus:small")).weights
    found = {name: tensor for file in Path("out").glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    capsys.readouterr()
    monkeypatch.setattr(collect_remote, "LOOK_S", 0.5)
    assert run(["export", link, "other", "--step", "3"]) == 2
    err = capsys.readouterr().err
    assert "step 3 does not have a checkpoint of every stage" in err and err.count("\n") == 1
    assert not (tmp_path / "other").exists()
