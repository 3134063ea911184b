"""Write the generated reference: `python docs/generate.py`. tests/unit/test_docs_pages.py holds it fresh.

docs/cli.md comes from the commands, whole. docs/manifest.md and docs/peer-config.md get the tables of their schema, and
docs/python-api.md the docstrings of the public names, below MARK; what stands above MARK is written by hand.
docs/events.md is `python -m swarmnet.telemetry.kinds`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click

import swarmnet
from swarmnet.cli.frame import TASKS
from swarmnet.cli.frame import swarmnet as program
from swarmnet.cli.settings import flagged
from swarmnet.config.peer import PeerConfig
from swarmnet.config.table import Table
from swarmnet.config.toml import literal
from swarmnet.manifest.presets import HELP, PRESETS
from swarmnet.manifest.schema import Manifest

DOCS = Path(__file__).resolve().parent
MARK = "<!-- What follows is generated: python docs/generate.py -->\n"


def linked(text: str) -> str:
    """Help or a docstring as Markdown: one line, with links to the pages that it names."""
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", " ".join(text.split())).replace("|", r"\|")


# ------------------------------------------------------------ schemas


def tables(table: Table, flags: dict[str, str], prefix: str = "") -> Iterator[str]:
    """The fields of a table, then those of its inner tables. flags: the option of each field that has one."""
    shown = {name: getattr(table, name) for name in type(table).model_fields}
    plain = {name: value for name, value in shown.items() if not isinstance(value, Table)}
    yield "\n"
    for name, value in plain.items():
        default = "" if value is None else f" (`{literal(value)}`)".replace(str(Path.home()), "~")
        text = linked(type(table).model_fields[name].description or "")
        yield f"- `{name}`{flags.get(prefix + name, '')}{default}: {text}\n"
    for name, value in shown.items():
        if isinstance(value, Table):
            yield f"\n### `[{prefix}{name}]`\n\n{linked(type(value).__doc__ or '')}\n"
            yield from tables(value, flags, f"{prefix}{name}.")


def presets() -> Iterator[str]:
    """The shape and training of each preset."""
    yield "\n## Presets\n\n"
    yield "name | shape of | layers x width | inside | heads | base | "
    yield "stages | GiB of a GPU | step | steps | rate, warm-up\n"
    yield "---|---|---|---|---|---|---|---|---|---|---\n"
    for name, each in PRESETS.items():
        width, inner, layers, heads, key_heads, head, base = each.model
        count, size, length = each.step
        heads_of_width = f"{heads}/{key_heads} of {head}"
        yield f"`{name}` | {each.like} | {layers} x {width:,} | {inner:,} | {heads_of_width} | {base:,.0f} | "
        yield f"{each.stages} | {each.memory_gib} | {count}x{size}x{length:,} | {each.steps:,} | "
        yield f"{each.learning_rate:g}, {each.warmup_steps}\n"


def manifest_part() -> str:
    """Below MARK in docs/manifest.md."""
    return "".join([*presets(), "\n## Every field\n", *tables(Manifest(), {})])


def peer_config_part() -> str:
    """Below MARK in docs/peer-config.md."""
    flags = {".".join(field.path): f", `--{field.name}`" for field in flagged("peer")}
    return "".join(["\n## Every field\n", *tables(PeerConfig(), flags)])


# ------------------------------------------------------------ the command line


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """`command`, or if it is a group all that are below it."""
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, f"{path} {name}")
    else:
        yield path, command


def same(names: list[str]) -> str:
    """Options of the peer config: those that are missing, if they are fewer. Its page lists the flags."""
    missing = [name for field in flagged("peer") if (name := f"`--{field.name}`") not in names]
    return " ".join(["all but", *missing] if len(missing) < len(names) else names)


def described(path: str, command: click.Command, seen: dict[tuple[str, str], str]) -> Iterator[str]:
    """A command: usage, purpose, options. seen: where an option with that help was described already."""
    context = click.Context(command, info_name=path, **command.context_settings)
    arguments = [word for word in command.collect_usage_pieces(context) if word != "[OPTIONS]"]
    usage = f"`{' '.join(arguments)}`: " if arguments else ""
    yield f"\n### swarmnet {path}\n\n{usage}{command.get_short_help_str(400)}\n\n"
    again: dict[str, list[str]] = {}
    for param in command.get_params(context):
        if not isinstance(param, click.Option) or "--help" in param.opts or param.hidden:
            continue
        known = (param.opts[-1], param.help or "")
        if known in seen:
            again.setdefault(seen[known], []).append(f"`{param.opts[-1]}`")
            continue
        seen[known] = f"[{path}](#swarmnet-{path.replace(' ', '-')})"
        name, text = param.get_help_record(context) or ("", "")
        text = text.replace(HELP.partition(": ")[2], "[presets](manifest.md#presets)")
        yield f"- `{name}`: {linked(text)}".rstrip(": ") + "\n"
    for where, names in again.items():
        yield f"- As in {where}: {same(names) if 'peer-config' in where else ' '.join(names)}\n"


def cli_page() -> str:
    """docs/cli.md."""
    seen = {
        (f"--{field.name}", field.option({}).help or ""): f"[{page}]({page}.md)"
        for schema, page in (("manifest", "manifest"), ("peer", "peer-config"))
        for field in flagged(schema)
    }
    parts = [
        "# The command line\n\n"
        "`swarmnet COMMAND --help` shows examples, too. Brackets hold defaults. Most options are variables of the\n"
        "environment: `--dht-port` is `SWARMNET_DHT_PORT`. This page is generated: `python docs/generate.py`.\n"
    ]
    for task, names in TASKS.items():
        parts.append(f"\n## {task}\n")
        for name in names:
            found = program.get_command(click.Context(program), name)
            assert found is not None, name
            for path, command in commands(found, name):
                parts += described(path, command, seen)
    return "".join(parts)


# ------------------------------------------------------------ Python


def signature(name: str, function: Callable[..., object]) -> str:
    """How a function is called, without types; its docstring has them where they matter."""
    plain = [
        each.replace(annotation=each.empty, default=... if callable(each.default) else each.default)
        if each.default is not each.empty
        else each.replace(annotation=each.empty)
        for each in inspect.signature(function).parameters.values()
    ]
    return f"{name}{inspect.Signature(plain)}".replace("Ellipsis", "...")


def docstring(text: str) -> Iterator[str]:
    """A docstring as Markdown: paragraphs, and `Args:` as a list."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if not paragraph.startswith("Args:"):
            yield linked(paragraph) + "\n\n"
            continue
        entries = re.split(r"^    (?=\S)", paragraph, flags=re.MULTILINE)[1:]
        for name, _, text in (each.partition(":") for each in entries):
            yield f"- `{name}`: {linked(text)}\n"
        yield "\n"


def python_part() -> str:
    """Below MARK in docs/python-api.md."""
    parts = ["\n## Every name\n"]
    for name in swarmnet.__all__:
        value = getattr(swarmnet, name)
        parts.append(f"\n### `{name}`\n\n")
        if inspect.isfunction(value):
            parts.append(f"`{signature(name, value)}`\n\n")
        parts += docstring(value.__doc__)
    return re.sub(r"\n{3,}", "\n\n", "".join(parts)).rstrip("\n") + "\n"


def page(name: str, part: str) -> str:
    """A page with its generated part renewed."""
    by_hand, mark, _ = (DOCS / name).read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{name} has no line {MARK}"
    return by_hand + MARK + part


def pages() -> dict[str, str]:
    """Every generated page by its name, as it should be."""
    return {
        "cli.md": cli_page(),
        "manifest.md": page("manifest.md", manifest_part()),
        "peer-config.md": page("peer-config.md", peer_config_part()),
        "python-api.md": page("python-api.md", python_part()),
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
