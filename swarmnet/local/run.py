"""`swarmnet local`: compose one local swarm from options, run it, hold it against one process, say how it went."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from swarmnet.errors import UsageError
from swarmnet.host import cores
from swarmnet.local import earlier
from swarmnet.local.options import LocalOptions
from swarmnet.local.prepare import in_words, mesh_of, meshed, parse_meshes, resume
from swarmnet.local.report import (
    INTERRUPTED,
    UNCOMPARED,
    RunOutcome,
    agreement,
    next_step,
    print_summary,
    shape,
    summary_before,
    write,
)
from swarmnet.local.screen import PatientConsole, SwarmScreen, say
from swarmnet.local.supervisor import TRACE, Kit, LocalSwarm, Supervisor
from swarmnet.manifest.implied import remarks
from swarmnet.manifest.schema import Model
from swarmnet.net.admission_files import invitation_file
from swarmnet.ranks.launcher import Launcher, LauncherLost
from swarmnet.telemetry.events import EventReader, of_kind
from swarmnet.telemetry.text import typed
from swarmnet.telemetry.trace import check_trace, merge
from swarmnet.testing.byzantine import choose_byzantine, parse_byzantine
from swarmnet.testing.fault import Fault, KillRank, unlikely
from swarmnet.testing.invariants import compare
from swarmnet.testing.process_swarm import Child, ChildSpec, Interrupt, stop

PROCESSES_PER_CORE = 8
"""With more, most of the machine's time goes into starting them and passing on."""


def run_local(options: LocalOptions, kit: Kit | None = None) -> int:
    """Run a swarm on this machine; main thread only.

    Returns:
        The exit code: 0 if every step was done, every microbatch counted exactly once, no child failed, and the
        reference, if asked for, agrees; 1 if not; 130 after Ctrl+C, 143 after SIGTERM.

    Raises:
        UsageError: before any child is started.
        OSError: a disk is full, say, and nothing can be done without it; a note says how the run goes on. No child is
            left.
    """
    kit, out = kit or Kit(), _directory(options)
    try:
        return _run_in(out, options, kit, kit.console or PatientConsole(out))
    except OSError as error:
        error.filename = error.filename or str(out)
        if (out / "run.toml").exists() and (out / "peers").exists():
            error.add_note(f"go on with `swarmnet local --resume --out {typed(out)}`")
        raise


def _run_in(out: Path, options: LocalOptions, kit: Kit, console: Console) -> int:
    if options.trace:
        check_trace(options.trace)
    if options.resume:
        earlier.await_end(out)
        options = earlier.options(replace(options, out=out))
    finished = options.resume and _finished(out, console)
    # One process is a swarm without Byzantine replicas.
    compares = options.verify or options.chaos is not None or (options.liars is not None and not finished)
    # The disk may have been full when it ended: then its files are written now.
    if finished and not compares and (out / "summary.json").exists():
        return 0
    # A launcher comes first of all: it imports while we read the data. A finished run needs it for one process.
    with contextlib.closing(Launcher(()) if finished else kit.launcher()) as launcher:
        swarm, before = _composed(options, kit, out, console), None
        if not finished:
            faults = _faults(swarm)
            if not options.resume:
                swarm.prepared.write()  # only now: nothing is left of what is refused
            say(console, *_introduction(swarm, faults))
        with Interrupt() as interrupt:
            if finished:
                outcome = _replayed(swarm)
                # The swarm was judged by who saw it end; only the comparison is new.
                before = summary_before(out, steps=outcome.progress.steps)
            else:
                outcome = _run(swarm, faults, launcher, interrupt)
                if options.trace:
                    merge({name: out / "peers" / name / TRACE for name in outcome.progress.replicas}, options.trace)
                # Who was interrupted, or gave up, has nothing to compare.
                compares = compares and not outcome.problem and outcome.killed_all is None
            if not outcome.problem:
                strict = kit.strict or options.verify or options.chaos is not None
                problem = _judge(outcome, strict=strict) if before is None else before["problem"]
                outcome = replace(outcome, problem=problem)
            if compares:
                outcome = _compare(swarm, outcome, launcher, interrupt)
    try:
        say(console, write(outcome, out, before))
    except OSError as error:
        problem = f"{error.filename}: not written: {error.strerror}: free space there, and do it again with --resume"
        outcome = replace(outcome, problem="; ".join(filter(None, (outcome.problem, problem))))
    print_summary(outcome, out, console, finished=finished, compares=options.verify)
    if not (finished or outcome.problem or outcome.killed_all is not None):
        say(console, next_step(swarm.prepared.manifest, swarm.prepared.path))
    return interrupt.exit_code or (1 if outcome.problem else 0)


def _directory(options: LocalOptions) -> Path:
    out = options.out or Path("runs") / f"local-{options.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    if (out / "peers").exists() and not options.resume:
        raise UsageError(f"{out} already holds a run: choose another --out, remove it, or go on with it by --resume")
    return out.resolve()


