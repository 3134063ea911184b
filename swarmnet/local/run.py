"""`swarmnet local`: compose one local swarm from options, run it, hold it against one process, say how it went."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from rich.console import Console

from swarmnet.config.peer import Log, LogLevel, PeerConfig
from swarmnet.errors import UsageError
from swarmnet.local import earlier, screen
from swarmnet.local.audit import Audit, compare
from swarmnet.local.fault import Fault, KillRank, unlikely
from swarmnet.local.faults import Faults
from swarmnet.local.meshes import Meshes, in_words, mesh_of, meshed, parse_meshes, record
from swarmnet.local.options import LocalOptions
from swarmnet.local.prepare import Prepared, prepare, resume
from swarmnet.local.processes import (
    Child,
    ChildCommand,
    ChildSpec,
    Interrupt,
    child_starter,
    oracle_command,
    stop,
    swarmnet_command,
)
from swarmnet.local.progress import ReplicaView, SwarmProgress
from swarmnet.local.report import (
    INTERRUPTED,
    UNCOMPARED,
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
from swarmnet.local.screen import SwarmScreen, say
from swarmnet.local.supervisor import Supervisor, SwarmLayout, Timing
from swarmnet.manifest.implied import remarks
from swarmnet.manifest.schema import Model
from swarmnet.net.admission_files import invitation_beside
from swarmnet.ranks.starter import ForkerLost, FreshStarter, Starter
from swarmnet.telemetry.events import EventReader

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
    trace: bool = False
    """With chaos: children say what they work on."""


def run_local(options: LocalOptions, kit: Kit | None = None) -> int:
    """Run a swarm on this machine; main thread only.

    Returns:
        The exit code: 0 if every step was done, every microbatch counted exactly once, no child failed, and the oracle,
        if asked for, agrees; 1 if not; 130 after Ctrl+C, 143 after SIGTERM.

    Raises:
        UsageError: before any child is started.
    """
    kit, out = kit or Kit(), _directory(options)
    console = kit.console or screen.console(out)
    if options.resume and (said := _over(out)):
        say(console, *said)
        return _compare_finished(options, out, kit, console) if options.oracle or options.chaos else 0
    with contextlib.closing(kit.starter()) as starter:  # first of all: it imports while we read the data
        swarm = _composed(options, kit, out, console)
        seed, faults = swarm.faults()
        if not options.resume:
            swarm.prepared.write()  # only now: nothing is left of what is refused
        say(console, *swarm.introduction(faults))
        with Interrupt() as interrupt:
            outcome = swarm.run(seed, faults, starter, interrupt)
            compared = not outcome.problem and outcome.killed_all is None
            if not outcome.problem:
                outcome = replace(outcome, problem=_judge(outcome))
            if compared and (options.oracle or options.chaos):
                outcome = swarm.compare(outcome, starter, interrupt)
    say(console, write(outcome, out))
    print_summary(outcome, out, console)
    if not outcome.problem and outcome.killed_all is None:
        say(console, next_step(swarm.prepared.manifest, swarm.prepared.path))
    return interrupt.exit_code or (1 if outcome.problem else 0)


def _directory(options: LocalOptions) -> Path:
    out = options.out or Path("runs") / f"local-{options.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    if (out / "peers").exists() and not options.resume:
        raise UsageError(f"{out} already holds a run: choose another --out, remove it, or go on with it by --resume")
    return out.resolve()


def _over(out: Path) -> list[str]:
    """What to say of a run that has nothing left to do, [] if there is something. Raises UsageError."""
    prepared, _ = resume(out), earlier.members(out)
    steps = prepared.manifest.training.total_steps
    if not earlier.finished(out, stages=prepared.manifest.cut.stages, steps=steps):
        return []
    return [
        f"run {prepared.run_id[:12]} is finished: all {steps} steps are done, every stage has its final snapshot; "
        f"see summary.json and loss.csv in {out}",
        next_step(prepared.manifest, prepared.path),
    ]


def _composed(options: LocalOptions, kit: Kit, out: Path, console: Console) -> LocalSwarm:
    """The swarm that is asked for, or that goes on. Raises UsageError."""
    if options.resume:
        return LocalSwarm(options, kit, out, console, resume(out), *earlier.members(out), earlier.meshes(out))
    prepared = kit.prepare(options, out)
    stages = range(prepared.manifest.cut.stages)
    replicas = {f"s{stage}-r{number}": stage for number in range(options.replicas) for stage in stages}
    trainers = tuple(f"trainer-{number}" for number in range(options.trainers))
    meshes = parse_meshes(options, prepared.manifest, replicas)
    return LocalSwarm(options, kit, out, console, prepared, replicas, trainers, meshes)


@dataclass(frozen=True, slots=True)
class LocalSwarm:
    """One swarm: what it consists of, and with what it is run."""

    options: LocalOptions
    kit: Kit
    out: Path
    console: Console
    prepared: Prepared
    replicas: dict[str, int]
    """Stage by name."""
    trainers: tuple[str, ...]
    meshes: Meshes

    @property
    def exact(self) -> bool:
        """Is every loss to have the bits of one process's? Ranks that share a stage sum in another order than one."""
        return self.prepared.exact and not meshed(self.meshes, self.replicas)

    def faults(self) -> tuple[str, tuple[Fault, ...]]:
        """(seed, faults) that the options ask for. Raises UsageError."""
        training, stages = self.prepared.manifest.training, self.prepared.manifest.cut.stages
        seed, faults = self.options.faults(
            stages=stages, replicas=len(self.replicas) // stages, steps=training.total_steps, seed=training.seed
        )
        several = {self.replicas[name] for name in meshed(self.meshes, self.replicas)}
        for fault in faults:
            if isinstance(fault, KillRank) and (fault.place not in several if fault.place is not None else not several):
                where = "no stage" if fault.place is None else f"no replica of stage {fault.place}"
                raise UsageError(f"{fault}: {where} has more than one rank: add --ranks {fault.place or 0}=2")
        return seed, faults

    def introduction(self, faults: tuple[Fault, ...]) -> Iterator[str]:
        """What is to be known before it starts."""
        manifest, options = self.prepared.manifest, self.options
        yield (
            f"swarmnet local: {shape(manifest.cut.stages, len(self.replicas) // manifest.cut.stages)}, "
            f"{agreement(manifest)}, run {self.prepared.run_id[:12]}, files in {self.out}"
        )
        yield in_words(self.meshes, manifest)
        if manifest.admission.policy != "open":
            yield f"by invitation: whoever joins adds --invitation {invitation_beside(self.prepared.path)}"
        ranks = [mesh_of(self.meshes, name).ranks for name in self.replicas]
        processes = len(self.trainers) + sum(1 if number == 1 else 1 + number for number in ranks)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if processes > PROCESSES_PER_CORE * cores:
            yield (
                f"note: {processes} processes share {cores} core{'s' * (cores != 1)}: starting them may take minutes; "
                "with fewer --stages or --replicas it is faster"
            )
        usual, layers = Model().num_layers, manifest.model.num_layers
        # Nobody has asked for more layers: more stages brought them along.
        if options.manifest is None and not options.resume and usual < layers == options.stages:
            yield f"note: the model has {layers} layers, not {usual}: each of {options.stages} stages needs one"
        yield from remarks(manifest)
        yield from unlikely(faults, self.replicas)
        every = manifest.training.checkpoint_every
        if options.kill_all is not None and not options.resume and not 0 < every <= options.kill_all:
            when = (
                f"the first checkpoint, at version {every}"
                if every
                else "any checkpoint (training.checkpoint_every is 0)"
            )
            yield f"note: step {options.kill_all} comes before {when}: --resume will do everything again"

    def books(self) -> tuple[SwarmProgress, Audit]:
        """Empty ones for the run, to be told everything that happens."""
        manifest, training = self.prepared.manifest, self.prepared.manifest.training
        progress = SwarmProgress(
            steps=training.total_steps,
            trainers=frozenset(self.trainers),
            replicas={name: ReplicaView(stage) for name, stage in self.replicas.items()},
        )
        return progress, Audit(
            stages=manifest.cut.stages,
            steps=training.total_steps,
            microbatches=training.microbatches,
            exact=self.exact,
            equal=manifest.averaging.equal_bits,
            repeats=self.prepared.pure and self.prepared.lossless,
        )

    def run(self, seed: str, faults: tuple[Fault, ...], starter: Starter, interrupt: Interrupt) -> RunOutcome:
        """The swarm from its first process to its last."""
        began, options, timing = time.monotonic(), self.options, self.kit.timing
        progress, audit = self.books()
        lives = earlier.lives(self.out) if options.resume else []
        if lives:
            earlier.replay(self.out, lives, progress, audit)
        several = meshed(self.meshes, self.replicas)
        orders = Faults(
            faults,
            replicas=self.replicas,
            steps=progress.steps,
            rng=random.Random(seed),
            every_s=options.kill_every,
            restart_s=timing.restart_s,
            meshed=several,
        )
        layout = SwarmLayout(
            out=self.out,
            config=self._config(),
            replicas=self.replicas,
            trainers=self.trainers,
            meshes=self.meshes,
            chaos=options.chaos is not None,
            trace=self.kit.trace,
            life=len(lives),
        )
        with MergedLog(self.out / "events.jsonl", append=options.resume) as log, SwarmScreen(self.console) as shown:
            log.ours(earlier.BEGAN, life=layout.life, meshes=record(self.meshes))
            supervisor = Supervisor(
                layout,
                progress=progress,
                audit=audit,
                faults=orders,
                starter=starter,
                command=self.kit.child,
                screen=shown,
                log=log,
                interrupt=interrupt,
                timing=timing,
            )
            problem = supervisor.run()
        return RunOutcome(
            run_id=self.prepared.run_id,
            manifest=self.prepared.manifest,
            progress=progress,
            verdict=audit.verdict(),
            seconds=time.monotonic() - began,
            problem=INTERRUPTED if interrupt.count and not progress.complete else problem,
            not_killed=orders.pending,
            ranks={name: mesh_of(self.meshes, name).ranks for name in several},
            crashes=tuple(supervisor.crashes),
            killed_all=supervisor.killed_all,
            resumed=layout.life,
        )

    def _config(self) -> PeerConfig:
        """What all children are told. They compute on the CPU, as the single process they are compared with."""
        options, invitation = self.options, invitation_beside(self.prepared.path)
        return PeerConfig(
            manifest=self.prepared.path,
            host="127.0.0.1",
            device="cpu",
            invitation=str(invitation) if invitation.exists() else "",
            log=Log(level=cast(LogLevel, options.log_level)),
            slots=PeerConfig().slots if options.slots is None else options.slots,
        )

    def compare(self, outcome: RunOutcome, starter: Starter, interrupt: Interrupt) -> RunOutcome:
        """`outcome` with the single process's curve beside the swarm's, and what is wrong with it.

        The single process runs when the swarm has left the machine.
        """
        if interrupt.count:
            return _with(outcome, UNCOMPARED)
        say(self.console, "the same manifest in one process, after the swarm ...")
        spec = ChildSpec("oracle", self._config().model_copy(update={"dir": self.out / "oracle"}))
        spec.events.unlink(missing_ok=True)  # of a comparison that was broken off
        try:
            child = Child(spec, self.kit.oracle, EventReader(spec.events), starter)
        except ForkerLost as error:
            return _with(outcome, f"the oracle was not started: {error}")
        try:
            while (code := child.returncode()) is None and not interrupt.count:
                time.sleep(self.kit.timing.poll_s)
        finally:
            stop([child], grace_s=self.kit.timing.grace_s, hurry=lambda: interrupt.again)
        losses = [float(event["loss"]) for event in child.read() if event["event"] == "oracle_step"]
        if code != 0 and interrupt.count:  # it was we who ended it
            return _with(outcome, UNCOMPARED)
        if code != 0:
            say(self.console, *child.last_lines())
            return _with(outcome, f"the oracle failed (exit code {code}), see {child.log}")
        comparison = compare(
            [point.loss for point in outcome.progress.points],
            losses,
            exact=self.exact,
            lossless=self.prepared.lossless,
            promised=self.prepared.pure,
        )
        return replace(_with(outcome, comparison.problem), oracle=tuple(losses), comparison=comparison)


