"""What a person sees while a local swarm runs: a live table on a terminal, else one line a step. Decides nothing.

In addition to the curve some of the children's events are worth a line, each said once (`News`): the link by which
others join, as long as there is one that works; checkpoints that cannot be used or written, and what is used instead;
ranks that are lost, and back; what a stage waits for; the run going back. Faults and crashes are the supervisor's to
tell.

The run is not about its output: when its reader is gone (`swarmnet local | head`), one line on standard error
says so, printing stops, and everything else goes on.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from swarmnet.local.progress import SwarmProgress
from swarmnet.telemetry.kinds import EventFold
from swarmnet.telemetry.run_state import RunState
from swarmnet.telemetry.screen import Screen, stage_table
from swarmnet.telemetry.text import duration

STARTING_S = 1.0

Processes = Mapping[str, RunState]
"""Those that run, by name."""


class SwarmScreen(Screen):
    """The table, or the lines."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._shown = 0
        self._said, self._said_at = "", float("-inf")
        self._news = News()

    def on(self, name: str, event: Mapping[str, Any]) -> None:
        """One event of the process `name`."""
        say(self._console, *self._news.on(name, event))

    def gone(self, name: str, others: Processes, *, back: bool) -> None:
        """The process `name` has ended. others: those that run. back: it will be started again."""
        say(self._console, *self._news.gone(name, others, back=back))

    def update(self, progress: SwarmProgress, *, now: float) -> None:
        """Show this, if it differs from what is shown."""
        say(self._console, *self._news.tick(progress.processes, now=now))
        if self.redraws:
            self.show(Group(Text(headline(progress, now=now)), stages(progress)))
            return
        if progress.starting not in ("", self._said) and now - self._said_at >= STARTING_S:
            self._said, self._said_at = progress.starting, now
            self.note(progress.starting)
        # Of a run that goes on, what was done before has been said; and a run that goes back says steps again.
        self._shown = min(max(self._shown, progress.earlier_points), len(progress.points))
        for point in progress.points[self._shown :]:
            replicas = " ".join(f"{progress.in_sync(stage)}" for stage in range(progress.stages))
            self.note(
                f"step {point.step:>4}  loss {point.loss:.4f}  {progress.recent_tokens_per_second():>9,.0f} tokens/s"
                f"  replicas {replicas}  reroutes {progress.count('rerouted')}  kills {len(progress.kills)}"
                f"  {duration(point.time)}"
            )
        self._shown = len(progress.points)


def headline(progress: SwarmProgress, *, now: float) -> str:
    """Step, loss, throughput, what went wrong so far, time; before the first step, how far the start is."""
    if progress.starting:
        return f"{progress.starting}  elapsed {duration(now - progress.started_at)}"
    parts = [
        f"step {len(progress.points)}/{progress.steps}",
        f"loss {progress.points[-1].loss:.4f}",
        f"{progress.recent_tokens_per_second():,.0f} tokens/s",
        f"reroutes {progress.count('rerouted')}",
        f"kills {len(progress.kills)}",
        f"elapsed {duration(now - progress.started_at)}",
        f"ETA {duration(progress.eta_s())}",
    ]
    if progress.evaluations:
        step = max(progress.evaluations)
        parts.insert(2, f"held-out {progress.evaluations[step]:.4f} (step {step})")
    return "  ".join(parts)


def stages(progress: SwarmProgress) -> Table:
    """One row a stage: how many of its replicas are in sync, which versions they hold."""
    cells: dict[int, list[str]] = {stage: [] for stage in range(progress.stages)}
    for name, replica in sorted(progress.replicas.items()):
        mesh, done = (f" ({replica.mesh})" if replica.mesh else ""), replica.finished and replica.alive
        cells[replica.stage].append(f"{name}{mesh} {progress.state_of(name)}{' ✓' * done}")
    return stage_table(("in sync", "versions"), ((stage, progress.in_sync(stage), cells[stage]) for stage in cells))


def say(console: Console, *lines: str) -> None:
    """Print each of `lines` that is not empty, as it is."""
    for line in filter(None, lines):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


# ---------------------------------------------------------------- news


PATIENCE_S = 5.0
"""A wait that ends sooner is part of every start, and nothing to tell."""

_ONCE = {
    "checkpoint_failed": (
        "{name}: the checkpoint {path} could not be written: {reason}; training goes on without it",
        "{event} {name}",
    ),
    "restart": ("the run goes on from version {version} (restart {number}, {reason})", "{event} {number}"),
    "dropped": ("stage {stage} at version {to} is not what it was: {reason}", "{event} {stage} {to} {reason}"),
}
"""The line for an event, and the part of it that identifies it: each is printed once, whichever process reports it."""

