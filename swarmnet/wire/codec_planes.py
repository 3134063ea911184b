"""`small`: sums of small integers, in about as many bits as each block of 64 needs.

A number n is written as 2n, or as -2n - 1 if it is negative (zigzag), so that small magnitudes need few bits. A block
has w planes: word p of 64 bits has bit p of every element, element k at bit k. The highest planes are mostly zeros, as
few elements are so large: up to three of them are *sparse*, a byte that says which of the word's eight bytes are not
zero, and those bytes. Layout, each part for all blocks in order:

| part | bytes |
|---|---|
| head | 1 a block: w, 63 standing for 64, and 64 times the number s of sparse planes |
| masks | s a block, lowest plane first |
| sparse bytes | one for each bit of the masks |
| dense planes | 8 (w - s) a block, lowest plane first |

Exact for every int64. Words are made eight elements at a time: a matrix of 8 x 8 bits is turned within one int64
(Warren, Hacker's Delight, 7-3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from swarmnet.errors import Overflow
from swarmnet.wire import kernels
from swarmnet.wire.codec import malformed

if TYPE_CHECKING:
    import torch

BLOCK = 64
_CHUNK = 1 << 10
"""Blocks written at a time: what that takes fits a core's cache."""

_DEVICE_CHUNK = 1 << 16

_ADDED = 1 << 17
"""Elements that are added in one pass."""

_MOST_SPARSE = 3
_SPARSE_BELOW = 6
"""A plane with fewer bytes that are not zero is sparse: with its mask it is shorter."""

_TURNS = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))
_BITS = np.array([bin(byte).count("1") for byte in range(256)], np.int64)


