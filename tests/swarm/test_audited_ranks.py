"""A peer on several ranks beside a peer of one, in a run of real processes that audits: each verifies the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from running import Running
from tiny_run import write_tiny_run

from swarmnet.data.source import load_tokens
from swarmnet.manifest.file import load, to_toml
from swarmnet.manifest.schema import Audits
from swarmnet.testing.invariants import InvariantChecker
from swarmnet.testing.reference import run_reference

STEPS, MICROBATCHES = 12, 8


def test_nobody_suspects_ranks_that_do_nothing_wrong(start: Callable[..., Running], tmp_path: Path) -> None:
    path = write_tiny_run(tmp_path, steps=STEPS, microbatches=MICROBATCHES)
    manifest = load(path).model_copy(update={"audit": Audits(microbatches=0.5, contributions=0.2)})
    path.write_text(to_toml(manifest), encoding="utf-8")
    run = ("--manifest", str(path))
    # One slot each, so that both get work.
    peer = ("peer", *run, "--stage", "0", "--device", "cpu", "--slots", "1", "--no-restart")
    ranks = start("ranks", *peer, "--ranks", "2")
    known = ("--bootstrap", ranks.says("listening")["dht"][0])
    peers = [ranks, start("one", *peer, *known)]
    for each in peers:
        each.says("synced")  # or the one would have made most steps before the other has its ranks
    start("trainer", "trainer", *run, *known)
    checker = InvariantChecker(1, STEPS, MICROBATCHES, bits=False)
    for each in peers:
        each.says("finished", version=STEPS)
        assert each.so_far("weighed") and not each.so_far("withheld", "disputed"), each.log.read_text()
        # On a busy machine a check comes too late for the weights of its step: that is nobody's fault.
        reasons = [event["reason"] for event in each.so_far("untried")]
        assert all("no weights of that step" in reason for reason in reasons), reasons
        for event in each.events:
            checker.on(event, by=each.directory.name)
    found = checker.report()
    assert (found.problems, found.suspended) == ((), ())
    losses = {event["step"]: event["loss_sum"] / event["num_tokens"] for event in peers[1].so_far("committed")}
    reference = run_reference(manifest, load_tokens("corpus:small"))
    assert losses == {step: pytest.approx(reference.losses[step], abs=1e-5) for step in losses} and losses
