"""Microbatches of the last steps again, on one device: `stage.backend.Past` beside a rank that is alone.

Before an update the weights of its step go to host memory, with the scales that its gradients were rounded by. To
compute a microbatch of that step again they are copied into a spare module; all else is what open steps use, so what
comes out is equal bit by bit. The spare module is there while somebody computes again: one more copy of the weights on
the device, and of their casts. Compute thread only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnet.model.decoder import StageModule
from swarmnet.ranks.memory import host_memory
from swarmnet.ranks.stage import RankStage
from swarmnet.stage.accumulator import Accumulator
from swarmnet.stage.gradients import WholeGradients
from swarmnet.stage.passes import ForwardPass, Passes

KEPT_WEIGHTS = 4
"""Weights of so many steps stay: a case is drawn two steps later, and others judge it after that."""


@dataclass(slots=True)
class _Spare:
    """step: whose weights it has; -1: of none."""

    module: StageModule
    passes: Passes
    gradients: WholeGradients
    step: int = -1


@dataclass(frozen=True, slots=True)
class _PastWork:
    """A microbatch on that module, which is there for as long as this is."""

    spare: _Spare
    saved: ForwardPass


class PastSteps:
    """The last steps of `rank`. kept_bytes: of host memory."""

    def __init__(self, rank: RankStage) -> None:
        self._rank, self._steps = rank, 0
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._free: list[Tensor] = []
        self._spare: _Spare | None = None

    @property
    def kept_bytes(self) -> int:
        return sum(flat.nbytes for flat in (*self._free, *(flat for flat, _ in self._kept.values())))

    def keep(self, steps: int) -> None:
        self._steps = steps

    @torch.no_grad()
    def note(self, step: int) -> None:
        if not self._steps:
            return
        for other in [other for other in self._kept if not step - self._steps < other < step]:
            self._free.append(self._kept.pop(other)[0])
        weights = list(self._rank.module_of(step).parameters())
        # Taken once, and written over from then on: pinning takes longer than a copy.
        flat = self._free.pop() if self._free else self._memory(weights)
        for kept, live in zip(_pieces(flat, weights), weights, strict=True):
            kept.copy_(live)
        self._kept[step] = flat, self._rank.scales_of(step).clone()

    def forget(self) -> None:
        self._free += [flat for flat, _ in self._kept.values()]
        self._kept.clear()
        # Steps have their numbers again, and other weights.
        if self._spare is not None:
            self._spare.step = -1

    def holds(self, step: int) -> bool:
        return step in self._kept

    def forward(self, step: int, tokens: Tensor, hidden: Tensor | None) -> tuple[Tensor, object]:
        spare = self._with_weights(step)
        output, work = spare.passes.forward(spare.module, tokens, hidden, train=True)
        assert work is not None
        return output.detach(), _PastWork(spare, work)

    def backward(self, work: object, gradient: Tensor | None) -> Tensor | None:
        assert isinstance(work, _PastWork)
        return work.spare.passes.backward(work.saved, gradient)

    def share(self) -> Accumulator:
        return self._rank.new_sum()

    def accumulate(self, work: object, share: Accumulator, *, step: int, index: int) -> float:
        assert isinstance(work, _PastWork) and work.saved.tape is not None
        gradients = work.spare.gradients.of(work.saved.tape)
        rounding = self._rank.rounding_by(step, self._kept[step][1])
        share.add(gradients, rounding, step=step, index=index, voids=share.voids)
        # Integers are equal or not, however long.
        exact = self._rank.spec.numerics.mode == "deterministic"
        return 0.0 if exact else math.hypot(*(_length(gradient) for gradient in gradients))

    def release(self) -> None:
        self._spare = None

    @torch.no_grad()
    def _with_weights(self, step: int) -> _Spare:
        if self._spare is None:
            self._spare = _Spare(*self._rank.spare())
        if self._spare.step != step:
            weights = list(self._spare.module.parameters())
            for kept, live in zip(_pieces(self._kept[step][0], weights), weights, strict=True):
                live.copy_(kept)
            self._spare.step = step
        return self._spare

    def _memory(self, weights: list[torch.nn.Parameter]) -> Tensor:
        size = sum(weight.numel() for weight in weights)
        return host_memory(size, torch.float32, device=weights[0].device, owner=self)


def _length(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64).item())


def _pieces(flat: Tensor, weights: list[torch.nn.Parameter]) -> Iterator[Tensor]:
    """Views of all elements, in the order and the shapes of `weights`."""
    for piece, weight in zip(torch.split(flat, [weight.numel() for weight in weights]), weights, strict=True):
        yield piece.view(weight.shape)
