"""Microbatches of the last steps again: `stage.backend.Past` of a rank that is alone, and any rank's part in it.

Before an update the weights of its step go to host memory, with the scales that its gradients were rounded by. To
compute a microbatch of that step again they are copied into a spare module; all else is what open steps use, so what
comes out is equal bit by bit. The spare module is there while somebody computes again: one more copy of the weights on
the device, and of their casts. Compute thread only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnet.ranks.kept import KeptSteps
from swarmnet.ranks.memory import host_memory
from swarmnet.ranks.stage import RankStage
from swarmnet.stage.accumulator import Accumulator
from swarmnet.stage.backend import PastShare


@dataclass(frozen=True, slots=True)
class StepWeights:
    """Weights of a step, whole, flat and in canonical order, and its scales. number: equal for equal weights only."""

    number: int
    flat: Tensor
    scales: Tensor


class Recomputation:
    """One rank's spare module, and what it has added to shares. The memory of both is free once this is dropped."""

    def __init__(self, rank: RankStage) -> None:
        self._rank, self._spare, self._has = rank, rank.spare(), -1
        self._shares: dict[int, Accumulator] = {}

    def run(
        self,
        weights: StepWeights,
        step: int,
        index: int,
        tokens: Tensor,
        hidden: Tensor | None,
        gradient: Tensor | None,
        share: int | None,
    ) -> tuple[Tensor, Tensor | None, float]:
        """Output and input gradient of this rank's rows of microbatch `index`; and, if its gradients were added to
        share number `share`, their length (`RankStage.add_again`)."""
        if self._has != weights.number:
            self._rank.load(self._spare, weights.flat)
            self._has = weights.number
        output, own, work = self._rank.again(self._spare, tokens, hidden, gradient)
        if share is None:
            return output, own, 0.0
        total, scales = self.share(share), weights.scales
        return output, own, self._rank.add_again(self._spare, work, total, scales, step=step, index=index)

    def share(self, number: int) -> Accumulator:
        """The sum that is share number `number`."""
        if number not in self._shares:
            self._shares[number] = self._rank.new_sum()
        return self._shares[number]


class PastSteps:
    """The last steps of `rank`. kept_bytes: of host memory."""

    def __init__(self, rank: RankStage) -> None:
        self._rank, self._steps = rank, KeptSteps[tuple[Tensor, Tensor]](self._memory)
        self._begun = 0
        self._again: Recomputation | None = None

    @property
    def kept_bytes(self) -> int:
        return sum(flat.nbytes for flat, _ in self._steps.taken)

    def keep(self, steps: int) -> None:
        self._steps.keep(steps)

    @torch.no_grad()
    def note(self, step: int) -> None:
        room = self._steps.room(step)
        if room is None:
            return
        flat, scales = room
        weights = list(self._rank.module_of(step).parameters())
        pieces = torch.split(flat, [weight.numel() for weight in weights])
        for kept, live in zip(pieces, weights, strict=True):
            kept.view(live.shape).copy_(live)
        scales.copy_(self._rank.scales_of(step))

    def forget(self) -> None:
        self._steps.forget()

    def holds(self, step: int) -> bool:
        return self._steps.get(step) is not None

    def again(
        self,
        step: int,
        index: int,
        tokens: Tensor,
        hidden: Tensor | None,
        gradient: Tensor | None,
        share: PastShare | None,
    ) -> tuple[Tensor, Tensor | None]:
        kept = self._steps.get(step)
        assert kept is not None, step
        weights = StepWeights(kept[0], *kept[1])
        number = None if share is None else share.number
        output, own, length = self._recomputation.run(weights, step, index, tokens, hidden, gradient, number)
        if share is not None:
            share.lengths += length
        return output, own

    def share(self, step: int) -> PastShare:
        self._begun += 1
        return PastShare(step, self._begun)

    def read(self, share: PastShare) -> Tensor:
        return self._recomputation.share(share.number).read(share.step)

    def release(self) -> None:
        self._again = None

    @property
    def _recomputation(self) -> Recomputation:
        if self._again is None:
            self._again = Recomputation(self._rank)
        return self._again

    def _memory(self) -> tuple[Tensor, Tensor]:
        weights, scales = list(self._rank.module_of(0).parameters()), self._rank.scales_of(0)
        size = sum(weight.numel() for weight in weights)
        return host_memory(size, torch.float32, device=weights[0].device, owner=self), torch.empty_like(scales)
