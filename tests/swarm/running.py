"""One `swarmnet COMMAND` as a process of its own, and the events it writes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarmnet.ranks.starter import child_environment
from swarmnet.telemetry.events import EventReader

PATIENCE_S = 240.0


class Running:
    """One `swarmnet COMMAND` as a process, and what it says. As a context: it does not outlive the block.

    namespace: of the network it runs in, where it has the address `host`.
    """

    def __init__(self, directory: Path, *words: str, namespace: str = "", host: str = "127.0.0.1") -> None:
        self.directory, self.words = directory, words
        self.events: list[dict[str, Any]] = []
        directory.mkdir(parents=True)
        self.log = directory / "log.txt"
        self._reader = EventReader(directory / "events.jsonl")
        inside = ("ip", "netns", "exec", namespace) if namespace else ()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *inside,
                    sys.executable,
                    "-m",
                    "swarmnet",
                    *words,
                    "--dir",
                    str(directory),
                    "--host",
                    host,
                    "--events",
                    str(directory / "events.jsonl"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                env=child_environment(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2])},
            )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

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
