"""Which rows and columns a rank holds: every element has one owner, and what cannot be split is refused with advice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Model
from swarmnet.model.decoder import StageModule
from swarmnet.model.sharded import ShardedStage, take, whole_shape
from swarmnet.model.tensor_plan import Slice, TensorSplit
from tests.contracts.fake_comm import FakeComm
from tests.contracts.tensor_parts import merge

MODEL = Model(
    vocab_size=67,
    hidden_size=6,
    intermediate_size=24,
    num_layers=1,
    num_heads=12,
    num_kv_heads=4,
    head_dim=2,
    attention_bias=True,
)


@st.composite
def splits(draw: st.DrawFn) -> TensorSplit:
    """A split that works, of a model with odd numbers."""
    ranks, heads = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    keys = draw(st.integers(1, ranks * heads))
    assume(ranks * heads % keys == 0 and (keys % ranks == 0 or ranks % keys == 0))
    model = MODEL.model_copy(
        update={
            "vocab_size": draw(st.integers(ranks, 40)),
            "intermediate_size": ranks * draw(st.integers(1, 5)),
            "num_heads": ranks * heads,
            "num_kv_heads": keys,
            "tie_embeddings": draw(st.booleans()),
            "qk_norm": draw(st.booleans()),
        }
    )
    return TensorSplit(model, ranks, ranks * 2, sequence_parallel=draw(st.booleans()))


def whole_of(split: TensorSplit) -> dict[str, torch.Tensor]:
    stage = StageModule(split.model, range(split.model.num_layers), first=True, last=True)
    return {name: torch.arange(p.numel()).view(p.shape) + 1 for name, p in stage.named_parameters()}


@given(splits())
def test_slices_put_together_are_the_parameter(split: TensorSplit) -> None:
    for name, whole in whole_of(split).items():
        slices = [split.slice_of(name, rank) for rank in range(split.ranks)]
        parts = [take(whole, held) for held in slices]
        assert all(whole_shape(part, held) == whole.shape for part, held in zip(parts, slices, strict=True))
        assert torch.equal(merge(parts, name, split), whole), name


@given(splits())
def test_every_element_has_one_owner(split: TensorSplit) -> None:
    for name, whole in whole_of(split).items():
        owners = torch.zeros_like(whole)
        for rank in range(split.ranks):
            if (held := split.slice_of(name, rank)).owner:
                take(owners, held).add_(1)
        assert bool((owners == 1).all()), name


@given(splits())
def test_gradients_that_several_ranks_have_terms_of_are_summed_and_others_are_not(split: TensorSplit) -> None:
    for name, whole in whole_of(split).items():
        copies = torch.zeros_like(whole)
        slices = [split.slice_of(name, rank) for rank in range(split.ranks)]
        for held in slices:
            take(copies, held).add_(1)
        total = merge([take(whole, held) for held in slices], name, split, gradients=True)
        norm, of_heads = name.endswith("norm.weight"), name.endswith(("q_norm.weight", "k_norm.weight"))
        whole_here = norm and not of_heads and not split.sequence_parallel
        assert torch.equal(total, whole if whole_here else whole * copies), name
        if split.ranks > 1:
            terms = of_heads or (split.sequence_parallel if norm else bool((copies > 1).any()))
            assert slices[0].partial == terms, name


@given(splits())
def test_slices_are_what_a_rank_really_holds(split: TensorSplit) -> None:
    expected = whole_of(split)
    layers = range(split.model.num_layers)
    for rank in range(split.ranks):
        with torch.device("meta"):
            stage = ShardedStage(split, layers, first=True, last=True, comm=FakeComm(rank, split.ranks))
        assert [name for name, _ in stage.named_parameters()] == list(expected)
        for name, parameter in stage.named_parameters():
            assert parameter.shape == take(expected[name], split.slice_of(name, rank)).shape, name
    assert sum(len(split.part("vocabulary", rank)) for rank in range(split.ranks)) == split.model.vocab_size


def test_a_head_on_several_ranks_is_that_of_their_queries() -> None:
    split = TensorSplit(MODEL.model_copy(update={"num_kv_heads": 2}), 4, 16)
    name = "model.layers.0.self_attn.v_proj.weight"
    assert [split.slice_of(name, rank) for rank in range(4)] == [
        Slice(0, 0, 2, 4, owner=True, partial=True),
        Slice(0, 0, 2, 4, owner=False, partial=True),
        Slice(0, 2, 4, 4, owner=True, partial=True),
        Slice(0, 2, 4, 4, owner=False, partial=True),
    ]


def test_the_vocabulary_need_not_divide() -> None:
    split = TensorSplit(MODEL, 4, 16)
    parts = [split.part("vocabulary", rank) for rank in range(4)]
    assert parts == [range(17), range(17, 34), range(34, 51), range(51, 67)]


@pytest.mark.parametrize(
    ("changed", "ranks", "sequence_parallel", "said"),
    [
        ({}, 8, False, r"num_heads = 12 is no multiple of 8. Ranks that can: 1, 2, 4, 12"),
        ({"intermediate_size": 30}, 4, False, r"intermediate_size = 30 is no multiple of 4. Ranks that can: 1, 2$"),
        ({}, 3, False, r"num_kv_heads = 4 is neither a multiple nor a divisor of 3"),
        ({"vocab_size": 3}, 4, False, r"vocab_size = 3 is less than 4"),
        ({}, 4, True, r"sequence_length = 18 is no multiple of 4 \(only .*\). Ranks that can: 1, 2$"),
        ({"intermediate_size": 30}, 8, True, r"num_heads .* 8; intermediate_size .* 8; sequence_length .* 8"),
        ({"output_bias": True}, 2, False, r"output_bias = true, .*\. Ranks that can: 1$"),
        ({}, 0, False, r"there must be a rank"),
    ],
)
def test_what_cannot_be_split_is_refused_with_advice(
    changed: dict[str, int], ranks: int, sequence_parallel: bool, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        TensorSplit(MODEL.model_copy(update=changed), ranks, 18, sequence_parallel=sequence_parallel)


def test_a_parameter_without_rule_is_refused() -> None:
    split = TensorSplit(MODEL, 2, 16)
    for name in ("model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.down_proj.bias"):
        with pytest.raises(ValueError, match=f"no rule how ranks split {name}"):
            split.slice_of(name, 0)


def test_a_group_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a split over 4 ranks in a group of 2"):
        ShardedStage(TensorSplit(MODEL, 4, 16), range(1), first=True, last=True, comm=FakeComm(0, 2))
