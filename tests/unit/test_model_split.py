"""Backward in two halves has the bits of an ordinary backward."""

from __future__ import annotations

import pytest
import torch

from swarmnet.manifest.schema import Model
from swarmnet.model.decoder import StageModule, loss_sum
from swarmnet.model.split import Tape

WIDE = Model(
    vocab_size=67, hidden_size=48, intermediate_size=100, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=10
)

pytestmark = pytest.mark.usefixtures("one_thread")


def split_gradients(tape: Tape, module: StageModule) -> dict[str, torch.Tensor]:
    out = {parameter: torch.full_like(parameter, torch.nan) for parameter in module.parameters()}
    assert tape.weight_pass(out.__getitem__) == set(out)
    return {name: out[parameter] for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [1, 16, 33])
@pytest.mark.parametrize(
    "model",
    [
        WIDE,
        WIDE.model_copy(update={"attention_bias": True}),
        WIDE.model_copy(update={"tie_embeddings": True}),
        WIDE.model_copy(update={"qk_norm": True, "attention_bias": True, "output_bias": True}),
    ],
    ids=["plain", "bias", "tied", "norms"],
)
def test_every_parameter_gradient_of_the_whole_model(model: Model, batch: int, length: int) -> None:
    module = StageModule(model, range(2), first=True, last=True)
    module.reset(seed=1)
    ids = torch.randint(0, 67, (batch, length + 1), generator=torch.Generator().manual_seed(5))
    loss_sum(module(ids[:, :-1]), ids[:, 1:]).backward()
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    tape = Tape()
    loss_sum(module(ids[:, :-1], tape), ids[:, 1:]).backward()
    assert all(parameter.grad is None for parameter in module.parameters())
    for name, gradient in split_gradients(tape, module).items():
        assert torch.equal(gradient, expected[name]), name


def test_every_parameter_gradient_and_the_input_gradient_of_a_middle_stage() -> None:
    module = StageModule(WIDE, range(2), first=False, last=False)
    module.reset(seed=1)
    generator = torch.Generator().manual_seed(6)
    x, grad = torch.randn(2, 16, 48, generator=generator), torch.randn(2, 16, 48, generator=generator)
    plain = x.clone().requires_grad_()
    module(plain).backward(grad)
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    tape, leaf = Tape(), x.clone().requires_grad_()
    module(leaf, tape).backward(grad)
    assert torch.equal(leaf.grad, plain.grad)
    for name, gradient in split_gradients(tape, module).items():
        assert torch.equal(gradient, expected[name]), name


def test_a_weight_pass_empties_the_tape() -> None:
    module = StageModule(WIDE, range(1), first=True, last=False)
    module.reset(seed=1)
    tape = Tape()
    y = module(torch.zeros(1, 4, dtype=torch.int32), tape)
    assert len(tape) == 0, "nothing is owed before backward"
    y.sum().backward()
    assert len(tape) == 7 + 2 + 1
    split_gradients(tape, module)
    assert len(tape) == 0


def test_backward_after_the_weights_changed_in_place_raises() -> None:
    module = StageModule(WIDE, range(1), first=True, last=False)
    module.reset(seed=1)
    y = module(torch.zeros(1, 4, dtype=torch.int32), Tape())
    with torch.no_grad():
        module.model.layers["0"].mlp.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_frozen_parameter_has_no_gradient_and_the_others_have_the_same_ones() -> None:
    ids = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(5))

    def gradients(*frozen: str) -> dict[str, torch.Tensor]:
        module, tape = StageModule(WIDE, range(2), first=True, last=True), Tape()
        module.reset(seed=1)
        for name in frozen:
            module.get_parameter(name).requires_grad_(False)
        loss_sum(module(ids[:, :-1], tape), ids[:, 1:]).backward()
        out = {parameter: torch.empty_like(parameter) for parameter in module.trained().values()}
        assert tape.weight_pass(out.__getitem__) == set(out)
        return {name: out[parameter] for name, parameter in module.trained().items()}

    frozen = ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight")
    whole, some = gradients(), gradients(*frozen)
    assert list(some) == [name for name in whole if name not in frozen]
    assert all(torch.equal(some[name], whole[name]) for name in some)
