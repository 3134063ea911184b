"""Options that fields declare, and the config that peer, trainer, bootstrap and plan read with them.

A field of a schema that has a `config.table.CliOption` is an option of every command that names it. Its type, its
default and its help are the field's. click reads the flags and the variables (`--dht-port` is
SWARMNET_DHT_PORT), and `config.check` decides who wins. Every command imports this module. It imports
the schemas, and pydantic with them, only when a command's options are asked for.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from swarmnet.errors import UsageError

if TYPE_CHECKING:
    from swarmnet.config.check import SettingsLayer
    from swarmnet.config.peer import PeerConfig, Role
    from swarmnet.config.table import CliOption
    from swarmnet.manifest.schema import Manifest

F = TypeVar("F", bound=Callable[..., Any])
FieldPath = tuple[str, ...]

PREFIX = "SWARMNET"
SETTINGS = {"auto_envvar_prefix": PREFIX, "help_option_names": ["-h", "--help"]}
"""The context of every command: one variable per flag, the same one whatever the command."""

BUILT_IN = ("stdlib", "corpus:small")
"""Data sources that name no file of the operator's."""

# ------------------------------------------------------------ options of several commands that are no fields

MULTIADDR = "MADDR"


def check_writable(directory: Path, flag: str) -> None:
    """Raises UsageError unless files can be made in `directory`, or it can be made itself. Leaves nothing there."""
    import tempfile

    place = next(each for each in (directory, *directory.absolute().parents) if os.path.lexists(each))
    try:
        # Permissions and read-only file systems do not tell all: only an attempt does.
        with tempfile.TemporaryDirectory(prefix=".swarmnet-", dir=place):
            pass
    except (OSError, UnicodeError) as error:
        # A peer that found its disk full is started again until there is room, and exit code 2 would end that.
        if flag == "--dir" and getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{flag} {directory}: nothing can be written in {place} ({why}): choose another one"
        ) from error


with_bootstrap = click.option(
    "--bootstrap",
    multiple=True,
    metavar=MULTIADDR,
    help="Multiaddr of a peer that is up; repeatable. A link brings its own.",
)
with_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
with_log_level = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="The least to log.",
)


def with_checkpoints(command: F) -> F:
    """`--dir` and `--step`: which checkpoints on this disk."""
    directories = click.option(
        "--dir",
        "directories",
        type=TypedPath(path_type=Path, file_okay=False),
        multiple=True,
        metavar="DIR",
        envvar="SWARMNET_DIR",
        help="Where peers keep their checkpoints, at any depth; repeatable.  [MANIFEST's]",
    )
    step = click.option(
        "--step", type=CountRange(min=0), metavar="N", help="Which version of the weights.  [the newest that is whole]"
    )
    return directories(step(command))


# ------------------------------------------------------------ options that are fields


