"""From flags, environment and `--config` to a `PeerConfig`: the options that peer, trainer and bootstrap share.

click reads the flags and the variables (SWARMNET_ and the flag's name in capitals: `--dht-port` is SWARMNET_DHT_PORT);
`config.layers` decides who wins. Imported by every command, so pydantic is imported only once a command runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from swarmnet.errors import UsageError

if TYPE_CHECKING:
    from swarmnet.config.layers import SettingsLayer
    from swarmnet.config.peer import PeerConfig, Role
    from swarmnet.manifest.schema import Manifest

F = TypeVar("F", bound=Callable[..., Any])

PREFIX = "SWARMNET"
SETTINGS = {"auto_envvar_prefix": PREFIX, "help_option_names": ["-h", "--help"]}
"""The context of every command: one variable per flag, the same one whatever the command."""

LEVELS = click.Choice(["debug", "info", "warning", "error"])
MULTIADDR = "MADDR"


def _stages(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """`0,3` as (0, 3)."""
    try:
        return None if value is None else tuple(int(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: write stage numbers with commas, such as 0,3") from error


# option -> (its place in PeerConfig, the option)
_OPTIONS: dict[str, tuple[tuple[str, ...], Callable[[F], F]]] = {
    "manifest": (("manifest",), click.option("--manifest", metavar="FILE", help="The run's manifest (run.toml).")),
    "stage": (("stages",), click.option("--stage", callback=_stages, metavar="N[,N..]", help="Stages to serve.")),
    "gpus": (
        ("mesh", "gpus"),
        click.option(
            "--gpus", metavar="N|I,J..|auto", help="GPUs of this peer, one rank each: how many, which, or all.  [1]"
        ),
    ),
    "ranks": (("mesh", "ranks"), click.option("--ranks", type=int, metavar="N", help="Ranks on the CPU.  [1]")),
    "tensor": (
        ("mesh", "tensor"),
        click.option("--tensor", type=int, metavar="N", help="Ranks that split each layer.  [all, or 1 with --shard]"),
    ),
    "shard": (
        ("mesh", "shard"),
        click.option(
            "--shard",
            type=click.Choice(["none", "dp", "zero1", "zero2", "zero3"]),
            help="The rest split microbatches and, with zeroN, moments, sums, weights.  [none]",
        ),
    ),
    "sequence_parallel": (
        ("mesh", "sequence_parallel"),
        click.option(
            "--sequence-parallel", is_flag=True, help="Ranks that split layers split norms and residuals by tokens."
        ),
    ),
    "activations": (
        ("memory", "activations"),
        click.option(
            "--activations",
            type=click.Choice(["stash", "selective", "recompute_layers", "recompute", "offload"]),
            help="What is kept of a microbatch until its backward; the rest is computed again.  [stash]",
        ),
    ),
    "compile": (
        ("memory", "compile"),
        click.option("--compile", is_flag=True, help="torch.compile each layer, on CUDA."),
    ),
    "dir": (("dir",), click.option("--dir", metavar="DIR", help="Identity key and snapshots.  [~/.swarmnet/COMMAND]")),
    "data": (("data",), click.option("--data", metavar="PATH", help="Where this machine has the run's tokens.")),
    "initial": (
        ("initial",),
        click.option(
            "--initial", metavar="DIR", help="Where this machine has the checkpoint that the run begins with."
        ),
    ),
    "host": (("host",), click.option("--host", metavar="ADDR", help="Address to listen on.  [0.0.0.0]")),
    "port": (
        ("port",),
        click.option("--port", type=int, metavar="N", help="Port of the data plane.  [last time's, or any free]"),
    ),
    "dht_port": (
        ("dht_port",),
        click.option("--dht-port", type=int, metavar="N", help="Port of the DHT.  [last time's, or any free]"),
    ),
    "announce": (
        ("announce",),
        click.option(
            "--announce", multiple=True, metavar=MULTIADDR, help="Multiaddr to publish instead of --host's; repeatable."
        ),
    ),
    "bootstrap": (
        ("bootstrap",),
        click.option(
            "--bootstrap", multiple=True, metavar=MULTIADDR, help="Multiaddr of a peer that is up; repeatable."
        ),
    ),
    "invitation": (
        ("invitation",),
        click.option(
            "--invitation", metavar="FILE|TEXT", help="In a run by invitation: what `swarmnet invite` printed."
        ),
    ),
    "device": (
        ("device",),
        click.option("--device", type=click.Choice(["cpu", "cuda", "auto"]), help="Where to compute.  [auto]"),
    ),
    "slots": (
        ("slots",),
        click.option("--slots", type=int, metavar="N", help="Microbatches in flight per stage.  [4]"),
    ),
    "events": (("events",), click.option("--events", metavar="FILE", help="Append events to FILE, one JSON a line.")),
    "log_level": (("log", "level"), click.option("--log-level", type=LEVELS, help="The least to log.  [info]")),
    "log_format": (
        ("log", "format"),
        click.option("--log-format", type=click.Choice(["text", "json"]), help="Short lines or JSON.  [text]"),
    ),
}


MESH = ("gpus", "ranks", "tensor", "shard", "sequence_parallel")
"""The options that say which ranks a peer has."""

MEMORY = ("activations", "compile")
"""The options that say how a device's memory is spent."""


