"""What is kept between forward and backward is a matter of memory: every policy has the bits of a stash."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from rank_stages import LENGTH, MODEL, module_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swarmnet.model.activations import Offload
from swarmnet.model.decoder import StageModule
from swarmnet.model.split import Tape
from swarmnet.stage.passes import ForwardPass, MemoryPolicy, Passes
from tests.contracts.thread_comm import Counted, run_ranks

ENDS = {"whole": (True, True), "first": (True, False), "middle": (False, False), "last": (False, True)}
SAVING = ("recompute", "recompute_layers", "selective", "offload")
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True, slots=True)
class Seen:
    outputs: list[Tensor]
    input_gradients: list[Tensor | None]
    gradients: list[dict[str, Tensor]]


def through(module: StageModule, ends: str, memory: MemoryPolicy, *, order: tuple[int, ...] = (1, 2, 0)) -> Seen:
    """Three microbatches in flight, backwards in another order, weight passes in a third."""
    first, last = ENDS[ends]
    passes = Passes(last=last, device=CPU, reproducible=True, memory=memory)
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, MODEL.vocab_size, (3, 2, LENGTH + 1), generator=generator)
    hidden = torch.randn(3, 2, LENGTH, MODEL.hidden_size, generator=generator)
    arriving = torch.randn(3, 2, LENGTH, MODEL.hidden_size, generator=generator)
    outputs, works = [], []
    for m in range(3):
        output, work = passes.forward(module, tokens[m], None if first else hidden[m].clone(), train=True)
        assert work is not None
        outputs.append(output.detach())
        works.append(work)
    inputs: list[Tensor | None] = [None] * 3
    for m in order:
        inputs[m] = passes.backward(works[m], None if last else arriving[m])
    assert all(parameter.grad is None for parameter in module.parameters())
    return Seen(outputs, inputs, [weight_pass(module, works[m]) for m in range(3)])


def weight_pass(module: StageModule, work: ForwardPass) -> dict[str, Tensor]:
    out = {parameter: torch.full_like(parameter, torch.nan) for parameter in module.parameters()}
    assert isinstance(work.tape, Tape)
    assert work.tape.weight_pass(out.__getitem__) == set(out)
    return {name: out[parameter].detach() for name, parameter in module.named_parameters()}


def assert_same(found: Seen, expected: Seen) -> None:
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert torch.equal(ours, theirs)
    for mine, yours in zip(found.input_gradients, expected.input_gradients, strict=True):
        assert (mine is None) == (yours is None) and (mine is None or torch.equal(mine, yours))
    for own, other in zip(found.gradients, expected.gradients, strict=True):
        assert own.keys() == other.keys()
        assert [name for name in own if not torch.equal(own[name], other[name])] == []


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("policy", SAVING)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_policy_has_the_bits_of_a_stash(policy: str, ends: str, tied: bool) -> None:
    model = MODEL.model_copy(update={"tie_embeddings": tied, "qk_norm": tied, "output_bias": tied})
    module = module_of(model, ends, torch.float32)
    expected = through(module, ends, MemoryPolicy())
    assert_same(through(module, ends, MemoryPolicy(activations=policy)), expected)


@pytest.mark.parametrize("policy", ["recompute", "recompute_layers", "selective"])
@pytest.mark.parametrize("ends", ["whole", "middle"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole-tokens", "sequence-parallel"])
def test_on_ranks_too(policy: str, ends: str, sequence_parallel: bool) -> None:
    def body(comm: Counted) -> tuple[Seen, Seen, int, int]:
        counted = Counted(comm)
        module = module_of(MODEL, ends, torch.float32, comm=counted, sequence_parallel=sequence_parallel)
        expected = through(module, ends, MemoryPolicy())
        plain = sum(counted.counts.values())
        found = through(module, ends, MemoryPolicy(activations=policy))
        return found, expected, plain, sum(counted.counts.values()) - plain

    for found, expected, plain, again in run_ranks(2, body):
        assert_same(found, expected)
        assert again > plain, "what is computed again asks the other ranks again"


@pytest.mark.parametrize("policy", ["save", *SAVING])
def test_backward_on_other_weights_is_refused(policy: str) -> None:
    module = module_of(MODEL, "middle", torch.float32)
    passes = Passes(last=False, device=CPU, reproducible=True, memory=MemoryPolicy(activations=policy))
    tokens, hidden = torch.zeros(2, LENGTH + 1, dtype=torch.int32), torch.randn(2, LENGTH, MODEL.hidden_size)
    _, work = passes.forward(module, tokens, hidden, train=True)
    with torch.no_grad():
        next(module.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="modified since forward"):
        passes.backward(work, torch.ones_like(hidden))


@pytest.mark.parametrize("policy", ["save", *SAVING])
def test_backward_runs_once(policy: str) -> None:
    module = module_of(MODEL, "last", torch.float32)
    passes = Passes(last=True, device=CPU, reproducible=True, memory=MemoryPolicy(activations=policy))
    tokens, hidden = torch.zeros(2, LENGTH + 1, dtype=torch.int32), torch.randn(2, LENGTH, MODEL.hidden_size)
    _, work = passes.forward(module, tokens, hidden, train=True)
    passes.backward(work, None)
    with pytest.raises(ValueError, match="has run already"):
        passes.backward(work, None)
    assert passes.forward(module, tokens, hidden.detach(), train=False)[1] is None


@pytest.mark.parametrize("done", ["forward", "backward"])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("policy", ["save", *SAVING])
def test_a_microbatch_that_never_has_a_weight_pass_is_freed(policy: str, ends: str, done: str) -> None:
    """At once: what audits compute again, or another replica counted, is as large as any microbatch."""
    (first, last), module = ENDS[ends], module_of(MODEL, ends, torch.float32)
    passes = Passes(last=last, device=CPU, reproducible=True, memory=MemoryPolicy(activations=policy))
    tokens, hidden = torch.zeros(2, LENGTH + 1, dtype=torch.int32), torch.randn(2, LENGTH, MODEL.hidden_size)

    def begun() -> weakref.ref[Tape]:
        _, work = passes.forward(module, tokens, None if first else hidden.clone(), train=True)
        assert work is not None and work.tape is not None
        if done == "backward":
            passes.backward(work, None if last else torch.ones_like(hidden))
        return weakref.ref(work.tape)

    gc.disable()  # the collector sees some cycles, and not how large they are
    try:
        tape = begun()
        assert policy == "recompute_layers" or tape() is None
    finally:
        gc.enable()
    gc.collect()
    assert tape() is None


def test_offload_moves_a_tensor_once_and_leaves_weights() -> None:
    weight, x = (torch.randn(30, 30, requires_grad=True) for _ in range(2))
    scale = torch.randn(30, 30)

    def run() -> list[Tensor]:
        x.grad = weight.grad = None
        y = x * scale
        total = (y @ weight).sum() + (y @ weight.t()).sum() + (y * y).sum()
        del y
        total.backward()
        assert x.grad is not None and weight.grad is not None
        return [x.grad, weight.grad]

    made: list[torch.Size] = []

    class Empties(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten.empty_like.default:
                made.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    expected = run()
    offload = Offload(CPU, least=30)
    with offload.saving([weight, scale]), Empties():
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert made == [torch.Size([30, 30])], "y, which three operations save"
