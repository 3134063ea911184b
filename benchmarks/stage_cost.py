"""Where a stage's step goes: `swarmnet` with clocks around what its threads do, and what they make of a microbatch.

    python benchmarks/stage_cost.py FILE peer ...

is `swarmnet peer ...`, and adds a line to FILE after each update: what has been spent since the process began. Every
moment of a thread belongs to the innermost clock that is running. For `pipeline.py`, which prints `costs`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OF_FILES = {
    "transport": (
        "/grpc/",
        "/asyncio/",
        "/swarmnet/net/bulk",
        "/swarmnet/net/grpc",
        "/swarmnet/net/t",
        "/wire/framing",
    ),
    "claims, ledger, control": ("/swarmnet/step/", "/swarmnet/peer/", "/swarmnet/net/", "/swarmnet/telemetry/"),
    "calls of microbatches": ("/swarmnet/pipeline/", "/swarmnet/engine/"),
    "rounds": ("/swarmnet/averaging/", "/swarmnet/sums/"),
}
"""What a callback of an event loop is for, by the file of its code."""

LOOP = "other callbacks"


def kind_of(file: str) -> str:
    """What code in that file is for."""
    return next((kind for kind, marks in OF_FILES.items() if any(mark in file for mark in marks)), LOOP)


def file_of(callback: Any) -> str:
    """Where the code is that a callback runs, or a task goes on with."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return getattr(getattr(callback, "__code__", None), "co_filename", "") or (
            getattr(callback, "__module__", "") or ""
        )
    awaited, file = task.get_coro(), ""
    while (code := getattr(awaited, "cr_code", None)) is not None:
        file = code.co_filename
        awaited = awaited.cr_await
    return file


def watch_loop(spent: dict[str, float]) -> None:
    """Add up the CPU of all callbacks of this process's event loops."""
    run = asyncio.Handle._run

    def watched(self: asyncio.Handle) -> None:
        kind, began = kind_of(file_of(self._callback)), time.thread_time()
        run(self)
        spent[kind] += time.thread_time() - began

    asyncio.Handle._run = watched  # type: ignore[method-assign]


class Clocks:
    """Seconds by what they went into, since the process began: on the wall and of CPU. Any thread."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self._running = threading.local()

    def around(self, kind: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, with that clock around it."""

        @functools.wraps(work)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, mine = getattr(self._running, "inner", None), [0.0, 0.0]
            self._running.inner = mine
            began, cpu_began = time.perf_counter(), time.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                wall, cpu = time.perf_counter() - began, time.thread_time() - cpu_began
                self.wall[kind] += wall - mine[0]
                self.cpu[kind] += cpu - mine[1]
                self._running.inner = outer
                if outer is not None:
                    outer[0] += wall
                    outer[1] += cpu

        return timed


# ---------------------------------------------------------------- in a peer


def install(clocks: Clocks, stepped: Callable[[], None]) -> None:
    """Put clocks around what the threads of this process do. stepped: called on the compute thread after an update."""
    from swarmnet.engine.compute_thread import StageJobs
    from swarmnet.engine.payloads import Payloads
    from swarmnet.engine.torch_engine import TorchEngine
    from swarmnet.net.bulk.records import Opener, Sealer
    from swarmnet.ranks.chunks import Gradients
    from swarmnet.ranks.stage import RankStage
    from swarmnet.stage.accumulator import Accumulator

    places: tuple[tuple[str, type, tuple[str, ...]], ...] = (
        ("forward", RankStage, ("forward",)),
        ("backward", RankStage, ("backward",)),
        ("weight pass", Gradients, ("of",)),
        ("largest", RankStage, ("_largest",)),
        ("round and add", Accumulator, ("add",)),
        ("codecs", Payloads, ("input", "output", "gradient", "input_gradient")),
        ("engine", TorchEngine, ("_forward", "_backward", "_accumulate")),
        ("round", StageJobs, ("_alone",)),
        ("update", TorchEngine, ("_apply",)),
        ("sealing", Sealer, ("record", "start", "seal")),
        ("sealing", Opener, ("open",)),
    )
    for kind, owner, names in places:
        for name in names:
            setattr(owner, name, clocks.around(kind, getattr(owner, name)))
    update = TorchEngine._apply

    def applied(self: TorchEngine, *args: Any) -> Any:
        found = update(self, *args)
        stepped()
        return found

    TorchEngine._apply = applied  # type: ignore[method-assign]


