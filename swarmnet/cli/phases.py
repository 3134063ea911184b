"""What a person sees while a peer joins: one line a phase, and on a terminal a bar while the state comes in.

The story goes to standard output, the log as always to standard error. Decides nothing and knows no network: it is told
phases in words (`peer.joining`) and the peer's events.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn
from rich.table import Column

PLAIN_EVERY_S = 5.0
"""Where there is no bar, a line about the bytes so far this often."""


class Story:
    """A context manager; leave it before anything else is printed.

    clock: seconds. on_bar: called when the bar appears and when it has gone, so that the log can be pointed at whatever
    standard error is then (rich puts itself in between, and prints log lines above the bar).
    """

    def __init__(
        self, console: Console, *, clock: Callable[[], float], on_bar: Callable[[], None] = lambda: None
    ) -> None:
        self._console, self._clock, self._on_bar = console, clock, on_bar
        self._bars = contextlib.ExitStack()
        self._progress: Progress | None = None
        self._tasks: dict[object, TaskID] = {}
        self._began: dict[object, tuple[float, float]] = {}
        self._serving: set[object] = set()
        self._said_at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_bar()

    def phase(self, name: str, text: str) -> None:
        """One line that stays."""
        self._console.print(_named(name, text), markup=False, highlight=False, soft_wrap=True)

    def on_event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take in one event of the peer."""
        match event:
            case "fetching":
                self._fetching(fields)
            case "following" if self._progress is not None:
                self._bar_says(fields["stage"], f"catching up, version {fields['version']}")
            case "mesh_starting":
                whom = f"stage {fields['stage']} on {fields['ranks']} ranks ({fields['mesh']})"
                self.phase("ranks", f"{whom}: starting their processes")
            case "mesh_started":
                self.phase(
                    "ranks",
                    f"{len(fields['pids'])} ranks ({fields['mesh']}) of stage {fields['stage']} are up "
                    f"after {fields['seconds']:.1f} s",
                )
            case "rank_lost":
                which = "a rank" if fields["rank"] is None else f"rank {fields['rank']}"
                self.phase("ranks", f"{which} of stage {fields['stage']} was lost ({fields['reason']}): all start anew")
            case "dialled_back":
                found = (_names(fields[which]) for which in ("could", "could_not", "not_asked"))
                self.phase("reachable", _dialled_back(*found))
            case "synced":
                self._synced(fields)
            case "stopped":
                self._close_bar()

    # ------------------------------------------------------------ the state

    def _fetching(self, fields: Mapping[str, Any]) -> None:
        stage, got, total = fields["stage"], fields["bytes"], fields["total"]
        now, donors = self._clock(), fields["donors"]
        from_whom = f"from {donors} replica{'s' if donors != 1 else ''}"
        if self._console.is_terminal:
            self._bar(stage, got, total, from_whom)
            return
        began, first = self._began.setdefault(stage, (now, got))
        if now - self._said_at >= PLAIN_EVERY_S:
            self._said_at = now
            pace = (got - first) / (now - began) if now > began else 0.0
            going = f", {size(pace)}/s, {(total - got) / pace:.0f} s left" if pace and got < total else ""
            self.phase("state", f"{size(got)} of {size(total)} {from_whom}{going}")

    def _synced(self, fields: Mapping[str, Any]) -> None:
        self._close_bar()
        self._began.pop(fields["stage"], None)
        how, num_bytes, seconds = fields["how"], fields.get("bytes", 0), fields.get("seconds", 0.0)
        pace = f" ({size(num_bytes / seconds)}/s)" if num_bytes and seconds else ""
        took = f"{size(num_bytes)} in {seconds:.1f} s{pace}"
        words = {
            "seed": "drawn from the run's seed: it has not begun yet",
            "snapshot": took,
            "checkpoint": "from this peer's own disk",
            "neighbours": "made anew from the stages beside it, as a last resort",
        }.get(how, how)
        self.phase("state", f"version {fields['version']}, {words}")
        if fields["stage"] not in self._serving:
            self._serving.add(fields["stage"])
            place = f"stage {fields['stage']} from step {fields['version']} on"
            self.phase("serving", f"{place}; Ctrl+C leaves in good order")

    # ------------------------------------------------------------ the bar

    def _bar(self, key: object, got: int, total: int, words: str) -> None:
        if self._progress is None:
            whole = Column(no_wrap=True)  # in a narrow window the bar gives way, never a line
            self._progress = Progress(
                TextColumn("{task.description}", table_column=whole),
                BarColumn(bar_width=None, table_column=Column(ratio=1)),
                DownloadColumn(table_column=whole),
                SpeedColumn(table_column=whole),
                TimeRemainingColumn(compact=True, table_column=whole),
                console=self._console,
                transient=True,
                expand=True,
            )
            self._bars.enter_context(self._progress)
            self._on_bar()
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(_named("state", words), total=total)
        self._progress.update(self._tasks[key], completed=got, total=total)
        self._bar_says(key, words)

    def _bar_says(self, key: object, words: str) -> None:
        if self._progress is not None and key in self._tasks:
            self._progress.update(self._tasks[key], description=_named("state", words))

    def _close_bar(self) -> None:
        if self._progress is not None:
            self._bars.close()
            self._progress, self._tasks = None, {}
            self._on_bar()


def _dialled_back(could: list[str], could_not: list[str], not_asked: list[str]) -> str:
    silent = f"; could not ask {', '.join(not_asked)}" if not_asked else ""
    if could_not:
        tried, others = len(could) + len(could_not), ", ".join(could_not)
        return f"{len(could)} of {tried} members that tried could connect to this peer, not {others}{silent}"
    if not could:
        return f"nobody who was asked could say whether others can connect to this peer{silent}"
    return f"{len(could)} member{'s' if len(could) > 1 else ''} connected back{silent}"


def _names(peers: Iterable[str]) -> list[str]:
    return [f"...{peer[-8:]}" for peer in peers]


def _named(name: str, text: str) -> str:
    return f"{name:<9} {text}"


def size(num_bytes: float) -> str:
    """1.4 GB, 12 kB: decimal, as disks and links are measured."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
