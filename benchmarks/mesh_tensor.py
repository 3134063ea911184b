"""One rank of benchmarks/mesh.py's first part: our tensor parallelism and torch's, in turns, on the same stage.

Both do what a replica does with one step: forwards of three microbatches, their backwards in another order, gradients
summed over them, and what is partial of the sums made whole. Theirs is the stage of `model.decoder` with torch's own
linear and embedding layers in it, which is all that `parallelize_module` knows how to split, and `loss_parallel`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import in_turns
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from swarmnet.manifest.schema import Model
from swarmnet.model import decoder
from swarmnet.model.decoder import StageModule
from swarmnet.model.precision import Compute, products_in
from swarmnet.model.sharded import ShardedStage, sum_terms, take
from swarmnet.model.split import Casts, Tape
from swarmnet.model.tensor_plan import TensorSplit
from swarmnet.net.grpc_options import tune_allocator
from swarmnet.ranks.comm import ProcessComm

MICROBATCHES = 3
BACKWARDS = (1, 2, 0)


@dataclass(frozen=True, slots=True)
class Case:
    """A stage with head and loss, but no embedding, and how it is run."""

    name: str
    model: Model
    microbatch_size: int
    sequence_length: int
    turns: int
    repeats: int  # steps in one timing
    compute: Compute = "fp32"

    @property
    def tokens(self) -> int:
        """Of a step."""
        return MICROBATCHES * self.microbatch_size * self.sequence_length


@dataclass(frozen=True, slots=True)
class Answer:
    """What one step came to: per microbatch, and the gradients summed over them."""

    losses: list[Tensor]
    input_gradients: list[Tensor]
    gradients: dict[str, Tensor]


class Ours:
    """`ShardedStage` with a tape per microbatch, as `stage` drives it."""

    def __init__(self, case: Case, *, sequence_parallel: bool, device: torch.device) -> None:
        comm = ProcessComm()
        split = TensorSplit(case.model, comm.size, case.sequence_length, sequence_parallel=sequence_parallel)
        layers = range(case.model.num_layers)
        self.module = ShardedStage(split, layers, first=False, last=True, comm=comm)
        self.module.reset(seed=0)
        self.module.to(device)
        self._case, self._device = case, device
        self._parameters = list(self.module.parameters())
        self._scratch = {parameter: torch.empty_like(parameter) for parameter in self._parameters}
        self._sums = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._casts = Casts()

    def step(self, hidden: list[Tensor], labels: list[Tensor]) -> Answer:
        """Forward, backward and weight pass of every microbatch."""
        torch._foreach_zero_(self._sums)
        leaves = [x.detach().requires_grad_() for x in hidden]
        tapes = [Tape(self._casts) for _ in leaves]
        with products_in(self._case.compute, self._device):
            losses = [
                self.module.loss_sum(self.module(leaf, tape), y)
                for leaf, tape, y in zip(leaves, tapes, labels, strict=True)
            ]
        for number in BACKWARDS:
            losses[number].backward()  # type: ignore[no-untyped-call]
        for number in BACKWARDS:
            tapes[number].weight_pass(self._scratch.__getitem__)
            torch._foreach_add_(self._sums, list(self._scratch.values()))
        names = [name for name, _ in self.module.named_parameters()]
        return Answer(
            [loss.detach() for loss in losses],
            [leaf.grad for leaf in leaves],
            dict(zip(names, sum_terms(self._sums, names, self.module.split, self.module.comm), strict=True)),
        )


class Theirs:
    """torch's `parallelize_module` on the unsharded stage."""

    def __init__(self, case: Case, *, sequence_parallel: bool, device: torch.device) -> None:
        ranks = dist.get_world_size()
        stage = StageModule(case.model, range(case.model.num_layers), first=False, last=True)
        stage.reset(seed=0)
        _with_torchs_layers(stage)
        self.module = stage.to(device)
        self._bf16 = torch.autocast(device.type, dtype=torch.bfloat16, enabled=case.compute == "bf16")
        mesh = init_device_mesh(device.type, (ranks,))
        parallelize_module(self.module, mesh, _plan(case.model, sequence_parallel=sequence_parallel))

    def step(self, hidden: list[Tensor], labels: list[Tensor]) -> Answer:
        """Forward and backward of every microbatch; autograd sums the gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None
        leaves = [x.detach().requires_grad_() for x in hidden]
        with loss_parallel():
            with self._bf16:
                outputs = [self.module(leaf) for leaf in leaves]
            losses = [
                F.cross_entropy(output.flatten(0, 1).float(), y.flatten(), reduction="sum")
                for output, y in zip(outputs, labels, strict=True)
            ]
            for number in BACKWARDS:
                losses[number].backward()  # type: ignore[no-untyped-call]
        gradients: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and any(place.is_partial() for place in gradient.placements):
                gradient = gradient.redistribute(placements=[Replicate()])  # norms under sequence parallelism
            gradients[name] = gradient
        return Answer([_whole(loss.detach()) for loss in losses], [leaf.grad for leaf in leaves], gradients)


class _TorchLinear(nn.Linear):
    def forward(self, x: Tensor, tape: Tape | None = None) -> Tensor:
        return super().forward(x)


class _TorchNorm(decoder.RMSNorm):
    def forward(self, x: Tensor, tape: Tape | None = None) -> Tensor:
        return super().forward(x, None)


def _with_torchs_layers(stage: StageModule) -> None:
    """Put torch's linear layers in, with the same parameters; norms that need no second argument."""
    for parent in list(stage.modules()):
        for name, child in parent.named_children():
            new: Any
            if isinstance(child, decoder.Linear):
                outputs, inputs = child.weight.shape
                new = _TorchLinear(inputs, outputs, bias=child.bias is not None, device="meta")
                new.bias = child.bias
            elif isinstance(child, decoder.RMSNorm):
                new = _TorchNorm(len(child.weight), child.eps)
            else:
                continue
            new.weight = child.weight
            setattr(parent, name, new)


