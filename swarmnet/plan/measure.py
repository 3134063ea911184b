"""A short benchmark of a run's layers on this machine: how long they take.

Stages of one and of three layers run as a peer runs them (`ranks.stage`), on tokens that are drawn; what differs
between them is a layer's, an embedding's or a head's. Layers are equal, so one stands for all. Knows no file.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from swarmnet.manifest.schema import Cut, StageSpec
from swarmnet.model.cut import layer_flops
from swarmnet.plan.cost import LayerTimes
from swarmnet.ranks.comm import OneRank
from swarmnet.ranks.layout import MeshLayout
from swarmnet.ranks.stage import RankStage
from swarmnet.stage.passes import ForwardPass, MemoryPolicy

_LEAST_S, _LEAST_TIMES, _MOST_TIMES = 0.5, 3, 30
"""Each stage runs for so long, and at least so often."""

_MANY = 3
"""Layers of the longer stage: two more than of the shorter one."""

Progress = Callable[[str], None]


def measure(spec: StageSpec, *, device: str, memory: MemoryPolicy, progress: Progress) -> LayerTimes:
    """Of the run of `spec`, on `device` ("cpu", "cuda:0"). progress: is told what is measured now."""
    training = spec.training
    tokens = training.microbatch_size * training.sequence_length
    found = []
    for name, layers, first, last in (
        ("one layer", 1, False, False),
        (f"{_MANY} layers", _MANY, False, False),
        ("embedding and a layer", 1, True, False),
        ("a layer and the head", 1, False, True),
    ):
        progress(f"measuring {name}")
        found.append(_run(_alone(spec, layers, first=first, last=last), device, memory))
    (one, _), (many, update_s), (begin, _), (end, _) = found
    # A noisy moment may make a part look free.
    layer_s = max((many - one) / (_MANY - 1), 1e-9)
    return LayerTimes(
        tokens=tokens,
        layer_s=layer_s,
        embedding_s=max(begin - one, 0.0),
        head_s=max(end - one, 0.0),
        call_s=max(one - layer_s, 0.0),
        update_s=update_s,
        flops_per_s=3 * layer_flops(spec.model, training.sequence_length) * tokens / layer_s,
    )


def _alone(spec: StageSpec, layers: int, *, first: bool, last: bool) -> StageSpec:
    """A stage with so many layers, of a run like that of `spec` without other layers."""
    model = spec.model.model_copy(update={"num_layers": layers})
    cut = (*[0] * (not first), layers, *[0] * (not last))
    update = {"stage": int(not first), "model": model, "cut": Cut.model_construct(stages=len(cut), layers=cut)}
    return spec.model_copy(update=update)


def _run(spec: StageSpec, device: str, memory: MemoryPolicy) -> tuple[float, float]:
    """Seconds of a microbatch, and of an update for each parameter."""
    alone, on = OneRank(), torch.device(device)
    rank = RankStage(spec, MeshLayout(devices=(device,)), tensor=alone, data=alone, device=on, memory=memory)
    rank.reset(rank.canonical.initial(None))
    training, model, drawn = spec.training, spec.model, torch.Generator().manual_seed(1)
    rows, length = training.microbatch_size, training.sequence_length
    tokens = torch.randint(model.vocab_size, (rows, length + 1), generator=drawn, dtype=torch.int32)
    boundary = torch.randn((rows, length, model.hidden_size), generator=drawn)
    index = 0

    def microbatch() -> None:
        nonlocal index
        index += 1
        _, work = rank.forward(0, tokens.to(on), None if spec.first else boundary.to(on), train=True)
        assert isinstance(work, ForwardPass)
        rank.backward(work, None if spec.last else 1e-3 * boundary.to(on))
        rank.accumulate(work, step=0, index=index, discards=0)

    microbatch()  # makes what later ones find
    seconds = _timed(microbatch, on)
    total: Tensor = rank.sums[0].read(0).clone()
    updates = _timed(lambda: rank.update(0, total, scale=1e-6, rate=1e-6), on)
    return seconds, updates / rank.canonical.num_elements


def _timed(job: Callable[[], object], device: torch.device) -> float:
    """Seconds of one, the median of several. On one core those of that core, whatever else runs at the same time."""
    alone_on_core = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone_on_core else time.perf_counter

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock()

    begin, found = now(), list[float]()
    while len(found) < _LEAST_TIMES or (now() - begin < _LEAST_S and len(found) < _MOST_TIMES):
        before = now()
        job()
        found.append(now() - before)
    return statistics.median(found)
