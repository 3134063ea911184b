"""The files and the summary a local swarm leaves behind: formats only, no number is made here."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from swarmnet.local.progress import SwarmProgress
from swarmnet.local.screen import say
from swarmnet.manifest.schema import Manifest
from swarmnet.telemetry.log import plain
from swarmnet.telemetry.plot import Mark, draw_curve
from swarmnet.telemetry.text import duration, typed
from swarmnet.testing.invariants import FP32_STEPS, Comparison, InvariantReport

INTERRUPTED = "interrupted"
UNCOMPARED = "the swarm finished; only the comparison with one process was interrupted"


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended. problem: the one line that explains a non-zero exit code, "" if all promises held.

    seconds: of all its lives, each earlier one to its last step.
    reference_problem: the part of it, at its end, that the comparison with one process adds.
    """

    run_id: str
    manifest: Manifest
    progress: SwarmProgress
    invariants: InvariantReport
    seconds: float
    problem: str = ""
    not_killed: tuple[str, ...] = ()  # orders that never could be carried out
    crashes: tuple[str, ...] = ()  # children that ended with an error
    reference: tuple[float, ...] | None = None
    comparison: Comparison | None = None
    reference_problem: str = ""
    killed_all: int | None = None  # the step in which everything was killed, by order
    resumed: int = 0  # how often the run was resumed
    ranks: Mapping[str, int] = field(default_factory=dict)  # of the replicas that have several


def shape(stages: int, replicas: int) -> str:
    """3 stages × 2 replicas, in good English."""
    return f"{stages} stage{'' if stages == 1 else 's'} × {replicas} replica{'' if replicas == 1 else 's'}"


def executions_per_index(outcome: RunOutcome) -> float:
    """Training forwards per (stage, step, index): 1.0 when nothing was computed twice."""
    done = outcome.progress.stages * len(outcome.progress.done) * outcome.manifest.training.microbatches
    return outcome.progress.total("executed") / done if done else 0.0


def agreement(manifest: Manifest) -> str:
    """How replicas of a stage agree, in a few words: fp32, sync local, int8, norm_clip."""
    averaging, mode = manifest.averaging, manifest.numerics.mode
    said = (f"sync {averaging.sync}", averaging.codec, averaging.reducer)
    return ", ".join([mode, *(word for word in said if word not in ("sync exact", "int64", mode, "sum"))])


def averaging_bytes_each(outcome: RunOutcome) -> int:
    """What a replica sends to the others of its stage in a step, on the average."""
    progress = outcome.progress
    return round(progress.total("sent_bytes") / max(progress.total("steps"), 1))


def summary(outcome: RunOutcome) -> dict[str, Any]:
    """What summary.json holds."""
    progress, invariants = outcome.progress, outcome.invariants
    points, evaluated = progress.points, max(progress.evaluations, default=None)
    found: dict[str, Any] = {
        "ok": not outcome.problem,
        "problem": outcome.problem,
        "run_id": outcome.run_id,
        "seed": outcome.manifest.training.seed,
        "numerics": outcome.manifest.numerics.mode,
        "stages": progress.stages,
        "replicas": len(progress.replicas) // progress.stages,
        "steps": len(points),
        "first_loss": points[0].loss if points else None,
        "final_loss": points[-1].loss if points else None,
        "eval_step": evaluated,
        "eval_loss": None if evaluated is None else progress.evaluations[evaluated],
        "tokens": sum(point.tokens for point in points),
        "tokens_per_second": round(progress.tokens_per_second(), 3),
        "seconds": round(outcome.seconds, 3),
        "session_seconds": round(outcome.seconds - progress.earlier_s, 3),
        "kills": len(progress.kills),
        "postponed_kills": len(progress.postponed),
        "kills_not_done": list(outcome.not_killed),
        "faults": dict(sorted(progress.faults.items())),
        "ranks": outcome.ranks,
        "rank_restarts": progress.total("rank_restarts"),
        "killed_all": outcome.killed_all,
        "resumed": outcome.resumed,
        "repeated_steps": invariants.repeated,
        "renewed_at": list(invariants.renewed),
        "reroutes": progress.count("rerouted"),
        "drifted": len(progress.strays),
        "lost": invariants.lost,
        "doubled": invariants.doubled,
        "discarded": invariants.discarded,
        "unaudited": [list(place) for place in invariants.unaudited],
        "digest_conflicts": [list(place) for place in invariants.conflicts],
        "executions_per_index": round(executions_per_index(outcome), 4),
        "averaging_bytes": progress.total("sent_bytes"),
        "averaging_bytes_per_replica_and_step": averaging_bytes_each(outcome),
        "outer_steps": progress.count("outer_step"),
        "outer_missed": progress.count("outer_missed"),
        "crashes": list(outcome.crashes),
        "suspended": list(invariants.suspended),
    }
    if progress.liars:
        found["liars"] = {name: _byzantine(progress, name) for name in sorted(progress.liars)}
        found["false_bans"] = progress.wronged
    return found | _compared(outcome)


