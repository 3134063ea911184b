"""Turn plain data (from TOML, flags, the environment) into a `Table`, or say in one line what is wrong.

The line reads `origin: path: problem`: which file or flag, which key, what to do. pydantic decides what is valid; the
words are ours. What several origins say is laid over each other first, the weakest below: for a peer that is default <
file < environment < `--set` < flag. The last that names a path wins, and an error names the origin that won. Knows no
syntax, neither click nor the fields.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from swarmnet.config.table import Table
from swarmnet.errors import UsageError

T = TypeVar("T", bound=Table)
Path = tuple[str, ...]
Origin = Callable[[Path], str]
"""Names the file, flag or variable that set a path."""


def check(model: type[T], data: Mapping[str, Any], *, origin: Origin) -> T:
    """Validate `data` as `model`. Raises UsageError, one line, at the first unknown key, else at the first misfit."""
    # Unknown keys first: they often explain what else is wrong.
    for path, field, value in sorted(_walk(model, data, ()), key=lambda each: each[1] is not None):
        if field is None:
            # A mistyped flag is a mistake; a file may also come from a later version.
            typed = origin(path).startswith(("--", "SWARMNET_"))
            certain = typed or path[-1] in {*RENAMED, *NOT_MADE}
            later = "" if certain else " (or a later swarmnet wrote it: upgrade this one, docs/upgrading.md)"
            raise UsageError(f"{origin(path)}: {dotted(path)}: unknown key; {_advice(model, path)}{later}")
        # pydantic would name what is inside, which the operator has not written.
        if bool(_table(field)) != isinstance(value, Mapping):
            written = "a table" if _table(field) else "a value, not a table"
            raise UsageError(f"{origin(path)}: {dotted(path)} = {_shown(value)}: must be {written}")
        # What a shell hands on of a name that is no text: no file of ours could hold it.
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise UsageError(f"{origin(path)}: {dotted(path)} = {_shown(value)}: is not UTF-8: rename it")
    try:
        # JSON mode: strict about types, yet a list is a tuple and a string is a path. TOML's dates fit nothing.
        return model.model_validate_json(json.dumps(data, default=lambda value: {str(value): None}))
    except ValidationError as error:
        raise UsageError(_first_line(model, data, error, origin)) from error


def dotted(path: Sequence[str]) -> str:
    """`("model", "num_layers")` as `model.num_layers`."""
    return ".".join(path)


def leaves(model: type[Table], prefix: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Every field of `model` that is not itself a table, with its path, in the order of the file."""
    for name, field in model.model_fields.items():
        if inner := _table(field):
            yield from leaves(inner, (*prefix, name))
        else:
            yield (*prefix, name), field


def _table(field: FieldInfo) -> type[Table] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Table) else None


def _walk(model: type[Table], data: Mapping[str, Any], prefix: Path) -> Iterator[tuple[Path, FieldInfo | None, Any]]:
    """Every key of `data` that can be followed along `model`, with its field (None: unknown)."""
    for name, value in data.items():
        field = model.model_fields.get(name)
        yield (*prefix, name), field, value
        if field and (inner := _table(field)) and isinstance(value, Mapping):
            yield from _walk(inner, value, (*prefix, name))


RENAMED = {"max_void": "training.max_discarded", "memo_bytes": "caps.output_cache_bytes"}
"""Keys of files that earlier versions wrote, and what they are called now."""

NOT_MADE = {
    "lora_dropout": "adapters have no dropout: a gradient is a function of weights and tokens alone; leave it out",
    "bias": "no bias is trained beside adapters: leave it out",
}
"""Keys of PEFT's that have one value here."""


def _advice(model: type[Table], path: Path) -> str:
    """What may have been meant: that key of another table, or one spelled alike in the same table, else anywhere."""
    if path[-1] in RENAMED:
        return f"it is called {RENAMED[path[-1]]} now"
    if path[0] == "lora" and path[-1] in NOT_MADE:
        return NOT_MADE[path[-1]]
    here: type[Table] | None = model
    for name in path[:-1]:
        here = _table(here.model_fields[name]) if here else None
    siblings = {name: dotted((*path[:-1], name)) for name in here.model_fields} if here else {}
    by_leaf = {each[-1]: dotted(each) for each, _ in leaves(model)}
    by_path = {dotted(each): dotted(each) for each, _ in leaves(model)}
    # The right name in the wrong table.
    if path[-1] in by_leaf:
        return f"did you mean {by_leaf[path[-1]]}?"
    # A misspelled key of this table is likelier than one of another table.
    for word, known in ((path[-1], siblings), (path[-1], by_leaf), (dotted(path), by_path)):
        # Two keys of one table have much in common: its name.
        if close := difflib.get_close_matches(word, known, n=1, cutoff=0.8 if known is by_path else 0.6):
            return f"did you mean {known[close[0]]}?"
    return f"known here: {', '.join(siblings)}"


