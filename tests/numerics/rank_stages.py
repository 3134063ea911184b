"""Stages of a tiny model, whole and on ranks, through three microbatches in flight; for tests of tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnet.manifest.schema import Model
from swarmnet.model.comm import Comm
from swarmnet.model.decoder import StageModule
from swarmnet.model.sharded import ShardedStage, take
from swarmnet.model.split import Tape
from swarmnet.model.tensor_plan import TensorSplit
from tests.contracts.tensor_parts import merge, reduce_partial
from tests.contracts.thread_comm import Counted

BATCH, LENGTH, MICROBATCHES = 2, 16, 3
MODEL = Model(  # 67 rows divide among no group; 2 heads are fewer than 4 ranks
    vocab_size=67,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=6,
    attention_bias=True,
    init_std=0.3,
)
ENDS = {"whole": (True, True), "first": (True, False), "middle": (False, False), "last": (False, True)}


@dataclass(frozen=True, slots=True)
class Seen:
    """What a stage computed. Of a rank, gradients are this rank's slices."""

    outputs: list[Tensor]  # one per microbatch: hidden, or logits
    losses: list[Tensor]
    input_gradients: list[Tensor]
    gradients: dict[str, Tensor]  # summed over the microbatches


def module_of(
    model: Model, ends: str, dtype: torch.dtype, *, comm: Comm | None = None, sequence_parallel: bool = False
) -> StageModule:
    """The stage, or one rank's share of it, with the same weights."""
    first, last = ENDS[ends]
    layers = range(model.num_layers)
    if comm is None:
        module = StageModule(model, layers, first=first, last=last)
    else:
        split = TensorSplit(model, comm.size, LENGTH, sequence_parallel=sequence_parallel)
        module = ShardedStage(split, layers, first=first, last=last, comm=comm)
    module.reset(seed=3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("norm.weight", ".bias")):  # ones and zeros would hide an error
                wave = torch.sin(torch.arange(4096.0)[held(module, name, parameter)] + len(name))
                parameter.add_(0.2 * wave)
    return module.to(dtype)


def held(module: StageModule, name: str, parameter: Tensor) -> slice:
    """Which elements of a vector `module` has."""
    if isinstance(module, ShardedStage):
        part = module.split.slice_of(name, module.comm.rank)
        if part.dim is not None:
            return slice(part.start, part.stop)
    return slice(0, len(parameter))


def through(module: StageModule, ends: str, dtype: torch.dtype, *, tapes: bool = True) -> Seen:
    """Three forwards, backwards in another order, weight passes in a third. Without tapes, as autograd does it."""
    first, last = ENDS[ends]
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(11)
    width, rows = MODEL.hidden_size, MODEL.vocab_size
    ids = torch.randint(0, rows, (MICROBATCHES, BATCH, LENGTH + 1), generator=generator).to(device)
    hidden, arriving = (
        torch.randn(MICROBATCHES, BATCH, LENGTH, width, generator=generator, dtype=torch.float64).to(device, dtype)
        for _ in range(2)
    )
    leaves = [None if first else hidden[m].clone().requires_grad_() for m in range(MICROBATCHES)]
    memory = [Tape() if tapes else None for _ in range(MICROBATCHES)]
    outputs, losses = [], []
    for m, leaf in enumerate(leaves):
        outputs.append(module(ids[m, :, :-1] if leaf is None else leaf, memory[m]))
        if last:
            losses.append(module.loss_sum(outputs[m], ids[m, :, 1:]))
    for m in (1, 2, 0):
        torch.autograd.backward(losses[m] if last else outputs[m], None if last else arriving[m])
    parameters = dict(module.named_parameters())
    total = {name: torch.zeros_like(p) if tapes else p.grad for name, p in parameters.items()}
    for m in (2, 0, 1) if tapes else ():
        one = {parameter: torch.full_like(parameter, torch.nan) for parameter in parameters.values()}
        assert memory[m].weight_pass(one.__getitem__) == set(one)
        for name, parameter in parameters.items():
            total[name] += one[parameter]
    return Seen(
        [output.detach() for output in outputs],
        [loss.detach() for loss in losses],
        [leaf.grad for leaf in leaves if leaf is not None],
        total,
    )


@dataclass(frozen=True, slots=True)
class OnRank:
    """`Seen` of one rank: as the weight passes left it, and after `reduce_partial`; what it called on the way."""

    raw: Seen
    reduced: dict[str, Tensor]
    calls: Mapping[str, int]  # of forward and backward; the weight passes and the last reduction apart
    calls_to_reduce: Mapping[str, int]


def on_rank(
    comm: Comm,
    model: Model,
    ends: str,
    dtype: torch.dtype,
    *,
    sequence_parallel: bool,
    tapes: bool = True,
    device: torch.device | str = "cpu",
) -> OnRank:
    """One rank's part in `through`."""
    counted = Counted(comm)
    module = module_of(model, ends, dtype, comm=counted, sequence_parallel=sequence_parallel).to(device)
    assert isinstance(module, ShardedStage)
    raw = through(module, ends, dtype, tapes=tapes)
    calls = dict(counted.counts)
    counted.counts.clear()
    reduced = {name: gradient.clone() for name, gradient in raw.gradients.items()}
    reduce_partial(module, list(reduced.values()))
    return OnRank(raw, reduced, calls, dict(counted.counts))


def against(rank: OnRank, expected: Seen, split: TensorSplit, number: int) -> dict[str, float]:
    """How far rank `number` is from its slices of what the whole stage computed, by name of the quantity."""
    rows = split.part("vocabulary", number)
    last = bool(expected.losses)
    outputs = [output[..., rows.start : rows.stop] if last else output for output in expected.outputs]
    found = {f"gradient of {name}": gradient for name, gradient in rank.reduced.items()}
    wanted = {
        f"gradient of {name}": take(gradient, split.slice_of(name, number))
        for name, gradient in expected.gradients.items()
    }
    for what, ours, theirs in (
        ("output", rank.raw.outputs, outputs),
        ("loss", rank.raw.losses, expected.losses),
        ("input gradient", rank.raw.input_gradients, expected.input_gradients),
    ):
        found |= {f"{what} {m}": tensor for m, tensor in enumerate(ours)}
        wanted |= {f"{what} {m}": tensor for m, tensor in enumerate(theirs)}
    assert found.keys() == wanted.keys()
    return {name: difference(found[name], wanted[name]) for name in wanted}


def merged(ranks: Sequence[OnRank], split: TensorSplit) -> dict[str, Tensor]:
    """The ranks' gradients put together as the weight passes left them, without `reduce_partial`."""
    return {
        name: merge([rank.raw.gradients[name] for rank in ranks], name, split, gradients=True)
        for name in ranks[0].raw.gradients
    }


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest value expected."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    return float((found - expected).abs().max() / expected.abs().max())
