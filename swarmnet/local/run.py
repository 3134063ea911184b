"""`swarmnet local`: compose one local swarm from options, run it, hold it against one process, say how it went."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from swarmnet.errors import UsageError
from swarmnet.local.audit import Audit, compare
from swarmnet.local.churn import Churn
from swarmnet.local.events import ORACLE_STEP
from swarmnet.local.options import LocalOptions, parse_kills
from swarmnet.local.prepare import Prepared, prepare
from swarmnet.local.processes import Child, ChildCommand, ChildSpec, stop, swarmnet_command
from swarmnet.local.progress import Progress, ReplicaView
from swarmnet.local.report import MergedLog, Outcome, print_summary, shape, write
from swarmnet.local.starter import Starter, StarterLost, best_starter
from swarmnet.local.supervisor import Interrupt, Layout, Supervisor, Timing
from swarmnet.local.table import screen
from swarmnet.telemetry.events import EventReader


def oracle_command(spec: ChildSpec) -> list[str]:
    """The real single process."""
    return ["-m", "swarmnet.local.oracle_child", str(spec.manifest), str(spec.events)]


@dataclass(frozen=True, slots=True)
class Kit:
    """What tests put in place of the real thing."""

    child: ChildCommand = swarmnet_command
    oracle: ChildCommand = oracle_command
    starter: Callable[[], Starter] = best_starter
    prepare: Callable[[LocalOptions, Path], Prepared] = prepare
    timing: Timing = field(default_factory=Timing)
    console: Console | None = None


def run_local(options: LocalOptions, kit: Kit | None = None) -> int:
    """Run a swarm on this machine; main thread only. The exit code: 0 if every step was done, every microbatch counted
    exactly once, no child failed, and the oracle, if asked for, agrees; 1 if not; 130 after Ctrl+C.

    Raises UsageError before any child is started.
    """
    kit = kit or Kit()
    console = kit.console or Console()
    out = _directory(options)
    with contextlib.closing(kit.starter()) as starter:      # first of all: it imports while we read the data
        prepared = kit.prepare(options, out)
        manifest = prepared.manifest
        console.print(
            f"swarmnet local: {shape(manifest.cut.stages, options.replicas)}, {manifest.numerics.mode}, "
            f"run {prepared.run_id[:12]}, files in {out}", markup=False, highlight=False, soft_wrap=True)
        with Interrupt() as interrupt:
            outcome = _swarm(options, prepared, out, kit=kit, starter=starter, console=console, interrupt=interrupt)
    if interrupt.count:
        outcome = replace(outcome, problem="interrupted")
    if note := write(outcome, out):
        console.print(note, markup=False, highlight=False)
    print_summary(outcome, out, console)
    return interrupt.exit_code or (1 if outcome.problem else 0)


def _swarm(options: LocalOptions, prepared: Prepared, out: Path, *, kit: Kit, starter: Starter, console: Console,
           interrupt: Interrupt) -> Outcome:
    """The swarm from its first process to its verdict, and the single process after it."""
    began, manifest = time.monotonic(), prepared.manifest
    stages, steps = manifest.cut.stages, manifest.training.total_steps
    kills = parse_kills(options.kill, stages=stages, steps=steps)
    replicas = {f"s{stage}-r{number}": stage for number in range(options.replicas) for stage in range(stages)}
    trainers = tuple(f"trainer-{number}" for number in range(options.trainers))
    layout = Layout(out=out, manifest=prepared.path, replicas=replicas, trainers=trainers, slots=options.slots,
                    log_level=options.log_level)
    progress = Progress(steps=steps, replicas={name: ReplicaView(stage) for name, stage in replicas.items()},
                        trainers=frozenset(trainers))
    audit = Audit(stages=stages, steps=steps, microbatches=manifest.training.microbatches)
    churn = Churn(kills, replicas=replicas, steps=steps, every_s=options.kill_every, restart_s=kit.timing.restart_s,
                  rng=random.Random(f"{manifest.training.seed}/churn"))
    with MergedLog(out / "events.jsonl") as log, screen(console) as shown:
        supervisor = Supervisor(layout, progress=progress, audit=audit, churn=churn, starter=starter,
                                command=kit.child, screen=shown, log=log, interrupt=interrupt, timing=kit.timing)
        problem = supervisor.run()
    outcome = Outcome(
        run_id=prepared.run_id, seed=manifest.training.seed, microbatches=manifest.training.microbatches,
        numerics=manifest.numerics.mode, progress=progress, verdict=audit.verdict(),
        seconds=time.monotonic() - began, problem=problem, not_killed=churn.pending,
        crashes=tuple(supervisor.crashes),
    )
    if problem or interrupt.count:
        return outcome
    outcome = replace(outcome, problem=_judge(outcome))
    if not options.oracle:
        return outcome
    return _beside(outcome, prepared, layout, kit=kit, starter=starter, console=console, interrupt=interrupt)


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


def _beside(outcome: Outcome, prepared: Prepared, layout: Layout, *, kit: Kit, starter: Starter,
            console: Console, interrupt: Interrupt) -> Outcome:
    """The outcome with the single process's curve beside it. It runs now, when the swarm has left the machine."""
    console.print("the same manifest in one process, after the swarm ...", highlight=False)
    directory = layout.out / "oracle"
    spec = ChildSpec(name="oracle", stage=None, manifest=prepared.path, directory=directory, slots=None, bootstrap=(),
                     events=directory / "events.jsonl", log_level=layout.log_level)
    try:
        child = Child(spec, kit.oracle(spec), EventReader(spec.events), starter)
    except StarterLost as error:
        return replace(outcome, problem=_also(outcome.problem, f"the oracle was not started: {error}"))
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