def _finished(out: Path, console: Console) -> bool:
    """Has the run nothing left to do? That is said. Raises UsageError if there is none."""
    prepared = resume(out)
    steps = prepared.manifest.training.total_steps
    if not earlier.finished(out, stages=prepared.manifest.cut.stages, steps=steps):
        return False
    say(
        console,
        f"run {prepared.run_id[:12]} is finished: all {steps} steps are done, every stage has its final snapshot; "
        f"see summary.json and loss.csv in {out}",
        next_step(prepared.manifest, prepared.path),
    )
    return True


def _composed(options: LocalOptions, kit: Kit, out: Path, console: Console) -> LocalSwarm:
    """The swarm that is asked for, or that goes on. Raises UsageError."""
    prepared = resume(out) if options.resume else kit.prepare(options, out)
    stages = range(prepared.manifest.cut.stages)
    replicas = {f"s{stage}-r{number}": stage for number in range(options.replicas) for stage in stages}
    trainers = tuple(f"trainer-{number}" for number in range(options.trainers))
    meshes = parse_meshes(options, prepared.manifest, replicas)
    liars = choose_byzantine(parse_byzantine(options.liars), replicas, prepared.run_id) if options.liars else {}
    lives = earlier.lives(out) if options.resume else ()
    if options.resume:  # more may have joined
        replicas, trainers = earlier.members(out)
    return LocalSwarm(options, kit, out, console, prepared, replicas, trainers, meshes, lives, liars)


