"""Documents of a source, one after the other: files of text, and files of records with a column of text.

| name ends in | read as |
|---|---|
| `.jsonl`, `.ndjson` | one JSON object a line; its field is one document |
| `.parquet`, `.arrow` | rows; the column is one document each. Needs pyarrow (extra `data`) |
| anything else | one document of UTF-8 text |
| text or lines + `.gz`, `.zst` | the same, decompressed as it is read (`.zst` needs pyarrow) |

A folder is all files below it in the order that every peer agrees on: relative paths, sorted by code point, hidden ones
left out. A folder that Hugging Face `datasets` has saved is its shards, in the order that it says. Text is taken as its
bytes are; what is not UTF-8 is an error that names the place. Knows no tokens.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from swarmnet.errors import UsageError

COLUMN = "text"
"""The field or column that is read where none is named."""

COMPRESSED = (".gz", ".zst")
LINES, ROWS = (".jsonl", ".ndjson"), (".parquet", ".arrow")

_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
"""What `datasets.Dataset.save_to_disk` leaves in a data set's folder, and in one of several splits."""

_SPLIT = "train"
_ROWS_AT_ONCE = 1024


def split_column(source: str, exists: Callable[[str], bool]) -> tuple[str, str]:
    """(path, column) of PATH#COLUMN, or of a mere path: also of one that has the mark in its name, and exists."""
    path, mark, column = source.rpartition("#")
    if not mark or not column or "/" in column or exists(source):
        return source, ""
    return path, column


def documents_of(path: Path, column: str = COLUMN) -> Iterator[bytes]:
    """All documents of a file or folder, in order. Raises UsageError for what cannot be read, and where it is."""
    if not path.is_dir():
        yield from _file(path, column)
    elif (path / _SAVED).is_file():
        for name in _saved_shards(path):
            yield from _rows(path / name, column)
    elif (path / _SAVED_SPLITS).is_file():
        yield from documents_of(_split(path), column)
    else:
        # Links to folders are not followed.
        for name in walk(path):
            yield from _file(path / name, column)


def walk(root: Path, *, skipped: frozenset[str] = frozenset()) -> list[str]:
    """Relative paths of files below `root`, as `documents_of` orders them. skipped: names of folders to leave out."""
    found = []
    for where, folders, files in os.walk(root, onerror=_refuse):
        # In place: os.walk then does not go down there.
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        base = Path(where).relative_to(root)
        found += [(base / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(found)


def read_text(path: Path) -> bytes:
    """A file's bytes, which are UTF-8."""
    with _opened(path) as file:
        content = file.read()
    try:
        # Only a look: what is handed on are the bytes.
        content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text (byte {error.start}): convert it, or take it out of the source (records are read"
            f" from {', '.join((*LINES, *ROWS))})"
        ) from error
    return content


def _file(path: Path, column: str) -> Iterable[bytes]:
    if path.name.endswith(ROWS):
        return _rows(path, column)
    name = path.name
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return _lines(path, column) if name.endswith(LINES) else [read_text(path)]


def _lines(path: Path, column: str) -> Iterator[bytes]:
    """A field of every line; empty lines are skipped."""
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                text = record[column].encode()
            except (ValueError, RecursionError) as error:  # also half a surrogate pair, which no UTF-8 can hold
                raise UsageError(f"{path}, line {number}: not JSON in UTF-8 ({error})") from error
            except (TypeError, KeyError, AttributeError, IndexError) as error:
                raise UsageError(
                    f'{path}, line {number}: expected an object with a string "{column}"{_others(record)}'
                ) from error
            yield text


def _others(record: object) -> str:
    strings = [key for key, value in record.items() if isinstance(value, str)] if isinstance(record, dict) else []
    return f"; it has {_listed(strings)}: name one as SOURCE#{strings[0]}" if strings else ""


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")


# ---------------------------------------------------------------- rows


def _rows(path: Path, column: str) -> Iterator[bytes]:
    """A column of a parquet or arrow file, a few rows at a time."""
    arrow = _pyarrow(path)
    try:
        for batch in _parquet(path, column) if path.name.endswith(".parquet") else _ipc(path):
            if column not in batch.schema.names:
                raise _no_column(path, column, batch.schema)
            texts = batch.column(column)
            if not (arrow.types.is_string(texts.type) or arrow.types.is_large_string(texts.type)):
                raise _no_column(path, column, batch.schema)
            for number, text in enumerate(texts.to_pylist()):
                if text is None:
                    raise UsageError(f"{path}: column {column!r} has a row without a text (row {number} of a batch)")
                yield text.encode()
    except (arrow.ArrowInvalid, OSError) as error:
        raise UsageError(f"{path} cannot be read as {path.suffix[1:]}: {' '.join(str(error).split())[:200]}") from error


def _parquet(path: Path, column: str) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, memory_map=True) as file:
        if column not in file.schema_arrow.names:
            raise _no_column(path, column, file.schema_arrow)
        # Only this column is read: others may be large.
        yield from file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[column])


def _ipc(path: Path) -> Iterator[Any]:
    """Batches of an arrow file; `datasets` writes streams, others write files with a table of contents."""
    import pyarrow as arrow

    with arrow.memory_map(str(path)) as mapped:
        try:
            reader = arrow.ipc.open_file(mapped)
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        except arrow.ArrowInvalid:
            mapped.seek(0)
            yield from arrow.ipc.open_stream(mapped)


def _no_column(path: Path, column: str, schema: Any) -> UsageError:
    import pyarrow as arrow

    texts = [
        field.name for field in schema if arrow.types.is_string(field.type) or arrow.types.is_large_string(field.type)
    ]
    advice = f"its columns of text are {_listed(texts)}: name one as SOURCE#{texts[0]}" if texts else "it has none"
    return UsageError(f"{path} has no column of text {column!r}: {advice}")


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError(f"{path} needs pyarrow: pip install 'swarmnet-train[data]'") from error
    return pyarrow


def _saved_shards(folder: Path) -> list[str]:
    """Files of a data set that `datasets` has saved, in its order."""
    try:
        names = [each["filename"] for each in json.loads((folder / _SAVED).read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder / _SAVED} does not list the files of a data set that `datasets` has saved"
        ) from error
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UsageError(f"{folder / _SAVED} names files outside its folder")
    return names


def _split(folder: Path) -> Path:
    if (folder / _SPLIT / _SAVED).is_file():
        return folder / _SPLIT
    splits = sorted(path.parent.name for path in folder.glob(f"*/{_SAVED}"))
    named = f"name one of its folders: {', '.join(splits)}" if splits else "it has no folder of a split"
    raise UsageError(f"{folder} is a data set of several splits without {_SPLIT!r}: {named}")


# ---------------------------------------------------------------- files


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's content, decompressed. An error in the middle of it names the file, too."""
    try:
        with _open(path) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from error


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        stream: IO[bytes] = io.BufferedReader(_pyarrow(path).input_stream(str(path), compression="zstd"))
        return stream
    return path.open("rb")


def _refuse(error: OSError) -> None:
    """A folder that cannot be listed is no empty folder: other peers would read it."""
    raise unreadable(Path(error.filename), error) from error


def unreadable(path: Path, error: Exception) -> UsageError:
    """The error of a file that cannot be read."""
    return UsageError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}")
