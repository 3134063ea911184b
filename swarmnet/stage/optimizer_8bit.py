"""AdamW's moments in 8 bits each: blocks of 256 elements, each with its largest magnitude in fp32 (arXiv:2110.02861).

Within a block values are companded by a square root, so small ones keep more of their digits: the first moment is
sign * (code / 127)^2 of the largest, the root of the second (code / 255)^2 of its largest. The root, because a weight
is divided by it; and what is above 0 never becomes 0, or a weight that is rarely updated would be divided by eps.

Reading and writing back gives the same codes, so a replica continues from a snapshot in fp32 with the same bits. Both
use only what IEEE 754 rounds in one way, on every device: no power, no table, no fused multiply-add, no division by a
number (on a GPU torch multiplies by its inverse). (bitsandbytes' dynamic map has no -1, so a block with a negative
value as its largest shrinks at each such turn.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.stage.same_bits import root

BLOCK = 256

LEAST = 4096
"""Elements of a whole parameter below which its moments stay in fp32: norms and biases need few bytes anyway."""

_FIRST, _SECOND = 127, 255
_FIRST_FLOOR, _ROOT_FLOOR = 2.0**-100, 2.0**-46
"""The least largest magnitude: below it products would leave the normal numbers, and codes would not come back."""


class PackedMoments:
    """Both moments of one parameter, or of a rank's block of it: 2 bytes per element and 8 per block."""

    def __init__(self, like: Tensor) -> None:
        self._shape, self.num_elements = like.shape, like.numel()
        blocks = -(-self.num_elements // BLOCK)
        self._codes = torch.zeros(self.num_elements, dtype=torch.int8, device=like.device)
        self._root_codes = torch.zeros(self.num_elements, dtype=torch.uint8, device=like.device)
        # What `keep` stores for zeros.
        self._largest = torch.full((blocks,), _FIRST_FLOOR, device=like.device)
        self._largest_root = torch.full((blocks,), _ROOT_FLOOR, device=like.device)
        self._squares = torch.tensor([[_FIRST**2], [_SECOND**2]], dtype=torch.float32, device=like.device)

    @property
    def num_bytes(self) -> int:
        """Memory."""
        return sum(each.nbytes for each in (self._codes, self._root_codes, self._largest, self._largest_root))

    def read(self) -> tuple[Tensor, Tensor]:
        """Copies in fp32, of the parameter's shape."""
        first, second = self.piece(0, self.num_elements)
        return first.view(self._shape), second.view(self._shape)

    def write(self, first: Tensor, second: Tensor) -> None:
        """Round these moments and keep them."""
        device = self._codes.device
        self.keep(0, first.reshape(-1).to(device), second.reshape(-1).to(device))

    def piece(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Copies of elements [start, stop) in fp32; start is a multiple of BLOCK."""
        blocks = slice(start // BLOCK, -(-stop // BLOCK))
        codes, roots = self._codes[start:stop].to(torch.float32), self._root_codes[start:stop].to(torch.float32)
        # Squared with its sign kept: `keep` has taken the root.
        first = _scaled(codes * codes.abs() / self._squares[0], self._largest[blocks])
        return first, _scaled(roots * roots / self._squares[1], self._largest_root[blocks]).square_()

    def keep(self, start: int, first: Tensor, second: Tensor) -> None:
        """Round and keep moments of the elements from `start`, a multiple of BLOCK, up to a multiple or the end."""
        stop, roots = start + first.numel(), root(second)
        blocks = slice(start // BLOCK, -(-stop // BLOCK))
        parts, largest = _parts(first, _FIRST_FLOOR)
        # The root leaves small values more of the codes.
        codes = root(parts.abs()).mul_(_FIRST).round_().copysign_(parts).view(-1)
        self._codes[start:stop] = codes[: first.numel()].to(torch.int8)
        self._largest[blocks] = largest
        parts, largest = _parts(roots, _ROOT_FLOOR)
        # Above zero stays above zero: such a weight would else be divided by eps.
        codes = torch.maximum(root(parts).mul_(_SECOND).round_(), (parts > 0).to(parts.dtype)).view(-1)
        self._root_codes[start:stop] = codes[: roots.numel()].to(torch.uint8)
        self._largest_root[blocks] = largest


def _parts(values: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """[blocks, BLOCK] of `values` divided by each block's largest magnitude, which is at least `floor`; and these."""
    # The last block may be short; zeros do not change its largest magnitude.
    padded = functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    largest = padded.abs().amax(1).clamp_(min=floor)
    return padded / largest.unsqueeze(1), largest


def _scaled(parts: Tensor, largest: Tensor) -> Tensor:
    """Every block of `parts` times its largest magnitude."""
    whole = parts.numel() - parts.numel() % BLOCK
    scaled = torch.empty_like(parts)
    # All whole blocks at once, then the short one.
    torch.mul(parts[:whole].view(-1, BLOCK), largest[: whole // BLOCK].unsqueeze(1), out=scaled[:whole].view(-1, BLOCK))
    torch.mul(parts[whole:], largest[-1:], out=scaled[whole:])
    return scaled
