"""What a person sees of the peer in this terminal: lines while it joins, and from then on a screen about this machine.

Drawn from the peer's `RunState` once a second, or where there is no terminal a line now and then; it knows no network.
What others have written is shown as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarmnet.peer.checkup import dialled_back, hidden
from swarmnet.telemetry.kinds import KINDS
from swarmnet.telemetry.run_state import RunState, StageState, StateTransfer
from swarmnet.telemetry.screen import PLAIN_EVERY_S, Screen, phase_line
from swarmnet.telemetry.text import counted, duration, printable, short, size

DRAW_S = 1.0

_MOST_PROBLEMS = 4
_RECENT_S = 600.0
"""A warning is a problem for so long, unless it comes again."""


_PHASES = {"listening": "listening", "dialled_back": "reachable", "hidden": "reachable", "synced": "synced"}
"""Of a join, by the event with which each is over."""


class JoinTimes:
    """When a joiner was through with each phase, in seconds from here on, until its first microbatch counts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: that of the run state's events."""
        self._clock, self._began = clock, clock()
        self.seconds: dict[str, float] = {}

    def passed(self, phase: str, at: float | None = None) -> None:
        """The first time is the one that counts. at: None: now."""
        self.seconds.setdefault(phase, round((self._clock() if at is None else at) - self._began, 2))

    def see(self, state: RunState) -> bool:
        """Returns, once, whether the first microbatch has been counted."""
        if "counted" in self.seconds or not any(here.contributed for here in state.stages.values()):
            return False
        for event, phase in _PHASES.items():
            if event in state.first:
                self.passed(phase, state.first[event])
        self.passed("counted")
        return True


