"""Whether contributions add up to their sum: of integers to the last one, of floats as far as they round."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.audit.pledge import other_than, whole_of
from swarmnet.audit.products import CERTAIN, PRODUCTS, ROUNDING, Sketch, add_up, same, together
from swarmnet.messages import PRIME

NUMBERS = st.integers(0, PRIME - 1)
REALS = st.floats(-(2.0**60), 2.0**60, width=32)
SKETCHES = st.builds(
    lambda products, length: Sketch(tuple(products), length),
    st.lists(REALS, min_size=PRODUCTS, max_size=PRODUCTS),
    st.floats(0.0, 2.0**60, width=32),
)


def sketch(value: float, length: float | None = None, slack: float = 0.0) -> Sketch:
    return Sketch((value,) * PRODUCTS, abs(value) if length is None else length, slack)


@given(st.lists(NUMBERS, max_size=5), NUMBERS)
def test_integers_add_up_or_not(numbers: list[int], other: int) -> None:
    total = sum(numbers) % PRIME
    assert together(numbers) == total and add_up(numbers, total)
    assert add_up(numbers, other) == same(other, total) == (other == total)


@given(SKETCHES)
def test_what_is_pledged_fills_a_digest_and_comes_back(one: Sketch) -> None:
    assert len(one.packed) == 32 and Sketch.of(one.packed) == one


def test_numbers_beyond_fp32_are_pledged_as_its_largest() -> None:
    assert Sketch.of(sketch(1e300).packed).length == pytest.approx(3e38)


def test_rounding_is_borne_and_no_more() -> None:
    parts = [sketch(1.0), sketch(-1.0), sketch(0.5)]
    most = CERTAIN * ROUNDING * (len(parts) + 2) * 2.5
    assert add_up(parts, sketch(0.5)) and add_up(parts, sketch(0.5 + 0.99 * most))
    assert not add_up(parts, sketch(0.5 + 1.01 * most))
    # What the sum's codec loses comes on top.
    assert add_up(parts, sketch(0.5 + 1.01 * most, slack=most))


def test_one_product_of_seven_is_enough_to_see_a_lie() -> None:
    lie = Sketch((*(1.0,) * (PRODUCTS - 1), 1.1), 1.0)
    assert add_up([sketch(1.0)], sketch(1.0)) and not add_up([sketch(1.0)], lie)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [lambda x: sketch(x, 1.0), lambda x: sketch(1.0, x)], ids=["product", "length"])
def test_what_is_not_finite_adds_up_to_nothing(bad: float, where: Callable[[float], Sketch]) -> None:
    assert not add_up([where(bad)], sketch(1.0)) and not same(where(bad), sketch(1.0))
    assert not add_up([where(bad), sketch(1.0)], sketch(2.0))


def test_who_states_a_greater_length_to_have_more_borne_is_found() -> None:
    assert same(sketch(1.0), sketch(1.0)) and not same(sketch(1.0, 1.1), sketch(1.0))


def test_pieces_weigh_what_the_whole_does() -> None:
    whole = together([Sketch((1.0,) * PRODUCTS, 3.0, 0.3), Sketch((2.0,) * PRODUCTS, 4.0, 0.4)])
    assert isinstance(whole, Sketch) and whole.products == (3.0,) * PRODUCTS
    assert (whole.length, whole.slack) == (5.0, pytest.approx(0.5))


@pytest.mark.parametrize("length", [10.0, 1e9, 3e38])
def test_who_states_a_length_that_its_sum_has_not_makes_no_room_for_a_lie(length: float) -> None:
    honest, liar = sketch(1.0), sketch(0.5, length)
    assert add_up([honest, sketch(0.5)], sketch(1.5)) and not add_up([honest, liar], sketch(1.5))
    # A contribution that is so long makes its sum so long.
    assert add_up([honest, liar], sketch(1.5, length))


@given(st.binary(min_size=32, max_size=32))
def test_nobody_can_pledge_what_others_find_who_find_it_wrong(stated: bytes) -> None:
    assert whole_of(stated, 0) != other_than(stated)
