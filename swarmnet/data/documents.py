"""Documents of a source, one after the other: files of text, and files of records with a column of text.

| name ends in | read as |
|---|---|
| `.jsonl`, `.ndjson` | one JSON object a line; its field is one document |
| `.parquet`, `.arrow` | rows; the column is one document each. Needs pyarrow (extra `data`) |
| in `TEXT` or `CODE`, or no ending | one document of UTF-8 text |
| text or lines + `.gz`, `.zst` | the same, decompressed as it is read (`.zst` needs pyarrow) |
| anything else | an error, because training on a format as if it were text is a mistake that no loss shows |

A folder is all files below it in the order that every peer agrees on: relative paths, sorted by code point, hidden ones
left out. A folder that Hugging Face `datasets` has saved is its shards, in the order that it says. All files are looked
at before the first is read. Text is taken as its bytes are; what is not UTF-8 is an error that names the position.
Knows no tokens.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from swarmnet.errors import UsageError

COLUMN = "text"
"""The field or column that is read where none is named."""

COMPRESSED = (".gz", ".zst")
LINES, ROWS = (".jsonl", ".ndjson"), (".parquet", ".arrow")
TEXT = (".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex", ".log", ".srt", ".vtt", ".diff", ".patch")
CODE = (
    *(".py", ".pyi", ".js", ".mjs", ".jsx", ".ts", ".tsx", ".css", ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp"),
    *(
        ".cu",
        ".cuh",
        ".m",
        ".rs",
        ".go",
        ".java",
        ".kt",
        ".scala",
        ".cs",
        ".fs",
        ".swift",
        ".dart",
        ".rb",
        ".php",
        ".pl",
    ),
    *(".pm", ".lua", ".r", ".jl", ".hs", ".ml", ".mli", ".ex", ".exs", ".erl", ".clj", ".lisp", ".el", ".scm", ".f90"),
    *(".s", ".v", ".sv", ".vhd", ".zig", ".nim", ".sql", ".sh", ".bash", ".ps1", ".bat", ".cmake", ".proto", ".lean"),
)
"""Files that are one text: prose, and source code. Of markup and tables the text is only a part."""

_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
"""What `datasets.Dataset.save_to_disk` leaves in a data set's folder, and in one of several splits."""

_SPLIT = "train"
_ROWS_AT_ONCE = 1024
_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_NO_FILE = {"d": "a link to a folder", "p": "a named pipe", "s": "a socket", "c": "a device", "b": "a device"}
"""By the first letter of `stat.filemode`."""


@dataclass(slots=True)
class Reading:
    """How documents are read, and which were left out.

    fault: why the tokenizer cannot take a document; "" if it can. skip_bad: count documents that cannot be used in
    `skipped`, keep the first reason in `first_bad`, and go on.
    """

    column: str = COLUMN
    skip_bad: bool = False
    fault: Callable[[bytes], str] = lambda document: ""
    skipped: int = 0
    first_bad: str = ""

    def bad(self, where: str, reason: str) -> None:
        """A document cannot be used. Raises UsageError unless such are skipped."""
        if not self.skip_bad:
            raise UsageError(f"{where}{reason} (`swarmnet tokenize --skip-bad` counts such documents and goes on)")
        self.skipped += 1
        self.first_bad = self.first_bad or f"{where}{reason}"

    def document(self, content: bytes, where: str) -> Iterator[bytes]:
        """`content`, if it is UTF-8 that the tokenizer can take."""
        try:
            # Only a look: what is handed on are the bytes.
            content.decode()
            reason = self.fault(content)
        except UnicodeDecodeError as error:
            mark = next((name for mark, name in _MARKS.items() if content.startswith(mark)), "")
            advice = f"with the mark of {mark}: iconv -f {mark} -t UTF-8 converts it" if mark else "convert it"
            reason = f" is not UTF-8 text (byte {error.start}): {advice}, or take it out of the source"
        if reason:
            self.bad(where, reason)
        else:
            yield content


def split_column(source: str, exists: Callable[[str], bool]) -> tuple[str, str]:
    """(path, column) of PATH#COLUMN, or of a mere path: also of one that has the mark in its name, and exists."""
    path, mark, column = source.rpartition("#")
    if not mark or not column or "/" in column or exists(source):
        return source, ""
    return path, column


def documents_of(path: Path, reading: Reading | None = None) -> Iterator[bytes]:
    """All documents of a file or folder, in order. Raises UsageError for what cannot be read, and where it is."""
    reading = reading or Reading()
    files = _files(path)
    # A wrong file is found before hours are spent on those in front of it.
    for file in files:
        _check(file, reading.column)
    for file in files:
        kind = _kind(file)
        yield from (_rows if kind == "rows" else _lines if kind == "lines" else text_of)(file, reading)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / _SAVED).is_file():
        return [path / name for name in _saved_shards(path)]
    return _files(_split(path)) if (path / _SAVED_SPLITS).is_file() else [path / name for name in walk(path)]


