"""Real processes whose clocks are set in mid-run: they go on, and say so."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from running import Running
from tiny_run import write_tiny_run

STEPS = 20


class Machine(Running):
    """A process on a machine of its own, whose clock can be set."""

    def __init__(self, place: Path, name: str, *words: str) -> None:
        self._path = place / f"{name}.skew"
        self.set_clock(0.0)
        manifest = ("--manifest", str(place / "run.toml"))
        super().__init__(place / name, *words, *manifest, module=("skewed", str(self._path)))

    def set_clock(self, by_s: float) -> None:
        draft = self._path.with_suffix(".draft")
        draft.write_text(str(by_s))
        os.replace(draft, self._path)

    def steps(self, more: int) -> None:
        """Wait for so many."""
        before = max((event["step"] for event in self.so_far("applied")), default=-1)
        self.until(lambda event: event["event"] == "applied" and event["step"] >= before + more)


def test_training_goes_on_when_clocks_are_set(tmp_path: Path) -> None:
    """That of the only replica of a stage back, by which others know where it is, and that of the trainer forward."""
    write_tiny_run(tmp_path, stages=2, steps=100_000)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Machine(tmp_path, "first", "peer", "--stage", "0", "--no-restart"))
        known = ("--bootstrap", first.says("listening")["dht"][0])
        stack.enter_context(Machine(tmp_path, "second", "peer", "--stage", "1", "--no-restart", *known))
        trainer = stack.enter_context(Machine(tmp_path, "trainer", "trainer", *known))
        for machine, by_s in ((first, -3600.0), (trainer, 3600.0)):
            first.steps(1)
            machine.set_clock(by_s)
            # What was under way would be done in any case.
            while "clock_changed" not in machine.log.read_text():
                first.steps(1)
            first.steps(STEPS)
