"""The fold over events, and what the table says about it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from swarmnet.local.progress import SwarmProgress
from swarmnet.local.report import RunOutcome, print_summary
from swarmnet.local.screen import SwarmScreen, duration, headline
from swarmnet.manifest.schema import Manifest
from swarmnet.telemetry.run_state import StageState
from swarmnet.testing.invariants import InvariantReport


def fresh(steps: int = 3) -> SwarmProgress:
    progress = SwarmProgress(steps=steps, replicas={f"s{s}-r{r}": StageState(s) for s in range(2) for r in range(2)})
    for name in progress.replicas:
        progress.started(name, now=0.0)
    return progress


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"event": kind, **fields}


def commit(step: int, *, stage: int = 1, tokens: int = 10) -> dict[str, Any]:
    return event("committed", stage=stage, step=step, loss_sum=(5.0 - step) * tokens, num_tokens=tokens)


def finished(stage: int) -> dict[str, Any]:
    return event("finished", stage=stage, version=1, weights_sha256="w")


def sync(progress: SwarmProgress, now: float = 1.0) -> None:
    for name, replica in progress.replicas.items():
        progress.on(name, event("synced", stage=replica.stage, version=0, how="seed"), now=now)


def test_the_curve_is_the_last_stages_first_word_in_step_order() -> None:
    progress = fresh()
    sync(progress)
    progress.on("s0-r0", commit(0, stage=0), now=2.0)
    assert progress.points == []
    progress.on("s1-r0", commit(1), now=4.0)
    assert progress.points == []  # step 0 is not there yet
    progress.on("s1-r1", commit(0), now=4.5)
    progress.on("s1-r0", commit(0), now=5.0)  # said already
    assert [(point.step, point.loss, point.time) for point in progress.points] == [(0, 5.0, 4.5), (1, 4.0, 4.0)]


def test_events_are_counted_by_process_and_over_all_that_ever_ran() -> None:
    progress = fresh()
    for name in ("s0-r0", "s0-r0", "s1-r0"):
        progress.on(name, event("rerouted", stage=0, step=0, index=0), now=1.0)
    progress.ended("s0-r0")
    progress.started("s0-r0", now=2.0)
    progress.on("s0-r0", event("outer_missed", stage=0, step=1), now=3.0)
    assert progress.events["s0-r0", "rerouted"] == 2
    assert (progress.count("rerouted"), progress.count("outer_missed"), progress.count("outer_step")) == (3, 1, 0)


def test_throughput_counts_from_when_every_stage_was_there() -> None:
    progress = fresh(steps=30)
    sync(progress, now=10.0)
    for step in range(20):
        progress.on("s1-r0", commit(step), now=10.0 + 2 * (step + 1))
    assert progress.tokens_per_second() == 5.0 == progress.recent_tokens_per_second()
    assert progress.eta_s() == 20.0


def test_who_drifted_is_counted_once_however_many_say_so() -> None:
    progress = fresh()
    for name in ("s0-r0", "s0-r1"):
        progress.on(name, event("drift", stage=0, version=10, peer="p"), now=1.0)
    progress.on("s0-r1", event("drift", stage=0, version=20, peer="p"), now=1.0)
    assert progress.strays == {(0, 10, "p"), (0, 20, "p")}


def test_executions_add_up_over_restarts() -> None:
    progress = fresh()
    progress.on("s0-r0", event("executed", stage=0, executions=5), now=1.0)
    progress.on("s0-r0", event("executed", stage=0, executions=7), now=1.0)
    progress.ended("s0-r0")
    progress.started("s0-r0", now=2.0)
    progress.on("s0-r0", event("executed", stage=0, executions=2), now=3.0)
    progress.on("s0-r1", event("executed", stage=0, executions=1), now=3.0)
    assert progress.total("executed") == 10


def test_the_dead_are_neither_synced_nor_bootstrap_nodes() -> None:
    progress = fresh()
    for name in progress.replicas:
        progress.on(name, event("listening", peer=f"id-{name}", dht=[f"/{name}", "/other"]), now=0.5)
    sync(progress)
    progress.ended("s0-r0")
    assert progress.alive(0) == 1 and progress.synced(0) == [0]
    assert progress.bootstrap() == ("/s0-r1", "/s1-r0", "/s1-r1")
    assert progress.bootstrap(but="s1-r0", most=1) == ("/s0-r1",)
    progress.ended("s0-r1")
    assert progress.waiting_for() == "no replica of stage 0 runs"
    progress.started("s0-r1", now=3.0)
    assert progress.waiting_for() == "stage 0 has no synced replica"


def test_while_it_starts_the_count_only_grows() -> None:
    progress = fresh()
    progress.trainers = frozenset(["trainer"])
    said = [progress.starting]
    for name, replica in progress.replicas.items():
        progress.on(name, event("listening", peer=name, dht=[f"/{name}"]), now=1.0)
        said.append(progress.starting)
        progress.on(name, event("synced", stage=replica.stage, version=0, how="seed"), now=1.0)
        said.append(progress.starting)
    progress.on("trainer", event("listening", peer="trainer", dht=["/t"]), now=2.0)
    assert list(dict.fromkeys([*said, progress.starting])) == [
        *(f"starting replicas, {up} of 4 are up" for up in range(4)),
        "4 replicas are up, 3 of them hold their weights",
        "4 replicas hold their weights, starting the trainer",
        "5 processes are up, the first step is under way",
    ]


def test_convicts_are_no_live_replicas() -> None:
    progress = fresh()
    sync(progress)
    progress.on("s0-r0", event("listening", peer="id", dht=["/a"]), now=0.5)
    progress.on("s0-r1", event("pledge_lied", peer="id", why="w"), now=2.0)
    assert progress.alive(0) == 2, "it sits out, and may come back"
    progress.on("s0-r1", event("convicted", peer="id", step=1, reason="lied"), now=2.0)
    assert progress.alive(0) == 1 and len(progress.synced(0)) == 1 and progress.state_of("s0-r0") == "convicted"


def test_complete_means_every_loss_and_every_stage_at_the_end() -> None:
    progress = fresh(steps=1)
    sync(progress)
    assert progress.waiting_for() == "stage 0, 1 to apply step 0"
    progress.on("s1-r0", commit(0), now=2.0)
    progress.on("s1-r0", event("applied", stage=1, step=0, version=1), now=2.0)
    assert progress.waiting_for() == "stage 0 to apply step 0"
    progress.on("s0-r0", finished(0), now=3.0)
    assert not progress.complete
    progress.on("s1-r0", finished(1), now=3.0)
    assert progress.complete and not progress.all_finished
    assert progress.waiting_for() == "final snapshots of s0-r1, s1-r1"
    progress.ended("s0-r1")
    progress.on("s1-r1", finished(1), now=3.0)
    assert progress.all_finished


def test_durations() -> None:
    assert [duration(s) for s in (None, 0, 59.6, 187, 3765)] == ["–", "0:00", "1:00", "3:07", "1:02:45"]


def test_a_terminal_gets_a_table_and_a_pipe_gets_lines() -> None:
    progress = fresh()
    sync(progress)
    progress.on("s1-r0", commit(0), now=2.0)
    progress.on("s1-r0", event("rerouted", stage=1, step=0, index=3), now=2.0)
    progress.on("t", event("evaluated", step=0, loss=5.5, num_tokens=10), now=2.0)
    progress.ended("s0-r1")
    line = headline(progress, now=62.0)
    assert line == (
        "step 1/3  loss 5.0000  held-out 5.5000 (step 0)  10 tokens/s  reroutes 1  kills 0  elapsed 1:02  ETA –"
    )
    pipe = io.StringIO()
    with SwarmScreen(Console(file=pipe, width=40)) as plain:
        for _ in range(2):
            plain.update(progress, now=3.0)
        plain.note("[not] markup")
    assert pipe.getvalue() == (
        "step    0  loss 5.0000         10 tokens/s  replicas 1 2  reroutes 1  kills 0  0:02\n[not] markup\n"
    )
    terminal = io.StringIO()
    with SwarmScreen(Console(file=terminal, force_terminal=True, width=120)) as live:
        live.update(progress, now=3.0)
        live.note("[a note]")
    shown = terminal.getvalue()
    assert "[a note]" in shown and "s0-r0 0   s0-r1 down" in shown and "1/2" in shown


def test_ctrl_c_names_the_way_on_if_every_stage_has_a_checkpoint() -> None:
    progress, way_on = fresh(), "    swarmnet local --resume --out runs/local\n"
    outcome = RunOutcome("ab", Manifest(), progress, InvariantReport(0, 0, 0, (), (), ()), 1.0, problem="interrupted")

    def said(**how: bool) -> str:
        output = io.StringIO()
        print_summary(outcome, Path("runs/local"), Console(file=output, width=200), **how)
        return output.getvalue()

    progress.on_disk = {0: {2, 4}}
    assert way_on not in said() and "interrupted\n" in said() and "FAILED" not in said()
    progress.on_disk[1] = {2}
    assert f"go on from the checkpoints of version 2 with:\n{way_on}" in said()
    assert f"{way_on[:-1]} --verify\n" in said(compares=True)


def test_who_is_not_up_yet() -> None:
    def ranks(name: str) -> int:
        return 2 if name == "s0-r0" else 1

    progress = fresh()
    assert progress.not_up(ranks) == ["s0-r0", "s0-r1", "s1-r0", "s1-r1"]
    for name in progress.replicas:
        progress.on(name, event("listening", peer="id", dht=["/dht"]), now=0.0)
    assert progress.not_up(ranks) == ["s0-r0"]
    progress.on("s0-r0", event("mesh_started", stage=0, mesh="tp2", epoch=1, pids=[], seconds=0.5), now=0.0)
    assert not progress.not_up(ranks)
    progress.on("s0-r0", event("rank_lost", stage=0, rank=0, reason="killed"), now=0.0)
    assert progress.not_up(ranks) == ["s0-r0"]
    progress.ended("s0-r0")
    assert not progress.not_up(ranks)


def test_the_lines_count_replicas_that_train_and_not_processes() -> None:
    """A killed one is away until it holds its weights again, and a stopped one while it falls behind."""

    def shown() -> str:
        out = io.StringIO()
        SwarmScreen(Console(file=out, width=200)).update(progress, now=3.0)
        return out.getvalue().partition("  reroutes")[0].partition("replicas ")[2]

    progress = fresh(steps=100)
    sync(progress)
    progress.on("s1-r0", commit(0), now=2.0)
    assert shown() == "2 2"
    progress.ended("s0-r1")
    assert shown() == "1 2"
    progress.started("s0-r1", now=2.0)
    assert shown() == "1 2"  # its process runs, no more
    progress.on("s0-r1", event("synced", stage=0, version=1, how="snapshot"), now=2.0)
    assert shown() == "2 2"
    for version in range(1, 20):
        progress.on("s1-r0", event("applied", stage=1, version=version), now=2.0)
    assert shown() == "2 1"  # the other one is stopped
