"""Sketches: linear, the same everywhere, and as far from the truth as is stated."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmnet.stage.sketch import BLOCK, WIDTH, Sketcher, digest, distance

SEEDS = 64


@cache
def sketcher(seed: int) -> Sketcher:
    return Sketcher(seed)


def column() -> Tensor:
    """Only one column of a matrix differs: every 64th weight."""
    x = torch.zeros(3000, WIDTH)
    x[:, 5] = 1.0
    return x


SHAPES = {
    "noise": lambda: torch.randn(2 * BLOCK + 17, generator=torch.Generator().manual_seed(1)),
    "all the same": lambda: torch.ones(3 * BLOCK),
    "a column": column,
    "two weights": lambda: torch.tensor([1.0, 1.0]),
    "one large among noise": lambda: torch.cat([torch.full((1,), 30.0), SHAPES["noise"]() * 0.1]),
    "alternating": lambda: torch.ones(BLOCK + 1000).mul_(torch.arange(BLOCK + 1000) % 2 * 2 - 1),
    "the same twice": lambda: torch.cat([torch.randn(BLOCK, generator=torch.Generator().manual_seed(2))] * 2),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_square_is_unbiased_and_no_wider_than_stated(shape: str) -> None:
    x = SHAPES[shape]()
    truth = x.double().square().sum().item()
    ratios = [math.hypot(*sketcher(seed).sketch([x])) ** 2 / truth for seed in range(SEEDS)]
    mean = math.fsum(ratios) / SEEDS
    spread = math.fsum((ratio - 1) ** 2 for ratio in ratios) / SEEDS
    assert abs(mean - 1) < 4 * math.sqrt(2 / WIDTH / SEEDS), "of 64 seeds, four standard errors"
    assert spread < 2 / WIDTH * (1 + 4 * math.sqrt(12 / SEEDS)), "the variance stated, and the error of measuring it"


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 7), st.lists(st.integers(1, 400), min_size=1, max_size=4), st.integers(0, 2**31))
def test_linear(seed: int, sizes: list[int], noise: int) -> None:
    generator = torch.Generator().manual_seed(noise)
    one = [torch.randn(size, generator=generator) for size in sizes]
    other = [x + 1e-3 * torch.randn(x.shape, generator=generator) for x in one]
    between = sketcher(seed).sketch([a - b for a, b in zip(one, other, strict=True)])
    mine, theirs = sketcher(seed).sketch(one), sketcher(seed).sketch(other)
    assert distance(mine, theirs) == pytest.approx(math.hypot(*between), rel=1e-3, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 7), st.integers(0, 3 * BLOCK), st.floats(-1e3, 1e3, width=32))
def test_a_single_weight_is_measured_exactly_wherever_it_is(seed: int, place: int, value: float) -> None:
    x = torch.zeros(3 * BLOCK + 1)
    x[place] = value
    assert math.hypot(*sketcher(seed).sketch([x[: BLOCK + 9], x[BLOCK + 9 :]])) == pytest.approx(abs(value), rel=1e-6)


def test_a_vector_of_nothing() -> None:
    assert sketcher(0).sketch([]) == sketcher(0).sketch([torch.zeros(10)]) == (0.0,) * WIDTH


def test_weights_that_are_no_numbers_have_no_sketch() -> None:
    for strange in (math.nan, math.inf, 1e39):
        assert sketcher(0).sketch([torch.ones(3), torch.tensor([1.0, strange])]) == ()


def test_it_is_the_same_sketch_on_every_machine() -> None:
    """Peers of a run compare them: what the seed draws must never change."""
    x = torch.arange(BLOCK + 3, dtype=torch.float32)
    assert sketcher(3).sketch([x])[:3] == GOLDEN
    assert Sketcher(4).sketch([x])[:3] != GOLDEN


GOLDEN = (-875838.0, -2685279.0, -1206145.0)


def test_one_bit_changes_the_digest_and_nothing_else_does() -> None:
    x, y = torch.randn(5, 3), torch.randn(7)
    assert digest([x, y]) == digest([x.clone(), y]) == digest([x.t().contiguous().t(), y])
    flipped = x.clone()
    flipped.view(torch.int32)[2, 1] ^= 1
    assert digest([flipped, y]) != digest([x, y]) != digest([y, x])
