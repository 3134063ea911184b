"""A peer on several ranks beside a peer of one, in a swarm of real processes that audits: each verifies the other."""

from __future__ import annotations

from pathlib import Path

from running import run_swarm

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
    size = ("--stages", "1", "--replicas", "2", "--steps", "30", "--ranks", "0.0=2", "--slots", "1")
    # A correct peer that is suspended fails the run.
    swarm = run_swarm(tmp_path / "out", *size, "--verify", settings=SMALL)
    assert "warning" not in swarm.printed, swarm.printed
    assert {event["name"] for event in swarm.of("weighed")} == {"s0-r0", "s0-r1"}, swarm.printed
    assert not swarm.of("withheld", "disputed", "late")
    # On a busy machine a check comes too late for the weights of its step: that is nobody's fault.
    assert not [event for event in swarm.of("untried") if "no weights of that step" not in event["reason"]]
    assert swarm.summary["suspended"] == []
