"""What a person sees while a local swarm runs: a live table on a terminal, else one line a step. Decides nothing."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from swarmnet.local.progress import SwarmProgress

REFRESH_S = 0.25
STARTING_S = 1.0


class Screen(Protocol):
    """Two implementations: LiveScreen, PlainScreen. Context managers; leave them before printing anything else."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, progress: SwarmProgress, *, now: float) -> None:
        """Show this, if it differs from what is shown."""
        ...

    def note(self, text: str) -> None:
        """One line that stays."""
        ...


def screen(console: Console) -> Screen:
    """The one that suits the console."""
    return LiveScreen(console) if console.is_terminal else PlainScreen(console)


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


class LiveScreen:
    """A table that redraws itself in place, a few times a second at most."""

    def __init__(self, console: Console) -> None:
        self._drawn_at = float("-inf")
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.refresh()
        self._live.__exit__(kind, error, trace)

    def update(self, progress: SwarmProgress, *, now: float) -> None:
        """Redraw if the last drawing is old enough; the newest state is drawn at the end in any case."""
        due = now - self._drawn_at >= REFRESH_S
        self._drawn_at = now if due else self._drawn_at
        self._live.update(Group(Text(headline(progress, now=now)), stages(progress)), refresh=due)

    def note(self, text: str) -> None:
        """Print above the table."""
        self._live.console.print(escape(text), highlight=False)


class PlainScreen:
    """One line for each step; for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0
        self._said, self._said_at = "", float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, progress: SwarmProgress, *, now: float) -> None:
        """Print the steps not printed yet; before the first one, once a second how far the start is."""
        if progress.starting not in ("", self._said) and now - self._said_at >= STARTING_S:
            self._said, self._said_at = progress.starting, now
            self.note(progress.starting)
        self._shown = min(max(self._shown, progress.earlier_points), len(progress.points))
        for point in progress.points[self._shown :]:
            replicas = " ".join(f"{progress.alive(stage)}" for stage in range(progress.stages))
            pace = f"{progress.recent_tokens_per_second():>9,.0f} tokens/s"
            self.note(
                f"step {point.step:>4}  loss {point.loss:.4f}  {pace}"
                f"  replicas {replicas}  reroutes {progress.reroutes}  kills {len(progress.kills)}"
                f"  {duration(point.seconds)}"
            )
        self._shown = len(progress.points)

    def note(self, text: str) -> None:
        """Print it, unwrapped."""
        self._console.print(escape(text), highlight=False, soft_wrap=True)
