"""The frame of the command line: which commands there are, and how an error becomes one line and an exit code.

Errors we named are one line on standard error; anything else is a bug and keeps its traceback. Knows no command.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence, Set
from functools import partial
from typing import Any, TextIO

import click

from swarmnet import __version__
from swarmnet.cli import leave_at_once
from swarmnet.errors import SwarmError, UsageError, leaves

TASKS = {
    "Set up a run": {"init": "init.init", "tokenize": "init.tokenize", "plan": "plan.plan"},
    "Try it on one machine": {"local": "local.local", "simulate": "simulate.simulate"},
    "Take part": {
        "join": "serve.join",
        "peer": "serve.peer",
        "trainer": "serve.trainer",
        "bootstrap": "serve.bootstrap",
        "doctor": "serve.doctor",
    },
    "Follow a run": {"status": "serve.status", "watch": "watch.watch", "dashboard": "watch.dashboard"},
    "Control a peer, own a run, check work": {
        "control": "control.control",
        "owner": "owner.owner",
        "audit": "audit.audit",
    },
    "Use the model": {"export": "weights.export", "eval": "weights.evaluate", "generate": "weights.generate"},
}
"""Where each command is, below `swarmnet.cli`, by what it is for, in the order in which a newcomer types them."""

COMMANDS = {name: where for commands in TASKS.values() for name, where in commands.items()}

_LEAVE_AT_ONCE = frozenset(["local", "join", "peer", "trainer", "bootstrap"])
"""What handles Ctrl+C itself as soon as it has something to give back. All others are told by KeyboardInterrupt."""

_SERVING = frozenset(["join", "peer", "trainer", "bootstrap"])
"""What others depend on: it goes on although nothing that it prints can be written any more."""

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


class Commands(click.Group):
    """Commands of one task. It prints its help if no command is named, and knows what a typing error meant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All of them, in their order."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """The named command's exit code."""
        # click would make an error of several lines of it.
        if not (ctx._protected_args or ctx.args):
            click.echo(ctx.get_help())
            return 0
        return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with a did-you-mean."""
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known:
            raise UsageError(f"there is no command {args[0]!r}; {self._advice(args[0], known)}")
        return super().resolve_command(ctx, args)

    def _advice(self, name: str, known: Sequence[str]) -> str:
        # Imported only now: a command that exists never pays for it.
        import difflib

        close = difflib.get_close_matches(name, known, n=1)
        return f"did you mean {close[0]}?" if close else f"commands are {', '.join(known)}"


class Lazy(Commands):
    """A group that imports its commands when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All of them, in their order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None if there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(".")
        # Importing every command for `--help` would take seconds.
        command = getattr(importlib.import_module(f"swarmnet.cli.{module}"), name)
        assert isinstance(command, click.Command), cmd_name
        if cmd_name not in _LEAVE_AT_ONCE and signal.getsignal(signal.SIGINT) is leave_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands of each task, with the first sentence of their help."""
        width = max(map(len, COMMANDS))
        for task, names in TASKS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(task):
                formatter.write_dl(
                    [(name.ljust(width), found.get_short_help_str(200)) for name, found in commands if found]
                )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As a group does; and no variable of the environment is a typing error."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and (unknown := _variables() - _settings(ctx, command)):
            self._refuse_unknown(ctx, unknown)
        return name, command, rest

    def _advice(self, name: str, known: Sequence[str]) -> str:
        # What is typed may be a command of a group, named without it.
        for group in map(partial(self.get_command, click.get_current_context()), known):
            if isinstance(group, click.Group) and name in group.commands:
                return f"did you mean {group.name} {name}?"
        return super()._advice(name, known)

    def _refuse_unknown(self, ctx: click.Context, variables: Set[str]) -> None:
        """Raise UsageError if no command at all reads one of them: a typing error would go unnoticed."""
        import difflib

        commands = [self.get_command(ctx, name) for name in COMMANDS]
        known = {variable for command in commands if command is not None for variable in _settings(ctx, command)}
        for variable in sorted(variables - known):
            close = difflib.get_close_matches(variable, sorted(known), n=1)
            advice = f"did you mean {close[0]}?" if close else "unset it"
            raise UsageError(f"the environment has {variable}, which is no setting of any command; {advice}")


def _variables() -> Set[str]:
    return {name for name in os.environ if name.startswith("SWARMNET_")}


def _settings(ctx: click.Context, command: click.Command) -> Set[str]:
    """Variables that say an option of `command`, or of a command below it."""
    if isinstance(command, click.Group):
        return {variable for below in command.commands.values() for variable in _settings(ctx, below)}
    options = [word for param in command.get_params(ctx) for word in (param.name or "", *param.opts)]
    return {f"SWARMNET_{word.lstrip('-').replace('-', '_').upper()}" for word in options}


@click.group(cls=Lazy, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="swarmnet", message="%(prog)s %(version)s")
def swarmnet() -> None:
    """Train large language models on machines that volunteers offer.

    \b
    Example, a whole swarm on this machine:
      swarmnet local --stages 3 --replicas 2 --steps 60
    """


class _Lasting(io.FileIO):
    """Standard output or error of a command that outlasts its terminal (EIO), and if it serves others all else: a
    reader that has ended (`2>&1 | tee`), a full disk."""

    def __init__(self, number: int, *, serves: bool) -> None:
        super().__init__(number, "wb", closefd=False)
        self._serves = serves

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not self._serves and error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


def _lasting(stream: TextIO, command: str) -> TextIO:
    """`stream`, or what replaces it while `command` runs."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a "?"
    below = getattr(stream.buffer, "raw", stream.buffer)  # PYTHONUNBUFFERED leaves no buffer between
    if command not in _LEAVE_AT_ONCE or not isinstance(below, io.FileIO):
        return stream
    raw = _Lasting(stream.fileno(), serves=command in _SERVING)
    return io.TextIOWrapper(
        raw if below is stream.buffer else io.BufferedWriter(raw),
        stream.encoding,
        "replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return its exit code. Prints errors, raises bugs."""
    words = list(sys.argv[1:] if argv is None else argv)
    sys.stdout, sys.stderr = (_lasting(stream, "".join(words[:1])) for stream in (sys.stdout, sys.stderr))
    try:
        code = swarmnet.main(args=words, prog_name="swarmnet", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        # click's own errors may have line breaks; ours are one line, too.
        return _say(" ".join(error.format_message().split()) + _advised(error), BAD_INPUT)
    except SwarmError as error:
        return _report(error)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return _unread()
    except (OSError, RuntimeError, MemoryError) as error:
        if (told := _of_the_host(error)) is None:
            raise
        if isinstance(error, OSError):
            _unread()  # what is left cannot be written, either
        return _say(*told)
    except BaseExceptionGroup as group:  # from a task group
        found = list(leaves(group))
        if any(isinstance(error, KeyboardInterrupt) for error in found):
            return INTERRUPTED
        if all(isinstance(error, BrokenPipeError) for error in found):
            return _unread()
        if all(isinstance(error, SwarmError) or _of_the_host(error) for error in found):
            # Each is a line of its own; bad input outweighs a failure.
            return max(_report(error) for error in found)
        raise


def _of_the_host(error: BaseException) -> tuple[str, int] | None:
    """What this machine lacks, in words, and the exit code; None: it is another error."""
    text, number = str(error), getattr(error, "errno", None)
    where = f"{filename}: " if (filename := getattr(error, "filename", None)) else ""
    then = "".join(f", then {note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, OSError) and number in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}no space left on the disk that is written to: free some{then}", FAILED
    if isinstance(error, BlockingIOError) or "can't start new thread" in text:
        return "this machine lets no more processes or threads start: raise pids.max or ulimit -u", FAILED
    if isinstance(error, MemoryError) or number == errno.ENOMEM or "can't allocate memory" in text:
        return f"this process may take no more memory (ulimit -v, or the machine has none left){then}", FAILED
    if isinstance(error, FileNotFoundError) and "temporary directory" in text:
        return "no directory for temporary files can be written: name one with TMPDIR", BAD_INPUT
    if isinstance(error, RuntimeError) and "home directory" in text:
        return "~ names no directory, because HOME is not set or there is no such user: write the path", BAD_INPUT
    return None


def _unread() -> int:
    """`swarmnet status | head`: the reader has ended, which is no error."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


def _advised(error: click.ClickException) -> str:
    """What to do about a line in which a word is missing, or is none of the command's."""
    if not isinstance(error, click.NoSuchOption | click.MissingParameter) or error.ctx is None:
        return ""
    settable = _settable(error) if isinstance(error, click.NoSuchOption) else ""
    return settable or f" '{error.ctx.command_path} --help' shows what there is."


def _settable(error: click.NoSuchOption) -> str:
    """Where the flag is a field of the manifest, and the command has `--set`: how to say it."""
    if error.ctx is None or not any("--set" in param.opts for param in error.ctx.command.get_params(error.ctx)):
        return ""
    from swarmnet.config.check import leaves as fields
    from swarmnet.manifest.schema import Manifest

    name = error.option_name.lstrip("-").replace("-", "_")
    found = [".".join(path) for path, _ in fields(Manifest) if path[-1] == name]
    return f" Write --set {found[0]}=..." if found else ""


def _report(error: BaseException) -> int:
    if not isinstance(error, SwarmError):
        told = _of_the_host(error)
        assert told is not None, error
        return _say(*told)
    # An error without a word names its class already.
    text = str(error) if error.message or not error.facts else f"{type(error).__name__}: {error}"
    return _say(" ".join(text.split()), BAD_INPUT if isinstance(error, UsageError) else FAILED)


def _say(line: str, code: int) -> int:
    from swarmnet.telemetry.text import printable

    click.echo(f"swarmnet: error: {printable(line)}", err=True)  # it may quote what others have sent
    return code
