"""bitsandbytes' formats: the dynamic 8-bit map in blocks of 256, 4-bit NormalFloat in blocks of 64.

A block's elements are divided by its largest one and replaced by the index of the nearest number of a table in [-1, 1]
(arXiv:2110.02861, arXiv:2305.14314). The tables and blocks are bitsandbytes', the arithmetic is ours: a peer needs no
kernel library to decode, and the bits are fixed by one lookup and one product. With s the largest magnitude of a block,
and gap(x) the distance between the two table numbers around x / s:

    |x' - x| <= s gap(x) / 2 + 2^-11 |x| + 2^-24 s

The 8-bit map has no -1: there a block's scale carries the sign of its largest element. So that one is +1.0 in the table
and comes back exactly, and encoding a decoded tensor again changes nothing. A block with s <= 2^-90 is sent as zeros.

Nearest numbers are looked up under x / s rounded to fp16: one table of 65536 entries instead of a search for each
element. Layout: fp32 scales, then codes: 8-bit one a byte; 4-bit two a byte, the earlier in the higher half, and zero
in the half that is left over.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarmnet.wire.codec import blocks, fp32, is_finite, malformed, non_finite, per_element

if TYPE_CHECKING:
    import numpy as np
    import torch

_CHUNK = 1 << 17
_TINY = 2.0**-90

NORMAL_FLOAT = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of a normal distribution (arXiv:2305.14314, appendix E)."""


def dynamic_map() -> tuple[float, ...]:
    """256 numbers: in each of seven decades 2^i evenly spaced ones of either sign; 0 and 1."""
    found = [0.0, 1.0]
    for i in range(7):
        step = 0.9 / 2**i
        means = [(0.1 + step * (place + 0.5)) * 10.0 ** (i - 6) for place in range(2**i)]
        found += [sign * mean for mean in means for sign in (1.0, -1.0)]
    return tuple(sorted(found))


