"""A stage on one device, in this process: `stage.backend` as one rank that is alone (`ranks.stage`). No threads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swarmnet.manifest.schema import StageSpec
from swarmnet.ranks.comm import FakeComm
from swarmnet.ranks.host_state import StageState
from swarmnet.ranks.layout import MeshLayout
from swarmnet.ranks.memory import host_memory
from swarmnet.ranks.past import PastSteps
from swarmnet.ranks.stage import RankStage
from swarmnet.stage.accumulator import sum_dtype
from swarmnet.stage.backend import OnEvent
from swarmnet.stage.canonical import Initial
from swarmnet.stage.passes import ForwardPass, MemoryPolicy

_NOBODY = FakeComm(0, 1)
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
        self._rank = RankStage(spec, layout, 0, tensor=_NOBODY, data=_NOBODY, device=self.device, memory=memory)
        self.sums, self.writes_at_once = self._rank.sums, memory.writes_at_once
        self.past = PastSteps(self._rank)
        self.watch(lambda: None, lambda event, fields: None)
        self.state = StageState(self._rank.canonical, self._rank, self._rank.scales, initial)

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
        return host_memory(
            self.state.canonical.num_elements, sum_dtype(self._rank.spec.numerics), device=self.device, owner=self
        )

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
            if any(total.torn for total in self.sums):
                for total in self.sums:
                    total.lose()
                self._lost()
            raise
