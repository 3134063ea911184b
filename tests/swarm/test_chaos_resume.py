"""Every process of a swarm is killed at once, twice; it goes on from disk with the curve of one that never was.

The second life ends differently: not in the middle of a step of the supervisor's choice, but by killing the supervisor
itself, whose children die with it.
"""

from __future__ import annotations

import csv
import json
import signal
import time
from pathlib import Path

import pytest
import torch
from running import PATIENCE_S, Forked, train_locally
from safetensors.torch import load_file

from swarmnet.data.source import load_tokens
from swarmnet.local.oracle import run_oracle
from swarmnet.manifest.file import load

STEPS, EVERY, KILL_ALL, KILL_LOCAL = 18, 3, 5, 11
SETTINGS = (
    "training.sequence_length=32",
    "training.microbatch_size=2",
    "training.eval_every=0",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.head_dim=16",
    "protocol.suspect_s=1.0",
    "protocol.long_silence_s=4.0",
)


def rows(out: Path) -> list[tuple[int, float]]:
    with (out / "loss.csv").open() as file:
        return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]


def versions(out: Path) -> list[int]:
    """The newest version that each replica's events mention."""
    found = []
    for path in out.glob("peers/s*/events.jsonl"):
        applied = [json.loads(line) for line in path.read_text().splitlines() if '"applied"' in line]
        found.append(max((event["version"] for event in applied), default=0))
    return found


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """A run in three lives."""
    out = tmp_path_factory.mktemp("dark") / "out"
    size = ("--stages", "2", "--replicas", "2", "--steps", str(STEPS), "--data", "corpus:small", "--out", str(out))
    lives = ("--checkpoint-every", str(EVERY), "--kill-all", str(KILL_ALL))
    code, printed = train_locally(*size, *lives, settings=SETTINGS)
    assert code == 0, printed
    assert f"swarmnet local --resume --out {out}" in printed
    killed = json.loads((out / "summary.json").read_text())["killed_all"]
    assert KILL_ALL <= killed <= KILL_ALL + 2  # on a busy machine one hears of several steps at once
    assert [step for step, _ in rows(out)][-1] in (killed - 1, killed)

    # A process of its own, which forks its peers from a process of its own.
    second = Forked("-m", "swarmnet", "local", "--resume", "--out", str(out), log=out / "second.txt")
    try:
        deadline = time.monotonic() + PATIENCE_S
        while max(versions(out)) < KILL_LOCAL:  # a poll of files: there is no event to wait for
            assert second.poll() is None and time.monotonic() < deadline, (out / "second.txt").read_text()
            time.sleep(0.05)
    finally:
        second.kill()
        ended = second.wait()
    assert ended == -signal.SIGKILL

    code, printed = train_locally("--resume", "--out", str(out), "--oracle")
    assert code == 0, printed
    return out


def test_the_curve_has_every_step_once_and_is_the_oracle_s(out: Path) -> None:
    found = rows(out)
    assert [step for step, _ in found] == list(range(STEPS))
    oracle = run_oracle(load(out / "run.toml"), load_tokens("corpus:small"))
    assert [loss for _, loss in found] == oracle.losses
    checked = 0
    for path in sorted(out.glob(f"peers/*/snapshots/*/*-step-{STEPS}.safetensors")):
        for name, value in load_file(path).items():
            weight = oracle.weights.get(name.removeprefix("weights."))
            if weight is not None:
                assert torch.equal(value, weight), (path, name)
                checked += 1
    assert checked == 2 * len(oracle.weights)


def test_what_was_done_again_was_done_from_the_newest_common_checkpoint(out: Path) -> None:
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ok"] and summary["resumed"] == 2
    assert summary["oracle_bit_equal"] and summary["oracle_weights_equal"]
    assert 1 <= summary["repeated_steps"] <= 2 * (EVERY + 2)
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    began = [number for number, event in enumerate(events) if event["event"] == "began"]
    assert len(began) == 3
    for start in began[1:]:
        synced = [event for event in events[start:] if event["event"] == "synced"][:4]
        assert {event["stage"] for event in synced} >= {0, 1}
        assert all(event["version"] > 0 for event in synced)  # nobody began anew from the seed


def test_identities_are_kept(out: Path) -> None:
    peers: dict[str, set[str]] = {}
    for path in sorted(out.glob("peers/*/events.jsonl")):
        for line in path.read_text().splitlines():
            if '"listening"' in line:
                peers.setdefault(path.parent.name, set()).add(json.loads(line)["peer"])
    assert len(peers) == 5 and all(len(ids) == 1 for ids in peers.values())


def test_where_no_run_is_none_is_resumed(tmp_path: Path) -> None:
    code, printed = train_locally("--resume", "--out", str(tmp_path))
    assert code == 2 and "holds no run that could be resumed" in printed
