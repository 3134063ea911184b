"""`swarmnet local`: a whole swarm as real processes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from click.core import ParameterSource

from swarmnet.cli.settings import LEVELS, SETTINGS
from swarmnet.errors import UsageError

if TYPE_CHECKING:
    from swarmnet.config.peer import Shard
    from swarmnet.local.options import LocalOptions

_IN_MANIFEST = {"stages": "cut.stages", "steps": "training.total_steps", "seed": "training.seed"}


@click.command("local", context_settings=SETTINGS)
@click.option("--stages", type=int, default=3, show_default=True, help="Stages the model is cut into.")
@click.option("--replicas", type=int, default=2, show_default=True, help="Peers per stage.")
@click.option("--steps", type=int, default=60, show_default=True, help="Optimizer steps.")
@click.option(
    "--sync",
    type=click.Choice(["exact", "overlap", "local"]),
    help="How replicas of a stage agree, and what that brings along, as with `swarmnet init`.  [exact]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same curve.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Directory of the results.  [runs/local-SEED-TIME]",
)
@click.option(
    "--kill", multiple=True, metavar="STAGE@STEP", help="SIGKILL a replica of STAGE in the middle of STEP; repeatable."
)
@click.option("--kill-every", type=float, metavar="S", help="SIGKILL some replica every S seconds.")
@click.option(
    "--ranks",
    multiple=True,
    metavar="STAGE=N",
    allow_from_autoenv=False,
    help="Ranks of each replica of STAGE, on the CPU; STAGE.REPLICA=N: of one; repeatable, or with commas.",
)
@click.option(
    "--tensor",
    type=int,
    default=0,
    metavar="N",
    allow_from_autoenv=False,
    help="Of these, ranks that split each layer.  [all, or 1 with --shard]",
)
@click.option(
    "--shard",
    type=click.Choice(["none", "dp", "zero1", "zero2", "zero3"]),
    default="none",
    allow_from_autoenv=False,
    help="The rest split microbatches and, with zeroN, moments, sums, weights.  [none]",
)
@click.option(
    "--sequence-parallel",
    is_flag=True,
    allow_from_autoenv=False,
    help="Ranks that split layers split norms and residuals by tokens.",
)
@click.option(
    "--kill-rank",
    multiple=True,
    metavar="STAGE@STEP",
    help="SIGKILL one rank of a replica of STAGE in the middle of STEP; repeatable.",
)
@click.option("--chaos", metavar="FILE", help="Carry out this schedule of faults, or random:SEED; implies --oracle.")
@click.option("--checkpoint-every", type=int, metavar="C", help="Steps between two checkpoints on disk.")
@click.option("--kill-all", type=int, metavar="STEP", help="SIGKILL every process in the middle of STEP, and end.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out DIR.")
@click.option(
    "--reseed-from-neighbours",
    is_flag=True,
    help="Last resort: make a stage that nobody has any state of from the stages beside it.",
)
@click.option("--oracle", is_flag=True, help="Then train in one process, too; print the largest difference in loss.")
@click.option("--trainers", type=int, default=1, show_default=True, help="Trainers.")
@click.option("--data", default="stdlib", show_default=True, metavar="SOURCE", help="Text or token file, or directory.")
@click.option(
    "--manifest",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Run this manifest; --stages, --steps, --sync and --seed then change it.",
)
@click.option("--numerics", type=click.Choice(["deterministic", "fp32"]), help="How gradients are summed.")
@click.option(
    "--admission",
    type=click.Choice(["open", "invite"]),
    allow_from_autoenv=False,
    help="Who may join; invite makes an owner's key, which invites the peers of this swarm.  [open]",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    allow_from_autoenv=False,
    help="Change a field of the manifest, such as training.microbatches=16; repeatable.",
)
@click.option("--slots", type=int, metavar="N", help="Microbatches in flight per peer.  [4]")
@click.option("--log-level", type=LEVELS, default="warning", show_default=True, help="The least to log.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    stages: int,
    replicas: int,
    steps: int,
    sync: str | None,
    seed: int,
    out: Path | None,
    kill: tuple[str, ...],
    kill_every: float | None,
    chaos: str | None,
    checkpoint_every: int | None,
    kill_all: int | None,
    resume: bool,
    reseed_from_neighbours: bool,
    oracle: bool,
    trainers: int,
    data: str,
    manifest: Path | None,
    numerics: Literal["deterministic", "fp32"] | None,
    assignments: tuple[str, ...],
    slots: int | None,
    log_level: str,
    ranks: tuple[str, ...],
    tensor: int,
    shard: Shard,
    sequence_parallel: bool,
    kill_rank: tuple[str, ...],
    admission: Literal["open", "invite"] | None,
) -> int:
    """Train a small model in a swarm of real processes on this machine.

    \b
    Examples:
      swarmnet local --stages 3 --replicas 2 --steps 60
      swarmnet local --kill 1@20 --kill 2@30 --oracle --out runs/churn
      swarmnet local --replicas 3 --chaos random:7
      swarmnet local --sync local --replicas 4 --steps 300
      swarmnet local --replicas 1 --ranks 1=2 --kill-rank 1@20 --oracle
      swarmnet local --checkpoint-every 10 --kill-all 25 --out runs/dark
      swarmnet local --resume --out runs/dark --oracle
    """
    from swarmnet import telemetry
    from swarmnet.local.options import LocalOptions

    typed: tuple[tuple[str, str], ...] = () if sync is None else ((f"--sync {sync}", f"averaging.sync={sync}"),)
    if manifest is not None:
        if ctx.get_parameter_source("data") is not ParameterSource.DEFAULT and not resume:
            raise UsageError("--data: a manifest fixes its data by digest; make another with `swarmnet init --data`")
        typed += tuple(
            (f"--{name}", f"{_IN_MANIFEST[name]}={value}")
            for name, value in (("stages", stages), ("steps", steps), ("seed", seed))
            if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
        )
    if manifest is not None and not resume:
        stages, steps, seed, data = _from_manifest(
            LocalOptions(manifest=manifest, numerics=numerics, typed=typed, set=assignments)
        )
    options = LocalOptions(
        stages=stages,
        replicas=replicas,
        steps=steps,
        seed=seed,
        out=out,
        kill=kill,
        kill_every=kill_every,
        oracle=oracle,
        trainers=trainers,
        data=data,
        manifest=manifest,
        numerics=numerics,
        set=assignments,
        typed=typed,
        slots=slots,
        log_level=log_level,
        chaos=chaos,
        checkpoint_every=checkpoint_every,
        kill_all=kill_all,
        resume=resume,
        reseed_from_neighbours=reseed_from_neighbours,
        ranks=ranks,
        tensor=tensor,
        shard=shard,
        sequence_parallel=sequence_parallel,
        kill_rank=kill_rank,
        admission=admission,
    )
    if resume:
        _refuse_changes(ctx, options)
    else:
        options.faults(stages=stages, replicas=replicas, steps=steps, seed=seed)  # what cannot be is refused at once
    telemetry.setup(log_level)  # type: ignore[arg-type]  # click has checked the choice

    from swarmnet.local import run_local

    return run_local(options)


_FIXED = {
    "stages": "--stages",
    "replicas": "--replicas",
    "steps": "--steps",
    "seed": "--seed",
    "trainers": "--trainers",
    "sync": "--sync",
    "data": "--data",
    "manifest": "--manifest",
    "numerics": "--numerics",
    "set": "--set",
    "checkpoint_every": "--checkpoint-every",
    "ranks": "--ranks",
    "tensor": "--tensor",
    "shard": "--shard",
    "sequence_parallel": "--sequence-parallel",
    "admission": "--admission",
}


def _refuse_changes(ctx: click.Context, options: LocalOptions) -> None:
    """A run that goes on is the run it was: a flag may say so again, and nothing else. Raises UsageError."""
    from swarmnet.local.earlier import said_otherwise

    said = [
        name
        for name in _FIXED
        if ctx.get_parameter_source("assignments" if name == "set" else name) is not ParameterSource.DEFAULT
    ]
    if said and (name := said_otherwise(options, said)):
        raise UsageError(
            f"{_FIXED[name]}: a resumed run keeps its manifest, its replicas and their ranks, which say otherwise: "
            "leave it away"
        )


def _from_manifest(options: LocalOptions) -> tuple[int, int, int, str]:
    """What the manifest of `options` says about stages, steps, seed and data, with all that was typed."""
    from swarmnet.local.prepare import choose

    manifest = choose(options)
    return manifest.cut.stages, manifest.training.total_steps, manifest.training.seed, manifest.data.source
