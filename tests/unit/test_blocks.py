"""What ranks hold and speak for, as ranges: together each parameter, exactly once, whatever the axes and lengths."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.manifest.schema import Manifest, Model, StageSpec, Training
from swarmnet.model.decoder import StageModule
from swarmnet.ranks.layout import Block, MeshLayout, MeshSplit, Shard, What, chunk

WHATS = get_args(What)


def layout_of(tensor: int, data: int, shard: Shard, *, sequence_parallel: bool = False) -> MeshLayout:
    devices = ("cpu",) * (tensor * data)
    return MeshLayout(tensor=tensor, data=data, shard=shard, sequence_parallel=sequence_parallel, devices=devices)


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        stage = StageModule(model, range(model.num_layers), first=True, last=True)
    return {name: tuple(parameter.shape) for name, parameter in stage.named_parameters()}


def spec_of(model: Model, rows: int, length: int = 16) -> StageSpec:
    training = Training(microbatch_size=rows, sequence_length=length)
    return Manifest().of_stage(0).model_copy(update={"model": model, "training": training})


@st.composite
def splits(draw: st.DrawFn) -> MeshSplit:
    tensor, data = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 5))
    keys = draw(st.sampled_from([n for n in range(1, 9) if n % tensor == 0 or tensor % n == 0]))
    heads = keys * tensor * draw(st.integers(1, 2))
    norms = draw(st.booleans())
    model = Model(
        vocab_size=draw(st.integers(8, 40)),
        hidden_size=draw(st.integers(1, 11)),
        intermediate_size=tensor * draw(st.integers(1, 7)),
        num_layers=1,
        num_heads=heads,
        num_kv_heads=keys,
        head_dim=2 * draw(st.integers(1, 3)),
        attention_bias=not norms,
        qk_norm=norms,
    )
    kind = draw(st.sampled_from(["dp", "zero1", "zero2", "zero3"] if data > 1 else list(get_args(Shard))))
    sequence_parallel = tensor > 1 and draw(st.booleans())
    layout = layout_of(tensor, data, kind, sequence_parallel=sequence_parallel)
    return MeshSplit(spec_of(model, 2 * data, 12), layout)


def elements(block: Block) -> set[tuple[int, ...]]:
    return set(itertools.product(*block.ranges))


@given(st.integers(0, 50), st.integers(1, 12))
def test_chunks_are_those_of_torch(length: int, count: int) -> None:
    found = [len(chunk(length, index, count)) for index in range(count)]
    theirs = [len(part) for part in torch.zeros(length).chunk(count)]
    assert found == theirs + [0] * (count - len(theirs))
    assert [place for index in range(count) for place in chunk(length, index, count)] == list(range(length))


@given(splits())
def test_every_element_is_written_by_exactly_one_rank(split: MeshSplit) -> None:
    for name, shape in shapes_of(split.spec.model).items():
        blocks = [split.spoken(name, shape, rank) for rank in range(split.layout.ranks)]
        spoken = [element for block in blocks if block is not None for element in elements(block)]
        assert len(spoken) == len(set(spoken)) and set(spoken) == set(itertools.product(*map(range, shape))), name


@given(splits())
def test_a_rank_holds_what_it_speaks_for_and_ranks_along_tensor_hold_everything(split: MeshSplit) -> None:
    layout = split.layout
    for name, shape in shapes_of(split.spec.model).items():
        for what in WHATS:
            held = [split.held(what, name, shape, rank) for rank in range(layout.ranks)]
            for rank, block in enumerate(held):
                spoken = split.spoken(name, shape, rank)
                assert spoken is None or elements(spoken) <= elements(block)
                if split.shards(what) and spoken is not None:
                    assert spoken == block
            everything = set(itertools.product(*map(range, shape)))
            copies = range(layout.data) if not split.shards(what) else [None]
            for d in copies:
                ranks = range(layout.ranks) if d is None else [layout.rank(d, t) for t in range(layout.tensor)]
                assert set().union(*(elements(held[rank]) for rank in ranks)) == everything


@given(splits())
def test_what_is_sharded_takes_its_share_of_memory(split: MeshSplit) -> None:
    shapes, layout = shapes_of(split.spec.model), split.layout
    none = MeshSplit(split.spec, layout_of(layout.tensor, 1, "none", sequence_parallel=layout.sequence_parallel))
    for what in WHATS:
        for t in range(layout.tensor):
            whole = none.num_elements(what, shapes, t)
            own = [split.num_elements(what, shapes, layout.rank(d, t)) for d in range(layout.data)]
            assert sum(own) == whole if split.shards(what) else own == [whole] * layout.data


@given(splits())
def test_rows_of_a_microbatch_are_computed_once_along_data(split: MeshSplit) -> None:
    for t in range(split.layout.tensor):
        rows = [row for d in range(split.layout.data) for row in split.rows(split.layout.rank(d, t))]
        assert rows == list(range(split.spec.training.microbatch_size))


@pytest.mark.parametrize(
    ("shard", "sharded"),
    [("dp", set()), ("zero1", {"moments"}), ("zero2", {"moments", "accumulators"}), ("zero3", set(WHATS))],
)
def test_what_each_kind_shards(shard: Shard, sharded: set[What]) -> None:
    split = MeshSplit(spec_of(Model(), 2), layout_of(1, 2, shard))
    assert {what for what in WHATS if split.shards(what)} == sharded


def test_one_tensor_rank_splits_any_model() -> None:
    model = Model(attention_bias=True, output_bias=True)
    assert (
        MeshSplit(spec_of(model, 2), layout_of(1, 2, "dp"))
        .tensor.slice_of("model.layers.0.self_attn.o_proj.bias", 0)
        .owner
    )
