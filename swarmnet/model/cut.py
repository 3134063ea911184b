"""Which layers each stage holds: contiguous ranges, balanced by FLOPs, the head included.

Decides only the cut. All arithmetic is on integers, so every peer of a run finds the same one. A pipeline runs at the
pace of its slowest stage, hence the maximum stage cost is minimised exactly; among the cuts that reach the minimum the
one with the smallest sum of squared costs is taken, which evens out the other stages too.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from swarmnet.manifest.schema import Cut, Model


def layer_flops(model: Model, sequence_length: int) -> int:
    """Forward FLOPs per token of one decoder layer: matrix products, and causal attention over half the sequence."""
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    projections = model.hidden_size * (2 * query + 2 * key_value)
    mlp = 3 * model.hidden_size * model.intermediate_size
    return 2 * (projections + mlp) + 2 * sequence_length * query


def head_flops(model: Model) -> int:
    """Forward FLOPs per token of the output matrix. The embedding is a table look-up and costs none."""
    return 2 * model.hidden_size * model.vocab_size


def cut_layers(model: Model, cut: Cut, sequence_length: int) -> tuple[range, ...]:
    """The layers of each stage, in order: every layer exactly once.

    An explicit list may give a stage no layers (only the embedding, or only norm and head); "auto" never does.
    """
    if cut.layers == "auto":
        costs = [layer_flops(model, sequence_length)] * model.num_layers
        costs[-1] += head_flops(model)  # the head is in the last layer's stage, whichever that is
        return balance(costs, cut.stages)
    ranges, start = [], 0
    for length in cut.layers:
        ranges.append(range(start, start + length))
        start += length
    return tuple(ranges)


def balance(costs: Sequence[int], parts: int) -> tuple[range, ...]:
    """Cut `costs` into `parts` contiguous, non-empty ranges: least maximum, then least sum of squares.

    Exact: bisection, then dynamic programming, O(len(costs)^2 parts). Ties go to shorter early ranges. Raises
    ValueError if there are fewer costs than parts.
    """
    if not 1 <= parts <= len(costs):
        raise ValueError(f"cannot cut {len(costs)} layers into {parts} stages with a layer each")
    prefix = [0, *itertools.accumulate(costs)]
    # the smallest cost that no range has to exceed: a cut into fewer ranges can be cut once more
    limit = bisect.bisect_left(range(prefix[-1] + 1), True, key=lambda most: _ranges_below(costs, most) <= parts)
    return _least_squares(prefix, parts, limit)


def _ranges_below(costs: Sequence[int], most: int) -> float:
    """Into how many ranges of at most `most` these costs can be cut; infinity if one of them alone is more."""
    # No cut makes a single layer cheaper.
    if max(costs) > most:
        return math.inf
    ranges, filled = 1, 0
    for cost in costs:
        ranges, filled = (ranges, filled + cost) if filled + cost <= most else (ranges + 1, cost)
    return ranges


def _least_squares(prefix: Sequence[int], parts: int, limit: int) -> tuple[range, ...]:
    """Of the cuts with ranges that all cost at most `limit`, the one with the least sum of squares."""
    total = len(prefix) - 1
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}  # stop -> (sum of squares, edges)
    for _ in range(parts):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (squares, edges) in best.items():
            for stop in range(start + 1, total + 1):
                cost = prefix[stop] - prefix[start]
                if cost > limit:  # and so are all longer ranges
                    break
                candidate = (squares + cost * cost, (*edges, stop))
                # Tuples compare edges last: ties go to shorter early ranges, on every peer alike.
                if stop not in longer or candidate < longer[stop]:
                    longer[stop] = candidate
        best = longer
    edges = best[total][1]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(edges))
