"""Which codec each part of a sum travels under when the manifest says `auto`: by what a tensor is, and how large.

Matrices are nearly all of the bytes and bear rounding well; norms and biases are few, scale whole layers, and are sent
as they are. So is a matrix too small to be worth a thought. A function of names and shapes alone: every replica chooses
alike. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

SMALL = 4096
"""Elements below which a tensor travels in fp32. Also keeps runs few: see `wire.codec_mixed`."""

EXACT = "fp32"

Parameter = tuple[str, tuple[int, ...]]
"""(name, shape)"""


def choose(name: str, shape: Sequence[int], *, matrices: str) -> str:
    """The codec of one tensor; `matrices` for large matrices, which are not a norm's or a bias's by name either."""
    vector = len(shape) < 2 or name.endswith(".bias") or "norm" in name.rpartition(".")[0].rpartition(".")[2]
    return EXACT if vector or math.prod(shape) < SMALL else matrices


def runs(
    parameters: Sequence[Parameter], start: int, stop: int, *, matrices: str, block: int = 1
) -> list[tuple[str, int]]:
    """(codec, number of elements) along elements [start, stop) of the flat gradient; none is empty.

    parameters: all of the stage's, in canonical order. block: of the codec of matrices. What travels under it is cut
    once more at the first multiple of `block`, from where its blocks are the same wherever a piece begins.
    """
    pieces: list[tuple[str, int]] = []
    edge = 0
    for name, shape in parameters:
        begin, edge = edge, edge + math.prod(shape)
        size = min(edge, stop) - max(begin, start)
        if size > 0:
            pieces.append((choose(name, shape, matrices=matrices), size))
    found: list[tuple[str, int]] = []
    for codec, group in itertools.groupby(pieces, key=lambda piece: piece[0]):
        size = sum(size for _, size in group)
        before = min(size, -start % block) if codec == matrices else 0
        found += [(codec, each) for each in (before, size - before) if each]
        start += size
    return found
