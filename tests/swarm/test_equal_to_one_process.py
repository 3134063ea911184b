"""The promise: a swarm of real processes has the loss curve and the weights of a single one, killed peers or not.

Six peers and a trainer over a real DHT and real gRPC, on real text, killed by SIGKILL in the middle of a step.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from running import train_locally
from safetensors.torch import load_file

from swarmnet.data.source import load_tokens
from swarmnet.local.oracle import run_oracle
from swarmnet.manifest.file import load
from swarmnet.manifest.schema import Manifest
from swarmnet.testing.invariants import InvariantChecker

STAGES, REPLICAS = 3, 2
KILLS = ("0@3", "1@8", "2@13")  # first, middle and last stage

SMALL = (
    "training.sequence_length=32",
    "training.microbatch_size=2",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.head_dim=16",
    "training.eval_every=10",
)

OVERLAP = ("averaging.sync=overlap", "averaging.overlap_after=6", "optimizer.lead=2.5")
"""Steps overlap after the first kill and before the second."""


@dataclass(frozen=True)
class Finished:
    """What a local swarm left behind."""

    directory: Path
    manifest: Manifest
    summary: dict
    losses: list[float]
    events: list[dict]
    printed: str


def run_local(directory: Path, *, numerics: str, kills: tuple[str, ...], settings: tuple[str, ...] = ()) -> Finished:
    size = ("--stages", str(STAGES), "--replicas", str(REPLICAS), "--steps", "20")
    rest = ("--data", "corpus:small", "--numerics", numerics, "--out", str(directory))
    killed = [word for kill in kills for word in ("--kill", kill)]
    # On a grid so fine rounding of kernels does not grow.
    settings = (*settings, *(("averaging.codec=int64",) if numerics == "fast" else ()))
    code, printed = train_locally(*size, *rest, *killed, settings=(*SMALL, *settings))
    assert code == 0, printed
    with (directory / "loss.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    return Finished(
        directory,
        load(directory / "run.toml"),
        json.loads((directory / "summary.json").read_text()),
        losses,
        [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()],
        printed,
    )


@pytest.fixture(
    scope="module",
    params=[
        ("fast", KILLS, OVERLAP),
        pytest.param(("fast", KILLS, ()), marks=pytest.mark.long),
        pytest.param(("deterministic", KILLS, OVERLAP), marks=pytest.mark.long),
        pytest.param(("deterministic", KILLS, ()), marks=pytest.mark.long),  # test_chaos_phases strikes harder
        pytest.param(("deterministic", (), ()), marks=pytest.mark.long),  # undisturbed: less is asked of them
        pytest.param(("fast", (), ()), marks=pytest.mark.long),
    ],
    ids=["fast-overlap-killed", "fast-killed", "overlap-killed", "deterministic-killed", "deterministic", "fast"],
)
def finished(request, tmp_path_factory) -> Finished:
    numerics, kills, settings = request.param
    return run_local(tmp_path_factory.mktemp("swarm") / "out", numerics=numerics, kills=kills, settings=settings)


def test_the_curve_is_one_process_s_curve(finished: Finished) -> None:
    tokens = load_tokens("corpus:small")
    oracle = run_oracle(finished.manifest, tokens)
    assert len(finished.losses) == 20 == len(oracle.losses)
    assert finished.losses[-1] < finished.losses[0] - 0.3  # it learns
    if finished.manifest.numerics.mode == "deterministic":
        assert finished.losses == oracle.losses
    else:
        assert max(abs(a - b) for a, b in zip(finished.losses, oracle.losses, strict=True)) <= 1e-5
    checked = 0
    for path in sorted(finished.directory.glob("peers/*/snapshots/*/*-step-20.safetensors")):
        for name, value in load_file(path).items():
            weight = oracle.weights.get(name.removeprefix("weights."))
            if weight is None:
                continue
            checked += 1
            if finished.manifest.numerics.mode == "deterministic":
                assert torch.equal(value, weight), (path, name)
            else:
                assert torch.allclose(value, weight, atol=2e-4), (path, name)
    assert checked == REPLICAS * len(oracle.weights)


def test_nothing_is_lost_or_doubled(finished: Finished) -> None:
    """From the contributions themselves, not from the loss; and replicas of a stage end equal."""
    training = finished.manifest.training
    checker = InvariantChecker(STAGES, training.total_steps, training.microbatches)
    for event in finished.events:
        checker.on(event)
    assert not checker.report().problems and not checker.report().voided
    assert finished.summary["lost"] == finished.summary["doubled"] == 0


def test_the_kills_happened_and_the_killed_came_back(finished: Finished) -> None:
    killed = [event for event in finished.events if event["event"] == "killed"]
    assert len(killed) == finished.summary["kills"]
    restarted = [e for e in finished.events if e["event"] == "synced" and e["how"] == "snapshot"]
    if killed:
        assert {int(event["child"][1]) for event in killed} == {0, 1, 2}
        assert {event["name"] for event in restarted} >= {event["child"] for event in killed}


def test_held_out_loss_is_measured(finished: Finished) -> None:
    steps = [event["step"] for event in finished.events if event["event"] == "evaluated"]
    assert steps == [0, 10, 20]
