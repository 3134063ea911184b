"""`swarmnet watch` beside `swarmnet local`: the columns step, loss and tokens of both files are equal.

No step is done, its trainer stopped, until one watch is there and a stranger has joined. A second watch goes on with
the file of the first. The stranger outlives the swarm and knows all its steps, so nothing depends on who is quick.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from running import PATIENCE_S, Forked, Running

STEPS = 12
SETTINGS = (
    "training.sequence_length=32",
    "training.microbatch_size=2",
    "training.eval_every=2",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.head_dim=16",
    "model.num_heads=2",
    "protocol.long_silence_s=1800",
)


@dataclass(frozen=True)
class Watched:
    """What two watches and the swarm left behind."""

    out: Path
    csv: Path
    png: Path
    first: str
    by_first: list[int]
    second: list[dict[str, Any]]
    joiner: str


def eventually(what: Callable[[], Any], *processes: Forked) -> Any:
    """What it returns once that is something; files are polled, for there is no event to wait for."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline and all(each.poll() is None for each in processes)
        time.sleep(0.05)
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of JSON."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n") and line.startswith("{")]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    out, events, kept, png = folder / "out", folder / "out" / "events.jsonl", folder / "run.csv", folder / "run.png"
    started: list[Forked] = []

    def start(name: str, *words: str) -> Forked:
        started.append(Forked("-m", "swarmnet", *words, log=folder / f"{name}.txt"))
        return started[-1]

    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    size = ("--stages", "2", "--replicas", "1", "--steps", str(STEPS), "--data", "corpus:small")
    local = start("local", "local", *size, *sets, "--out", str(out))
    try:
        link = eventually(lambda: [e["links"][-1] for e in lines(events) if e["event"] == "listening"], local)[0]
        children = lambda: [e for e in lines(events) if e["event"] == "started" and e["child"].startswith("t")]  # noqa: E731
        (trainer,) = [e["pid"] for e in eventually(children, local)]
        os.kill(trainer, signal.SIGSTOP)
        follow = ("--csv", str(kept), "--every", "0.2")
        first = start("first", "watch", link, *follow)
        joining = Running(folder / "joiner", "join", link, "--stage", "1", "--device", "cpu", "--no-restart")
        with joining as joiner:
            joiner.says("synced")
            eventually(lambda: "joined stage 1" in (folder / "first.txt").read_text(), local, first)
            os.kill(trainer, signal.SIGCONT)
            eventually(lambda: kept.read_text().count("\n") > 2, first)
            first.send_signal(signal.SIGINT)
            assert first.wait() == 0, (folder / "first.txt").read_text()
            by_first = [int(step) for step, _, _ in columns(kept)]
            link = joiner.says("listening")["links"][-1]
            second = start("second", "watch", link, *follow, "--png", str(png), "--json")
            assert local.wait() == 0, (folder / "local.txt").read_text()
            assert second.wait() == 0, (folder / "second.txt").read_text()
            name = joiner.says("listening")["peer"]
            assert joiner.stop() == 0
        said = (folder / "first.txt").read_text()
        yield Watched(out, kept, png, said, by_first, lines(folder / "second.txt"), name)
    finally:
        for each in started:
            if each.poll() is None:
                each.kill()
                each.wait()


def columns(path: Path) -> list[tuple[str, ...]]:
    with path.open(newline="") as file:
        return [(row["step"], row["loss"], row["tokens"]) for row in csv.DictReader(file)]


def test_step_loss_and_tokens_are_those_of_the_swarms_own_file(watched: Watched) -> None:
    assert columns(watched.csv) == columns(watched.out / "loss.csv")
    assert len(columns(watched.csv)) == STEPS


def test_a_watch_that_goes_on_says_nothing_of_steps_that_the_first_one_wrote(watched: Watched) -> None:
    steps = [event["step"] for event in watched.second if event["event"] == "step"]
    assert len(watched.by_first) > 1 and watched.by_first + steps == list(range(STEPS))


def test_who_joins_is_said_and_where_the_run_stands(watched: Watched) -> None:
    assert f"...{watched.joiner[-8:]} joined stage 1" in watched.first
    assert f"/{STEPS}  loss " in watched.first and "  lr " in watched.first
    state = next(event for event in watched.second if event["event"] == "state")
    assert state["steps"] == STEPS and len(state["stages"]) == 2
    assert {"learning_rate", "tokens_per_second", "eta_s", "trainers", "problems", "held_out"} <= state.keys()


def test_other_columns_are_what_the_run_does(watched: Watched) -> None:
    with watched.csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["grad_norm"]) > 0 and float(row["learning_rate"]) > 0 for row in rows)
    with (watched.out / "loss.csv").open(newline="") as file:
        said = [(row["learning_rate"], row["grad_norm"]) for row in csv.DictReader(file)]
    assert [(row["learning_rate"], row["grad_norm"]) for row in rows] == said
    assert [float(row["time"]) for row in rows] == sorted(float(row["time"]) for row in rows)
    held_out = {int(row["step"]) + 1: float(row["held_out"]) for row in rows if row["held_out"]}
    evaluated = {e["step"]: e["loss"] for e in lines(watched.out / "events.jsonl") if e["event"] == "evaluated"}
    # Of the last ones only a watch knows that was there in time.
    assert held_out.items() <= evaluated.items()
    assert watched.png.read_bytes().startswith(b"\x89PNG")
