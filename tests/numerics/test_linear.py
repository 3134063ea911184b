"""Products of sums: exact, the same however a sum is cut, and those of a forged sum are never its contributions'."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.messages import PRIME
from swarmnet.stage.rounding import MAX_SUM
from swarmnet.sums import linear
from swarmnet.wire import kernels

NUMBERS = st.integers(-MAX_SUM, MAX_SUM) | st.integers(-40, 40) | st.sampled_from([-(2**63), 2**63 - 1])


@given(st.lists(NUMBERS, max_size=40), st.sampled_from([0, 1, 1000, 1023, 1024, 5000]), st.binary(max_size=8))
def test_a_product_is_that_of_whole_numbers(numbers: list[int], start: int, seed: bytes) -> None:
    vector = linear.drawn(seed, start + len(numbers))
    rows, columns = vector.rows.tolist(), vector.columns.tolist()
    assert all(0 <= each < PRIME for each in (*rows, *columns))
    expected = sum(x * rows[at // 1024] * columns[at % 1024] for at, x in enumerate(numbers, start)) % PRIME
    with kernels.tried(None):
        assert vector.product(torch.tensor(numbers, dtype=torch.int64), start) == expected


@given(st.integers(0, 5000), st.lists(st.integers(0, 5000), max_size=4), st.integers(0, 2**32))
def test_it_is_the_same_however_the_sum_is_cut_and_shared(size: int, cuts: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    shares = torch.from_numpy(random.integers(-(2**57), 2**57, (3, size)))
    whole, vector = shares.sum(0), linear.drawn(bytes(8), size)
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    with kernels.tried(None):
        parts = [vector.product(whole[a:b], a) for a, b in itertools.pairwise(edges)]
        product = vector.product(whole)
        assert sum(parts) % PRIME == product == sum(map(vector.product, shares)) % PRIME


def test_of_a_million_forged_parts_none_passes() -> None:
    """Each differs from the true sum: in one place by little, in one bit, in two places that add up to nothing, in some
    or in all. Passing means that the difference has the product 0."""
    size, draws, each, random = 64, 1000, 200, np.random.default_rng(5)
    passed = forged = 0
    for number in range(draws):
        vector = linear.drawn(number.to_bytes(4, "little"), size)
        r_N = linear.times(vector.columns.numpy()[:size].astype(np.uint64), np.uint64(vector.rows[0].item()))
        errors = np.zeros((5, each, size), np.int64)
        at, other = random.integers(0, size // 2, each), random.integers(size // 2, size, each)
        one = np.arange(each)
        errors[0, one, at] = random.choice([-2, -1, 1, 2], each)
        errors[1, one, at] = 1 << random.integers(0, 60, each)
        errors[2, one, at] = random.integers(1, 2 * MAX_SUM, each)
        errors[2, one, other] = -errors[2, one, at]
        errors[3] = np.where(random.random((each, size)) < 0.2, random.integers(-9, 10, (each, size)), 0)
        errors[3, one, at] += 100
        errors[4] = random.integers(-2 * MAX_SUM, 2 * MAX_SUM, (each, size), endpoint=True)
        errors_MN = errors.reshape(-1, size)
        assert errors_MN.any(1).all()
        weighed = linear.times((errors_MN % PRIME).astype(np.uint64), r_N)
        low, high = (weighed & np.uint64(2**32 - 1)).sum(1), (weighed >> np.uint64(32)).sum(1)
        products = (low + linear.times(high, np.uint64(2**32))) % np.uint64(PRIME)
        passed, forged = passed + int((products == 0).sum()), forged + len(products)
        if number == 0:  # the same numbers as the product itself has
            with kernels.tried(None):
                told = [vector.product(torch.from_numpy(row)) for row in errors_MN[::100]]
            assert told == [int(product) for product in products[::100]]
    assert (passed, forged) == (0, 10**6)


def test_what_a_product_cannot_see_is_out_of_range() -> None:
    total = torch.tensor([-MAX_SUM, 5])
    forged = total + torch.tensor([PRIME, 0])
    vector = linear.drawn(b"", 2)
    with kernels.tried(None):
        assert vector.product(total) == vector.product(forged)
    assert forged[0] > MAX_SUM and 2 * MAX_SUM < PRIME
