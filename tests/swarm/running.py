"""`swarmnet COMMAND` for tests: as a process of its own, with the events it writes; a whole local swarm.

Importing torch takes seconds of computing, so all that is started here is forked from one process that has done it.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import os
import signal
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from event_schema import line_problem
from safetensors.torch import load_file
from torch import Tensor

import swarmnet.local
from swarmnet.cli.frame import INTERRUPTED, run
from swarmnet.data.source import load_tokens
from swarmnet.local.supervisor import Kit
from swarmnet.manifest.file import load
from swarmnet.manifest.schema import Manifest
from swarmnet.ranks.launcher import ChildCall, ChildProcess, Launcher
from swarmnet.telemetry.events import EventReader
from swarmnet.testing.invariants import InvariantChecker
from swarmnet.testing.process_swarm import START_S, child_launcher
from swarmnet.testing.reference import ReferenceResult, run_reference

PATIENCE_S = 240.0

_one_at_a_time = threading.Lock()  # a launcher is for one thread


@functools.cache
def _launcher() -> Launcher:
    """Of all tests of this process, the one of `swarmnet local`."""
    return child_launcher()


class _Lent(Launcher):
    """The same, for one swarm: it stays when the swarm closes it."""

    def __init__(self) -> None:
        """Without a fork server of its own."""

    def ready(self) -> bool:
        return _launcher().ready()

    def lost(self) -> bool:
        return _launcher().lost()

    def start(self, call: ChildCall, deadline: float) -> ChildProcess:
        return _launcher().start(call, deadline)

    def abort(self) -> None:
        raise AssertionError("a swarm's launcher is not aborted")

    def close(self) -> None:
        pass


def train_locally(*words: str, settings: tuple[str, ...] = ()) -> tuple[int, str]:
    """`swarmnet local WORDS` in this process, its children forked as ours are: the exit code and what is printed."""
    words = (*words, *(word for setting in settings for word in ("--set", setting)))
    lent = functools.partial(swarmnet.local.run_local, kit=Kit(launcher=_Lent, strict=True))
    with mock.patch.object(swarmnet.local, "run_local", lent), _one_at_a_time:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
            code = run(["local", *words])
    if code == INTERRUPTED:
        raise KeyboardInterrupt  # Ctrl+C ended the swarm, and is meant for all tests
    return code, printed.getvalue()


class LocalRun:
    """What a local swarm left in its directory, on the small corpus. printed: on the terminal."""

    def __init__(self, directory: Path, printed: str = "") -> None:
        self.directory, self.printed = directory, printed

    @functools.cached_property
    def manifest(self) -> Manifest:
        return load(self.directory / "run.toml")

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    @functools.cached_property
    def rows(self) -> list[tuple[int, float]]:
        """(step, loss), as loss.csv has them."""
        with (self.directory / "loss.csv").open() as file:
            return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]

    @property
    def losses(self) -> list[float]:
        return [loss for _, loss in self.rows]

    @functools.cached_property
    def events(self) -> list[dict[str, Any]]:
        events = EventReader(self.directory / "events.jsonl").read()
        assert not [problem for event in events if (problem := line_problem(event))]
        return events

    def of(self, *names: str) -> list[dict[str, Any]]:
        """The events of these names."""
        return [event for event in self.events if event["event"] in names]

    @functools.cached_property
    def reference(self) -> ReferenceResult:
        return run_reference(self.manifest, load_tokens("corpus:small"))

    def last_weights(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Of each tensor of each replica's last checkpoint: where it is, its value, and one process's."""
        last = self.manifest.training.total_steps
        for path in sorted(self.directory.glob(f"peers/*/snapshots/*/*-step-{last}.safetensors")):
            for name, value in load_file(path).items():
                if name in self.reference.weights:
                    yield f"{path} {name}", value, self.reference.weights[name]

    def check_invariants(self) -> None:
        """From the members' own contributions: each index counts once, and replicas of a stage agree."""
        training = self.manifest.training
        checker = InvariantChecker(self.manifest.cut.stages, training.total_steps, training.microbatches)
        for event in self.events:
            checker.on(event)
        report = checker.report()
        assert not report.problems and not report.discarded, report
        assert self.summary["lost"] == self.summary["doubled"] == self.summary["discarded"] == 0


