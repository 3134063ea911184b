"""A peer on several ranks beside a peer of one, in a swarm of real processes that audits: each verifies the other."""

from __future__ import annotations

import json
from pathlib import Path

from running import train_locally

SMALL = (
    "audit.microbatches=0.5",
    "audit.contributions=0.2",
    "training.sequence_length=16",
    "training.microbatch_size=2",
    "training.eval_every=0",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.head_dim=16",
    "model.num_heads=2",
)


def test_nobody_suspects_ranks_that_do_nothing_wrong(tmp_path: Path) -> None:
    out = tmp_path / "out"
    size = ("--stages", "1", "--replicas", "2", "--steps", "16", "--ranks", "0.0=2", "--slots", "1")
    # A correct peer that is suspended fails the run.
    code, printed = train_locally(*size, "--data", "corpus:small", "--oracle", "--out", str(out), settings=SMALL)
    assert code == 0 and "warning" not in printed, printed
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert {event["name"] for event in events if event["event"] == "weighed"} == {"s0-r0", "s0-r1"}, printed
    assert not [event for event in events if event["event"] in ("withheld", "untried", "disputed", "late")]
    assert json.loads((out / "summary.json").read_text())["suspended"] == []
