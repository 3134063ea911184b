"""Fine-tuning by real processes: adapters beside frozen weights, from a checkpoint to what PEFT loads.

tests/numerics/test_lora.py holds the arithmetic against PEFT.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from running import PATIENCE_S, LocalRun, Running, train_locally
from safetensors.torch import load_file, save_file

from swarmnet.cli.frame import run
from swarmnet.data.source import load_tokens
from swarmnet.manifest.file import load
from swarmnet.manifest.schema import Model
from swarmnet.model.decoder import StageModule
from swarmnet.model.frozen import FrozenWeight, at_rest
from swarmnet.model.huggingface.config import config_of
from swarmnet.testing.reference import run_reference

STEPS = 6
MODEL = Model(hidden_size=64, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)

IN_SHORT = (
    "training.sequence_length=16",
    "training.eval_every=0",
    "averaging.sync=overlap",
    "averaging.overlap_after=2",
    "optimizer.learning_rate=1e-2",
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a checkpoint and the manifest of a run that fine-tunes it; commands are typed there."""
    monkeypatch.chdir(tmp_path)
    module = StageModule(MODEL, range(MODEL.num_layers), first=True, last=True)
    module.reset(seed=1)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(config_of(MODEL, longest=16)))
    save_file(dict(module.state_dict()), tmp_path / "hf/model.safetensors")
    sets = [word for setting in IN_SHORT for word in ("--set", setting)]
    of_run = ["--data", "corpus:small", "--tokenizer", "bytes", "--stages", "2", "--steps", str(STEPS)]
    lora = ["--lora", "r=4,lora_alpha=8", "--base", "nf4"]
    assert run(["init", "run.toml", "--from", "hf", *of_run, *lora, *sets]) == 0
    return tmp_path


def test_killed_peers_move_no_bit_and_peft_loads_what_was_trained(here: Path) -> None:
    kills = ("--kill", "0@1", "--kill", "1@3", "--kill", "0@4")
    code, printed = train_locally("--manifest", "run.toml", "--out", "out", "--replicas", "2", *kills, "--verify")
    assert code == 0, printed
    found = LocalRun(here / "out", printed)
    assert found.losses == found.reference.losses and len(found.losses) == STEPS
    last = list(found.last_weights())
    assert last and all(torch.equal(value, weight) for _, value, weight in last)

    assert run(["export", "out/run.toml", "adapter"]) == 0
    assert run(["export", "out/run.toml", "merged", "--merged"]) == 0
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained("hf")
    with torch.no_grad():  # what the frozen weights are, once they have rested in 4 bits
        for name, weight in base.named_parameters():
            weight.copy_(FrozenWeight(at_rest(name, weight.detach(), "nf4")).get(torch.float32))
    expected = PeftModel.from_pretrained(base, "adapter").merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained("merged").state_dict()
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())


def test_a_peer_without_the_checkpoint_fetches_the_frozen_weights(
    here: Path, start: Callable[..., Running], capsys: pytest.CaptureFixture[str]
) -> None:
    alone = ("--device", "cpu", "--no-restart")
    having = start("having", "peer", "--manifest", str(here / "run.toml"), "--stage", "0,1", *alone)
    (link,) = having.says("listening")["links"]
    stranger = start("stranger", "join", link, "--stage", "1", *alone)
    synced = stranger.says("synced", stage=1)
    assert synced["version"] == 0
    address = having.says("listening")["dht"][0]
    trainer = start("trainer", "trainer", "--manifest", str(here / "run.toml"), "--bootstrap", address)
    for each, stage in ((having, 0), (having, 1), (stranger, 1)):
        each.says("finished", stage=stage, version=STEPS)
    assert trainer.process.wait(timeout=PATIENCE_S) == 0
    capsys.readouterr()
    assert run(["export", link, "out"]) == 0, capsys.readouterr().err
    expected = run_reference(load("run.toml"), load_tokens("corpus:small")).weights
    found = load_file("out/adapter_model.safetensors")
    assert {f"base_model.model.{name}" for name in expected} == found.keys()
    assert all(torch.equal(found[f"base_model.model.{name}"], tensor) for name, tensor in expected.items())