class Recorder:
    """Writes a line after each update: all clocks, each thread's CPU, and what the event loop was at."""

    def __init__(self, file: Path) -> None:
        self._file, self._clocks = file.open("w"), Clocks()
        self._loop: dict[str, float] = defaultdict(float)
        install(self._clocks, self._stepped)
        watch_loop(self._loop)

    def _stepped(self) -> None:
        threads: dict[str, float] = defaultdict(float)
        for thread in threading.enumerate():
            threads[thread.name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
        threads["gRPC's own"] = time.process_time() - sum(threads.values())
        told = {
            "t": time.perf_counter(),
            "wall": self._clocks.wall,
            "cpu": self._clocks.cpu,
            "threads": threads,
            "loop": self._loop,
        }
        self._file.write(json.dumps(told) + "\n")
        self._file.flush()


# ---------------------------------------------------------------- what it comes to

PASSES = ("forward", "backward", "weight pass")


@dataclass(frozen=True, slots=True)
class Plain:
    """Seconds of forward and backward of one microbatch in a plain loop: on the wall, and of CPU."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of a microbatch. wall: of its stage's compute thread; together they are the step. beside: of CPU,
    in threads that share the cores with it; on the wall they are hidden, or in "waits for a core" above. overhead: what
    of both a plain loop has not, and is no arithmetic of sums: Python, and what it calls to move bytes."""

    wall: dict[str, float]
    beside: dict[str, float]
    overhead: dict[str, float]


def costs(before: Mapping[str, Any], after: Mapping[str, Any], plain: Plain, *, microbatches: int) -> Costs:
    """What a microbatch cost a stage between two lines of its record, with so many microbatches between them."""

    def spent(what: str) -> dict[str, float]:
        return defaultdict(float, {kind: after[what][kind] - before[what].get(kind, 0.0) for kind in after[what]})

    wall, cpu, threads, loop = spent("wall"), spent("cpu"), spent("threads"), spent("loop")
    whole = after["t"] - before["t"]
    passes, busy = sum(wall[kind] for kind in PASSES), sum(cpu[kind] for kind in PASSES)
    plain_wall, plain_cpu = plain.wall * microbatches, plain.cpu * microbatches
    rows = {
        "forward and backward, plain": plain_wall,
        "split backward": busy - plain_cpu,
        "waits for a core": passes - busy - (plain_wall - plain_cpu),
        "rounding and summing": wall["largest"] + wall["round and add"],
        "copies and codecs": wall["codecs"],
        "engine's checks": wall["engine"],
        "round: sum coded, digested": wall["round"],
        "update": wall["update"],
    }
    rows["idle: fill, hand-overs, barrier"] = whole - sum(rows.values())
    beside = {f"event loop: {kind}": seconds for kind, seconds in loop.items()}
    beside["event loop: itself"] = threads["MainThread"] - sum(loop.values())
    beside |= {kind: threads[kind] for kind in threads if kind not in ("MainThread", "compute", "averaging")}
    others = sum(threads[kind] for kind in threads if kind not in ("MainThread", "compute", "averaging"))
    overhead = {kind: rows[kind] for kind in ("split backward", "copies and codecs", "engine's checks")}
    overhead |= {kind: loop[kind] for kind in ("claims, ledger, control", "calls of microbatches")}
    overhead["TLS: records sealed and opened"] = cpu["sealing"]
    overhead["transport, the rest of it"] = loop["transport"] - cpu["sealing"]
    overhead["gRPC's threads, with its TLS"] = others
    # Of all callbacks the rest, and what runs them.
    overhead["event loop, the rest of it"] = threads["MainThread"] - sum(
        loop[kind] for kind in ("claims, ledger, control", "calls of microbatches", "transport")
    )
    overhead["together"] = sum(overhead.values())
    scale = 1000 / microbatches
    return Costs(
        {kind: seconds * scale for kind, seconds in rows.items()},
        {kind: seconds * scale for kind, seconds in beside.items() if seconds * scale >= 0.05},
        {kind: seconds * scale for kind, seconds in overhead.items()},
    )


def read(file: Path, *, first: int, last: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The lines that updates number `first` and `last` have written."""
    lines = file.read_text().splitlines()
    return json.loads(lines[first]), json.loads(lines[last])


def main() -> None:
    """Be `swarmnet`, and write FILE."""
    from swarmnet.cli import main as swarmnet

    Recorder(Path(sys.argv[1]))
    swarmnet(sys.argv[2:])


if __name__ == "__main__":
    main()
