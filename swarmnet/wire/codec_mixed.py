"""Several codecs in one tensor, run after run: what norms need is not what matrices need.

Layout: uint64 number of runs; per run a uint64, the number of its elements times 256 plus its codec's number; then each
run under its own codec, padded with zeros to a multiple of 8 bytes. Every element has its run's error. Which elements
go under which codec is the encoder's choice (`sums.sum_codec`); runs of no elements, or more of them than
4 + N / 1024, are not written and are refused. Neighbours may be of one codec: a run begins a codec's blocks anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from swarmnet.wire.codec import MAX_BLOCK, Codec, malformed, memory
from swarmnet.wire.codec_blocks import BLOCKWISE
from swarmnet.wire.codec_casts import CASTS

if TYPE_CHECKING:
    import torch

Run = tuple[str, int]
"""(codec, number of elements)"""

MEMBERS: tuple[Codec, ...] = (*CASTS[:2], *BLOCKWISE)
"""A run's codec number is its place here: append only."""

_NUMBER = {codec.name: number for number, codec in enumerate(MEMBERS)}
_WORD = 8


@dataclass(frozen=True, slots=True)
class Mixed:
    """runs: what `encode` writes, covering the tensor. Decoding follows the runs in the data and needs none."""

    runs: tuple[Run, ...] = ()
    name: str = "mixed"
    dtype: str = "float32"
    reduced: str = "mixed"
    feedback: bool = False
    block: int = MAX_BLOCK

    def sizes(self, num_elements: int) -> tuple[int, int]:
        """From the empty tensor's to that of the most runs, all in fp32."""
        runs = _most_runs(num_elements)
        return _WORD, _WORD + runs * (_WORD + 4 + _WORD) + 4 * num_elements

    def check(self, data: np.ndarray[Any, Any], num_elements: int) -> None:
        """MALFORMED (runs, padding), and what the runs' codecs refuse."""
        for codec, elements, encoded in _fields(data, num_elements):
            codec.check(data[encoded], elements.stop - elements.start)

    def encode(self, x_N: torch.Tensor) -> torch.Tensor:
        """Run by run. The runs must cover `x_N`."""
        import torch

        runs = [run for run in self.runs if run[1]]
        # Our own mistake, not a peer's: hence no BadMessage.
        if sum(size for _, size in runs) != x_N.numel() or len(runs) > _most_runs(x_N.numel()):
            raise ValueError(f"{len(runs)} runs do not fit {x_N.numel()} elements")
        header = [len(runs), *(size << 8 | _NUMBER[name] for name, size in runs)]
        fields = [torch.tensor(header, dtype=torch.int64).view(torch.uint8)]
        for (name, _), run in zip(runs, torch.split(x_N, [size for _, size in runs]), strict=True):
            encoded = memory(MEMBERS[_NUMBER[name]].encode(run))
            # Each run begins at a multiple of 8 bytes: decoders compute with it as it lies.
            fields.append(torch.nn.functional.pad(encoded, (0, -encoded.numel() % _WORD)))
        return torch.cat(fields)

    def decode(self, data: torch.Tensor, out_N: torch.Tensor, *, add: bool) -> None:
        """Run by run; all are checked before the first is added."""
        raw = data.numpy()
        self.check(raw, out_N.numel())
        for codec, elements, encoded in _fields(raw, out_N.numel()):
            codec.decode(data[encoded], out_N[elements], add=add)

    def bound(self, x_N: torch.Tensor) -> torch.Tensor:
        """That of each run."""
        import torch

        sizes = [size for _, size in self.runs]
        pairs = zip(self.runs, torch.split(x_N, sizes), strict=True)
        return torch.cat([MEMBERS[_NUMBER[name]].bound(run) for (name, _), run in pairs])


def _most_runs(num_elements: int) -> int:
    return 4 + num_elements // 1024


def _fields(data: np.ndarray[Any, Any], num_elements: int) -> Iterator[tuple[Codec, slice, slice]]:
    """(codec, elements, bytes) of each run. Raises BadMessage(MALFORMED)."""
    num_runs = int(data[:_WORD].view("<u8")[0])
    if num_runs > _most_runs(num_elements) or data.size < _WORD * (1 + num_runs):
        raise malformed("too many runs", runs=num_runs)
    words = [int(word) for word in data[_WORD : _WORD * (1 + num_runs)].view("<u8")]
    if any(word & 255 >= len(MEMBERS) or word < 256 for word in words) or sum(w >> 8 for w in words) != num_elements:
        raise malformed("runs do not fit the tensor", runs=num_runs)
    codecs = [MEMBERS[word & 255] for word in words]
    lengths = [codec.sizes(word >> 8)[0] for codec, word in zip(codecs, words, strict=True)]
    padded = (-(-length // _WORD) * _WORD for length in lengths)
    ends = list(itertools.accumulate(padded, initial=_WORD * (1 + num_runs)))
    # All lengths follow from the header, so there is one right size.
    if ends[-1] != data.size:
        raise malformed("wrong length", num_bytes=data.size, expected=ends[-1])
    element = 0
    for codec, word, length, begin, end in zip(codecs, words, lengths, ends, ends[1:], strict=False):
        # Equal tensors have equal bytes, padding included.
        if bool(data[begin + length : end].any()):
            raise malformed("something between two runs")
        yield codec, slice(element, element + (word >> 8)), slice(begin, begin + length)
        element += word >> 8