class Planes:
    """int64 [N] to planes of bits and back."""

    name = "small"
    dtype = "int64"
    reduced = "small"
    feedback = False
    block = 1  # numbers are exact, wherever a piece begins

    def sizes(self, num_elements: int) -> tuple[int, int]:
        """From all zeros to 64 bits each and masks that save nothing."""
        num_blocks = -(-num_elements // BLOCK)
        return num_blocks, num_blocks * (1 + _MOST_SPARSE + 8 * BLOCK)

    def check(self, data: np.ndarray[Any, Any], num_elements: int) -> None:
        """MALFORMED unless there are as many planes, masks and bytes as each part says of the next.

        Bytes behind the last element are ignored, and so are planes and bytes of zeros."""
        _Parts(data, -(-num_elements // BLOCK))

    def encode(self, x_N: torch.Tensor) -> torch.Tensor:
        """uint8, as long as the numbers need."""
        import torch

        num_blocks = -(-x_N.numel() // BLOCK)
        if not num_blocks:
            return torch.empty(0, dtype=torch.uint8)
        if (native := kernels.of(x_N)) is not None:
            return native.small_encode(x_N)
        blocks = x_N.contiguous()
        if short := num_blocks * BLOCK - x_N.numel():
            blocks = torch.nn.functional.pad(blocks, (0, short))
        chunk = _CHUNK if x_N.device.type == "cpu" else _DEVICE_CHUNK
        chunks = [_written(some) for some in torch.split(blocks.view(-1, BLOCK), chunk)]
        return torch.cat([part for parts in zip(*chunks, strict=True) for part in parts])

    def decode(self, data: torch.Tensor, out_N: torch.Tensor) -> None:
        """Over `out_N`."""
        self.decode_integers(data, out_N, add=False)

    def decode_integers(self, data: torch.Tensor, out_N: torch.Tensor, *, add: bool) -> int:
        """Over `out_N`, or added to it: Overflow if that would leave int64; `out_N` is unchanged then.

        Returns the largest magnitude of the numbers decoded.
        """
        import torch

        if (native := kernels.of(data, out_N)) is not None:
            try:
                return native.small_decode(data, out_N, add=add)
            except kernels.Overflown as error:
                raise Overflow(_OVERFLOW) from error
            except kernels.Unfit:
                pass  # the reference names what is wrong
        num_blocks = -(-out_N.numel() // BLOCK)
        parts = _Parts(data.numpy(), num_blocks)
        out = torch.empty(out_N.numel(), dtype=torch.int64)
        for first in range(0, num_blocks, _CHUNK):
            place = out[first * BLOCK : (first + _CHUNK) * BLOCK]
            place.copy_(_read(parts, first, min(first + _CHUNK, num_blocks)).view(-1)[: place.numel()])
        return _put(out, out_N, add=add)

    def bound(self, x_N: torch.Tensor) -> torch.Tensor:
        """Exact."""
        return x_N.double() * 0


def _put(values: torch.Tensor, out_N: torch.Tensor, *, add: bool) -> int:
    """int64 `values` over `out_N`, or added to it. Returns their largest magnitude. Raises Overflow."""
    import torch

    values = values.to(out_N.device)
    if add:
        _check_sum(out_N, values)
        out_N.add_(values)
    else:
        out_N.copy_(values)
    if not values.numel():
        return 0
    low, high = torch.aminmax(values)
    return max(int(high), -int(low))


_OVERFLOW = "a fixed-point sum would leave int64: lower numerics.grid_bits or the learning rate"


def _check_sum(left: torch.Tensor, right: torch.Tensor) -> None:
    """Raise Overflow if an element of left + right leaves int64. Ranges first, elements only where ranges touch."""
    import torch

    for start in range(0, left.numel(), _ADDED):
        a, b = left[start : start + _ADDED], right[start : start + _ADDED]
        low, high = (int(x) + int(y) for x, y in zip(torch.aminmax(a), torch.aminmax(b), strict=True))
        # The ranges cannot overflow together, which is nearly always so.
        if low >= -(1 << 63) and high < 1 << 63:
            continue
        total = a + b
        if bool((((a ^ total) & (b ^ total)) < 0).any()):
            raise Overflow(_OVERFLOW)


def _written(chunk: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parts of the layout for blocks int64 [n, 64], each uint8 [...]."""
    import torch

    low, high = torch.aminmax(chunk)
    # Mostly they are small, and a quarter of the bytes is looked at in a quarter of the time.
    if is_short := bool((low >= -(1 << 14)) & (high < 1 << 14)):
        chunk = chunk.to(torch.int16)
    zigzag = (chunk << 1) ^ (chunk >> (15 if is_short else 63))
    # The first number that needs w + 1 bits is 2^w. Seen as unsigned, what is negative here needs all 64.
    edges = 1 << torch.arange(63, device=chunk.device)
    width = torch.bucketize(zigzag.amax(1).to(torch.int64), edges, right=True)
    if not is_short:
        width = torch.where((zigzag.amin(1) < 0) | (width > 62), 64, width)
    num_planes = max(8 * -(-int(width.max()) // 8), 8)
    planes = torch.cat([_turned(zigzag, low) for low in range(0, num_planes, 8)], 1)
    octets = planes.view(torch.uint8).view(-1, num_planes, 8)
    masks = _masks(planes)
    # Planes are sparse from the highest one down, as long as that makes them shorter.
    is_light = torch.from_numpy(_BITS).to(chunk.device)[masks.int()] < _SPARSE_BELOW
    above = width[:, None] - torch.arange(num_planes, device=chunk.device)  # 1: the highest plane
    sparse = torch.zeros_like(width)
    for rank in range(1, _MOST_SPARSE + 1):
        sparse += (is_light & (above == rank)).any(1) & (sparse == rank - 1)
    is_sparse = (above >= 1) & (above <= sparse[:, None])
    found = octets[is_sparse]
    return (
        (width.clamp(max=63) + 64 * sparse).to(torch.uint8),
        masks[is_sparse],
        found[found != 0],
        planes[above > sparse[:, None]].view(torch.uint8),
    )


class _Parts:
    """The offsets of the parts of an encoding. dense, masks, octets: the first of each block, and the end."""

    def __init__(self, data: np.ndarray[Any, Any], num_blocks: int) -> None:
        head = data[:num_blocks]
        self.width = (head & 63).astype(np.int64)
        self.width[self.width == 63] = 64
        self.sparse = (head >> 6).astype(np.int64)
        if (self.sparse > self.width).any():
            raise malformed("more sparse planes than planes")
        self.masks_at = _edges(self.sparse)
        rest = data[num_blocks:]
        self.masks = rest[: self.masks_at[-1]]
        if self.masks.size < self.masks_at[-1]:
            raise malformed("masks are missing", num_bytes=data.size)
        self.octets_at = _edges(_BITS[self.masks])
        self.dense_at = _edges(self.width - self.sparse)
        rest = rest[self.masks.size :]
        num_octets = int(self.octets_at[-1])
        if rest.size != num_octets + 8 * int(self.dense_at[-1]):
            raise malformed("wrong length", num_bytes=data.size)
        self.octets = rest[:num_octets]
        self.dense = rest[num_octets:]


def _edges(counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[0, counts[0], counts[0] + counts[1], ...]"""
    return np.concatenate(([0], np.cumsum(counts)))


def _read(parts: _Parts, first: int, last: int) -> torch.Tensor:
    """The numbers of blocks [first, last): int16 or int64 [n, 64]."""
    import torch

    width, sparse = parts.width[first:last], parts.sparse[first:last]
    num_planes = max(8 * -(-int(width.max()) // 8), 8)
    octets = np.zeros((last - first, num_planes, 8), np.uint8)
    number = np.arange(num_planes)
    is_dense = number < (width - sparse)[:, None]
    dense = parts.dense[8 * parts.dense_at[first] : 8 * parts.dense_at[last]]
    octets[is_dense] = dense.reshape(-1, 8)
    begin, end = parts.masks_at[first], parts.masks_at[last]
    bits = np.unpackbits(parts.masks[begin:end], bitorder="little").reshape(-1, 8).astype(bool)
    found = np.zeros(bits.shape, np.uint8)
    found[bits] = parts.octets[parts.octets_at[begin] : parts.octets_at[end]]
    octets[(number < width[:, None]) & ~is_dense] = found
    planes = torch.from_numpy(octets).view(-1, num_planes * 8).view(torch.int64)
    octet = _turned_back(planes[:, :8])
    if num_planes == 8:  # most are
        short = octet.to(torch.int16)
        return short >> 1 ^ -(short & 1)
    zigzag = octet.to(torch.int64)
    for low in range(8, num_planes, 8):
        zigzag |= _turned_back(planes[:, low : low + 8]).to(torch.int64) << low
    # Half, as unsigned numbers; the lowest bit is the sign.
    return (zigzag >> 1 & 0x7FFFFFFFFFFFFFFF) ^ -(zigzag & 1)


def _turned(numbers: torch.Tensor, low: int) -> torch.Tensor:
    """Bits low to low + 7 of integers [n, 64] as planes int64 [n, 8]: bit k of word p is bit low + p of number k."""
    import torch

    size = numbers.element_size()
    octets = numbers.contiguous().view(torch.uint8).view(-1, BLOCK, size)[:, :, low // 8].contiguous()
    words = _flip(octets.view(torch.int64))
    return words.view(torch.uint8).view(-1, 8, 8).transpose(1, 2).contiguous().view(-1, BLOCK).view(torch.int64)


def _turned_back(planes: torch.Tensor) -> torch.Tensor:
    """The inverse of `_turned`: uint8 [n, 64]."""
    import torch

    octets = planes.contiguous().view(torch.uint8).view(-1, 8, 8).transpose(1, 2).contiguous().view(-1, BLOCK)
    return _flip(octets.view(torch.int64)).view(torch.uint8).view(-1, BLOCK)


def _masks(planes: torch.Tensor) -> torch.Tensor:
    """Which of each word's bytes are not zero: uint8, bit k of a mask for byte k."""
    import torch

    some = ((planes & 0x7F7F7F7F7F7F7F7F) + 0x7F7F7F7F7F7F7F7F | planes) >> 7 & 0x0101010101010101
    return (some * 0x0102040810204080 >> 56 & 0xFF).to(torch.uint8)  # bit 8 k comes to bit 56 + k


def _flip(words: torch.Tensor) -> torch.Tensor:
    """Each word seen as 8 bytes of 8 bits, turned about its diagonal."""
    for shift, mask in _TURNS:
        moved = (words ^ words >> shift) & mask
        words = words ^ moved ^ moved << shift
    return words
