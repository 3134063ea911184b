"""The standard library's logging, with fields: an event has a name and facts, never prose.

On a terminal a line is short; `format="json"` makes every line one object. Other packages' loggers write from
"error" up unless our own level is "debug". What a peer sent us is data: control characters in it are shown escaped.
What JSON has no word for is written as text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Set
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO

from swarmnet.telemetry.text import printable

Level = Literal["debug", "info", "warning", "error"]
_KEYWORDS = frozenset(("exc_info", "stack_info", "stacklevel", "extra"))
_FIELDS = "swarmnet_fields"


class FieldLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that takes fields as keyword arguments: `log.warning("rank_lost", rank=1, seconds=2.5)`."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})

    def event(self, name: str, /, **fields: object) -> None:
        """Log `name` with `fields`, which may have any name, as info."""
        self.logger.info(name, extra={_FIELDS: fields}, stacklevel=2)

    def at(self, level: int, name: str, fields: dict[str, object]) -> None:
        """Log `name` with `fields` at a level of logging's."""
        self.logger.log(level, name, extra={_FIELDS: fields}, stacklevel=2)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Move the fields out of logging's own keywords."""
        fields = {key: value for key, value in kwargs.items() if key not in _KEYWORDS}
        passed = {key: value for key, value in kwargs.items() if key in _KEYWORDS}
        passed["extra"] = {**passed.get("extra", {}), _FIELDS: fields}
        return msg, passed


def get(name: str) -> FieldLogger:
    """The log of a module: `telemetry.get(__name__)`."""
    return FieldLogger(logging.getLogger(name))


FILE_BYTES = 16 << 20
"""Of a log file; the one before it is kept, too."""


def setup(
    level: Level = "info",
    *,
    format: Literal["text", "json"] = "text",
    stream: TextIO | None = None,
    file: Path | None = None,
) -> None:
    """Send every log line of this process to `file`, or else to `stream` (standard error). Call once, before foreign
    packages load.

    A second call replaces the first one's handler.
    """
    ours = getattr(logging, level.upper())
    handler = logging.StreamHandler(stream or sys.stderr) if file is None else _log_file(file)
    handler.setFormatter(Json() if format == "json" else TextFormatter())
    root = logging.getLogger()
    # Other packages hang handlers on the root when they are imported.
    for old in root.handlers[:]:
        root.removeHandler(old)
        if isinstance(old, logging.FileHandler):
            with contextlib.suppress(OSError):  # what its full disk has no room for
                old.close()
    root.addHandler(handler)
    root.setLevel(logging.WARNING if ours <= logging.DEBUG else logging.ERROR)
    logging.getLogger("swarmnet").setLevel(ours)
    logging.captureWarnings(True)
    _hush(ours)


def _log_file(path: Path) -> logging.StreamHandler[Any]:
    from logging.handlers import RotatingFileHandler  # sockets and mail come with it

    class LogFile(RotatingFileHandler):
        def handleError(self, record: logging.LogRecord) -> None:
            # A full disk ends no peer, and its terminal is somebody else's.
            pass

    return LogFile(path, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace")


def _hush(ours: int) -> None:
    """Tell packages that log by themselves: their only way in is the environment, read when they are imported.

    What the operator set there stays. hivemind hangs a handler of its own on the logger "hivemind" at import and sets
    its level from HIVEMIND_LOGLEVEL; grpc and torch write from C++.
    """
    heard = ours <= logging.DEBUG
    for name, quiet, loud in (
        ("HIVEMIND_LOGLEVEL", "CRITICAL", "WARNING"),
        ("GOLOG_LOG_LEVEL", "fatal", "warn"),
        ("GRPC_VERBOSITY", "NONE", "ERROR"),
        ("TORCH_CPP_LOG_LEVEL", "ERROR", "WARNING"),
        ("BITSANDBYTES_NOWELCOME", "1", "1"),
    ):
        # An operator who has set it wants to hear them.
        os.environ.setdefault(name, loud if heard else quiet)
    for name in ("hivemind", "asyncio", "grpc", "grpc._cython", "torch", "py.warnings"):
        logging.getLogger(name).setLevel(logging.WARNING if heard else logging.ERROR)


class TextFormatter(logging.Formatter):
    """`12:03:04 averaged round=3 members=5`; above info a letter says how bad, and another package says its name."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback below it if there is one."""
        line = io.StringIO()
        line.write(time.strftime("%H:%M:%S ", time.localtime(record.created)))
        # Most lines are at info, and need no letter.
        if record.levelno != logging.INFO:
            line.write(f"{record.levelname[0]} ")
        if not record.name.startswith("swarmnet"):
            line.write(f"{record.name}: ")
        line.write(printable(record.getMessage()))
        for key, value in getattr(record, _FIELDS, {}).items():
            line.write(f" {key}={_shown(value)}")
        if record.exc_info:
            line.write("\n" + self.formatException(record.exc_info))
        return line.getvalue()


class Json(logging.Formatter):
    """`{"t": .., "level": .., "logger": .., "event": .., fields ..}`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, the traceback inside."""
        head = {
            "t": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        if record.exc_info:
            head["traceback"] = self.formatException(record.exc_info)
        fields = getattr(record, _FIELDS, {})
        # A field may be called `event` or `t`: it must not take their place.
        return encode({**head, **{f"{key}_" if key in head else key: value for key, value in fields.items()}})


def _shown(value: object) -> str:
    """Short where it can be: floats to 4 digits, text bare unless it could be misread."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = printable(value if isinstance(value, str) else str(plain(value)))
    # Quoted where a reader could take it for two fields.
    return text if text and not set(text) & set(' "=') else '"' + text.replace('"', '\\"') + '"'


# ------------------------------------------------------------ one line of JSON


def encode(values: Mapping[str, Any]) -> str:
    """One line of JSON, ASCII only: no value can break the line or reach a terminal as a control character.

    NaN and infinities become "nan", "inf", "-inf"; bytes hex; sets sorted lists; enums their values; data classes
    their fields by name; the rest `str`.
    """
    return json.dumps(plain(values), allow_nan=False, separators=(",", ":"))


def plain(value: Any, text: Callable[[str], str] = str) -> Any:
    """`value` in JSON's own types. text: what is done with each text in it."""
    inner = partial(plain, text=text)
    match value:
        # Before str and int: an enum may be one of those, too.
        case enum.Enum():
            return inner(value.value)
        case str():
            return text(value)
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex()
        case Mapping():
            return {text(str(key)): inner(each) for key, each in value.items()}
        case Set():
            # Equal sets give equal lines.
            return sorted(map(inner, value), key=lambda each: (str(type(each)), each))
        case list() | tuple() | deque():
            return [inner(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: inner(getattr(value, each.name)) for each in dataclasses.fields(value)}
    return text(str(value))
