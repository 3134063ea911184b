"""Every command of `swarmnet`, as the words that are typed."""

from __future__ import annotations

from collections.abc import Iterator

import click

from swarmnet.cli.frame import COMMANDS, swarmnet


def found(*words: str) -> click.Command:
    """The command that these words name."""
    command: click.Command | None = swarmnet
    for word in words:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    assert command is not None
    return command


def command_lines() -> Iterator[tuple[str, ...]]:
    """Groups, too, before their commands."""
    for name in COMMANDS:
        yield (name,)
        if isinstance(group := found(name), click.Group):
            yield from ((name, below) for below in group.commands)
