"""A finished sum travels in pieces that cover it once."""

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.averaging.exchange import pieces


@given(st.integers(0, 1000), st.integers(0, 5000), st.integers(1, 700))
def test_pieces_cover_a_part_once(start: int, length: int, size: int) -> None:
    cut = pieces(start, start + length, size)
    assert cut and all(stop - begin <= size for begin, stop in cut)
    assert [element for begin, stop in cut for element in range(begin, stop)] == list(range(start, start + length))
