"""`swarmnet init`: a complete file, the data's digests in it, nothing overwritten."""

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from swarmnet.cli.frame import run
from swarmnet.data.windows import WindowTree
from swarmnet.manifest.file import load, run_id


def typed(line: str) -> int:
    """Run `line` as if it had been typed after `swarmnet`."""
    return run(line.split())


@dataclass(frozen=True)
class FakeTokens:
    ids: np.ndarray = field(default_factory=lambda: np.arange(1000) % 300)
    num_tokens: int = 1000
    sha256: str = "a" * 64
    tokenizer_sha256: str = "b" * 64
    vocab_size: int = 300
    notes: tuple[str, ...] = ("documents end with a zero byte",)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str, Path | None]]:
    """What was asked of the data, in an empty directory."""
    made: list[tuple[str, str, Path | None]] = []
    fake = ModuleType("swarmnet.data.source")

    def load_tokens(
        source: str, tokenizer: str, *, base: Path | None, progress: Callable[[int, int], None]
    ) -> FakeTokens:
        made.append((source, tokenizer, base))
        progress(3, 1000)
        return FakeTokens()

    fake.load_tokens = load_tokens  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swarmnet.data.source", fake)
    monkeypatch.chdir(tmp_path)
    return made


def test_a_folder_that_it_makes_is_named(asked, capsys, tmp_path: Path) -> None:
    assert typed("init deep/x.toml --owner") == 0
    made = f"made the folder {tmp_path / 'deep'}, which was not there\n"
    assert made in capsys.readouterr().out
    assert typed("init deep/y.toml") == 0 and "made the folder" not in capsys.readouterr().out


def test_it_writes_a_complete_file_and_says_what_is_next(asked, capsys) -> None:
    assert run(["init"]) == 0
    manifest = load("run.toml")
    assert (manifest.data.num_tokens, manifest.data.tokens_sha256, manifest.data.tokenizer_sha256) == (
        1000,
        "a" * 64,
        "b" * 64,
    )
    assert manifest.data.tokens_root == WindowTree(FakeTokens(), 64, 14).root  # type: ignore[arg-type]
    assert manifest.model.vocab_size == 300 and asked == [("stdlib", "bytes", Path())]
    out = capsys.readouterr().out
    assert f"run id {run_id(manifest)}\n" in out and "next: swarmnet local --manifest run.toml\n" in out
    assert out.startswith(
        "reading the data: stdlib\n"
        f"wrote run.toml: a model of {manifest.model.num_parameters:,} parameters in 3 stages, 60 steps\n"
        "data: 1,000 tokens of stdlib, tokenizer bytes (300 ids)\n"
    )


@pytest.mark.parametrize("name", ["my runs/it's $HOME.toml", "-x.toml", "a;b.toml"])
def test_a_command_to_copy_means_the_file_that_was_written(asked, capsys, name: str) -> None:
    for admission in ("open", "invite"):
        assert run(["init", "--data", "corpus:small", "--admission", admission, "--force", "--", name]) == 0
        text = capsys.readouterr().out
        commands = [
            line.partition("swarmnet ")[2].partition(", ")[0] for line in text.splitlines() if "swarmnet " in line
        ]
        words = [shlex.split(command) for command in commands]
        named = [
            line[line.index("--manifest") + 1 if "--manifest" in line else 1 + (line[0] == "owner")] for line in words
        ]
        assert [Path(each) for each in named] == [Path(name)] * len(words) and len(words) >= 2


def test_what_is_next_depends_on_who_can_take_part(asked, capsys) -> None:
    local = "swarmnet local --manifest run.toml\n"
    assert typed("init --data corpus:small") == 0
    out = capsys.readouterr().out
    assert "next: swarmnet peer --manifest run.toml --stage 0, and on other machines what that prints\n" in out
    assert "then: swarmnet trainer --manifest run.toml --bootstrap ADDRESS" in out
    assert out.endswith(f"to try it on this machine: {local}")
    assert typed("init --data corpus:small --admission invite --force") == 0
    out = capsys.readouterr().out
    assert "next: swarmnet owner invite run.toml --bearer > own.invitation" in out
    assert "--stage 0 --invitation own.invitation" in out
    assert out.endswith(f"to try it on this machine: {local}")


def test_every_flag_arrives(asked) -> None:
    assert (
        typed(
            "init deep/r.toml --name n --stages 2 --steps 5 --seed 7 --data d --tokenizer t "
            "--set model.num_layers=2 --set optimizer.learning_rate=1"
        )
        == 0
    )
    manifest = load("deep/r.toml")
    assert (manifest.name, manifest.cut.stages, manifest.training.total_steps, manifest.training.seed) == ("n", 2, 5, 7)
    assert (manifest.data.source, manifest.data.tokenizer, manifest.model.num_layers) == ("d", "t", 2)
    assert manifest.optimizer.learning_rate == 1.0


def test_local_training_brings_along_what_it_needs_and_says_so(asked, capsys) -> None:
    assert typed("init --sync local --set averaging.inner_steps=9") == 0
    manifest = load("run.toml")
    assert (manifest.averaging.sync, manifest.averaging.inner_steps) == ("local", 9)
    assert (manifest.numerics.mode, manifest.averaging.codec, manifest.averaging.reducer) == (
        "fp32",
        "int8",
        "norm_clip",
    )
    said = "with it: numerics.mode = fp32, averaging.codec = int8, averaging.reducer = norm_clip; --set chooses"
    assert said in capsys.readouterr().out
    assert typed("init long.toml --sync local --steps 121") == 0 and "note:" not in capsys.readouterr().out
    assert typed("init short.toml --sync local") == 0
    assert (
        "note: outer momentum never sets in: training.total_steps = 60, averaging.outer_warmup_steps = 60; "
        in capsys.readouterr().out
    )
    assert typed("init other.toml --sync local --set averaging.reducer=sum") == 0
    assert load("other.toml").averaging.reducer == "sum"


