"""`swarmnet local`: compose one local swarm from options, run it, hold it against one process, say how it went."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from swarmnet.errors import UsageError
from swarmnet.local.audit import Audit, compare
from swarmnet.local.churn import Churn
from swarmnet.local.options import LocalOptions, parse_kills
from swarmnet.local.oracle_child import ORACLE_STEP
from swarmnet.local.prepare import Prepared, prepare
from swarmnet.local.processes import Child, ChildCommand, ChildSpec, stop, swarmnet_command
from swarmnet.local.progress import Progress, ReplicaView
from swarmnet.local.report import MergedLog, Outcome, print_summary, write
from swarmnet.local.supervisor import Interrupt, Layout, Supervisor, Timing
from swarmnet.local.table import screen
from swarmnet.telemetry.events import EventReader


def oracle_command(spec: ChildSpec) -> list[str]:
    """The real single process."""
    return [sys.executable, "-m", "swarmnet.local.oracle_child", str(spec.manifest), str(spec.events)]


@dataclass(frozen=True, slots=True)
class Kit:
    """What tests put in place of the real thing."""

    child: ChildCommand = swarmnet_command
    oracle: ChildCommand = oracle_command
    prepare: Callable[[LocalOptions, Path], Prepared] = prepare
    timing: Timing = field(default_factory=Timing)
    console: Console | None = None


def run_local(options: LocalOptions, kit: Kit | None = None) -> int:
    """Run a swarm on this machine; main thread only. The exit code: 0 if every step was done, every microbatch counted
    exactly once, no child failed, and the oracle, if asked for, agrees; 1 if not; 130 after Ctrl+C.

    Raises UsageError before anything is started.
    """
    kit = kit or Kit()
    console = kit.console or Console()
    out = _directory(options)
    prepared = kit.prepare(options, out)
    manifest = prepared.manifest
    stages, steps = manifest.cut.stages, manifest.training.total_steps
    kills = parse_kills(options.kill, stages=stages, steps=steps)
    replicas = {f"s{stage}-r{number}": stage for number in range(options.replicas) for stage in range(stages)}
    layout = Layout(out=out, manifest=prepared.path, replicas=replicas, slots=options.slots,
                    trainers=tuple(f"trainer-{number}" for number in range(options.trainers)),
                    log_level=options.log_level)
    progress = Progress(steps=steps, replicas={name: ReplicaView(stage) for name, stage in replicas.items()})
    audit = Audit(stages=stages, steps=steps, microbatches=manifest.training.microbatches)
    churn = Churn(kills, replicas=replicas, steps=steps, every_s=options.kill_every, restart_s=kit.timing.restart_s,
                  rng=random.Random(f"{manifest.training.seed}/churn"))
    title = (f"swarmnet local: {stages} stages × {options.replicas} replicas, {manifest.numerics.mode}, "
             f"run {prepared.run_id[:12]}, files in {out}")
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    began = time.monotonic()
    with Interrupt() as interrupt, MergedLog(out / "events.jsonl") as log:
        with screen(console) as shown:
            supervisor = Supervisor(layout, progress=progress, audit=audit, churn=churn, command=kit.child,
                                    screen=shown, log=log, interrupt=interrupt, timing=kit.timing)
            problem = supervisor.run()
        outcome = Outcome(
            run_id=prepared.run_id, seed=manifest.training.seed, microbatches=manifest.training.microbatches,
            numerics=manifest.numerics.mode, progress=progress, verdict=audit.verdict(),
            seconds=time.monotonic() - began, problem=problem, not_killed=churn.pending,
            crashes=tuple(supervisor.crashes),
        )
        if not problem and not interrupt.count:
            outcome = replace(outcome, problem=_judge(outcome))
            if options.oracle:
                outcome = _beside(outcome, prepared, layout, kit=kit, console=console, interrupt=interrupt)
    if interrupt.count:
        outcome = replace(outcome, problem="interrupted")
    if note := write(outcome, out):
        console.print(note, markup=False, highlight=False)
    print_summary(outcome, out, console)
    return interrupt.exit_code or (1 if outcome.problem else 0)


def _directory(options: LocalOptions) -> Path:
    out = options.out or Path("runs") / f"local-{options.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    if (out / "peers").exists():
        raise UsageError(f"{out} already holds a run: choose another --out, or remove it")
    return out.resolve()


def _judge(outcome: Outcome) -> str:
    """What is wrong with a swarm that ran to its end, in one line; "" if nothing."""
    progress = outcome.progress
    found = list(outcome.verdict.problems)
    if len(progress.points) < progress.steps:
        found.insert(0, f"only {len(progress.points)} of {progress.steps} steps were done")
    behind = sorted(name for name, replica in progress.replicas.items() if replica.alive and not replica.finished)
    if behind:
        found.append(f"{', '.join(behind)} did not reach the last version")
    return "; ".join([*found, *outcome.crashes])


def _beside(outcome: Outcome, prepared: Prepared, layout: Layout, *, kit: Kit, console: Console,
            interrupt: Interrupt) -> Outcome:
    """The outcome with the single process's curve beside it. It runs now, when the swarm has left the machine."""
    console.print("the same manifest in one process, after the swarm ...", highlight=False)
    directory = layout.out / "oracle"
    spec = ChildSpec(name="oracle", stage=None, manifest=prepared.path, directory=directory, slots=0, bootstrap=(),
                     events=directory / "events.jsonl", log_level=layout.log_level)
    child = Child(spec, kit.oracle(spec), EventReader(spec.events))
    try:
        while (code := child.returncode()) is None and not interrupt.count:
            time.sleep(kit.timing.poll_s)
    finally:
        stop([child], grace_s=kit.timing.grace_s, hurry=lambda: interrupt.again)
    losses = [float(record["loss"]) for record in child.read() if record["event"] == ORACLE_STEP]
    if code != 0:
        if interrupt.count:
            return outcome
        console.print("\n".join(child.last_lines()), markup=False, highlight=False)
        problem = f"the oracle failed (exit code {code}), see {child.log}"
        return replace(outcome, problem=_also(outcome.problem, problem))
    mine: Sequence[float] = [point.loss for point in outcome.progress.points]
    comparison = compare(mine, losses, exact=prepared.exact, lossless=prepared.lossless)
    return replace(outcome, oracle=tuple(losses), comparison=comparison,
                   problem=_also(outcome.problem, comparison.problem))


def _also(problem: str, another: str) -> str:
    return "; ".join(part for part in (problem, another) if part)