def walk(root: Path, *, skipped: frozenset[str] = frozenset()) -> list[str]:
    """Relative paths below `root` of all that is no folder, as `documents_of` orders them; also of links to folders.

    skipped: names of folders to leave out.
    """
    found, folders = [], [""]
    while folders:
        base = folders.pop()
        try:
            with os.scandir(root / base) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    name = utf8_name(base + entry.name)
                    if not entry.is_dir(follow_symlinks=False):
                        found.append(name)
                    elif entry.name not in skipped:
                        folders.append(f"{name}/")
        # A folder that cannot be listed is no empty folder: other peers would read it.
        except OSError as error:
            raise unreadable(root / base, error) from error
    return sorted(found)


def utf8_name(name: str) -> str:
    """`name`. Raises UsageError if it is not UTF-8: no manifest could hold it, and locales would order it."""
    try:
        os.fsencode(name).decode()
    except UnicodeError as error:
        raise UsageError(f"the name {name!r} is not UTF-8: rename it") from error
    return name


def _kind(path: Path) -> str:
    """What a file is read as, by its name: text, lines or rows. Raises UsageError if that is not known."""
    name = Path(path.name.lower())
    compressed = name.suffix in COMPRESSED
    ending = Path(name.stem).suffix if compressed else name.suffix
    if ending in LINES:
        return "lines"
    if ending in ROWS and not compressed:
        return "rows"
    if ending in TEXT + CODE or not ending:
        return "text"
    advice = {".json": "; name it .jsonl if each line is an object", ".bin": "; name a file of token ids by itself"}
    raise UsageError(
        f"{path}: files that end in {ending!r} are not read{advice.get(ending, '')}. Records: {' '.join(LINES + ROWS)}."
        f" Text: {' '.join(TEXT + CODE)}, or no ending. Text and lines also with {' or '.join(COMPRESSED)} behind"
    )


def _check(path: Path, column: str) -> None:
    """Raises UsageError for what is no file, or cannot be read as its name says; reads no document."""
    try:
        status = path.stat()
        # To open a named pipe would wait for ever.
        if not stat.S_ISREG(status.st_mode):
            what = _NO_FILE.get(stat.filemode(status.st_mode)[0], "no regular file")
            raise UsageError(f"{path} is {what}, which is not read: remove it, or replace it by a file")
        path.open("rb").close()
    except OSError as error:
        raise unreadable(path, error) from error
    if _kind(path) == "rows":
        with _arrow_errors(path), _batches(path, column) as (schema, _):
            _text_column(path, column, schema)
    elif path.suffix.lower() == ".zst":
        _pyarrow(path)
    if path.suffix.lower() in COMPRESSED and not status.st_size:
        raise UsageError(f"{path} is empty, and no {path.suffix} file is: it was cut off")


def text_of(path: Path, reading: Reading) -> Iterator[bytes]:
    """The one document of a file of text."""
    with _opened(path) as file:
        content = file.read()
    if b"\0" in content and not content.startswith(tuple(_MARKS)):
        reason = " holds NUL characters: convert it if it is UTF-16 (iconv -f UTF-16LE -t UTF-8); else it is no text"
        reading.bad(str(path), reason)
    else:
        yield from reading.document(content, str(path))


def _lines(path: Path, reading: Reading) -> Iterator[bytes]:
    """A field of every line; empty lines are skipped."""
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                text = _field(line, reading.column)
            except ValueError as error:
                reading.bad(where, f": {error}")
            else:
                yield from reading.document(text, where)


def _field(line: bytes, column: str) -> bytes:
    """The text in a line. Raises ValueError that says what is wrong."""
    try:
        # Bytes would be taken for UTF-16 where they look like it.
        record = json.loads(line.decode("utf-8-sig"))
        text: bytes = record[column].encode()
    except (ValueError, RecursionError) as error:  # also half a surrogate pair, which no UTF-8 can hold
        raise ValueError(f"not JSON in UTF-8 ({error})") from error
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f'expected an object with a string "{column}"{_others(record)}') from error
    # Which of two a parser takes is its own choice. Nearly no line is parsed twice.
    if line.count(f'"{column}"'.encode()) > 1:
        pairs = json.loads(line.decode("utf-8-sig"), object_pairs_hook=list)
        if sum(key == column for key, _ in pairs) > 1:
            raise ValueError(f'the object has "{column}" more than once')
    return text


def _others(record: object) -> str:
    strings = [key for key, value in record.items() if isinstance(value, str)] if isinstance(record, dict) else []
    return f"; it has {_listed(strings)}: name one as SOURCE#{strings[0]}" if strings else ""


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")


# ---------------------------------------------------------------- rows