class FieldOption(click.Option):
    """An option that sets the field at `path` of a schema."""

    def __init__(self, path: FieldPath, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.path = path


class SchemaCommand(click.Command):
    """A command with `fields`: they become options when the options are asked for."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """All options and arguments, in the order in which they are declared."""
        each = (param() if isinstance(param, functools.partial) else [param] for param in self.params)
        self.params = list(itertools.chain.from_iterable(each))
        return super().get_params(ctx)


def fields(
    schema: Literal["peer", "manifest", "local", "fleet"], *names: str, live: bool = False, **changes: Any
) -> Callable[[F], F]:
    """Add the options of some fields to a `SchemaCommand`.

    Args:
        names: dotted names of fields, or of tables: then all their fields that have a flag. Without any, all of the
            schema.
        live: only those that can be changed while a peer runs.
        changes: of click's keywords for an option, for each of them.
    """

    def decorate(command: F) -> F:
        # Not yet the options: `swarmnet --help` comes without pydantic.
        later = functools.partial(_options, schema, names, live, changes)
        command.__dict__.setdefault("__click_params__", []).append(later)
        return command

    return decorate


def _options(schema: str, names: Sequence[str], live: bool, changes: dict[str, Any]) -> list[FieldOption]:
    """By the order of `names`."""
    found = {".".join(field.path): field for field in flagged(schema)}
    return [
        field.option(changes)
        for name in names or found
        for dotted, field in found.items()
        if (dotted == name or dotted.startswith(f"{name}.")) and (field.flag.live or not live)
    ]


@dataclass(frozen=True, slots=True)
class FlaggedField:
    """A field that is an option of some command."""

    path: FieldPath
    flag: CliOption
    type: Any
    """Without `Annotated` and None."""
    default: Any
    """None if it has none, or one that only the flag can tell."""
    description: str

    @property
    def name(self) -> str:
        """The option's, without its dashes."""
        return self.flag.name or self.path[-1].replace("_", "-")

    def option(self, changes: dict[str, Any]) -> FieldOption:
        """The option as click wants it."""
        # The text of the help is the field's own description, as it stands in the file.
        kind = self._kind()
        words = self.description.replace('"', "")
        if words.partition(" ")[0].isalpha() and self.description[:1] != '"':  # `text:`, "bytes" are what one types
            words = words[:1].upper() + words[1:]
        text = f"{words}{'; repeatable' if 'multiple' in kind else ''}."
        default = self.flag.default or self.default
        # False, "" and () are what nobody has to be told; 0 is a number.
        if default or (default == 0 and default is not False):
            text += f"  [{default}]"
        named = {"metavar": self.flag.metavar, "help": text, "allow_from_autoenv": self.flag.variable}
        return FieldOption(self.path, [f"--{self.name}"], **kind | named | changes)

    def _kind(self) -> dict[str, Any]:
        """click's words for the type. What needs more than these is checked with the whole config."""
        if get_origin(self.type) is Literal:
            return {"type": click.Choice(get_args(self.type))}
        if get_origin(self.type) is tuple:
            # Numbers have no commas, so several fit in one value; a multiaddr or FILE is said once each.
            of_numbers = _bare(get_args(self.type)[0]) is int
            return {"type": StageList()} if of_numbers else {"multiple": True}
        if self.type is bool:
            return {"is_flag": True}
        # That it can be read is found out by whoever reads it, who says what it is for.
        if self.type is Path:
            other = "dir_okay" if self.flag.metavar == "FILE" else "file_okay"
            return {"type": TypedPath(path_type=Path, readable=False, **{other: False})}
        return {"type": Number() if self.type is float else int if self.type is int else str}


class Number(click.ParamType):  # type: ignore[type-arg]  # generic only in some releases
    """A float, in words that do not name a type of ours."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Raises click's BadParameter."""
        try:
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number", param, ctx)


class NumberRange(click.FloatRange):
    """A number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Raises click's BadParameter."""
        number = Number().convert(value, param, ctx)
        # It is beyond no bound.
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return super().convert(number, param, ctx)


class CountRange(click.IntRange):
    """A whole number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Raises click's BadParameter."""
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number", param, ctx)
        return super().convert(number, param, ctx)


class TypedPath(click.Path):
    """A path that was said: an empty variable of a script is no directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Raises click's BadParameter."""
        if not str(value).strip():
            self.fail("it is empty: write a path, or leave it out", param, ctx)
        return super().convert(value, param, ctx)


class StageList(click.ParamType):  # type: ignore[type-arg]  # generic only in some releases
    """`0,3` as (0, 3); `all` is a word for none where a command knows it."""

    name = "stages"

    def __init__(self, *, knows_all: bool = False) -> None:
        self._knows_all = knows_all

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Raises click's BadParameter."""
        # click also converts defaults, which are tuples already.
        if isinstance(value, tuple) or (self._knows_all and value == "all"):
            return value if isinstance(value, tuple) else ()
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            more = ", or all" if self._knows_all else ""
            self.fail(f"{value!r}: write stage numbers with commas, such as 0,3{more}", param, ctx)


def flagged(schema: str) -> Iterator[FlaggedField]:
    """The fields of a schema that are options, in its order."""
    from swarmnet.config.check import leaves
    from swarmnet.config.peer import PeerConfig
    from swarmnet.config.table import CliOption
    from swarmnet.manifest.schema import Manifest

    if schema == "local":
        from swarmnet.local.options import LocalOptions

        hints = get_type_hints(LocalOptions, include_extras=True)
        for each in dataclasses.fields(LocalOptions):
            for flag in getattr(hints[each.name], "__metadata__", ()):
                yield FlaggedField((each.name,), flag, _bare(hints[each.name]), each.default, flag.help)
        return
    if schema == "fleet":
        from swarmnet.simulate.fleet import FleetFile
    for path, field in leaves(PeerConfig if schema == "peer" else Manifest if schema == "manifest" else FleetFile):
        for flag in field.metadata:
            if isinstance(flag, CliOption):
                default = None if field.default_factory else field.default
                yield FlaggedField(path, flag, _bare(field.annotation), default, field.description or "")


def _bare(annotation: Any) -> Any:
    """A type without `Annotated` and without "or None"."""
    inner = getattr(annotation, "__origin__", annotation) if hasattr(annotation, "__metadata__") else annotation
    some = [each for each in get_args(inner) if each is not type(None)]
    # An option that is left out is None anyway, so the option's type is the other half.
    return _bare(some[0]) if type(None) in get_args(inner) else inner


TYPED = (ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE)
"""Sources of a value that the user has given."""


def given(ctx: click.Context, *sources: ParameterSource) -> Iterator[tuple[FieldOption, str, Any]]:
    """Field options that were said by one of `sources`, by whom (a flag or a variable), and what."""
    for param in ctx.command.params:
        if isinstance(param, FieldOption) and param.name is not None:
            source = ctx.get_parameter_source(param.name)
            if source in sources:
                yield param, origin_of(param, source), ctx.params[param.name]


def origin_of(param: click.Parameter, source: ParameterSource | None) -> str:
    """What the operator typed: `--dht-port`, or the variable `SWARMNET_DHT_PORT`."""
    # The variable's name, so that an error names what has to be changed.
    if source is ParameterSource.ENVIRONMENT:
        return f"{PREFIX}_{param.opts[0].lstrip('-').replace('-', '_').upper()}"
    return param.opts[0]


# ------------------------------------------------------------ the peer config

MESH_AND_MEMORY = ("mesh", "memory")
NETWORK = ("dht_port", "announce", "bootstrap")
LOGS = ("events", "log")
RELAYING = ("caps.relay_peers", "caps.relay_mbit")
PLACES = ("dir", "data", "initial", "host", "port", "bulk_port")
SERVING = (
    "stages",
    *MESH_AND_MEMORY,
    *PLACES,
    *NETWORK,
    "invitation",
    "device",
    "compute",
    "slots",
    "caps",
    "region",
    "nickname",
    "trace",
    "dashboard",
    *LOGS,
)
"""Fields of the peer config that are options of `join` and `peer`."""


def peer_options(*names: str) -> Callable[[F], F]:
    """Add the options of these fields of the peer config, then `--config` and `--set`."""
    config = click.option("--config", metavar="FILE", help="Peer config file; flags and SWARMNET_* variables win.")
    assignments = click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="KEY=VALUE",
        envvar=f"{PREFIX}_SET",
        help="Any other setting of the peer config, such as threads=2; repeatable.",
    )
    return lambda command: fields("peer", *names)(config(assignments(command)))


