"""Every element of a gradient is reduced by exactly one member, whatever the sizes."""

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.averaging.exchange import even_parts, pieces


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_every_element_has_one_reducer(num_elements: int, num_members: int) -> None:
    parts = even_parts(num_elements, num_members)
    assert len(parts) == num_members
    assert [element for start, stop in parts for element in range(start, stop)] == list(range(num_elements))
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 1000), st.integers(0, 5000), st.integers(1, 700))
def test_pieces_cover_a_part_once(start: int, length: int, size: int) -> None:
    cut = pieces(start, start + length, size)
    assert cut and all(stop - begin <= size for begin, stop in cut)
    assert [element for begin, stop in cut for element in range(begin, stop)] == list(range(start, start + length))
