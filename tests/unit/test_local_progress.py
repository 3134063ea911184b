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


class Swarm(SwarmProgress):
    """Two stages of two, whose processes have started. `tell` is what each tells now."""

    def __init__(self, steps: int = 3, *, synced_at: float | None = None) -> None:
        super().__init__(steps=steps, replicas={f"s{s}-r{r}": StageState(s) for s in range(2) for r in range(2)})
        for name in self.replicas:
            self.started(name, now=0.0)
            if synced_at is not None:
                self.tell(name, "synced", synced_at, version=0, how="seed")

    def tell(self, name: str, event: str, now: float = 2.0, **fields: Any) -> None:
        if name in self.replicas:
            fields.setdefault("stage", self.replicas[name].stage)
        self.on(name, {"event": event, **fields}, now=now)

    def commit(self, name: str, step: int, now: float = 2.0, *, tokens: int = 10) -> None:
        self.tell(name, "committed", now, step=step, loss_sum=(5.0 - step) * tokens, num_tokens=tokens)

    def finish(self, name: str) -> None:
        self.tell(name, "finished", version=1, weights_sha256="w")

    def listen(self, name: str, *addresses: str) -> None:
        self.tell(name, "listening", 0.5, peer=f"id-{name}", dht=[f"/{name}", *addresses])


def plain(console: Console, *progress: SwarmProgress) -> str:
    """What is printed, and a note after it."""
    with SwarmScreen(console) as screen:
        for each in progress:
            screen.update(each, now=3.0)
        screen.note("[not] markup")
    return console.file.getvalue()


def test_the_curve_is_the_last_stages_first_word_in_step_order() -> None:
    swarm = Swarm(synced_at=1.0)
    swarm.commit("s0-r0", 0, 2.0)
    swarm.commit("s1-r0", 1, 4.0)
    assert swarm.points == []  # step 0 is not there yet
    swarm.commit("s1-r1", 0, 4.5)
    swarm.commit("s1-r0", 0, 5.0)  # said already
    assert [(point.step, point.loss, point.time) for point in swarm.points] == [(0, 5.0, 4.5), (1, 4.0, 4.0)]


def test_what_processes_did_adds_up_over_restarts() -> None:
    swarm = Swarm()
    for name, event, count in (
        *(("s0-r0", "rerouted", 0), ("s0-r0", "rerouted", 0), ("s1-r0", "rerouted", 0)),
        *(("s0-r0", "executed", 5), ("s0-r0", "executed", 7), ("s0-r0", "again", 0)),
        *(("s0-r0", "outer_missed", 0), ("s0-r0", "executed", 2), ("s0-r1", "executed", 1)),
    ):
        if event == "again":
            swarm.ended(name)
            swarm.started(name, now=2.0)
        else:
            swarm.tell(name, event, step=0, index=0, executions=count)
    assert swarm.events["s0-r0", "rerouted"] == 2 and swarm.total("executed") == 10
    assert (swarm.count("rerouted"), swarm.count("outer_missed"), swarm.count("outer_step")) == (3, 1, 0)


def test_throughput_counts_from_when_every_stage_was_there() -> None:
    swarm = Swarm(steps=30, synced_at=10.0)
    for step in range(20):
        swarm.commit("s1-r0", step, 10.0 + 2 * (step + 1))
    assert swarm.tokens_per_second() == 5.0 == swarm.recent_tokens_per_second()
    assert swarm.eta_s() == 20.0


def test_who_drifted_is_counted_once_however_many_say_so() -> None:
    swarm = Swarm()
    for name, version in (("s0-r0", 10), ("s0-r1", 10), ("s0-r1", 20)):
        swarm.tell(name, "drift", version=version, peer="p")
    assert swarm.strays == {(0, 10, "p"), (0, 20, "p")}


def test_the_dead_are_neither_synced_nor_bootstrap_nodes() -> None:
    swarm = Swarm(synced_at=1.0)
    for name in swarm.replicas:
        swarm.listen(name, "/other")
    swarm.ended("s0-r0")
    assert swarm.alive(0) == 1 and swarm.synced(0) == [0]
    assert swarm.bootstrap() == ("/s0-r1", "/s1-r0", "/s1-r1")
    assert swarm.bootstrap(but="s1-r0", most=1) == ("/s0-r1",)
    swarm.ended("s0-r1")
    assert swarm.waiting_for() == "no replica of stage 0 runs"
    swarm.started("s0-r1", now=3.0)
    assert swarm.waiting_for() == "stage 0 has no synced replica"


def test_while_it_starts_the_count_only_grows() -> None:
    swarm = Swarm()
    swarm.trainers = frozenset(["trainer"])
    said = [swarm.starting]
    for name in swarm.replicas:
        swarm.listen(name)
        said.append(swarm.starting)
        swarm.tell(name, "synced", version=0, how="seed")
        said.append(swarm.starting)
    swarm.listen("trainer")
    assert list(dict.fromkeys([*said, swarm.starting])) == [
        *(f"starting replicas, {up} of 4 are up" for up in range(4)),
        "4 replicas are up, 3 of them hold their weights",
        "4 replicas hold their weights, starting the trainer",
        "5 processes are up, the first step is under way",
    ]


