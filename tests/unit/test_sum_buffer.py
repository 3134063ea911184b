"""A sum has one digest, however it was cut in whatever order its pieces came; those that do not fit are refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import BadMessage
from swarmnet.sums import sum_buffer
from swarmnet.sums.sum_buffer import SumBuffer

BLOCK = 8


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> object:
    patch = pytest.MonkeyPatch()
    patch.setattr(sum_buffer, "BLOCK_ELEMENTS", BLOCK)
    yield
    patch.undo()


def a_buffer(size: int, dtype: torch.dtype = torch.float32) -> SumBuffer:
    buffer = SumBuffer(torch.zeros(size, dtype=dtype))
    buffer.open()
    return buffer


def put(buffer: SumBuffer, values: torch.Tensor, start: int, stop: int) -> None:
    buffer.slot(start, stop - start).copy_(values[start:stop])
    buffer.written(start, stop - start)


@given(st.integers(0, 60), st.data())
def test_the_digest_is_a_function_of_the_sum(size: int, data: st.DataObject) -> None:
    values = torch.arange(size, dtype=torch.float32)
    inner = data.draw(st.lists(st.integers(0, size), max_size=9))
    spans = data.draw(st.permutations(list(itertools.pairwise([0, *sorted(inner), size]))))
    buffer = a_buffer(size)
    for start, stop in spans:
        if start < stop:
            put(buffer, values, start, stop)
    blocks = [blake3(piece.numpy().tobytes()).digest() for piece in torch.split(values, BLOCK) if size]
    assert buffer.seal() == blake3(b"".join(blocks)).digest()
    assert torch.equal(buffer.flat, values)


def test_integers_have_a_digest_of_their_own_whatever_their_length() -> None:
    found = set()
    for last in (-(2**63), -(2**15) - 1, -(2**15), -1, 0, 2**15 - 1, 2**15, 2**16, 2**63 - 1):
        buffer = a_buffer(20, torch.int64)
        put(buffer, torch.tensor([*range(19), last]), 0, 20)
        found.add(buffer.seal())
    assert len(found) == 9


@pytest.mark.parametrize(
    "spans", [[], [(0, 10)], [(1, 20)], [(0, 8), (9, 20)]], ids=["nothing", "a start", "an end", "a gap"]
)
def test_a_sum_that_is_not_whole_is_not_sealed(spans: list[tuple[int, int]]) -> None:
    buffer = a_buffer(20)
    for start, stop in spans:
        put(buffer, torch.ones(20), start, stop)
    with pytest.raises(BadMessage):
        buffer.seal()


@pytest.mark.parametrize(
    ("start", "size"), [(-1, 2), (19, 2), (0, 21), (4, 4), (4, 2), (5, 2), (0, 20), (2, 3), (7, 2)]
)
def test_a_piece_outside_or_one_that_overlaps_another_is_refused(start: int, size: int) -> None:
    buffer = a_buffer(20)
    put(buffer, torch.ones(20), 12, 16)
    put(buffer, torch.ones(20), 4, 8)
    with pytest.raises(BadMessage):
        buffer.slot(start, size)
    for begin, end in ((8, 12), (0, 4), (16, 20)):
        assert not buffer.is_whole
        put(buffer, torch.ones(20), begin, end)
    assert buffer.is_whole


def test_another_sum_begins_with_nothing() -> None:
    buffer = a_buffer(20)
    put(buffer, torch.ones(20), 0, 20)
    first = buffer.seal()
    buffer.open()
    with pytest.raises(BadMessage):
        buffer.seal()
    put(buffer, torch.ones(20), 0, 20)
    assert buffer.seal() == first