_WORDS = {
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string in quotes",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list in [ ]",
    "path_type": "must be a path in quotes",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_short": "must not be empty",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "value_error": "{error}",
}


def _first_line(model: type[Table], data: Mapping[str, Any], error: ValidationError, origin: Origin) -> str:
    """pydantic reports each branch of a union as an error of its own: those of the first path are joined by "or"."""
    errors = error.errors(include_url=False)
    path, value = _found(data, errors[0]["loc"])
    problems: list[str] = []
    for item in errors:
        if _found(data, item["loc"])[0] == path:
            words = _WORDS.get(item["type"], "").format(**item.get("ctx", {})) or item["msg"]
            problems.append(words.replace(" or ", ", ") if problems else words)
    if isinstance(value, Mapping):  # a rule about several fields: it names them itself
        return ": ".join(part for part in (origin(path), dotted(path), problems[0]) if part)
    head = f"{dotted(path)} = {_shown(value)}"
    field = dict(leaves(model)).get(path)
    # The meaning of a field helps the user who got it wrong, unless the rule or the choices say it already.
    plain = errors[0]["type"] not in ("literal_error", "value_error")
    meaning = f" ({field.description})" if field and field.description and plain else ""
    return f"{origin(path)}: {head}: {', or '.join(dict.fromkeys(problems))}{meaning}"


@contextlib.contextmanager
def refusing(where: str) -> Iterator[None]:
    """A table that is made here of what was typed, and breaks a rule, raises UsageError in the name of `where`."""
    try:
        yield
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
        words = _WORDS.get(item["type"], "").format(**item.get("ctx", {})) or item["msg"]
        raise UsageError(
            ": ".join(part for part in (where, dotted(tuple(map(str, item["loc"]))), words) if part)
        ) from error


def _found(data: Any, loc: Sequence[int | str]) -> tuple[Path, Any]:
    """The longest start of `loc` that is in `data` as table keys, and the value there."""
    path: Path = ()
    for step in loc:
        if not (isinstance(data, Mapping) and step in data):
            break
        path, data = (*path, str(step)), data[str(step)]
    return path, data


def _shown(value: object) -> str:
    """A value as the operator wrote it, on one line, shortened."""
    try:
        # As TOML would have it, or nearly: JSON quotes alike.
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ------------------------------------------------------------ layers of settings


@dataclass(frozen=True, slots=True)
class SettingsLayer:
    """What `origin` ("peer.toml", "SWARMNET_PORT", "--port") says."""

    origin: str
    values: Mapping[str, Any]


def layer(origin: str, path: Path, value: Any) -> SettingsLayer:
    """A layer that sets one path."""
    for name in reversed(path):
        value = {name: value}
    return SettingsLayer(origin, value)


def merge(layers: Iterable[SettingsLayer]) -> tuple[dict[str, Any], dict[Path, str]]:
    """Lay `layers` over each other, weakest first. Returns the data and who set each path."""
    data: dict[str, Any] = {}
    origins: dict[Path, str] = {}

    def lay(into: dict[str, Any], values: Mapping[str, Any], origin: str, prefix: Path) -> None:
        for name, value in values.items():
            path = (*prefix, name)
            origins[path] = origin
            if isinstance(value, Mapping):
                # A table replaces a plain value.
                into[name] = into[name] if isinstance(into.get(name), dict) else {}
                lay(into[name], value, origin, path)
            else:
                into[name] = value

    for each in layers:
        lay(data, each.values, each.origin, ())
    return data, origins


def resolve(model: type[T], layers: Iterable[SettingsLayer], *, where: str) -> T:
    """Merge, then check. Raises UsageError in the name of the layer that set the wrong value, else of `where`."""
    data, origins = merge(layers)

    def origin(path: Path) -> str:
        # A rule about several fields has the path of their table, which is never set as a whole.
        while path and path not in origins:
            path = path[:-1]
        return origins.get(path, where)

    return check(model, data, origin=origin)


EXTRAS = {
    "data": "pyarrow",
    "lora": "bitsandbytes",
    "metrics": "prometheus_client",
    "plot": "matplotlib",
    "tensorboard": "tensorboard",
    "tokenizers": "tokenizers",
    "wandb": "wandb",
}
"""Extra of this distribution -> the package that it installs. docs/getting-started.md says what each is for."""


def check_installed(what: str, extra: str) -> None:
    """Raises UsageError if the package that `what` needs is missing; the message names the extra that installs it."""
    if importlib.util.find_spec(EXTRAS[extra]) is None:
        raise UsageError(f"{what} needs the package {EXTRAS[extra]}: pip install 'swarmnet-train[{extra}]'")
