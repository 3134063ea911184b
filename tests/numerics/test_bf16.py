"""`numerics.compute = "bf16"`: the bits of one process, autocast's gradients, fp32's curve, half the stash."""

from __future__ import annotations

import random
from pathlib import Path

import hf_models
import pytest
import torch
from rank_stages import LENGTH, MODEL, module_of
from stage_chain import StageChain, compute_thread, text, tiny
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from swarmnet.manifest.schema import Manifest
from swarmnet.model.comm import Comm
from swarmnet.model.decoder import StageModule, loss_sum
from swarmnet.model.huggingface.checkpoint import Checkpoint
from swarmnet.model.huggingface.config import read_config
from swarmnet.model.precision import products_in
from swarmnet.model.sharded import take
from swarmnet.model.split import Casts
from swarmnet.model.tensor_plan import TensorSplit
from swarmnet.stage.passes import MemoryPolicy, Passes
from swarmnet.testing.reference import ReferenceResult, run_reference
from tests.contracts.tensor_parts import reduce_partial
from tests.contracts.thread_comm import run_ranks

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def in_bf16(manifest: Manifest) -> Manifest:
    return manifest.model_copy(update={"numerics": manifest.numerics.model_copy(update={"compute": "bf16"})})


def gradients(module: StageModule, ids: Tensor, *, compute: str = "bf16", policy: str = "save") -> dict[str, Tensor]:
    passes = Passes(last=True, device=CPU, reproducible=True, memory=MemoryPolicy(activations=policy), compute=compute)
    _, work = passes.forward(module, ids, None, train=True)
    assert work is not None and work.tape is not None
    passes.backward(work, None)
    out = {parameter: torch.empty_like(parameter) for parameter in module.parameters()}
    work.tape.weight_pass(out.__getitem__)
    return {name: out[parameter].detach() for name, parameter in module.named_parameters()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Length of the difference, in lengths of what was expected."""
    assert found.keys() == expected.keys()
    apart = sum((found[name] - each).square().sum() for name, each in expected.items())
    return float((apart / sum(each.square().sum() for each in expected.values())).sqrt())


async def test_deterministic_mode_has_the_references_bits_whatever_is_kept() -> None:
    manifest = in_bf16(tiny(2))
    found = ReferenceResult()
    async with compute_thread() as compute:
        policies = "save", "recompute", "recompute_layers", "selective"
        chain = StageChain(manifest, compute, memory=[MemoryPolicy(activations=policy) for policy in policies])
        found.losses = [await chain.step(random.Random(step)) for step in range(8)]
        found.weights = await chain.weights(1)
    expected = run_reference(manifest, text(), steps=8)
    assert found.losses == expected.losses != run_reference(tiny(2), text(), steps=8).losses
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())


@pytest.mark.parametrize("policy", ["save", "recompute", "recompute_layers", "selective"])
def test_halves_have_the_bits_of_one_backward(policy: str) -> None:
    model = MODEL.model_copy(update={"qk_norm": True, "output_bias": True, "tie_embeddings": True})
    module = module_of(model, "whole", torch.float32)
    ids = torch.randint(0, model.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    with products_in("bf16", CPU):
        loss_sum(module(ids[:, :-1]), ids[:, 1:]).backward()
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    found = gradients(module, ids, policy=policy)
    assert [name for name, each in expected.items() if each is None or not torch.equal(found[name], each)] == []
    assert all(each.dtype == torch.float32 for each in found.values())


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_gradients_are_as_near_to_fp32_as_plain_autocast(case: str, tmp_path: Path) -> None:
    theirs = hf_models.save(case, tmp_path)
    model = read_config(tmp_path).model
    module = StageModule(model, range(model.num_layers), first=True, last=True)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    module.load_state_dict(Checkpoint(tmp_path).read(shapes))
    ids = torch.randint(0, 61, (4, 41), generator=torch.Generator().manual_seed(7))
    exact = gradients(module, ids, compute="fp32")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = theirs(ids[:, :-1], use_cache=False).logits
    loss_sum(logits, ids[:, 1:]).backward()
    plain = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    ours = gradients(module, ids)
    assert 1e-3 < distance(plain, exact) < 0.05, "what bf16 costs a torch user"
    assert distance(ours, exact) < 1.25 * distance(plain, exact)
    assert distance(ours, plain) < 2 * distance(plain, exact)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole-tokens", "sequence-parallel"])
def test_ranks_that_split_layers(sequence_parallel: bool) -> None:
    ids = torch.randint(0, MODEL.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    module = module_of(MODEL, "whole", torch.float32)
    exact, expected = gradients(module, ids, compute="fp32"), gradients(module, ids)
    split = TensorSplit(MODEL, 2, LENGTH, sequence_parallel=sequence_parallel)

    def body(comm: Comm) -> dict[str, Tensor]:
        own = module_of(MODEL, "whole", torch.float32, comm=comm, sequence_parallel=sequence_parallel)
        found = gradients(own, ids, policy="recompute_layers")
        reduce_partial(own, list(found.values()))
        return found

    for number, found in enumerate(run_ranks(2, body)):
        one, two = (
            {name: take(each, split.slice_of(name, number)) for name, each in all_.items()}
            for all_ in (exact, expected)
        )
        assert distance(found, one) < 2 * distance(two, one)


def stash_bytes(compute: str) -> int:
    """Memory that autograd holds of a middle stage's forward, each tensor once."""
    model = MODEL.model_copy(update={"hidden_size": 64, "intermediate_size": 176, "head_dim": 8})
    module = StageModule(model, range(2), first=False, last=False)
    module.reset(seed=1)
    passes = Passes(last=False, device=CPU, reproducible=True, compute=compute)
    tokens, hidden = torch.zeros(2, 65, dtype=torch.int32), torch.randn(2, 64, 64)
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        passes.forward(module, tokens, hidden, train=True)
    for tensor in module.lasting():
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_a_stash_is_about_half_as_large() -> None:
    assert 0.45 < stash_bytes("bf16") / stash_bytes("fp32") < 0.65


def test_the_curve_stays_within_one_percent_of_fp32s() -> None:
    manifest = tiny(1, mode="fast", microbatches=2)
    manifest = manifest.model_copy(
        update={"training": manifest.training.model_copy(update={"total_steps": 80, "eval_every": 0})}
    )
    exact, found = (run_reference(each, text()).losses for each in (manifest, in_bf16(manifest)))
    assert exact[-1] < exact[0] - 1.5 and exact != found
    ends = [sum(losses[-20:]) / 20 for losses in (found, exact)]
    assert abs(ends[0] / ends[1] - 1) < 0.01
    assert max(abs(a / b - 1) for a, b in zip(found, exact, strict=True)) < 0.05


def test_a_weight_is_cast_once_per_change() -> None:
    weight, casts = torch.nn.Parameter(torch.randn(8, 8)), Casts()
    first = casts.of(weight, torch.bfloat16)
    assert casts.of(weight, torch.bfloat16) is first and casts.of(weight, torch.float32) is weight
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(casts.of(weight, torch.bfloat16), weight.detach().bfloat16())
