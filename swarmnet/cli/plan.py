"""`swarmnet plan`: does a stage fit this machine, or another?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from swarmnet.cli.line import MemberLine, with_line
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
    as_json: bool,
    **_: Any,
) -> int:
    """Print what memory stages of MANIFEST take on each rank, how much is missing where they do not fit, and with
    --mbit what a step takes.

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
    """
    config = read_config(ctx, "stage").model_copy(update={"manifest": Path(manifest).expanduser()})
    run = read_manifest(config, "plan")
    size = None if room is None else _size(room)
    named = "gpus" in config.mesh.model_fields_set  # "1" is also what nobody said
    # A size and a number of GPUs describe another machine, whatever is in this one.
    imagined = room is not None and named and config.device != "cpu" and config.mesh.ranks == 1

    from swarmnet.cli.plan_report import run_plan
    from swarmnet.peer.devices import check_memory, choose_layout, computed_here, meaningless
    from swarmnet.peer.memory_fit import room_here, setup_of

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
    line = MemberLine.typed(mbit, layout.kind if mbit else None, replicas, tflops, rtt, ranks=layout.ranks)
    return run_plan(setup_of(config, run, layout), config.stages, room_bytes, line, as_json=as_json)


def _size(text: str) -> int:
    """Raises UsageError."""
    from swarmnet.plan.budget import read_size

    try:
        return read_size(text)
    except ValueError as error:
        raise UsageError(f"--memory {text}: {error}") from error


def _gpus_here() -> int:
    import torch

    return torch.cuda.device_count()
