"""All replicas of a stage but one are killed, and a joiner that serves another stage moves in: real processes.

Three replicas of stage 1 are started by hand and stay; three joiners have all gone to stage 0. The run's losses are
those of a single process, before the move and after it.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fed_slowly import SLOWLY
from running import Running, first_to_say
from tiny_run import write_tiny_run

from swarmnet.cli.frame import run
from swarmnet.data.source import load_tokens
from swarmnet.manifest.file import load
from swarmnet.testing.reference import run_reference

STEPS, AFTER_MOVE = 4000, 5


def test_a_joiner_moves_in_where_all_but_one_were_killed(
    start: Callable[..., Running], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_run(tmp_path, stages=2, steps=STEPS, microbatches=6)
    manifest = load(path)
    alone = ("--device", "cpu", "--no-restart")
    survivor = start("survivor", "peer", "--manifest", str(path), "--stage", "1", *alone)
    listening = survivor.says("listening")
    known = ("--manifest", str(path), "--bootstrap", listening["dht"][0])
    dying = [start(name, "peer", *known, "--stage", "1", *alone) for name in ("dying-a", "dying-b")]
    for each in dying:
        each.says("synced")
    (link,) = listening["links"]
    joiners = []
    # One after the other: each sees fewer replicas of stage 0 than of stage 1.
    for name in ("a", "b", "c"):
        joiners.append(start(name, "join", link, *alone, "--rebalance-s", "5"))
        assert joiners[-1].says("synced")["stage"] == 0
    start("trainer", "trainer", *known, module=SLOWLY)
    survivor.until(lambda event: event["event"] == "applied" and event["version"] >= 5)
    for each in joiners:
        assert run(["control", "limits", "--slots", "3", "--dir", str(each.directory)]) == 0
    for each in dying:
        each.process.send_signal(signal.SIGKILL)

    mover = first_to_say("moved", *joiners)
    assert mover.says("moving")["from"] == 0
    moved = mover.says("moved")
    assert (moved["from"], moved["to"]) == (0, 1) and moved["version"] > 0
    synced = mover.says("synced", stage=1)
    # It began with the copy that it had fetched before it left, and took up what was summed since.
    assert synced["how"] == "snapshot" and synced["version"] >= moved["version"]
    assert not [event for event in mover.so_far("fetching") if event["stage"] == 1]
    me = mover.so_far("listening")[0]["peer"]

    def counts_there(event: dict) -> bool:
        return event["event"] == "committed" and any(peer == me and of for peer, of in event["contributions"])

    first = survivor.until(counts_there)["step"]
    capsys.readouterr()
    assert run(["control", "limits", "--json", "--dir", str(mover.directory)]) == 0
    assert json.loads(capsys.readouterr().out)["slots"] == 3, "what was asked of it holds where it is now"
    survivor.until(lambda event: event["event"] == "committed" and event["step"] >= first + AFTER_MOVE)

    commits = {event["step"]: event for event in survivor.so_far("committed")}
    reference = run_reference(manifest, load_tokens("corpus:small"), steps=max(commits) + 1)
    losses = {step: event["loss_sum"] / event["num_tokens"] for step, event in commits.items()}
    assert losses == {step: reference.losses[step] for step in losses} and len(losses) > first
    assert any(counts_there(commits[step]) for step in losses if step >= first)
