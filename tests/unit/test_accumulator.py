"""The accumulator: exact at any order, whole or discard, checked before the first element is added."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.bounds import MAX_INDEXES
from swarmnet.errors import BadMessage, Overflow, Refused, RejectCode
from swarmnet.manifest.schema import Numerics
from swarmnet.stage.accumulator import Accumulator, largest_magnitude, sum_dtype
from swarmnet.stage.optimizer import average, square_norm
from swarmnet.stage.rounding import LIMIT, MAX_MAGNITUDE, MAX_SUM, FineRounding, NoRounding, Rectangle, SmallRounding

CPU = torch.device("cpu")
EXACT, FLOAT = Numerics(mode="deterministic", grid_bits=20), Numerics(mode="fp32")


class Summed:
    """An accumulator, and how its gradients are rounded."""

    def __init__(self, elements: int, numerics: Numerics, microbatches: int) -> None:
        exact = numerics.mode == "deterministic"
        self.held = Accumulator(elements, dtype=sum_dtype(numerics), device=CPU)
        self.rounding = FineRounding(numerics.grid_bits, microbatches) if exact else NoRounding()

    def add(self, gradients: list[torch.Tensor], **facts: int) -> bool:
        return self.held.add(gradients, self.rounding, **facts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.held, name)


def accumulator(elements: int = 3, numerics: Numerics = EXACT, *, microbatches: int = 8) -> Summed:
    return Summed(elements, numerics, microbatches)


def gradient(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(values, dtype=torch.float32)]


finite = st.floats(-1e6, 1e6, width=32)


rows_of_three = st.lists(st.lists(finite, min_size=3, max_size=3), min_size=1, max_size=8)


@given(rows_of_three, st.integers(0, 2**32), st.integers(1, 3))
def test_the_fixed_point_sum_is_that_of_rounded_terms_in_any_order_and_grouping(
    rows: list[list[float]], seed: int, groups: int
) -> None:
    rng = random.Random(seed)
    order = list(range(len(rows)))
    rng.shuffle(order)
    members = [accumulator() for _ in range(groups)]
    for index in order:
        assert rng.choice(members).add(gradient(*rows[index]), step=0, index=index, discards=0)
    total = sum((member.read(0) for member in members), start=torch.zeros(3, dtype=torch.int64))
    assert total.tolist() == [sum(round(row[column] * 2**20) for row in rows) for column in range(3)]


@pytest.mark.parametrize("numerics", [EXACT, FLOAT])
def test_an_index_is_added_once(numerics: Numerics) -> None:
    acc = accumulator(1, numerics)
    assert acc.add(gradient(1.0), step=0, index=4, discards=0)
    before = acc.read(0).clone()
    assert not acc.add(gradient(1.0), step=0, index=4, discards=0)
    assert torch.equal(acc.read(0), before)


def test_a_gradient_that_a_sum_of_many_could_overflow_with_is_not_finite_either() -> None:
    acc = accumulator(1, FLOAT)
    assert acc.add(gradient(MAX_MAGNITUDE), step=0, index=0, discards=0)
    with pytest.raises(BadMessage) as caught:
        acc.add(gradient(-2 * MAX_MAGNITUDE), step=0, index=1, discards=0)
    assert caught.value.code is RejectCode.NON_FINITE
    assert acc.read(0).tolist() == [MAX_MAGNITUDE]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("numerics", [EXACT, FLOAT])
def test_a_non_finite_gradient_leaves_no_trace(numerics: Numerics, bad: float) -> None:
    acc = accumulator(4, numerics)
    acc.add([torch.ones(2), torch.ones(2)], step=0, index=0, discards=0)
    before = acc.read(0).clone()
    with pytest.raises(BadMessage) as caught:
        acc.add([torch.ones(2), torch.tensor([1.0, bad])], step=0, index=1, discards=0)
    assert caught.value.code is RejectCode.NON_FINITE
    assert torch.equal(acc.read(0), before)
    assert acc.add([torch.ones(2), torch.ones(2)], step=0, index=1, discards=0), "the index was not counted"


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_overflow_is_refused_for_one_microbatch_and_so_cannot_happen_to_a_sum(sign: float) -> None:
    acc = accumulator(1, microbatches=8)
    largest = sign * MAX_SUM / 8 / 2**20
    with pytest.raises(Overflow):
        acc.add(gradient(largest * 1.001), step=0, index=0, discards=0)
    assert acc.read(0).tolist() == [0]
    for index in range(8):
        assert acc.add(gradient(largest), step=0, index=index, discards=0)
    assert acc.read(0).tolist() == [sign * MAX_SUM]


def test_discarded_work_adds_nothing_and_new_work_starts_from_zero() -> None:
    acc = accumulator(1, FLOAT)
    acc.add(gradient(5.0), step=0, index=0, discards=0)
    acc.discard()
    assert acc.discards == 1
    assert not acc.add(gradient(7.0), step=0, index=1, discards=0), "its work began before the discard"
    assert acc.read(0).tolist() == [0.0]
    assert acc.add(gradient(3.0), step=0, index=0, discards=1)
    assert not acc.add(gradient(7.0), step=0, index=2, discards=0), "late, and it must not touch the new content"
    assert acc.read(0).tolist() == [3.0]
    assert acc.add(gradient(1.0), step=0, index=1, discards=1)
    assert acc.read(0).tolist() == [4.0]


def test_another_step_starts_from_zero() -> None:
    acc = accumulator(1, FLOAT)
    acc.add(gradient(5.0), step=0, index=0, discards=0)
    assert acc.read(1).tolist() == [0.0]
    assert acc.add(gradient(2.0), step=1, index=0, discards=0)
    assert acc.read(1).tolist() == [2.0]


def test_a_discard_during_an_addition_neither_waits_for_it_nor_lets_it_count() -> None:
    """A gradient whose second tensor discards when it is first touched by the addition, after all checks."""
    acc = accumulator(2, FLOAT)
    discarded_at: list[bool] = []

    class Interrupting(torch.Tensor):
        def view(self, *shape: int) -> torch.Tensor:  # type: ignore[override]
            thread = threading.Thread(target=acc.discard)
            thread.start()
            thread.join(timeout=10)
            discarded_at.append(not thread.is_alive())
            return torch.ones(1)

    second = torch.ones(1).as_subclass(Interrupting)
    assert not acc.add([torch.ones(1), second], step=0, index=0, discards=0)
    assert discarded_at == [True]
    assert acc.read(0).tolist() == [0.0, 0.0]


def test_gradients_of_another_size_are_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="2 elements"):
        accumulator(3).add([torch.ones(2)], step=0, index=0, discards=0)


def test_large_gradients_pass_in_chunks() -> None:
    values = torch.arange(200_001, dtype=torch.float32) - 100_000
    acc = accumulator(200_001)
    acc.add([values], step=0, index=0, discards=0)
    assert torch.equal(acc.read(0), (values.double() * 2**20).long())
    out = torch.empty(200_001)
    average(acc.read(0), out, scale=0.5, rounding=acc.rounding, place=0)
    assert torch.equal(out, values / 2)
    assert square_norm(acc.read(0), rounding=acc.rounding, place=0) == values.double().square().sum().item()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5))
def test_largest_magnitude_knows_the_most_negative_integer(values: list[int]) -> None:
    assert largest_magnitude([torch.tensor(values, dtype=torch.int64)]) == max(abs(value) for value in values)


def test_largest_magnitude_of_nothing_is_zero() -> None:
    assert largest_magnitude([torch.empty(0)]) == 0.0


def test_an_addition_that_breaks_off_loses_the_sum_until_it_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without memory leaves a part of a gradient in it."""
    total = accumulator()
    assert total.add(gradient(1, 2, 3), step=0, index=0, discards=0)
    with monkeypatch.context() as patch:
        patch.setattr(FineRounding, "add", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        with pytest.raises(torch.OutOfMemoryError):
            total.add(gradient(1, 2, 3), step=0, index=1, discards=0)
    assert total.lost and total.discards == 1
    with pytest.raises(Refused):
        total.read(0)
    total.discard()
    assert not total.read(0).any() and total.add(gradient(1, 2, 3), step=0, index=1, discards=2)


# ---------------------------------------------------------------- in int32 while it is small

LARGE = 5000.0
"""Beyond what one microbatch may add."""


def small(elements: int) -> SmallRounding:
    rectangle = Rectangle.whole("weight", (elements,))
    return SmallRounding([rectangle], [torch.ones(1), torch.ones(elements)], step=3)


def small_sums(terms: list[torch.Tensor], *, read_after: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """What an accumulator makes of them, and what int64 does."""
    rounding, size = small(terms[0].numel()), terms[0].numel()
    held = Accumulator(size, dtype=torch.int64, device=CPU)
    expected = torch.zeros(size, dtype=torch.int64)
    for index, term in enumerate(terms):
        assert held.add([term], rounding, step=3, index=index, discards=0)
        rounding.add(expected, term, 0, index=index)
        if index == read_after:
            assert torch.equal(held.read(3), expected)
    return held.read(3), expected


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 1023])
@pytest.mark.parametrize("read_after", [-1, 0, 2])
def test_a_small_sum_is_that_of_int64_whenever_it_is_read(size: int, read_after: int) -> None:
    draw = torch.Generator().manual_seed(size)
    terms = [torch.randn(size, generator=draw) * 700 for _ in range(5)]
    found, expected = small_sums(terms, read_after=read_after)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)


def test_no_small_sum_of_a_step_leaves_int32() -> None:
    assert LIMIT * MAX_INDEXES < 2**31
    found, expected = small_sums([torch.full((7,), -LARGE)] * 5)
    assert found.tolist() == expected.tolist() == [-5 * LIMIT] * 7


def test_a_narrow_sum_that_was_discarded_begins_with_nothing() -> None:
    rounding, held = small(9), Accumulator(9, dtype=torch.int64, device=CPU)
    assert held.add([torch.full((9,), LARGE)], rounding, step=3, index=0, discards=0)
    held.discard()
    assert held.read(3).tolist() == [0] * 9
    held.discard()
    assert held.add([torch.full((9,), -LARGE)], rounding, step=3, index=0, discards=2)
    assert held.read(3).tolist() == [-LIMIT] * 9
