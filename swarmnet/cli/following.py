"""What a person sees on standard error while an evaluation goes on: a bar on a terminal, elsewhere a line now and then.

It is told phases in words, and how many of how many are scored; from that and the clock it says how fast that goes and
how long the rest takes. Knows neither swarm nor model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from swarmnet.cli.phases import PLAIN_EVERY_S


class Following:
    """A context manager; leave it before anything else is printed. clock: seconds."""

    def __init__(self, console: Console, *, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._bar = contextlib.ExitStack()
        self._progress: Progress | None = None
        self._began: tuple[float, int] | None = None
        self._said_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._progress = None

    def phase(self, name: str, text: str) -> None:
        """What is done before anything can be scored: a line that stays."""
        self._line(f"{name:<9} {text}")

    def scored(self, done: int, total: int, words: str) -> None:
        """`words` say how many of how many there are, and what of it; called as often as one likes."""
        now = self._clock()
        if self._began is None:
            self._began, self._said_at = (now, done), now
        text = f"{'scoring':<9} {words}{_pace(now - self._began[0], done - self._began[1], total - done)}"
        if self._console.is_terminal:
            self._show(text, total, done)
        elif now - self._said_at >= PLAIN_EVERY_S:
            self._said_at = now
            self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show(self, text: str, total: int, done: int) -> None:
        if self._progress is None:
            whole = Column(no_wrap=True, overflow="ellipsis")
            self._progress = Progress(
                TextColumn("{task.description}", table_column=whole, markup=False),
                BarColumn(bar_width=None, table_column=Column(ratio=1)),
                console=self._console,
                transient=True,
                expand=True,
            )
            self._progress.add_task("", total=total)
            self._bar.enter_context(self._progress)
        self._progress.update(self._progress.task_ids[0], description=text, completed=done)


def _pace(seconds: float, done: int, left: int) -> str:
    if not done or seconds <= 0.0:
        return ""
    rate = done / seconds
    how_fast = f"{rate:.1f}/s" if rate >= 1.0 else f"{60.0 * rate:.1f}/min"
    return f"; {how_fast}, {_duration(left / rate)} left"


def _duration(seconds: float) -> str:
    if seconds < 120.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 7200.0 else f"{seconds / 3600.0:.1f} h"
