"""Text documents of a source, in the order every peer agrees on: sorted relative paths.

Text is UTF-8 and taken as its bytes are: no newline is translated, no byte order mark removed. What is not UTF-8 is an
error that names the place, never silently repaired, since two peers would repair differently. Knows no tokens.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from swarmnet.errors import UsageError

_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_STDLIB_LOCAL = ("_sysconfigdata_", "_sysconfig_vars_", "sitecustomize", "usercustomize")
"""Files that differ between two builds of one Python version."""


def standard_library() -> Iterator[bytes]:
    """`*.py` of the running Python's standard library: no site-packages, no tests, nothing written per build."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _walk(root, skipped=_STDLIB_SKIPPED):
        if path.endswith(".py") and not os.path.basename(path).startswith(_STDLIB_LOCAL):
            yield _read(root / path)


def small_corpus() -> Iterator[bytes]:
    """The text inside this package, equal on every machine: one document."""
    yield resources.files("swarmnet.data").joinpath("corpus/small.txt").read_bytes()


def folder(root: Path) -> Iterator[bytes]:
    """Every file below `root` except hidden ones, by sorted relative path; links to folders are not followed."""
    for path in _walk(root, skipped=frozenset()):
        yield from file(root / path)


def file(path: Path) -> Iterator[bytes]:
    """A file is one document, and so is each line of a `.jsonl` file."""
    if path.suffix == ".jsonl":
        yield from _json_lines(path)
    else:
        yield _read(path)


def _json_lines(path: Path) -> Iterator[bytes]:
    """Field "text" of every line, one document each; empty lines are skipped."""
    try:
        lines = path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error
    with lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                text = record["text"].encode()
            except (ValueError, RecursionError) as error:  # also half a surrogate pair, which no UTF-8 can hold
                raise UsageError(f"{path}, line {number}: not JSON in UTF-8 ({error})") from error
            except (TypeError, KeyError, AttributeError, IndexError) as error:
                raise UsageError(f'{path}, line {number}: expected an object with a string "text"') from error
            yield text


def _walk(root: Path, *, skipped: frozenset[str]) -> list[str]:
    """Relative paths with forward slashes, sorted by code point; hidden files and folders are left out."""
    found = []
    for where, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        base = Path(where).relative_to(root)
        found += [(base / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(found)


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text (byte {error.start}): convert it, or take it out of the source"
        ) from error
    return content


def _refuse(error: OSError) -> None:
    """A folder that cannot be listed is no empty folder: other peers would read it."""
    raise _unreadable(Path(error.filename), error) from error


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot read {str(path)!r}: {error.strerror}")
