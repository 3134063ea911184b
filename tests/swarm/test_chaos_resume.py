"""Every process of a swarm is killed at once, twice; it goes on from disk with the curve of one that never was.

The second life ends differently: not in the middle of a step of the supervisor's choice, but by killing the supervisor
itself, whose children die with it.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from running import PATIENCE_S, Forked, LocalRun, run_swarm, train_locally

STEPS, EVERY, KILL_ALL, KILL_LOCAL = 18, 3, 5, 11
SETTINGS = (
    "training.sequence_length=32",
    "training.microbatch_size=2",
    "training.eval_every=0",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.head_dim=16",
)


def versions(out: Path) -> list[int]:
    """The newest version that each replica's events mention."""
    found = []
    for path in out.glob("peers/s*/events.jsonl"):
        applied = [json.loads(line) for line in path.read_text().splitlines() if '"applied"' in line]
        found.append(max((event["version"] for event in applied), default=0))
    return found


@pytest.fixture(scope="module")
def swarm(tmp_path_factory) -> LocalRun:
    """A run in three lives."""
    out = tmp_path_factory.mktemp("dark") / "out"
    size = ("--stages", "2", "--replicas", "2", "--steps", str(STEPS))
    lives = ("--checkpoint-every", str(EVERY), "--kill-all", str(KILL_ALL))
    first = run_swarm(out, *size, *lives, settings=SETTINGS)
    assert f"swarmnet local --resume --out {out}" in first.printed
    killed = first.summary["killed_all"]
    assert KILL_ALL <= killed <= KILL_ALL + 2  # on a busy machine one hears of several steps at once
    assert first.rows[-1][0] in (killed - 1, killed)

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

    code, printed = train_locally("--resume", "--out", str(out), "--verify")
    assert code == 0, printed
    return LocalRun(out, printed)


def test_the_curve_has_every_step_once_and_is_the_references(swarm: LocalRun) -> None:
    assert [step for step, _ in swarm.rows] == list(range(STEPS))
    assert swarm.losses == swarm.reference.losses
    checked = 0
    for where, value, weight in swarm.last_weights():
        assert torch.equal(value, weight), where
        checked += 1
    assert checked == 2 * len(swarm.reference.weights)


def test_what_was_done_again_was_done_from_the_newest_common_checkpoint(swarm: LocalRun) -> None:
    summary, events = swarm.summary, swarm.events
    assert summary["ok"] and summary["resumed"] == 2
    assert summary["reference_bit_equal"] and summary["reference_weights_equal"]
    assert 1 <= summary["repeated_steps"] <= 2 * (EVERY + 2)
    began = [number for number, event in enumerate(events) if event["event"] == "began"]
    assert len(began) == 3
    for start in began[1:]:
        synced = [event for event in events[start:] if event["event"] == "synced"][:4]
        assert {event["stage"] for event in synced} >= {0, 1}
        assert all(event["version"] > 0 for event in synced)  # nobody began anew from the seed


def test_identities_are_kept(swarm: LocalRun) -> None:
    peers: dict[str, set[str]] = {}
    for path in sorted(swarm.directory.glob("peers/*/events.jsonl")):
        for line in path.read_text().splitlines():
            if '"listening"' in line:
                peers.setdefault(path.parent.name, set()).add(json.loads(line)["peer"])
    assert len(peers) == 5 and all(len(ids) == 1 for ids in peers.values())


def test_where_no_run_is_none_is_resumed(tmp_path: Path) -> None:
    code, printed = train_locally("--resume", "--out", str(tmp_path))
    assert code == 2 and "holds no run that could be resumed" in printed
