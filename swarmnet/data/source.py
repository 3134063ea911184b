"""Load the token stream a source names: documents through a tokenizer, or a file of token ids.

    stdlib            the running Python's standard library
    corpus:small      text inside this package, equal on every machine
    file, folder      documents (`data.documents`); PATH#COLUMN reads another column of records than "text"
    FILE.bin, .npy    token ids: .u8.bin, .u16.bin, .u32.bin little endian, plain .bin is u16; .npy says its own type

Each document ends with the tokenizer's end token. What is not UTF-8 is never silently repaired, since two peers would
repair differently. Only `read_tokens` knows of a run.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from pathlib import Path

import numpy as np

from swarmnet.data.documents import COLUMN, Reading, documents_of, split_column, text_of, unreadable, utf8_name, walk
from swarmnet.data.tokenizer import MAX_VOCAB, Bytes, HuggingFace, Tokenizer, smallest_dtype
from swarmnet.data.tokens import Tokens, verify
from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Data
from swarmnet.telemetry.text import counted, printable

Progress = Callable[[int, int], None]
"""Called after every document with how many documents and tokens there are so far."""

_CHUNK = 1 << 20

_BLOCK = 1 << 22
"""Ids that are gathered before they are one array, or written."""


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
    path, column = _resolve(source, base)
    # Ids need no tokenizer to be read, only to be understood.
    if path is not None and path.name.endswith((".bin", ".npy")) and path.is_file():
        return _load_ids(path, source, tokenizer, base)
    if tokenizer == "ids":
        raise UsageError(f'tokenizer "ids" is for files of token ids (.bin, .npy), and {source!r} is text: use "bytes"')
    encoder = tokenizer_of(tokenizer, base)
    # One array: windows reach over the ends of documents.
    ids = np.concatenate(list(_encoded(source, path, Reading(column), encoder, progress)))
    return Tokens(ids, encoder.vocab_size, source, encoder.sha256, notes=encoder.notes())


def ids_path(out: Path, tokenizer: Tokenizer) -> Path:
    """`out` with the ending by which `load_tokens` knows how wide its ids are. Raises UsageError if it has another."""
    ending = f".u{8 * np.dtype(smallest_dtype(tokenizer.vocab_size)).itemsize}.bin"
    if out.name.endswith((".bin", ".npy")) and not out.name.endswith(ending):
        raise UsageError(f"{out}: ids of this tokenizer go to a file that ends in {ending}, since it has no header")
    return out if out.name.endswith(ending) else out.with_name(out.name + ending)


def write_ids(
    source: str,
    tokenizer: Tokenizer,
    out: Path,
    *,
    skip_bad: bool = False,
    progress: Progress = lambda documents, tokens: None,
) -> tuple[int, tuple[str, ...]]:
    """Write the ids of `source` to `out` (`ids_path`), however many they are.

    The file is there when it is whole. Returns how many ids, and what a person should know about them. skip_bad:
    documents that cannot be used are left out. Raises UsageError as `load_tokens` does, and if it cannot be written.
    """
    path, column = _resolve(source, None)
    if path is not None and path.name.endswith((".bin", ".npy")) and path.is_file():
        raise UsageError(f"{source} holds token ids already")
    reading = Reading(column, skip_bad)
    partial, written = out.with_name(f"{out.name}.{os.getpid()}.partial"), 0
    try:
        with partial.open("wb") as file:
            for block in _encoded(source, path, reading, tokenizer, progress):
                file.write(block.astype(block.dtype.newbyteorder("<")).data)
                written += len(block)
        partial.replace(out)
    except OSError as error:
        raise UsageError(f"cannot write {str(out)!r}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    if not reading.skipped:
        return written, tokenizer.notes()
    return written, (
        *tokenizer.notes(),
        f"left out {counted(reading.skipped, 'document')}; the first: {printable(reading.first_bad)}",
    )


def _encoded(
    source: str, path: Path | None, reading: Reading, encoder: Tokenizer, progress: Progress
) -> Iterator[np.ndarray]:
    """The ids of all documents, in blocks of about `_BLOCK`. Raises UsageError if there is no text."""
    num_bytes = num_tokens = held = 0
    pieces: list[np.ndarray] = []
    reading.fault = encoder.fault

    def documents() -> Iterator[bytes]:
        nonlocal num_bytes
        for document in _documents(source, path, reading):
            num_bytes += len(document)
            yield document

    for count, piece in enumerate(encoder.encode(documents()), start=1):
        pieces.append(piece)
        num_tokens, held = num_tokens + len(piece), held + len(piece)
        progress(count, num_tokens)
        # Millions of short documents would be millions of arrays.
        if held >= _BLOCK:
            yield np.concatenate(pieces)
            pieces, held = [], 0
    # End tokens alone are no text.
    if not num_bytes or not num_tokens:
        left_out = f" but what is left out: {reading.first_bad}" if reading.skipped else ""
        raise UsageError(f"data source {source!r} holds no text{left_out}")
    yield np.concatenate(pieces or [np.empty(0, smallest_dtype(encoder.vocab_size))])


def _resolve(source: str, base: Path | None) -> tuple[Path | None, str]:
    """The path of a source that is one, and the column of its records."""
    if source == "stdlib" or source.startswith("corpus:"):
        return None, COLUMN
    name, column = split_column(source, lambda path: _exists(path, base))
    return _existing(name, base), column or COLUMN


def _exists(source: str, base: Path | None) -> bool:
    try:
        return bool(source) and _path(source, base).exists()
    except OSError as error:  # a name too long, a folder that may not be entered
        raise UsageError(f"cannot read data source {source!r}: {error.strerror}") from error


def _path(source: str, base: Path | None) -> Path:
    path = (base or Path()) / os.path.expanduser(source)
    if base is not None and not base.exists():  # the manifest's folder is yet to be made: ".." leads out of it
        path = Path(os.path.normpath(path))
    return path


def _existing(source: str, base: Path | None) -> Path:
    if _exists(utf8_name(source), base):
        return _path(source, base)
    raise UsageError(
        f"data source {source!r} does not exist ({_path(source, base).absolute()}): give a text file, a folder, a"
        ' .jsonl, .parquet or .arrow file, a .bin or .npy file of ids, "stdlib" or "corpus:small"; --data PATH'
        " says where this machine has the run's text"
    )


def _documents(source: str, path: Path | None, reading: Reading) -> Iterable[bytes]:
    if path is not None:
        return documents_of(path, reading)
    if source == "stdlib":
        return _standard_library()
    if source == "corpus:small":  # the text inside this package, equal on every machine: one document
        return [resources.files("swarmnet.data").joinpath("corpus/small.txt").read_bytes()]
    raise UsageError(f'unknown data source {source!r}: the only corpus is "corpus:small"')


def tokenizer_of(name: str, base: Path | None, *, end: str | None = None, specials: bool = False) -> Tokenizer:
    """The tokenizer a manifest names; a path is relative to `base`. Raises UsageError if it is none.

    end, specials: of `HuggingFace`; nothing of a manifest.
    """
    if name == "bytes" and (end is not None or specials):
        raise UsageError("--end-token and --special-tokens are for a tokenizer.json: bytes have no such tokens")
    if name == "bytes":
        return Bytes()
    if not name.endswith(".json"):
        raise UsageError(f'unknown tokenizer {name!r}: "bytes", or the path of a tokenizer.json')
    return HuggingFace((base or Path()) / os.path.expanduser(utf8_name(name)), end=end, specials=specials)


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
        # A pass over the whole file, only if its type can hold larger ids.
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
    try:
        return np.memmap(path, dtype=dtype, mode="r") if num_bytes else np.empty(0, dtype)
    except OSError as error:
        raise unreadable(path, error) from error


def _map_npy(path: Path) -> np.ndarray:
    try:
        ids: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # its header is a Python literal, and fails in as many ways as Python's own parser
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


# ---------------------------------------------------------------- what is not a file of the operator's

_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# Files that differ between two builds of one Python version.
_STDLIB_LOCAL = ("_sysconfigdata_", "_sysconfig_vars_", "sitecustomize", "usercustomize")


def _standard_library() -> Iterator[bytes]:
    """`*.py` of the running Python's standard library: no site-packages, no tests, nothing written per build."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in walk(root, skipped=_STDLIB_SKIPPED):
        # Two machines with one Python version read the same text.
        if path.endswith(".py") and not os.path.basename(path).startswith(_STDLIB_LOCAL):
            yield from text_of(root / path, Reading())


def read_tokens(data: Data) -> Tokens:
    """The token stream of a manifest that was prepared. Raises UsageError if it has changed since."""
    tokens = load_tokens(data.source, data.tokenizer)
    verify(tokens, data)
    return tokens
