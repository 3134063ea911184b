"""How a watched run is shown: a table that redraws itself, a line for each look in a pipe, or lines of JSON."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarmnet.monitor.state import WatchedRun, synced
from swarmnet.peer.contributors import HEAD
from swarmnet.peer.swarm_health import Assessment, ReplicaLine
from swarmnet.telemetry.log import encode
from swarmnet.telemetry.screen import Screen, stage_table
from swarmnet.telemetry.text import duration, printable, short

MOST_ROWS = 5
"""Contributors on the screen, below the stages."""


class WatchView:
    """What a watch is shown by, as a context. This one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The watch is over."""

    def look(self, seen: WatchedRun) -> None:
        """What is known now."""

    def note(self, text: str) -> None:
        """Something for a person."""

    def end(self, text: str) -> None:
        """The last word."""


def headline(seen: WatchedRun) -> str:
    """Step, losses, rate, pace, replicas, and how long it takes."""
    found, curve, newest = seen.found, seen.curve, seen.curve.newest
    of = f"/{found.steps}" if found.steps else ""
    if newest is None:
        loss = f"  loss {found.loss.value:.4f} (step {found.loss.step})" if found.loss else ""
        return f"version {'?' if found.version is None else found.version}{of}{loss}  replicas {synced(found)}"
    parts = [f"step {newest.step + 1}{of}", f"loss {newest.loss:.4f}"]
    if (version := curve.newest_held_out) is not None:
        parts.append(f"held-out {curve.evaluations[version]:.4f} (version {version})")
    parts.append(f"lr {newest.learning_rate:.3g}")
    if (pace := curve.tokens_per_second(newest.step)) is not None:
        parts.append(f"{pace:,.0f} tokens/s")
    parts.append(f"replicas {synced(found)}")
    parts.append("finished" if found.finished else f"ETA {duration(seen.eta_s)}")
    if found.still_s and not found.finished:
        parts.append(f"no step for {duration(found.still_s)}")
    return "  ".join(parts)


def folded(line: str, width: int) -> list[str]:
    """`line` in rows of at most `width` columns, broken only between its parts, which two spaces part."""
    rows: list[str] = []
    for part in line.split("  "):
        if rows and len(rows[-1]) + 2 + len(part) <= width:
            rows[-1] += f"  {part}"
        else:
            rows.append(part)
    return rows


def stages(found: Assessment) -> Table:
    """A row for each stage: its replicas, with where they are and how fast."""

    def cell(each: ReplicaLine) -> str:
        region, speed = each.region and f" {each.region}", f" ({each.speed:.3g}/s)" if each.speed else ""
        return f"{short(each.peer)} {each.version if each.state == 'synced' else each.state}{region}{speed}"

    rows = ((line.stage, sum(each.ready for each in line.replicas), map(cell, line.replicas)) for line in found.stages)
    return stage_table(("synced", "replicas"), rows)


def contributed(found: Assessment) -> Table:
    """A row for each of those who have contributed the most."""
    table = Table(*HEAD, box=None, pad_edge=False, header_style="dim")
    for each in found.contributors[:MOST_ROWS]:
        table.add_row(*map(Text, each.cells))
    return table


class WatchScreen(Screen, WatchView):
    """For a person. Whatever comes from strangers is printed as text."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._said = ""

    def look(self, seen: WatchedRun) -> None:
        """Print what is new."""
        for change in seen.changes:
            self.note(printable(change.text))
        line = f"{seen.found.run[:12]}  {headline(seen)}"
        if self.redraws:
            rows: list[RenderableType] = [*map(Text, folded(printable(line), self.width)), stages(seen.found)]
            rows += [contributed(seen.found)] if seen.found.contributors else []
            self.show(Group(*rows))
        # In a pipe, a line when something has happened; a person does not read thousands.
        elif (seen.steps or seen.changes or not self._said) and line != self._said:
            self.note(printable(line))
        self._said = line

    def end(self, text: str) -> None:
        """The last line."""
        self.clear()
        self.note(printable(text))


class JsonLines(WatchView):
    """For a program: a line of JSON for each step, evaluation and change, and for each new state."""

    def __init__(self) -> None:
        self._said: dict[str, Any] = {}

    def look(self, seen: WatchedRun) -> None:
        """Print what is new."""
        curve = seen.curve
        for change in seen.changes:
            self._say(change.kind, change.fields)
        for point in curve.since(min(seen.steps)) if seen.steps else ():
            if point.step in seen.steps:
                fields = {name: getattr(point, name) for name in point.__slots__ if name != "held_out"}
                self._say("step", fields | {"tokens_per_second": curve.tokens_per_second(point.step)})
        for version in sorted(seen.versions):
            self._say("held_out", {"version": version, "loss": curve.evaluations[version]})
        if (now := seen.state()) != self._said:
            self._say("state", now)
        self._said = now

    def note(self, text: str) -> None:
        """Something for a person, which is not shown here."""
        self._say("note", {"text": text})

    def end(self, text: str) -> None:
        """The last line."""
        self._say("ended", {"text": text})

    def _say(self, event: str, fields: dict[str, Any]) -> None:
        print(encode({"event": event, **fields}), flush=True)