def read_config(ctx: click.Context, role: Role) -> PeerConfig:
    """The peer config of the running command, checked, with logging set up by it.

    Raises UsageError in the name of the flag, variable or file that is wrong.
    """
    from swarmnet import telemetry
    from swarmnet.config.check import resolve
    from swarmnet.config.peer import PeerConfig
    from swarmnet.net.address import check_addresses

    # Checked after all layers are laid: what a stronger one corrects is no mistake.
    layers, where = _layers(ctx, role), ctx.params["config"] or "peer config"
    config = resolve(PeerConfig, layers, where=where)
    # `doctor` reports what is wrong with the directory.
    if ctx.info_name != "doctor" and "dir" in {param.name for param in ctx.command.params}:
        check_writable(config.dir, "--dir")
    if role == "stage" and "dir" in {param.name for param in ctx.command.params}:
        # The peer's own file lies above one that peers share, and below variables and flags.
        at = sum(each.origin in ("default", ctx.params["config"]) for each in layers)
        config = resolve(PeerConfig, [*layers[:at], *own_layers(config), *layers[at:]], where=where)
    check_addresses(config.bootstrap)
    if role not in config.roles:
        raise UsageError(
            f"roles = {list(config.roles)} does not include {role!r}: "
            f"start it with `swarmnet {_command(config.roles[0])}`"
        )
    telemetry.setup(config.log.level, format=config.log.format)
    return config


