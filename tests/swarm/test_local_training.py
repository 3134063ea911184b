"""`sync = "local"` in real processes, one of them killed: everything is counted once, and hardly anything is sent.

Its trace is JSON although one of its writers was killed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import LocalRun, run_swarm
from test_trace_processes import traced

STAGES, REPLICAS, STEPS, INNER = 2, 3, 10, 4
SMALL = (
    "training.sequence_length=32",
    "training.microbatch_size=2",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.head_dim=16",
    "model.num_heads=2",
    "training.eval_every=5",
)
LOCAL = (
    "averaging.sync=local",
    f"averaging.inner_steps={INNER}",
    "averaging.fragments=2",
    "averaging.codec=int8",
    # What else the machine does must not pass for silence: sums of floats may fork then, and heal.
    "protocol.suspect_s=10.0",
)


def train(out: Path, *settings: str, stages: int, replicas: int, kill: str) -> LocalRun:
    size = ("--stages", str(stages), "--replicas", str(replicas), "--steps", str(STEPS))
    trace = ("--trace", str(out.parent / "trace.json"))
    return run_swarm(out, *size, *trace, "--kill", kill, settings=(*SMALL, *settings))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    return train(tmp_path_factory.mktemp("swarm") / "out", *LOCAL, stages=STAGES, replicas=REPLICAS, kill="1@3")


def test_every_microbatch_is_counted_once_although_a_replica_was_killed(finished: LocalRun) -> None:
    summary = finished.summary
    assert (summary["steps"], summary["kills"]) == (STEPS, 1)
    assert (summary["lost"], summary["doubled"], summary["unaudited"], summary["digest_conflicts"]) == (0, 0, [], [])
    assert summary["final_loss"] < summary["first_loss"]


def test_fragments_take_outer_steps_by_turns_and_everything_in_the_last_step(finished: LocalRun) -> None:
    outer = {event["step"] for event in finished.of("outer_step", "outer_missed")}
    assert outer == {2, 4, 6, 8, STEPS - 1}
    last = [event for event in finished.of("outer_step") if event["step"] == STEPS - 1]
    half = [event for event in finished.of("outer_step") if event["step"] == 2]
    assert {event["stage"] for event in last} == {0, 1} and half
    assert all(
        ("reason" in event) == (event["event"] == "outer_missed") for event in finished.of("outer_step", "outer_missed")
    )
    assert min(event["elements"] for event in last) > 1.9 * max(event["elements"] for event in half)


def test_a_step_without_an_outer_step_sends_a_number(finished: LocalRun) -> None:
    sent: dict[int, list[int]] = {}
    for event in finished.of("applied"):
        sent.setdefault(event["step"], []).append(event["averaging_bytes"])
    assert max(sent[1] + sent[5]) <= 4 * 2 * (REPLICAS - 1)
    assert max(sent[4]) > 1000
    each = finished.summary["averaging_bytes_per_replica_and_step"]
    assert f"averaging: {each:,} bytes sent per replica and step; " in finished.printed


def test_the_trace_of_a_swarm_of_which_one_was_killed_is_json(finished: LocalRun) -> None:
    trace = json.loads((finished.directory.parent / "trace.json").read_bytes())
    (killed,) = [event["child"] for event in finished.of("killed")]
    names = {name for name, _ in traced(trace, "weights")}
    # What it did in its last second is lost, or all of it.
    assert {f"s{s}-r{r}" for s in range(STAGES) for r in range(REPLICAS)} - {killed} <= names | {killed}
    done = {step for name, step in traced(trace, "weights") if name.startswith("s0")}
    assert killed.startswith("s1") and done == set(range(STEPS))


@pytest.mark.long
def test_partners_take_outer_steps_in_pairs_and_everything_is_still_counted_once(tmp_path: Path) -> None:
    pairs = ("averaging.sync=local", f"averaging.inner_steps={INNER}", "averaging.partners=pairs")
    swarm = train(tmp_path / "out", *pairs, stages=1, replicas=4, kill="0@6")
    assert (swarm.summary["lost"], swarm.summary["doubled"], swarm.summary["unaudited"]) == (0, 0, [])
    outer = {event["step"] for event in swarm.of("outer_step")}
    assert outer == {4, 8, STEPS - 1}
    assert swarm.summary["outer_steps"] >= 3 * 2