_STRINGS = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def _rows(path: Path, reading: Reading) -> Iterator[bytes]:
    """A column of a parquet or arrow file, a few rows at a time."""
    numbers = itertools.count(1)
    with _arrow_errors(path), _batches(path, reading.column) as (_, batches):
        for batch in batches:
            texts = _contents(batch.column(_text_column(path, reading.column, batch.schema)))
            for content, number in zip(texts.to_pylist(), numbers, strict=False):
                where = f"{path}, row {number}, column {reading.column!r}"
                if content is None:
                    reading.bad(where, ": a row without a text")
                else:
                    yield from reading.document(content, where)


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """Whatever pyarrow says of a file, in the file's name."""
    arrow = _pyarrow(path)
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, LookupError, ArithmeticError, MemoryError) as error:
        reason = " ".join(str(error).split())[:200] or "not enough memory"
        raise UsageError(f"{path} cannot be read as {path.suffix[1:]}: {reason}") from error


@contextmanager
def _batches(path: Path, column: str) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Schema and record batches of a file; of parquet only the column is read, since others may be large."""
    import pyarrow as arrow
    from pyarrow import parquet

    if path.name.lower().endswith(".parquet"):
        with parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
            yield file.schema_arrow, file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[column])
        return
    with arrow.memory_map(str(path)) as mapped:
        # `datasets` writes streams, others write files with a table of contents.
        if mapped.read(6) == b"ARROW1":
            reader = arrow.ipc.open_file(mapped)
            yield reader.schema, map(reader.get_batch, range(reader.num_record_batches))
        else:
            mapped.seek(0)
            stream = arrow.ipc.open_stream(mapped)
            yield stream.schema, _whole(stream, mapped)


def _whole(stream: Any, mapped: Any) -> Iterator[Any]:
    """All batches. Raises ValueError if there is no end behind them: what follows may be missing."""
    yield from stream
    end = mapped.tell()
    if end != mapped.size() or mapped.read_at(8, max(end - 8, 0)) != _END_OF_STREAM:
        raise ValueError("the stream does not end with its end marker: it was cut off, or its writer was not closed")


def _text_column(path: Path, column: str, schema: Any) -> int:
    """Where the column of text is. Raises UsageError if there is not one."""
    places = schema.get_all_field_indices(column)
    if len(places) > 1:
        raise UsageError(f"{path} has {len(places)} columns {column!r}: rename or drop all but one")
    if places and _is_text(schema.field(places[0]).type):
        return int(places[0])
    texts = [field.name for field in schema if _is_text(field.type)]
    holds = f"; {column!r} holds {schema.field(places[0]).type}" if places else ""
    advice = f"its columns of text are {_listed(texts)}: name one as SOURCE#{texts[0]}" if texts else "it has none"
    raise UsageError(f"{path} has no column of text {column!r}{holds}: {advice}")


def _is_text(kind: Any) -> bool:
    import pyarrow as arrow

    if arrow.types.is_dictionary(kind) or arrow.types.is_run_end_encoded(kind):
        return _is_text(kind.value_type)
    return str(kind) in _STRINGS


def _contents(texts: Any) -> Any:
    """An array of text as one of bytes, with offsets within its memory; UTF-8 is not checked."""
    import pyarrow as arrow

    if arrow.types.is_dictionary(texts.type):
        words = _contents(texts.dictionary).cast(arrow.large_binary())
        return arrow.DictionaryArray.from_arrays(texts.indices, words).dictionary_decode()
    if arrow.types.is_run_end_encoded(texts.type):
        return _contents(arrow.compute.run_end_decode(texts))
    # No cast to another kind of bytes reads them, but from a view.
    found = texts.cast(arrow.binary_view() if str(texts.type).endswith("_view") else arrow.large_binary())
    found.validate(full=True)
    return found


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError(f"{path} needs pyarrow: pip install 'swarmnet-train[data]'") from error
    return pyarrow


def _saved_shards(folder: Path) -> list[str]:
    """Files of a data set that `datasets` has saved, in its order."""
    try:
        state = json.loads((folder / _SAVED).read_bytes())
        names = [each["filename"] for each in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{folder / _SAVED} does not list the files of a data set that `datasets` has saved"
        ) from error
    if not all(isinstance(name, str) and Path(name).name == name and name.endswith(".arrow") for name in names):
        raise UsageError(f"{folder / _SAVED} names files outside its folder, or files that are not .arrow")
    # An old release kept a selection of rows apart: without it, they would be others in another order.
    if state.get("_indices_data_files"):
        raise UsageError(f"{folder} holds a selection of rows: save it with `flatten_indices()`")
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
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        raise unreadable(path, error) from error


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix.lower() == ".zst":
        stream: IO[bytes] = io.BufferedReader(_pyarrow(path).input_stream(str(path), compression="zstd"))
        return stream
    return path.open("rb")


def unreadable(path: Path, error: Exception) -> UsageError:
    """The error of a file that cannot be read."""
    return UsageError(
        f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or str(error) or 'not enough memory'}"
    )
