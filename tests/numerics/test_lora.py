"""Adapters beside frozen weights: against PEFT, over stages and ranks, and bit by bit against one process."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from mesh_training import check, layout_of, on_ranks, run_of
from stage_chain import StageChain, compute_thread, text, tiny
from torch import Tensor

from swarmnet.data.sampler import Sampler
from swarmnet.errors import UsageError
from swarmnet.manifest.schema import Averaging, Initial, Lora, Manifest, Model
from swarmnet.model import nf4
from swarmnet.model.base_file import BaseLayout
from swarmnet.model.huggingface.config import read_config
from swarmnet.plan.cost import works
from swarmnet.plan.memory import Setup, plan_stage
from swarmnet.ranks.layout import MeshLayout, MeshSplit
from swarmnet.stage.canonical import Canonical, learning_rate
from swarmnet.testing.reference import run_reference

WIDE = Model(
    vocab_size=61, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16
)


def adapted(
    stages: int = 2,
    *,
    model: Model = WIDE,
    lora: Lora | None = None,
    averaging: Averaging | None = None,
    rate: float = 1e-2,
) -> Manifest:
    manifest = tiny(stages, model=model, averaging=averaging, learning_rate=rate, weight_decay=0.0)
    return manifest.model_copy(update={"lora": lora or Lora(r=4, lora_alpha=8.0)})


# ---------------------------------------------------------------- PEFT


def peft_run(folder: Path, manifest: Manifest, start: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and adapters of plain PyTorch on the model of transformers, with the adapters of PEFT."""
    from peft import LoraConfig, get_peft_model

    training, lora = manifest.training, manifest.lora
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = LoraConfig(
        r=lora.r, lora_alpha=lora.lora_alpha, target_modules=targets, use_rslora=lora.use_rslora, bias="none"
    )
    model = get_peft_model(hf_models.loaded(folder), config).train()
    named = {name.replace(".default", "").removeprefix("base_model.model."): p for name, p in model.named_parameters()}
    named = {name: p for name, p in named.items() if p.requires_grad}
    assert named.keys() == start.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(start[name])
    table, tokens = manifest.optimizer, text(manifest.model.vocab_size)
    optimizer = torch.optim.AdamW(
        named.values(), lr=1.0, betas=(table.beta1, table.beta2), eps=table.eps, weight_decay=table.weight_decay
    )
    sampler = Sampler(training.seed, tokens.num_tokens, training.sequence_length, training.microbatch_size)
    losses = []
    for step in range(training.total_steps):
        total, count = 0.0, training.microbatches * training.microbatch_size * training.sequence_length
        for index in range(training.microbatches):
            positions = sampler.positions(step * training.microbatches + index)
            batch = tokens.microbatch(positions, training.sequence_length).long()
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
            (loss / count).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(named.values(), table.clip_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(table, step, total_steps=training.total_steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / count)
    return losses, {name: parameter.detach().clone() for name, parameter in named.items()}


@pytest.mark.parametrize(
    ("case", "lora"),
    [
        ("llama", Lora(r=4, lora_alpha=8.0)),
        ("qwen2-tied", Lora(r=3, lora_alpha=5.0, target_modules=("q_proj", "v_proj", "down_proj"))),
        ("qwen3", Lora(r=4, use_rslora=True)),
        ("mistral", Lora(r=8, target_modules=("k_proj", "o_proj", "gate_proj"))),
    ],
)
def test_twenty_steps_are_those_of_peft(case: str, lora: Lora, tmp_path: Path) -> None:
    hf_models.save(case, tmp_path / "hf")
    described = read_config(tmp_path / "hf").model
    manifest = adapted(1, model=described, lora=lora, rate=1e-3).model_copy(
        update={"initial": Initial(source=str(tmp_path / "hf"), sha256=("0" * 64,))}
    )
    start = run_reference(manifest, text(), steps=0).weights
    assert all(bool(factor.any()) == name.endswith("lora_A.weight") for name, factor in start.items())
    ours = run_reference(manifest, text())
    losses, adapters = peft_run(tmp_path / "hf", manifest, start)
    assert ours.losses == pytest.approx(losses, abs=1e-6)
    for name, factor in adapters.items():
        torch.testing.assert_close(ours.weights[name], factor, rtol=0, atol=1e-6)
        assert factor.any(), "it has learned"


# ---------------------------------------------------------------- one process, bit by bit


async def trained(manifest: Manifest, **how: Any) -> tuple[list[float], dict[str, Tensor]]:
    async with compute_thread() as compute:
        chain, rng = StageChain(manifest, compute, replicas=2, **how), random.Random(1)
        losses = [await chain.step(rng) for _ in range(manifest.training.total_steps)]
        return losses, await chain.weights()


@pytest.mark.parametrize("base", ["fp32", "bf16", "nf4"])
@pytest.mark.parametrize("averaging", [Averaging(codec="int64"), Averaging(codec="small")], ids=["int64", "small"])
def test_a_swarm_has_the_bits_of_one_process(base: str, averaging: Averaging) -> None:
    manifest = adapted(lora=Lora(r=4, lora_alpha=8.0, base=base), averaging=averaging)
    expected = run_reference(manifest, text())
    losses, weights = asyncio.run(trained(manifest))
    assert losses == expected.losses and losses[-1] < losses[0]
    assert weights.keys() == expected.weights.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.weights.items())


