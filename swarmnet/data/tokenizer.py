"""Text to token ids: bytes as they are, or any Hugging Face `tokenizer.json`.

A tokenizer encodes documents one by one and ends each with its end token. The digest names the tokenizer, so that peers
can tell whether they mean the same ids. Knows no sources.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from swarmnet.errors import UsageError

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "<EOS>")
"""What ends a document, by a tokenizer's vocabulary: the first of these it holds; without any, nothing does."""

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


class HuggingFace:
    """A `tokenizer.json`, by the `tokenizers` library. No special token is added but the end token."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError if the library or the file is missing, or the file is no tokenizer."""
        try:
            import tokenizers
        except ImportError as error:
            raise UsageError(
                f"tokenizer {str(path)!r} needs the tokenizers library: pip install 'swarmnet-train[tokenizers]'"
            ) from error
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read tokenizer {str(path)!r}: {error.strerror}") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise UsageError(f"{str(path)!r} is not a tokenizer.json: {error}") from error
        # A file may bring both, made for batches of a fixed length.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.sha256 = hashlib.sha256(content).hexdigest()
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        self._end = [vocabulary[token] for token in END_TOKENS if token in vocabulary][:1]

    def encode(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        dtype = smallest_dtype(self.vocab_size)
        texts = (document.decode() for document in documents)
        # Batches use all cores, and bound how much text is in memory.
        while batch := list(islice(texts, _BATCH)):
            for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield np.array(encoding.ids + self._end, dtype=dtype)

    def of_prompt(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(_utf8(text).decode(), add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


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