def test_a_path_that_is_here_is_written_as_the_manifest_sees_it(asked) -> None:
    Path("corpus.txt").write_text("text")
    assert typed("init deep/r.toml --data corpus.txt") == 0
    assert load("deep/r.toml").data.source == "../corpus.txt"
    assert asked == [("../corpus.txt", "bytes", Path("deep"))]
    assert run(["init", "abs.toml", "--data", str(Path("corpus.txt").resolve())]) == 0
    assert load("abs.toml").data.source == str(Path("corpus.txt").resolve())


def test_nothing_is_overwritten_unless_forced(asked, capsys) -> None:
    Path("run.toml").write_text("mine")
    assert run(["init"]) == 2
    assert Path("run.toml").read_text() == "mine" and not asked
    assert capsys.readouterr().err == (
        "swarmnet: error: run.toml: exists already; choose another name, or add --force to overwrite it\n"
    )
    assert run(["init", "--force"]) == 0
    assert load("run.toml").data.num_tokens == 1000


def test_a_vocabulary_may_be_larger_than_the_data_need(asked) -> None:
    assert typed("init --set model.vocab_size=512") == 0
    assert load("run.toml").model.vocab_size == 512


def test_a_name_stays_a_name_where_a_file_has_it(asked) -> None:
    Path("stdlib").mkdir()
    Path("bytes").mkdir()
    assert typed("init deep/r.toml") == 0
    assert asked == [("stdlib", "bytes", Path("deep"))]


def test_who_waits_for_long_is_told_how_far_it_is(asked, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert typed("init quick.toml") == 0 and not capsys.readouterr().err
    monkeypatch.setattr("swarmnet.telemetry.screen.PLAIN_EVERY_S", 0.0)
    assert typed("init long.toml") == 0
    assert capsys.readouterr().err == (
        "reading the data: 3 documents, 1,000 tokens\nhashing the data: 14 of 14 windows\n"
    )


LARGE = (
    "--steps 2000 --set model.hidden_size=2048 --set model.intermediate_size=5632 --set model.num_layers=66 "
    "--set model.num_heads=32 --set model.num_kv_heads=8 --set model.head_dim=64 --set training.sequence_length=64 "
    "--set training.microbatches=1024 --set training.microbatch_size=8"
)


def test_a_line_chooses_and_says_what_else_would_cost(asked, capsys) -> None:
    assert typed(f"init --mbit 200 --device cuda --sync exact {LARGE}") == 0
    manifest = load("run.toml")
    assert (manifest.numerics.mode, manifest.numerics.compute) == ("deterministic", "bf16")
    assert (manifest.wire.activations, manifest.wire.gradients) == ("int8", "int8")
    assert (manifest.averaging.sync, manifest.averaging.codec) == ("exact", "small")
    assert manifest.training.microbatches * manifest.training.microbatch_size == 1024 * 8
    assert manifest.data.tokens_root and manifest.model.vocab_size == 300
    out = capsys.readouterr().out
    assert "for 200 Mbit/s each way, 50 ms, 30 TFLOP/s (cuda), 4 replicas of 99" in out
    rows = [line.split() for line in out.splitlines() if " x 8 " in line]
    assert [row[0] for row in rows].count("*") == 1 and ["exact", "small"] in [row[:2] for row in rows]
    config = tomllib.loads(Path("run.peer.toml").read_text("utf-8"))
    assert config["device"] == "cuda" and 9 <= config["slots"] <= 24
    assert "next: swarmnet local" in out and "wrote run.peer.toml: slots = " in out
    # What follows from a chosen sync comes with it.
    assert typed(f"init --mbit 1 --device cuda --tflops 60 --replicas 8 --force {LARGE}") == 0
    assert (load("run.toml").averaging.sync, load("run.toml").averaging.reducer) == ("local", "norm_clip")


def test_the_peer_config_for_every_machine_names_no_device_unless_told(asked) -> None:
    assert typed(f"init --mbit 200 {LARGE}") == 0
    assert "device" not in tomllib.loads(Path("run.peer.toml").read_text("utf-8"))


def test_what_is_said_beside_a_line_is_kept(asked, capsys) -> None:
    assert typed("init --mbit 20 --device cpu --set wire.gradients=bf16 --set training.microbatches=6 --json") == 0
    manifest, said = load("run.toml"), capsys.readouterr()
    assert (manifest.wire.gradients, manifest.training.microbatches, manifest.numerics.compute) == ("bf16", 6, "fp32")
    found = json.loads(said.out)
    assert found["run"] == run_id(manifest) and "wrote run.toml" in said.err
    assert found["chosen"]["averaging.codec"] == manifest.averaging.codec == "small"
    assert [each["cost"]["step_s"] > 0 for each in found["compared"] if each["chosen"]] == [True]


def test_the_plan_page_prints_the_table_that_its_command_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    found = re.search(r"^\$ swarmnet (init .*?)^\.\.\.\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    assert typed(found[1].replace("\\\n", " ")) == 0
    assert found[2] in capsys.readouterr().out
