"""`swarmnet plan`: does a stage fit this machine, or another?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from swarmnet.cli.line import Fit, Lent, lent, with_line
from swarmnet.cli.settings import (
    MESH_AND_MEMORY,
    SETTINGS,
    SchemaCommand,
    StageList,
    fields,
    peer_options,
    read_config,
    read_manifest,
)
from swarmnet.errors import UsageError
from swarmnet.host import available_memory
from swarmnet.telemetry.text import counted


@click.command("plan", cls=SchemaCommand, context_settings=SETTINGS)
@click.argument("manifest", metavar="MANIFEST")
@fields(
    "peer",
    "stages",
    type=StageList(knows_all=True),
    metavar="N[,N..]|all",
    help="Stages of one peer, or all, each for a peer of its own.  [those of --config, or all]",
)
@click.option(
    "--memory",
    "room",
    metavar="SIZE",
    help="Of each GPU, such as 24GiB; of the machine where ranks are on the CPU: with --ranks, --device cpu, "
    "or neither a GPU here nor --gpus.  [what is here]",
)
@with_line(
    "Mbit/s of a member's line, its narrower direction: say what a step takes, too, where the time goes and what "
    "limits it.",
    device=False,
)
@click.option(
    "--measure",
    is_flag=True,
    allow_from_autoenv=False,
    help="Time the run's layers here, keep the times beside MANIFEST, and say which cut makes stages equally fast.",
)
@click.option(
    "--search",
    is_flag=True,
    allow_from_autoenv=False,
    help="With --fleet or --mbit: propose stages, cut, microbatch, codecs, sync, mesh and slots; `init --fleet` writes "
    "such a run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, sizes in bytes.")
@peer_options(*MESH_AND_MEMORY, "device", "compute", "slots")
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    *,
    manifest: str,
    room: str | None,
    mbit: float | None,
    replicas: int | None,
    tflops: float | None,
    rtt: float | None,
    fleet: Path | None,
    measure: bool,
    search: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Print what memory stages of MANIFEST take on each rank, how much is missing where they do not fit, and with
    --mbit or --fleet what a step takes.

    Takes --config and the flags of `swarmnet peer` that say how memory is spent, and refuses what that refuses. Needs
    no GPU for a plan of GPUs: --gpus says how many. Several stages named are one peer's, and have to fit together. The
    exit code is 1 if something does not fit.

    \b
    Examples:
      swarmnet plan run.toml
      swarmnet plan run.toml --stage 2 --gpus 1 --memory 24GiB
      swarmnet plan run.toml --stage 1,2 --gpus 1 --memory 80GiB
      swarmnet plan run.toml --gpus 8 --memory 80GiB --activations selective
      swarmnet plan run.toml --gpus 1 --memory 24GiB --mbit 200 --rtt 80
      swarmnet plan run.toml --measure --device cpu
      swarmnet plan run.toml --fleet fleet.toml
      swarmnet plan run.toml --fleet fleet.toml --search
    """
    if manifest.startswith("swarm:"):
        raise UsageError("plan takes a manifest's file: `join` keeps that of a link in its --dir, as run-RUN_ID.toml")
    config = read_config(ctx, "stage").model_copy(update={"manifest": Path(manifest).expanduser()})
    run = read_manifest(config, "plan")
    size = None if room is None else _size(room)
    named = "gpus" in config.mesh.model_fields_set  # "1" is also what nobody said
    # A size and a number of GPUs describe another machine, whatever is in this one.
    imagined = room is not None and named and config.device != "cpu" and config.mesh.ranks == 1

    from swarmnet.cli.measured import measured_here, saved
    from swarmnet.cli.plan_report import run_fleet_plan, run_plan
    from swarmnet.peer.devices import check_memory, choose_layout, computed_here, meaningless
    from swarmnet.peer.memory_fit import room_here, setup_of

    for flag, said in (("--memory", room), ("--stage", config.stages)):
        if fleet is not None and said:
            raise UsageError(f"{flag} and --fleet exclude each other: {fleet} says what machines have")
    cuda = _gpus_here()
    if (imagined or config.mesh.gpus not in ("1", "auto") or config.device == "cuda") and not cuda:
        cuda = 10_000  # of another machine: as many as one can ask for
        if config.mesh.gpus == "auto":
            raise UsageError("--gpus auto: torch sees no CUDA device here; say how many the other machine has")
    # The same checks as before a peer starts, so a plan is never of what a peer would refuse.
    run = computed_here(run, config.compute)
    layout = choose_layout(config.mesh, config.device, run, cuda=cuda)
    check_memory(config.memory, layout)
    if ignored := meaningless(config.mesh, layout):
        click.echo(f"ignored: {ignored} (one rank shares its stages with no other)", err=True)
    # What is said wins over what is here.
    room_bytes = room_here(layout) if size is None else size
    host_room = available_memory() if size is None else None
    members = lent(
        mbit=mbit,
        fleet=fleet,
        device=None,
        replicas=replicas,
        tflops=tflops,
        rtt=rtt,
        ranks=layout.ranks,
        usual_device=layout.kind,
    )
    if search and members is None:
        raise UsageError("--search needs machines: add --fleet FILE, or --mbit N")
    setup = setup_of(config, run, layout)
    path = Path(manifest).expanduser()
    if measure:
        if layout.ranks > 1 or (layout.kind == "cuda" and not _gpus_here()):
            raise UsageError("--measure times one device that is here: leave --gpus and --ranks out")
        code = measured_here(path, setup, threads=config.threads, as_json=as_json)
        if members is None:
            return code
    times = saved(path, run)
    if search and members is not None:
        if members.replicas is not None:
            members = _anywhere(members, run.cut.stages, room_bytes)
        fit = Fit.of(run, {}, members, memory=setup.memory, memo_bytes=setup.memo_bytes, times=times)
        click.echo(json.dumps(fit.record(), indent=2) if as_json else "\n".join(fit.lines()))
        return 0
    if fleet is not None and members is not None:
        return run_fleet_plan(setup, members, times, as_json=as_json)
    return run_plan(setup, config.stages, room_bytes, host_room, members, times, as_json=as_json)


def _anywhere(members: Lent, stages: int, room: int | None) -> Lent:
    """As many machines as `--replicas` of each stage, for any stages."""
    from swarmnet.config.fleet import Members

    (kind,) = members.members.machines
    count = (members.replicas or 1) * stages
    more = kind.model_copy(
        update={"count": count, "gpu_gib" if kind.device == "cuda" else "host_gib": (room or 0) / 2**30}
    )
    words = f"{members.words} of {counted(stages, 'stage')}"
    return Lent(Members(machines=(more,), regions=members.members.regions), None, words)


def _size(text: str) -> int:
    """Raises UsageError."""
    from swarmnet.plan.memory import read_size

    try:
        return read_size(text)
    except ValueError as error:
        raise UsageError(f"--memory {text}: {error}") from error


def _gpus_here() -> int:
    import torch

    return torch.cuda.device_count()
