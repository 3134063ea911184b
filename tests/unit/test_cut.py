"""Cutting layers into stages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.manifest.schema import Cut, Model
from swarmnet.model.cut import balance, cut_layers, head_flops, layer_flops

costs_and_parts = st.lists(st.integers(1, 50), min_size=1, max_size=9).flatmap(
    lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
)


def stage_costs(costs: list[int], ranges: tuple[range, ...]) -> list[int]:
    return [sum(costs[layer] for layer in layers) for layers in ranges]


def every_cut(costs: list[int], parts: int) -> list[tuple[range, ...]]:
    return [
        tuple(range(a, b) for a, b in itertools.pairwise((0, *inner, len(costs))))
        for inner in itertools.combinations(range(1, len(costs)), parts - 1)
    ]


@given(costs_and_parts)
def test_every_layer_lies_in_exactly_one_stage_and_no_stage_is_empty(case: tuple[list[int], int]) -> None:
    costs, parts = case
    ranges = balance(costs, parts)
    assert [layer for layers in ranges for layer in layers] == list(range(len(costs)))
    assert len(ranges) == parts and all(len(layers) > 0 for layers in ranges)


@given(costs_and_parts)
def test_no_other_cut_is_better(case: tuple[list[int], int]) -> None:
    costs, parts = case

    def quality(ranges: tuple[range, ...]) -> tuple[int, int]:
        of_stages = stage_costs(costs, ranges)
        return max(of_stages), sum(cost * cost for cost in of_stages)

    assert quality(balance(costs, parts)) == min(quality(ranges) for ranges in every_cut(costs, parts))


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    model = Model(num_layers=12, hidden_size=64, vocab_size=50_000)
    assert head_flops(model) > 3 * layer_flops(model, 128)
    ranges = cut_layers(model, Cut(stages=3), 128)
    assert len(ranges[-1]) < len(ranges[0])


def test_without_a_head_to_speak_of_stages_are_even() -> None:
    model = Model(num_layers=12, vocab_size=2)
    assert [len(layers) for layers in cut_layers(model, Cut(stages=4), 64)] == [3, 3, 3, 3]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
def test_an_explicit_cut_is_taken_as_written(lengths: list[int]) -> None:
    model = Model(num_layers=sum(lengths))
    ranges = cut_layers(model, Cut(stages=len(lengths), layers=tuple(lengths)), 64)
    assert [len(layers) for layers in ranges] == lengths
    assert [layer for layers in ranges for layer in layers] == list(range(sum(lengths)))


def test_a_layer_of_llama_7b_costs_what_the_rule_of_two_flops_per_parameter_says() -> None:
    llama = Model(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=11_008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
    )
    assert layer_flops(llama, 0) == 2 * 202_375_168
    assert layer_flops(llama, 2048) - layer_flops(llama, 0) == 2 * 2048 * 4096  # half of the T x T square
    assert head_flops(llama) == 2 * 131_072_000


def test_more_stages_than_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 layers into 3"):
        balance([1, 1], 3)


def test_a_hundred_layers_in_sixteen_stages_is_quick() -> None:
    ranges = balance([7] * 99 + [40], 16)
    assert max(stage_costs([7] * 99 + [40], ranges)) == 49
