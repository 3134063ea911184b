"""A run that begins with a checkpoint of transformers': `init --from`, engines, the single process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from safetensors.torch import load_file, save_file
from stage_chain import StageChain, compute_thread, weights_of
from torch import Tensor

from swarmnet.cli.frame import run
from swarmnet.config.peer import PeerConfig
from swarmnet.data.source import load_tokens
from swarmnet.errors import UsageError
from swarmnet.manifest.file import load
from swarmnet.manifest.schema import Manifest
from swarmnet.model.huggingface import checkpoint
from swarmnet.peer.engines import InitialWeights, torch_engine
from swarmnet.ranks.device_backend import DeviceBackend
from swarmnet.testing.reference import run_reference

SMALL = (
    "--set training.sequence_length=16 --set training.microbatches=2 --set training.microbatch_size=2 "
    "--tokenizer ids --data ids.u8.bin --steps 4"
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with token ids, and commands are typed in it."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(1)
    (tmp_path / "ids.u8.bin").write_bytes(bytes(torch.randint(0, 61, (4000,), generator=generator).tolist()))
    return tmp_path


def begun(here: Path, case: str, *flags: str) -> Manifest:
    hf_models.save(case, here / "hf")
    assert run(["init", "run.toml", "--from", "hf", *SMALL.split(), *flags]) == 0
    return load(here / "run.toml")


def test_the_manifest_says_which_model_and_which_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = begun(here, "qwen2-tied", "--stages", "2")
    assert manifest.initial.source == "hf" and len(set(manifest.initial.sha256)) == 2
    assert manifest.model.vocab_size == 61 and manifest.model.attention_bias and not manifest.model.tie_embeddings
    out = capsys.readouterr().out
    assert "weights of version 0 are those in hf; embedding and head are no longer tied\n" in out
    Path("deep").mkdir()
    assert run(["init", "deep/run.toml", "--from", "hf", *SMALL.split(), "--stages", "1"]) == 0
    one = load("deep/run.toml")
    assert one.initial.source == "../hf" and one.model.tie_embeddings
    assert "no longer tied" not in capsys.readouterr().out


@pytest.mark.parametrize("case", ["llama", "qwen3-tied-biased"])
def test_the_first_loss_is_that_of_transformers_and_the_swarm_is_the_single_process(here: Path, case: str) -> None:
    manifest = begun(here, case, "--stages", "3")
    tokens = load_tokens("ids.u8.bin", "ids")
    expected = run_reference(manifest, tokens)
    assert expected.losses[0] == pytest.approx(hf_models.first_loss(here / "hf", manifest, tokens), abs=1e-5)

    async def swarm() -> tuple[list[float], dict[str, Tensor]]:
        async with compute_thread() as compute:
            chain = StageChain(manifest, compute)
            chain.tokens = tokens
            chain.engines = [
                [
                    torch_engine(
                        manifest,
                        stage,
                        compute,
                        DeviceBackend(
                            manifest.of_stage(stage),
                            initial=lambda stage=stage: stage_weights(manifest, stage, here / "hf"),
                        ),
                    )
                    for _ in range(2)
                ]
                for stage in range(3)
            ]
            losses = [await chain.step(random.Random(step)) for step in range(4)]
            weights = {}
            for replicas in chain.engines:
                weights |= await weights_of(replicas[0])
            await chain.engines[0][0].reset_to_seed()
            again = await weights_of(chain.engines[0][0])
            at_first = stage_weights(manifest, 0, here / "hf")
            assert all(torch.equal(again[name], at_first[name]) for name in at_first)
            return losses, weights

    losses, weights = asyncio.run(swarm())
    assert losses == expected.losses and len(set(losses)) == 4
    assert all(torch.equal(weights[name], expected.weights[name]) for name in expected.weights)


def test_weights_are_not_fed_with_ids_they_have_never_seen(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_models.save("llama", here / "hf")
    asked = ["init", "run.toml", "--from", "hf", *SMALL.replace("--tokenizer ids", "").split()]
    assert run(asked) == 2
    said = capsys.readouterr().err
    assert "hf: has no tokenizer.json" in said and "--tokenizer FILE" in said and not Path("run.toml").exists()
    assert run([*asked, "--set", "data.tokenizer=ids"]) == 0
    assert load("run.toml").data.tokenizer == "ids"


def stage_weights(manifest: Manifest, stage: int, folder: Path) -> dict[str, Tensor]:
    """What `stage` begins with."""
    shapes = checkpoint.stage_shapes(manifest.model, manifest.cut, manifest.training.sequence_length)[stage]
    return checkpoint.stage_weights(folder, shapes, stage=stage, agreed=manifest.initial.sha256[stage])


def test_another_checkpoint_is_noticed(here: Path) -> None:
    manifest = begun(here, "llama", "--stages", "2")
    other = hf_models.make("llama")
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight[0, 0] += 1e-3
    other.save_pretrained(here / "other")
    assert stage_weights(manifest, 0, here / "other").keys()  # its tensors are the same ones
    with pytest.raises(UsageError, match=r"other: the weights of stage 1 have digest .* not the checkpoint"):
        stage_weights(manifest, 1, here / "other")


def test_who_has_no_files_asks_its_mates(here: Path) -> None:
    manifest = begun(here, "llama", "--stages", "2")

    def built(config: PeerConfig, *, at_source: bool = True) -> tuple[bool, str]:
        begin = InitialWeights(config, manifest, at_source=at_source)
        read = begin.engine(1, lambda stage, initial, base: initial is not None and bool(initial()))
        return read, begin.missing

    config = PeerConfig(manifest=here / "run.toml")
    assert built(config) == (True, "")
    read, missing = built(config, at_source=False)
    assert not read and "('hf' in the manifest) that is not here" in missing and "with --initial" in missing
    shutil.move(here / "hf", here / "moved")
    assert built(config)[1] and built(config.model_copy(update={"initial": here / "moved"})) == (True, "")
    with pytest.raises(UsageError, match=r"cannot be read|holds neither"):
        built(config.model_copy(update={"initial": here / "hf"}))
    with pytest.raises(UsageError, match=r"--initial .*: this run begins with weights drawn from its seed"):
        InitialWeights(PeerConfig(initial=here), Manifest(), at_source=True)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a JSON or safetensors file holds."""
    if path.suffix == ".json":
        data = json.loads(path.read_bytes())
        change(data)
        path.write_text(json.dumps(data))
    else:
        data = load_file(path)
        change(data)
        save_file(data, path)


