"""Two bytes an element with eleven bits of precision: fp16 under a power of two per 65536 elements.

fp16 alone ends at 65504, which a sum of gradients over a step's tokens may exceed. So each block is scaled until its
largest element, rounded to fp16's precision, lies in [2^14, 2^15): exact both ways, being a power of two. With s the
largest magnitude of the block:

    |x' - x| <= 2^-11 |x| + 2^-38 s

A block with s < 2^-80 is sent as zeros: nothing decodes to a denormal fp32 number, which some machines flush to zero.
Encoding a decoded tensor again changes nothing. Layout: one fp32 scale a block, then the fp16 numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from swarmnet.wire.codec import blocks, fp32, malformed, non_finite, per_element

if TYPE_CHECKING:
    import numpy as np
    import torch

BLOCK = 1 << 16
_TINY = 2.0**-80
_LARGEST = 2.0**128 - 2.0**117
"""What rounds to fp16's precision beyond this would decode to infinity."""
_SHIFT = 15
"""The block's largest is below 2^15 after scaling: half of fp16's range."""
_LEAST_EXPONENT = -79
"""Of 2^-80, by `_exponent`."""
_LOWEST, _HIGHEST = _LEAST_EXPONENT - _SHIFT, 128 - _SHIFT
"""Exponents of the scales that encoders write."""
_EXPONENT, _BEYOND = 0x7C00, 0x7800
"""Codes of infinity and of 2^15, without sign."""


class Fp16:
    """The codec of this module."""

    name = reduced = "fp16"
    dtype = "float32"
    feedback = False
    block = BLOCK

    def sizes(self, num_elements: int) -> tuple[int, int]:
        """Always the same."""
        num_bytes = 4 * -(-num_elements // BLOCK) + 2 * num_elements
        return num_bytes, num_bytes

    def check(self, data: np.ndarray[Any, Any], num_elements: int) -> None:
        """MALFORMED (a scale that is no power of two in range), NON_FINITE."""
        import numpy as np

        num_scales = -(-num_elements // BLOCK)
        scales, codes = data[: 4 * num_scales].view("<f4"), data[4 * num_scales :].view("<u2")
        if not bool(np.isfinite(scales).all()):
            raise non_finite((num_elements,))
        mantissa, exponent = np.frexp(scales)
        # A scale that is no power of two would round, and machines might round differently.
        if not bool(((mantissa == 0.5) & (exponent - 1 >= _LOWEST) & (exponent - 1 <= _HIGHEST)).all()):
            raise malformed("a block's scale is no power of two of an encoder's")
        for at in range(0, num_elements, BLOCK):
            block = codes[at : at + BLOCK] & 0x7FFF
            largest = int(block.max())
            if largest >= _EXPONENT:
                raise non_finite((num_elements,))
            if largest >= _BEYOND:
                raise malformed("an fp16 number of 2^15 or more", bits=largest)

    def encode(self, x_N: torch.Tensor) -> torch.Tensor:
        """Block by block."""
        import torch

        x_N = fp32(x_N)
        total, num_blocks = x_N.numel(), -(-x_N.numel() // BLOCK)
        out = torch.empty(4 * num_blocks + 2 * total, dtype=torch.uint8, device=x_N.device)
        scales, codes = out[: 4 * num_blocks].view(torch.float32), out[4 * num_blocks :].view(torch.float16)
        for place in range(num_blocks):
            block = x_N[place * BLOCK : (place + 1) * BLOCK]
            low, high = (float(extreme) for extreme in torch.aminmax(block))
            largest = max(high, -low)
            if not (math.isfinite(low) and math.isfinite(high)):
                raise non_finite((total,))
            kept = codes[place * BLOCK : (place + 1) * BLOCK]
            # Zeros need no scale, and smaller ones would decode to denormals.
            if largest == 0.0 or (exponent := _exponent(min(largest, _LARGEST))) < _LEAST_EXPONENT:
                scales[place] = 1.0
                kept.zero_()
                continue
            scales[place] = 2.0 ** (exponent - _SHIFT)
            kept.copy_((block.clamp(-_LARGEST, _LARGEST) if largest > _LARGEST else block) * 2.0 ** (_SHIFT - exponent))
        return out

    def decode(self, data: torch.Tensor, out_N: torch.Tensor, *, add: bool) -> None:
        """Block by block: widen, then one product by a power of two."""
        import torch

        total = out_N.numel()
        self.check(data.numpy(), total)
        num_blocks = -(-total // BLOCK)
        scales = data[: 4 * num_blocks].view(torch.float32).tolist()
        codes = data[4 * num_blocks :].view(torch.float16).to(out_N.device)
        for place, scale in enumerate(scales):
            here = slice(place * BLOCK, (place + 1) * BLOCK)
            if add:
                out_N[here].add_(codes[here].float().mul_(scale))
            else:
                out_N[here].copy_(codes[here]).mul_(scale)

    def bound(self, x_N: torch.Tensor) -> torch.Tensor:
        """The error bound that the module's docstring states."""
        size = x_N.double().abs()
        scale = per_element(blocks(size, BLOCK).amax(1), BLOCK, size.numel())
        return size * 2**-11 + scale * 2**-38 + _TINY * (scale <= _TINY)


def _exponent(largest: float) -> int:
    """e with 2^(e-1) <= largest < 2^e, where `largest` is first rounded to fp16's eleven bits."""
    mantissa, exponent = math.frexp(largest)
    return exponent + (round(mantissa * 2048) == 2048)
