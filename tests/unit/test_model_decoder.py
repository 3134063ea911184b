"""The decoder: names, initial weights, and that stages compose to the whole."""

from __future__ import annotations

import math

import pytest
import torch

from swarmnet.manifest.schema import Model
from swarmnet.model.decoder import StageModule, loss_sum, rotary_tables
from swarmnet.model.initial import draw

MODEL = Model(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8
)


def whole(model: Model = MODEL) -> StageModule:
    module = StageModule(model, range(model.num_layers), first=True, last=True)
    module.reset(seed=7)
    return module


def test_names_are_hugging_faces_with_global_layer_indexes() -> None:
    stage = StageModule(MODEL, range(1, 3), first=False, last=True)
    assert [name for name, _ in stage.named_parameters()] == [
        f"model.layers.{layer}.{leaf}.weight"
        for layer in (1, 2)
        for leaf in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            "input_layernorm",
            "post_attention_layernorm",
        )
    ] + ["model.norm.weight", "lm_head.weight"]
    first = StageModule(MODEL, range(0), first=True, last=False)
    assert [name for name, _ in first.named_parameters()] == ["model.embed_tokens.weight"]


def test_stages_start_with_the_weights_of_the_whole() -> None:
    expected = dict(whole().named_parameters())
    seen = {}
    for layers, first, last in ((range(1), True, False), (range(1, 3), False, True)):
        stage = StageModule(MODEL, layers, first=first, last=last)
        stage.reset(seed=7)
        seen |= dict(stage.named_parameters())
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[name], expected[name]) for name in expected)


def test_stages_compose_to_the_whole() -> None:
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    hidden: torch.Tensor = ids
    for layers, first, last in ((range(1), True, False), (range(1, 2), False, False), (range(2, 3), False, True)):
        stage = StageModule(MODEL, layers, first=first, last=last)
        stage.reset(seed=7)
        hidden = stage(hidden)
    assert torch.equal(hidden, whole()(ids))


def test_initial_weights_depend_on_seed_and_name_and_have_the_right_scale() -> None:
    shape = torch.Size((256, 256))
    a, b, c = (
        draw(name, shape, MODEL, seed=seed)
        for name, seed in (
            ("model.layers.0.mlp.up_proj.weight", 0),
            ("model.layers.0.mlp.up_proj.weight", 1),
            ("model.layers.1.mlp.up_proj.weight", 0),
        )
    )
    assert not torch.equal(a, b) and not torch.equal(a, c)
    assert a.std().item() == pytest.approx(MODEL.init_std, rel=0.02)
    assert abs(a.mean().item()) < 3 * MODEL.init_std / 256
    residual = draw("model.layers.0.self_attn.o_proj.weight", shape, MODEL, seed=0)
    assert residual.std().item() == pytest.approx(MODEL.init_std / math.sqrt(6), rel=0.02)
    assert torch.equal(draw("model.norm.weight", torch.Size((4,)), MODEL, seed=0), torch.ones(4))
    assert torch.equal(draw("model.layers.0.self_attn.q_proj.bias", torch.Size((4,)), MODEL, seed=0), torch.zeros(4))


def test_initial_weights_are_pinned() -> None:
    """A change here is a change of every run."""
    found = draw("lm_head.weight", torch.Size((2, 2)), Model(), seed=0)
    assert [value.hex() for value in found.flatten().tolist()] == [
        "0x1.37258e0000000p-5",
        "-0x1.4ee2620000000p-6",
        "0x1.7f30920000000p-7",
        "0x1.0956400000000p-7",
    ]


def test_a_token_sees_no_later_token() -> None:
    module = whole()
    ids = torch.randint(0, 40, (1, 12), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 40
    before, after = module(ids), module(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 8:], after[:, 8:], atol=1e-4)


def test_loss_is_a_sum_in_nats() -> None:
    logits = torch.zeros(2, 3, 40)
    assert loss_sum(logits, torch.zeros(2, 3, dtype=torch.int32)).item() == pytest.approx(6 * math.log(40))


def test_the_loss_of_new_weights_is_that_of_guessing() -> None:
    ids = torch.randint(0, 40, (8, 17), generator=torch.Generator().manual_seed(4))
    loss = loss_sum(whole()(ids[:, :-1]), ids[:, 1:]).item() / ids[:, 1:].numel()
    assert loss == pytest.approx(math.log(40), rel=0.02)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": "linear", "rope_factor": 4.0},
        {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_length": 64},
    ],
    ids=["linear", "llama3"],
)
def test_scaled_rotation_is_slower_and_never_faster(changes: dict[str, object]) -> None:
    scaled = MODEL.model_copy(update={"head_dim": 32, **changes})
    plain = MODEL.model_copy(update={"head_dim": 32})
    (_, sin), (_, plain_sin) = (rotary_tables(model, 2, torch.device("cpu")) for model in (scaled, plain))
    turn, plain_turn = (table[1, :16].double().asin() for table in (sin, plain_sin))  # radians per token
    ratio = plain_turn / turn
    slowest = float(str(changes["rope_factor"]))
    assert ratio[-1].item() == pytest.approx(slowest, rel=1e-4) and bool((ratio > 1 - 1e-5).all())
    if changes["rope_scaling"] == "llama3":
        assert ratio[0].item() == pytest.approx(1.0, rel=1e-4)
    else:
        torch.testing.assert_close(ratio, torch.full_like(ratio, slowest), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_factor": 2.0}, "has no effect without rope_scaling"),
        ({"rope_scaling": "llama3", "rope_low_freq_factor": 4.0}, "must be below"),
        ({"output_bias": True}, "without attention_bias"),
        ({"qk_norm": True, "attention_bias": True}, "needs output_bias"),
    ],
)
def test_what_no_architecture_is(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Model.model_validate(changes)


def test_norms_of_heads_have_the_width_of_one_head() -> None:
    module = whole(MODEL.model_copy(update={"qk_norm": True}))
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters() if "q_norm" in name}
    assert shapes == {f"model.layers.{layer}.self_attn.q_norm.weight": (8,) for layer in range(3)}
