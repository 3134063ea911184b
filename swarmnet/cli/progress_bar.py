"""What a person sees while something is scored: one line a phase, and a bar on a terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from swarmnet.telemetry.screen import PLAIN_EVERY_S, Screen, phase_line


class ProgressBar(Screen):
    """Leave it before anything else is printed.

    Args:
        console: where.
        clock: seconds.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float]) -> None:
        super().__init__(console, transient=True)
        self._clock = clock
        self._bar: tuple[Progress, TaskID] | None = None
        self._began: tuple[float, int] | None = None
        self._said_at = 0.0

    def phase(self, name: str, text: str) -> None:
        """One line that stays."""
        self.note(phase_line(name, text))

    def scored(self, done: int, total: int, words: str) -> None:
        """`words` say how many of how many there are, and what of it; called as often as one likes."""
        now = self._clock()
        # The first call only starts the clock: what is done later is the pace.
        if self._began is None:
            self._began, self._said_at = (now, done), now
        began, first = self._began
        words += _pace(now - began, done - first, total - done)
        if self.redraws:
            self._draw(done, total, words)
        elif now - self._said_at >= PLAIN_EVERY_S:
            self._said_at = now
            self.phase("scoring", words)

    def _draw(self, done: int, total: int, words: str) -> None:
        if self._bar is None:
            whole = Column(no_wrap=True, overflow="ellipsis")  # in a narrow window the bar gives way, never a line
            progress = Progress(
                TextColumn("{task.description}", table_column=whole, markup=False),
                BarColumn(bar_width=None, table_column=Column(ratio=1)),
                console=self._console,
                expand=True,
            )
            self._bar = progress, progress.add_task("", total=total)
        progress, task = self._bar
        progress.update(task, completed=done, total=total, description=phase_line("scoring", words))
        self.show(progress.get_renderable())


def _pace(seconds: float, done: float, left: float) -> str:
    if not done or seconds <= 0.0:
        return ""
    rate = done / seconds
    how_fast = f"{rate:.1f}/s" if rate >= 1.0 else f"{60.0 * rate:.1f}/min"
    left_s = left / rate
    # Minutes and hours where seconds would pretend to be exact.
    if left_s < 120.0:
        return f"; {how_fast}, {left_s:.0f} s left"
    return f"; {how_fast}, " + (f"{left_s / 60.0:.0f} min left" if left_s < 7200.0 else f"{left_s / 3600.0:.1f} h left")
