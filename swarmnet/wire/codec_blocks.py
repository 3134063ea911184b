"""Codecs that send one fp32 scale for each block, then a code for each element: fp16, int8, bnb8, nf4.

Layout: the scales of all blocks, then the codes. Only the last block may be short. With s the largest magnitude of a
block, t the least magnitude, and gap(x) the distance between the two table numbers around x / s:

    codec  block  bits  code of x                        |x' - x| is at most                       t
    fp16   65536    16  x / 2^k, as fp16                 2^-11 |x| + 2^-38 s                       2^-80
    int8     256     8  round(127 sqrt(|x| / s)), sign   (sqrt(|x| s) / 127 + s / 254^2) 1.00001   2^-110
    bnb8     256     8  nearest number of a table        s gap(x) / 2 + 2^-11 |x| + 2^-24 s        2^-90
    nf4       64     4  nearest number of a table        s gap(x) / 2 + 2^-11 |x| + 2^-24 s        2^-90

A block with s below t (but for fp16: or equal to it) is sent as zeros: nothing decodes to a denormal number, which some
machines flush to zero. Encoding a decoded tensor again changes nothing. A code is decoded by elementwise IEEE
operations, one after the other, and one product by the scale, so that the bits are the same everywhere (a fused
multiply-add, which compilers choose by machine, would change them).

fp16 alone ends at 65504, which a sum of gradients over a step's tokens may exceed. So each block is scaled by a power
of two until its largest element, rounded to fp16's precision, is in [2^14, 2^15): exact both ways. int8 is companded
by a square root, as mu-law telephony is, so that small values keep relative precision: x' = (q |q| / 127^2) s.
Blockwise scales are those of 8-bit optimizers (arXiv:2110.02861). The tables of bnb8 and nf4 are bitsandbytes' dynamic
map and NormalFloat (arXiv:2305.14314), the arithmetic is ours: a peer needs no kernel library. bnb8's table has no -1:
there a block's scale carries the sign of its largest element, which so is +1.0 in the table and comes back exactly.
4-bit codes are packed two a byte, the earlier in the higher half, and zero in the half that is left over.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.wire import kernels
from swarmnet.wire.codec import fp32, malformed, non_finite

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]

# Elements handled at a time: on the CPU small enough to stay in a core's cache. Multiples of every block.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 24


@dataclass(frozen=True)
class Blocks:
    """What all of them share. A subclass says what the codes of a block are."""

    name: str
    block: int
    bits: int
    """Of a code."""
    feedback: bool = False
    dtype: str = "float32"

    @property
    def reduced(self) -> str:
        """Sums travel alike."""
        return self.name

    def sizes(self, num_elements: int) -> tuple[int, int]:
        """Always the same."""
        num_bytes = 4 * -(-num_elements // self.block) + -(-num_elements * self.bits // 8)
        return num_bytes, num_bytes

    def check(self, data: Array, num_elements: int) -> None:
        """NON_FINITE (a scale, a code), MALFORMED (a scale or a code that no encoder writes)."""
        at = 4 * -(-num_elements // self.block)
        scales = data[:at].view("<f4")
        if not bool(np.isfinite(scales).all()):
            raise non_finite((num_elements,))
        self._check(scales, data[at:], num_elements)

    def encode(self, x_N: torch.Tensor) -> torch.Tensor:
        """Piece by piece."""
        import torch

        x_N = fp32(x_N)
        out = torch.empty(self.sizes(x_N.numel())[0], dtype=torch.uint8, device=x_N.device)
        for x, scales, codes in self._pieces(x_N, out):
            found, encoded = self._encode(to_blocks(x, self.block))
            scales.copy_(found)
            codes.copy_(encoded.view(-1).view(torch.uint8)[: codes.numel()])
            # The half byte behind the last element: equal tensors must have equal bytes.
            if x.numel() * self.bits % 8:
                codes[-1] &= 0xF0
        return out

    def decode(self, data: torch.Tensor, out_N: torch.Tensor) -> None:
        """Piece by piece; all is checked before the first is written."""
        import torch

        self.check(data.numpy(), out_N.numel())
        for out, scales, codes in self._pieces(out_N, data.to(out_N.device)):
            values = to_blocks(self.values(codes)[: out.numel()], self.block)
            # Straight into the output, where no block is short.
            if values.numel() == out.numel():
                torch.mul(values, scales.unsqueeze(1), out=out.view_as(values))
            else:
                out.copy_(values.mul_(scales.unsqueeze(1)).view(-1)[: out.numel()])

    def _pieces(
        self, x_N: torch.Tensor, data: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Elements, with their scales and their codes in `data`."""
        import torch

        total, at = x_N.numel(), 4 * -(-x_N.numel() // self.block)
        scales, codes = data[:at].view(torch.float32), data[at:]
        chunk = _CPU_CHUNK if x_N.device.type == "cpu" else _DEVICE_CHUNK
        for start in range(0, total, chunk):
            stop = min(start + chunk, total)
            here = slice(start // self.block, -(-stop // self.block))
            yield x_N[start:stop], scales[here], codes[start * self.bits // 8 : -(-stop * self.bits // 8)]

    def _peaks(self, size_N: torch.Tensor) -> torch.Tensor:
        """The largest of each element's block, [N]."""
        return to_blocks(size_N, self.block).amax(1).repeat_interleave(self.block)[: size_N.numel()]

    def _check(self, scales: Array, codes: Array, num_elements: int) -> None:
        """Of scales that are finite: raise BadMessage unless an encoder writes such."""
        raise NotImplementedError

    def _encode(self, x_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scales [B], codes). Raises BadMessage(NON_FINITE)."""
        raise NotImplementedError

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """What these bytes stand for under a scale of 1: fresh, fp32."""
        raise NotImplementedError


def to_blocks(x_N: torch.Tensor, block: int) -> torch.Tensor:
    """[ceil(N / block), block]: a view where blocks are whole, else a copy with zeros behind the last element."""
    import torch

    short = -x_N.numel() % block
    return (torch.nn.functional.pad(x_N, (0, short)) if short else x_N).view(-1, block)


# ---------------------------------------------------------------- fp16

_TINY_FP16 = 2.0**-80
_LARGEST = 2.0**128 - 2.0**117  # What rounds to fp16's precision beyond this would decode to infinity.
_SHIFT = 15  # The block's largest is below 2^15 after scaling: half of fp16's range.
_LEAST_EXPONENT = -79  # Of 2^-80: e with 2^(e-1) <= it < 2^e.
_LOWEST, _HIGHEST = _LEAST_EXPONENT - _SHIFT, 128 - _SHIFT  # Exponents of the scales that encoders write.
_EXPONENT, _BEYOND = 0x7C00, 0x7800  # Codes of infinity and of 2^15, without sign.


class Fp16(Blocks):
    """fp16 under powers of two."""

    def _check(self, scales: Array, codes: Array, num_elements: int) -> None:
        mantissa, exponent = np.frexp(scales)
        # A scale that is no power of two would round, and machines might round differently.
        if not bool(((mantissa == 0.5) & (exponent - 1 >= _LOWEST) & (exponent - 1 <= _HIGHEST)).all()):
            raise malformed("a block's scale is no power of two of an encoder's")
        numbers = codes.view("<u2")
        for at in range(0, num_elements, self.block):  # block by block: no copy of all of them
            largest = int((numbers[at : at + self.block] & 0x7FFF).max())
            if largest >= _EXPONENT:
                raise non_finite((num_elements,))
            if largest >= _BEYOND:
                raise malformed("an fp16 number of 2^15 or more", bits=largest)

    def _encode(self, x_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        largest = x_BN.abs().amax(1)  # a NaN's is NaN
        if not bool(torch.isfinite(largest).all()):
            raise non_finite(tuple(x_BN.shape))
        mantissa, exponent = torch.frexp(largest.clamp(max=_LARGEST))
        exponent += (mantissa * 2048).round() == 2048  # what rounding to eleven bits carries into the next power
        # Zeros need no scale, and smaller ones would decode to denormals.
        tiny = (largest == 0) | (exponent < _LEAST_EXPONENT)
        shift = (exponent - _SHIFT).masked_fill(tiny, 0)
        # Both are passes over all elements, which nearly no tensor needs.
        if bool((largest > _LARGEST).any()):
            x_BN = x_BN.clamp(-_LARGEST, _LARGEST)
        if bool(tiny.any()):
            x_BN = x_BN.masked_fill(tiny.unsqueeze(1), 0.0)
        return _power_of_two(shift), (x_BN * _power_of_two(-shift).unsqueeze(1)).half()

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        import torch

        return codes.view(torch.float16).float()

    def bound(self, x_N: torch.Tensor) -> torch.Tensor:
        """The error bound that the module's docstring states."""
        size = x_N.double().abs()
        scale = self._peaks(size)
        return size * 2**-11 + scale * 2**-38 + _TINY_FP16 * (scale <= _TINY_FP16)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent of int32 exponents, as fp32: made of bits, since a pow may be off by one."""
    import torch

    return ((exponent + 127) << 23).view(torch.float32)


# ---------------------------------------------------------------- int8

# As fp32, 127^2 times this is exactly 1: a block's largest element survives. A product, since CUDA divides by a
# scalar through its reciprocal.
_UNIT = 1.0 / 127**2
_TINY_INT8 = 2.0**-110  # Below it 127^2 / s overflows and decoded values are denormal.


class Int8(Blocks):
    """Companded by a square root."""

    def encode(self, x_N: torch.Tensor) -> torch.Tensor:
        """By a kernel, where there is one; what it refuses the reference names."""
        import torch

        x_N = fp32(x_N)
        if (native := kernels.of(x_N)) is not None:
            out, at = torch.empty(self.sizes(x_N.numel())[0], dtype=torch.uint8), 4 * -(-x_N.numel() // self.block)
            with contextlib.suppress(kernels.Unfit):
                native.int8_encode(x_N, out[:at].view(torch.float32), out[at:])
                return out
        return super().encode(x_N)

    def decode(self, data: torch.Tensor, out_N: torch.Tensor) -> None:
        """Likewise."""
        if (native := kernels.of(data, out_N)) is not None:
            at = 4 * -(-out_N.numel() // self.block)
            with contextlib.suppress(kernels.Unfit):
                return native.int8_decode(data[:at], data[at:], out_N)
        return super().decode(data, out_N)

    def _check(self, scales: Array, codes: Array, num_elements: int) -> None:
        if bool((scales < 0.0).any()):
            raise BadMessage(RejectCode.NON_FINITE, "a block's scale is not a finite number >= 0")
        # No encoder writes -128: with it |x'| could exceed the scale.
        if bool((codes == 128).any()):
            raise malformed("-128 is no int8 code")

    def _encode(self, x_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        size = x_BN.abs()
        scales = size.amax(1)
        # One check for the whole piece, of the scales alone: the maximum of a NaN is NaN.
        if not bool(torch.isfinite(scales).all()):
            raise non_finite(tuple(x_BN.shape))
        scales.mul_(scales > _TINY_INT8)
        stretch = 127.0**2 / torch.where(scales == 0, 1.0, scales)
        size.mul_(stretch.unsqueeze(1))
        # On a CPU torch's roots are MKL's, which are off by a digit for some numbers.
        if size.device.type == "cpu":
            np.sqrt(size.numpy(), out=size.numpy())
        else:
            size.sqrt_()
        return scales, size.round_().copysign_(x_BN).to(torch.int8)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        import torch

        values = codes.view(torch.int8).float()
        return values.mul_(values.abs()).mul_(_UNIT)

    def bound(self, x_N: torch.Tensor) -> torch.Tensor:
        """The error bound that the module's docstring states."""
        size = x_N.double().abs()
        scale = self._peaks(size)
        return ((size * scale).sqrt() / 127 + scale / 254**2) * (1 + 1e-5) + _TINY_INT8 * (scale <= _TINY_INT8)


# ---------------------------------------------------------------- bnb8, nf4

_TINY_TABLED = 2.0**-90

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
class Tabled(Blocks):
    """The nearest number of a table in [-1, 1], 8 or 4 bits of it."""

    numbers: tuple[float, ...] = ()
    """Rising, 0.0 and 1.0 in it."""

    def _check(self, scales: Array, codes: Array, num_elements: int) -> None:
        if num_elements * self.bits % 8 and codes[-1] & 15:
            raise malformed("a code after the last element")

    def _encode(self, x_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        scales = self._scales(x_BN)
        if not bool(torch.isfinite(scales).all()):
            raise non_finite(tuple(x_BN.shape))
        # A block of zeros has scale 0; any divisor will do for it.
        ratio = x_BN / torch.where(scales == 0, 1.0, scales).unsqueeze(1)
        # Looked up under its fp16 number: one table instead of a search for each element.
        index = ratio.half().view(torch.int16).view(-1).int().bitwise_and_(0xFFFF)
        found = torch.index_select(_nearest(self, x_BN.device), 0, index)
        if self.bits == 8:
            return scales, found
        pairs = found.view(-1, 2)
        return scales, (pairs[:, 0] << 4) | pairs[:, 1]

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.index_select(_meaning(self, codes.device), 0, codes.int()).view(torch.float32)

    def bound(self, x_N: torch.Tensor) -> torch.Tensor:
        """The error bound that the module's docstring states."""
        import torch

        size = x_N.double().abs()
        signed = self._scales(to_blocks(x_N, self.block)).double()
        scale = signed.repeat_interleave(self.block)[: size.numel()]
        table = torch.tensor(self.numbers, dtype=torch.float64)
        ratio = torch.where(scale == 0, 0.0, x_N.double() / torch.where(scale == 0, 1.0, scale))
        above = torch.bucketize(ratio, table).clamp(0, len(table) - 1)
        below = (torch.bucketize(ratio, table, right=True) - 1).clamp(0, len(table) - 1)
        # Below the map's least number there is nothing: a value outside is as far as its distance to it.
        gap = torch.maximum(table[above] - table[below], 2 * (table[0] - ratio))
        wide = scale.abs()
        return wide * gap / 2 + size * 2**-11 + wide * 2**-24 + _TINY_TABLED * (wide <= _TINY_TABLED)

    def _scales(self, x_BN: torch.Tensor) -> torch.Tensor:
        """The largest element of each block, with its sign where the table needs it; 0 where it is tiny."""
        import torch

        low, high = torch.aminmax(x_BN, dim=1)
        scale = torch.where(-low > high, low if self.numbers[0] > -1.0 else -low, high)
        return torch.where(scale.abs() <= _TINY_TABLED, 0.0, scale)


@functools.lru_cache(maxsize=32)
def _nearest(codec: Tabled, device: torch.device) -> torch.Tensor:
    """uint8 [65536]: the code under each fp16 number's bits; NaN and infinity never come."""
    import torch

    table = torch.tensor(codec.numbers, dtype=torch.float64)
    number = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).double().nan_to_num()
    return torch.bucketize(number, (table[1:] + table[:-1]) / 2).to(torch.uint8).to(device)


@functools.lru_cache(maxsize=32)
def _meaning(codec: Tabled, device: torch.device) -> torch.Tensor:
    """What a byte stands for: fp32 [256], or the two fp32 numbers of [256] pairs seen as one int64 each."""
    import torch

    table = torch.tensor(codec.numbers, dtype=torch.float32)
    # One lookup decodes both codes of a byte.
    if codec.bits == 4:
        table = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1).view(torch.int64).view(-1)
    return table.to(device)


FP16 = Fp16("fp16", 1 << 16, 16)
INT8 = Int8("int8", 256, 8)
BNB8 = Tabled("bnb8", 256, 8, numbers=dynamic_map())
NF4 = Tabled("nf4", 64, 4, feedback=True, numbers=NORMAL_FLOAT)
BLOCKWISE = (FP16, INT8, BNB8, NF4)
