"""One byte an element: blocks of 256, companded by a square root, so that small values keep relative precision.

Encode, per block with s = max |x|:    q = round(127 sign(x) sqrt(|x| / s))
Decode, from the stored (s, q):        x' = (q |q| / 127^2) s

    |x' - x| <= sqrt(|x| s) / 127 + s / 254^2      (1 + 1e-5 of it, for rounding in fp32)

A block with s <= 2^-110 is sent as zeros. The largest element of a block comes back exactly, and encoding a decoded
tensor again changes nothing. Layout: fp32 scales of all blocks, then int8 codes; only the last block may be short.

Plain torch in cache-sized pieces: one elementwise IEEE operation after the other, so that the decoded bits are the same
everywhere (a fused multiply-add, which compilers choose by machine, would change them). Companding as in mu-law
telephony; blockwise scales as in 8-bit optimizers (arXiv:2110.02861).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from swarmnet.errors import BadMessage, RejectCode
from swarmnet.wire.codec import blocks, fp32, per_element

if TYPE_CHECKING:
    import numpy as np
    import torch

BLOCK = 256
_CPU_CHUNK = BLOCK << 10
_DEVICE_CHUNK = BLOCK << 16
_UNIT = 1.0 / 127**2
"""As fp32, 127^2 times this is exactly 1: a block's largest element survives. A product, since CUDA divides by a
scalar through its reciprocal."""
_TINY = 2.0**-110
"""Below it 127^2 / s overflows and decoded values are denormal."""
_SIGN = -(1 << 31)


class Int8:
    """The codec of this module."""

    name = reduced = "int8"
    dtype = "float32"
    feedback = False
    block = BLOCK

    def sizes(self, num_elements: int) -> tuple[int, int]:
        """Always the same."""
        num_bytes = 4 * -(-num_elements // BLOCK) + num_elements
        return num_bytes, num_bytes

    def check(self, data: np.ndarray[Any, Any], num_elements: int) -> None:
        """What `decode` checks, without torch."""
        import numpy as np

        num_scales = -(-num_elements // BLOCK)
        scales, codes = data[: 4 * num_scales].view("<f4"), data[4 * num_scales :].view("i1")
        if not bool((np.isfinite(scales) & (scales >= 0.0)).all()):
            raise BadMessage(RejectCode.NON_FINITE, "a block's scale is not a finite number >= 0")
        if bool((codes == -128).any()):
            raise BadMessage(RejectCode.MALFORMED, "-128 is no int8 code")

    def encode(self, x_N: torch.Tensor) -> torch.Tensor:
        """Encode a flat fp32 tensor to uint8 [4 ceil(N / 256) + N]. Raises BadMessage(NON_FINITE)."""
        import torch

        x_N = fp32(x_N)
        total = x_N.numel()
        num_blocks = -(-total // BLOCK)
        out = torch.empty(4 * num_blocks + total, dtype=torch.uint8, device=x_N.device)
        scales, codes = out[: 4 * num_blocks].view(torch.float32), out[4 * num_blocks :].view(torch.int8)
        whole = total - total % BLOCK
        scratch = torch.empty(2, min(whole, _chunk(x_N)), dtype=torch.float32, device=x_N.device)
        for start in range(0, whole, _chunk(x_N)):
            stop = min(start + _chunk(x_N), whole)
            blocks = slice(start // BLOCK, stop // BLOCK)
            _encode_blocks(
                x_N[start:stop].view(-1, BLOCK),
                scales[blocks],
                codes[start:stop].view(-1, BLOCK),
                scratch[:, : stop - start].view(2, -1, BLOCK),
            )
        # The last block is shorter, and has its own scale.
        if whole < total:
            short = x_N[whole:].view(1, -1)
            _encode_blocks(short, scales[-1:], codes[whole:].view(1, -1), scratch.new_empty(2, *short.shape))
        return out

    def decode(self, data: torch.Tensor, out_N: torch.Tensor, *, add: bool) -> None:
        """Piece by piece.

        Raises BadMessage before `out_N` is touched: NON_FINITE (a negative scale, NaN, infinity), MALFORMED (-128).
        """
        import torch

        data = data.to(out_N.device)
        total = out_N.numel()
        if not total:
            return
        num_blocks = -(-total // BLOCK)
        scales, codes = data[: 4 * num_blocks].view(torch.float32), data[4 * num_blocks :].view(torch.int8)
        low, high = (float(bound) for bound in torch.aminmax(scales))
        if not (low >= 0.0 and high < math.inf):  # aminmax of a NaN is NaN
            raise BadMessage(RejectCode.NON_FINITE, "a block's scale is not a finite number >= 0")
        # No encoder writes -128: with it |x'| could exceed the scale.
        if codes.min().item() < -127:
            raise BadMessage(RejectCode.MALFORMED, "-128 is no int8 code")
        whole = total - total % BLOCK
        scratch = torch.empty(2, min(whole, _chunk(out_N)), dtype=torch.float32, device=out_N.device)
        for start in range(0, whole, _chunk(out_N)):
            stop = min(start + _chunk(out_N), whole)
            blocks = slice(start // BLOCK, stop // BLOCK)
            _decode_blocks(
                scales[blocks],
                codes[start:stop].view(-1, BLOCK),
                out_N[start:stop].view(-1, BLOCK),
                scratch[:, : stop - start].view(2, -1, BLOCK),
                add=add,
            )
        if whole < total:
            short = codes[whole:].view(1, -1)
            _decode_blocks(scales[-1:], short, out_N[whole:].view(1, -1), scratch.new_empty(2, *short.shape), add=add)

    def bound(self, x_N: torch.Tensor) -> torch.Tensor:
        """The error bound that the module's docstring states."""
        size = x_N.double().abs()
        scale = per_element(blocks(size, BLOCK).amax(1), BLOCK, size.numel())
        return ((size * scale).sqrt() / 127 + scale / 254**2) * (1 + 1e-5) + 2**-110 * (scale <= 2**-110)


def _encode_blocks(x: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, scratch: torch.Tensor) -> None:
    import torch

    size, sign = scratch[0], scratch[1].view(torch.int32)
    torch.abs(x, out=size)
    torch.amax(size, dim=1, out=scales)
    # One check for the whole piece, of the scales alone.
    if not math.isfinite(scales.max().item()):  # the maximum of a NaN is NaN
        raise BadMessage(RejectCode.NON_FINITE, "NaN or infinity in a tensor")
    # Tiny blocks get scale 0, and so decode to zeros.
    scales.mul_(scales > _TINY)
    stretch = 127.0**2 / torch.where(scales == 0, 1.0, scales)
    size.mul_(stretch.unsqueeze(1)).sqrt_().round_()
    torch.bitwise_and(x.view(torch.int32), _SIGN, out=sign)
    codes.copy_(size.view(torch.int32).bitwise_or_(sign).view(torch.float32))


def _decode_blocks(
    scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, *, add: bool
) -> None:
    import torch

    value, size = scratch[0], scratch[1]
    value.copy_(codes)
    torch.abs(value, out=size)
    value.mul_(size).mul_(_UNIT)
    if add:
        out.add_(value.mul_(scales.unsqueeze(1)))
    else:
        torch.mul(value, scales.unsqueeze(1), out=out)


def _chunk(tensor: torch.Tensor) -> int:
    return _CPU_CHUNK if tensor.device.type == "cpu" else _DEVICE_CHUNK
