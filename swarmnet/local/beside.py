"""One process beside the swarm: the same manifest in a single process, its losses held against the swarm's.

It runs when the swarm has left the machine. What is compared, and how closely, is `audit.compare`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from swarmnet.local.audit import compare
from swarmnet.local.interrupt import Interrupt
from swarmnet.local.meshes import Meshes, meshed
from swarmnet.local.prepare import Prepared
from swarmnet.local.processes import Child, ChildCommand, ChildSpec, stop
from swarmnet.local.report import UNCOMPARED, RunOutcome
from swarmnet.ranks.starter import ForkerLost, Starter
from swarmnet.telemetry.events import EventReader


def oracle_command(spec: ChildSpec) -> list[str]:
    """The real single process."""
    return ["-m", "swarmnet.local.oracle_child", str(spec.manifest), str(spec.events)]


@dataclass(frozen=True, slots=True)
class Bench:
    """How the single process is started, watched and ended. poll_s, grace_s: as in `supervisor.Timing`."""

    command: ChildCommand
    starter: Starter
    console: Console
    interrupt: Interrupt
    poll_s: float
    grace_s: float


def by_bits(prepared: Prepared, meshes: Meshes, replicas: Iterable[str]) -> bool:
    """Is every loss to have the bits of one process's? Ranks that share a stage sum in another order than one does."""
    return prepared.exact and not meshed(meshes, replicas)


def beside(
    outcome: RunOutcome, prepared: Prepared, out: Path, *, exact: bool, log_level: str, bench: Bench
) -> RunOutcome:
    """`outcome` with the single process's curve beside the swarm's, and what is wrong with it. exact: see `by_bits`."""
    if bench.interrupt.count:
        return _with(outcome, UNCOMPARED)
    bench.console.print("the same manifest in one process, after the swarm ...", highlight=False)
    directory = out / "oracle"
    spec = ChildSpec(
        name="oracle",
        stage=None,
        manifest=prepared.path,
        directory=directory,
        slots=None,
        bootstrap=(),
        events=directory / "events.jsonl",
        log_level=log_level,
    )
    spec.events.unlink(missing_ok=True)  # of a comparison that was broken off
    try:
        child = Child(spec, bench.command(spec), EventReader(spec.events), bench.starter)
    except ForkerLost as error:
        return _with(outcome, f"the oracle was not started: {error}")
    try:
        while (code := child.returncode()) is None and not bench.interrupt.count:
            time.sleep(bench.poll_s)
    finally:
        stop([child], grace_s=bench.grace_s, hurry=lambda: bench.interrupt.again)
    losses = [float(record["loss"]) for record in child.read() if record["event"] == "oracle_step"]
    if code != 0 and bench.interrupt.count:
        return _with(outcome, UNCOMPARED)
    if code != 0:
        bench.console.print("\n".join(child.last_lines()), markup=False, highlight=False)
        return _with(outcome, f"the oracle failed (exit code {code}), see {child.log}")
    comparison = compare(
        [point.loss for point in outcome.progress.points],
        losses,
        exact=exact,
        lossless=prepared.lossless,
        promised=prepared.pure,
    )
    return replace(_with(outcome, comparison.problem), oracle=tuple(losses), comparison=comparison)


def _with(outcome: RunOutcome, problem: str) -> RunOutcome:
    whole = "; ".join(part for part in (outcome.problem, problem) if part)
    return replace(outcome, problem=whole, oracle_problem=problem)
