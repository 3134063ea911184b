"""Few elements of many: which they are, and their fp32 values. Two codecs share the format.

    sparse    all elements but zeros; exact (a zero loses its sign)
    topk:F    of every 65536 elements the ceil(65536 F) largest; |x' - x| is 0 for them and |x| for the others, and
              none that is left is larger than one that is sent. Equal ones: the earlier goes first.

What topk drops must be sent later (error feedback, arXiv:1809.07599); sums of it travel as `sparse`, exactly, so that
nothing is dropped twice. Encoding a decoded tensor again changes nothing.

Layout, in blocks of 65536 elements: uint32 counts of all blocks; fp32 values of all blocks; then each block's places,
as uint16 offsets in rising order where they take no more room than one bit an element, else as bits (the first element
lowest, zeros after the last).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from swarmnet.manifest.codec_names import fraction
from swarmnet.wire.codec import check_finite, fp32, malformed, non_finite

if TYPE_CHECKING:
    import torch

BLOCK = 1 << 16
_SAMPLE = 16  # A block's threshold is guessed from every 16th element.


@dataclass(frozen=True, slots=True)
class Sparse:
    """Exact. fraction: of a block's elements that may be there at most."""

    name: str = "sparse"
    fraction: float = 1.0
    dtype: str = "float32"
    reduced: str = "sparse"

    @property
    def feedback(self) -> bool:
        """Does it drop anything?"""
        return self.fraction < 1.0

    @property
    def block(self) -> int:
        """What is dropped is chosen block by block; what is exact stays so in any piece."""
        return BLOCK if self.feedback else 1

    def sizes(self, num_elements: int) -> tuple[int, int]:
        """From all zeros to as many as there may be."""
        whole, rest = divmod(num_elements, BLOCK)
        longest = whole * self._longest(BLOCK) + (self._longest(rest) if rest else 0)
        return 4 * -(-num_elements // BLOCK), longest

    def check(self, data: np.ndarray[Any, Any], num_elements: int) -> None:
        """MALFORMED (counts, places, length), NON_FINITE (a value)."""
        self._read(data, num_elements)

    def encode(self, x_N: torch.Tensor) -> torch.Tensor:
        """Block by block, on the CPU."""
        import torch

        x_N = fp32(x_N).cpu()
        check_finite(x_N)
        counts, values, places = [], [], []
        for start in range(0, x_N.numel(), BLOCK):
            block = x_N[start : start + BLOCK]
            chosen = self._choose(block)
            counts.append(chosen.numel())
            values.append(block[chosen].numpy())
            places.append(_write_places(chosen.numpy(), block.numel()))
        fields = [np.array(counts, "<u4"), *values, *places]
        joined = np.concatenate([field.view(np.uint8) for field in fields])
        return torch.from_numpy(joined)

    def decode(self, data: torch.Tensor, out_N: torch.Tensor, *, add: bool) -> None:
        """One scatter. No place comes twice."""
        import torch

        raw_at, raw_values = self._read(data.numpy(), out_N.numel())
        at, values = (torch.from_numpy(raw).to(out_N.device) for raw in (raw_at, raw_values))
        if not add:
            out_N.zero_()
        # Places are distinct: one read and one write of each.
        out_N[at] = out_N[at].add_(values) if add else values

    def bound(self, x_N: torch.Tensor) -> torch.Tensor:
        """Everything but the largest of a block may be dropped."""
        import torch

        size = x_N.double().abs()
        for start in range(0, size.numel() if self.feedback else 0, BLOCK):
            block = size[start : start + BLOCK]
            block.masked_fill_(block > torch.topk(block, self._most(block.numel())).values[-1], 0.0)
        return size if self.feedback else size * 0

    def _most(self, size: int) -> int:
        """Elements of a block of `size` that may be sent."""
        return math.ceil(self.fraction * size)

    def _longest(self, size: int) -> int:
        """Bytes of a block of `size` elements that is as full as may be."""
        most = self._most(size)
        return 4 + 4 * most + _places(most, size)

    def _choose(self, block: torch.Tensor) -> torch.Tensor:
        """Places, rising, of what is sent of a block."""
        import torch

        nonzero = block.nonzero().view(-1)
        most = self._most(block.numel())
        # All of it fits: exact.
        if nonzero.numel() <= most:
            return nonzero
        size = block.abs()
        sample = size[::_SAMPLE]
        # A guess that is too low costs time and one that is too high is seen; neither changes what is chosen.
        guess = torch.topk(sample, min(sample.numel(), most // _SAMPLE * 3 // 2 + 8)).values[-1]
        near = (size >= guess).nonzero().view(-1)
        near = near if near.numel() >= most else nonzero
        least = torch.topk(size[near], most).values[-1]
        above, equal = near[size[near] > least], near[size[near] == least]
        return torch.cat([above, equal[: most - above.numel()]]).sort().values

    def _read(self, data: np.ndarray[Any, Any], num_elements: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(places in the whole tensor as int64, fp32 values), checked."""
        num_blocks = -(-num_elements // BLOCK)
        sizes = [min(BLOCK, num_elements - start) for start in range(0, num_elements, BLOCK)]
        counts = [int(count) for count in data[: 4 * num_blocks].view("<u4")]
        # Before memory is taken for what the counts promise.
        if any(count > self._most(size) for count, size in zip(counts, sizes, strict=True)):
            raise malformed("more elements than the codec sends")
        begin = 4 * (num_blocks + sum(counts))
        if data.size != begin + sum(map(_places, counts, sizes)):
            raise malformed("wrong length", num_bytes=data.size)
        values = data[4 * num_blocks : begin].view("<f4")
        # Dropped or sent, no NaN crosses.
        if not bool(np.isfinite(values).all()):
            raise non_finite((num_elements,))
        at = [place * BLOCK + found for place, found in enumerate(_read_places(data[begin:], counts, sizes))]
        return (np.concatenate(at) if at else np.empty(0, np.int64)), values


def topk(parameter: str | None) -> Sparse:
    """The codec `topk:<parameter>`. Raises ValueError."""
    kept = fraction(parameter)
    return Sparse(f"topk:{parameter}", kept)


def _places(count: int, size: int) -> int:
    """Bytes that tell `count` places of a block of `size` elements."""
    return min(2 * count, -(-size // 8))


def _write_places(chosen: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    # Two bytes a place are shorter than a bit an element while there are few.
    if 2 * chosen.size <= -(-size // 8):
        return chosen.astype("<u2")
    bits = np.zeros(size, np.uint8)
    bits[chosen] = 1
    return np.packbits(bits, bitorder="little")


def _read_places(data: np.ndarray[Any, Any], counts: list[int], sizes: list[int]) -> Iterator[np.ndarray[Any, Any]]:
    """Places inside each block, int64, rising, as many as counted. Raises BadMessage(MALFORMED)."""
    start = 0
    for count, size in zip(counts, sizes, strict=True):
        stop = start + _places(count, size)
        if 2 * count <= -(-size // 8):
            places = data[start:stop].view("<u2").astype(np.int64)
            # Rising places are distinct, so that one scatter adds each once.
            if count and not (int(places[-1]) < size and bool((np.diff(places) > 0).all())):
                raise malformed("places of a block do not rise inside it")
        else:
            bits = np.unpackbits(data[start:stop], bitorder="little")
            places = bits.nonzero()[0]
            if places.size != count or int(places[-1]) >= size:
                raise malformed("places of a block are not as many as counted")
        yield places
        start = stop
