"""What a person sees while a local swarm runs: a live table on a terminal, else one line a step. Decides nothing.

The run is not about its output: when nobody reads it any more (`swarmnet local | head`), one line on standard error
says so, printing stops, and everything else goes on.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO, cast

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from swarmnet.local.progress import SwarmProgress
from swarmnet.telemetry.screen import Screen

STARTING_S = 1.0


class SwarmScreen(Screen):
    """The table, or the lines."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._shown = 0
        self._said, self._said_at = "", float("-inf")

    def update(self, progress: SwarmProgress, *, now: float) -> None:
        """Show this, if it differs from what is shown."""
        if self.redraws:
            self.show(Group(Text(headline(progress, now=now)), stages(progress)))
            return
        if progress.starting not in ("", self._said) and now - self._said_at >= STARTING_S:
            self._said, self._said_at = progress.starting, now
            self.note(progress.starting)
        # Of a run that goes on, what was done before has been said; and a run that goes back says steps again.
        self._shown = min(max(self._shown, progress.earlier_points), len(progress.points))
        for point in progress.points[self._shown :]:
            replicas = " ".join(f"{progress.alive(stage)}" for stage in range(progress.stages))
            self.note(
                f"step {point.step:>4}  loss {point.loss:.4f}  {progress.recent_tokens_per_second():>9,.0f} tokens/s"
                f"  replicas {replicas}  reroutes {progress.reroutes}  kills {len(progress.kills)}"
                f"  {duration(point.seconds)}"
            )
        self._shown = len(progress.points)


def duration(seconds: float | None) -> str:
    """3:07, 1:02:45, or a dash."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def headline(progress: SwarmProgress, *, now: float) -> str:
    """Step, loss, throughput, what went wrong so far, time; before the first step, how far the start is."""
    if progress.starting:
        return f"{progress.starting}  elapsed {duration(now - progress.started_at)}"
    parts = [
        f"step {len(progress.points)}/{progress.steps}",
        f"loss {progress.points[-1].loss:.4f}",
        f"{progress.recent_tokens_per_second():,.0f} tokens/s",
        f"reroutes {progress.reroutes}",
        f"kills {len(progress.kills)}",
        f"elapsed {duration(now - progress.started_at)}",
        f"ETA {duration(progress.eta_s())}",
    ]
    if progress.evaluations:
        step = max(progress.evaluations)
        parts.insert(2, f"held-out {progress.evaluations[step]:.4f} (step {step})")
    return "  ".join(parts)


def stages(progress: SwarmProgress) -> Table:
    """One row a stage: how many of its replicas live, which versions they hold."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("stage", "replicas", "versions"):
        table.add_column(name, justify="left")
    for stage in range(progress.stages):
        total = sum(replica.stage == stage for replica in progress.replicas.values())
        alive = progress.alive(stage)
        cells = []
        for name, replica in sorted(progress.replicas.items()):
            if replica.stage == stage:
                mesh, done = (f" ({replica.mesh})" if replica.mesh else ""), replica.finished and replica.alive
                cells.append(f"{name}{mesh} {progress.state_of(name)}{' ✓' * done}")
        style = "" if alive == total else "yellow" if alive else "red"
        table.add_row(str(stage), Text(f"{alive}/{total}", style=style), "   ".join(cells))
    return table


def say(console: Console, *lines: str) -> None:
    """Print each of `lines` that is not empty, as it is."""
    for line in filter(None, lines):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


# ---------------------------------------------------------------- a reader that goes away


class Outlet:
    """A text stream in front of `stream` for which a closed pipe is no error. As much of a file as `Console` needs."""

    def __init__(self, stream: TextIO, *, files: Path) -> None:
        """files: where the run's results are, for who wonders."""
        self._stream, self._files = stream, files

    @property
    def encoding(self) -> str:
        """That of the stream."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Is it a terminal?"""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's descriptor. Raises OSError if it has none."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Pass it on, as long as somebody reads."""
        with self._unread():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered, as long as somebody reads."""
        with self._unread():
            self._stream.flush()

    @contextlib.contextmanager
    def _unread(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            # What is in the buffer would raise again at the end of the process.
            _to_nowhere(self._stream)
            try:
                print(
                    f"swarmnet: nobody reads the output any more; the run goes on, its files are in {self._files} "
                    "(Ctrl+C ends it)",
                    file=sys.stderr,
                    flush=True,
                )
            except BrokenPipeError:  # both went to one reader: `2>&1 | head`
                _to_nowhere(sys.stderr)


def _to_nowhere(stream: IO[str]) -> None:
    """What is written from now on, and what still is in its buffer, is dropped."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def console(files: Path) -> Console:
    """Standard output as rich has it; see `Outlet`."""
    return Console(file=cast("IO[str]", Outlet(sys.stdout, files=files)))