def options(*names: str) -> Callable[[F], F]:
    """Add the shared options `names`, then `--config` and `--set`, to a command, in this order."""
    config = click.option("--config", metavar="FILE", help="Peer config file; flags and SWARMNET_* variables win.")
    assignments = click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="KEY=VALUE",
        envvar=f"{PREFIX}_SET",
        help="Any other setting of the peer config, such as threads=2; repeatable.",
    )

    def decorate(command: F) -> F:
        for option in reversed([*(_OPTIONS[name][1] for name in names), config, assignments]):
            command = option(command)
        return command

    return decorate


def read_config(ctx: click.Context, role: Role) -> PeerConfig:
    """The peer config of the running command, checked, with logging set up by it.

    Raises UsageError in the name of the flag, variable or file that is wrong.
    """
    from swarmnet import telemetry
    from swarmnet.config.layers import resolve
    from swarmnet.config.peer import PeerConfig

    config = resolve(PeerConfig, _layers(ctx, role), where=ctx.params["config"] or "peer config")
    if role not in config.roles:
        raise UsageError(
            f"roles = {list(config.roles)} does not include {role!r}: "
            f"start it with `swarmnet {_command(config.roles[0])}`"
        )
    telemetry.setup(config.log.level, format=config.log.format)
    return config


def read_manifest(config: PeerConfig, command: str) -> Manifest:
    """The manifest that `config` names; the stages it asks for exist, and `peer` has some. Raises UsageError."""
    from swarmnet.manifest.file import load

    if config.manifest is None:
        raise UsageError(f"`swarmnet {command}` needs the run's manifest: add --manifest run.toml")
    manifest = load(config.manifest)
    for stage in config.stages:
        if stage >= manifest.cut.stages:
            raise UsageError(f"there is no stage {stage}: {config.manifest} has stages 0 to {manifest.cut.stages - 1}")
    if command == "peer" and not config.stages:
        raise UsageError(f"`swarmnet peer` needs --stage: stages are 0 to {manifest.cut.stages - 1}, several are 0,1")
    return manifest


def implied(role: Role) -> SettingsLayer:
    """What it says of a peer's config that it does this."""
    from swarmnet.config.layers import SettingsLayer

    return SettingsLayer("default", {"roles": [role], "dir": f"~/.swarmnet/{_command(role)}"})


def _layers(ctx: click.Context, role: Role) -> list[SettingsLayer]:
    """Weakest first: what the command implies, file, variables (SWARMNET_SET first), `--set`, flags."""
    from swarmnet.config import toml
    from swarmnet.config.layers import SettingsLayer, layer

    layers = [implied(role)]
    if file := ctx.params["config"]:
        layers.append(SettingsLayer(file, toml.read(Path(file).expanduser())))
    for source in (ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE):
        if ctx.get_parameter_source("assignments") is source:
            name = _origin(ctx, "assignments", source)
            layers += [layer(name, *toml.assignment(text, where=name)) for text in ctx.params["assignments"]]
        layers += [
            layer(_origin(ctx, name, source), _OPTIONS[name][0], value)
            for name, value in ctx.params.items()
            if name in _OPTIONS and ctx.get_parameter_source(name) is source
        ]
    return layers


def _origin(ctx: click.Context, name: str, source: ParameterSource) -> str:
    """What the operator typed: `--dht-port`, or the variable `SWARMNET_DHT_PORT`."""
    flag = next(param.opts[0] for param in ctx.command.params if param.name == name)
    if source is ParameterSource.ENVIRONMENT:
        return f"{PREFIX}_{flag.lstrip('-').replace('-', '_').upper()}"
    return flag


def _command(role: Role) -> str:
    return "peer" if role == "stage" else role