def run_swarm(out: Path, *words: str, settings: tuple[str, ...] = ()) -> LocalRun:
    """`swarmnet local WORDS` on the small corpus, which ends well."""
    code, printed = train_locally("--data", "corpus:small", "--out", str(out), *words, settings=settings)
    assert code == 0, printed
    return LocalRun(out, printed)


class Forked:
    """A process, as far as tests need what `subprocess.Popen` has. launcher: in whose directory, home and software
    it runs, if not in ours."""

    def __init__(self, *words: str, log: Path, launcher: Launcher | None = None) -> None:
        with _one_at_a_time:
            call = ChildCall(words, log.parent.name, output=log)
            self._child = (launcher or _launcher()).start(call, time.monotonic() + PATIENCE_S + START_S)
        self.pid, self.returncode = self._child.pid, None

    def wait(self, timeout: float = PATIENCE_S) -> int:
        code = self.poll(timeout)
        assert code is not None, f"it has not ended after {timeout} s"
        return code

    def poll(self, timeout: float = 0.0) -> int | None:
        if self.returncode is None and self._child.wait(time.monotonic() + timeout):
            with _one_at_a_time:
                self.returncode = self._child.code()
                self._child.close()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        self._child.send(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Terminal:
    """A pseudo-terminal. All that is written on it is appended to `copy`."""

    def __init__(self, copy: Path) -> None:
        self._ours, self._theirs = os.openpty()
        termios.tcsetwinsize(self._theirs, (50, 120))
        self.path = Path(os.ttyname(self._theirs))
        self._copy = copy
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        # Once nobody has it open any more, reading is an error.
        with self._copy.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while data := os.read(self._ours, 1 << 16):
                file.write(data)

    def close(self) -> None:
        os.close(self._theirs)
        self._thread.join(PATIENCE_S)
        os.close(self._ours)


class Running:
    """One `swarmnet COMMAND` as a process, and what it says. As a context: it does not outlive the block.

    module: what is run, with `words`. host: the address it listens at. again: the directory is that of an earlier one.
    launcher: of another swarmnet, if it is not the one under test. terminal: its output is a terminal.
    """

    def __init__(
        self,
        directory: Path,
        *words: str,
        module: tuple[str, ...] = ("swarmnet",),
        host: str = "127.0.0.1",
        again: bool = False,
        launcher: Launcher | None = None,
        terminal: bool = False,
    ) -> None:
        self.directory, self.words = directory, words
        self.events: list[dict[str, Any]] = []
        directory.mkdir(parents=True, exist_ok=again)
        self.log = directory / "log.txt"
        before = len(list(directory.glob("events*.jsonl")))
        events = directory / f"events{before or ''}.jsonl"
        self._reader = EventReader(events)
        where = ("--dir", str(directory), "--host", host, "--events", str(events))
        self._terminal = Terminal(self.log) if terminal else None
        output = self._terminal.path if self._terminal else self.log
        # What is forked has the standard output of a file, which seeks.
        what = ("-c", "import swarmnet.cli; swarmnet.cli.main()") if terminal else ("-m", *module)
        self.process = Forked(*what, *words, *where, log=output, launcher=launcher)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._terminal is not None:
            self._terminal.close()

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first event for which it holds, waiting for it. Fails with the log when the process ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ended = self.process.poll() is not None
            self.events += self._reader.read()
            for event in self.events:
                if holds(event):
                    return event
            assert not ended and time.monotonic() < deadline, f"{self.words}:\n{self.log.read_text()}"
            time.sleep(0.05)

    def so_far(self, *names: str) -> list[dict[str, Any]]:
        """Its events of these names, without waiting."""
        self.events += self._reader.read()
        return [event for event in self.events if event["event"] in names]

    def says(self, name: str, **fields: object) -> dict[str, Any]:
        return self.until(lambda event: event["event"] == name and fields.items() <= event.items())

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=PATIENCE_S)


def first_to_say(name: str, *processes: Running) -> Running:
    """The one that says it first, waiting for it while all go on."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := [each for each in processes if each.so_far(name)]):
        for each in processes:
            assert each.process.poll() is None and time.monotonic() < deadline, f"{each.words}:\n{each.log.read_text()}"
        time.sleep(0.05)
    return found[0]
