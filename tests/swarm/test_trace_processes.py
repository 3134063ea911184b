"""`--trace`: a real local swarm's trace has every microbatch where it was counted.

`test_local_training.py` has the trace of a swarm of which one was killed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from running import run_swarm, train_locally

STEPS, MICROBATCHES = 6, 8
SMALL = (
    "training.sequence_length=32",
    "training.microbatch_size=1",
    f"training.microbatches={MICROBATCHES}",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.head_dim=16",
    "model.num_heads=2",
    "training.eval_every=0",
)
Where = tuple[str, int]
"""(name, step)."""


def traced(trace: list[dict[str, Any]], kind: str) -> dict[Where, list[int]]:
    """By peer and step: the indexes of its spans of a kind, in order."""
    names = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
    found: dict[Where, list[int]] = defaultdict(list)
    for event in trace:
        if event["name"] == kind and event["ph"] in "Xb":
            found[names[event["pid"]], event["args"]["step"]].append(event["args"].get("index", -1))
    return {where: sorted(indexes) for where, indexes in found.items()}


def committed(said: list[dict[str, Any]]) -> dict[Where, list[int]]:
    """By peer and step: the indexes that count from it."""
    peers = {event["peer"]: event["name"] for event in said if event["event"] == "listening"}
    return {
        (peers[peer], event["step"]): indexes
        for event in said
        if event["event"] == "committed"
        for peer, indexes in event["contributions"]
        if indexes
    }


def test_the_trace_has_every_microbatch_where_it_was_committed(tmp_path: Path) -> None:
    size = ("--stages", "2", "--replicas", "2", "--steps", str(STEPS))
    said = run_swarm(tmp_path / "out", *size, "--trace", str(tmp_path / "trace.json"), settings=SMALL).events
    trace = json.loads((tmp_path / "trace.json").read_bytes())
    counted = committed(said)
    assert sum(map(len, counted.values())) == 2 * STEPS * MICROBATCHES
    # On a busy machine a replica may have been thought dead, and its work been done again.
    disturbed = {event["step"] for event in said if event["event"] in ("evicted", "rerouted")}
    for kind in ("forward", "backward", "weights"):
        spans = traced(trace, kind)
        assert all(set(indexes) <= set(spans[where]) for where, indexes in counted.items()), kind
        alone = {where: indexes for where, indexes in spans.items() if where[1] not in disturbed}
        assert alone == {where: counted[where] for where in counted if where[1] not in disturbed}, kind
    everywhere = {(f"s{stage}-r{replica}", step) for stage in (0, 1) for replica in (0, 1) for step in range(STEPS)}
    for kind in ("averaging", "barrier", "update"):
        assert traced(trace, kind).keys() <= everywhere
    # On a busy machine a replica may have come late, with the state of a mate.
    applied = {(event["name"], event["step"]) for event in said if event["event"] == "applied"}
    assert applied <= everywhere and len({(name[:2], step) for name, step in applied}) == 2 * STEPS
    assert traced(trace, "update").keys() == applied
    began = min(event["ts"] for event in trace if "ts" in event) / 1e6
    ended = max(event["ts"] for event in trace if "ts" in event) / 1e6
    assert said[0]["t"] < began < ended < said[-1]["t"], "in UNIX time"


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work")
    code, printed = train_locally("--steps", "1", "--out", str(tmp_path / "out"), "--trace", str(thesis))
    assert code == 2 and "no trace: name another file" in printed
    assert thesis.read_text() == "years of work" and not (tmp_path / "out").exists()
