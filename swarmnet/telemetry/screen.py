"""The one progress screen: lines that stay, and on a terminal below them something that redraws itself in place.

Decides nothing and knows neither swarm nor model: it is told lines, and what to show of the moment. Where there is no
terminal, nothing is redrawn: the caller writes a line now and then instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Self

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swarmnet.telemetry.text import printable

REFRESH_S = 0.25
PLAIN_EVERY_S = 5.0
"""Where nothing can be redrawn, a line about what goes on this often."""


def phase_line(name: str, text: str) -> str:
    """A line about one phase of what a command does."""
    return f"{name:<9} {text}"


def stage_table(names: tuple[str, str], rows: Iterable[tuple[int, int, Iterable[str]]]) -> Table:
    """A row for each stage. names: of the columns after the first. rows: stage, how many replicas are in sync, and a
    few words about each replica."""
    table = Table("stage", *names, box=None, pad_edge=False, header_style="dim")
    for stage, in_sync, words in rows:
        cells = [printable(each) for each in words]
        style = "red" if not in_sync else "" if in_sync == len(cells) else "yellow"
        table.add_row(str(stage), Text(f"{in_sync}/{len(cells)}", style=style), Text("   ".join(cells) or "none"))
    return table


class Screen:
    """A context manager; leave it before anything else is printed.

    Args:
        console: where.
        transient: what was shown last vanishes when it is cleared.
        on_live: called when the region appears and when it has gone, so that the log can be pointed at whatever
            standard error is then (rich puts itself in between, and prints log lines above the region).
    """

    def __init__(
        self, console: Console, *, transient: bool = False, on_live: Callable[[], None] = lambda: None
    ) -> None:
        self._console, self._transient, self._on_live = console, transient, on_live
        self._live: Live | None = None
        self._drawn_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    @property
    def redraws(self) -> bool:
        """Is it a terminal, on which something can be shown in place?"""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    @property
    def live(self) -> bool:
        """Is something shown in place?"""
        return self._live is not None

    @property
    def width(self) -> int:
        """Columns."""
        return self._console.width

    def note(self, text: str) -> None:
        """Lines that stay."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, what: RenderableType) -> None:
        """Show this in place of what was shown before, unless that was drawn a moment ago: then it is kept for later.

        For screens that redraw.
        """
        if self._live is None:
            self._live, self._drawn_at = Live(console=self._console, auto_refresh=False, transient=self._transient), 0.0
            self._live.start()
            # rich hides the cursor, and a process that is killed could not give it back.
            self._console.show_cursor()
            self._on_live()
        now = time.monotonic()
        # Redrawing for each of a thousand events would take more time than the work.
        due = now - self._drawn_at >= REFRESH_S
        self._drawn_at = now if due else self._drawn_at
        # A terminal prints ^C where the cursor is: at its edge that would be one more line, which nobody takes back.
        self._live.update(Constrain(what, self.width - len("^C") - 1), refresh=due)

    def clear(self) -> None:
        """End what is shown, with its newest state if it stays."""
        if self._live is not None:
            # What was shown last may have been held back.
            self._live.refresh()
            self._live.stop()
            self._live = None
            self._on_live()