def test_convicts_are_no_live_replicas() -> None:
    swarm = Swarm(synced_at=1.0)
    swarm.listen("s0-r0")
    swarm.tell("s0-r1", "pledge_lied", peer="id-s0-r0", why="w")
    assert swarm.alive(0) == 2, "it sits out, and may come back"
    swarm.tell("s0-r1", "convicted", peer="id-s0-r0", step=1, reason="lied")
    assert swarm.alive(0) == 1 and len(swarm.synced(0)) == 1 and swarm.state_of("s0-r0") == "convicted"


def test_complete_means_every_loss_and_every_stage_at_the_end() -> None:
    swarm = Swarm(steps=1, synced_at=1.0)
    assert swarm.waiting_for() == "stage 0, 1 to apply step 0"
    swarm.commit("s1-r0", 0)
    swarm.tell("s1-r0", "applied", step=0, version=1)
    assert swarm.waiting_for() == "stage 0 to apply step 0"
    swarm.finish("s0-r0")
    assert not swarm.complete
    swarm.finish("s1-r0")
    assert swarm.complete and not swarm.all_finished
    assert swarm.waiting_for() == "final snapshots of s0-r1, s1-r1"
    swarm.ended("s0-r1")
    swarm.finish("s1-r1")
    assert swarm.all_finished


def test_durations() -> None:
    assert [duration(s) for s in (None, 0, 59.6, 187, 3765)] == ["–", "0:00", "1:00", "3:07", "1:02:45"]


def test_a_terminal_gets_a_table_and_a_pipe_gets_lines() -> None:
    swarm = Swarm(synced_at=1.0)
    swarm.commit("s1-r0", 0)
    swarm.tell("s1-r0", "rerouted", step=0, index=3)
    swarm.tell("t", "evaluated", step=0, loss=5.5, num_tokens=10)
    swarm.ended("s0-r1")
    assert headline(swarm, now=62.0) == (
        "step 1/3  loss 5.0000  held-out 5.5000 (step 0)  10 tokens/s  reroutes 1  kills 0  elapsed 1:02  ETA –"
    )
    assert plain(Console(file=io.StringIO(), width=40), swarm, swarm) == (
        "step    0  loss 5.0000         10 tokens/s  replicas 1 2  reroutes 1  kills 0  0:02\n[not] markup\n"
    )
    shown = plain(Console(file=io.StringIO(), force_terminal=True, width=120), swarm)
    assert "[not] markup" in shown and "s0-r0 0   s0-r1 down" in shown and "1/2" in shown


def test_ctrl_c_names_the_way_on_if_every_stage_has_a_checkpoint() -> None:
    swarm, way_on = Swarm(), "    swarmnet local --resume --out runs/local\n"
    outcome = RunOutcome("ab", Manifest(), swarm, InvariantReport(0, 0, 0, (), (), ()), 1.0, problem="interrupted")

    def said(**how: bool) -> str:
        output = io.StringIO()
        print_summary(outcome, Path("runs/local"), Console(file=output, width=200), **how)
        return output.getvalue()

    swarm.on_disk = {0: {2, 4}}
    assert way_on not in said() and "interrupted\n" in said() and "FAILED" not in said()
    swarm.on_disk[1] = {2}
    assert f"go on from the checkpoints of version 2 with:\n{way_on}" in said()
    assert f"{way_on[:-1]} --verify\n" in said(compares=True)


def test_who_is_not_up_yet() -> None:
    swarm, ranks = Swarm(), {"s0-r0": 2}
    not_up = lambda: swarm.not_up(lambda name: ranks.get(name, 1))  # noqa: E731
    assert not_up() == ["s0-r0", "s0-r1", "s1-r0", "s1-r1"]
    for name in swarm.replicas:
        swarm.listen(name)
    assert not_up() == ["s0-r0"]
    swarm.tell("s0-r0", "mesh_started", mesh="tp2", epoch=1, pids=[], seconds=0.5)
    assert not not_up()
    swarm.tell("s0-r0", "rank_lost", rank=0, reason="killed")
    assert not_up() == ["s0-r0"]
    swarm.ended("s0-r0")
    assert not not_up()


def test_the_lines_count_replicas_that_train_and_not_processes() -> None:
    """A killed one is away until it holds its weights again, and a stopped one while it falls behind."""
    swarm = Swarm(steps=100, synced_at=1.0)
    swarm.commit("s1-r0", 0)

    def shown() -> str:
        return plain(Console(file=io.StringIO(), width=200), swarm).partition("  reroutes")[0].partition("replicas ")[2]

    assert shown() == "2 2"
    swarm.ended("s0-r1")
    assert shown() == "1 2"
    swarm.started("s0-r1", now=2.0)
    assert shown() == "1 2"  # its process runs, no more
    swarm.tell("s0-r1", "synced", version=1, how="snapshot")
    assert shown() == "2 2"
    for version in range(1, 20):
        swarm.tell("s1-r0", "applied", version=version)
    assert shown() == "2 1"  # the other one is stopped
