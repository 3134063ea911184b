"""TOML text to plain data and a table to commented TOML text.

`write` is the only writer of our files: the comments are the schema's own docstrings and descriptions, so they cannot
drift from it. Reading is the standard library's; what the data mean is `config.check`'s business.
"""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from swarmnet.config.table import Table
from swarmnet.errors import UsageError

WIDTH = 120
MOST_DEPTH = 20
"""Of tables and lists in one another; ours have four."""


def read(path: Path) -> dict[str, Any]:
    """The data of a TOML file. Raises UsageError if it cannot be read or is not TOML."""
    try:
        return parse(path.read_text(encoding="utf-8-sig"), where=str(path))
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text (byte {error.start})") from error


def parse(text: str, *, where: str) -> dict[str, Any]:
    """The data of TOML text from `where`. Raises UsageError with line and column."""
    try:
        data = tomllib.loads(text)
        # What reads tables, one in another, calls itself: a hostile file must not exhaust the stack.
        _check_depth(data, MOST_DEPTH)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where}: is not valid TOML: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{where}: is nested too deeply") from error
    return data


def _check_depth(data: object, left: int) -> None:
    """Raises RecursionError."""
    if left == 0:
        raise RecursionError
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        _check_depth(value, left - 1)


def assignment(text: str, *, where: str = "--set") -> tuple[tuple[str, ...], Any]:
    """`section.key=value` as (path, value). The value is TOML; what is not TOML is a plain string."""
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path) or len(path) > MOST_DEPTH:
        raise UsageError(f"{where} {text}: write section.key=value")
    try:
        # Quotes around every word would be a nuisance in a shell, so what is no TOML is a string.
        data = parse(f"value = {value}", where=where)
    except UsageError:
        return path, value.strip()
    # A line break in the value could smuggle in other keys.
    return path, data["value"] if set(data) == {"value"} else value.strip()


def changed(path: Path, values: Mapping[str, Any]) -> str:
    """The text of the TOML file `path`, or of an empty one, with these values of keys and of tables; without comments.

    Raises UsageError if it cannot be read.
    """
    data = read(path) if path.exists() else {}
    for key, value in values.items():
        data[key] = {**data.get(key, {}), **value} if isinstance(value, Mapping) else value
    tables = {key: value for key, value in data.items() if isinstance(value, Mapping)}
    lines = [f"{key} = {literal(value)}" for key, value in data.items() if key not in tables]
    for head, table in tables.items():
        lines += [*[""] * bool(lines), f"[{head}]", *(f"{key} = {literal(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def write(table: Table, *, left_out: Collection[str] = ()) -> str:
    """`table` as a TOML file that names every field and says what each one is.

    A field without a value (None), or with its dotted name in `left_out`, is written as a comment, so that reading the
    file gives `table` back. A whole table in `left_out` is not written.
    """
    lines = [*_comment(type(table)), "", *_section(table, left_out, prefix="")]
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(table: Table, left_out: Collection[str], *, prefix: str) -> Iterator[str]:
    inner: dict[str, BaseModel] = {}
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        # Tables come last: a plain key below a table's head would belong to it.
        if isinstance(value, BaseModel):
            inner |= {name: value} if f"{prefix}{name}" not in left_out else {}
        else:
            yield from _entry(name, value, field.description or "", commented=f"{prefix}{name}" in left_out)
    for name, value in inner.items():
        assert isinstance(value, Table), name
        yield from ("", *_comment(type(value)), f"[{prefix}{name}]")
        yield from _section(value, left_out, prefix=f"{prefix}{name}.")


def _entry(name: str, value: object, comment: str, *, commented: bool) -> Iterator[str]:
    """One line if it fits, else the comment above."""
    # TOML has no null: the key stands there, ready to be given a value.
    text = f"# {name} =" if value is None else f"{'# ' * commented}{name} = {literal(value)}"
    line = f"{text:<32} # {comment}" if comment else text
    if len(line) <= WIDTH:
        yield line
    else:
        yield from textwrap.wrap(comment, WIDTH, initial_indent="# ", subsequent_indent="# ")
        yield text


def _comment(table: type[Table]) -> Iterator[str]:
    """The class docstring, paragraph by paragraph."""
    for paragraph in textwrap.dedent(table.__doc__ or "").strip().split("\n\n"):
        words = " ".join(paragraph.split())
        yield from textwrap.wrap(words, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def literal(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case tuple() | list():
            return f"[{', '.join(map(literal, value))}]"
        case str() | Path():
            # JSON's string escapes are TOML's, except that TOML wants DEL escaped too
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    raise AssertionError(f"no TOML for {value!r}")
