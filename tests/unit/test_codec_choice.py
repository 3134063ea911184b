"""Which codec a tensor travels under is a function of its name and shape, and covers every element once."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet.sums.sum_codec import SMALL, choose, runs
from swarmnet.wire import codecs

names = st.sampled_from(
    ["q_proj.weight", "q_proj.bias", "input_layernorm.weight", "model.norm.weight", "lm_head.weight"]
)
shapes = st.lists(st.integers(1, 300), min_size=1, max_size=3).map(tuple)
stages = st.lists(st.tuples(names, shapes), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("name", "shape", "codec"),
    [
        ("model.layers.3.mlp.up_proj.weight", (64, 64), "int8"),
        ("model.layers.3.mlp.up_proj.weight", (64, 63), "fp32"),
        ("model.embed_tokens.weight", (32000, 128), "int8"),
        ("model.layers.3.input_layernorm.weight", (8192,), "fp32"),
        ("model.layers.3.q_norm.weight", (64, 128), "fp32"),
        ("model.layers.3.self_attn.q_proj.bias", (8192,), "fp32"),
        ("model.layers.3.self_attn.q_proj.bias", (64, 128), "fp32"),
        ("normaliser.proj.weight", (64, 128), "int8"),
        ("scale", (), "fp32"),
    ],
)
def test_large_matrices_are_rounded_and_the_rest_is_not(name: str, shape: tuple[int, ...], codec: str) -> None:
    assert choose(name, shape, matrices="int8") == codec


@given(stages, st.data())
def test_runs_cover_the_part_and_agree_with_the_whole(parameters, data) -> None:
    total = sum(math.prod(shape) for _, shape in parameters)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    block = data.draw(st.sampled_from([1, 64]))
    found = runs(parameters, start, stop, matrices="nf4", block=block)
    assert sum(size for _, size in found) == stop - start and all(size > 0 for _, size in found)
    ends = itertools.accumulate((size for _, size in found), initial=start)
    again = [end for one, other, end in zip(found, found[1:], [*ends][1:], strict=False) if one[0] == other[0]]
    assert all(end % block == 0 for end in again), "a codec is left only for another one, or where its blocks begin"
    edges = [0, *itertools.accumulate(math.prod(shape) for _, shape in parameters)]

    def of(element: int) -> str:
        place = next(at for at in range(len(parameters)) if element < edges[at + 1])
        return choose(*parameters[place], matrices="nf4")

    at = start
    for codec, size in found:
        assert of(at) == of(at + size - 1) == codec
        at += size


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([(1,), (SMALL - 1,), (64, 64), (65, 64)]), min_size=1, max_size=40), st.data())
def test_the_wire_takes_every_cut(many, data) -> None:
    """As many runs as there can be, at any place of the cut."""
    parameters = [("w", shape) for shape in many]
    total = sum(math.prod(shape) for shape in many)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    x = torch.linspace(-1, 1, stop - start)
    packed = codecs.encode_runs(runs(parameters, start, stop, matrices="int8", block=256), x)
    assert torch.allclose(codecs.decode(packed), x, atol=1 / 100)
