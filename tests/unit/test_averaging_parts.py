"""Every element is reduced by exactly one member, whatever the sizes and bandwidths; the cut is the best."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.averaging.parts import LEAST_CHUNK, MOST_CHUNK, chunk_elements, chunks, parts, shares

BANDWIDTHS = st.lists(st.integers(0, 10**11), min_size=1, max_size=40)
KNOWN = st.lists(st.integers(1, 10**11), min_size=3, max_size=12)


BLOCKS = st.sampled_from([1, 2, 64, 256, 1 << 16])


@given(st.integers(0, 10_000), BANDWIDTHS, BLOCKS)
def test_every_element_has_one_reducer(num_elements: int, bandwidths: list[int], block: int) -> None:
    cut = parts(num_elements, bandwidths, block=block)
    assert len(cut) == len(bandwidths)
    assert [element for start, stop in cut for element in range(start, stop)] == list(range(num_elements))
    assert all(start % block == 0 for start, stop in cut if start < stop), "a codec's block has one reducer"


@given(st.integers(0, 100_000), st.integers(1, 40), st.integers(0, 1000), st.sampled_from([1, 64, 256]))
def test_equals_and_strangers_share_alike(num_elements: int, num_members: int, bandwidth: int, block: int) -> None:
    sizes = [stop - start for start, stop in parts(num_elements, [bandwidth] * num_members, block=block)]
    assert max(sizes) - min(sizes) <= (2 * block if block > 1 else 1)


@given(st.integers(0, 1 << 20), st.lists(st.integers(1, 10**6), min_size=3, max_size=8), BLOCKS)
def test_who_is_too_slow_to_reduce_gets_no_rest_either(num_elements: int, bandwidths: list[int], block: int) -> None:
    cut = parts(num_elements, bandwidths, block=block)
    assert all(start == stop for (start, stop), share in zip(cut, shares(bandwidths), strict=True) if not share)


def seconds(bandwidths: list[int], cut: list[Fraction]) -> Fraction:
    """Of the slowest member, for one vector."""
    n = len(bandwidths)
    return max((1 + (n - 2) * share) / bandwidth for share, bandwidth in zip(cut, bandwidths, strict=True))


@given(KNOWN)
def test_whoever_reduces_something_needs_the_same_time(bandwidths: list[int]) -> None:
    cut = shares(bandwidths)
    assert sum(cut) == 1 and min(cut) >= 0
    n = len(bandwidths)
    times = {(1 + (n - 2) * share) / bandwidth for share, bandwidth in zip(cut, bandwidths, strict=True) if share}
    assert len(times) == 1, "taking from one would only burden another"


@given(KNOWN, st.data())
def test_no_other_cut_is_faster(bandwidths: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(0, 100), min_size=len(bandwidths), max_size=len(bandwidths)))
    total = sum(weights) or 1
    other = [Fraction(weight, total) for weight in weights] if sum(weights) else shares([1] * len(bandwidths))
    assert seconds(bandwidths, shares(bandwidths)) <= seconds(bandwidths, other)


def test_a_member_on_a_slow_line_reduces_less_or_nothing() -> None:
    fast, slow = shares([100, 100, 100, 80])[0], shares([100, 100, 100, 80])[3]
    assert fast > slow > 0
    assert shares([100, 100, 100, 1])[3] == 0


@given(st.integers(0, 1 << 22), st.integers(0, 1 << 24), st.integers(LEAST_CHUNK, MOST_CHUNK))
def test_chunks_are_even_cover_a_part_once_and_cut_no_block(start: int, length: int, size: int) -> None:
    cut = chunks(start, start + length, size)
    assert [cut[0][0], *(stop for _, stop in cut)] == [*(begin for begin, _ in cut), start + length]
    assert all(stop % LEAST_CHUNK == 0 for _, stop in cut[:-1])
    sizes = [stop - begin for begin, stop in cut]
    assert max(sizes) <= min(1.5 * size, MOST_CHUNK) + LEAST_CHUNK
    assert min(sizes) > 0 or not length
    if length >= size >= 4 * LEAST_CHUNK:
        assert min(sizes) >= size / 2, "no remainder is a chunk of its own"


def test_a_slow_line_takes_equal_seconds_for_a_chunk_of_any_codec() -> None:
    sizes = {each: chunk_elements(10**9, 4, each, [10**7, 0, 10**9]) for each in (0.5, 1.0, 4.0, 8.0)}
    assert sizes[1.0] == 4 * sizes[4.0] == 400_000
    assert (sizes[0.5], sizes[8.0]) == (800_000, LEAST_CHUNK)


@given(st.integers(0, 10**11), st.integers(1, 1000), st.floats(0.1, 9.0), BANDWIDTHS)
def test_several_chunks_make_a_part(
    num_elements: int, num_members: int, element_bytes: float, bandwidths: list[int]
) -> None:
    size = chunk_elements(num_elements, num_members, element_bytes, bandwidths)
    assert LEAST_CHUNK <= size <= MOST_CHUNK
    assert size <= chunk_elements(num_elements, num_members, element_bytes), (
        "slow lines make chunks smaller, never larger"
    )
    if size > LEAST_CHUNK:
        assert len(chunks(0, num_elements // num_members, size)) >= 2


def test_of_two_a_member_that_should_reduce_nothing_reduces_nothing() -> None:
    assert shares([4, 1]) == [1, 0] and shares([1, 4]) == [0, 1], "as a newcomer's and a relayed member's is named"
    assert shares([3, 1]) == [Fraction(1, 2)] * 2, "they move the same bytes however it is cut"
