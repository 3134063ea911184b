"""A stage on one device, in this process: `stage.backend` as one rank that is alone (`ranks.stage`). No threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from swarmnet.manifest.schema import StageSpec
from swarmnet.ranks.comm import FakeComm
from swarmnet.ranks.layout import MeshLayout
from swarmnet.ranks.memory import host_memory
from swarmnet.ranks.stage import RankStage, Recomputation
from swarmnet.stage.accumulator import sum_dtype
from swarmnet.stage.backend import OnEvent, PastShare
from swarmnet.stage.canonical import Initial
from swarmnet.stage.passes import ForwardPass, MemoryPolicy
from swarmnet.stage.state import PastSteps, PastWeights, State

_ALONE = FakeComm(0, 1)
"""The group of a rank that is alone, in which nothing is ever exchanged."""


class DeviceBackend:
    """`stage.backend.StageBackend` on `device`."""

    apart = False

    def __init__(
        self,
        spec: StageSpec,
        *,
        device: str | torch.device = "cpu",
        initial: Initial | None = None,
        memory: MemoryPolicy | None = None,
    ) -> None:
        self.device, memory = torch.device(device), memory or MemoryPolicy()
        layout = MeshLayout(devices=(str(device),))
        self._rank = rank = RankStage(spec, layout, 0, tensor=_ALONE, data=_ALONE, device=self.device, memory=memory)
        self.sums, self.writes_at_once = rank.sums, memory.writes_at_once
        self._recomputation: Recomputation | None = None
        self._shares = itertools.count()
        num_elements = rank.canonical.num_elements
        self.past = PastSteps(
            num_elements,
            allot=lambda place: self._host_memory(num_elements + rank.scales_of(0).numel(), torch.float32),
            read=lambda step: [*rank.weights_of(step), rank.scales_of(step)],
        )
        self.watch(lambda: None, lambda event, fields: None)
        self.state = State(rank.canonical, rank, rank.scales, initial)

    def watch(self, lost: Callable[[], None], event: OnEvent) -> None:
        """Nothing happens by itself here, but a sum may be torn."""
        self._lost = lost

    def start(self) -> None:
        """Everything is here."""

    def close(self) -> None:
        """Nothing was started."""

    def sum_memory(self) -> Tensor:
        """Memory for one finished sum: on the CPU, where pieces come from the network and are hashed. On a device each
        piece would wait for whatever the compute thread has queued there."""
        return self._host_memory(self.state.canonical.num_elements, sum_dtype(self._rank.spec.numerics))

    def _host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        return host_memory(size, dtype, device=self.device, owner=self)

    def forward(
        self, step: int, tokens: Tensor, hidden: Tensor | None, *, train: bool
    ) -> tuple[Tensor, ForwardPass | None]:
        return self._rank.forward(step, tokens, hidden, train=train)

    def backward(self, work: object, gradient: Tensor | None) -> Tensor | None:
        assert isinstance(work, ForwardPass)
        return self._rank.backward(work, gradient)

    def accumulate(self, work: object, *, step: int, index: int, voids: int) -> bool:
        assert isinstance(work, ForwardPass)
        try:
            return self._rank.accumulate(work, step=step, index=index, voids=voids)
        except torch.OutOfMemoryError:
            # Told like sums that are lost with ranks: those of all open steps are.
            if any(total.lost for total in self.sums):
                for total in self.sums:
                    total.lose()
                self._lost()
            raise

    # ------------------------------------------------------------ steps that are over

    def new_share(self, step: int) -> PastShare:
        return PastShare(step, next(self._shares))

    def recompute(
        self,
        weights: PastWeights,
        index: int,
        tokens: Tensor,
        hidden: Tensor | None,
        gradient: Tensor | None,
        share: PastShare | None,
    ) -> tuple[Tensor, Tensor | None]:
        work = index, tokens, hidden, gradient, None if share is None else share.number
        return self._past_stage().run(weights, *work)

    def read_share(self, share: PastShare) -> Tensor:
        return self._past_stage().share(share.number).read(share.step)

    def end_recomputing(self) -> None:
        self._recomputation = None

    def _past_stage(self) -> Recomputation:
        self._recomputation = again = self._recomputation or self._rank.recomputation()
        return again
