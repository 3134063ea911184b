"""`swarmnet eval` as it is typed: what does not go together, what is missing, and what is printed from disk."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from swarmnet.cli.frame import run
from swarmnet.data.source import load_tokens
from swarmnet.manifest.file import load, run_id
from swarmnet.model import whole
from swarmnet.peer import collect_remote
from swarmnet.state import collect

LINK = f"swarm:{'0' * 64}@/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
TINY = (
    "model.num_layers=1",
    "model.hidden_size=8",
    "model.intermediate_size=8",
    "model.num_heads=1",
    "model.num_kv_heads=1",
    "model.head_dim=8",
    "training.sequence_length=8",
    "training.microbatch_size=2",
)


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run.toml in the working directory."""
    monkeypatch.chdir(tmp_path)
    words = [word for setting in TINY for word in ("--set", setting)]
    assert run(["init", "run.toml", "--data", "corpus:small", "--stages", "1", *words]) == 0
    capsys.readouterr()
    return tmp_path / "run.toml"


class Zeros:
    """A collection whose newest version, 4, gives every token the same probability."""

    version = 4

    def __init__(self, run, directories, shapes, step, *, allow_drop) -> None:
        self._shapes = shapes

    def passed_over(self) -> list[str]:
        return []

    def stages(self) -> Iterator[dict[str, torch.Tensor]]:
        for shapes in self._shapes:
            yield {name: torch.zeros(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"eval {LINK} --dir here", "--dir is for weights on this disk"),
        ("eval run.toml --bootstrap foo", "--bootstrap: 'foo' is not an address like /ip4/"),
        ("eval nothing.toml", "nothing.toml: no such file, and no link such as swarm:RUN_ID@ADDRESS"),
        ("eval run.toml", "no version of the weights is here whole"),
        ("eval run.toml --data absent.txt", "data source 'absent.txt' does not exist"),
        ("eval run.toml --microbatches 0", "0 is not in the range x>=1"),
        ("eval swarm:12@nowhere", "is not a run id"),
        ("generate run.toml x", "no version of the weights is here whole"),
        ("generate absent.toml x", "absent.toml"),
        ("generate run.toml x --temperature nan", "Invalid value for '--temperature': 'nan' is not a number"),
        ("generate run.toml x --seed 99999999999999999999999", "is not in the range 0<=x<=18446744073709551615"),
        ("generate run.toml a\udcff", "the prompt is no UTF-8: character 2"),
        ("generate run.toml x --step -1", "-1 is not in the range x>=0"),
    ],
)
def test_a_mistake_is_one_line(manifest: Path, capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    assert run(line.split()) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_from_a_swarm_it_is_a_version_that_is_fetched(
    manifest: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    async def gather_(invitation, folder, tell, *, version, bootstrap, agreed):
        tell("swarm", "2 peers")
        agreed(load(manifest))
        asked.append((type(invitation).__name__, tuple(bootstrap), version))
        return collect_remote.CollectedRun(load(manifest), run_id(load(manifest)), 4)

    monkeypatch.setattr(collect_remote, "collect_remote", gather_)
    monkeypatch.setattr(collect, "CollectedCheckpoints", Zeros)
    address = LINK.partition("@")[2]
    assert run(["eval", LINK, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 4
    assert run(["eval", "run.toml", "--bootstrap", address, "--step", "4"]) == 0
    captured = capsys.readouterr()
    assert "loss 5.54517" in captured.out and "swarm     2 peers" in captured.err
    assert run(["generate", LINK, "x", "--tokens", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("x") and captured.err == "swarm      2 peers\n"
    assert asked == [("SwarmLink", (), None), ("Manifest", (address,), 4), ("SwarmLink", (), None)]


def test_from_disk_it_is_the_loss_of_the_whole_model(
    manifest: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "CollectedCheckpoints", Zeros)
    assert run(["eval", "run.toml"]) == 0
    out = capsys.readouterr().out
    assert "loss 5.54517" in out and " nats per token, perplexity 256.000" in out
    assert out.endswith("by the weights of step 4\n")
    assert run(["eval", "run.toml", "--json", "--microbatches", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(math.log(256), abs=1e-6) and found["microbatches"] == 3
    assert found["version"] == 4 and load_tokens("corpus:small").num_tokens // 100 > found["tokens_left_out"]
    assert found["bits_per_byte"] == pytest.approx(8 * found["tokens"] / found["bytes"])


def test_ctrl_c_prints_what_there_is(
    manifest: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "CollectedCheckpoints", Zeros)
    calls = []

    def loss_of(*args, **named) -> float:
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return 16.0

    monkeypatch.setattr(whole, "loss_of", loss_of)
    assert run(["eval", "run.toml"]) == 130
    out = capsys.readouterr().out
    assert "loss 1.000000 nats" in out and "(partial)" in out and "over 32 tokens of corpus:small, 2 of " in out


def test_what_is_generated_shows_as_it_comes_and_ctrl_c_keeps_it(
    manifest: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "CollectedCheckpoints", Zeros)
    shown = []

    def tokens(*args, **named) -> Iterator[int]:
        for each in "ä€".encode():
            yield each
            shown.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr(whole, "generate", tokens)
    assert run(["generate", "run.toml", "x"]) == 130
    assert shown == ["x", "ä", "", "", "€"] and capsys.readouterr() == ("\n", "")


def test_any_temperature_can_be_drawn_with() -> None:
    module = lambda ids: torch.tensor([[[1.0, 3.0, 2.0]]])  # noqa: E731  # what counts of a model
    for temperature in (1e-320, 1e-30, 0.0):
        assert list(whole.generate(module, [0], num_tokens=3, context=4, temperature=temperature)) == [1, 1, 1]
    assert set(whole.generate(module, [0], num_tokens=200, context=4, temperature=math.inf)) == {0, 1, 2}