class PeerScreen(Screen):
    """Lines and, on a terminal, the screen.

    Args:
        log_file: where the log goes while the screen is there.
        plain: lines alone, whatever the console is.
    """

    def __init__(
        self, console: Console, *, log_file: Path, plain: bool = False, on_live: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(console, transient=True, on_live=on_live)
        self._log_file, self._plain = log_file, plain
        self._state, self._told = RunState(), 0
        self._earlier = 0, 0  # what was accepted and computed in the stages before
        self._serving: set[int] = set()
        self._shown_at = self._said_at = float("-inf")

    @property
    def redraws(self) -> bool:
        """Is it to be a screen?"""
        return super().redraws and not self._plain

    @property
    def work(self) -> tuple[int, int]:
        """Microbatches of this peer that were accepted, and computed, since its process began."""
        stages = self._state.stages.values()
        accepted, computed = (sum(getattr(here, name) for here in stages) for name in ("contributed", "executed"))
        return self._earlier[0] + accepted, self._earlier[1] + computed

    def phase(self, name: str, text: str) -> None:
        """One line that stays."""
        self.note(phase_line(name, printable(text)))

    def see(self, state: RunState, now: float) -> None:
        """The state as it is now; as often as one likes."""
        if state is not self._state:  # it serves another stage
            self._earlier, self._state, self._told = self.work, state, 0
            self._serving.clear()
        fresh = state.num_told - self._told
        for event, fields in list(state.told)[-fresh:] if fresh else ():
            name, words = _TELLS[event]
            self.phase(name, words(fields))
        self._told = state.num_told
        for stage, here in state.stages.items():
            # A later resync is no news of where this peer serves.
            if here.version is not None and stage not in self._serving:
                self._serving.add(stage)
                self.phase("serving", f"stage {stage} from step {here.version} on; Ctrl+C leaves in good order")
        if not self.redraws:
            self._progress(state, now)
        # Before it is observed for the first time nothing is known of it.
        elif state.record is not None and now - self._shown_at >= DRAW_S:
            self._shown_at = now
            self.show(table(state, self.work, now=now, log_file=self._log_file))

    def _progress(self, state: RunState, now: float) -> None:
        """Where nothing is redrawn: a line about state that comes in, now and then."""
        if state.fetches and now - self._said_at >= PLAIN_EVERY_S:
            self._said_at = now
            for transfer in state.fetches.values():
                self.phase("state", _transfer(transfer, now))

    def end(self, contributed: str, directory: Path) -> None:
        """The last lines of a screen. contributed: by the peer of that directory, in all."""
        self.clear()
        share = f", {share:.1%} of the run" if (share := self._state.standing.share) else ""
        self.phase("accepted", f"{counted(self.work[0], 'microbatch')} since it was started{share}")
        if contributed:
            self.phase("in all", contributed)
        self.phase("again", f"the same command goes on as the same peer: its key and its state are in {directory}")


def table(state: RunState, work: tuple[int, int], *, now: float, log_file: Path) -> Table:
    """The screen. work: as of `PeerScreen`."""
    grid = Table.grid(padding=(0, 2))
    for name, words in (*_rows(state, work, now), ("log", str(log_file)), ("Ctrl+C", _LEAVES)):
        grid.add_row(Text(name, style="red" if name == "problem" else "dim"), Text(printable(words), overflow="fold"))
    return grid


_LEAVES = "finishes what this peer holds and leaves; a second one ends it at once"


def _rows(state: RunState, work: tuple[int, int], now: float) -> Iterator[tuple[str, str]]:
    stages = [state.stages[stage] for stage in sorted(state.stages)]
    record = state.record
    assert record is not None, "there is no screen before"
    yield "peer", ", ".join([f"{record.nickname} {short(record.peer)}".strip(), *map(_stage, stages)])
    yield "run", _run(state, now)
    pace = sum(here.per_second(now) for here in stages)
    queue, in_all = (sum(getattr(each, name) for each in record.stages) for name in ("queue", "slots"))
    slots = f"{queue} of {in_all} slots in use"
    yield "speed", f"{pace:.3g} microbatches/s, {pace * state.microbatch_tokens:,.0f} tokens/s, {slots}"
    (accepted, computed), standing = work, state.standing
    stands = f", {standing.share:.1%} of the run, number {standing.rank} of {standing.known:,} contributors"
    yield "accepted", f"{counted(accepted, 'microbatch')} of {computed:,} computed{stands if standing.rank else ''}"
    yield "link", _link(state)
    waited_for = [each for each in record.complaints if each.how == "waited_for"]
    waits = (*_waits(state, now), *(f"{short(each.peer)} of stage {each.stage} ({each.reason})" for each in waited_for))
    yield "waits for", "; ".join(waits) or "nothing"
    problems = list(_problems(state, now))
    for words in problems[:_MOST_PROBLEMS] or ["none"]:
        yield "problem" if problems else "problems", words
    if len(problems) > _MOST_PROBLEMS:
        yield "problem", f"and {len(problems) - _MOST_PROBLEMS} more in the log"


def _stage(here: StageState) -> str:
    mesh = f" ({here.mesh})" if here.mesh else ""
    if here.ranks_lost:
        return f"stage {here.stage}{mesh} starts its ranks again"
    if here.finished:
        return f"stage {here.stage}{mesh} complete"
    return f"stage {here.stage}{mesh} {'has no state yet' if here.version is None else 'in sync'}"


def _run(state: RunState, now: float) -> str:
    version, steps = state.version, f"{state.num_steps:,} steps" if state.num_steps else ""
    if version is None:
        return f"{steps or 'steps'}, of which this peer has taken part in none yet"
    at = f"step {version:,} of {state.num_steps:,}" if steps else f"step {version:,}"
    loss = f", loss {state.points[-1].loss:.4f}" if state.points else ""
    if version == state.num_steps:
        return f"{at}{loss}, complete: `swarmnet export` writes its model"
    eta_s = state.eta_s(now)
    ends = "" if eta_s is None else f", ends in about {duration(eta_s)}"
    return f"{at}{loss}{ends}"


def _link(state: RunState) -> str:
    up, down = (
        f"{size(rate)}/s" + (f" of {8e-6 * lent:g} Mbit/s offered" if lent else "")
        for rate, lent in zip(state.line, state.lent, strict=True)
    )
    last = state.crossed[-1]
    return f"sends {up}, receives {down}; {size(last.sent)} sent and {size(last.received)} received"


def _waits(state: RunState, now: float) -> Iterator[str]:
    if state.leaving:
        yield f"{state.leaving}, then it leaves"
    if state.pausing:
        yield f"the end of its pause ({state.pausing})"
    for stage, transfer in sorted(state.fetches.items()):
        yield f"the state of stage {stage}: {_transfer(transfer, now)}"
    for stage, here in sorted(state.stages.items()):
        if here.version is None and stage not in state.fetches:
            yield f"the state of stage {stage}"
    for wait in state.waits.values():
        advice = f" ({advice})" if (advice := wait.fields.get("advice")) else ""
        yield f"{duration(now - wait.since)} now, because {wait.fields['reason']}{advice}"


def _problems(state: RunState, now: float) -> Iterator[str]:
    """The newest first."""
    for (event, stage, _), (fields, at) in reversed(state.warned.items()):
        if now - at > _RECENT_S:
            continue
        meaning = KINDS[event].meaning
        for name, value in fields.items():  # what the table of events names in `...`
            meaning = meaning.replace(f"`{name}`", str(value))
        whom = f"{short(str(fields['peer']))}, " if fields.get("peer") else ""
        why = ", ".join(str(fields[name]) for name in ("reason", "then", "advice") if fields.get(name))
        of = "" if stage is None else f"stage {stage}: "
        yield f"{of}{meaning}: {whom}{why or 'see the log'} ({duration(now - at)} ago)"


# ---------------------------------------------------------------- in words


def _transfer(transfer: StateTransfer, now: float) -> str:
    """How far it has come."""
    fields, following = transfer.fields, transfer.following
    if following is not None:
        return f"catching up, version {following['version']} of {following['newest']}{_in_sync_in(following)}"
    got, total, donors = fields["bytes"], fields["total"], fields["donors"]
    pace = (got - transfer.first) / (now - transfer.since) if now > transfer.since else 0.0
    going = f", {size(pace)}/s, {(total - got) / pace:.0f} s left" if pace and got < total else ""
    share = f"{100 * got / max(total, 1):.0f} %{_in_sync_in(fields)}"
    return f"{share}; {size(got)} of {size(total)} from {counted(donors, 'replica')}{going}"


def _in_sync_in(fields: Mapping[str, Any]) -> str:
    steps = fields["level_in"]
    return "" if steps is None else f", in sync in about {max(round(steps), 1)} step{'s' if steps >= 1.5 else ''}"


def _too_slow(fields: Mapping[str, Any]) -> str:
    here, each = (f"{8e-6 * fields[name]:.0f} Mbit/s" for name in ("needs", "needs_each"))
    return (
        f"too slow: {size(fields['bytes_per_s'])}/s come, and every {fields['step_s']:.0f} s a sum of "
        f"{size(fields['sum_bytes'])} is added. To be in sync within {fields['within']} steps it takes "
        f"{size(fields['needs'])}/s: a line of {here} here, and of {each} at each of {fields['donors']} replicas if "
        "theirs never rest (a tenth is for joiners), or more replicas"
    )


def _synced(fields: Mapping[str, Any]) -> str:
    how, num_bytes, seconds = fields["how"], fields.get("bytes", 0), fields.get("seconds", 0.0)
    pace = f" ({size(num_bytes / seconds)}/s)" if num_bytes and seconds else ""
    words = {
        "seed": "drawn from the run's seed: it has not begun yet",
        "snapshot": f"{size(num_bytes)} in {seconds:.1f} s{pace}",
        "checkpoint": "from this peer's own disk",
    }.get(how, how)
    return f"version {fields['version']}, {words}"


def _rank_lost(fields: Mapping[str, Any]) -> str:
    which = "a rank" if fields["rank"] is None else f"rank {fields['rank']}"
    return f"{which} of stage {fields['stage']} was lost ({fields['reason']}): all start again"


def _mesh_started(fields: Mapping[str, Any]) -> str:
    up = f"{len(fields['pids'])} ranks ({fields['mesh']}) of stage {fields['stage']} are up"
    return f"{up} after {fields['seconds']:.1f} s"


_MOVING = "stage {to} needs this peer more than stage {from}: fetching its state, and serving on meanwhile"

_TELLS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "too_slow": ("state", _too_slow),
    "synced": ("state", _synced),
    "mesh_starting": ("ranks", "stage {stage} on {ranks} ranks ({mesh}): starting their processes".format_map),
    "mesh_started": ("ranks", _mesh_started),
    "rank_lost": ("ranks", _rank_lost),
    "dialled_back": ("reachable", dialled_back),
    "hidden": ("reachable", hidden),
    "relay_lost": ("reachable", lambda fields: f"not through {short(fields['relay'])} any more ({fields['reason']})"),
    "moving": ("moving", _MOVING.format_map),
    "move_failed": ("moving", "staying: {reason}".format_map),
    "moved": ("moving", "left stage {from} in good order".format_map),
}
"""Phase and words of each event with the mark `told`."""
