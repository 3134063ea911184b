"""What was trained here loads in transformers, and another run begins with it."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import shutil
from pathlib import Path

import hf_models
import pytest
import torch
from safetensors import SafetensorError
from stage_chain import StageChain, compute_thread, tiny, weights_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from swarmnet.cli.frame import run
from swarmnet.data.source import load_tokens
from swarmnet.data.windows import with_digests
from swarmnet.ids import NO_RESTART, Restart, RunId, first_chain
from swarmnet.manifest.extension import Extension, Notice
from swarmnet.manifest.file import load, run_id, to_toml
from swarmnet.manifest.schema import Manifest, Model
from swarmnet.messages import StateHeader
from swarmnet.model.decoder import StageModule
from swarmnet.model.whole import generate
from swarmnet.net.identity import Identity
from swarmnet.state.disk import CheckpointStore
from swarmnet.testing.reference import run_reference
from swarmnet.wire.signed import sign

MODEL = Model(
    vocab_size=61,
    hidden_size=30,
    intermediate_size=44,
    num_layers=3,
    num_heads=7,
    num_kv_heads=1,
    head_dim=10,
    rope_scaling="llama3",
    rope_factor=4.0,
    rope_original_length=8,
)
IDS = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(0))


def keep(
    directory: Path,
    run: RunId,
    stage: int,
    version: int,
    data: bytes,
    restart: Restart = NO_RESTART,
    notices: tuple[Notice, ...] = (),
) -> None:
    """Write a checkpoint as a peer does."""
    store, chain = CheckpointStore(directory, run), first_chain(run, stage)
    store.write(store.describe(stage, StateHeader(version, chain, chain, chain, restart, notices), data), data)


def train(manifest: Manifest, here: Path, steps: int = 3) -> dict[str, Tensor]:
    """Train, with a checkpoint of each stage after the first and the last step; returns the weights."""

    async def story() -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        async with compute_thread() as compute:
            chain = StageChain(manifest, compute)
            for step in range(steps):
                await chain.step(random.Random(step))
                if step in (0, steps - 1):
                    for stage, (engine,) in enumerate(chain.engines):
                        directory = here / "peers" / f"s{stage}"
                        keep(directory, run_id(manifest), stage, step + 1, await engine.snapshot())
            for (engine,) in chain.engines:
                weights |= await weights_of(engine)
        return weights

    (here / "run.toml").write_text(to_toml(manifest))
    return asyncio.run(story())


def ours(model: Model, weights: dict[str, Tensor]) -> Tensor:
    module = StageModule(model, range(model.num_layers), first=True, last=True)
    module.load_state_dict(weights, strict=not model.tie_embeddings)
    with torch.no_grad():
        return module(IDS)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids.u8.bin").write_bytes(bytes(index % 61 for index in range(4000)))
    return tmp_path


@pytest.mark.parametrize(
    ("model", "stages", "kind"),
    [
        (MODEL, 3, "mistral"),
        (MODEL.model_copy(update={"num_heads": 5, "num_kv_heads": 5, "tie_embeddings": True}), 1, "llama"),
        (
            MODEL.model_copy(update={"qk_norm": True, "rope_scaling": "linear", "rope_original_length": 8192}),
            2,
            "qwen3",
        ),
    ],
    ids=["mistral", "llama-tied", "qwen3"],
)
def test_a_trained_run_loads_in_transformers_and_continues_here(
    here: Path, model: Model, stages: int, kind: str
) -> None:
    manifest = tiny(stages, model=model)
    weights = train(manifest, here)
    assert run(["export", "run.toml", "out/model"]) == 0
    assert json.loads((here / "out/model/config.json").read_bytes())["model_type"] == kind
    expected = ours(model, weights)
    found = hf_models.logits(hf_models.loaded(here / "out/model"), IDS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    line = (
        f"init next.toml --from out/model --data ids.u8.bin --tokenizer ids --stages {stages} --set "
        "training.sequence_length=16"
    )
    assert run(line.split()) == 0
    again = load("next.toml")
    assert again.model == model and len(again.initial.sha256) == stages
    tokens = load_tokens("ids.u8.bin", "ids")
    losses = run_reference(again, tokens, steps=2).losses
    assert losses[0] == pytest.approx(hf_models.first_loss(here / "out/model", again, tokens), abs=1e-5) != losses[1]


def test_an_extended_run_has_as_many_steps_as_its_checkpoint_says(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = Identity.from_seed(b"o" * 32)
    manifest = tiny(1)
    manifest = manifest.model_copy(update={"admission": manifest.admission.model_copy(update={"key": owner.peer})})
    train(manifest, here)
    (path,) = here.glob("peers/s0/snapshots/*/stage-0-step-3.safetensors")
    longer = sign(Extension(run_id(manifest), 1, 2, 777), owner.peer, owner.sign)
    keep(here / "peers" / "s0", run_id(manifest), 0, 3, path.read_bytes(), notices=(longer,))
    assert run(["export", "run.toml", "out/model"]) == 0
    assert "the weights of step 3 of 777" in capsys.readouterr().out


def test_a_run_that_begins_with_an_export_goes_on_from_what_was_learned(here: Path) -> None:
    settings = [
        word
        for setting in ("training.sequence_length=16", "optimizer.learning_rate=0.01")
        for word in ("--set", setting)
    ]
    train(tiny(2, model=MODEL), here, steps=12)
    assert run(["export", "run.toml", "model"]) == 0
    line = "init next.toml --from model --data ids.u8.bin --tokenizer ids --stages 2 --steps 3"
    assert run([*line.split(), *settings]) == 0
    going_on = load("next.toml")
    tokens = load_tokens("ids.u8.bin", "ids")
    continued = run_reference(going_on, tokens).losses
    scratch = run_reference(going_on.model_copy(update={"initial": Manifest().initial}), tokens).losses
    assert max(continued) < min(scratch) and continued[-1] < continued[0]


def test_an_older_step_can_be_asked_for(here: Path) -> None:
    weights = train(tiny(2, model=MODEL), here)
    assert run(["export", "run.toml", "first", "--step", "1", "--dir", "peers/s0", "--dir", "peers/s1"]) == 0
    module = hf_models.loaded(here / "first")
    assert not torch.equal(module.lm_head.weight, weights["lm_head.weight"])


def test_what_is_broken_or_missing_is_said_and_nothing_is_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tiny(2, model=MODEL)
    train(manifest, here)
    path = CheckpointStore(here / "peers/s1", run_id(manifest)).data_path(1, 3)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for line, words in (
        ("export run.toml out --step 3", "no sound checkpoint of stage 1 at step 3 is here"),
        ("export run.toml out --step 3", "; whole: steps 1\n"),
        ("export run.toml out --step 2", "no sound checkpoint of stage 0 at step 2 is here; whole: steps 1, 3\n"),
        ("generate run.toml x --step 2", "; whole: steps 1, 3\n"),
        ("export run.toml out --step -1", "-1 is not in the range x>=0"),
        ("eval run.toml --step -1", "-1 is not in the range x>=0"),
        ("export run.toml out --dir peers/s0", "stage 0: steps 1, 3; stage 1: none"),
        ("export run.toml out --dir nowhere", "nowhere: no such directory"),
        ("export run.toml peers", "peers: exists already"),
    ):
        assert run(line.split()) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1 and not list(here.glob("*out*")), err


@pytest.mark.parametrize(
    ("command", "damage"),
    [
        ("export run.toml out", "cut"),
        ("generate run.toml \x07 --tokens 1", "altered"),
        ("eval run.toml", "no JSON"),
        ("export run.toml out", "one stage only"),
    ],
)
def test_a_newer_step_that_cannot_be_used_is_named_with_the_step_that_is(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, damage: str
) -> None:
    manifest = tiny(2, model=MODEL)
    if command.startswith("eval"):
        data = manifest.data.model_copy(update={"source": "ids.u8.bin", "tokenizer": "ids"})
        data = with_digests(data, load_tokens("ids.u8.bin", "ids"), manifest.training)
        manifest = manifest.model_copy(update={"data": data})
    train(manifest, here)
    store = CheckpointStore(here / "peers/s1", run_id(manifest))
    path, told = store.data_path(1, 3), store.info_path(1, 3)
    content = path.read_bytes()
    path.write_bytes(content[:-7] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    if damage == "no JSON":
        told.unlink()
    if damage == "one stage only":
        told.unlink()
        path.unlink()
    assert run(command.split()) == 0
    err = capsys.readouterr().err
    named = {"one stage only": "step 3 (stage 1 has none)", "no JSON": told.relative_to(here)}
    assert err.startswith(f"warning: {named.get(damage, path.relative_to(here))}: "), err
    assert err.endswith(": not used; the weights are those of step 1\n") and err.count("\n") == 1


def test_a_broken_copy_is_passed_over(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tiny(1, model=MODEL)
    weights = train(manifest, here)
    store = CheckpointStore(here / "peers/s0", run_id(manifest))
    _, data = store.load(0, 3)
    keep(here / "peers/s0-again", run_id(manifest), 0, 3, bytes(data))
    path = store.data_path(0, 3)
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    for more in (["--step", "3"], []):
        shutil.rmtree("out", ignore_errors=True)
        assert run(["export", "run.toml", "out", *more]) == 0
        assert capsys.readouterr().err.startswith(f"warning: {path.relative_to(here)}: altered")
    assert torch.equal(hf_models.loaded(here / "out").lm_head.weight, weights["lm_head.weight"])


def test_what_the_run_gave_up_is_left_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stage 1 went on from step 1 and got to step 3 again; stage 0's step 3 is of the past before."""
    manifest = tiny(2, model=MODEL)
    weights = train(manifest, here)
    _, data = CheckpointStore(here / "peers/s1", run_id(manifest)).load(1, 3)
    keep(here / "peers/s1", run_id(manifest), 1, 3, bytes(data), Restart(1, 1))
    assert run(["export", "run.toml", "out"]) == 0
    assert "the weights of step 1 of 20" in capsys.readouterr().out
    assert not torch.equal(hf_models.loaded(here / "out").lm_head.weight, weights["lm_head.weight"])
    assert run(["export", "run.toml", "mixed", "--step", "3"]) == 2
    assert "no sound checkpoint of stage 0 at step 3" in capsys.readouterr().err