@dataclass(frozen=True)
class Tabled:
    """block: elements under one scale. bits: of a code, 8 or 4. numbers: the table, rising, 0.0 and 1.0 in it."""

    name: str
    block: int
    bits: int
    numbers: tuple[float, ...]
    feedback: bool
    dtype: str = "float32"

    @property
    def reduced(self) -> str:
        """Sums travel alike."""
        return self.name

    def sizes(self, num_elements: int) -> tuple[int, int]:
        """Always the same."""
        num_bytes = 4 * -(-num_elements // self.block) + -(-num_elements * self.bits // 8)
        return num_bytes, num_bytes

    def check(self, data: np.ndarray[Any, Any], num_elements: int) -> None:
        """NON_FINITE (a scale), MALFORMED (a code in the half byte that is left over)."""
        import numpy as np

        if not bool(np.isfinite(data[: 4 * -(-num_elements // self.block)].view("<f4")).all()):
            raise non_finite((num_elements,))
        # The half byte that is left over: equal tensors must have equal bytes.
        if num_elements * self.bits % 8 and data[-1] & 15:
            raise malformed("a code after the last element")

    def encode(self, x_N: torch.Tensor) -> torch.Tensor:
        """Piece by piece."""
        import torch

        x_N = fp32(x_N)
        total, num_blocks = x_N.numel(), -(-x_N.numel() // self.block)
        out = torch.empty(self.sizes(total)[0], dtype=torch.uint8, device=x_N.device)
        scales, codes = out[: 4 * num_blocks].view(torch.float32), out[4 * num_blocks :]
        for start in range(0, total, _CHUNK):
            piece = blocks(x_N[start : start + _CHUNK], self.block)
            here = scales[start // self.block : start // self.block + len(piece)]
            if not is_finite(here.copy_(self._scales(piece))):
                raise non_finite((total,))
            # A block of zeros has scale 0; any divisor will do for it.
            size = torch.where(here == 0, 1.0, here).unsqueeze(1)
            index = (piece / size).half().view(torch.int16).view(-1).int().bitwise_and_(0xFFFF)
            found = torch.index_select(_nearest(self, x_N.device), 0, index)[: min(_CHUNK, total - start)]
            if self.bits == 4:
                found = _pair_up(found)
            codes[start * self.bits // 8 : start * self.bits // 8 + found.numel()] = found
        return out

    def decode(self, data: torch.Tensor, out_N: torch.Tensor, *, add: bool) -> None:
        """Piece by piece: look up, multiply, add."""
        import torch

        total = out_N.numel()
        self.check(data.numpy(), total)
        num_blocks = -(-total // self.block)
        scales = data[: 4 * num_blocks].view(torch.float32).to(out_N.device)
        codes = data[4 * num_blocks :].to(out_N.device)
        for start in range(0, total, _CHUNK):
            stop = min(start + _CHUNK, total)
            index = codes[start * self.bits // 8 : -(-stop * self.bits // 8)].int()
            values = torch.index_select(_values(self, out_N.device), 0, index).view(torch.float32)[: stop - start]
            value_blocks = blocks(values, self.block)
            value_blocks.mul_(scales[start // self.block : -(-stop // self.block)].unsqueeze(1))
            values = value_blocks.view(-1)[: stop - start]
            if add:
                out_N[start:stop].add_(values)
            else:
                out_N[start:stop].copy_(values)

    def bound(self, x_N: torch.Tensor) -> torch.Tensor:
        """The error bound that the module's docstring states."""
        import torch

        size = x_N.double().abs()
        signed = self._scales(blocks(x_N, self.block)).double()
        scale = per_element(signed, self.block, size.numel())
        table = torch.tensor(self.numbers, dtype=torch.float64)
        ratio = torch.where(scale == 0, 0.0, x_N.double() / torch.where(scale == 0, 1.0, scale))
        above = torch.bucketize(ratio, table).clamp(0, len(table) - 1)
        below = (torch.bucketize(ratio, table, right=True) - 1).clamp(0, len(table) - 1)
        # Beside the map's least number there is nothing: what lies outside is as far as it is.
        gap = torch.maximum(table[above] - table[below], 2 * (table[0] - ratio))
        wide = scale.abs()
        return wide * gap / 2 + size * 2**-11 + wide * 2**-24 + _TINY * (wide <= _TINY)

    def _scales(self, block_BN: torch.Tensor) -> torch.Tensor:
        """The largest element of each block, with its sign where the table needs it; 0 where it is tiny."""
        import torch

        low, high = torch.aminmax(block_BN, dim=1)
        scale = torch.where(-low > high, low if self.numbers[0] > -1.0 else -low, high)
        return torch.where(scale.abs() <= _TINY, 0.0, scale)


def _pair_up(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes, two a byte."""
    import torch

    pairs = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
    return (pairs[:, 0] << 4) | pairs[:, 1]


@functools.lru_cache(maxsize=32)
def _nearest(codec: Tabled, device: torch.device) -> torch.Tensor:
    """uint8 [65536]: the code under each fp16 number's bits; NaN and infinity never come."""
    import torch

    table = torch.tensor(codec.numbers, dtype=torch.float64)
    number = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).double().nan_to_num()
    return torch.bucketize(number, (table[1:] + table[:-1]) / 2).to(torch.uint8).to(device)


@functools.lru_cache(maxsize=32)
def _values(codec: Tabled, device: torch.device) -> torch.Tensor:
    """What a byte stands for: fp32 [256], or the two fp32 numbers of [256] pairs seen as one int64 each."""
    import torch

    table = torch.tensor(codec.numbers, dtype=torch.float32)
    # One lookup decodes both codes of a byte.
    if codec.bits == 4:
        table = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1).view(torch.int64).view(-1)
    return table.to(device)


BNB8 = Tabled("bnb8", 256, 8, dynamic_map(), feedback=False)
NF4 = Tabled("nf4", 64, 4, NORMAL_FLOAT, feedback=True)
