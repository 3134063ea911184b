"""What a run had done before it was resumed, from the files its processes left behind.

The children's own files are the source: a supervisor that was killed may not have merged all of them.
"""

from __future__ import annotations

import bisect
import csv
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarmnet.errors import UsageError
from swarmnet.local.options import LocalOptions
from swarmnet.local.progress import SwarmProgress
from swarmnet.net.identity import LOCK_FILE, FileLock
from swarmnet.telemetry.events import EventReader, of_kind
from swarmnet.telemetry.kinds import marked
from swarmnet.testing.fault import KINDS, Kill
from swarmnet.testing.invariants import InvariantChecker

BEGAN = "began"
"""The supervisor's event at the start of each life of a run."""


def members(out: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """(stage by replica, trainers) that have a directory in `out`. Raises UsageError if there is no run."""
    peers = out / "peers"
    found = sorted(path.name for path in peers.iterdir() if path.is_dir()) if peers.is_dir() else []
    replicas = {name: int(match[1]) for name in found if (match := re.fullmatch(r"s(\d+)-r\d+", name))}
    trainers = tuple(name for name in found if re.fullmatch(r"trainer-\d+", name))
    if not replicas or not (out / "run.toml").is_file():
        raise UsageError(f"{out} holds no run that could be resumed: it needs run.toml and peers/")
    # The first is started alone and is the others' way into the DHT: in the order in which they were started first.
    return dict(sorted(replicas.items(), key=lambda item: (item[0].partition("-")[2], item[1]))), trainers


def await_end(out: Path, *, patience_s: float = 10.0) -> None:
    """Wait until the members of an earlier life have ended: what a dying one writes belongs to that life.

    Raises UsageError if one runs on.
    """
    deadline = time.monotonic() + patience_s
    for path in sorted(out.glob(f"peers/*/{LOCK_FILE}")):
        while (held := FileLock.file(path)) is None:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{path.parent} is in use by a peer that still runs: end its `swarmnet local` (Ctrl+C), then resume"
                )
            time.sleep(0.05)  # a lock of another process: there is no event to wait for
        held.release()


def options(now: LocalOptions) -> LocalOptions:
    """The options of the run in `now.out`, for the session that `now` asks for.

    Raises UsageError if there is no run, or it cannot have such a session.
    """
    if now.out is None:
        raise UsageError("--resume needs --out DIR: the directory of the run that is to go on")
    members(now.out)  # raises, if there is no run
    if "options" not in (began := next(iter(_records(now.out, BEGAN)), {})):
        raise UsageError(f"{now.out} was begun by an older swarmnet, which did not record its options: begin it again")
    return now.resumed(began["options"])


def _records(out: Path, event: str) -> list[dict[str, Any]]:
    """What the supervisor wrote under this name, in all lives of the run."""
    records = EventReader(out / "events.jsonl").read()
    return [each for each in of_kind(records, event) if each.get("name", "local") == "local"]


def lives(out: Path) -> list[float]:
    """When each life of the run began, in unix seconds."""
    return [record["t"] for record in _records(out, BEGAN)]


def kills(out: Path) -> list[tuple[str, int, float]]:
    """Who was killed: (name, in which step, seconds since the run began)."""
    first = next(iter(lives(out)), 0.0)
    return [(record["child"], record["step"], record["t"] - first) for record in _records(out, Kill.event)]


def finished(out: Path, *, stages: int, steps: int) -> bool:
    """Has a replica of every stage held the last version, and said so, and is it on a disk?"""
    ended = {
        event["stage"]
        for path in out.glob("peers/s*/events.jsonl")
        for event in of_kind(EventReader(path).read(), "finished")
        if event["version"] == steps
    }
    # It may have been said of a disk that was full, and files may have been deleted since.
    return len(ended) == stages and all(final_weights(out, stage=stage, steps=steps) for stage in ended)


def final_weights(out: Path, *, stage: int, steps: int) -> list[Path]:
    """Of each checkpoint of the stage at the last version: the JSON, which is written last. The data are next to it."""
    return sorted(out.glob(f"peers/*/snapshots/*/stage-{stage}-step-{steps}.json"))


def replay(out: Path, began: Sequence[float], progress: SwarmProgress, checker: InvariantChecker) -> None:
    """Let `progress` and `checker` take in every commit, checkpoint and held-out loss that was written before, what was
    done to the run, and who lied and was named."""
    kept = marked("kept")
    events = sorted(
        (
            (event["t"], path.parent.name, event)
            for path in sorted(out.glob("peers/*/events.jsonl"))
            for event in EventReader(path).read()
            if event.get("event") in kept
        ),
        key=lambda entry: entry[0],
    )
    began = began or [at for at, _, _ in events[:1]]
    before, before_s = 0, 0.0
    for at, name, event in events:
        life = max(bisect.bisect_right(began, at) - 1, 0)
        # Between two lives no time passes.
        if life > before:
            before, before_s = life, progress.points[-1].time if progress.points else 0.0
        if name in progress.liars or checker.on(event, life=life, by=name):
            progress.on(name, event, now=before_s + at - began[life])
    # None of these processes runs, and none listens at their addresses.
    progress.processes.clear()
    # The curve was drawn by the times at which the supervisor read of a step.
    done_at = _done_at(out)
    progress.points = [
        replace(point, time=done_at.get((point.step, point.loss), point.time)) for point in progress.points
    ]
    progress.kills = kills(out)
    progress.faults.update({kind: len(_records(out, fault.event)) for kind, fault in KINDS.items()})
    progress.faults = +progress.faults
    # These steps were done in another life: what follows counts from here.
    progress.done.clear()
    progress.earlier_points = len(progress.points)
    progress.earlier_s = progress.points[-1].time if progress.points else 0.0


def _done_at(out: Path) -> dict[tuple[int, float], float]:
    """When each step was done, by its number and loss, as loss.csv has it; nothing if there is none."""
    try:
        with (out / "loss.csv").open(newline="", encoding="utf-8") as file:
            return {(int(row["step"]), float(row["loss"])): float(row["seconds"]) for row in csv.DictReader(file)}
    except (OSError, ValueError, LookupError, TypeError):
        return {}  # another program's file, or half of one
