"""Layers through torch.compile: wrapped one by one, their gradients on the tape. No code is generated, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from further import further
from rank_stages import LENGTH, MODEL, module_of
from torch import Tensor

from swarmnet.model.decoder import StageModule
from swarmnet.stage.passes import MemoryPolicy, Passes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_compiled_stays(one_thread: None) -> Iterator[None]:
    yield
    torch.compiler.reset()


def through(
    module: StageModule, passes: Passes, device: torch.device = CPU
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Outputs, input gradients, and every gradient of two microbatches in flight."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.zeros(2, LENGTH + 1, dtype=torch.int32)
    hidden, arriving = (torch.randn(2, 2, LENGTH, MODEL.hidden_size, generator=generator).to(device) for _ in range(2))
    ways = [passes.forward(module, tokens, hidden[m].clone(), train=True) for m in range(2)]
    seen = [output.detach() for output, _ in ways]
    seen += [passes.backward(ways[m][1], arriving[m]) for m in (1, 0)]
    gradients = []
    for _, work in ways:
        out = {parameter: torch.full_like(parameter, torch.nan) for parameter in module.parameters()}
        assert work is not None and work.tape is not None
        assert work.tape.weight_pass(out.__getitem__) == set(out)
        gradients.append({name: out[parameter].detach() for name, parameter in module.named_parameters()})
    assert all(parameter.grad is None for parameter in module.parameters())
    return seen, gradients


def passes_with(memory: MemoryPolicy, compute: str) -> Passes:
    return Passes(last=False, device=CPU, reproducible=True, memory=memory, compute=compute, compiler="aot_eager")


@pytest.mark.parametrize(
    ("policy", "compute"),
    [
        ("save", "bf16"),
        ("recompute_layers", "fp32"),
        ("recompute", "bf16"),
        *further(("save", "fp32"), ("recompute_layers", "bf16"), ("recompute", "fp32")),
    ],
)
def test_compiled_layers_have_the_gradients_of_plain_ones(policy: str, compute: str) -> None:
    module = module_of(MODEL.model_copy(update={"qk_norm": True, "output_bias": True}), "middle", torch.float32)
    expected = through(module, passes_with(MemoryPolicy(), compute))
    passes = passes_with(MemoryPolicy(policy, compile=True), compute)
    found = through(module, passes)
    assert passes._compiled is not None and passes._compiled.num_layers == MODEL.num_layers
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if compute == "fp32" else {"rtol": 0.05, "atol": 0.3}
    for ours, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
    for mine, yours in zip(found[1], expected[1], strict=True):
        for name, gradient in yours.items():
            scale = float(gradient.abs().max())
            assert float((mine[name] - gradient).abs().max()) <= scale * (1e-5 if compute == "fp32" else 0.05), name


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_generated_code_on_a_gpu(compute: str) -> None:
    device = torch.device("cuda")
    module = module_of(MODEL, "middle", torch.float32).to(device)
    seen = []
    for memory in (MemoryPolicy(), MemoryPolicy(compile=True), MemoryPolicy("recompute_layers", compile=True)):
        passes = Passes(last=False, device=device, reproducible=False, memory=memory, compute=compute)
        seen.append(through(module, passes, device))
    for _, found in seen[1:]:
        for mine, yours in zip(found, seen[0][1], strict=True):
            for name, gradient in yours.items():
                apart, scale = float((mine[name] - gradient).abs().max()), float(gradient.abs().max())
                assert apart <= scale * (1e-3 if compute == "fp32" else 0.06), name
