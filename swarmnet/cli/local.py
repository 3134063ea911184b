"""`swarmnet local`: a whole swarm as real processes on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from swarmnet.cli.settings import SETTINGS, TYPED, SchemaCommand, fields, given, with_log_level
from swarmnet.errors import UsageError

if TYPE_CHECKING:
    from swarmnet.local.options import LocalOptions

# Options that change the manifest that is given; the others have no place in one, or go by themselves.
_OVER_A_MANIFEST = ("stages", "steps", "seed")


@click.command("local", cls=SchemaCommand, context_settings=SETTINGS)
@fields("manifest", "cut", "training", "averaging", "data.source")
@fields("manifest", "admission", allow_from_autoenv=False)
@fields("local")
@fields("peer", "mesh.tensor", "mesh.shard", "mesh.sequence_parallel", allow_from_autoenv=False)
@with_log_level
@click.pass_context
def local(ctx: click.Context, /, **_: Any) -> int:
    """Train a small model in a swarm of real processes on this machine.

    \b
    Examples:
      swarmnet local --stages 3 --replicas 2 --steps 60
      swarmnet local --preset 100m --replicas 1 --steps 3 --set training.sequence_length=128
      swarmnet local --steps 1000 --dashboard 0
      swarmnet local --kill 1@20 --kill 2@30 --verify --out runs/churn
      swarmnet local --replicas 3 --chaos random:7
      swarmnet local --replicas 4 --liars sign-flip:1,lazy:1
      swarmnet local --sync local --replicas 4 --steps 300
      swarmnet local --replicas 1 --ranks 1=2 --kill-rank 1@20 --verify
      swarmnet local --checkpoint-every 10 --kill-all 25 --out runs/dark
      swarmnet local --resume --out runs/dark --verify
      swarmnet local --steps 10 --trace trace.json
    """
    from swarmnet import telemetry
    from swarmnet.local.options import LocalOptions
    from swarmnet.manifest.presets import PRESETS

    said = {option.name or "": value for option, _, value in given(ctx, *TYPED)}
    paths = {option.name: ".".join(option.path) for option, _, _ in given(ctx, *TYPED)}
    typed: list[tuple[str, str]] = []
    # Not an option of its own: it changes the manifest, and so what else follows from it.
    if sync := said.pop("sync", None):
        typed.append((f"--sync {sync}", f"averaging.sync={sync}"))
    if "manifest" in said:
        # A run that goes on may be told again what its data are.
        if "data" in said and "resume" not in said:
            raise UsageError("--data: a manifest fixes its data by digest; make another with `swarmnet init --data`")
        typed += [(f"--{name}", f"{paths[name]}={said[name]}") for name in _OVER_A_MANIFEST if name in said]
    # A preset's cut; its steps are as many as in any other local run.
    if said.get("preset") in PRESETS and "resume" not in said:
        said.setdefault("stages", PRESETS[said["preset"]].stages)
    options = LocalOptions(**said | {"typed": tuple(typed), "log_level": ctx.params["log_level"]})
    if options.resume:
        _refuse_changes(options, said)
    else:
        if options.manifest is not None:
            options = _from_manifest(options)
        # What cannot be is refused at once.
        # A kill of a stage that the run has not would only be noticed at its step.
        options.faults(stages=options.stages, replicas=options.replicas, steps=options.steps)
    telemetry.setup(ctx.params["log_level"])

    from swarmnet.local import run_local

    return run_local(options)


def _refuse_changes(options: LocalOptions, said: Mapping[str, object]) -> None:
    """A run that goes on is the run it was: a flag may say so again, and nothing else. Raises UsageError."""
    from swarmnet.local import earlier

    begun = earlier.options(options)
    changed = [f"--{name.replace('_', '-')}" for name in said if getattr(options, name) != getattr(begun, name)]
    changed += ["--sync" for flag, text in options.typed if "sync" in text and (flag, text) not in begun.typed]
    if changed:
        raise UsageError(
            f"{changed[0]}: the run was not begun so, and a resumed run keeps its manifest, its replicas, their ranks "
            "and faults: leave it out"
        )


def _from_manifest(options: LocalOptions) -> LocalOptions:
    """With the stages, steps, seed and data of its manifest, after all that was typed over it."""
    from swarmnet.local.prepare import choose

    manifest = choose(options)
    return replace(
        options,
        stages=manifest.cut.stages,
        steps=manifest.training.total_steps,
        seed=manifest.training.seed,
        data=manifest.data.source,
    )
