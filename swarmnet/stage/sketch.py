"""What a stage's weights are like in a few dozen numbers: a CountSketch, and a digest (docs/drift.md).

Every weight is added, with a sign, to one of `WIDTH` sums; signs and places are drawn from a seed that all replicas
share. The sketch is linear, so the distance of two sketches estimates the distance of the weights: the square of it is
unbiased, and off by more than a share e with a probability of at most 2 / (WIDTH e^2) over the seeds (Charikar et al.,
2002; Thorup and Zhang, 2004). The distance itself is usually right within a tenth.

Places and signs come from SHAKE-256 and integers only, so every device and every release of torch draws the same. One
table of places and one of signs, `BLOCK` entries each, serve all blocks of the weights; each block is turned against
both by amounts of its own. That costs O(n), and no memory of the weights' size. Knows no replicas, and not what the
distance is good for.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

WIDTH = 64
"""Numbers of a sketch."""

BLOCK = 1 << 16
"""Weights that are placed at a time."""


class Sketcher:
    """Sketches of vectors under one seed. Equal seeds give comparable sketches, on whatever device."""

    def __init__(self, seed: int, *, device: torch.device | str = "cpu") -> None:
        drawn = np.frombuffer(hashlib.shake_256(f"swarmnet sketch {seed}".encode()).digest(8 * BLOCK), dtype="<u8")
        order = np.argsort(drawn >> np.uint64(1), kind="stable")
        signs = 1.0 - 2.0 * (drawn[order] & np.uint64(1)).astype(np.float32)
        self._seed, self._device = seed, torch.device(device)
        self._order = torch.from_numpy(order.astype(np.int64)).to(device)
        self._signs = torch.from_numpy(np.concatenate([signs, signs])).to(device)

    @torch.no_grad()
    def sketch(self, tensors: Iterable[Tensor]) -> tuple[float, ...]:
        """The sketch of all elements of these fp32 tensors, in order: fp32 numbers; () if they are not all finite.

        Costs one pass; the tensors stay as they are.
        """
        sums = torch.zeros(WIDTH, dtype=torch.float64, device=self._device)
        block = torch.empty(BLOCK, dtype=torch.float32, device=self._device)
        number = 0
        for tensor in tensors:
            for piece in torch.split(tensor.detach().reshape(-1), BLOCK):
                turn, start = self._turns(number)
                self._lay(piece, block, turn)
                placed = block[self._order].mul_(self._signs[start : start + BLOCK]).view(WIDTH, -1)
                sums.add_(placed.sum(1, dtype=torch.float64))
                number += 1
        numbers = sums.float()
        return tuple(numbers.tolist()) if bool(numbers.isfinite().all()) else ()

    @staticmethod
    def _lay(piece: Tensor, block: Tensor, turn: int) -> None:
        """block[(turn + i) % BLOCK] = piece[i], and zeros elsewhere."""
        size = piece.numel()
        if size < BLOCK:
            block.zero_()
        front = min(size, BLOCK - turn)
        block[turn : turn + front] = piece[:front]
        block[: size - front] = piece[front:]

    def _turns(self, number: int) -> tuple[int, int]:
        """By how much a block is turned against the table of places, and then against that of signs."""
        drawn = hashlib.sha256(f"{self._seed}/{number}".encode()).digest()
        return int.from_bytes(drawn[:4], "big") % BLOCK, int.from_bytes(drawn[4:8], "big") % BLOCK


def digest(tensors: Iterable[Tensor]) -> bytes:
    """SHA-256 over the SHA-256 of each fp32 tensor: equal if and only if all bits are."""
    whole = hashlib.sha256()
    for tensor in tensors:
        bits = tensor.detach().contiguous().to("cpu").reshape(-1).view(torch.uint8)
        whole.update(hashlib.sha256(bits.numpy().data).digest())
    return whole.digest()


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Estimate of the L2 distance of what two sketches under one seed were made of."""
    return math.dist(one, other)