def _byzantine(progress: SwarmProgress, name: str) -> dict[str, Any]:
    """How it deviated, how often, and which peers banned it when."""
    found = progress.convictions.get(name)
    named = {} if found is None else {"named_at": found.step, "named_by": sorted(found.by), "reason": found.reason}
    lied = {"kind": progress.liars[name], "lies": progress.events[name, "lied"]}
    return {**lied, "named_at": None, "named_by": [], **named}


def _compared(outcome: RunOutcome) -> dict[str, Any]:
    """What summary.json holds of a comparison with one process; nothing if none was asked for."""
    found: dict[str, Any] = {}
    if outcome.comparison is not None:
        found["reference_max_difference"] = outcome.comparison.max_difference
        found["reference_bit_equal"] = outcome.comparison.bit_equal
        found["reference_weights_equal"] = outcome.comparison.weights_equal
    if outcome.comparison is not None or outcome.reference_problem:
        found["reference_problem"] = outcome.reference_problem
    return found


def summary_before(directory: Path, *, steps: int) -> dict[str, Any] | None:
    """The summary that a finished run has, None if it has none of all its `steps`. Its `problem` is the swarm's."""
    try:
        found: dict[str, Any] = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        if found["steps"] != steps:
            return None
        problem = found["problem"].removesuffix(found.get("reference_problem", "")).removesuffix("; ")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # another program's file, or half of ours
    # Interrupted after the last step was done: the swarm itself had ended well.
    return found | {"problem": "" if problem == INTERRUPTED else problem}


def write(outcome: RunOutcome, directory: Path, before: dict[str, Any] | None = None) -> str:
    """loss.csv, summary.json, loss.png. Returns a note if the picture could not be drawn, else "".

    Raises OSError, which names the file; what it held before is untouched.

    before: the summary of a run that was finished already; only its comparison is new.
    """
    if before is None:
        found = summary(outcome)
        _put(directory / "loss.csv", _curve(outcome.progress))
    else:
        found = before | {"ok": not outcome.problem, "problem": outcome.problem} | _compared(outcome)
    text = json.dumps(plain(found), indent=2, allow_nan=False)
    _put(directory / "summary.json", text + "\n")
    try:
        return draw(outcome, directory / "loss.png")
    except OSError as error:
        return f"loss.png: not drawn: {error.strerror}"


