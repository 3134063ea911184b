"""A swarm of peers with different meshes is still one process: stage 1 on two ranks each, stage 2 on two and on one.

Ranks are killed by SIGKILL in the middle of steps. Their peers stay: they start others, from state in host memory.
"""

import csv
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swarmnet.data.source import load_tokens
from swarmnet.local.oracle import OracleResult, run_oracle
from swarmnet.manifest.file import load

STEPS = 20
KILLS = ("1@4", "2@7", "1@10", "2@14")
SMALL = ("training.sequence_length=32", "training.microbatch_size=2", "training.eval_every=0", "model.hidden_size=64",
         "model.intermediate_size=128", "model.head_dim=16")


@dataclass(frozen=True)
class Finished:
    """What the swarm left behind, and one process on the same manifest."""

    directory: Path
    summary: dict
    losses: list[float]
    events: list[dict]
    oracle: OracleResult

    def of(self, event: str) -> list[dict]:
        return [each for each in self.events if each["event"] == event]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Finished:
    directory = tmp_path_factory.mktemp("mixed") / "out"
    argv = [sys.executable, "-m", "swarmnet", "local", "--stages", "3", "--replicas", "2", "--steps", str(STEPS),
            "--ranks", "1=2,2.0=2", "--data", "corpus:small", "--numerics", "deterministic", "--out", str(directory)]
    argv += [word for setting in SMALL for word in ("--set", setting)]
    argv += [word for kill in KILLS for word in ("--kill-rank", kill)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    with (directory / "loss.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    return Finished(
        directory,
        json.loads((directory / "summary.json").read_text()),
        losses,
        [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()],
        run_oracle(load(directory / "run.toml"), load_tokens("corpus:small")),
    )


def test_losses_and_weights_are_those_of_one_process(finished: Finished) -> None:
    assert finished.losses == pytest.approx(finished.oracle.losses, abs=1e-5) and len(finished.losses) == STEPS
    assert finished.losses[-1] < finished.losses[0] - 0.3
    checked = 0
    for path in sorted(finished.directory.glob(f"peers/*/snapshots/*/*-step-{STEPS}.safetensors")):
        for name, value in load_file(path).items():
            if name in finished.oracle.weights:
                checked += 1
                torch.testing.assert_close(value, finished.oracle.weights[name], rtol=1e-4, atol=2e-5, msg=name)
    assert checked == 2 * len(finished.oracle.weights)


def test_replicas_of_a_stage_end_with_the_same_bits_on_whatever_mesh(finished: Finished) -> None:
    digests: dict[int, set[str]] = {}
    for event in finished.of("finished"):
        digests.setdefault(event["stage"], set()).add(event["weights_sha256"])
    assert {stage: len(found) for stage, found in digests.items()} == {0: 1, 1: 1, 2: 1}


def test_every_index_is_counted_once(finished: Finished) -> None:
    for event in finished.of("committed"):
        indexes = sorted(index for _, own in event["contributions"] for index in own)
        assert indexes == list(range(len(indexes))) and not event["voided"], event
    assert finished.summary["lost"] == finished.summary["doubled"] == 0


def test_ranks_die_and_no_peer_is_missed(finished: Finished) -> None:
    assert len(finished.of("kill_rank")) == len(finished.of("rank_lost")) == len(KILLS)
    assert len(finished.of("mesh_started")) == 3 + len(KILLS)
    assert {event["name"][:2] for event in finished.of("rank_lost")} == {"s1", "s2"}
    assert finished.summary["kills"] == 0
    first = finished.of("rank_lost")[0]["t"]
    missed = [event for event in finished.of("evicted") if event["t"] > first]
    assert len({(event["peer"], event["step"]) for event in missed}) <= len(KILLS), missed
