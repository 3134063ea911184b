"""`swarmnet local`: compose one local swarm from options, run it, hold it against one process, say how it went."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from swarmnet.errors import UsageError
from swarmnet.local import earlier, outlet
from swarmnet.local.audit import Audit
from swarmnet.local.beside import Bench, beside, by_bits, oracle_command
from swarmnet.local.fault import Fault, KillRank, unlikely
from swarmnet.local.faults import Faults
from swarmnet.local.interrupt import Interrupt
from swarmnet.local.meshes import Meshes, in_words, mesh_of, meshed, parse_meshes, record
from swarmnet.local.options import LocalOptions
from swarmnet.local.prepare import Prepared, prepare, resume
from swarmnet.local.processes import ChildCommand, child_starter, swarmnet_command
from swarmnet.local.progress import ReplicaView, SwarmProgress
from swarmnet.local.report import (
    INTERRUPTED,
    MergedLog,
    RunOutcome,
    add_comparison,
    agreement,
    judged_before,
    next_step,
    print_comparison,
    print_summary,
    shape,
    write,
)
from swarmnet.local.supervisor import Supervisor, SwarmLayout, Timing
from swarmnet.local.table import screen
from swarmnet.manifest.implied import remarks
from swarmnet.manifest.schema import Manifest, Model
from swarmnet.net.admission_files import invitation_beside
from swarmnet.ranks.starter import FreshStarter, Starter

PROCESSES_PER_CORE = 8
"""With more, most of the machine's time goes into starting them and passing on."""


@dataclass(frozen=True, slots=True)
class Kit:
    """What tests put in place of the real thing."""

    child: ChildCommand = swarmnet_command
    oracle: ChildCommand = oracle_command
    starter: Callable[[], Starter] = child_starter
    prepare: Callable[[LocalOptions, Path], Prepared] = prepare
    timing: Timing = field(default_factory=Timing)
    console: Console | None = None
    trace: bool = False  # with chaos: children say what they work on