# ---------------------------------------------------------------- ranks

MESHES = [layout_of(2), layout_of(2, sequence_parallel=True), layout_of(1, 2, "zero2"), layout_of(2, 2, "zero1")]


@pytest.mark.parametrize("layout", MESHES, ids=lambda layout: layout.label)
@pytest.mark.parametrize("base", ["fp32", "nf4"])
def test_ranks_train_adapters_as_one_process_does(layout: MeshLayout, base: str) -> None:
    model = WIDE.model_copy(update={"num_layers": 2, "num_heads": 8, "attention_bias": True})
    manifest = run_of(model=model).model_copy(update={"lora": Lora(r=4, base=base)})
    # Factors that are 0 have no share in the others' gradients: from a version where they are not.
    for found in on_ranks(manifest, layout, lambda rank: rank.train(start=2, steps=3), start=2):
        check(found, manifest, steps=3, start=2)


def test_a_mesh_that_cannot_share_frozen_weights_is_refused_in_words() -> None:
    manifest = run_of(model=WIDE).model_copy(update={"lora": Lora(r=4, base="nf4")})
    with pytest.raises(UsageError, match=r"ZeRO-3 \(--shard zero3\) is not made for frozen weights"):
        MeshSplit(manifest.of_stage(0), layout_of(1, 2, "zero3"))
    with pytest.raises(UsageError, match="4 tensor-parallel ranks would cut blocks of 64 numbers"):
        MeshSplit(manifest.of_stage(0), layout_of(4))


# ---------------------------------------------------------------- four bits


def test_a_matrix_in_four_bits_is_that_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(70, 192, generator=generator)
    matrix[3, :64], matrix[4, :64] = 0.0, 1e-39
    codes, most = nf4.quantise(matrix)
    matrix[4, :64] = 0.0  # subnormal numbers are zeros, and theirs are no numbers
    theirs, state = functional.quantize_4bit(matrix.reshape(-1), blocksize=64, quant_type="nf4")
    assert torch.equal(theirs.view(-1), codes.view(-1)) and torch.equal(state.absmax, most.view(-1))
    found = nf4.dequantise(codes, most, torch.float32)
    assert torch.equal(found, nf4._by_table(codes, most)) and not found[3:5, :64].any()
    assert torch.equal(functional.dequantize_4bit(theirs, state).view_as(matrix), found)
    # Half the widest gap of the table, times what the block is scaled by.
    assert bool(((matrix - found).abs() <= 0.153 * most.repeat_interleave(64, 1)).all())


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("base", ["fp32", "bf16", "nf4"])
def test_a_plan_counts_what_trains_and_what_rests(base: str) -> None:
    full, manifest = adapted(lora=Lora()), adapted(lora=Lora(r=4, base=base))
    trained = [Canonical.of(spec).num_elements for spec in manifest.specs]
    assert [work.parameters for work in works(manifest.specs[0])] == trained
    assert sum(trained) == manifest.lora.num_parameters(WIDE)
    # No weight pass of what is frozen.
    pairs = zip(works(manifest.specs[0]), works(full.specs[0]), strict=True)
    assert all(ours.flops == pytest.approx(2 / 3 * theirs.flops) for ours, theirs in pairs)
    for spec in manifest.specs:
        setup = Setup(manifest.specs, manifest.wire, MeshLayout(), 2)
        rests = BaseLayout.of(spec).num_bytes
        weights = plan_stage(setup, spec.stage).rank.parameters
        assert rests <= weights <= rests + 4 * trained[spec.stage] * 1.01 + 64
