"""The sampler: every window once an epoch, in a new order each time, and never a token of the evaluation part."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from swarmnet.data.sampler import Sampler, permute
from swarmnet.errors import UsageError

sizes = st.tuples(st.integers(0, 2**64), st.integers(2, 4000), st.integers(1, 70), st.integers(1, 6))


def make(sizes: tuple[int, int, int, int]) -> Sampler:
    try:
        return Sampler(*sizes)
    except UsageError:
        assume(False)
        raise


@given(size=st.integers(1, 300), key=st.binary(min_size=1, max_size=64))
def test_a_permutation_hits_every_place_once(size, key):
    assert sorted(permute(place, size, key) for place in range(size)) == list(range(size))


@given(size=st.integers(1, 2**62), place=st.integers(0, 2**62), key=st.binary(min_size=1, max_size=64))
def test_a_permutation_of_a_huge_range_stays_inside(size, place, key):
    assert 0 <= permute(place % size, size, key) < size


@given(sizes=sizes, epoch=st.integers(0, 3))
def test_an_epoch_visits_every_training_window_once(sizes, epoch):
    sampler = make(sizes)
    length, width, count = sampler.sequence_length, sampler.microbatch_size, sampler.num_windows
    first = epoch * count
    starts = itertools.chain.from_iterable(
        sampler.positions(index) for index in range(first // width, (first + count - 1) // width + 1)
    )
    epoch_starts = list(itertools.islice(starts, first % width, first % width + count))
    assert sorted(epoch_starts) == [window * length for window in range(count)]


@given(sizes=sizes, index=st.integers(0, 10**12))
def test_training_and_evaluation_share_no_token(sizes, index):
    sampler = make(sizes)
    length = sampler.sequence_length
    training, held_out = sampler.positions(index), sampler.eval_positions(index)
    assert len(training) == len(held_out) == sampler.microbatch_size
    assert all(start >= 0 and start + length + 1 <= sampler.eval_start for start in training)
    assert all(sampler.eval_start <= start and start + length + 1 <= sizes[1] for start in held_out)


@given(sizes=sizes)
def test_the_reserved_part_is_one_percent_or_one_window_and_almost_no_token_is_wasted(sizes):
    sampler = make(sizes)
    _, num_tokens, length, _ = sizes
    assert num_tokens - sampler.eval_start == max(-(-num_tokens // 100), length + 1)
    assert sampler.eval_start - (sampler.num_windows * length + 1) < length
    assert sampler.num_eval_windows >= 1


def test_orders_differ_by_epoch_and_seed():
    width, epochs = 4, 3
    samplers = [Sampler(seed, 101_015, 100, width) for seed in (0, 1)]
    assert samplers[0].num_windows == 1000
    per_epoch = samplers[0].num_windows // width
    orders = {
        tuple(sampler.positions(i) for i in range(epoch * per_epoch, (epoch + 1) * per_epoch))
        for sampler in samplers
        for epoch in range(epochs)
    }
    assert len(orders) == len(samplers) * epochs


def test_an_order_looks_shuffled():
    """Neighbours in the order are far apart and about half of them go up: no run of the file is read in sequence."""
    sampler = Sampler(7, 1_000_000, 100, 1)
    order = [sampler.positions(i)[0] // 100 for i in range(2000)]
    jumps = [abs(a - b) for a, b in itertools.pairwise(order)]
    assert 0.28 < sum(jumps) / len(jumps) / sampler.num_windows < 0.38  # a uniform pair: one third
    assert 0.45 < sum(a < b for a, b in itertools.pairwise(order)) / len(jumps) < 0.55


def test_these_positions_never_change():
    """Runs in progress and golden curves depend on them."""
    sampler = Sampler(0, 100_000, 64, 4)
    assert sampler.eval_start == 99_000
    assert [sampler.positions(i) for i in (0, 1, 10**9)] == [
        (92416, 58496, 21568, 55680),
        (42496, 88064, 18176, 23872),
        (88576, 78656, 48000, 39552),
    ]
    assert sampler.eval_positions(0) == (99064, 99896, 99448, 99512)


@pytest.mark.parametrize("num_tokens", [0, 1, 64, 65, 130, 193 + 63])
def test_too_little_data_is_refused_with_advice(num_tokens):
    with pytest.raises(UsageError, match="use more text, or lower training"):
        Sampler(0, num_tokens, 64, 3)


def test_the_smallest_data_that_does():
    sampler = Sampler(0, 3 * 64 + 1 + 65, 64, 3)
    assert sorted(sampler.positions(5)) == [0, 64, 128] and set(sampler.eval_positions(5)) == {193}


def test_a_negative_index_is_our_own_bug():
    with pytest.raises(ValueError, match="negative"):
        Sampler(0, 10_000, 64, 3).positions(-1)


@given(sizes=sizes, index=st.integers(0, 10**6))
def test_the_order_is_the_one_that_the_docs_tell(sizes, index):
    page = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
    told: dict[str, object] = {}
    exec(next(part for part in page.split("```python\n") if "def window(" in part).partition("```")[0], told)
    sampler, seed = make(sizes), sizes[0]
    places = [divmod(index * sampler.microbatch_size + b, sampler.num_windows) for b in range(sampler.microbatch_size)]
    assert sampler.windows(index) == tuple(
        told["window"](seed, epoch, place, sampler.num_windows) for epoch, place in places
    )