def test_tokenizer_and_generation_settings_come_along(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tiny(2, model=MODEL)
    train(manifest, here)
    like = here / "like"
    like.mkdir()
    (like / "config.json").write_text('{"eos_token_id": [2, 7], "bos_token_id": 1, "max_position_embeddings": 4096}')
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (like / name).write_text('{"eos_token_id": [2, 7]}')
    (like / "secret.txt").write_text("no")
    assert run(["export", "run.toml", "out", "--like", "like"]) == 0
    config = json.loads((here / "out/config.json").read_bytes())
    assert (config["eos_token_id"], config["bos_token_id"], config["max_position_embeddings"]) == ([2, 7], 1, 4096)
    assert (here / "out/tokenizer.json").is_file() and not (here / "out/secret.txt").exists()
    out = capsys.readouterr().out
    assert "without a tokenizer" not in out and "note" not in out
    assert "from like came tokenizer.json, tokenizer_config.json, generation_config.json, bos_token_id, " in out
    assert run(["export", "run.toml", "bare"]) == 0
    assert "without a tokenizer: the run's is 'bytes'; --like DIR brings one along" in capsys.readouterr().out


def test_the_window_of_the_checkpoint_a_run_began_with_comes_along(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_models.save("mistral-window", here / "hf")
    line = "init run.toml --from hf --data ids.u8.bin --tokenizer ids --stages 2 --steps 3"
    assert run([*line.split(), "--set", "training.sequence_length=16", "--set", "training.microbatches=2"]) == 0
    train(load("run.toml"), here, steps=1)
    assert run(["export", "run.toml", "out"]) == 0
    config = json.loads((here / "out/config.json").read_bytes())
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 48)
    assert hf_models.loaded(here / "out").config.sliding_window == 48
    assert "sliding window" not in capsys.readouterr().out

    (here / "hf").rename(here / "moved")
    assert run(["export", "run.toml", "bare"]) == 0
    assert "note: the checkpoint that the run began with is not here: if its attention" in capsys.readouterr().out
    assert run(["export", "run.toml", "again", "--like", "moved"]) == 0
    assert json.loads((here / "again/config.json").read_bytes()) == config
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "files", "code", "words"),
    [
        ({"eos_token_id": 2}, [], 0, "the run's is 'bytes'; like has no tokenizer.json either\n"),
        (
            {"model_type": "qwen3", "eos_token_id": 2},
            [],
            0,
            "note: like is a qwen3, and this model a mistral: what came",
        ),
        (
            {"vocab_size": 60, "eos_token_id": 2},
            [],
            0,
            "note: like is of a model with 60 token ids, and this one knows 61",
        ),
        ({"vocab_size": 62}, ["tokenizer.json"], 2, "like is of a model with 62 token ids, and this one knows 61: its"),
        ({}, [], 2, "--like like: has none of tokenizer.json"),
    ],
)
def test_what_another_checkpoint_brings_is_said_and_what_does_not_fit_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], config: dict[str, object], files: list[str], code: int, words: str
) -> None:
    train(tiny(1, model=MODEL), here, steps=1)
    (here / "like").mkdir()
    for name in files:
        (here / "like" / name).write_text("{}")
    (here / "like/config.json").write_text(json.dumps(config))
    assert run(["export", "run.toml", "out", "--like", "like"]) == code
    captured = capsys.readouterr()
    assert words in captured.out + captured.err and (here / "out").exists() == (code == 0)
    assert ("from like came eos_token_id\n" in captured.out) == (code == 0)


