"""Load the token stream a source names: text through a tokenizer, or a file of token ids.

    stdlib            the running Python's standard library
    corpus:small      text inside this package, equal on every machine
    FILE.txt          text, any file name
    FILE.jsonl        field "text" of each line
    folder            all files of these two kinds below it
    FILE.bin, .npy    token ids: .u8.bin, .u16.bin, .u32.bin little endian, plain .bin is u16; .npy says its own type

Documents come in the order that every peer agrees on, sorted relative paths, and each ends with the tokenizer's end
token. Text is UTF-8 and taken as its bytes are: no newline is translated, no byte order mark removed. What is not UTF-8
is an error that names the place, never silently repaired, since two peers would repair differently. Knows no run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from pathlib import Path

import numpy as np

from swarmnet.data.tokenizer import Bytes, HuggingFace, Tokenizer, smallest_dtype
from swarmnet.data.tokens import Tokens
from swarmnet.errors import UsageError

Progress = Callable[[int, int], None]
"""Called after every document with how many documents and tokens there are so far."""

MAX_VOCAB = 1 << 31
"""Ids travel as int32."""

_CHUNK = 1 << 20


def load_tokens(
    source: str,
    tokenizer: str = "bytes",
    *,
    base: Path | None = None,
    progress: Progress = lambda documents, tokens: None,
) -> Tokens:
    """Load the stream `source` names. Paths are relative to `base` (the manifest's folder), else to the current one.

    tokenizer: "bytes", the path of a tokenizer.json, or, for files of token ids only, "ids": nothing is known about
    them but the largest. Raises UsageError for whatever is missing, empty, unreadable or out of range.
    """
    path = _resolve(source, base)
    # Ids need no tokenizer to be read, only to be understood.
    if path is not None and path.name.endswith((".bin", ".npy")) and path.is_file():
        return _load_ids(path, source, tokenizer, base)
    if tokenizer == "ids":
        raise UsageError(f'tokenizer "ids" is for files of token ids (.bin, .npy), and {source!r} is text: use "bytes"')
    encoder, pieces = tokenizer_of(tokenizer, base), []
    num_bytes = num_tokens = 0

    def documents() -> Iterator[bytes]:
        nonlocal num_bytes
        for document in _documents(source, path):
            num_bytes += len(document)
            yield document

    for count, piece in enumerate(encoder.encode(documents()), start=1):
        pieces.append(piece)
        num_tokens += len(piece)
        progress(count, num_tokens)
    # End tokens alone are no text.
    if not num_bytes or not num_tokens:
        raise UsageError(f"data source {source!r} holds no text")
    # One array: windows reach over the ends of documents.
    ids = np.concatenate(pieces)
    return Tokens(ids, vocab_size=encoder.vocab_size, source=source, tokenizer_sha256=encoder.sha256)


def _resolve(source: str, base: Path | None) -> Path | None:
    """The path of a source that is one."""
    if source == "stdlib" or source.startswith("corpus:"):
        return None
    path = (base or Path()) / Path(source).expanduser()
    if base is not None and not base.exists():  # the manifest's folder is yet to be made: ".." leads out of it
        path = Path(os.path.normpath(path))
    try:
        exists = bool(source) and path.exists()
    except OSError as error:  # a name too long, a folder that may not be entered
        raise UsageError(f"cannot read data source {source!r}: {error.strerror}") from error
    if not exists:
        raise UsageError(
            f"data source {source!r} does not exist ({path.absolute()}): give a text file, a folder, a .jsonl, .bin or"
            ' .npy file, "stdlib" or "corpus:small"'
        )
    return path


def _documents(source: str, path: Path | None) -> Iterable[bytes]:
    if path is not None:
        # Hidden files are none of a folder's, and links to folders are not followed.
        files = [path / name for name in _walk(path, skipped=frozenset())] if path.is_dir() else [path]
        return itertools.chain.from_iterable(map(_file, files))
    if source == "stdlib":
        return _standard_library()
    if source == "corpus:small":  # the text inside this package, equal on every machine: one document
        return [resources.files("swarmnet.data").joinpath("corpus/small.txt").read_bytes()]
    raise UsageError(f'unknown data source {source!r}: the only corpus is "corpus:small"')


def tokenizer_of(name: str, base: Path | None) -> Tokenizer:
    """The tokenizer a manifest names; a path is relative to `base`. Raises UsageError if it is none."""
    if name == "bytes":
        return Bytes()
    if not name.endswith(".json"):
        raise UsageError(f'unknown tokenizer {name!r}: "bytes", or the path of a tokenizer.json')
    return HuggingFace((base or Path()) / Path(name).expanduser())


# ---------------------------------------------------------------- files of token ids


def _load_ids(path: Path, source: str, tokenizer: str, base: Path | None) -> Tokens:
    ids = _map_npy(path) if path.suffix == ".npy" else _map_bin(path)
    if not len(ids):
        raise UsageError(f"{path} holds no tokens")
    if tokenizer == "ids":
        vocab_size, digest = _largest(ids) + 1, hashlib.sha256(b"ids").hexdigest()
    else:
        encoder = tokenizer_of(tokenizer, base)
        vocab_size, digest = encoder.vocab_size, encoder.sha256
        # A pass over the whole file, only where its type leaves room for larger ids.
        if np.iinfo(ids.dtype).max >= vocab_size and (largest := _largest(ids)) >= vocab_size:
            raise UsageError(
                f"{path} holds token id {largest}, but tokenizer {tokenizer!r} knows only {vocab_size}: name the"
                ' tokenizer.json that made it, or "ids" if it is not known'
            )
    # Beyond int32 an id would come out negative on the wire.
    if vocab_size > MAX_VOCAB:
        raise UsageError(f"{path} holds token id {vocab_size - 1}: ids must be below 2^31 (is its type right?)")
    return Tokens(ids, vocab_size=vocab_size, source=source, tokenizer_sha256=digest)


def _map_bin(path: Path) -> np.ndarray:
    kind = path.name.removesuffix(".bin").rpartition(".")[2]
    # A file of ids has no header: its name is all that says how wide they are.
    dtype = np.dtype({"u8": "u1", "u32": "<u4"}.get(kind, "<u2"))
    num_bytes = os.path.getsize(path)
    if num_bytes % dtype.itemsize:
        raise UsageError(
            f"{path} is {num_bytes} bytes long, which is no whole number of {dtype.itemsize}-byte ids: name it"
            " .u8.bin, .u16.bin or .u32.bin after what it holds"
        )
    return np.memmap(path, dtype=dtype, mode="r") if num_bytes else np.empty(0, dtype)


def _map_npy(path: Path) -> np.ndarray:
    try:
        ids: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UsageError(f"{path} is not a .npy file: {error}") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "ui":
        raise UsageError(f"{path} must hold one array of integers in one dimension")
    # Mapped as it is; other types are copied, and checked first.
    if not len(ids) or ids.dtype in (np.uint8, np.uint16, np.uint32):
        return ids
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= MAX_VOCAB:
        raise UsageError(f"{path} holds token id {low if low < 0 else high}: ids must be in [0, 2^31)")
    narrow: np.ndarray = ids.astype(smallest_dtype(high + 1))
    return narrow


def _largest(ids: np.ndarray) -> int:
    return max(int(ids[start : start + _CHUNK].max()) for start in range(0, len(ids), _CHUNK))


# ---------------------------------------------------------------- documents

_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# Files that differ between two builds of one Python version.
_STDLIB_LOCAL = ("_sysconfigdata_", "_sysconfig_vars_", "sitecustomize", "usercustomize")


def _standard_library() -> Iterator[bytes]:
    """`*.py` of the running Python's standard library: no site-packages, no tests, nothing written per build."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _walk(root, skipped=_STDLIB_SKIPPED):
        # Two machines with one Python version read the same text.
        if path.endswith(".py") and not os.path.basename(path).startswith(_STDLIB_LOCAL):
            yield _read(root / path)


def _file(path: Path) -> Iterable[bytes]:
    """A file is one document, and so is each line of a `.jsonl` file."""
    return _json_lines(path) if path.suffix == ".jsonl" else [_read(path)]


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
        # In place: os.walk then does not go down there.
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
        # Only a look: what is handed on are the bytes.
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