def _faults(swarm: LocalSwarm) -> tuple[Fault, ...]:
    """What the options ask for. Raises UsageError."""
    steps, stages = swarm.prepared.manifest.training.total_steps, swarm.prepared.manifest.cut.stages
    faults = swarm.options.faults(stages=stages, replicas=len(swarm.replicas) // stages, steps=steps)
    several = {swarm.replicas[name] for name in meshed(swarm.meshes, swarm.replicas)}
    for fault in faults:
        if isinstance(fault, KillRank) and (fault.place not in several if fault.place is not None else not several):
            where = "no stage" if fault.place is None else f"no replica of stage {fault.place}"
            raise UsageError(f"{fault}: {where} has more than one rank: add --ranks {fault.place or 0}=2")
    return faults


def _introduction(swarm: LocalSwarm, faults: Sequence[Fault]) -> Iterator[str]:
    """What is to be known before it starts."""
    manifest, options = swarm.prepared.manifest, swarm.options
    yield (
        f"swarmnet local: {shape(manifest.cut.stages, len(swarm.replicas) // manifest.cut.stages)}, "
        f"{agreement(manifest)}, run {swarm.prepared.run_id[:12]}, files in {swarm.out}"
    )
    yield in_words(swarm.meshes, manifest)
    if manifest.admission.policy != "open":
        yield f"by invitation: joining peers add --invitation {invitation_file(swarm.prepared.path)}"
    ranks = [mesh_of(swarm.meshes, name).ranks for name in swarm.replicas]
    processes = len(swarm.trainers) + sum(1 if number == 1 else 1 + number for number in ranks)
    shared = cores()
    if processes > PROCESSES_PER_CORE * shared:
        yield (
            f"note: {processes} processes share {shared} core{'s' * (shared != 1)}: starting them may take minutes; "
            "with fewer --stages or --replicas it is faster"
        )
    usual, layers = Model().num_layers, manifest.model.num_layers
    # More layers were not asked for: they follow from more stages.
    if options.manifest is None and not options.resume and usual < layers == options.stages:
        yield f"note: the model has {layers} layers, not {usual}: each of {options.stages} stages needs one"
    yield from remarks(manifest)
    yield from unlikely(faults, swarm.replicas)
    if swarm.liars:
        yield f"Byzantine replicas: {', '.join(f'{name} {kind}' for name, kind in sorted(swarm.liars.items()))}"
        if not manifest.audited:
            yield 'note: no peer audits them: set shares in [audit], and averaging.sync = "exact" or "overlap"'
        elif not manifest.numerics.deterministic:
            yield f'note: numerics.mode = "{manifest.numerics.mode}": audits suspend a peer, and prove nothing'
    every = manifest.training.checkpoint_every
    if options.kill_all is not None and not options.resume and not 0 < every <= options.kill_all:
        when = (
            f"the first checkpoint, at version {every}" if every else "any checkpoint (training.checkpoint_every is 0)"
        )
        yield f"note: step {options.kill_all} comes before {when}: --resume will do everything again"


def _run(swarm: LocalSwarm, faults: Sequence[Fault], launcher: Launcher, interrupt: Interrupt) -> RunOutcome:
    """The swarm from its first process to its last."""
    began = time.monotonic()
    with SwarmScreen(swarm.console) as shown:
        supervisor = Supervisor(swarm, faults, launcher=launcher, screen=shown, interrupt=interrupt)
        problem = supervisor.run()
    return RunOutcome(
        run_id=swarm.prepared.run_id,
        manifest=swarm.prepared.manifest,
        progress=supervisor.progress,
        invariants=supervisor.checker.report(),
        seconds=supervisor.progress.earlier_s + time.monotonic() - began,
        problem=INTERRUPTED if interrupt.count and not supervisor.progress.complete else problem,
        not_killed=supervisor.faults.pending,
        ranks={name: mesh_of(swarm.meshes, name).ranks for name in meshed(swarm.meshes, swarm.replicas)},
        crashes=tuple(supervisor.crashes),
        killed_all=supervisor.killed_all,
        resumed=len(swarm.lives),
    )


def _replayed(swarm: LocalSwarm) -> RunOutcome:
    """What a finished run has written."""
    progress, checker = swarm.books()
    return RunOutcome(
        run_id=swarm.prepared.run_id,
        manifest=swarm.prepared.manifest,
        progress=progress,
        invariants=checker.report(),
        seconds=progress.earlier_s,
    )


def _compare(swarm: LocalSwarm, outcome: RunOutcome, launcher: Launcher, interrupt: Interrupt) -> RunOutcome:
    """`outcome` with the single process's curve for comparison, and what is wrong with it.

    The single process runs when the swarm has left the machine.
    """
    if interrupt.count:
        return _with(outcome, UNCOMPARED)
    say(swarm.console, "the same manifest in one process, after the swarm ...")
    spec = ChildSpec("reference", swarm.config.model_copy(update={"dir": swarm.out / "reference"}))
    spec.events.unlink(missing_ok=True)  # of a comparison that was broken off
    try:
        words, log = swarm.kit.reference(spec), spec.config.dir / "log.txt"
        child = Child("reference", words, log, launcher, EventReader(spec.events))
    except LauncherLost as error:
        return _with(outcome, f"the reference was not started: {error}")
    try:
        while (code := child.returncode()) is None and not interrupt.count:
            time.sleep(swarm.kit.timing.poll_s)
    finally:
        stop([child], grace_s=swarm.kit.timing.grace_s, hurry=lambda: interrupt.again)
    events = child.read()
    losses = [float(event["loss"]) for event in of_kind(events, "reference_step")]
    if code != 0 and interrupt.count:  # it was we who ended it
        return _with(outcome, UNCOMPARED)
    if code != 0:
        say(swarm.console, *child.last_lines())
        return _with(outcome, f"the reference failed (exit code {code}), see {child.log}")
    comparison = compare(
        [point.loss for point in outcome.progress.points],
        losses,
        exact=swarm.exact,
        lossless=swarm.lossless,
        promised=swarm.prepared.pure and not swarm.liars,
    )
    theirs = next((event["sha256"] for event in of_kind(events, "reference_weights")), None)
    if (
        comparison.bit_equal
        and not swarm.liars
        and swarm.exact
        and swarm.lossless
        and swarm.prepared.pure
        and theirs is not None
    ):
        equal = _last_weights(swarm, theirs.keys()) == theirs
        problem = "" if equal else "all losses are those of one process, the last weights are not"
        comparison = replace(comparison, weights_equal=equal, problem=problem)
    return replace(_with(outcome, comparison.problem), reference=tuple(losses), comparison=comparison)


def _last_weights(swarm: LocalSwarm, names: Set[str]) -> dict[str, str]:
    """SHA-256 of these tensors in the last checkpoints of one replica of each stage: those of a stage are equal."""
    import hashlib

    from safetensors import safe_open

    manifest, found = swarm.prepared.manifest, dict[str, str]()
    for stage in range(manifest.cut.stages):
        for path in earlier.final_weights(swarm.out, stage=stage, steps=manifest.training.total_steps)[:1]:
            with safe_open(path.with_suffix(".safetensors"), framework="numpy") as tensors:
                for name in names & set(tensors.keys()):
                    found[name] = hashlib.sha256(tensors.get_tensor(name).tobytes()).hexdigest()
    return found


def _with(outcome: RunOutcome, problem: str) -> RunOutcome:
    whole = "; ".join(filter(None, (outcome.problem, problem)))
    return replace(outcome, problem=whole, reference_problem=problem)


def _judge(outcome: RunOutcome, *, strict: bool = False) -> str:
    """What is wrong with a swarm that ran to its end, in one line; "" if nothing. strict: a correct peer that was
    suspended is a fault of swarmnet, too, and not only worth a warning."""
    progress = outcome.progress
    if outcome.killed_all is not None:  # in the middle: what was not written is not missing yet
        return "; ".join([*replace(outcome.invariants, unaudited=(), split_stages=()).problems, *outcome.crashes])
    found = list(outcome.invariants.problems)
    if len(progress.points) < progress.steps:
        found.insert(0, f"only {len(progress.points)} of {progress.steps} steps were done")
    if progress.behind:
        found.append(f"{', '.join(progress.behind)} did not reach the last version")
    if progress.wronged:
        found.append(f"{', '.join(progress.wronged)} did nothing wrong, and was banned")
    found += outcome.invariants.suspended if strict else []
    found += [
        f"the final weights of stage {stage} are on no disk: {why}: free space there, and go on with --resume"
        for stage, why in progress.lost_weights.items()
    ]
    return "; ".join([*found, *outcome.crashes])
