"""The largest elements of a tensor: their positions, and their values in 4 bits. Two codecs share the format.

    sparse:F    the ceil(4096 F) largest of every 4096 elements; of equal ones the earlier
    sparse      all elements; sums of `sparse:F` travel so

s is the largest magnitude of a block of 4096. An element is sent as c = round(7 sqrt(|x| / s)) with its sign, and
decodes to (c |c| / 49) s. So |x' - x| is at most sqrt(|x| s) / 7 + s / 196. Where c is 0 it is not sent. What is not
sent decodes to 0. A block with s below 2^-110 is sent as zeros. Encoding a decoded tensor again changes nothing.

`sparse:F` drops most of a tensor. In local training a replica keeps in its weights what others have not understood
(`sums.local_sum`), so it is sent later. The square root is for sums: an element that one of many replicas sends is
small compared with the block's largest.

Layout: uint64 number of elements sent, times 256, plus w; fp32 scale s of each block; c + 7 in 4 bits; positions.
Positions are gaps in w bits, 1, 2, 4 or 8, the shortest of these: the number of elements skipped, or 2^w - 1
where that many are skipped and more follow. The first number is in the lowest bits of a byte, and bits after the last
number are 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from swarmnet.manifest.codec_names import fraction
from swarmnet.wire.codec import fp32, malformed, non_finite
from swarmnet.wire.codec_blocks import to_blocks

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]

BLOCK = 4096
_HEAD = 8
_WIDTHS = (8, 4, 2, 1)
_BITS, _LARGEST = 4, 7  # Of a code.
_UNIT = 1.0 / _LARGEST**2  # As fp32, 49 times this is exactly 1: a block's largest element survives.
_EDGES = tuple((code - 0.5) ** 2 * _UNIT for code in range(1, _LARGEST + 1))  # Of |x| / s, from one code to the next.
_TINY = 2.0**-110  # Below it 1 / s overflows and decoded values are denormal.


@dataclass(frozen=True, slots=True)
class Sparse:
    """fraction: of a block's elements that may be sent."""

    name: str = "sparse"
    fraction: float = 1.0
    dtype: str = "float32"
    reduced: str = "sparse"
    feedback: bool = False
    block: int = BLOCK

    def sizes(self, num_elements: int) -> tuple[int, int]:
        """From all zeros to as many elements as may be sent."""
        most, shortest = self._most(num_elements), _HEAD + 4 * -(-num_elements // BLOCK)
        gaps = (_packed_bytes(most + (num_elements - most) // ((1 << width) - 1), width) for width in _WIDTHS)
        return shortest, shortest + _packed_bytes(most, _BITS) + min(gaps)

    def check(self, data: Array, num_elements: int) -> None:
        """MALFORMED (number of elements, codes, positions, length), NON_FINITE (a scale)."""
        self._read(data, num_elements)

    def encode(self, x_N: torch.Tensor) -> torch.Tensor:
        """Chosen where the tensor is; written on the CPU."""
        import torch

        x_BN = to_blocks(fp32(x_N), BLOCK)
        size = x_BN.abs()
        scales = size.amax(1) if x_N.numel() else size.new_zeros(0)
        # The maximum of a NaN is NaN.
        if not bool(torch.isfinite(scales).all()):
            raise non_finite(tuple(x_N.shape))
        scales.mul_(scales > _TINY)
        sent = size > 0
        if self.fraction < 1.0 and x_N.numel():
            least, most = self._least(size, x_N.numel())
            above, equal = size > least, size == least
            # Equal elements go by position, which torch.topk does not.
            sent &= above | equal & (equal.cumsum(1, dtype=torch.int32) <= most - above.sum(1, keepdim=True))
        at = sent.view(-1).nonzero().view(-1)
        values, scale = x_BN.view(-1)[at], scales[at // BLOCK]
        ratio = torch.where(scale == 0, 0.0, values.abs() / scale)
        codes = torch.bucketize(ratio, torch.tensor(_EDGES, device=ratio.device)).mul_(values.sign().long())
        kept = codes != 0
        positions, width = _written(at[kept].cpu().numpy())
        numbers = (codes[kept] + _LARGEST).to(torch.uint8).cpu().numpy()
        head = np.array([numbers.size << 8 | width], "<u8")
        fields = (head, scales.cpu().numpy(), _packed(numbers, _BITS), positions)
        return torch.from_numpy(np.concatenate([field.view(np.uint8) for field in fields]))

    def decode(self, data: torch.Tensor, out_N: torch.Tensor) -> None:
        """One scatter. No position comes twice."""
        import torch

        scales, codes, at = (torch.from_numpy(a).to(out_N.device) for a in self._read(data.numpy(), out_N.numel()))
        values = codes.float() - _LARGEST
        values = values.mul_(values.abs()).mul_(_UNIT).mul_(scales[at // BLOCK])
        out_N.zero_()
        out_N[at] = values

    def bound(self, x_N: torch.Tensor) -> torch.Tensor:
        """The error bound that the module's docstring states."""
        import torch

        size = to_blocks(x_N.double().abs(), BLOCK)
        if not x_N.numel():
            return size.view(-1)
        scales = size.amax(1, keepdim=True)
        bound = ((size * scales).sqrt() / 7 + scales / 196) * (1 + 1e-5) + _TINY * (scales <= _TINY)
        if self.fraction < 1.0:
            bound = torch.where(size > self._least(size, x_N.numel())[0], bound, torch.maximum(size, bound))
        return bound.reshape(-1)[: x_N.numel()]

    def _most(self, num_elements: int) -> int:
        """How many of so many elements may be sent."""
        whole, rest = divmod(num_elements, BLOCK)
        return whole * math.ceil(self.fraction * BLOCK) + math.ceil(self.fraction * rest)

    def _least(self, size_BN: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each block, the smallest magnitude that may be sent and how many elements may: both [B, 1]."""
        import torch

        most = torch.full((size_BN.shape[0], 1), self._most(BLOCK), device=size_BN.device)
        most[-1] = self._most(num_elements) - self._most(BLOCK) * (size_BN.shape[0] - 1)
        return torch.topk(size_BN, self._most(BLOCK), dim=1).values.gather(1, most - 1), most

    def _read(self, data: Array, num_elements: int) -> tuple[Array, Array, Array]:
        """(scales, codes + 7, int64 positions), checked."""
        count, width = divmod(int(data[:_HEAD].view("<u8")[0]), 256)
        begin = _HEAD + 4 * -(-num_elements // BLOCK)
        if width not in _WIDTHS or count > self._most(num_elements):
            raise malformed("more elements than the codec sends, or gaps of another width", count=count, width=width)
        scales, end = data[_HEAD:begin].view("<f4"), begin + _packed_bytes(count, _BITS)
        if not bool((np.isfinite(scales) & (scales >= 0.0)).all()):
            raise non_finite((num_elements,))
        codes = _unpacked(data[begin:end], _BITS)[:count]
        # No encoder writes 15: with it |x'| could exceed the scale.
        if codes.size != count or bool((codes == 15).any()):
            raise malformed("codes are too few or too large")
        gaps, skip = _unpacked(data[end:], width), (1 << width) - 1
        steps = np.cumsum(np.where(gaps == skip, skip, gaps.astype(np.int64) + 1))
        at = steps[gaps != skip] - 1
        if at.size != count or (count and int(at[-1]) >= num_elements):
            raise malformed("positions are not as many as elements, or outside of the tensor")
        return scales, codes, at


def sparse(parameter: str | None) -> Sparse:
    """The codec `sparse:<parameter>`. Raises ValueError."""
    kept = fraction(parameter)
    return Sparse(f"sparse:{parameter}", kept)


def _written(at: Array) -> tuple[Array, int]:
    """(rising positions as gaps, their width)."""
    skipped = np.diff(at, prepend=-1) - 1
    lengths = {width: at.size + int((skipped // ((1 << width) - 1)).sum()) for width in _WIDTHS}
    width = min(_WIDTHS, key=lambda width: _packed_bytes(lengths[width], width))
    skip = (1 << width) - 1
    gaps = np.full(lengths[width], skip, np.uint8)
    gaps[np.cumsum(skipped // skip + 1) - 1] = skipped % skip
    return _packed(gaps, width), width


def _packed_bytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def _packed(numbers: Array, bits: int) -> Array:
    """Numbers of so many bits, the last byte filled up with ones."""
    if bits == 8:
        return numbers
    whole = np.full(-(-numbers.size * bits // 8) * (8 // bits), (1 << bits) - 1, np.uint8)
    whole[: numbers.size] = numbers
    return np.packbits(np.unpackbits(whole[:, None], axis=1, count=bits, bitorder="little"), bitorder="little")


def _unpacked(data: Array, bits: int) -> Array:
    """All numbers that bytes hold."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (data[:, None] >> shifts & ((1 << bits) - 1)).reshape(-1)
