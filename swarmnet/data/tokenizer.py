"""Text to token ids: bytes as they are, or any Hugging Face `tokenizer.json`.

A tokenizer encodes documents one by one and ends each with its end token. The digest names the tokenizer, so that peers
can tell whether they mean the same ids. Knows no sources.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from swarmnet.errors import UsageError

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "<EOS>")
"""What ends a document where no file names it: the first of these that the tokenizer's vocabulary holds."""

_NAMED_IN = {
    "config.json": "eos_token_id",
    "tokenizer_config.json": "eos_token",
    "special_tokens_map.json": "eos_token",
    "generation_config.json": "eos_token_id",
}
"""Files of a checkpoint that name an end token, and under which key; the first one wins."""

MAX_VOCAB = 1 << 31
"""Ids travel as int32."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_BATCH = 256
_CONTEXT = 16  # So many ids are decoded with the next one, so that it is spelled as in a text.

_LONGEST_START = 3  # Bytes of a character that are not yet all of it.


class Tokenizer(Protocol):
    """Two implementations: `Bytes` and `HuggingFace`."""

    vocab_size: int
    sha256: str

    def encode(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """The ids of UTF-8 documents in order, in pieces of any size; dtype is `smallest_dtype(vocab_size)`."""
        ...

    def of_prompt(self, text: str) -> list[int]:
        """The ids of a text that goes on: no end token. Raises UsageError if it is no UTF-8."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, for people; ids that stand for nothing are left out."""
        ...

    def fault(self, document: bytes) -> str:
        """Why a document cannot be encoded without changing its meaning; "" if it can."""
        ...

    def notes(self) -> tuple[str, ...]:
        """What a person should know about the ids: what ends a document, and which text was encoded in another way."""
        ...