def _curve(progress: SwarmProgress) -> str:
    """What loss.csv holds."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("step", "loss", "tokens", "seconds", "learning_rate", "grad_norm", "held_out"))
    for point in progress.points:
        rate, norm = progress.figures.get(point.step, (None, None))
        more = (rate, norm, progress.evaluations.get(point.step + 1))
        rows.writerow((point.step, point.loss, point.tokens, f"{point.time:.3f}", *more))
    return text.getvalue()


def _put(path: Path, text: str) -> None:
    """`path` holds `text`, or what it held before."""
    draft = path.with_name(f".{path.name}.part")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        # A write that fails names no file.
        raise OSError(error.errno, error.strerror, str(path)) from error


def draw(outcome: RunOutcome, path: Path) -> str:
    """The curve, held-out losses, kills, and the reference's curve. Returns a note instead if matplotlib is missing."""
    progress = outcome.progress
    size = shape(progress.stages, len(progress.replicas) // progress.stages)
    return draw_curve(
        path,
        [(point.step, point.loss) for point in progress.points],
        title=f"{size}, {outcome.manifest.numerics.mode}, run {outcome.run_id[:12]}",
        held_out=progress.evaluations,
        marks=[
            *(Mark(step, "kill", name, "tab:red") for name, step, _ in progress.kills),
            *(Mark(found.step, "named", name, "tab:green") for name, found in sorted(progress.convictions.items())),
        ],
        reference=outcome.reference or (),
        reference_is="all correct" if progress.liars else "one process",
    )


def print_summary(
    outcome: RunOutcome, directory: Path, console: Console, *, finished: bool = False, compares: bool = False
) -> None:
    """The last lines on the terminal. finished: the run was before, and only its comparison is news. compares: with one
    process, as was asked."""
    if not finished:
        say(console, *_told(outcome))
    if (found := outcome.comparison) is not None:
        say(console, f"compared with one process: {_difference(found, liars=bool(outcome.progress.liars))}")
    if not finished:
        say(
            console, f"run {outcome.run_id[:16]}, files in {directory}", *_way_on(outcome, directory, compares=compares)
        )
    if outcome.reference_problem == UNCOMPARED:
        again = f"    swarmnet local --resume --verify --out {typed(directory)}"
        say(console, f"{UNCOMPARED}. Do it again with:", again)
    if outcome.problem == INTERRUPTED:
        say(console, INTERRUPTED)
    elif outcome.problem not in ("", UNCOMPARED):
        console.print(f"FAILED: {outcome.problem}", style="bold red", markup=False, highlight=False, soft_wrap=True)


def _told(outcome: RunOutcome) -> Iterator[str]:
    """What happened, in numbers."""
    progress, invariants = outcome.progress, outcome.invariants
    points, executed = progress.points, executions_per_index(outcome)
    curve = f"loss {points[0].loss:.4f} → {points[-1].loss:.4f}" if points else "no loss"
    # A pace, and what is counted from here on, is of this session alone.
    session = "in this session " * bool(outcome.resumed)
    took = session and f"{session}{duration(outcome.seconds - progress.earlier_s)}, "
    yield (
        f"{len(points)} of {progress.steps} steps in {duration(outcome.seconds)}, {curve}, {took}"
        f"{progress.tokens_per_second():,.0f} tokens/s"
    )
    faults = [f"{kind} {count}" for kind, count in sorted(progress.faults.items()) if kind != "kill"]
    late = [f"{len(progress.postponed)} postponed"] if progress.postponed else []
    late += [f"not carried out: {', '.join(outcome.not_killed)}"] if outcome.not_killed else []
    waited = f" ({'; '.join(late)})" if late else ""
    yield (
        f"{', '.join([f'kills {len(progress.kills)}', *faults])}{waited}, "
        # Who was killed, or joined from outside, has not told of all.
        f"{session}reroutes {progress.count('rerouted')}, "
        f"executions per index {'at least ' * (executed < 1)}{executed:.3f}"
    )
    yield f"lost {invariants.lost}, doubled {invariants.doubled}, discarded {invariants.discarded}"
    taken, missed = progress.count("outer_step"), progress.count("outer_missed")
    outer = f"; {taken} outer steps taken together" if taken or missed else ""
    outer += f", {missed} missed" if missed else ""
    yield f"averaging: {averaging_bytes_each(outcome):,} bytes sent per replica and step{outer}"
    for name, kind in sorted(progress.liars.items()):
        liar = progress.convictions.get(name)
        named = (
            "not named" if liar is None else f"named at step {liar.step} by {', '.join(sorted(liar.by))}: {liar.reason}"
        )
        yield f"Byzantine {name} ({kind}, {progress.events[name, 'lied']} faults): {named}"
    yield from (f"warning: {line}" for line in invariants.suspended)
    if outcome.ranks:
        yield (
            f"ranks: {', '.join(f'{name} {ranks}' for name, ranks in sorted(outcome.ranks.items()))}; "
            f"restarted {progress.total('rank_restarts')} time{'s' * (progress.total('rank_restarts') != 1)}"
        )
    if progress.strays:
        yield f"drifted {len(progress.strays)} times; who had drifted took the others' weights"
    if outcome.resumed:
        # After a stage has lost its state, or where order counts, other losses are no fault.
        how = "other" if invariants.changed or invariants.renewed else "the same"
        yield f"resumed; {invariants.repeated} steps were done again" + f", with {how} losses" * invariants.repeats
    if invariants.renewed:
        versions = ", ".join(map(str, invariants.renewed))
        yield f"from version {versions} on another run than before: a stage had lost its state"


def _way_on(outcome: RunOutcome, directory: Path, *, compares: bool) -> list[str]:
    """How a run that was broken off goes on."""
    kept, asked = outcome.progress.checkpoint, " --verify" if compares else ""
    again = f"    swarmnet local --resume --out {typed(directory)}{asked}"
    if outcome.killed_all is not None:
        how = "no checkpoint of all stages was on disk: everything will be done again"
        if kept:
            how = f"it goes on from the checkpoints of version {kept}"
        return [f"everything was killed in step {outcome.killed_all}; {how}. Go on with:", again]
    if outcome.progress.lost_weights:
        return ["when the disk has space, go on with:", again]
    if outcome.problem == INTERRUPTED and kept:
        return [f"go on from the checkpoints of version {kept} with:", again]
    return []


def _difference(comparison: Comparison, *, liars: bool) -> str:
    how = "bit-equal" if comparison.bit_equal else f"largest at step {comparison.at_step}"
    if comparison.within is not None and not comparison.bit_equal and not comparison.problem:
        how += f", the first {FP32_STEPS} steps equal within {comparison.within:g}"
    if liars:
        how += "; without Byzantine replicas it would be none"
    elif not comparison.promised:
        how += "; under this manifest it shows who computed what: close is all that can be expected"
    weights = {True: "; last weights bit-equal", False: "; last weights differ", None: ""}[comparison.weights_equal]
    return f"largest loss difference {comparison.max_difference:.3g} ({how}){weights}"


def next_step(manifest: Manifest, path: Path) -> str:
    """What to do with a finished run with its manifest at `path`; "" if its tokens are no text."""
    if manifest.data.tokenizer == "ids":
        return ""
    here = os.path.relpath(path)
    shown = str(path) if here.startswith(os.pardir) else here
    prompt = "def " if manifest.data.source == "stdlib" else "The "
    return f'next: swarmnet generate {typed(shown)} "{prompt}"'
