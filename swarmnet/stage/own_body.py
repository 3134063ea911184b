"""A stage on one device, computed in this process: `stage.body` as module, accumulators and optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnet.manifest.schema import Manifest
from swarmnet.stage.accumulator import Accumulator, sum_dtype
from swarmnet.stage.body import Watcher
from swarmnet.stage.canonical import Initial
from swarmnet.stage.passes import ForwardPass, MemoryPolicy, Passes
from swarmnet.stage.replica_state import ReplicaState


class OwnBody:
    """`stage.body.Body` on `device`."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        *,
        device: torch.device,
        initial: Initial | None = None,
        memory: MemoryPolicy | None = None,
    ) -> None:
        self.device, self._dtype = device, sum_dtype(manifest.numerics)
        offload = memory is not None and memory.offload_optimizer
        self.state = ReplicaState(manifest, stage, device=device, initial=initial, offload=offload)
        self._passes = Passes(
            first=self.state.first,
            last=self.state.last,
            device=device,
            reproducible=manifest.numerics.mode == "deterministic",
            memory=memory,
            compute=manifest.numerics.compute,
        )
        self.sums = [
            Accumulator(
                self.state.canonical.num_elements,
                manifest.numerics,
                max_microbatches=manifest.training.microbatches,
                device=device,
            )
            for _ in range(1 + self.state.delay.most)
        ]

    def watch(self, watcher: Watcher) -> None:
        """Nothing happens by itself here."""

    def start(self) -> None:
        """Everything is here."""

    def close(self) -> None:
        """Nothing was started."""

    def sum_memory(self) -> Tensor:
        """Memory for one finished sum: on the CPU, where pieces come from the network and are hashed. On a device each
        piece would wait for whatever the compute thread has queued there."""
        size, pinned = self.state.canonical.num_elements, self.device.type == "cuda"
        return torch.zeros(size, dtype=self._dtype, pin_memory=pinned)

    def forward(
        self, step: int, tokens: Tensor, hidden: Tensor | None, *, train: bool
    ) -> tuple[Tensor, ForwardPass | None]:
        return self._passes.forward(self.state.module(step), tokens, hidden, train=train)

    def backward(self, work: object, gradient: Tensor | None) -> Tensor | None:
        assert isinstance(work, ForwardPass)
        return self._passes.backward(work, gradient)

    def accumulate(self, work: object, *, step: int, index: int, voids: int) -> bool:
        assert isinstance(work, ForwardPass)
        if not work.went_back or work.tape is None:
            raise ValueError(f"no gradient to add: microbatch {step}/{index}")
        tape, work.tape = work.tape, None
        gradients = self.state.gradients(tape)
        return self.sums[step % len(self.sums)].add(gradients, step=step, index=index, voids=voids)