def _compare_finished(options: LocalOptions, out: Path, kit: Kit, console: Console) -> int:
    """Hold a run that is finished against one process. The exit code, as that of `run_local`."""
    swarm = _composed(options, kit, out, console)
    progress, audit = swarm.books()
    earlier.replay(out, earlier.lives(out), progress, audit)
    progress.kills = earlier.kills(out)
    outcome = RunOutcome(
        run_id=swarm.prepared.run_id,
        manifest=swarm.prepared.manifest,
        progress=progress,
        verdict=audit.verdict(),
        seconds=progress.earlier_s,
    )
    # The swarm was judged by who saw it end; only the comparison is new.
    before = judged_before(out, steps=progress.steps)
    outcome = replace(outcome, problem=_judge(outcome) if before is None else before)
    with Interrupt() as interrupt:
        outcome = swarm.compare(outcome, FreshStarter(), interrupt)
    say(console, write(outcome, out) if before is None else add_comparison(outcome, out))
    print_comparison(outcome, out, console)
    return interrupt.exit_code or (1 if outcome.problem else 0)


def _with(outcome: RunOutcome, problem: str) -> RunOutcome:
    whole = "; ".join(filter(None, (outcome.problem, problem)))
    return replace(outcome, problem=whole, oracle_problem=problem)


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
