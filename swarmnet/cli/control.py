"""`swarmnet control`: the commands by which a volunteer controls a running peer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from swarmnet.cli.frame import Commands
from swarmnet.cli.settings import SETTINGS, SchemaCommand, TypedPath, fields, given, with_json

F = TypeVar("F", bound=Callable[..., Any])


def with_dir(command: F) -> F:
    """`--dir`: which peer of this machine."""
    option = click.option(
        "--dir",
        "directory",
        type=TypedPath(path_type=Path, file_okay=False),
        default=Path("~/.swarmnet/peer"),
        metavar="DIR",
        help="The peer's --dir.  [~/.swarmnet/peer]",
    )
    return option(command)


@click.group(cls=Commands, no_args_is_help=False, context_settings=SETTINGS)
def control() -> None:
    """Control a peer that runs on this machine: pause, resume, drain, its limits; and what it has contributed.

    \b
    Example:
      swarmnet control pause
    """


def _ask(directory: Path, ask: str, *, as_json: bool = False, **more: object) -> int:
    from swarmnet.peer.control_socket import ask_peer

    answer = ask_peer(directory.expanduser(), ask, **more)
    click.echo(json.dumps(answer["facts"], indent=2) if as_json else answer["words"])
    return 0


@control.command("pause", context_settings=SETTINGS)
@with_dir
def pause(directory: Path) -> int:
    """Pause a running peer: it takes no new microbatches, and keeps its state up to date.

    It finishes what it has. If no other peer has its stage's state it serves on until one has.

    \b
    Example:
      swarmnet control pause
    """
    return _ask(directory, "pause")


@control.command("resume", context_settings=SETTINGS)
@with_dir
def resume(directory: Path) -> int:
    """End a pause: the peer takes microbatches again, from the next one on.

    \b
    Example:
      swarmnet control resume
    """
    return _ask(directory, "resume")


@control.command("drain", context_settings=SETTINGS)
@with_dir
def drain(directory: Path) -> int:
    """Have a running peer leave in good order, as the first Ctrl+C does, and end.

    \b
    Example:
      swarmnet control drain --dir ~/.swarmnet/stage-0
    """
    return _ask(directory, "drain")


@control.command("limits", cls=SchemaCommand, context_settings=SETTINGS)
@fields("peer", "slots", "caps", live=True, allow_from_autoenv=False)
@with_dir
@with_json
@click.pass_context
def limits(ctx: click.Context, /, directory: Path, as_json: bool, **_: Any) -> int:
    """Show what a running peer offers at most, and change it at once.

    What is changed is written into peer.toml in the peer's --dir, which overrides a --config file, and holds after a
    restart, too, unless a flag of `join` or `peer` or a variable says something else.

    \b
    Examples:
      swarmnet control limits
      swarmnet control limits --upload 10 --hours 22:00-07:00
      swarmnet control limits --upload 0 --hours ""
    """
    from swarmnet.config.check import layer, merge

    typed = given(ctx, ParameterSource.COMMANDLINE)
    change, _origins = merge(layer(name, option.path, value) for option, name, value in typed)
    return _ask(directory, "limits", as_json=as_json, change=change)


@control.command("stats", context_settings=SETTINGS)
@with_dir
@with_json
def stats(directory: Path, as_json: bool) -> int:
    """What a peer has contributed since it first started with its --dir.

    It need not run. A microbatch is counted when it is in a committed sum. Steps are those that the peer has applied,
    of all its stages; `swarmnet audit receipts` has those in which it counted a microbatch.

    \b
    Example:
      swarmnet control stats --json
    """
    return _ask(directory, "stats", as_json=as_json)