def own_layers(config: PeerConfig) -> list[SettingsLayer]:
    """What `swarmnet control limits` has kept for this peer: the file in its `dir`, which names no other one."""
    from swarmnet.config import toml
    from swarmnet.config.check import SettingsLayer

    if not config.own_file.exists():
        return []
    own = {key: value for key, value in toml.read(config.own_file).items() if key != "dir"}
    return [SettingsLayer(str(config.own_file), own)]


def read_manifest(config: PeerConfig, command: str) -> Manifest:
    """The manifest that `config` names; the stages it asks for exist, and `peer` has some. Raises UsageError."""
    from swarmnet.manifest.file import load

    if config.manifest is None:
        raise UsageError(f"`swarmnet {command}` needs the run's manifest: add --manifest run.toml")
    manifest = load(config.manifest)
    # The config alone cannot know how many stages a run has.
    for stage in config.stages:
        if stage >= manifest.cut.stages:
            raise UsageError(f"there is no stage {stage}: {config.manifest} has stages 0 to {manifest.cut.stages - 1}")
    if command == "peer" and not config.stages:
        raise UsageError(f"`swarmnet peer` needs --stage: stages are 0 to {manifest.cut.stages - 1}, several are 0,1")
    return manifest


def implied(role: Role) -> SettingsLayer:
    """What it says of a peer's config that it does this."""
    from swarmnet.config.check import SettingsLayer

    return SettingsLayer("default", {"roles": [role], "dir": f"~/.swarmnet/{_command(role)}"})


def _layers(ctx: click.Context, role: Role) -> list[SettingsLayer]:
    """Weakest first: what the command implies, file, variables (SWARMNET_SET first), `--set`, flags."""
    from swarmnet.config import toml
    from swarmnet.config.check import SettingsLayer, layer

    layers = [implied(role)]
    # What has no --dir, such as `plan`, keeps nothing there: a user without a home needs none for it.
    if os.path.expanduser("~") == "~" and "dir" not in {param.name for param in ctx.command.params}:
        layers.append(SettingsLayer("default", {"dir": "."}))
    if file := ctx.params["config"]:
        said = toml.read(Path(file).expanduser())
        if "format" in said and "training" in said:
            raise UsageError(f"{file}: is a run's manifest: --manifest takes it; --config takes a peer config")
        layers.append(SettingsLayer(file, said))
    assignments = next(param for param in ctx.command.params if param.name == "assignments")
    for source in TYPED:
        # A flag of its own says it more plainly than --set, so it lies above.
        if ctx.get_parameter_source("assignments") is source:
            name = origin_of(assignments, source)
            layers += [layer(name, *toml.assignment(text, where=name)) for text in ctx.params["assignments"]]
        layers += [
            layer(name, option.path, str(value) if isinstance(value, Path) else value)
            for option, name, value in given(ctx, source)
        ]
    return layers


def _command(role: Role) -> str:
    return "peer" if role == "stage" else role
