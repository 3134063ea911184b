"""Logits of checkpoints that came in, and of checkpoints that went out, are transformers' own."""

from __future__ import annotations

import json
from pathlib import Path

import hf_models
import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Cut, Model
from swarmnet.model.cut import cut_layers
from swarmnet.model.decoder import StageModule
from swarmnet.model.huggingface.checkpoint import INDEX, Checkpoint, digest, stage_shapes
from swarmnet.model.huggingface.config import read_config
from swarmnet.model.huggingface.write import write_model

IDS = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(0))


def untied(model: Model, stages: int) -> Model:
    return model.model_copy(update={"tie_embeddings": model.tie_embeddings and stages == 1})


def computed(folder: Path, stages: int) -> tuple[Tensor, list[dict[str, Tensor]], Model]:
    """Our logits, by stages that read their own tensors; those tensors; the model."""
    model = untied(read_config(folder).model, stages)
    checkpoint, x, read = Checkpoint(folder), IDS, []
    shapes = stage_shapes(model, Cut(stages=stages), IDS.shape[1])
    for stage, layers in enumerate(cut_layers(model, Cut(stages=stages), IDS.shape[1])):
        module = StageModule(model, layers, first=stage == 0, last=stage == stages - 1)
        read.append(checkpoint.read(shapes[stage]))
        module.load_state_dict(read[-1], strict=not model.tie_embeddings)
        with torch.no_grad():
            x = module(x)
    assert not checkpoint.beyond(shapes)
    return x, read, model


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("case", hf_models.CASES)
def test_in_and_out_again(case: str, stages: int, tmp_path: Path) -> None:
    expected = hf_models.logits(hf_models.save(case, tmp_path / "in"), IDS)
    found, tensors, model = computed(tmp_path / "in", stages)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    changed = [{name: 0.9 * tensor for name, tensor in stage.items()} for stage in tensors]  # as if it had trained
    write_model(tmp_path / "out", model, changed, longest=40, shard_bytes=20_000)
    again, reread, same = computed(tmp_path / "out", stages)
    assert same == model
    assert [digest(stage) for stage in reread] == [digest(stage) for stage in changed]
    torch.testing.assert_close(hf_models.logits(hf_models.loaded(tmp_path / "out"), IDS), again, rtol=0, atol=1e-5)
    assert (again - found).abs().max() > 1e-3


@pytest.mark.parametrize("case", ["mistral-window", "qwen2-window", "qwen3-window"])
def test_what_began_with_a_sliding_window_has_it_again(case: str, tmp_path: Path) -> None:
    ids = torch.randint(0, 61, (2, 60), generator=torch.Generator().manual_seed(0))  # longer than the window of 48
    expected = hf_models.logits(hf_models.save(case, tmp_path / "in"), ids)
    _, tensors, model = computed(tmp_path / "in", 1)
    write_model(tmp_path / "out", model, tensors, longest=40, began=tmp_path / "in")
    torch.testing.assert_close(hf_models.logits(hf_models.loaded(tmp_path / "out"), ids), expected, rtol=0, atol=1e-5)
    assert read_config(tmp_path / "out").window == 48

    write_model(tmp_path / "bare", model, tensors, longest=40)
    without = hf_models.logits(hf_models.loaded(tmp_path / "bare"), ids)
    assert (without - expected).abs().max() > 1e-3


def test_rotary_positions_said_beside_their_table(tmp_path: Path) -> None:
    hf_models.save("llama-llama3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    config["original_max_position_embeddings"] = config["rope_parameters"].pop("original_max_position_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, _, model = computed(tmp_path, 1)
    assert model.rope_original_length == 16
    torch.testing.assert_close(found, hf_models.logits(hf_models.loaded(tmp_path), IDS), rtol=0, atol=1e-5)


def test_a_config_without_its_epsilon_has_that_of_transformers(tmp_path: Path) -> None:
    hf_models.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    del config["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, _, _ = computed(tmp_path, 1)
    torch.testing.assert_close(found, hf_models.logits(hf_models.loaded(tmp_path), IDS), rtol=0, atol=1e-5)


def test_a_stage_reads_its_own_tensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_models.save("qwen2-tied", tmp_path, shard="8KB")
    model = untied(read_config(tmp_path).model, 3)
    shapes = stage_shapes(model, Cut(stages=3), 40)
    opened: list[str] = []
    real = safetensors.safe_open
    monkeypatch.setattr(
        safetensors, "safe_open", lambda path, **keywords: opened.append(Path(path).name) or real(path, **keywords)
    )
    Checkpoint(tmp_path).read(shapes[1])
    files = {path.name for path in tmp_path.glob("*.safetensors")}
    holding = {path.name for path in tmp_path.glob("*.safetensors") if load_file(path).keys() & shapes[1].keys()}
    assert set(opened) == holding < files


def test_other_types_become_fp32(tmp_path: Path) -> None:
    model = hf_models.make("llama")
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    shapes = stage_shapes(read_config(tmp_path).model, Cut(stages=1), 40)[0]
    tensors = Checkpoint(tmp_path).read(shapes)
    expected = dict(model.named_parameters())
    assert all(torch.equal(tensor, expected[name].float()) for name, tensor in tensors.items())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


BROKEN = {
    "missing": (lambda t: t.pop("model.norm.weight"), r"holds no tensor model\.norm\.weight"),
    "shape": (lambda t: t.update({"model.norm.weight": torch.ones(7)}), r"has shape \(7,\), the model \(30,\)"),
    "not finite": (lambda t: t["model.norm.weight"].fill_(torch.nan), "holds NaN or infinity"),
    "quantised": (lambda t: t.update({"model.norm.weight": torch.ones(30, dtype=torch.int8)}), "quantised"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_tensors_are_named(how: str, tmp_path: Path) -> None:
    hf_models.save("llama", tmp_path, shard="1GB")
    tensors = load_file(tmp_path / "model.safetensors")
    breaks, words = BROKEN[how]
    breaks(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    shapes = stage_shapes(read_config(tmp_path).model, Cut(stages=1), 40)[0]
    with pytest.raises(UsageError, match=words):
        Checkpoint(tmp_path).read(shapes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not an index"),
        ("[]", "is not an index"),
        ('{"weight_map": {"a": "../b"}}', "no file of its folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "no file of its folder"),
    ],
)
def test_broken_indexes(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(UsageError, match=words):
        Checkpoint(tmp_path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds neither model"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UsageError, match="is not safetensors"):
        Checkpoint(tmp_path)


def test_a_model_lies_there_whole_or_not_at_all(tmp_path: Path) -> None:
    def stages():
        yield {"a": torch.ones(3)}
        raise UsageError("the second stage is not to be had")

    with pytest.raises(UsageError, match="second stage"):
        write_model(tmp_path / "out", Model(), stages(), longest=4)
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        write_model(tmp_path / "out", Model(), [], longest=4)
