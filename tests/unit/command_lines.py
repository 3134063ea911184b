"""Every command of `swarmnet`, as the words that are typed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from swarmnet.cli.frame import COMMANDS, swarmnet
from swarmnet.local.earlier import BEGAN
from swarmnet.local.options import LocalOptions


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


def begun(out: Path) -> None:
    """Leave what a local run leaves in `out`: two replicas a stage, of which stage 1 has two ranks."""
    (out / "peers/s0-r0").mkdir(parents=True)
    (out / "run.toml").touch()
    typed = (("--sync exact", "averaging.sync=exact"),)
    options = LocalOptions(steps=9, ranks=("1=2",), set=("training.microbatches=4",), typed=typed, out=out)
    record = {"t": 1.0, "event": BEGAN, "options": options.record()}
    (out / "events.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
