"""A short benchmark of a run's layers on this machine: what they take, and what a microbatch holds.

Stages of one and of three layers run as a peer runs them (`ranks.stage`), on tokens that are drawn; what differs
between them is a layer's, an embedding's or a head's. Layers are equal, so one stands for all. Knows no file.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from swarmnet.manifest.schema import Cut, StageSpec
from swarmnet.model.cut import layer_flops
from swarmnet.plan.budget import Passage
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


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found."""

    times: LayerTimes
    layer_bytes: int
    """What one more microbatch in flight holds of a layer."""
    peak_bytes: int
    """What a microbatch of a stage of three layers takes at most."""


@dataclass(frozen=True, slots=True)
class _Found:
    microbatch_s: float
    update_s: float
    passage: Passage
    parameters: int


def measure(spec: StageSpec, *, device: str, memory: MemoryPolicy, progress: Progress) -> Measured:
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
    one, many, begin, end = found
    # A noisy moment may make a part look free.
    layer_s = max((many.microbatch_s - one.microbatch_s) / (_MANY - 1), 1e-9)
    times = LayerTimes(
        tokens=tokens,
        layer_s=layer_s,
        embedding_s=max(begin.microbatch_s - one.microbatch_s, 0.0),
        head_s=max(end.microbatch_s - one.microbatch_s, 0.0),
        call_s=max(one.microbatch_s - layer_s, 0.0),
        update_s=many.update_s / many.parameters,
        flops_per_s=3 * layer_flops(spec.model, training.sequence_length) * tokens / layer_s,
    )
    held = (many.passage.held - one.passage.held) // (_MANY - 1)
    return Measured(times, held, many.passage.peak)


def _alone(spec: StageSpec, layers: int, *, first: bool, last: bool) -> StageSpec:
    """A stage with so many layers, of a run like that of `spec` without other layers."""
    model = spec.model.model_copy(update={"num_layers": layers})
    cut = (*[0] * (not first), layers, *[0] * (not last))
    update = {"stage": int(not first), "model": model, "cut": Cut.model_construct(stages=len(cut), layers=cut)}
    return spec.model_copy(update=update)


def _run(spec: StageSpec, device: str, memory: MemoryPolicy) -> _Found:
    alone, on = OneRank(), torch.device(device)
    rank = RankStage(spec, MeshLayout(devices=(device,)), 0, tensor=alone, data=alone, device=on, memory=memory)
    rank.reset(rank.canonical.initial(None))
    training, model, drawn = spec.training, spec.model, torch.Generator().manual_seed(1)
    rows, length = training.microbatch_size, training.sequence_length
    tokens = torch.randint(model.vocab_size, (rows, length + 1), generator=drawn, dtype=torch.int32)
    boundary = torch.randn((rows, length, model.hidden_size), generator=drawn)
    index = 0

    def microbatch(meter: LiveBytes | None = None) -> list[tuple[int, ...]]:
        """Forward, backward and weight pass; what each allocates, if somebody asks."""
        nonlocal index
        index += 1
        deltas, work = [], None

        def done() -> None:
            deltas.append(meter.take() if meter is not None else ())

        _, work = rank.forward(0, tokens.to(on), None if spec.first else boundary.to(on), train=True)
        assert isinstance(work, ForwardPass)
        done()
        rank.backward(work, None if spec.last else 1e-3 * boundary.to(on))
        done()
        rank.accumulate(work, step=0, index=index, voids=0)
        del work
        done()
        return deltas

    microbatch()  # makes what later ones find
    with LiveBytes() as meter:
        passage = Passage.of(*microbatch(meter))
    seconds = _timed(microbatch, on)
    total: Tensor = rank.sums[0].read(0).clone()
    updates = _timed(lambda: rank.update(0, total, scale=1e-6, rate=1e-6), on)
    return _Found(seconds, updates, passage, rank.canonical.num_elements)


def _timed(job: Callable[[], object], device: torch.device) -> float:
    """Seconds of one, the median of several. On one core those of that core, whatever else runs beside."""
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


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Inside `with`, counts the bytes of storages that operators make, from allocation to last reference.

    Only those of its own thread, and nothing that a kernel takes inside itself.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._deltas: list[int] = []

    def take(self) -> tuple[int, ...]:
        """What was allocated (+) and freed (-) since the last call, one after the other."""
        taken = tuple(self._deltas)
        self._deltas.clear()
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, Tensor):
                self._meet(leaf)
        return out

    def _meet(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        # A view shares its storage, which is counted already.
        if key in self._seen or not size:
            return

        def gone(_: Any) -> None:
            del self._seen[key]
            self._deltas.append(-size)

        self._seen[key] = weakref.ref(storage, gone)
        self._deltas.append(size)