def _plan(model: Model, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """The usual plan for a Llama, and for its sequence-parallel form (arXiv:2205.05198)."""
    whole, between = Replicate(), Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {}
    if sequence_parallel:
        plan["model.layers.0"] = PrepareModuleInput(  # not the stage's: it counts the positions of all tokens
            input_layouts=(whole, None, None, None),
            desired_input_layouts=(between, None, None, None),
            use_local_output=True,
        )
        plan["model.norm"] = SequenceParallel(use_local_output=True)
    for index in range(model.num_layers):
        layer = f"model.layers.{index}."
        plan |= {
            layer + "self_attn": PrepareModuleInput(
                input_layouts=(between, None, None, None), desired_input_layouts=(whole, None, None, None)
            ),
            **{layer + f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            layer + "self_attn.o_proj": RowwiseParallel(output_layouts=between),
            layer + "mlp": PrepareModuleInput(input_layouts=(between, None), desired_input_layouts=(whole, None)),
            layer + "mlp.gate_proj": ColwiseParallel(),
            layer + "mlp.up_proj": ColwiseParallel(),
            layer + "mlp.down_proj": RowwiseParallel(output_layouts=between),
        }
        if sequence_parallel:
            plan[layer + "input_layernorm"] = SequenceParallel(use_local_output=True)
            plan[layer + "post_attention_layernorm"] = SequenceParallel(use_local_output=True)
    plan["lm_head"] = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    return plan


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


# ---------------------------------------------------------------- one rank


def run_rank(pipe: Connection, cases: Sequence[Case], rank: int, size: int, store: str, *, cuda: bool) -> None:
    """Rank 0 sends, for each case without and with sequence parallelism,
    {"ours": seconds per step and turn, "theirs": ..., "difference": largest, relative}."""
    tune_allocator()
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
        device_id=device if cuda else None,
    )
    for case in cases:
        for sequence_parallel in (False, True):
            found = _compare(case, sequence_parallel=sequence_parallel, device=device)
            if rank == 0:
                pipe.send(found)
    with contextlib.suppress(EOFError):
        pipe.recv()  # until the parent closes its end
    os._exit(0)  # gloo's destructors may abort a finished process


def _compare(case: Case, *, sequence_parallel: bool, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    shape = (case.microbatch_size, case.sequence_length)
    hidden = [torch.randn(*shape, case.model.hidden_size, generator=generator).to(device) for _ in range(MICROBATCHES)]
    labels = [torch.randint(case.model.vocab_size, shape, generator=generator).to(device) for _ in range(MICROBATCHES)]
    ours = Ours(case, sequence_parallel=sequence_parallel, device=device)
    theirs = Theirs(case, sequence_parallel=sequence_parallel, device=device)
    ways = {"ours": ours, "theirs": theirs}
    far = torch.tensor([_difference(ours, ours.step(hidden, labels), theirs.step(hidden, labels))], device=device)
    dist.all_reduce(far, op=dist.ReduceOp.MAX)
    timed = {name: partial(_timed, way, hidden, labels, case.repeats, device) for name, way in ways.items()}
    return in_turns(timed, case.turns) | {"difference": far.item()}


def _timed(way: Ours | Theirs, hidden: list[Tensor], labels: list[Tensor], repeats: int, device: torch.device) -> float:
    """Seconds per step, from all ranks ready to all ranks done."""
    _together(device)
    began = time.perf_counter()
    for _ in range(repeats):
        way.step(hidden, labels)
    _together(device)
    return (time.perf_counter() - began) / repeats


def _together(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def _difference(ours: Ours, mine: Answer, other: Answer) -> float:
    """The largest difference of losses, input gradients and gradients, each relative to its largest element."""
    pairs = [
        *zip(mine.losses, other.losses, strict=True),
        *zip(mine.input_gradients, other.input_gradients, strict=True),
    ]
    for name, gradient in mine.gradients.items():
        pairs.append(
            (gradient, take(_whole(other.gradients[name]), ours.module.split.slice_of(name, ours.module.comm.rank)))
        )
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
