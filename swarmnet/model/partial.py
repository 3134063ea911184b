"""Sums of what tensor ranks have as terms: norms under sequence parallelism, key and value heads on several ranks.

Works on whole slices (`ShardedStage.reduce_partial`) and on the same rows of them on every rank alike, on fp32 and on
the grid of integers. Every rank gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from swarmnet.model.comm import Comm
from swarmnet.model.slices import TensorSplit


def sum_terms(parts: Sequence[Tensor], names: Sequence[str], split: TensorSplit, comm: Comm) -> list[Tensor]:
    """`parts`, with the sum over the ranks that hold the same elements in place of what is partial.

    parts: all of one dtype, of parameters `names`, what this rank holds of each or the same rows of that on all ranks.
    One all-reduce, or none if nothing is partial. Every rank calls it at the same place among its collectives.
    """
    summed, spans, size = list(parts), [], 0
    for place, name in enumerate(names):
        if split.slice_of(name, comm.rank).partial and parts[place].numel():
            number, count = _group(name, split, comm.rank)
            spans.append((place, size + number * parts[place].numel()))
            size += count * parts[place].numel()
    if not spans:
        return summed
    flat = parts[spans[0][0]].new_zeros(size)
    for place, start in spans:
        flat[start : start + parts[place].numel()] = parts[place].reshape(-1)
    flat = comm.all_reduce(flat)
    for place, start in spans:
        summed[place] = flat[start : start + parts[place].numel()].view(parts[place].shape)
    return summed


def _group(name: str, split: TensorSplit, rank: int) -> tuple[int, int]:
    """Of the sets of ranks that hold the same elements: the number of `rank`'s, and how many there are."""
    starts = sorted({split.slice_of(name, other).start for other in range(split.ranks)})
    return starts.index(split.slice_of(name, rank).start), len(starts)