class Bytes:
    """A token is a byte; a document ends with a zero byte."""

    vocab_size = 256
    sha256 = hashlib.sha256(b"bytes").hexdigest()

    def encode(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        for document in documents:
            yield np.frombuffer(document + b"\0", dtype=np.uint8)

    def of_prompt(self, text: str) -> list[int]:
        return list(_utf8(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of bytes. What is no UTF-8 shows as such; documents end with a line."""
        return bytes(each for each in ids if each < 256).decode("utf-8", "replace").replace("\0", "\n")

    def fault(self, document: bytes) -> str:
        return ' holds a NUL character, which ends a document under tokenizer "bytes"' if b"\0" in document else ""

    def notes(self) -> tuple[str, ...]:
        return ("documents end with a zero byte",)


class HuggingFace:
    """A `tokenizer.json`, by the `tokenizers` library. No special token is added but the end token.

    end: the token that ends a document; "": none does; None: that of the files in the folder of `path`, else one of
    `END_TOKENS`. specials: text that spells a special token becomes that token; else it is encoded as any other text.
    """

    def __init__(self, path: Path, *, end: str | None = None, specials: bool = False) -> None:
        """Raises UsageError if the library or the file is missing, or the file is no tokenizer."""
        try:
            import tokenizers
        except ImportError as error:
            raise UsageError(
                f"tokenizer {str(path)!r} needs the tokenizers library: pip install 'swarmnet-train[tokenizers]'"
            ) from error
        self._path, self._specials, self._spelled, self._joined = path, specials, 0, 0
        content = _content(path)
        with _library(f"{str(path)!r} is not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            # A file may bring both, made for batches of a fixed length.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            # With dropout each peer would read other ids.
            if getattr(self._tokenizer.model, "dropout", None):
                self._tokenizer.model.dropout = None
            vocabulary = self._vocabulary = self._tokenizer.get_vocab()
            added = self._tokenizer.get_added_tokens_decoder().values()
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        if self.vocab_size > MAX_VOCAB:
            raise UsageError(f"{str(path)!r} has token id {self.vocab_size - 1}: ids must be below 2^31")
        if end and end not in vocabulary:
            raise UsageError(f"--end-token {end}: {str(path)!r} has no such token")
        token, self._note = end_token(path.parent, vocabulary) if end is None else (end, f"documents end with {end!r}")
        if end == "":
            self._note = "no end token: documents are joined"
        self._end = [vocabulary[token]] if token else []
        # The library splits only what its file marks as special, which not every file does with its end token.
        if any(each.content == token and not each.special for each in added):
            self._tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
        self._spelling = _any_of({token, *(each.content for each in added if each.special)})

    def encode(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        dtype = smallest_dtype(self.vocab_size)
        texts = (document.decode() for document in documents)
        # Batches use all cores, and bound how much text is in memory.
        while batch := list(islice(texts, _BATCH)):
            with _library(f"tokenizer {str(self._path)!r} cannot encode a document"):
                self._tokenizer.encode_special_tokens = not self._specials
                encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            for text, encoding in zip(batch, encodings, strict=True):
                ids = encoding.ids
                if found := self._spelling.findall(text):
                    self._spelled += len(found)
                    named = {self._vocabulary.get(token) for token in found}
                    self._joined += sum(each in named for each in ids)
                yield np.array(ids + self._end, dtype=dtype)

    def of_prompt(self, text: str) -> list[int]:
        prompt = _utf8(text).decode()
        with _library(f"tokenizer {str(self._path)!r} cannot encode the prompt"):
            # A person who types a special token means it.
            self._tokenizer.encode_special_tokens = False
            return list(self._tokenizer.encode(prompt, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def fault(self, document: bytes) -> str:
        return ""

    def notes(self) -> tuple[str, ...]:
        if not self._spelled:
            return (self._note,)
        became = f"{self._joined:,} became it, the rest is ordinary text" if self._joined else "ordinary text"
        advice = "" if self._specials else " (`swarmnet tokenize --special-tokens` makes tokens of it)"
        return self._note, f"the text spells a special token {self._spelled:,} times: {became}{advice}"


def end_token(folder: Path, vocabulary: Mapping[str, int]) -> tuple[str, str]:
    """What ends a document by the tokenizer in `folder`, "" if nothing does; and a sentence that says why.

    Raises UsageError for a file that is there and cannot be read.
    """
    tokens = {number: token for token, number in vocabulary.items()}
    named: list[tuple[str, str, object]] = []
    for file, key in _NAMED_IN.items():
        value = _table(folder / file).get(key)
        for each in value if isinstance(value, list) else [value]:
            said = each.get("content") if isinstance(each, dict) else each
            token = tokens.get(said, "") if type(said) is int else said if isinstance(said, str) else ""
            if said is not None:
                named.append((token if token in vocabulary else "", file, said))
    token, origin = next(((each, f"{_NAMED_IN[file]} of {file}") for each, file, _ in named if each), ("", ""))
    if not token:
        token = next((each for each in END_TOKENS if each in vocabulary), "")
        origin = "guessed: no file in the folder of tokenizer.json names one"
    others = (
        f"; {file} names {each or said!r}{'' if each else ', which is no token'}"
        for each, file, said in named
        if each != token
    )
    if token:
        return token, f"documents end with {token!r} ({origin}{''.join(dict.fromkeys(others))})"
    return "", f"no end token: documents are joined{''.join(dict.fromkeys(others))} (`swarmnet tokenize --end-token`)"


def _table(path: Path) -> dict[str, Any]:
    """A file of JSON; {} if there is none."""
    if not path.exists():
        return {}
    try:
        data = json.loads(_content(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON ({error}), and may name the token that ends documents") from error
    return data if isinstance(data, dict) else {}


def _content(path: Path) -> bytes:
    try:
        # To open a named pipe would wait for ever.
        if path.exists() and not path.is_file():
            raise UsageError(f"cannot read tokenizer {str(path)!r}: it is no regular file")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read tokenizer {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def _library(failed: str) -> Iterator[None]:
    """Whatever `tokenizers` raises, as a UsageError: it has no class of its own for errors."""
    try:
        yield
    except BaseException as error:
        # A panic of its Rust code is no Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UsageError(f"{failed}: {' '.join(str(error).split())[:200]}") from error


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `words`, the longest; hundreds that begin alike cost as much as one."""
    groups = groupby(sorted(set(words) - {""}), key=lambda word: word[:4])
    alternatives = [
        f"{re.escape(start)}(?:{'|'.join(re.escape(word[4:]) for word in sorted(group, reverse=True))})"
        for start, group in groups
    ]
    return re.compile("|".join(sorted(alternatives, reverse=True)) or "(?!)")


def spelled(tokenizer: Tokenizer, before: Sequence[int], ids: Iterable[int]) -> Iterator[str]:
    """The text of `ids`, which follow `before`, piece by piece as they come: a character when all of it is there.

    One piece an id, which may be "", and one for what is pending at the end.
    """
    # Tokenizers decode an id by what is before it (a blank, a character's first bytes): so some ids are decoded again.
    window = list(before[-_CONTEXT:])
    said = len(tokenizer.decode(window))
    for each in ids:
        window.append(each)
        text = tokenizer.decode(window)
        unsure = len(text) - len(text.rstrip(REPLACEMENT))
        # A replacement character at the end may be the start of one that is still to come.
        sure = max(len(text) - min(unsure, _LONGEST_START), said)
        yield text[said:sure]
        said = sure
        # Cut only between characters, or the rest would be spelled otherwise.
        if not unsure and len(window) > 2 * _CONTEXT:
            window = window[-_CONTEXT:]
            said = len(tokenizer.decode(window))
    yield tokenizer.decode(window)[said:]


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # the shell hands on bytes that are no text as half a surrogate pair
        raise UsageError(
            f"the prompt is no UTF-8: character {error.start + 1} of it is a byte that stands for nothing"
        ) from error


def smallest_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest unsigned integer that holds every id."""
    return np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32