def run_local(options: LocalOptions, kit: Kit | None = None) -> int:
    """Run a swarm on this machine; main thread only. The exit code: 0 if every step was done, every microbatch counted
    exactly once, no child failed, and the oracle, if asked for, agrees; 1 if not; 130 after Ctrl+C, 143 after SIGTERM.

    Raises UsageError before any child is started.
    """
    kit = kit or Kit()
    out = _directory(options)
    console = kit.console or outlet.console(out)
    if options.resume and (said := _over(out)):
        console.print(said, markup=False, highlight=False, soft_wrap=True)
        return _compare_finished(options, out, kit, console) if options.oracle or options.chaos else 0
    with contextlib.closing(kit.starter()) as starter:  # first of all: it imports while we read the data
        prepared = resume(out) if options.resume else kit.prepare(options, out)
        manifest, (replicas, trainers) = prepared.manifest, _members(options, prepared, out)
        meshes = earlier.meshes(out) if options.resume else parse_meshes(options, manifest, replicas)
        plan = _plan(options, prepared, replicas, meshes)
        if not options.resume:
            prepared.write()  # only now: nothing is left of what is refused
        console.print(
            f"swarmnet local: {shape(manifest.cut.stages, len(replicas) // manifest.cut.stages)}, "
            f"{agreement(manifest)}, run {prepared.run_id[:12]}, files in {out}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        for line in (
            in_words(meshes, manifest),
            _invited(manifest, prepared.path),
            *_crowd(replicas, trainers, meshes),
            *_raised(options, manifest),
            *remarks(manifest),
            *unlikely(plan[1], replicas),
            *_dark(options, prepared),
        ):
            if line:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        layout = SwarmLayout(
            out=out,
            manifest=prepared.path,
            replicas=replicas,
            trainers=trainers,
            slots=options.slots,
            log_level=options.log_level,
            chaos=options.chaos is not None,
            trace=kit.trace,
            life=len(earlier.lives(out)) if options.resume else 0,
            meshes=meshes,
        )
        with Interrupt() as interrupt:
            outcome = _swarm(
                options, prepared, layout, plan, kit=kit, starter=starter, console=console, interrupt=interrupt
            )
    if note := write(outcome, out):
        console.print(note, markup=False, highlight=False)
    print_summary(outcome, out, console)
    if not outcome.problem and outcome.killed_all is None and (line := next_step(manifest, prepared.path)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return interrupt.exit_code or (1 if outcome.problem else 0)


def _members(options: LocalOptions, prepared: Prepared, out: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """Stage by replica, and the trainers."""
    if options.resume:
        return earlier.members(out)
    stages = prepared.manifest.cut.stages
    replicas = {f"s{stage}-r{number}": stage for number in range(options.replicas) for stage in range(stages)}
    return replicas, tuple(f"trainer-{number}" for number in range(options.trainers))


def _plan(
    options: LocalOptions, prepared: Prepared, replicas: dict[str, int], meshes: Meshes
) -> tuple[str, tuple[Fault, ...]]:
    """(seed, faults) that the options ask for. Raises UsageError."""
    training, stages = prepared.manifest.training, prepared.manifest.cut.stages
    seed, faults = options.faults(
        stages=stages, replicas=len(replicas) // stages, steps=training.total_steps, seed=training.seed
    )
    several = {replicas[name] for name in meshed(meshes, replicas)}
    for fault in faults:
        if isinstance(fault, KillRank) and (fault.place not in several if fault.place is not None else not several):
            where = "no stage" if fault.place is None else f"no replica of stage {fault.place}"
            raise UsageError(f"{fault}: {where} has more than one rank: add --ranks {fault.place or 0}=2")
    return seed, faults


def _over(out: Path) -> str:
    """What to say of a run that has nothing left to do, "" if there is something. Raises UsageError."""
    prepared, _ = resume(out), earlier.members(out)
    steps = prepared.manifest.training.total_steps
    if not earlier.finished(out, stages=prepared.manifest.cut.stages, steps=steps):
        return ""
    said = (
        f"run {prepared.run_id[:12]} is finished: all {steps} steps are done, every stage has its final snapshot; "
        f"see summary.json and loss.csv in {out}"
    )
    return "\n".join(filter(None, (said, next_step(prepared.manifest, prepared.path))))


def _invited(manifest: Manifest, path: Path) -> str:
    """How others join a swarm by invitation."""
    if manifest.admission.policy == "open":
        return ""
    return f"by invitation: whoever joins adds --invitation {invitation_beside(path)}"


def _dark(options: LocalOptions, prepared: Prepared) -> list[str]:
    """What --kill-all will cost, if nothing can be on disk by then."""
    every = prepared.manifest.training.checkpoint_every
    if options.kill_all is None or options.resume or 0 < every <= options.kill_all:
        return []
    when = f"the first checkpoint, at version {every}" if every else "any checkpoint (training.checkpoint_every is 0)"
    return [f"note: step {options.kill_all} comes before {when}: --resume will do everything again"]


def _crowd(replicas: Iterable[str], trainers: tuple[str, ...], meshes: Meshes) -> list[str]:
    """What it means that so many processes share this machine."""
    ranks = [mesh_of(meshes, name).ranks for name in replicas]
    processes = len(trainers) + sum(1 if number == 1 else 1 + number for number in ranks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if processes <= PROCESSES_PER_CORE * cores:
        return []
    return [
        f"note: {processes} processes share {cores} core{'s' * (cores != 1)}: starting them may take minutes; with "
        "fewer --stages or --replicas it is faster"
    ]


def _raised(options: LocalOptions, manifest: Manifest) -> list[str]:
    """That the model has more layers than nobody asked for."""
    usual, layers = Model().num_layers, manifest.model.num_layers
    if options.manifest is not None or options.resume or not usual < layers == options.stages:
        return []
    return [f"note: the model has {layers} layers, not {usual}: each of {options.stages} stages needs one"]


def _compare_finished(options: LocalOptions, out: Path, kit: Kit, console: Console) -> int:
    """Hold a run that is finished against one process. The exit code, as that of `run_local`."""
    prepared, (replicas, trainers) = resume(out), earlier.members(out)
    manifest, exact = prepared.manifest, by_bits(prepared, earlier.meshes(out), replicas)
    progress, audit = _books(prepared, replicas, trainers, exact=exact)
    earlier.replay(out, earlier.lives(out), progress, audit)
    progress.kills = earlier.kills(out)
    outcome = RunOutcome(
        run_id=prepared.run_id,
        seed=manifest.training.seed,
        microbatches=manifest.training.microbatches,
        numerics=manifest.numerics.mode,
        progress=progress,
        verdict=audit.verdict(),
        seconds=progress.earlier_s,
    )
    before = judged_before(out, steps=progress.steps)
    outcome = replace(outcome, problem=_judge(outcome) if before is None else before)
    with Interrupt() as interrupt:
        bench = Bench(kit.oracle, FreshStarter(), console, interrupt, kit.timing.poll_s, kit.timing.grace_s)
        outcome = beside(outcome, prepared, out, exact=exact, log_level=options.log_level, bench=bench)
    note = write(outcome, out) if before is None else add_comparison(outcome, out)
    if note:
        console.print(note, markup=False, highlight=False)
    print_comparison(outcome, out, console)
    return interrupt.exit_code or (1 if outcome.problem else 0)


def _books(
    prepared: Prepared, replicas: dict[str, int], trainers: tuple[str, ...], *, exact: bool
) -> tuple[SwarmProgress, Audit]:
    """Empty ones for the run, to be told everything that happens."""
    manifest, training = prepared.manifest, prepared.manifest.training
    progress = SwarmProgress(
        steps=training.total_steps,
        trainers=frozenset(trainers),
        replicas={name: ReplicaView(stage) for name, stage in replicas.items()},
    )
    return progress, Audit(
        stages=manifest.cut.stages,
        steps=training.total_steps,
        microbatches=training.microbatches,
        exact=exact,
        equal=manifest.averaging.equal_bits,
        repeats=prepared.pure and prepared.lossless,
    )


def _swarm(
    options: LocalOptions,
    prepared: Prepared,
    layout: SwarmLayout,
    plan: tuple[str, tuple[Fault, ...]],
    *,
    kit: Kit,
    starter: Starter,
    console: Console,
    interrupt: Interrupt,
) -> RunOutcome:
    """The swarm from its first process to its verdict, and the single process after it."""
    began, manifest = time.monotonic(), prepared.manifest
    (seed, ordered), out = plan, layout.out
    exact = by_bits(prepared, layout.meshes, layout.replicas)
    progress, audit = _books(prepared, layout.replicas, layout.trainers, exact=exact)
    faults = Faults(
        ordered,
        replicas=layout.replicas,
        steps=progress.steps,
        rng=random.Random(seed),
        every_s=options.kill_every,
        restart_s=kit.timing.restart_s,
        meshed=meshed(layout.meshes, layout.replicas),
    )
    if options.resume:
        earlier.replay(out, earlier.lives(out), progress, audit)
    with MergedLog(out / "events.jsonl", append=options.resume) as log, screen(console) as shown:
        log.ours(earlier.BEGAN, life=layout.life, meshes=record(layout.meshes))
        supervisor = Supervisor(
            layout,
            progress=progress,
            audit=audit,
            faults=faults,
            starter=starter,
            command=kit.child,
            screen=shown,
            log=log,
            interrupt=interrupt,
            timing=kit.timing,
        )
        problem = supervisor.run()
    if interrupt.count and not progress.complete:
        problem = INTERRUPTED
    outcome = RunOutcome(
        run_id=prepared.run_id,
        seed=manifest.training.seed,
        microbatches=manifest.training.microbatches,
        numerics=manifest.numerics.mode,
        progress=progress,
        verdict=audit.verdict(),
        seconds=time.monotonic() - began,
        problem=problem,
        not_killed=faults.pending,
        ranks={name: mesh_of(layout.meshes, name).ranks for name in meshed(layout.meshes, layout.replicas)},
        crashes=tuple(supervisor.crashes),
        killed_all=supervisor.killed_all,
        resumed=layout.life,
    )
    if problem:
        return outcome
    outcome = replace(outcome, problem=_judge(outcome))
    if supervisor.killed_all is not None or not (options.oracle or options.chaos):
        return outcome
    bench = Bench(kit.oracle, starter, console, interrupt, kit.timing.poll_s, kit.timing.grace_s)
    return beside(outcome, prepared, out, exact=exact, log_level=layout.log_level, bench=bench)


def _directory(options: LocalOptions) -> Path:
    out = options.out or Path("runs") / f"local-{options.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    if (out / "peers").exists() and not options.resume:
        raise UsageError(f"{out} already holds a run: choose another --out, remove it, or go on with it by --resume")
    return out.resolve()


def _judge(outcome: RunOutcome) -> str:
    """What is wrong with a swarm that ran to its end, in one line; "" if nothing."""
    progress = outcome.progress
    if outcome.killed_all is not None:  # in the middle: what was not written is not missing yet
        return "; ".join([*replace(outcome.verdict, unaudited=(), split_stages=()).problems, *outcome.crashes])
    found = list(outcome.verdict.problems)
    if len(progress.points) < progress.steps:
        found.insert(0, f"only {len(progress.points)} of {progress.steps} steps were done")
    behind = sorted(name for name, replica in progress.replicas.items() if replica.alive and not replica.finished)
    if behind:
        found.append(f"{', '.join(behind)} did not reach the last version")
    return "; ".join([*found, *outcome.crashes])