INDEX = "model.safetensors.index.json"
FIRST = "model.embed_tokens.weight"


def both(hf: Path) -> None:
    """One whole file beside an index of shards, with the same weights."""
    tensors: dict[str, Tensor] = {}
    for path in hf.glob("*.safetensors"):
        tensors |= load_file(path)
    save_file(tensors, hf / "model.safetensors")


def stale(hf: Path) -> None:
    both(hf)
    edit(hf / "model.safetensors", lambda found: found[FIRST].add_(1.0))


def part(hf: Path, name: str = FIRST) -> Path:
    """The shard that holds the tensor."""
    return hf / json.loads((hf / INDEX).read_bytes())["weight_map"][name]


def moved(hf: Path, *, keep: bool) -> None:
    """A tensor lies in another shard than the index says; keep: in both."""
    other = next(path for path in sorted(hf.glob("*.safetensors")) if path != part(hf))
    tensor = load_file(part(hf))[FIRST]
    edit(other, lambda found: found.update({FIRST: tensor + 1.0}))
    if not keep:
        edit(part(hf), lambda found: found.pop(FIRST))


def refused(here: Path, words: str, flags: str = "") -> bool:
    """In one line with these words, and nothing is written."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = run(["init", "run.toml", "--from", "hf", *SMALL.split(), *flags.split()])
    err = said.getvalue()
    return code == 2 and words in err and err.count("\n") == 1 and not (here / "run.toml").exists()


@pytest.mark.parametrize(
    ("case", "flags", "words"),
    [
        ("mistral-window", "--set training.sequence_length=49", "reaches back 48 tokens only"),
        ("llama", "--stages 4", "cut.stages = 4 is more than model.num_layers = 3"),
        (
            "llama",
            "--set model.num_layers=2 --stages 1",
            "holds tensors that the model has no use for (model.layers.2.",
        ),
        ("llama", "--set model.intermediate_size=40 --stages 1", "has shape (44, 30), the model (40, 30)"),
        (
            "llama",
            "--stages 1 --data corpus:small --tokenizer bytes",
            "--from hf: model.vocab_size = 61: must be at least",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(here: Path, case: str, flags: str, words: str) -> None:
    hf_models.save(case, here / "hf")
    assert refused(here, words, flags)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (stale, f"model.safetensors and hf/{INDEX} are both here with different weights ({FIRST}): remove the one"),
        (lambda hf: (both(hf), part(hf).unlink()), f"hf/{INDEX}, which names missing files: remove the one"),
        (lambda hf: part(hf).unlink(), "cannot be read: No such file"),
        (lambda hf: moved(hf, keep=True), f"both hold {FIRST}: remove the one that is wrong"),
        (lambda hf: moved(hf, keep=False), f"hf/{INDEX}: {FIRST} is in model-"),
        (lambda hf: edit(hf / INDEX, lambda data: data["weight_map"].pop(FIRST)), "and by the index nowhere"),
        (lambda hf: (hf / INDEX).write_text('{"weight_map": {"a": "b", "a": "c"}}'), '"a" stands in it twice'),
        (lambda hf: part(hf).write_bytes(part(hf).read_bytes()[:-9]), "is not safetensors"),
        (lambda hf: edit(part(hf), lambda found: found.update({FIRST: found[FIRST].to(torch.float8_e5m2)})), "float8"),
    ],
)
def test_files_that_disagree_or_are_damaged_are_refused_in_one_line(
    here: Path, damage: Callable[[Path], object], words: str
) -> None:
    hf_models.save("llama", here / "hf")
    damage(here / "hf")
    assert refused(here, words)


def test_two_sources_with_the_same_weights_are_one_and_what_is_not_read_is_said(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = begun(here, "llama").initial.sha256
    both(here / "hf")
    (here / "hf/pytorch_model.bin").write_bytes(b"?")
    edit(here / "hf/config.json", lambda data: data.update(attention_dropout=0.1))
    capsys.readouterr()
    assert run(["init", "run.toml", "--from", "hf", "--force", *SMALL.split()]) == 0
    assert load("run.toml").initial.sha256 == expected
    out = capsys.readouterr().out
    assert "note: settings of hf that are not used: attention_dropout = 0.1\n" in out
    assert "note: files of hf that are not used: model-" in out and "pytorch_model.bin\n" in out


@pytest.mark.parametrize("stages", [1, 3])
def test_a_checkpoint_without_its_head_is_refused_unless_it_is_the_embedding(
    here: Path, capsys: pytest.CaptureFixture[str], stages: int
) -> None:
    hf_models.save("llama", here / "hf", shard="1GB")
    tensors = load_file(here / "hf/model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, here / "hf/model.safetensors")
    line = ["init", "run.toml", "--from", "hf", *SMALL.split(), "--stages", str(stages)]
    assert run(line) == 2
    assert "hf: holds no tensor lm_head.weight, and its config.json does not say" in capsys.readouterr().err
    assert not (here / "run.toml").exists()
    config = json.loads((here / "hf/config.json").read_bytes())
    (here / "hf/config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert run(line) == 0


def test_a_tied_checkpoint_with_another_head_is_one_model_for_any_number_of_stages(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_models.save("llama", here / "hf")
    config = json.loads((here / "hf/config.json").read_bytes())
    (here / "hf/config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tokens = load_tokens("ids.u8.bin", "ids")
    for stages in (1, 3):
        line = ["init", "run.toml", "--from", "hf", *SMALL.split(), "--stages", str(stages), "--force"]
        assert run(line) == 2
        assert (
            "hf: the head is said to be the embedding, and lm_head.weight is another matrix: --set "
            in capsys.readouterr().err
        )
        assert run([*line, "--set", "model.tie_embeddings=false"]) == 0
        manifest = load("run.toml")
        assert not manifest.model.tie_embeddings
        expected = hf_models.first_loss(here / "hf", manifest, tokens)  # transformers takes the head, too
        assert run_reference(manifest, tokens, steps=1).losses[0] == pytest.approx(expected, abs=1e-5)


def test_a_tokenizer_comes_along(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_models.save("llama", here / "hf")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 60}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(here / "hf" / "tokenizer.json"))
    (here / "text.txt").write_text("a b c " * 500)
    line = "init run.toml --from hf --data text.txt --stages 2 --set training.sequence_length=16"
    assert run(line.split()) == 0, capsys.readouterr().err
    assert load("run.toml").data.tokenizer == "hf/tokenizer.json"
