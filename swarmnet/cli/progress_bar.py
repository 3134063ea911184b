"""What a person sees while one process joins, or scores: one line a phase, and a bar on a terminal for what takes long.

The log goes to standard error as always. Decides nothing and knows no network: it is told phases in words
(`peer.joining`), the peer's events, and how many of how many are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn
from rich.table import Column

from swarmnet.peer.checkup import dialled_back, hidden
from swarmnet.telemetry.screen import PLAIN_EVERY_S, Screen
from swarmnet.telemetry.text import short


class JoinTimes:
    """When a joiner was through with each phase, in seconds from here on, until its first microbatch counts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began = clock, clock()
        self.seconds: dict[str, float] = {}

    def passed(self, phase: str) -> None:
        """The first time is the one that counts."""
        self.seconds.setdefault(phase, round(self._clock() - self._began, 2))

    def on_event(self, event: str, fields: Mapping[str, Any]) -> bool:
        """Take in one event of the peer. Returns, once, whether its first microbatch has been counted."""
        if event in ("listening", "synced"):
            self.passed(event)
        elif event in ("dialled_back", "hidden"):
            self.passed("reachable")
        elif event == "executed" and fields["counted"] and "counted" not in self.seconds:
            self.passed("counted")
            return True
        return False


class ProgressBar(Screen):
    """Leave it before anything else is printed.

    Args:
        console: where.
        clock: seconds.
        on_bar: called when the bar appears and when it has gone, so that the log can be pointed elsewhere.
    """

    def __init__(
        self, console: Console, *, clock: Callable[[], float], on_bar: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(console, transient=True, on_live=on_bar)
        self._clock = clock
        self._progress: Progress | None = None
        self._tasks: dict[object, TaskID] = {}
        self._began: dict[object, tuple[float, float]] = {}
        self._serving: set[object] = set()
        self._said_at = float("-inf")

    def clear(self) -> None:
        """The bar goes."""
        super().clear()
        self._progress, self._tasks = None, {}

    def phase(self, name: str, text: str) -> None:
        """One line that stays."""
        self.note(_named(name, text))

    def on_event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take in one event of the peer."""
        match event:
            case "fetching":
                self._fetching(fields)
            case "following":
                self._following(fields)
            case "too_slow":
                self.phase("state", _too_slow(fields))
            case "mesh_starting":
                whom = f"stage {fields['stage']} on {fields['ranks']} ranks ({fields['mesh']})"
                self.phase("ranks", f"{whom}: starting their processes")
            case "mesh_started":
                up = f"{len(fields['pids'])} ranks ({fields['mesh']}) of stage {fields['stage']} are up"
                self.phase("ranks", f"{up} after {fields['seconds']:.1f} s")
            case "rank_lost":
                which = "a rank" if fields["rank"] is None else f"rank {fields['rank']}"
                self.phase("ranks", f"{which} of stage {fields['stage']} was lost ({fields['reason']}): all start anew")
            case "dialled_back":
                self.phase("reachable", dialled_back(fields))
            case "hidden":
                self.phase("reachable", hidden(fields))
            case "relay_lost":
                self.phase("reachable", f"not through {short(fields['relay'])} any more ({fields['reason']})")
            case "moving":
                whom = f"stage {fields['to']} needs this peer more than stage {fields['from']}"
                self.phase("moving", f"{whom}: fetching its state, and serving on meanwhile")
            case "move_failed":
                self.phase("moving", f"staying: {fields['reason']}")
            case "moved":
                self._serving.clear()
                self.phase("moving", f"left stage {fields['from']} in good order")
            case "synced":
                self._synced(fields)
            case "stopped":
                self.clear()

    # ------------------------------------------------------------ the state

    def _fetching(self, fields: Mapping[str, Any]) -> None:
        stage, got, total = fields["stage"], fields["bytes"], fields["total"]
        now, donors = self._clock(), fields["donors"]
        from_whom = f"from {donors} replica{'s' if donors != 1 else ''}"
        if self.redraws:
            self._bar(stage, got, total, from_whom + _level_in(fields), DownloadColumn, SpeedColumn, _time_left)
            return
        # Bytes of an earlier attempt count as there already, not as pace.
        began, first = self._began.setdefault(stage, (now, got))
        if now - self._said_at >= PLAIN_EVERY_S:
            self._said_at = now
            pace = (got - first) / (now - began) if now > began else 0.0
            going = f", {size(pace)}/s, {(total - got) / pace:.0f} s left" if pace and got < total else ""
            share = f"{100 * got / max(total, 1):.0f} %{_level_in(fields)}"
            self.phase("state", f"{share}; {size(got)} of {size(total)} {from_whom}{going}")

    def _following(self, fields: Mapping[str, Any]) -> None:
        words = f"catching up, version {fields['version']} of {fields['newest']}{_level_in(fields)}"
        if self._progress is not None:
            self._bar_says(fields["stage"], words)
        elif not self.redraws and self._clock() - self._said_at >= PLAIN_EVERY_S:
            self._said_at = self._clock()
            self.phase("state", words)

    def _synced(self, fields: Mapping[str, Any]) -> None:
        self.clear()
        # A later fetch of the stage has a pace of its own.
        self._began.pop(fields["stage"], None)
        how, num_bytes, seconds = fields["how"], fields.get("bytes", 0), fields.get("seconds", 0.0)
        pace = f" ({size(num_bytes / seconds)}/s)" if num_bytes and seconds else ""
        took = f"{size(num_bytes)} in {seconds:.1f} s{pace}"
        words = {
            "seed": "drawn from the run's seed: it has not begun yet",
            "snapshot": took,
            "checkpoint": "from this peer's own disk",
        }.get(how, how)
        self.phase("state", f"version {fields['version']}, {words}")
        # A later resync is no news of where this peer serves.
        if fields["stage"] not in self._serving:
            self._serving.add(fields["stage"])
            place = f"stage {fields['stage']} from step {fields['version']} on"
            self.phase("serving", f"{place}; Ctrl+C leaves in good order")

    # ------------------------------------------------------------ scoring

    def scored(self, done: int, total: int, words: str) -> None:
        """`words` say how many of how many there are, and what of it; called as often as one likes."""
        now = self._clock()
        # The first call only starts the clock: what is done later is the pace.
        if "scoring" not in self._began:
            self._began["scoring"], self._said_at = (now, done), now
        began, first = self._began["scoring"]
        words += _pace(now - began, done - first, total - done)
        if self.redraws:
            self._bar("scoring", done, total, words)
        elif now - self._said_at >= PLAIN_EVERY_S:
            self._said_at = now
            self.phase("scoring", words)

    # ------------------------------------------------------------ the bar

    def _bar(self, key: object, got: int, total: int, words: str, *columns: Callable[..., ProgressColumn]) -> None:
        """key: "scoring", or the stage whose state comes in."""
        if self._progress is None:
            whole = Column(no_wrap=True, overflow="ellipsis")  # in a narrow window the bar gives way, never a line
            self._progress = Progress(
                TextColumn("{task.description}", table_column=whole, markup=False),
                BarColumn(bar_width=None, table_column=Column(ratio=1)),
                *(column(table_column=Column(no_wrap=True)) for column in columns),
                console=self._console,
                expand=True,
            )
        # Stages of one peer fetch at once, a line each.
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task("", total=total)
        self._progress.update(self._tasks[key], completed=got, total=total)
        self._bar_says(key, words)

    def _bar_says(self, key: object, words: str) -> None:
        if self._progress is not None and key in self._tasks:
            name = "scoring" if key == "scoring" else "state"
            self._progress.update(self._tasks[key], description=_named(name, words))
            self.show(self._progress.get_renderable())


def _time_left(**named: Any) -> ProgressColumn:
    return TimeRemainingColumn(compact=True, **named)


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


def _level_in(fields: Mapping[str, Any]) -> str:
    steps = fields["level_in"]
    return "" if steps is None else f", level in about {max(round(steps), 1)} step{'s' if steps >= 1.5 else ''}"


def _too_slow(fields: Mapping[str, Any]) -> str:
    here, each = (f"{8e-6 * fields[name]:.0f} Mbit/s" for name in ("needs", "needs_each"))
    return (
        f"too slow: {size(fields['bytes_per_s'])}/s come, and every {fields['step_s']:.0f} s a sum of "
        f"{size(fields['sum_bytes'])} is added. To be level within {fields['within']} steps it takes "
        f"{size(fields['needs'])}/s: a line of {here} here, and of {each} at each of {fields['donors']} replicas if "
        "theirs never rest (a tenth is for joiners), or more replicas"
    )


def _named(name: str, text: str) -> str:
    return f"{name:<9} {text}"


def size(num_bytes: float) -> str:
    """1.4 GB, 12 kB: decimal, as disks and links are measured."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
