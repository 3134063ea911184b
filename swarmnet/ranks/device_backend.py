"""A stage on one device, in this process: `stage.backend` as one rank that is alone (`ranks.stage`). No threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from swarmnet.manifest.schema import StageSpec
from swarmnet.ranks.comm import OneRank
from swarmnet.ranks.layout import MeshLayout
from swarmnet.ranks.memory import host_memory
from swarmnet.ranks.stage import RankStage
from swarmnet.stage.accumulator import Accumulator, sum_dtype
from swarmnet.stage.canonical import Initial
from swarmnet.stage.passes import ForwardPass, MemoryPolicy
from swarmnet.stage.state import PastSteps, State
from swarmnet.telemetry.kinds import OnEvent


class DeviceBackend(RankStage):
    """`stage.backend.StageBackend` on `device`."""

    apart = False

    def __init__(
        self,
        spec: StageSpec,
        *,
        device: str | torch.device = "cpu",
        initial: Initial | None = None,
        memory: MemoryPolicy | None = None,
        base: Path | None = None,
    ) -> None:
        layout, memory = MeshLayout(devices=(str(device),)), memory or MemoryPolicy()
        alone, on = OneRank(), torch.device(device)
        super().__init__(spec, layout, tensor=alone, data=alone, device=on, memory=memory, base=base)
        self.writes_at_once = memory.writes_at_once
        size = self.canonical.num_elements + self.scales[0].numel()
        self.past = PastSteps(
            allot=lambda place: host_memory(size, torch.float32, device=on, owner=self),
            read=lambda step: [*self.weights_of(step), self.scales[step % len(self.scales)]],
        )
        self.watch(lambda: None, lambda event, fields: None)
        self.state = State(self.canonical, self, self.scales, initial)

    def watch(self, lost: Callable[[], None], event: OnEvent) -> None:
        """Nothing happens by itself here, but a sum may be lost."""
        self._lost = lost

    def start(self) -> None:
        """Everything is here."""

    def close(self) -> None:
        """Nothing was started."""

    def sum_memory(self) -> Tensor:
        """Memory for one finished sum: on the CPU, where pieces come from the network and are hashed. On a device each
        piece would wait for whatever the compute thread has queued there."""
        dtype = sum_dtype(self.spec.numerics)
        return host_memory(self.canonical.num_elements, dtype, device=self.device, owner=self)

    def accumulate(self, work: ForwardPass, *, step: int, index: int, discards: int) -> bool:
        try:
            return super().accumulate(work, step=step, index=index, discards=discards)
        except torch.OutOfMemoryError:
            # Told like sums that are lost with ranks: those of all open steps are.
            if any(total.lost for total in self.sums):
                for total in self.sums:
                    total.lose()
                self._lost()
            raise

    def read_share(self, share: Accumulator, step: int) -> Tensor:
        return share.read(step)
