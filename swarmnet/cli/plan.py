"""`swarmnet plan`: does a stage fit this machine, or another?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarmnet.cli.line import Machines, Proposal, machines_of, with_line
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

if TYPE_CHECKING:
    from swarmnet.config.peer import PeerConfig
    from swarmnet.manifest.schema import Manifest, StageSpec, Wire
    from swarmnet.plan.cost import LayerTimes
    from swarmnet.plan.memory import Setup


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
    help="Time the run's layers here, keep the times next to MANIFEST, and say which cut makes stages equally fast.",
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
    from swarmnet.peer.devices import check_memory, choose_layout, computed_here, meaningless
    from swarmnet.peer.memory_fit import memory_here, setup_of

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
    room_bytes, host_room = (memory_here(layout), available_memory()) if size is None else (size, None)
    machines = machines_of(ctx.params, ranks=layout.ranks, usual_device=layout.kind)
    if search and machines is None:
        raise UsageError("--search needs machines: add --fleet FILE, or --mbit N")
    setup, path = setup_of(config, run, layout), Path(manifest).expanduser()
    if measure:
        if layout.ranks > 1 or (layout.kind == "cuda" and not _gpus_here()):
            raise UsageError("--measure times one device that is here: leave --gpus and --ranks out")
        code = measured_here(path, setup, threads=config.threads, as_json=as_json)
        if machines is None:
            return code
    times = saved(path, run)
    if search and machines is not None:
        choice = Proposal.of(run, {}, _anywhere(machines, run.cut.stages, room_bytes), config, times)
        click.echo(json.dumps(choice.record(), indent=2) if as_json else "\n".join(choice.lines()))
        return 0
    if fleet is not None and machines is not None:
        return _fleet(run, machines, config, times, as_json=as_json)
    return _peer(setup, config.stages, room_bytes, host_room, machines, times, as_json=as_json)


def _peer(
    setup: Setup,
    stages: Sequence[int],
    room: int | None,
    host_room: int | None,
    machines: Machines | None,
    times: LayerTimes | None,
    *,
    as_json: bool,
) -> int:
    """Print the plan of one peer with `stages`, or without any of each stage for a peer of its own; and if machines are
    known, what a step takes. The exit code is 1 if something does not fit."""
    from swarmnet.cli.plan_report import fit_record, memory_record, memory_table, step_lines, step_record
    from swarmnet.peer.memory_fit import exchanged, judge, listed, slots_that_fit, usable, with_slots
    from swarmnet.plan.choice import search
    from swarmnet.plan.members import MachineFit

    there, room, remarks = room, usable(setup, room), []
    every, several = stages or range(len(setup.specs)), len(stages) > 1
    # Stages of one peer share its slots, so they are chosen once.
    sets = [[stage] for stage in every] + ([list(stages)] if several else [])
    fits = [
        judge(with_slots(setup, stages if several else each, room, host_room), each, room, host_room) for each in sets
    ]
    alone = fits[: len(every)]
    if not stages and len(alone) > 1:
        remarks.append(f"each is for a peer of its own: --stage {listed(every[:2])} plans one peer with both")
    if room != there:
        remarks.append("a peer that chooses its slots leaves half of the machine's free memory to others")
    if setup.memory.compile:
        remarks.append("planned as if layers were not compiled: what the compiler takes and saves is not modelled")
    step = None
    if machines is not None:
        # All replicas are taken to be like this peer.
        slots = min(slots_that_fit(setup, each, room, host_room) for each in sets)
        spec, members = setup.specs[0], machines.members
        fit = tuple(
            (MachineFit(max(slots, 1), mesh_bytes=exchanged(setup, [stage])),) for stage in range(len(setup.specs))
        )
        best, _ = search(spec, _chosen(spec, setup.wire), members, lambda _: fit, times, machines.counts(len(fit)))
        step = step_record(best, spec, members, times)
    if as_json:
        together = {"stages": list(stages), **fit_record(fits[-1])} if several else None
        # Bytes, so that programs need not read units.
        found = {"stages": [memory_record(each) for each in alone], "peer": together, "time": step}
        click.echo(json.dumps(found, indent=2))
    else:
        paragraphs = [memory_table([each.plans[0] for each in alone]), *(each.lines() for each in fits)]
        paragraphs += [[remark] for remark in remarks]
        if step is not None and machines is not None:
            paragraphs.append(step_lines(step, machines.words))
        click.echo("\n\n".join("\n".join(lines) for lines in paragraphs))
    return int(not all(each.fits for each in fits))


def _fleet(run: Manifest, machines: Machines, config: PeerConfig, times: LayerTimes | None, *, as_json: bool) -> int:
    """Print which machines of a fleet serve which stages, and what a step takes. The exit code is 1 if they cannot."""
    from swarmnet.cli.plan_report import served_lines, step_lines, step_record
    from swarmnet.plan.choice import NothingFits

    spec, members = run.of_stage(0), machines.members
    try:
        best = Proposal.of(run, _chosen(spec, run.wire), machines, config, times).best
    except NothingFits as refused:
        click.echo(refused, err=as_json)
        return 1
    step = step_record(best, spec, members, times)
    if as_json:
        fits = [[asdict(fit) for fit in place] for place in best.fits]
        click.echo(json.dumps({"fits": fits, "time": step}, indent=2))
    else:
        click.echo("\n".join([*served_lines(best, members), "", *step_lines(step, machines.words)]))
    return 0


def _chosen(spec: StageSpec, wire: Wire) -> dict[str, object]:
    """What the search must not change: the run is as it is."""
    return {
        "numerics.mode": spec.numerics.mode,
        "numerics.compute": spec.numerics.compute,
        "averaging.sync": spec.averaging.sync,
        "averaging.codec": spec.averaging.codec,
        "wire.activations": wire.activations,
        "wire.gradients": wire.gradients,
        "training.microbatch_size": spec.training.microbatch_size,
        "cut.layers": spec.cut.layers,
    }


def _anywhere(machines: Machines, stages: int, room: int | None) -> Machines:
    """As many machines as `--replicas` of each stage, for any stages."""
    from swarmnet.config.check import refusing
    from swarmnet.config.fleet import Members

    if machines.replicas is None:
        return machines
    (kind,), members = machines.members.machines, machines.members
    memory = {"gpu_gib" if kind.device == "cuda" else "host_gib": (room or 0) / 2**30}
    more = kind.model_copy(update={"count": machines.replicas * stages, **memory})
    words = f"{machines.words} of {counted(stages, 'stage')}"
    with refusing(f"--replicas {machines.replicas} of {counted(stages, 'stage')}"):
        return Machines(Members(machines=(more,), regions=members.regions), None, words)


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