def test_generation_continues_as_transformers_does(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tiny(2, model=MODEL)
    weights = train(manifest, here)
    assert run(["export", "run.toml", "out"]) == 0
    prompt = [5, 7, 11]
    expected = (
        hf_models.loaded(here / "out")
        .generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, min_new_tokens=12, pad_token_id=0)[0, 3:]
        .tolist()
    )
    module = StageModule(MODEL, range(3), first=True, last=True)
    module.load_state_dict(weights)
    assert list(generate(module, prompt, num_tokens=12, context=16)) == expected
    drawn = [list(generate(module, prompt, num_tokens=12, context=4, temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]

    capsys.readouterr()
    line = "generate run.toml \x05\x07\x0b --tokens 12 --temperature 0"
    assert run(line.split(" ")) == 0
    assert capsys.readouterr().out == bytes([*prompt, *expected]).replace(b"\0", b"\n").decode() + "\n"
    assert run(["generate", "run.toml", ""]) == 2
    assert "PROMPT is empty" in capsys.readouterr().err


FULL = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("safetensors.torch.save_file", FULL, "No space left on device"),
        ("os.fsync", OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded"),
        ("pathlib.Path.write_text", OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    ],
)
def test_an_export_that_cannot_be_written_is_one_line_and_leaves_nothing(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    error: Exception,
    words: str,
) -> None:
    train(tiny(2, model=MODEL), here, steps=1)
    calls: list[object] = []

    def fails(*args: object, **named: object) -> None:
        calls.append(args)
        if len(calls) > (name == "os.fsync"):
            raise error

    monkeypatch.setattr(name, fails)
    before = sorted(here.iterdir())
    assert run(["export", "run.toml", "deep/er/out"]) == 2
    err = capsys.readouterr().err
    assert "deep/er/out: cannot be written: " in err and words in err and err.count("\n") == 1
    assert sorted(here.iterdir()) == before


def test_where_nothing_can_be_written_is_said_before_weights_are_looked_for(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "run.toml").write_text(to_toml(tiny(2, model=MODEL)))
    (here / "link").symlink_to("nowhere")
    for target, words in (
        ("run.toml", "exists already"),
        ("link", "exists already"),
        ("run.toml/out", "nothing can be written in "),
        ("/proc/swarmnet/out", "nothing can be written in /proc"),
    ):
        assert run(["export", "run.toml", target]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and words in err, err


def test_another_tokenizer_is_said_before_weights_are_looked_for(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(here / "words.json"))
    data = tiny(2, model=MODEL).data.model_copy(update={"tokenizer": "words.json", "tokenizer_sha256": "0" * 64})
    (here / "run.toml").write_text(to_toml(tiny(2, model=MODEL).model_copy(update={"data": data})))
    assert run(["export", "run.toml", "out"]) == 2
    err = capsys.readouterr().err
    assert "is not the tokenizer the run was made with" in err and err.count("\n") == 1, err
