"""The files and the summary a local swarm leaves behind. Formats only; the numbers come from progress and audit."""

from __future__ import annotations

import csv
import json
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Console

from swarmnet.local.audit import FP32_STEPS, AuditResult, Comparison
from swarmnet.local.progress import SwarmProgress
from swarmnet.local.screen import duration, say
from swarmnet.manifest.schema import Manifest
from swarmnet.telemetry.log import encode, plain

INTERRUPTED = "interrupted"
UNCOMPARED = "the swarm finished; only the comparison with one process was interrupted"


class MergedLog:
    """events.jsonl: every child's events in the order they were read, with the child's name; ours under "local"."""

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self._file: IO[str] = path.open("a" if append else "w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def child(self, name: str, record: Mapping[str, Any]) -> None:
        """One event as the child wrote it."""
        self._file.write(encode({"name": name, **record}) + "\n")

    def ours(self, event: str, **fields: Any) -> None:
        """One event of the supervisor: kill, restart, postponed, crashed."""
        self.child("local", {"t": time.time(), "event": event, **fields})
        self._file.flush()


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended. problem: the one line that explains a non-zero exit code, "" if all promises held.

    oracle_problem: the part of it, at its end, that the comparison with one process adds.
    """

    run_id: str
    manifest: Manifest
    progress: SwarmProgress
    verdict: AuditResult
    seconds: float
    problem: str = ""
    not_killed: tuple[str, ...] = ()  # orders that never could be carried out
    crashes: tuple[str, ...] = ()  # children that ended with an error
    oracle: tuple[float, ...] | None = None
    comparison: Comparison | None = None
    oracle_problem: str = ""
    killed_all: int | None = None  # the step in which everything was killed, by order
    resumed: int = 0  # how often the run was resumed
    ranks: Mapping[str, int] = field(default_factory=dict)  # of the replicas that have several


def shape(stages: int, replicas: int) -> str:
    """3 stages × 2 replicas, in good English."""
    return f"{stages} stage{'' if stages == 1 else 's'} × {replicas} replica{'' if replicas == 1 else 's'}"


def executions_per_index(outcome: RunOutcome) -> float:
    """Training forwards per (stage, step, index): 1.0 when nothing was computed twice."""
    done = outcome.progress.stages * len(outcome.progress.done) * outcome.manifest.training.microbatches
    return outcome.progress.executions / done if done else 0.0


def agreement(manifest: Manifest) -> str:
    """How replicas come to one sum, in a few words: fp32, sync local, int8, norm_clip."""
    averaging, mode = manifest.averaging, manifest.numerics.mode
    said = (f"sync {averaging.sync}", averaging.codec, averaging.reducer)
    return ", ".join([mode, *(word for word in said if word not in ("sync exact", "int64", mode, "sum"))])


def averaging_bytes_each(outcome: RunOutcome) -> int:
    """What a replica sends its mates in a step, on the average."""
    progress = outcome.progress
    return round(progress.averaging_bytes / progress.applied) if progress.applied else 0


def summary(outcome: RunOutcome) -> dict[str, Any]:
    """What summary.json holds."""
    progress, verdict = outcome.progress, outcome.verdict
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
        "kills": len(progress.kills),
        "postponed_kills": len(progress.postponed),
        "kills_not_done": list(outcome.not_killed),
        "faults": dict(sorted(progress.faults.items())),
        "ranks": outcome.ranks,
        "rank_restarts": progress.rank_restarts,
        "killed_all": outcome.killed_all,
        "resumed": outcome.resumed,
        "repeated_steps": verdict.repeated,
        "renewed_at": list(verdict.renewed),
        "reroutes": progress.reroutes,
        "drifted": len(progress.strays),
        "lost": verdict.lost,
        "doubled": verdict.doubled,
        "voided": verdict.voided,
        "unaudited": [list(place) for place in verdict.unaudited],
        "digest_conflicts": [list(place) for place in verdict.conflicts],
        "executions_per_index": round(executions_per_index(outcome), 4),
        "averaging_bytes": progress.averaging_bytes,
        "averaging_bytes_per_replica_and_step": averaging_bytes_each(outcome),
        "outer_steps": progress.outer[True],
        "outer_missed": progress.outer[False],
        "crashes": list(outcome.crashes),
    }
    return found | _compared(outcome)


def _compared(outcome: RunOutcome) -> dict[str, Any]:
    """What summary.json holds of a comparison with one process; nothing if none was asked for."""
    if outcome.comparison is None:
        return {"oracle_problem": outcome.oracle_problem} if outcome.oracle_problem else {}
    return {
        "oracle_max_difference": outcome.comparison.max_difference,
        "oracle_bit_equal": outcome.comparison.bit_equal,
        "oracle_problem": outcome.oracle_problem,
    }


def judged_before(directory: Path, *, steps: int) -> str | None:
    """What summary.json says is wrong with the swarm of a finished run, the comparison apart; None if there is no
    summary of all its `steps`."""
    found = _read(directory)
    if found is None or found.get("steps") != steps:
        return None
    problem = str(found["problem"]).removesuffix(str(found.get("oracle_problem", ""))).removesuffix("; ")
    # Interrupted after the last step was done: the swarm itself had ended well.
    return "" if problem == INTERRUPTED else problem


def add_comparison(outcome: RunOutcome, directory: Path) -> str:
    """Put the comparison of a finished run into the summary it has, and into loss.png. Returns what `draw` does."""
    found = (_read(directory) or {}) | {"ok": not outcome.problem, "problem": outcome.problem} | _compared(outcome)
    _write(found, directory)
    return draw(outcome, directory / "loss.png")


def _read(directory: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "problem" in found else None


def _write(found: dict[str, Any], directory: Path) -> None:
    text = json.dumps(plain(found), indent=2, allow_nan=False)
    (directory / "summary.json").write_text(text + "\n", encoding="utf-8")


def write(outcome: RunOutcome, directory: Path) -> str:
    """loss.csv, summary.json, loss.png. Returns a note if the picture could not be drawn, else ""."""
    with (directory / "loss.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("step", "loss", "tokens", "seconds"))
        rows.writerows(
            (point.step, repr(point.loss), point.tokens, f"{point.seconds:.3f}") for point in outcome.progress.points
        )
    _write(summary(outcome), directory)
    return draw(outcome, directory / "loss.png")


def draw(outcome: RunOutcome, path: Path) -> str:
    """The curve, held-out losses, kills, and the oracle's curve. Returns a note instead if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no loss.png: matplotlib is not installed (pip install 'swarmnet-train[plot]')"
    progress = outcome.progress
    if not progress.points:
        return "no loss.png: no step was finished"
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        [point.step for point in progress.points],
        [point.loss for point in progress.points],
        label="swarm",
        linewidth=2.5 if outcome.oracle else 1.5,
    )
    if outcome.oracle:
        axes.plot(range(len(outcome.oracle)), outcome.oracle, label="one process", linestyle="--", linewidth=1.2)
    if progress.evaluations:
        steps = sorted(progress.evaluations)
        axes.plot(steps, [progress.evaluations[step] for step in steps], "o", label="held out", markersize=5)
    for number, (name, step, _) in enumerate(progress.kills):
        axes.axvline(step, color="tab:red", linewidth=0.8, alpha=0.6, label="kill" if number == 0 else None)
        axes.annotate(
            name,
            (step, 1.0),
            xycoords=("data", "axes fraction"),
            rotation=90,
            fontsize=7,
            va="top",
            ha="right",
            color="tab:red",
        )
    axes.set(
        xlabel="step",
        ylabel="loss (nats per token)",
        title=f"{shape(progress.stages, len(progress.replicas) // progress.stages)}, "
        f"{outcome.manifest.numerics.mode}, run {outcome.run_id[:12]}",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return ""


def print_summary(outcome: RunOutcome, directory: Path, console: Console) -> None:
    """The last lines on the terminal."""
    progress, verdict = outcome.progress, outcome.verdict
    points = progress.points
    curve = f"loss {points[0].loss:.4f} → {points[-1].loss:.4f}" if points else "no loss"
    lines = [
        f"{len(points)} of {progress.steps} steps in {duration(outcome.seconds)}, {curve}, "
        f"{progress.tokens_per_second():,.0f} tokens/s",
        f"{_faults(progress)}{_postponed(outcome)}, reroutes {progress.reroutes}, "
        f"executions per index {executions_per_index(outcome):.3f}",
        f"lost {verdict.lost}, doubled {verdict.doubled}, voided {verdict.voided}",
        f"averaging: {averaging_bytes_each(outcome):,} bytes sent per replica and step{_outer(progress)}",
    ]
    if outcome.ranks:
        lines.append(
            f"ranks: {', '.join(f'{name} {ranks}' for name, ranks in sorted(outcome.ranks.items()))}; "
            f"started anew {progress.rank_restarts} time{'s' * (progress.rank_restarts != 1)}"
        )
    if progress.strays:
        lines.append(f"drifted {len(progress.strays)} times; who had drifted took the others' weights")
    if outcome.resumed:
        # After a stage has lost its state, or where order counts, other losses are no fault.
        how = "other" if verdict.changed or verdict.renewed else "the same"
        lines.append(f"resumed; {verdict.repeated} steps were done again" + f", with {how} losses" * verdict.repeats)
    if verdict.renewed:
        lines.append(
            f"from version {', '.join(map(str, verdict.renewed))} on another run than before: a stage had "
            "lost its state"
        )
    lines += _beside_one_process(outcome)
    lines.append(f"run {outcome.run_id[:16]}, files in {directory}")
    say(console, *lines)
    kept, again = progress.checkpoint, f"    swarmnet local --resume --out {directory}"
    if outcome.killed_all is not None:
        how = (
            f"it goes on from the checkpoints of version {kept}"
            if kept
            else "no checkpoint of all stages was on disk: everything will be done again"
        )
        say(console, f"everything was killed in step {outcome.killed_all}; {how}. Go on with:", again)
    elif outcome.problem == INTERRUPTED and kept:
        say(console, f"go on from the checkpoints of version {kept} with:", again)
    _print_problem(outcome, directory, console)


def print_comparison(outcome: RunOutcome, directory: Path, console: Console) -> None:
    """The last lines on the terminal for a run that was finished already."""
    say(console, *_beside_one_process(outcome))
    _print_problem(outcome, directory, console)


def _beside_one_process(outcome: RunOutcome) -> list[str]:
    return [] if outcome.comparison is None else [f"beside one process: {_beside(outcome.comparison)}"]


def _print_problem(outcome: RunOutcome, directory: Path, console: Console) -> None:
    """What is wrong, if anything is."""
    if outcome.oracle_problem == UNCOMPARED:
        again = f"    swarmnet local --resume --oracle --out {shlex.quote(str(directory))}"
        say(console, f"{UNCOMPARED}. Do it again with:", again)
    if outcome.problem not in ("", UNCOMPARED):
        console.print(f"FAILED: {outcome.problem}", style="bold red", markup=False, highlight=False, soft_wrap=True)


def next_step(manifest: Manifest, path: Path) -> str:
    """What to do with a finished run whose manifest is at `path`; "" if its tokens are no text."""
    if manifest.data.tokenizer == "ids":
        return ""
    here = os.path.relpath(path)
    shown = str(path) if here.startswith(os.pardir) else here
    prompt = "def " if manifest.data.source == "stdlib" else "The "
    return f'next: swarmnet generate {shlex.quote(shown)} "{prompt}"'


def _outer(progress: SwarmProgress) -> str:
    if not progress.outer:
        return ""
    missed = f", {progress.outer[False]} missed" if progress.outer[False] else ""
    return f"; {progress.outer[True]} outer steps taken together{missed}"


def _beside(comparison: Comparison) -> str:
    how = "bit-equal" if comparison.bit_equal else f"largest at step {comparison.at_step}"
    if comparison.within is not None and not comparison.bit_equal and not comparison.problem:
        how += f", the first {FP32_STEPS} steps equal within {comparison.within:g}"
    if not comparison.promised:
        how += "; under this manifest it shows who computed what: close is all that can be expected"
    return f"largest loss difference {comparison.max_difference:.3g} ({how})"


def _faults(progress: SwarmProgress) -> str:
    others = (f"{kind} {count}" for kind, count in sorted(progress.faults.items()) if kind != "kill")
    return ", ".join([f"kills {len(progress.kills)}", *others])


def _postponed(outcome: RunOutcome) -> str:
    said = [f"{len(outcome.progress.postponed)} postponed"] if outcome.progress.postponed else []
    if outcome.not_killed:
        said.append(f"not carried out: {', '.join(outcome.not_killed)}")
    return f" ({'; '.join(said)})" if said else ""