_SOURCES = {
    "checkpoint": "from an older checkpoint of its own",
    "snapshot": "fetched from other replicas",
    "seed": "drawn from the run's seed",
    "neighbours": "made again from the adjacent stages",
}


@dataclass(slots=True)
class News(EventFold):
    """What is worth a line. Tell it everything; what it returns are the lines. Pure."""

    _invited: tuple[str, str] | None = None  # by whom, and with which link
    _bad: set[str] = field(default_factory=set)  # with an unusable checkpoint
    _said: set[str] = field(default_factory=set)

    def on(self, name: str, event: Mapping[str, Any]) -> list[str]:
        """One event of the process `name`."""
        if (kind := event["event"]) in _ONCE:
            line, about = (text.format(name=name, **event) for text in _ONCE[kind])
            return self._once(line, about=about)
        return self.take(kind, name, event) or []

    def on_listening(self, name: str, event: Mapping[str, Any]) -> list[str]:
        *_, link = event.get("links") or [""]  # the last one is the one that works on this machine
        fresh = self._invited is None or (self._invited[0] == name and self._invited[1] != link)
        return self._invite(name, link) if link and fresh else []

    def on_checkpoint_bad(self, name: str, event: Mapping[str, Any]) -> list[str]:
        self._bad.add(name)
        return [f"{name}: the checkpoint {event['path']} is of no use: {event['reason']}"]

    def on_finished(self, name: str, event: Mapping[str, Any]) -> list[str]:
        # Said whatever it said before: no later checkpoint makes up for the last.
        words = f"{name}: the final weights of stage {event['stage']} could not be written to {event['path']}: "
        return [words + problem] if (problem := event.get("problem")) else []

    def on_rank_lost(self, name: str, event: Mapping[str, Any]) -> list[str]:
        which = "a rank" if event["rank"] is None else f"rank {event['rank']}"
        return [f"{name} has lost {which} ({event['reason']}): its ranks restart"]

    def on_mesh_started(self, name: str, event: Mapping[str, Any]) -> list[str]:
        up = f"{name} has its {len(event['pids'])} ranks ({event['mesh']}) again, after {event['seconds']:.1f} s"
        return [up] if event["epoch"] > 1 else []

    def on_synced(self, name: str, event: Mapping[str, Any]) -> list[str]:
        if name not in self._bad:
            return []
        self._bad.discard(name)
        return [f"{name} goes on from version {event['version']}, {_SOURCES.get(event['how'], event['how'])}"]

    def gone(self, name: str, others: Processes, *, back: bool) -> list[str]:
        """The process `name` has ended. back: it will be started again."""
        if back or self._invited is None or self._invited[0] != name:
            return []
        self._invited = None
        links = {other: state.links[-1] for other, state in others.items() if state.links}
        return self._invite(*next(iter(links.items()))) if links else []

    def tick(self, processes: Processes, *, now: float) -> list[str]:
        """Time has passed: what has been waited for so long that it is worth a word."""
        reasons = Counter(
            wait.fields["reason"]
            for state in processes.values()
            for stage, wait in state.waits.items()
            # Once a replica serves, the others say what is missing.
            if now - wait.since >= PATIENCE_S and (stage is not None or wait.since > state.synced_at)
        )
        if not reasons:
            return []
        ((reason, _),) = reasons.most_common(1)  # some see less of the swarm than others
        return self._once(f"waiting: {reason}")

    def _invite(self, name: str, link: str) -> list[str]:
        self._invited = name, link
        return [f"join it while it runs: swarmnet join {link}"]

    def _once(self, text: str, *, about: str = "") -> list[str]:
        if (about or text) in self._said:
            return []
        self._said.add(about or text)
        return [text]


# ---------------------------------------------------------------- a reader that goes away


class PatientConsole(Console):
    """Standard output as rich has it. If the reader of a pipe is gone, only the printing ends."""

    def __init__(self, files: Path) -> None:
        """files: where the run's results are, for who wonders."""
        super().__init__()
        self._files = files

    def on_broken_pipe(self) -> None:
        """Say so, once, and print nothing from now on."""
        self.quiet = True
        try:
            print(
                f"swarmnet: the output has no reader any more; the run goes on, its files are in {self._files} "
                "(Ctrl+C ends it)",
                file=sys.stderr,
                flush=True,
            )
        except BrokenPipeError:  # both went to one reader: `2>&1 | head`
            _to_nowhere(sys.stderr)
        # What is in the buffer would raise again at the end of the process.
        _to_nowhere(sys.stdout)


def _to_nowhere(stream: TextIO) -> None:
    """What is written from now on, and what still is in its buffer, is dropped."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
