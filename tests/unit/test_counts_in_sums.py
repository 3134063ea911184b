"""Counts behind a gradient, such as the tokens of each expert, are summed and checked with it."""

from __future__ import annotations

import itertools

import torch

from swarmnet.ids import PeerId
from swarmnet.messages import PRIME
from swarmnet.stage.interfaces import Contribution
from swarmnet.stage.rounding import MAX_SUM
from swarmnet.sums.linear import drawn
from swarmnet.sums.reducer import integer_sum
from swarmnet.wire import codecs


def test_counts_are_exact_in_any_order_and_grouping_and_no_count_can_be_changed() -> None:
    gradients, counts = torch.arange(-600, 600).view(3, 400), torch.tensor([[4096, 0], [1, 1 << 20], [7, 4095]])
    vectors = torch.cat([gradients, counts], dim=1)
    members = [Contribution(PeerId(f"{place}"), 1, codecs.encode("small", each)) for place, each in enumerate(vectors)]
    size, vector = vectors.shape[1], drawn(b"seed", vectors.shape[1])
    for one, two, three in itertools.permutations(members):
        pair = codecs.encode("small", integer_sum([one, two], size, most=lambda n: MAX_SUM))
        grouped = [Contribution(PeerId("pair"), 2, pair), three]
        total = integer_sum(grouped, size, most=lambda n: MAX_SUM)
        assert total.tolist() == vectors.sum(0).tolist()
    assert vector.product(total) == sum(map(vector.product, vectors)) % PRIME
    total[-1] += 1
    assert vector.product(total) != sum(map(vector.product, vectors)) % PRIME
