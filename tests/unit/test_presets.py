"""Models by name: what `init` and `local` make of them, and that what `--help` says of memory is what `plan` finds."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmnet.cli.frame import run
from swarmnet.config import PeerConfig, toml
from swarmnet.config.check import check, layer
from swarmnet.errors import UsageError
from swarmnet.local import prepare as local_prepare
from swarmnet.local.options import LocalOptions
from swarmnet.local.prepare import choose, prepare
from swarmnet.manifest.file import change, load
from swarmnet.manifest.presets import HELP, PRESETS, preset_fields
from swarmnet.manifest.schema import Manifest
from swarmnet.peer import memory_fit
from swarmnet.peer.devices import choose_layout
from swarmnet.plan.memory import GIB, Setup
from swarmnet.ranks.layout import MeshLayout

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


PUBLISHED = {
    "SmolLM-135M": 134.5e6,
    "SmolLM-360M": 361.8e6,
    "Llama-3.2-1B": 1235.8e6,
    "Llama-3.2-3B": 3212.7e6,
    "Llama-3.1-8B": 8030.3e6,
}
"""Parameters, as the model cards have them."""


@pytest.fixture(autouse=True)
def corpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """corpus.txt, in the directory in which commands are typed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text(TEXT, encoding="utf-8")


def written(line: str) -> Manifest:
    """By `swarmnet init run.toml` with `line` behind it."""
    assert run(["init", "run.toml", "--force", "--data", "corpus.txt", *line.split()]) == 0
    return load("run.toml")


def named(name: str) -> Manifest:
    """A preset as its model was published: with the vocabulary of that, and sums as `init` chooses them."""
    fields = {**preset_fields(name), "model.vocab_size": PRESETS[name].vocabulary, "averaging.codec": "small"}
    layers = [layer(name, tuple(key.split(".")), value) for key, value in fields.items()]
    return change(Manifest(), layers, where=name)


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_typed_wins_over_a_preset(name: str) -> None:
    preset, manifest = PRESETS[name], written(f"--preset {name}")
    assert (manifest.cut.stages, manifest.training.total_steps) == (preset.stages, preset.steps)
    assert manifest.model.vocab_size == 256, "the tokenizer's"
    published = named(name).model.model_copy(update={"tie_embeddings": preset.like != "Llama-3.1-8B"})
    assert abs(published.num_parameters / PUBLISHED[preset.like] - 1) < 1e-3
    assert 2**19 <= manifest.training.total_tokens / preset.steps <= 2**21
    assert manifest.optimizer.warmup_steps == preset.warmup_steps <= preset.steps / 10
    manifest = written(f"--preset {name} --stages 3 --steps 50 --set model.num_heads=16 --set model.num_kv_heads=16")
    assert (manifest.cut.stages, manifest.training.total_steps, manifest.optimizer.warmup_steps) == (3, 50, 5)
    assert (manifest.model.num_heads, manifest.model.hidden_size) == (16, preset.model[0])


@pytest.mark.parametrize("name", PRESETS)
def test_the_memory_that_help_says_is_what_plan_finds(name: str) -> None:
    manifest = named(name)
    setup = Setup(manifest.specs, manifest.wire, MeshLayout(devices=("cuda:0",)), slots=1, audited=manifest.audited)
    last = manifest.cut.stages - 1
    most = max(memory_fit.judge(setup, [stage], None).need for stage in {0, last // 2, last})
    assert f"{name} ({PRESETS[name].like}: {last + 1} stages, of up to {most / GIB:.1f} GiB of a GPU)" in HELP


def test_without_a_preset_it_is_a_toy_and_init_says_so(capsys) -> None:
    usual = written("")
    assert (
        capsys.readouterr().out.count("the model is a toy of 1.2M parameters: --preset (100m, 350m, 1b, 3b, 8b)") == 1
    )
    assert written("--preset toy").model == usual.model and "is a toy" not in capsys.readouterr().out
    assert written("--set model.num_layers=8").model.num_layers == 8 and "is a toy" not in capsys.readouterr().out


def test_init_says_how_many_passes_it_makes_over_the_data(capsys) -> None:
    tokens = written("").data.num_tokens
    capsys.readouterr()
    written(f"--steps {5 * tokens} --set training.microbatches=1 --set training.microbatch_size=1 --json")
    said = capsys.readouterr()
    assert json.loads(said.out)["passes"] == 320 and json.loads(said.out)["parameters"] == 1_173_120
    assert f"the run reads {320 * tokens:,} tokens: 320 passes over the data\nwarning: more than 4 passes" in said.err
    written("--steps 1")
    assert "reads 2,048 tokens: 0." in (out := capsys.readouterr().out) and "warning" not in out


def test_local_takes_a_preset_that_fits(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(LocalOptions(preset="350m", stages=5, steps=40, set=("model.num_layers=6",)))
    assert (chosen.model.hidden_size, chosen.model.num_layers, chosen.cut.stages) == (960, 6, 5)
    assert (chosen.training.microbatches, chosen.training.sequence_length, chosen.training.total_steps) == (8, 1024, 40)
    assert chosen.optimizer.warmup_steps == 4
    monkeypatch.setattr(local_prepare, "available_memory", lambda: 19 * GIB)
    assert run(["local", "--preset", "8b", "--data", "corpus.txt"]) == 2
    assert re.search(
        r"--preset 8b: 2 replicas of 16 stages together need \d+ GiB of memory or more, this machine has 19.0 GiB",
        capsys.readouterr().err,
    )
    toy = LocalOptions(preset="toy", data="corpus.txt", replicas=2)
    monkeypatch.setattr(memory_fit, "judge", lambda setup, stages, room: SimpleNamespace(need=3 * GIB))
    assert prepare(toy, Path("out")).manifest.model.num_heads == 8
    monkeypatch.setattr(local_prepare, "available_memory", lambda: 17 * GIB)
    words = (
        "--preset toy: 2 replicas of 3 stages together need 18.0 GiB of memory or more, this machine has 17.0 GiB free"
    )
    with pytest.raises(UsageError, match=f"^{words}: choose"):
        prepare(toy, Path("out"))


CONFIGS = sorted((ROOT / "peer_configs").glob("*.toml"))


def test_every_peer_config_fits_the_run_that_the_first_page_starts(capsys) -> None:
    init = next(line for line in TEXT.splitlines() if line.startswith("swarmnet init "))
    assert run([*shlex.split(init)[1:], "--force"]) == 0
    manifest = load("run.toml")
    assert manifest.model.num_heads == 8 and manifest.cut.stages == 4
    for path in CONFIGS:
        config = check(PeerConfig, toml.read(path), origin=lambda _, path=path: str(path))
        assert all(stage < manifest.cut.stages for stage in config.stages), path
        choose_layout(config.mesh, config.device, manifest, cuda=8)
    eight = next(line for line in TEXT.splitlines() if line.startswith("swarmnet peer ") and "--gpus" in line)
    mesh = PeerConfig().mesh.model_copy(update={"gpus": eight.split()[-1]})
    assert choose_layout(mesh, "cuda", manifest, cuda=8).label == "tp8"
    with pytest.raises(UsageError, match=r"num_heads = 9 .*Ranks that can: 1, 3"):
        choose_layout(mesh, "cuda", named("100m"), cuda=8)
